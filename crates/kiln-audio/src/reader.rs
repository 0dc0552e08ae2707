//! Sound from files and streams.

mod decoder;
mod lengths;

use std::{
    fmt,
    io::{self, Read, Seek},
    path::{Path, PathBuf},
};

use kiln_core::{Error, Result, files};
use symphonia::core::io::MediaSource;

use crate::{SAMPLE_RATE, resample::Resampler};
use decoder::Decoder;
use lengths::Corrected;

/// Samples that a block has at least, unless it is the last one.
const BLOCK: usize = 4096;

/// Reads WAV (also RF64), MP3, FLAC, Ogg Vorbis and M4A (AAC, ALAC) as blocks of 16 kHz mono samples, mostly from -1 to 1.
///
/// It iterates over blocks. Channels are averaged, and other sample rates are converted. The memory it needs does not grow with the
/// file, and [`rewind`](Self::rewind) begins again. A file that is damaged or cut short gives what can be decoded of it, and
/// [`damage`](Self::damage) says what is missing. Lengths that a recorder never wrote, or that were not known to what wrote a stream, are those of
/// the bytes that are there. A file without a single sample gives no blocks. After an error there are no
/// further blocks.
///
/// The delay of the encoder is removed from MP3 and Vorbis. It stays in AAC: 20 to 50 ms of silence at the beginning.
pub struct AudioReader {
    /// What errors call it
    name: PathBuf,
    source: Source,
    decoder: Decoder,
    /// `None` before the first block, and where there is nothing to convert
    resampler: Option<Resampler>,
    is_over: bool,
}

/// Opens what is read, at its beginning.
type Source = Box<dyn Fn() -> io::Result<Box<dyn MediaSource>> + Send + Sync>;

impl AudioReader {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::File`] where it is no regular file, cannot be read, is not audio of a known format, or has no track of it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        Self::of_file(path, files::open_to_seek(path)?)
    }

    /// Reads a stream, such as standard input, to its end. It is copied to a temporary file first, because some formats
    /// have their tables at the end. Errors call it `name`.
    ///
    /// # Errors
    /// [`Error::File`] where it cannot be read or copied, and those of [`open`](Self::open).
    pub fn from_stream(name: &str, stream: impl Read) -> Result<Self> {
        let path = Path::new(name);
        let file = files::spool(stream).map_err(|why| Error::File { path: path.to_owned(), why })?;
        Self::of_file(path, file)
    }

    fn of_file(path: &Path, file: std::fs::File) -> Result<Self> {
        // A second handle has the position of the first; only one is in use at a time.
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

    /// Begins again with the first block.
    ///
    /// # Errors
    /// [`Error::File`] where the file has changed and cannot be read any more.
    pub fn rewind(&mut self) -> Result<()> {
        self.decoder = begin(&self.name, &self.source)?;
        (self.resampler, self.is_over) = (None, false);
        Ok(())
    }

    /// The length that the file claims to have, for showing progress. It may be an estimate, or wrong.
    pub fn seconds(&self) -> Option<f64> {
        self.decoder.seconds()
    }

    /// What was found damaged or missing so far: a sentence that names the file.
    pub fn damage(&self) -> Option<String> {
        Some(self.error(self.decoder.damage()?).to_string())
    }

    fn error(&self, why: String) -> Error {
        Error::File { path: self.name.clone(), why }
    }

    /// The next block; an empty one is the last.
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
