//! Files of the browser, as the source of a model.

use std::{cell::RefCell, collections::BTreeMap, path::PathBuf, sync::Arc};

use js_sys::{Object, Reflect, Uint8Array};
use kiln::{
    Error, Result,
    expert::{
        TensorFile,
        source::{Answer, Source, SourceFile},
    },
};
use wasm_bindgen::prelude::*;

/// Bytes that are read at once: each read is a call to JavaScript, and rows of weights are small.
const READ_AT_ONCE: usize = 1 << 20;

#[wasm_bindgen]
extern "C" {
    /// An object that reads without waiting, as a `FileSystemSyncAccessHandle` of the private file system
    /// does in a worker.
    #[derive(Debug)]
    pub type Handle;
    #[wasm_bindgen(method, catch)]
    fn read(this: &Handle, into: &Uint8Array, options: &Object) -> Result<f64, JsValue>;
    #[wasm_bindgen(method, catch, js_name = getSize)]
    fn get_size(this: &Handle) -> Result<f64, JsValue>;
}

/// A file with its name in the folder of the model.
#[wasm_bindgen]
#[derive(Debug)]
pub struct WebFile {
    name: String,
    handle: Handle,
}

#[wasm_bindgen]
impl WebFile {
    /// Names a file. A `/` in a name stands for a folder.
    #[wasm_bindgen(constructor)]
    pub fn new(name: String, handle: Handle) -> Self {
        Self { name, handle }
    }
}

thread_local! {
    /// The open files. Objects of JavaScript stay in their thread, and a source of Kiln is shared between
    /// threads: it names them by their number.
    static OPEN: RefCell<BTreeMap<u32, Reader>> = const { RefCell::new(BTreeMap::new()) };
}

/// A file, and the part of it that was read last.
struct Reader {
    handle: Handle,
    buffer: Uint8Array,
    begin: u64,
    held: usize,
}

impl Reader {
    /// Fills `bytes` from offset `at`.
    fn read(&mut self, at: u64, bytes: &mut [u8]) -> std::result::Result<(), String> {
        let mut done = 0;
        while done < bytes.len() {
            let from = at + done as u64;
            if from < self.begin || from >= self.begin + self.held as u64 {
                self.fill(from)?;
            }
            let skipped = (from - self.begin) as usize;
            let now = (self.held - skipped).min(bytes.len() - done);
            let (begin, end) = (skipped as u32, (skipped + now) as u32);
            self.buffer.subarray(begin, end).copy_to(&mut bytes[done..done + now]);
            done += now;
        }
        Ok(())
    }

    fn fill(&mut self, from: u64) -> std::result::Result<(), String> {
        let options = Object::new();
        let is_set = Reflect::set(&options, &"at".into(), &(from as f64).into());
        let read = is_set.and_then(|_| self.handle.read(&self.buffer, &options));
        let read = read.map_err(|e| format!("cannot be read: {}", text(&e)))? as usize;
        (self.begin, self.held) = (from, read.min(self.buffer.length() as usize));
        match self.held {
            0 => Err("became shorter while it was read".to_owned()),
            _ => Ok(()),
        }
    }
}

/// The message of what JavaScript threw.
fn text(thrown: &JsValue) -> String {
    let error = thrown.dyn_ref::<js_sys::Error>().map(|error| String::from(error.message()));
    error.unwrap_or_else(|| format!("{thrown:?}"))
}

/// The files of a model. They are closed with the last of them.
#[derive(Debug)]
pub(crate) struct WebSource {
    name: String,
    files: BTreeMap<String, Arc<Numbered>>,
}

impl WebFile {
    /// Opens the file.
    ///
    /// # Errors
    /// [`Error::File`] if it is damaged, or no file of tensors.
    pub(crate) fn tensors(self) -> Result<TensorFile> {
        let file = self.numbered()?;
        TensorFile::new(&file.path.clone(), file)
    }

    fn numbered(self) -> Result<Arc<Numbered>> {
        let Self { name, handle } = self;
        let path = PathBuf::from(name);
        let size = handle
            .get_size()
            .map_err(|e| Error::File { path: path.clone(), why: format!("has no size: {}", text(&e)) })?;
        let buffer = Uint8Array::new_with_length(READ_AT_ONCE.min((size as usize).max(1)) as u32);
        let number = OPEN.with_borrow_mut(|open| {
            let number = open.last_key_value().map_or(0, |(number, _)| number + 1);
            open.insert(number, Reader { handle, buffer, begin: 0, held: 0 });
            number
        });
        Ok(Arc::new(Numbered { number, path, size: size as u64 }))
    }
}

/// A file by its number.
#[derive(Debug)]
struct Numbered {
    number: u32,
    path: PathBuf,
    size: u64,
}

impl WebSource {
    /// Takes the files of the model `name`.
    ///
    /// # Errors
    /// [`Error::File`] if a file does not tell its size.
    pub(crate) fn new(name: String, files: Vec<WebFile>) -> Result<Self> {
        let opened = files.into_iter().map(|file| Ok((file.name.clone(), file.numbered()?)));
        Ok(Self { name, files: opened.collect::<Result<_>>()? })
    }
}

impl Source for WebSource {
    fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(if name.is_empty() { &self.name } else { name })
    }

    fn open(&self, name: &str) -> Answer<'_, Result<Option<Arc<dyn SourceFile>>>> {
        Answer::Now(Ok(self.files.get(name).map(|file| file.clone() as Arc<dyn SourceFile>)))
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let within = |name: &String| match folder {
            "" => Some(name.clone()),
            folder => Some(name.strip_prefix(folder)?.strip_prefix('/')?.to_owned()),
        };
        self.files.keys().filter_map(within).filter(|name| !name.contains('/')).collect()
    }
}

impl SourceFile for Numbered {
    fn size(&self) -> u64 {
        self.size
    }

    fn read<'a>(&'a self, at: u64, bytes: &'a mut [u8]) -> Answer<'a, Result<()>> {
        let read = OPEN.with_borrow_mut(|open| match open.get_mut(&self.number) {
            Some(reader) => reader.read(at, bytes),
            None => Err("is closed".to_owned()),
        });
        Answer::Now(read.map_err(|why| Error::File { path: self.path.clone(), why }))
    }
}

impl Drop for Numbered {
    fn drop(&mut self) {
        OPEN.with_borrow_mut(|open| open.remove(&self.number));
    }
}
