//! `kiln inspect`

use std::process::ExitCode;

use kiln::{Inspection, Result};

use crate::{args::InspectArgs, display};

/// Caches are held in float32 on the CPU and in float16 on most GPUs.
const ELEMENTS: [(&str, usize); 2] = [("f16", 2), ("f32", 4)];

pub(crate) fn run(args: &InspectArgs) -> Result<ExitCode> {
    let inspection = Inspection::of(&args.model)?;
    let tokens = args.ctx.unwrap_or(inspection.sizes.positions);
    if args.json {
        display::say(format_args!("{:#}", json(&inspection, tokens)));
        return Ok(ExitCode::SUCCESS);
    }
    let sizes = &inspection.sizes;
    display::say(format_args!("architecture   {}", inspection.model_type));
    display::say(format_args!("parameters     {}", display::count(inspection.parameters)));
    display::say(format_args!(
        "shape          {} blocks, hidden {}, {} heads, {} key-value heads, head_dim {}, intermediate {}",
        sizes.layers, sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.intermediate
    ));
    display::say(format_args!("vocabulary     {} tokens", sizes.vocab));
    display::say(format_args!("positions      {}", sizes.positions));
    let files =
        if inspection.shards == 1 { "1 file".to_owned() } else { format!("{} files", inspection.shards) };
    for (dtype, (elements, bytes)) in &inspection.by_dtype {
        display::say(format_args!(
            "weights        {} in {dtype}, {} in {files}",
            display::count(*elements),
            display::bytes(*bytes)
        ));
    }
    display::say("");
    let head = ["cache", "type", "a token", &format!("{tokens} tokens")].map(str::to_owned).to_vec();
    let mut rows = vec![head];
    for (name, element) in ELEMENTS {
        for (strategy, bytes) in inspection.cache_bytes(1, element) {
            let whole = inspection.cache_bytes(tokens, element).into_iter().find(|(s, _)| *s == strategy);
            rows.push(vec![
                strategy.to_owned(),
                name.to_owned(),
                display::bytes(bytes as u64),
                whole.map_or_else(String::new, |(_, bytes)| display::bytes(bytes as u64)),
            ]);
        }
    }
    display::say(format_args!("{}", display::table(&rows)));
    Ok(ExitCode::SUCCESS)
}

fn json(inspection: &Inspection, tokens: usize) -> serde_json::Value {
    let sizes = &inspection.sizes;
    let dtypes: serde_json::Map<_, _> = (inspection.by_dtype.iter())
        .map(|(dtype, (elements, bytes))| {
            (dtype.clone(), serde_json::json!({ "parameters": elements, "bytes": bytes }))
        })
        .collect();
    let caches: Vec<_> = ELEMENTS
        .iter()
        .flat_map(|&(name, element)| {
            inspection.cache_bytes(1, element).into_iter().zip(inspection.cache_bytes(tokens, element)).map(
                move |((strategy, a_token), (_, whole))| {
                    serde_json::json!({
                        "cache": strategy, "dtype": name, "bytes_per_token": a_token, "tokens": tokens, "bytes": whole,
                    })
                },
            )
        })
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
        "positions": sizes.positions,
        "files": inspection.shards,
        "weights": dtypes,
        "caches": caches,
    })
}
