//! Speech to text, with the time of each word.
//! `cargo run --release --example transcribe WHISPER_FOLDER RECORDING..`

use std::path::PathBuf;

use kiln::{Audio, AudioReader, Model, Transcriber};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let usage = "usage: transcribe WHISPER_FOLDER RECORDING..; `python tools/speech.py fetch DIR` makes both";
    let folder = arguments.next().ok_or(usage)?;
    let recordings: Vec<PathBuf> = arguments.collect();
    if recordings.is_empty() {
        return Err(usage.into());
    }

    let model = Model::load(folder)?;
    let transcriber = Transcriber::new(&model)?.word_times(true)?;

    // One recording, segment by segment.
    let mut transcript = transcriber.transcribe(AudioReader::open(&recordings[0])?)?;
    while let Some(segment) = transcript.next() {
        let segment = segment?;
        println!("[{:6.2} - {:6.2}]{}", segment.start, segment.end, segment.text);
        for word in &segment.words {
            print!(" {}@{:.2}", word.text.trim(), word.start);
        }
        println!("\n({:.0?} of {:.0?})", transcript.progress().0, transcript.progress().1);
    }

    // Several recordings at once: their windows are processed as one batch.
    let readers: Result<Vec<Audio>, _> =
        recordings.iter().map(|path| AudioReader::open(path).map(Audio::from)).collect();
    for segment in transcriber.word_times(false)?.transcribe_all(readers?)? {
        let (recording, segment) = segment?;
        println!("{}:{}", recordings[recording].display(), segment.text);
    }
    Ok(())
}
