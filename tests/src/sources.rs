//! Models from memory, and from sources that answer later.

use std::{fs, path::Path, sync::Arc};

use kiln::{
    Mixture, Model, ModelBuilder, Result,
    expert::{
        read_back::yield_now,
        source::{Answer, MemorySource, Source, SourceFile},
    },
};

use crate::{
    checkpoints::{copy_of, cpu, shard},
    support::{float32, greedy},
};

/// Reads all files directly in a folder.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    entries.filter(|path| path.is_file()).map(|path| (named(&path), fs::read(path).unwrap())).collect()
}

fn demo() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../assets/demo")
}

/// Returns the tokens that a model generates, and its name for its weights.
fn generated(builder: ModelBuilder<'_>) -> (Vec<u32>, String) {
    let model = float32(builder, &cpu()).load().unwrap();
    let steps = model.generate(vec![1, 2, 3]).config(greedy(16)).steps().unwrap();
    let tokens = steps.flat_map(|step| step.unwrap().tokens).flatten().collect();
    (tokens, model.fingerprint().unwrap().to_owned())
}

#[track_caller]
fn refused(files: Vec<(String, Vec<u8>)>) -> String {
    match float32(ModelBuilder::from_bytes(files), &cpu()).load() {
        Ok(_) => panic!("it loads"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_model_in_memory_gives_the_tokens_of_its_folder() {
    let folder = demo();
    let text = |model: Model| model.generate("The Constitution").max_new_tokens(9).seed(7).text().unwrap();
    let from_folder = float32(Model::builder(&folder), &cpu()).load().unwrap();
    let from_memory = float32(ModelBuilder::from_bytes(files(&folder)), &cpu()).load().unwrap();
    assert_eq!((from_folder.name(), from_memory.name()), ("demo", "memory"));
    assert_eq!(from_memory.fingerprint(), from_folder.fingerprint());
    assert_eq!(text(from_memory), text(from_folder));

    let folder = copy_of("llama");
    let want = generated(Model::builder(folder.path()));
    assert_eq!(generated(ModelBuilder::from_bytes(files(folder.path()))), want);
    shard(folder.path());
    assert_eq!(generated(ModelBuilder::from_bytes(files(folder.path()))), want);
}

#[test]
fn a_gguf_file_in_memory_gives_the_tokens_of_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("demo.gguf");
    kiln::quantize(demo(), &path, Mixture::Q8_0, |_| std::ops::ControlFlow::Continue(())).unwrap();
    let want = generated(Model::builder(&path));
    let mut bytes = files(folder.path());
    assert_eq!(generated(ModelBuilder::from_bytes(bytes.clone())), want);

    let mut cut = bytes.clone();
    cut[0].1.truncate(bytes[0].1.len() - 1);
    let why = refused(cut);
    assert!(why.starts_with("demo.gguf: ") && why.contains("it ends, after"), "{why}");
    let another = bytes[0].1.clone();
    bytes.push(("other.gguf".to_owned(), another));
    let why = refused(bytes);
    assert!(why.contains("holds `demo.gguf` and `other.gguf`, which are two models"), "{why}");
}

#[test]
fn missing_and_truncated_files_in_memory_are_errors_that_name_them() {
    let folder = copy_of("llama");
    let without = |name: &str| {
        let mut files = files(folder.path());
        files.retain(|(file, _)| file != name);
        refused(files)
    };
    assert!(without("config.json").starts_with("memory: has no config.json"), "{}", without("config.json"));
    let why = without("model.safetensors");
    assert!(why.starts_with("memory: there is no model.safetensors"), "{why}");
    let mut cut = files(folder.path());
    let weights = cut.iter_mut().find(|(name, _)| name == "model.safetensors").unwrap();
    weights.1.pop();
    let why = refused(cut);
    assert!(why.starts_with("model.safetensors: is not a whole safetensors file"), "{why}");
    shard(folder.path());
    let why = without("model-1.safetensors");
    assert!(why.starts_with("model-1.safetensors: there is no such file"), "{why}");
}

/// Files that are farther away than memory.
#[derive(Debug)]
struct Slow(MemorySource);

#[derive(Debug)]
struct SlowFile(Arc<dyn SourceFile>);

impl Source for Slow {
    fn path(&self, name: &str) -> std::path::PathBuf {
        self.0.path(name)
    }

    fn open(&self, name: &str) -> Answer<'_, Result<Option<Arc<dyn SourceFile>>>> {
        let name = name.to_owned();
        Answer::Later(Box::pin(async move {
            yield_now().await;
            let file = self.0.open(&name).wait()?;
            Ok(file.map(|file| Arc::new(SlowFile(file)) as Arc<dyn SourceFile>))
        }))
    }

    fn names(&self, folder: &str) -> Vec<String> {
        self.0.names(folder)
    }
}

impl SourceFile for SlowFile {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read<'a>(&'a self, at: u64, bytes: &'a mut [u8]) -> Answer<'a, Result<()>> {
        Answer::Later(Box::pin(async move {
            yield_now().await;
            self.0.read(at, bytes).wait()
        }))
    }
}

#[test]
fn a_source_may_answer_asynchronously() {
    let folder = copy_of("llama");
    let slow = Slow(MemorySource::new(files(folder.path())));
    let want = generated(Model::builder(folder.path()));
    assert_eq!(generated(ModelBuilder::from_source(Arc::new(slow))), want);
}

#[cfg(unix)]
#[test]
fn a_file_whose_name_is_not_utf_8_is_an_error_that_says_so() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(OsStr::from_bytes(b"model\xff.gguf"));
    fs::write(&path, "GGUF").unwrap();
    let error = Model::builder(&path).load().unwrap_err();
    assert!(error.to_string().contains("has a name that is not UTF-8; rename it"), "{error}");
}
