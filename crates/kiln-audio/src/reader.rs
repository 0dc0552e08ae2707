//! Audio input from files and streams.

mod decoder;
mod lengths;

use std::{
    fmt,
    fs::File,
    io::{self, Cursor, Read, Seek},
    path::{Path, PathBuf},
    sync::Arc,
};

use kiln_core::{Error, Result, files};
use symphonia::core::io::MediaSource;

use crate::{SAMPLE_RATE, resample::Resampler};
use decoder::Decoder;
use lengths::Corrected;

/// Minimum number of samples in a block, unless it is the last one.
const BLOCK: usize = 4096;

/// Reads WAV (also RF64), MP3, FLAC, Ogg Vorbis and M4A (AAC, ALAC) as blocks of 16 kHz mono samples, mostly
/// from -1 to 1.
///
/// The reader is an iterator over blocks. Channels are averaged, and other sample rates are resampled. Memory
/// use does not grow with the file, and [`rewind`](Self::rewind) starts over. A damaged or truncated file
/// yields the samples that can be decoded, and [`damage`](Self::damage) describes what is missing. If a
/// length field was never written, or was not known when a stream was written, the actual length is used. A
/// file without samples yields no blocks. After an error there are no further blocks.
///
/// The encoder delay is removed from MP3 and Vorbis. It stays in AAC: 20 to 50 ms of silence at the
/// beginning.
pub struct AudioReader {
    /// Name of the file in errors
    name: PathBuf,
    source: Source,
    decoder: Decoder,
    /// `None` before the first block, and if no conversion is needed
    resampler: Option<Resampler>,
    is_over: bool,
}

/// Opens the source and positions it at its beginning.
type Source = Box<dyn Fn() -> io::Result<Box<dyn MediaSource>> + Send + Sync>;

type Bytes = dyn AsRef<[u8]> + Send + Sync;

/// Bytes that several readers share.
struct Shared(Arc<Bytes>);

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl AudioReader {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::File`] if it is not a regular file, cannot be read, is not audio of a known format, or has no
    /// audio track.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::of_file(path, files::open_to_seek(path)?)
    }

    /// Reads a stream, such as standard input, to its end. The stream is copied to a temporary file first,
    /// because some formats store their tables at the end. `name` stands for the file in errors.
    ///
    /// # Errors
    /// [`Error::File`] if the stream cannot be read or copied, and the errors of [`open`](Self::open).
    pub fn from_stream(name: &str, stream: impl Read) -> Result<Self> {
        let path = Path::new(name);
        let file = files::spool(stream).map_err(|why| Error::File { path: path.to_owned(), why })?;
        Self::of_file(path, file)
    }

    /// Reads a file in memory. `name` stands for it in errors, and its extension is a hint.
    ///
    /// # Errors
    /// [`Error::File`] if it is not audio of a known format, or has no audio track.
    pub fn from_bytes(name: &str, bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Result<Self> {
        let bytes: Arc<Bytes> = Arc::new(bytes);
        Self::new(Path::new(name), Box::new(move || Ok(Box::new(Cursor::new(Shared(bytes.clone()))))))
    }

    fn of_file(path: &Path, file: File) -> Result<Self> {
        // A cloned handle shares the file position; only one handle is in use at a time.
        Self::new(
            path,
            Box::new(move || {
                let mut file = file.try_clone()?;
                file.rewind()?;
                Ok(Box::new(file))
            }),
        )
    }

    fn new(path: &Path, source: Source) -> Result<Self> {
        let name = path.to_owned();
        let decoder = begin(&name, &source)?;
        Ok(Self { name, source, decoder, resampler: None, is_over: false })
    }

    /// Starts over with the first block.
    ///
    /// # Errors
    /// [`Error::File`] if the file has changed and can no longer be read.
    pub fn rewind(&mut self) -> Result<()> {
        self.decoder = begin(&self.name, &self.source)?;
        (self.resampler, self.is_over) = (None, false);
        Ok(())
    }

    /// Returns the duration in seconds that the file claims, for showing progress. It may be an estimate, or
    /// wrong.
    pub fn seconds(&self) -> Option<f64> {
        self.decoder.seconds()
    }

    /// Describes the damaged or missing parts found so far, in a sentence that names the file.
    pub fn damage(&self) -> Option<String> {
        Some(self.error(self.decoder.damage()?).to_string())
    }

    fn error(&self, why: String) -> Error {
        Error::File { path: self.name.clone(), why }
    }

    /// Reads the next block; an empty block marks the end.
    fn block(&mut self) -> Result<Vec<f32>, String> {
        let mut block = Vec::new();
        while block.len() < BLOCK && !self.is_over {
            let Some((samples, rate)) = self.decoder.next()? else {
                self.is_over = true;
                if let Some(resampler) = &mut self.resampler {
                    block.extend(resampler.finish()?);
                }
                break;
            };
            if rate as usize == SAMPLE_RATE {
                block.extend(samples);
                continue;
            }
            let resampler = match &mut self.resampler {
                Some(resampler) => resampler,
                none => none.insert(Resampler::new(rate)?),
            };
            block.extend(resampler.push(&samples)?);
        }
        Ok(block)
    }
}

fn begin(name: &Path, source: &Source) -> Result<Decoder> {
    let extension = name.extension().and_then(|extension| extension.to_str());
    let opened = source().and_then(Corrected::of).map_err(|e| format!("cannot be read: {e}"));
    let decoder = opened.and_then(|(source, unknown)| Decoder::new(source, extension, unknown));
    decoder.map_err(|why| Error::File { path: name.to_owned(), why })
}

impl Iterator for AudioReader {
    type Item = Result<Vec<f32>>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.block() {
            Ok(block) if block.is_empty() => None,
            Ok(block) => Some(Ok(block)),
            Err(why) => {
                self.is_over = true;
                Some(Err(self.error(why)))
            }
        }
    }
}

impl fmt::Debug for AudioReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AudioReader").field("name", &self.name).field("is_over", &self.is_over).finish()
    }
}

#[cfg(test)]
mod tests;
