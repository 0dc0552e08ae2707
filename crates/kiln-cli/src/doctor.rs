//! `kiln doctor`

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use kiln::{
    DtypeChoice, Model,
    burn::tensor::{DType, Int, Tensor, TensorData},
    device::{self, CopyBandwidth, DeviceName, Opened},
    expert::{
        ModelVerdict,
        kernels::{
            Activate, Activation, Arithmetic, Choice, Coverage, Draws, KERNELS, Kernels, Sample, Sampling,
            Verdict, self_test,
        },
        read_back,
    },
};
use serde_json::json;

use crate::{
    display, load,
    output::{Result, note, say},
};

/// Size of the vocabulary with which sampling is timed: that of Llama 3.
const VOCABULARY: usize = 128_256;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// auto, cpu, wgpu[:INDEX] or cuda[:INDEX]; see `kiln devices`
    #[arg(short, long, env = "KILN_DEVICE", default_value_t, value_name = "DEVICE")]
    device: DeviceName,
    /// Compare a few inputs of each kernel instead of all: seconds instead of minutes
    #[arg(long)]
    quick: bool,
    /// Also compare some blocks of a model (a folder, a GGUF file, or a name on the hub) with the CPU, and
    /// the kernels in its formats
    #[arg(short, long, value_name = "MODEL")]
    model: Option<PathBuf>,
    /// Number type in which the model is compared: auto, f32, f16 or bf16
    #[arg(long, default_value_t, value_name = "TYPE")]
    dtype: DtypeChoice,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Times in seconds
struct Times {
    launch: f64,
    greedy: f64,
    sampled: f64,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let device = device::open(args.device)?;
    let model =
        args.model.as_deref().map(|model| compared(model, &device, args.dtype)).transpose()?.flatten();
    let formats = model.iter().flat_map(|model| &model.formats);
    let packed: Vec<_> = formats
        .flat_map(|format| [Arithmetic::Floats, Arithmetic::Integers].map(|own| (*format, own)))
        .collect();
    let verdicts = verdicts(&device, if args.quick { Coverage::Quick(&packed) } else { Coverage::Full })?;
    let memory = device.measure_bandwidth(128 << 20)?;
    let copies = device.measure_copies()?;
    let times = times(&device)?;
    match args.json {
        true => {
            say(format_args!("{:#}", report(&device, &verdicts, model.as_ref(), memory, copies, &times)))?
        }
        false => {
            print(&device, &verdicts, memory, copies, &times)?;
            model.as_ref().map_or(Ok(()), print_model)?;
        }
    }
    let is_right = model.as_ref().is_none_or(|model| model.why.is_none());
    let all_right = is_right && verdicts.iter().all(Verdict::is_right);
    Ok(if all_right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Compares a model on the device with the same model on the CPU.
fn compared(model: &Path, device: &Opened, dtype: DtypeChoice) -> Result<Option<ModelVerdict>> {
    let folder = load::folder(Some(model))?;
    let verdict = Model::builder(folder).opened(device.clone()).dtype(dtype).compare()?;
    if verdict.is_none() {
        note(format_args!("the model is not compared: it runs on the CPU, hears, or has few positions"));
    }
    Ok(verdict)
}

/// Compares every kernel with its reference, in every number type that the device supports.
fn verdicts(device: &Opened, coverage: Coverage<'_>) -> Result<Vec<Verdict>> {
    let dtypes: Vec<DType> = [DType::F32, DType::F16, DType::BF16]
        .into_iter()
        .filter(|dtype| device.device.supports_dtype(*dtype))
        .collect();
    let bar = ProgressBar::new((KERNELS.len() * dtypes.len()) as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg:20} {wide_bar} {pos}/{len} {eta}") {
        bar.set_style(style);
    }
    let mut verdicts = Vec::new();
    for dtype in dtypes {
        for kernel in KERNELS {
            bar.set_message(kernel.name);
            verdicts.extend(read_back::block_on(self_test(kernel, device, dtype, coverage))?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(verdicts)
}

fn times(device: &Opened) -> Result<Times> {
    let kernels = Kernels::new(Choice::Auto, &device.device)?;
    let device = &device.device;
    let x = Tensor::<3>::zeros([1, 1, 8], (device, DType::F32));
    let launch = best(256, || {
        let mut y = x.clone();
        for _ in 0..256 {
            y = kernels.run(Activate { x: y, activation: Activation::Silu });
        }
        Ok(read_back::read(y).map(drop)?)
    })?;
    // The logits have the spread of those of a language model.
    let logits = (0..VOCABULARY).map(|i| ((i * 7919 % 10_007) as f32 / 10_007.0 - 0.5).powi(3) * 100.0);
    let logits = TensorData::new(logits.collect::<Vec<_>>(), [1, 1, VOCABULARY]);
    let logits = Tensor::<3>::from_data(logits, (device, DType::F32));
    let choose = |sampling: Sampling| {
        best(16, || {
            let zeros = |len| Tensor::<1, Int>::from_data(TensorData::new(vec![0i32; len], [len]), device);
            let mut draws = Draws { words: zeros(16).reshape([1, 16]), used: zeros(1), occurred: None };
            let mut tokens = None;
            for _ in 0..16 {
                let (chosen, after) = kernels.run(Sample { logits: logits.clone(), draws, sampling });
                (tokens, draws) = (Some(chosen), after);
            }
            tokens.map_or(Ok(()), |tokens| Ok(read_back::read(tokens).map(drop)?))
        })
    };
    let greedy = choose(Sampling::NEUTRAL)?;
    let sampled = choose(Sampling { top_k: 50, tail: 0.1, draws: true, ..Sampling::NEUTRAL })?;
    Ok(Times { launch, greedy, sampled })
}

/// Seconds that one of `number` operations takes, all of which `work` does: the best of a few runs, after one
/// that compiles kernels.
fn best(number: usize, work: impl Fn() -> Result<()>) -> Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        let started = Instant::now();
        work()?;
        best = best.min(started.elapsed().as_secs_f64());
    }
    Ok(best / number as f64)
}

fn print(
    device: &Opened,
    verdicts: &[Verdict],
    memory: f64,
    copies: Option<CopyBandwidth>,
    times: &Times,
) -> Result<()> {
    let info = &device.info;
    say(format_args!("kiln {} on {}: {}", env!("CARGO_PKG_VERSION"), info.name, info.adapter))?;
    say(format_args!("{}, driver {}, {}", info.api, info.driver, info.class))?;
    let rate = |rate: f64| format!("{}/s", display::bytes(rate as u64));
    say(format_args!("memory: {}", rate(memory)))?;
    if let Some(CopyBandwidth { up, down }) = copies {
        say(format_args!("copies to it: {}, from it: {}", rate(up), rate(down)))?;
    }
    say(format_args!("a launch: {:.1} µs", times.launch * 1e6))?;
    say(format_args!(
        "choosing one of {VOCABULARY} tokens: {:.3} ms, drawing one: {:.3} ms",
        times.greedy * 1e3,
        times.sampled * 1e3
    ))?;
    let compared: usize = verdicts.iter().map(|verdict| verdict.compared).sum();
    let wrong: Vec<_> = verdicts.iter().filter(|verdict| !verdict.is_right()).collect();
    // Each kernel is compared in several types.
    let kernels: BTreeSet<_> = verdicts.iter().map(|verdict| verdict.kernel).collect();
    let wrong_kernels: BTreeSet<_> = wrong.iter().map(|verdict| verdict.kernel).collect();
    if wrong.is_empty() {
        return say(format_args!(
            "kernels: all {} give the results of their references ({compared} comparisons)",
            kernels.len()
        ));
    }
    say(format_args!(
        "kernels: {} of {} give other results than their references ({compared} comparisons)",
        wrong_kernels.len(),
        kernels.len()
    ))?;
    for Verdict { kernel, path, dtype, compared, wrong, why } in wrong {
        let why = why.as_deref().unwrap_or_default();
        say(format_args!("- {kernel}, {path}, {}: {wrong} of {compared}: {why}", dtype.name()))?;
    }
    say("Please report this text. `--kernels reference` computes without kernels, slower.")
}

fn print_model(verdict: &ModelVerdict) -> Result<()> {
    let list = |items: Vec<String>| items.join(", ");
    let ModelVerdict { blocks, dtype, formats, passes, ran, captured, why, without, .. } = verdict;
    say(format_args!(
        "model: blocks {} and the head in {}, against the CPU",
        list(blocks.iter().map(usize::to_string).collect()),
        dtype.name()
    ))?;
    if !formats.is_empty() {
        say(format_args!("- packed: {}", list(formats.iter().map(|format| format.to_string()).collect())))?;
    }
    let ran = ran.iter().map(|ran| format!("{} ({}, {})", ran.kernel, ran.implementation, ran.count));
    say(format_args!("- launched: {}", list(ran.collect())))?;
    for pass in passes {
        say(format_args!(
            "- {} tokens: cosine {:.6}, farthest logit {:.3} of what is allowed",
            pass.tokens, pass.cosine, pass.farthest
        ))?;
    }
    if *captured == Some(true) {
        say(format_args!("- captured steps give the tokens of launched ones"))?;
    }
    match why {
        None => say(format_args!("- right")),
        Some(why) if without.is_empty() => say(format_args!("- wrong, even without kernels: {why}")),
        Some(why) => {
            say(format_args!("- wrong: {why}; right without {}", list(without.iter().cloned().collect())))
        }
    }
}

fn report(
    device: &Opened,
    verdicts: &[Verdict],
    model: Option<&ModelVerdict>,
    memory: f64,
    copies: Option<CopyBandwidth>,
    times: &Times,
) -> serde_json::Value {
    let info = &device.info;
    let kernels: Vec<_> = verdicts
        .iter()
        .map(|Verdict { kernel, path, dtype, compared, wrong, why }| {
            json!({
                "kernel": kernel,
                "path": path.to_string(),
                "dtype": dtype.name(),
                "compared": compared,
                "wrong": wrong,
                "why": why,
            })
        })
        .collect();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "device": info.name.to_string(),
        "class": info.class.to_string(),
        "adapter": info.adapter,
        "api": info.api,
        "driver": info.driver,
        "memory_bandwidth": memory,
        "copies": copies.map(|CopyBandwidth { up, down }| json!({ "up": up, "down": down })),
        "seconds": { "launch": times.launch, "greedy": times.greedy, "sampled": times.sampled },
        "vocabulary": VOCABULARY,
        "kernels": kernels,
        "model": model.map(|model| json!({
            "blocks": model.blocks,
            "dtype": model.dtype.name(),
            "formats": model.formats.iter().map(ToString::to_string).collect::<Vec<_>>(),
            "passes": model.passes.iter().map(|pass| {
                json!({ "tokens": pass.tokens, "cosine": pass.cosine, "farthest": pass.farthest })
            }).collect::<Vec<_>>(),
            "launched": model.ran.iter().map(|ran| {
                json!({ "kernel": ran.kernel, "path": ran.implementation.to_string(), "count": ran.count })
            }).collect::<Vec<_>>(),
            "captured": model.captured,
            "why": model.why,
            "without": model.without,
        })),
    })
}
