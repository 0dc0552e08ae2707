//! `kiln detect`

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use kiln::{
    Error, TokenId,
    expert::{
        Inspection, files,
        watermark::{GreenListConfig, SynthIdConfig, SynthIdDetector, WatermarkDetector, WatermarkingConfig},
    },
};
use serde_json::{Value, json};

use crate::{
    load,
    output::{Result, say},
};

#[derive(Debug, Args)]
pub(crate) struct DetectArgs {
    /// The text, without its prompt; `-` or nothing reads it from standard input
    text: Option<String>,
    /// Model that may have written the text [default: the demo model that comes with Kiln]
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Read the text from a file
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    file: Option<PathBuf>,
    /// The watermarking_config that the text was generated with: JSON, or a JSON file [default: the model's]
    #[arg(short, long, value_name = "JSON|FILE")]
    watermark: Option<String>,
    /// The z-score above which a text counts as watermarked
    #[arg(long, default_value_t = 3.0, value_name = "Z", allow_negative_numbers = true)]
    z_threshold: f64,
    /// Count a repeated sequence of tokens once; SynthID always does
    #[arg(long)]
    ignore_repeated_ngrams: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &DetectArgs) -> Result<ExitCode> {
    // Errors in the arguments are reported before anything is read.
    let given = args.watermark.as_deref().map(watermark).transpose()?;
    let folder = load::folder(args.model.as_deref())?;
    let inspection = Inspection::of(&folder)?;
    let config = match given {
        Some(config) => config,
        None => own_watermark(&folder)?,
    };
    let text = load::text(args.text.as_deref(), args.file.as_deref(), "text")?;
    let tokenizer = kiln::expert::tokenizer_of(&folder)?.ok_or_else(|| {
        let why = format!("{} has no tokenizer.json, which text needs; add it", folder.display());
        Error::Prompt { why }
    })?;
    let ids = tokenizer.encode(&text, false)?;
    let found = match &config {
        WatermarkingConfig::GreenList(config) => green_list(config, args, inspection.sizes.vocab, &ids)?,
        WatermarkingConfig::SynthId(config) => synth_id(config, args, &ids)?,
    };
    match args.json {
        true => say(format_args!("{:#}", found.json))?,
        false => say(found.text(args.z_threshold))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Parses the settings of a watermark: JSON, or the name of a JSON file.
fn watermark(given: &str) -> Result<WatermarkingConfig> {
    let text = match given.trim_start().starts_with('{') {
        true => given.to_owned(),
        false => files::read_input(Path::new(given))?,
    };
    Ok(WatermarkingConfig::from_json(&text).map_err(|error| match error {
        Error::Setting { why, .. } => Error::Setting { name: "--watermark", why },
        other => other,
    })?)
}

/// The watermark in the generation config of a folder.
fn own_watermark(folder: &Path) -> Result<WatermarkingConfig> {
    let config = kiln::expert::generation_config_of(folder)?;
    let why =
        "the model's generation_config.json has no watermarking_config; give the settings of the watermark";
    let none = || Error::Setting { name: "--watermark", why: why.to_owned() };
    Ok(config.watermarking_config.ok_or_else(none)?)
}

/// The result of a detector.
struct Found {
    lines: Vec<(&'static str, String)>,
    z_score: f64,
    p_value: f64,
    prediction: bool,
    json: Value,
}

impl Found {
    fn text(&self, z_threshold: f64) -> String {
        let scores =
            [("z-score", format!("{:.2}", self.z_score)), ("p-value", format!("{:.2e}", self.p_value))];
        let lines = self.lines.iter().chain(&scores).map(|(name, value)| format!("{name:<16}{value}\n"));
        let verdict = match self.prediction {
            true => format!("The text has this watermark: its z-score is above {z_threshold}."),
            false => format!("This watermark was not found: the z-score is not above {z_threshold}."),
        };
        format!("{}\n{verdict}", lines.collect::<String>())
    }
}

fn green_list(config: &GreenListConfig, args: &DetectArgs, vocab: usize, ids: &[TokenId]) -> Result<Found> {
    let detector = WatermarkDetector::new(config, vocab)?.z_threshold(args.z_threshold);
    let found = detector.ignore_repeated_ngrams(args.ignore_repeated_ngrams).detect(ids)?;
    let (green, expected) = (100.0 * found.green_fraction, 100.0 * config.greenlist_ratio);
    Ok(Found {
        lines: vec![
            ("watermark", "green list".to_owned()),
            ("tokens scored", found.num_tokens_scored.to_string()),
            (
                "green tokens",
                format!("{}, {green:.1} % where {expected:.1} % are expected", found.num_green_tokens),
            ),
        ],
        z_score: found.z_score,
        p_value: found.p_value,
        prediction: found.prediction,
        json: json!({
            "watermark": "green_list",
            "num_tokens_scored": found.num_tokens_scored,
            "num_green_tokens": found.num_green_tokens,
            "green_fraction": found.green_fraction,
            "z_score": found.z_score,
            "p_value": found.p_value,
            "prediction": found.prediction,
        }),
    })
}

fn synth_id(config: &SynthIdConfig, args: &DetectArgs, ids: &[TokenId]) -> Result<Found> {
    let found = SynthIdDetector::new(config)?.z_threshold(args.z_threshold).detect(ids)?;
    Ok(Found {
        lines: vec![
            ("watermark", "SynthID".to_owned()),
            ("tokens scored", found.num_tokens_scored.to_string()),
            ("mean", format!("{:.4} where 0.5 is expected", found.mean)),
            ("weighted mean", format!("{:.4}", found.weighted_mean)),
        ],
        z_score: found.z_score,
        p_value: found.p_value,
        prediction: found.prediction,
        json: json!({
            "watermark": "synth_id",
            "num_tokens_scored": found.num_tokens_scored,
            "mean": found.mean,
            "weighted_mean": found.weighted_mean,
            "z_score": found.z_score,
            "p_value": found.p_value,
            "prediction": found.prediction,
        }),
    })
}
