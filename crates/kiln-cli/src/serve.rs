//! `kiln serve`

use std::{env, path::PathBuf, process::ExitCode, time::Duration};

use clap::{Args, ValueEnum};
use kiln::{
    ChatTemplate, EXACT_ROWS, Error, Plan, Pooling,
    expert::{files, name_of},
};
use kiln_serve::{ServeOptions, ServedModel, Server};

use crate::{
    interrupt::Interruptible,
    load,
    output::{Failure, Result, note},
    parse,
    place::PlaceArgs,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Reuse {
    Prompts,
    Answers,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub [default: the demo model]
    ///
    /// May be given several times. The first is loaded at once, the others when a request asks for them.
    #[arg(short, long, value_name = "MODEL")]
    model: Vec<PathBuf>,
    /// Address to listen on; others than 127.0.0.1 need keys
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 is any free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Name by which requests ask for the model [default: that of the folder or file]
    ///
    /// With several models, given once for each, in the same order.
    #[arg(long, value_name = "NAME")]
    alias: Vec<String>,
    /// Models that are loaded at once; another takes the place of the one asked for longest ago [default:
    /// all]
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    max_models: Option<usize>,
    /// Seconds after which a model that nobody asks for is unloaded [default: never]
    #[arg(long, value_name = "SECONDS")]
    idle_unload: Option<u64>,
    /// File with keys, one per line, of which a request needs one; so does the variable KILN_API_KEYS, with
    /// commas
    #[arg(long, value_name = "FILE")]
    api_keys: Option<PathBuf>,
    /// Listen on other addresses than 127.0.0.1 without keys
    #[arg(long)]
    no_auth: bool,
    /// Let web pages of this origin ask, such as https://chat.example; may be given several times
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<String>,
    /// Answers that are computed at once [default: 16, or 64 where a GPU computes that many without changing
    /// a bit]
    #[arg(long, value_name = "N")]
    rows: Option<usize>,
    /// Answers that may wait; more are refused
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// Seconds that answers have to end after Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    drain: u64,
    /// Chat template: a Jinja file [default: the model's, else ChatML]
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// How embeddings are made of the vectors of tokens: mean, cls, lasttoken, max, mean_sqrt_len_tokens or
    /// weightedmean [default: as the model's folder says]
    #[arg(long, value_name = "KIND")]
    pooling: Option<Pooling>,
    /// KV cache of each request, as for `kiln run` [default: the model's, else dynamic]
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]")]
    cache: Option<String>,
    /// Another KV cache that a request may ask for; may be given several times
    #[arg(long, value_name = "NAME[:KEY=VALUE,..]")]
    allow_cache: Vec<String>,
    /// Tokens of a prompt in a pass, between the passes of answers [default: 128 on the CPU, 256 on a GPU]
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    prefill_chunk: Option<usize>,
    /// Memory for caches of the beginnings of prompts, which later prompts begin with; `none`: none are kept
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse::size_or_none)]
    prefix_memory: u64,
    /// Reuse of earlier prompts where one begins alike, or also of their answers; then bits may change
    #[arg(long, value_name = "KIND", value_enum, default_value_t = Reuse::Prompts)]
    reuse: Reuse,
    /// While one answer is computed alone, draft up to N tokens that followed the same tokens earlier; the
    /// tokens stay the same
    #[arg(long, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=EXACT_ROWS as u64 - 1))]
    prompt_lookup: Option<usize>,
    #[command(flatten)]
    place: PlaceArgs,
}

pub(crate) fn run(args: &ServeArgs) -> Result<ExitCode> {
    // Errors in the arguments are reported before the model is loaded.
    let plan = args.cache.as_deref().map(Plan::named).transpose()?;
    let plans = args.allow_cache.iter().map(|cache| Plan::named(cache)).collect::<kiln::Result<_>>()?;
    let keys = args.keys()?;
    if args.rows == Some(0) {
        return Err(Error::Setting { name: "rows", why: "is 0, must be at least 1".to_owned() }.into());
    }
    let is_local =
        args.host == "localhost" || args.host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    if !is_local && keys.is_empty() && !args.no_auth {
        let why = format!(
            "others reach {}, and no key is asked for; give --api-keys, or --no-auth if that is meant",
            args.host
        );
        return Err(Error::Setting { name: "host", why }.into());
    }
    if args.reuse == Reuse::Answers && args.prefix_memory == 0 {
        let why =
            "keeps answers in the memory of `--prefix-memory`, which is none; give it a size".to_owned();
        return Err(Error::Setting { name: "reuse", why }.into());
    }
    let template = match &args.template {
        Some(path) => Some(ChatTemplate::new(&files::read_input(path)?)?),
        None => None,
    };
    let folders: Vec<PathBuf> = match &args.model[..] {
        [] => vec![load::folder(None)?],
        models => models.iter().map(|model| load::folder(Some(model))).collect::<Result<_>>()?,
    };
    let names = args.names(&folders)?;
    if folders.len() > 1 && !args.place.lora.is_empty() {
        let why = "changes one model; give one `--model`, or merge the adapter".to_owned();
        return Err(Error::Setting { name: "lora", why }.into());
    }
    // Faults of folders are found before any model is loaded.
    for folder in &folders {
        load::is_embedder(folder)?;
    }
    let devices = load::open(&args.place)?;
    let loader = |folder: &PathBuf| {
        let (folder, place, devices, plan) =
            (folder.clone(), args.place.clone(), devices.clone(), plan.clone());
        move || {
            let none = Plan::none();
            let plan = if load::is_embedder(&folder)? { Some(&none) } else { plan.as_ref() };
            load::model(&folder, &place, devices.clone(), plan, 0)
        }
    };
    let mut models = Vec::new();
    for (at, (folder, name)) in folders.iter().zip(&names).enumerate() {
        models.push(match at {
            0 => ServedModel::loaded(name, loader(folder)()?).loaded_again_by(loader(folder)),
            _ => ServedModel::on_demand(name, loader(folder)),
        });
    }
    let options = ServeOptions {
        rows: args.rows,
        queue: args.queue,
        keys,
        origins: args.cors.clone(),
        plan,
        plans,
        prefill_chunk: args.prefill_chunk,
        prefix_bytes: usize::try_from(args.prefix_memory).unwrap_or(usize::MAX),
        reuse_answers: args.reuse == Reuse::Answers,
        lookup_drafts: args.prompt_lookup,
        template,
        pooling: args.pooling,
        most_loaded: args.max_models.unwrap_or(usize::MAX),
        idle: args.idle_unload.map(Duration::from_secs),
        drain: Duration::from_secs(args.drain),
    };
    let host = if args.host.contains(':') { format!("[{}]", args.host) } else { args.host.clone() };
    let server = Server::new(models, options, &format!("{host}:{}", args.port))?;
    let address = server.address();
    let names = names.join(", ");
    note(format_args!("{names} at http://{address}/v1, and a chat at http://{address}; Ctrl-C ends"));
    let interruptible = Interruptible::begin();
    server.run(|| interruptible.came()).map_err(|e| Failure::Output("the network", e))?;
    Ok(ExitCode::SUCCESS)
}

impl ServeArgs {
    /// The names by which requests ask for the models: those that were given, else those of the folders.
    fn names(&self, folders: &[PathBuf]) -> Result<Vec<String>> {
        if !self.alias.is_empty() && self.alias.len() != folders.len() {
            let (names, models) = (self.alias.len(), folders.len());
            let why = format!("is given {names} times for {models} models; give one for each, or none");
            return Err(Error::Setting { name: "alias", why }.into());
        }
        let own = |folder: &PathBuf| name_of(folder);
        let names: Vec<String> = match &self.alias[..] {
            [] => folders.iter().map(own).collect(),
            names => names.to_vec(),
        };
        if let Some(twice) = names.iter().enumerate().find(|(at, name)| names[..*at].contains(name)) {
            let why = format!("`{}` is the name of two models; give each its own", twice.1);
            return Err(Error::Setting { name: "alias", why }.into());
        }
        Ok(names)
    }

    /// The keys of the file, and those of the environment.
    fn keys(&self) -> Result<Vec<String>> {
        let mut keys: Vec<String> = Vec::new();
        if let Some(path) = &self.api_keys {
            let text = files::read_input(path)?;
            keys.extend(text.lines().map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned));
            if keys.is_empty() {
                let why = "has no key; write one in each line".to_owned();
                return Err(Error::File { path: path.clone(), why }.into());
            }
        }
        let from_environment = env::var("KILN_API_KEYS").unwrap_or_default();
        keys.extend(
            from_environment.split(',').map(str::trim).filter(|key| !key.is_empty()).map(str::to_owned),
        );
        Ok(keys)
    }
}
