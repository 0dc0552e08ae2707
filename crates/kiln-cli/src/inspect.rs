//! `kiln inspect`

use std::{ops::Range, path::PathBuf, process::ExitCode};

use clap::Args;
use kiln::{
    Layers, Model, Plan, Result as KilnResult,
    device::{DeviceName, Opened},
    expert::{Ask, CacheSize, ExpertSizes, Inspection, Longest, Sizes, Stages, usable},
};

use crate::{
    display, load,
    output::{Result, say},
    parse,
};

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    /// A model folder, a GGUF file, or ORG/NAME[:QUANT] on the Hugging Face hub
    model: PathBuf,
    /// Number of tokens to compute cache sizes for [default: the model's positions]
    #[arg(long, value_name = "N")]
    ctx: Option<usize>,
    /// Batch size
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..=1 << 20))]
    batch: usize,
    /// Show only this cache [default: every cache that the model supports]
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]")]
    cache: Option<String>,
    /// Device whose memory is the limit; with several, the layers that each would compute
    #[arg(
        short,
        long,
        env = "KILN_DEVICE",
        default_value = "auto",
        value_delimiter = ',',
        value_name = "DEVICE,.."
    )]
    device: Vec<DeviceName>,
    /// Layers on each device: `auto`, N, or N,N,rest
    #[arg(long, visible_alias = "gpu-layers", value_name = "N,..", value_parser = str::parse::<Layers>)]
    layers: Option<Layers>,
    /// Memory limit, such as `6GiB` [default: 90 % of the device's, where that is known]
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    memory: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl InspectArgs {
    fn plan(&self) -> KilnResult<Option<Plan>> {
        self.cache.as_deref().map(Plan::named).transpose()
    }
}

/// Number types and their sizes. Weights and caches are float32 on the CPU and float16 on most GPUs.
const ELEMENTS: [(&str, usize); 2] = [("f16", 2), ("f32", 4)];

/// Number of tokens in the table for a model without a maximum.
const WITHOUT_LIMIT: usize = 2048;

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let plan = args.plan()?;
    let folder = load::folder(Some(&args.model))?;
    let inspection = Inspection::of(&folder)?;
    let positions = Some(inspection.sizes.positions).filter(|&n| n < Sizes::ANY_LENGTH);
    let tokens = args.ctx.or(positions).unwrap_or(WITHOUT_LIMIT);
    let devices = match args.memory {
        // A limit needs no device.
        Some(_) if args.device.len() == 1 && args.layers.is_none() => Vec::new(),
        _ => load::open_all(&args.device, args.layers.as_ref())?,
    };
    let memory = args.memory.or_else(|| usable(&devices.first()?.info));
    let stages = match devices.len() {
        0 | 1 => None,
        _ => {
            let model = Model::builder(&folder).memory(args.memory).plan(plan.clone());
            let model = model.tokens(args.ctx.unwrap_or(0));
            Some(model.devices(devices, args.layers.clone().unwrap_or_default()).estimate()?.stages)
        }
    };
    let ask = Ask::new(tokens).rows(args.batch.max(1)).memory(memory);
    let caches = |element| inspection.caches(plan.as_ref(), &ask.element(element));
    if args.json {
        say(format_args!("{:#}", json(&inspection, args, tokens, memory, stages.as_ref(), &caches)))?;
        return Ok(ExitCode::SUCCESS);
    }
    let sizes = &inspection.sizes;
    say(format_args!("architecture   {}", inspection.model_type))?;
    say(format_args!("parameters     {}", display::count(inspection.parameters)))?;
    let attention = match sizes.heads {
        0 => "no attention".to_owned(),
        heads => format!(
            "{heads} heads, {} key-value heads, head_dim {}, intermediate {}",
            sizes.kv_heads, sizes.head_dim, sizes.intermediate
        ),
    };
    let channels = match sizes.state_channels {
        0 => String::new(),
        channels => format!(", {channels} channels with a state"),
    };
    let mixture = sizes.experts.map_or_else(
        String::new,
        |ExpertSizes { experts, chosen, intermediate, shared, .. }| {
            let shared = if shared > 0 { format!(" and a shared one with {shared}") } else { String::new() };
            format!(", {chosen} of {experts} experts with intermediate {intermediate}{shared}")
        },
    );
    let mixers = format!("{attention}{channels}{mixture}");
    say(format_args!("shape          {} blocks, hidden {}, {mixers}", sizes.layers, sizes.hidden))?;
    say(format_args!("vocabulary     {} tokens", sizes.vocab))?;
    match positions {
        Some(positions) => say(format_args!("positions      {positions}"))?,
        None => say(format_args!("positions      any number"))?,
    }
    let files =
        if inspection.shards == 1 { "1 file".to_owned() } else { format!("{} files", inspection.shards) };
    for (dtype, (elements, bytes)) in &inspection.by_dtype {
        say(format_args!(
            "weights        {} in {dtype}, {} in {files}",
            display::count(*elements),
            display::bytes(*bytes)
        ))?;
    }
    for (name, element) in ELEMENTS {
        let beside = inspection.beside_the_cache(args.batch.max(1), element);
        say(format_args!("in {name}         {} for weights and a step", display::bytes(beside)))?;
    }
    let memory_text = memory.map_or_else(|| "not known; give --memory".to_owned(), display::bytes);
    say(format_args!("memory         {memory_text}"))?;
    if let Some(stages) = &stages {
        let text = load::division(&stages.map(|(device, _)| device.clone()), inspection.blocks());
        let weights: Vec<_> = stages.iter().map(|(_, bytes)| display::bytes(*bytes)).collect();
        say(format_args!("layers         {text}: {} of weights", weights.join(" and ")))?;
    }
    say(format_args!(""))?;
    let whole = format!("{tokens} tokens");
    let whole = if args.batch > 1 { format!("{} rows of {whole}", args.batch) } else { whole };
    let head = ["cache", "type", "a token", &whole, "offloaded", "longest", "longest offloaded"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (name, element) in ELEMENTS {
        rows.extend(caches(element).iter().map(|cache| row(cache, name)));
    }
    say(format_args!("{}", display::table(&rows)))?;
    Ok(ExitCode::SUCCESS)
}

fn row(cache: &CacheSize, dtype: &str) -> Vec<String> {
    let bytes = |bytes: usize| display::bytes(bytes as u64);
    let longest = |longest: Option<Longest>| match longest {
        None => "-".to_owned(),
        Some(Longest::Any) => "any".to_owned(),
        Some(Longest::Tokens(tokens)) => tokens.to_string(),
    };
    vec![
        cache.cache.clone(),
        dtype.to_owned(),
        bytes(cache.a_token),
        bytes(cache.bytes),
        bytes(cache.offloaded_bytes),
        longest(cache.longest),
        longest(cache.longest_offloaded),
    ]
}

fn json(
    inspection: &Inspection,
    args: &InspectArgs,
    tokens: usize,
    memory: Option<u64>,
    stages: Option<&Stages<(Opened, u64)>>,
    caches: &dyn Fn(usize) -> Vec<CacheSize>,
) -> serde_json::Value {
    let sizes = &inspection.sizes;
    let dtypes: serde_json::Map<_, _> = (inspection.by_dtype.iter())
        .map(|(dtype, (elements, bytes))| {
            (dtype.clone(), serde_json::json!({ "parameters": elements, "bytes": bytes }))
        })
        .collect();
    let longest = |longest: Option<Longest>| match longest {
        None => serde_json::Value::Null,
        Some(Longest::Any) => "any".into(),
        Some(Longest::Tokens(tokens)) => tokens.into(),
    };
    let row = |name: &str, cache: CacheSize| {
        serde_json::json!({
            "cache": cache.cache,
            "dtype": name,
            "bytes_per_token": cache.a_token,
            "tokens": tokens,
            "rows": args.batch,
            "bytes": cache.bytes,
            "offloaded_bytes": cache.offloaded_bytes,
            "longest": longest(cache.longest),
            "longest_offloaded": longest(cache.longest_offloaded),
        })
    };
    let caches: Vec<_> = ELEMENTS
        .iter()
        .flat_map(|&(name, element)| caches(element).into_iter().map(move |cache| row(name, cache)))
        .collect();
    serde_json::json!({
        "model_type": inspection.model_type,
        "parameters": inspection.parameters,
        "layers": sizes.layers,
        "hidden": sizes.hidden,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "intermediate": sizes.intermediate,
        "vocab": sizes.vocab,
        "state_channels": sizes.state_channels,
        "experts": sizes.experts.map(|ExpertSizes { experts, chosen, intermediate, shared, blocks, .. }| {
            serde_json::json!({
                "experts": experts, "chosen": chosen, "intermediate": intermediate, "shared_intermediate": shared,
                "blocks": blocks,
            })
        }),
        "positions": (sizes.positions < Sizes::ANY_LENGTH).then_some(sizes.positions),
        "files": inspection.shards,
        "weights": dtypes,
        "memory": memory,
        "stages": stages.map(|stages| {
            let stage = |(own, (device, bytes)): (Range<usize>, &(Opened, u64))| {
                serde_json::json!({
                    "device": device.info.name.to_string(), "first": own.start, "layers": own.len(), "weight_bytes": bytes,
                })
            };
            stages.blocks(inspection.blocks()).map(stage).collect::<Vec<_>>()
        }),
        "caches": caches,
    })
}
