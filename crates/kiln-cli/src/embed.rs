//! `kiln embed`: texts as vectors.

use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    process::ExitCode,
};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kiln::{Embeddings, Error, Plan, Pooling, expert::files};
use serde::Serialize;

use crate::{
    load,
    output::{Result, note, say},
    place::PlaceArgs,
};

#[derive(Debug, Args)]
pub(crate) struct EmbedArgs {
    /// The texts; without any, each line of standard input is one
    texts: Vec<String>,
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub
    #[arg(short, long, value_name = "MODEL")]
    model: PathBuf,
    /// Read the texts from a file, one per line
    #[arg(short, long, value_name = "FILE", conflicts_with = "texts")]
    file: Option<PathBuf>,
    #[command(flatten)]
    place: PlaceArgs,
    /// Put the model's prompt with this name before each text, such as query or document
    #[arg(long, value_name = "NAME", conflicts_with = "prompt")]
    prompt_name: Option<String>,
    /// Put this text before each text
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// How the vectors of tokens become one: mean, cls, lasttoken, max, mean_sqrt_len_tokens or weightedmean
    /// [default: as the model's folder says]
    #[arg(long, value_name = "KIND")]
    pooling: Option<Pooling>,
    /// Scale vectors to length 1, or do not [default: as the model's folder says]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    normalize: Option<bool>,
    /// Keep only the first N numbers of each vector
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,
    /// Cut the end of texts that are longer than the model takes
    #[arg(long)]
    truncate: bool,
    /// Print the cosines between the texts instead of the vectors
    #[arg(long, conflicts_with = "json")]
    similarity: bool,
    /// Print one JSON object instead of a line per text
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &EmbedArgs) -> Result<ExitCode> {
    let texts = texts(args)?;
    let folder = load::folder(Some(&args.model))?;
    if load::is_speech_model(&folder)? {
        let why = "is a model of speech; use `kiln transcribe`".to_owned();
        return Err(Error::Setting { name: "--model", why }.into());
    }
    let model = load::model(&folder, &args.place, load::open(&args.place)?, Some(&Plan::none()), 0)?;
    let bar = ProgressBar::new(texts.len() as u64);
    if let Ok(style) = ProgressStyle::with_template("embedding {wide_bar} {pos}/{len} texts {eta}") {
        bar.set_style(style);
    }
    let mut request = model
        .embed(texts)
        .pooling(args.pooling)
        .normalize(args.normalize)
        .dimensions(args.dimensions)
        .truncate(args.truncate)
        .on_progress(|done| bar.set_position(done as u64));
    if let Some(name) = &args.prompt_name {
        request = request.prompt_name(name);
    }
    if let Some(prompt) = &args.prompt {
        request = request.prompt(prompt);
    }
    let embedded = request.run();
    bar.finish_and_clear();
    let Embeddings { vectors, tokens, .. } = embedded?;
    if args.json {
        let dimensions = vectors.first().map_or(0, Vec::len);
        let found = Report { model: model.name(), dimensions, tokens: &tokens, embeddings: &vectors };
        say(written(&found)?)?;
    } else if args.similarity {
        say(table(&vectors))?;
    } else {
        for vector in &vectors {
            say(written(vector)?)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The output of `--json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    model: &'a str,
    dimensions: usize,
    tokens: &'a [usize],
    embeddings: &'a [Vec<f32>],
}

/// JSON in which each number has as many digits as its type.
fn written(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string(value).map_err(|error| Error::Execution(error.to_string()))?)
}

/// The texts of the arguments, of the file, or of standard input.
fn texts(args: &EmbedArgs) -> Result<Vec<String>> {
    let lines = |text: String| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let texts = match &args.file {
        Some(path) => lines(files::read_input(path)?),
        None if !args.texts.is_empty() => args.texts.clone(),
        None => {
            if io::stdin().is_terminal() {
                note("reading texts from the terminal, one per line; end them with Ctrl-D");
            }
            let wrong = |why| Error::Prompt { why: format!("standard input {why}") };
            lines(files::input(io::stdin()).map_err(wrong)?)
        }
    };
    if texts.is_empty() {
        let why = "there is no text; give one as an argument, or one per line".to_owned();
        return Err(Error::Prompt { why }.into());
    }
    Ok(texts)
}

/// The cosines of the angles between all vectors, as a table.
fn table(vectors: &[Vec<f32>]) -> String {
    let length = |vector: &[f32]| vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let cosine = |a: &[f32], b: &[f32]| {
        let product: f64 = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        product / (length(a) * length(b)).max(f64::MIN_POSITIVE)
    };
    let row = |(i, a): (usize, &Vec<f32>)| {
        let cells: Vec<String> = vectors.iter().map(|b| format!("{:>7.3}", cosine(a, b))).collect();
        format!("{:>4}{}", i + 1, cells.concat())
    };
    let head: Vec<String> = (1..=vectors.len()).map(|i| format!("{i:>7}")).collect();
    let rows: Vec<String> = vectors.iter().enumerate().map(row).collect();
    format!("    {}\n{}", head.concat(), rows.join("\n"))
}
