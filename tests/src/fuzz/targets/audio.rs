//! Audio files: each is read to the end, twice.

use std::{fs, path::Path};

use kiln::expert::audio::{AudioReader, LogMel};

use crate::fuzz::{Run, Target, mutate::Format};

pub(in crate::fuzz) const TARGET: Target = Target { name: "audio", format: Format::Bytes, seeds, prepare };

/// Maximum number of blocks that are read from one file: in some formats a few bytes can encode an hour of
/// silence.
const MOST_BLOCKS: usize = 1000;

fn seeds() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/audio");
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let is_audio = |path: &Path| {
        let extension = path.extension().and_then(|extension| extension.to_str());
        matches!(extension, Some("wav" | "mp3" | "flac" | "ogg" | "m4a" | "mp4"))
    };
    files.iter().filter(|path| is_audio(path)).map(|path| fs::read(path).unwrap()).collect()
}

fn prepare(_: &Path) -> Run {
    let mel = LogMel::new(80).unwrap();
    Box::new(move |input| {
        let Ok(mut reader) = AudioReader::from_stream("input", input) else { return false };
        let mut read = || {
            let (mut samples, mut stream) = (0, mel.stream());
            for block in reader.by_ref().take(MOST_BLOCKS).map_while(Result::ok) {
                samples += block.len();
                assert!(block.iter().all(|sample| !sample.is_nan()));
                if stream.push(&block).is_err() {
                    break;
                }
            }
            let (_, loudest) = stream.finish();
            assert!(loudest.is_finite());
            let told = (samples, reader.damage(), reader.seconds().map(f64::to_bits));
            reader.rewind().map(|()| told)
        };
        assert_eq!(read(), read(), "a second reading is the first");
        true
    })
}
