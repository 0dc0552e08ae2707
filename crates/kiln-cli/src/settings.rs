//! Options for generation: settings and grammars.

use std::path::PathBuf;

use clap::Args;
use kiln::{
    Error, GenerationConfig, Grammar,
    expert::{UNTIL_IT_ENDS, files},
};
use serde_json::{Map, Value};

use crate::{output::Result, parse};

/// Settings that override the folder's generation_config.json.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Maximum number of tokens to generate; -1: until the text ends [default: the model's, else -1]
    #[arg(short = 'n', long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    pub(crate) max_new_tokens: Option<i64>,
    /// Always take the likeliest token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "min_p", "typical_p"])]
    pub(crate) greedy: bool,
    /// Flatten (above 1) or sharpen (below 1) the distribution; 0 is greedy
    #[arg(short, long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Sample from the K likeliest tokens; 0 for all
    #[arg(long, value_name = "K", allow_negative_numbers = true, value_parser = parse::count)]
    pub(crate) top_k: Option<usize>,
    /// Sample from the likeliest tokens that together reach probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Drop tokens below P times the likeliest token's probability
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Sample from tokens of typical information that together reach probability P
    #[arg(long, hide_short_help = true, value_name = "P", allow_negative_numbers = true)]
    pub(crate) typical_p: Option<f32>,
    /// Only generate JSON that a schema in a file accepts
    #[arg(long, value_name = "FILE", conflicts_with_all = ["regex", "grammar"])]
    pub(crate) json_schema: Option<PathBuf>,
    /// Only generate text that matches a regular expression
    #[arg(long, value_name = "REGEX", conflicts_with = "grammar")]
    pub(crate) regex: Option<String>,
    /// Only generate text that a Lark grammar in a file accepts
    #[arg(long, hide_short_help = true, value_name = "FILE")]
    pub(crate) grammar: Option<PathBuf>,
    /// Beam search: follow N sequences at once and take the likeliest
    #[arg(long, value_name = "N")]
    pub(crate) num_beams: Option<usize>,
    /// Divide the beams into N groups that avoid each other's tokens; needs --set diversity_penalty=P
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) num_beam_groups: Option<usize>,
    /// Favor tokens that are likelier after the prompt than after the negative prompt, by the factor G; 1 is
    /// off
    #[arg(long, hide_short_help = true, value_name = "G", allow_negative_numbers = true)]
    pub(crate) guidance_scale: Option<f32>,
    /// Draft up to N tokens that followed the same tokens earlier; the tokens stay the same
    #[arg(long, alias = "prompt-lookup-num-tokens", value_name = "N")]
    pub(crate) prompt_lookup: Option<usize>,
    /// Divide the scores of tokens that were already seen; 1 is off
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Never repeat a sequence of N tokens; 0 is off
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) no_repeat_ngram_size: Option<usize>,
    /// Do not end the text before N tokens were generated
    #[arg(long, hide_short_help = true, value_name = "N")]
    pub(crate) min_new_tokens: Option<usize>,
    /// Stop after this many seconds
    #[arg(long, hide_short_help = true, value_name = "SECONDS", allow_negative_numbers = true)]
    pub(crate) max_time: Option<f32>,
    /// A setting of generation_config.json, such as `suppress_tokens=[1,2]`; may be given several times
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    /// Seed of the sampler, to repeat a run exactly
    #[arg(short, long, value_name = "SEED")]
    pub(crate) seed: Option<u64>,
    /// Stop at this text; may be given several times
    #[arg(long, alias = "stop-strings", value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

/// The requested settings; all others come from the model folder.
pub(crate) fn wanted(args: &SamplingArgs) -> Result<GenerationConfig> {
    let mut wanted = GenerationConfig::new();
    wanted.max_new_tokens = args.max_new_tokens.map(|n| usize::try_from(n).unwrap_or(UNTIL_IT_ENDS));
    wanted.max_time = args.max_time;
    wanted.temperature = args.temperature;
    wanted.top_k = args.top_k;
    wanted.top_p = args.top_p;
    wanted.min_p = args.min_p;
    wanted.typical_p = args.typical_p;
    wanted.repetition_penalty = args.repetition_penalty;
    wanted.no_repeat_ngram_size = args.no_repeat_ngram_size;
    wanted.min_new_tokens = args.min_new_tokens;
    wanted.num_beams = args.num_beams;
    wanted.num_beam_groups = args.num_beam_groups;
    wanted.guidance_scale = args.guidance_scale;
    wanted.prompt_lookup_num_tokens = args.prompt_lookup;
    wanted.seed = args.seed;
    wanted.stop_strings = (!args.stop.is_empty()).then(|| args.stop.clone());
    let mut wanted = wanted.merged_over(&set(&args.set)?);
    // A setting that shapes the distribution implies sampling. A seed does not: it says how, not whether.
    wanted.do_sample = match args.greedy {
        true => Some(false),
        false => wanted.do_sample.or(wanted.shapes_sampling().then_some(true)),
    };
    Ok(wanted)
}

/// The grammar that the text must match.
pub(crate) fn grammar(args: &SamplingArgs) -> Result<Option<Grammar>> {
    Ok(match (&args.json_schema, &args.regex, &args.grammar) {
        (Some(path), ..) => Some(Grammar::json_schema(&files::read_input(path)?)?),
        (_, Some(regex), _) => Some(Grammar::regex(regex)?),
        (.., Some(path)) => Some(Grammar::lark(&files::read_input(path)?)?),
        _ => None,
    })
}

/// Parses the settings of `--set`. A value that is not JSON is a string.
fn set(given: &[String]) -> Result<GenerationConfig> {
    const OF_CACHES: [&str; 3] = ["use_cache", "cache_implementation", "cache_config"];

    let wrong = |why| Error::Setting { name: "--set", why };
    let read = |text: &String| {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| wrong(format!("`{text}` has no value; write it as NAME=VALUE")))?;
        if OF_CACHES.contains(&name) {
            return Err(wrong(format!("`{name}` chooses the cache; use --cache instead")));
        }
        if !GenerationConfig::NAMES.contains(&name) {
            let names = GenerationConfig::NAMES.iter().copied();
            let known: Vec<&str> = names.filter(|name| !OF_CACHES.contains(name)).collect();
            let known = known.join(", ");
            return Err(wrong(format!("`{name}` is not a setting of a generation; known: {known}")));
        }
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
        Ok((name.to_owned(), value))
    };
    let mut settings = Map::new();
    for text in given {
        let (name, value) = read(text)?;
        if settings.insert(name, value).is_some() {
            return Err(wrong(format!("`{text}` gives a setting a second time; give each once")).into());
        }
    }
    Ok(GenerationConfig::from_arguments(&settings).map_err(|error| match error {
        Error::Setting { why, .. } => wrong(why),
        other => other,
    })?)
}
