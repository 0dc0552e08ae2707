//! `kiln transcribe`: speech to text.

mod args;
mod format;

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use indicatif::{ProgressBar, ProgressStyle};
use kiln::{Audio, AudioReader, Error, Transcriber, expert::files};

pub(crate) use self::args::TranscribeArgs;
use self::format::Writer;
use crate::{
    load,
    output::{Result, note, print},
};

pub(crate) fn run(args: &TranscribeArgs) -> Result<ExitCode> {
    // Errors in a recording or an option are reported before the model is loaded.
    let mut recordings = Vec::with_capacity(args.files.len());
    for file in &args.files {
        recordings.push((name(file), open(file)?));
    }
    let targets = targets(args)?;
    let plan = args.cache.plan()?.map(|plan| args.cache.offloaded(plan));
    let folder = load::folder(Some(&args.model))?;
    if !load::is_speech_model(&folder)? {
        let why = "takes text and no sound; name the folder of a Whisper model".to_owned();
        return Err(Error::Setting { name: "--model", why }.into());
    }
    let devices = load::open(&args.place)?;
    let model = load::model(&folder, &args.place, devices, plan.as_ref(), 0)?;
    let transcriber = args.applied(Transcriber::new(&model)?)?;

    let seconds: f64 = recordings.iter().filter_map(|(_, reader)| reader.seconds()).sum();
    let bar = progress(seconds);
    let started = Instant::now();
    let mut heard = 0.0;
    let mut targets = targets.into_iter();
    let mut left = recordings.into_iter().peekable();
    while left.peek().is_some() {
        let batch: Vec<(String, AudioReader)> = left.by_ref().take(usize::from(args.batch)).collect();
        let targets: Vec<Option<PathBuf>> = targets.by_ref().take(batch.len()).collect();
        heard += transcribe(args, &transcriber, batch, &targets, &bar, heard)?;
    }
    bar.finish_and_clear();
    let took = started.elapsed().as_secs_f64();
    if heard > 0.0 {
        let speed = heard / took;
        note(format_args!("{heard:.1} s of sound in {took:.1} s, {speed:.1} times as fast as it was spoken"));
    }
    Ok(ExitCode::SUCCESS)
}

/// Transcribes recordings as one batch. `before`: seconds of audio that were transcribed before it. Returns
/// the duration of the batch.
fn transcribe(
    args: &TranscribeArgs,
    transcriber: &Transcriber,
    batch: Vec<(String, AudioReader)>,
    targets: &[Option<PathBuf>],
    bar: &ProgressBar,
    before: f64,
) -> Result<f64> {
    let (names, readers): (Vec<String>, Vec<AudioReader>) = batch.into_iter().unzip();
    let number = names.len();
    let mut transcripts = transcriber.transcribe_all(readers.into_iter().map(Audio::from).collect())?;
    let mut writers: Vec<Writer> = (0..number).map(|_| Writer::new(args.format)).collect();
    let mut texts: Vec<String> = writers.iter().map(|writer| writer.head().to_owned()).collect();
    // Segments of a single recording are printed as soon as they are done.
    let streams = number == 1 && targets[0].is_none();
    if streams {
        show(bar, &std::mem::take(&mut texts[0]))?;
    }
    while let Some(segment) = transcripts.next() {
        let (recording, segment) = segment?;
        let text = writers[recording].segment(segment);
        if streams {
            show(bar, &text)?;
        } else {
            texts[recording].push_str(&text);
        }
        let done: f64 = (0..number).map(|i| transcripts.progress(i).0.as_secs_f64()).sum();
        bar.set_position((before + done) as u64);
    }
    let mut heard = 0.0;
    for (i, (writer, mut text)) in writers.into_iter().zip(texts).enumerate() {
        let duration = transcripts.progress(i).1.as_secs_f64();
        heard += duration;
        if let Some(damage) = transcripts.damage(i) {
            note(format_args!("warning: {}", kiln::expert::plain(&damage)));
        }
        if duration == 0.0 {
            note(format_args!("{}: there is no sound in it", names[i]));
        }
        text.push_str(&writer.tail(&names[i], transcripts.language(i), duration));
        match &targets[i] {
            Some(path) => files::write(path, text.as_bytes())?,
            None => show(bar, &text)?,
        }
    }
    Ok(heard)
}

/// Prints a part of a transcript, without mixing it with the progress bar.
fn show(bar: &ProgressBar, text: &str) -> Result<()> {
    if text.is_empty() { Ok(()) } else { bar.suspend(|| print(text)) }
}

fn open(file: &Path) -> Result<AudioReader> {
    Ok(match file == Path::new("-") {
        true => AudioReader::from_stream("standard input", io::stdin().lock())?,
        false => AudioReader::open(file)?,
    })
}

fn name(file: &Path) -> String {
    if file == Path::new("-") { "standard input".to_owned() } else { file.display().to_string() }
}

/// The output file of each recording; `None`: standard output.
fn targets(args: &TranscribeArgs) -> Result<Vec<Option<PathBuf>>> {
    let Some(folder) = &args.output_dir else { return Ok(vec![None; args.files.len()]) };
    let target = |file: &PathBuf| {
        let stem = file.file_stem().filter(|_| file != Path::new("-"));
        let mut name = stem.map_or_else(|| "stdin".into(), |stem| stem.to_owned());
        name.push(format!(".{}", args.format.extension()));
        folder.join(name)
    };
    let all: Vec<PathBuf> = args.files.iter().map(target).collect();
    if let Some(twice) = (1..all.len()).find(|&i| all[..i].contains(&all[i])) {
        let why = format!(
            "{} would be written twice; transcribe recordings of the same name into different folders",
            all[twice].display()
        );
        return Err(Error::Setting { name: "output_dir", why }.into());
    }
    if !folder.is_dir() {
        let why = format!("{} is not a folder; create it first", folder.display());
        return Err(Error::Setting { name: "output_dir", why }.into());
    }
    Ok(all.into_iter().map(Some).collect())
}

fn progress(seconds: f64) -> ProgressBar {
    let bar = ProgressBar::new(seconds.ceil() as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} s {eta}") {
        bar.set_style(style);
    }
    bar.set_message("listening");
    bar
}
