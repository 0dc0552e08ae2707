//! Loading a model for a user at a terminal.

use std::{
    io::{self, IsTerminal},
    ops::Range,
    path::{Path, PathBuf},
};

use kiln::{
    ArithmeticChoice, Error, Layers, LoadProgress, Model, ModelBuilder, Plan, Result, device,
    device::{DeviceClass, DeviceName, Opened},
    expert::{ConfigFile, Stages, files, kernels::Arithmetic, models},
};

#[cfg(feature = "hub")]
use crate::hub;
use crate::{
    allocator, display,
    output::{self, note},
    place::PlaceArgs,
};

/// The requested folder or GGUF file, which may have to be downloaded; else the folder of the demo model.
pub(crate) fn folder(asked: Option<&Path>) -> output::Result<PathBuf> {
    if let Some(named) = asked {
        #[cfg(feature = "hub")]
        return hub::located(named);
        #[cfg(not(feature = "hub"))]
        return Ok(named.to_owned());
    }
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join("assets/demo")));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../assets/demo");
    let found = beside.into_iter().chain([source]).find(|folder| folder.join("config.json").exists());
    let missing = || Error::Setting {
        name: "--model",
        why: "the demo model is not beside this binary; name a Hugging Face model folder or a GGUF file"
            .to_owned(),
    };
    Ok(found.ok_or_else(missing)?)
}

/// Reads a text from the argument, else from the file, else from standard input. `what` names the text in
/// messages for the user.
pub(crate) fn text(given: Option<&str>, file: Option<&Path>, what: &str) -> Result<String> {
    match (given, file) {
        (_, Some(path)) => files::read_input(path),
        (Some(text), None) if text != "-" => Ok(text.to_owned()),
        _ => {
            if io::stdin().is_terminal() {
                note(format_args!("reading the {what} from the terminal; end it with Ctrl-D"));
            }
            files::input(io::stdin()).map_err(|why| Error::Prompt { why: format!("standard input {why}") })
        }
    }
}

/// Opens the devices with the requested number of threads.
pub(crate) fn open(place: &PlaceArgs) -> Result<Vec<Opened>> {
    if let Some(threads) = place.threads {
        device::limit_threads(threads)?;
    }
    open_all(&place.device, place.layers.as_ref())
}

/// Opens the devices among which the layers of a model are divided. What a single GPU leaves is for the CPU.
pub(crate) fn open_all(names: &[DeviceName], layers: Option<&Layers>) -> Result<Vec<Opened>> {
    let mut devices = names.iter().map(|name| device::open(*name)).collect::<Result<Vec<_>>>()?;
    if let (Some(_), [only]) = (layers, &devices[..]) {
        if only.info.class == DeviceClass::Cpu {
            let why = "divides a model among devices, and the CPU is the only one; name a GPU with --device"
                .to_owned();
            return Err(Error::Setting { name: "--layers", why });
        }
        devices.push(device::open(DeviceName::Cpu)?);
    }
    Ok(devices)
}

/// The blocks of each device, such as `0-11 on cuda:0, 12-31 on cpu`.
pub(crate) fn division(stages: &Stages<Opened>, blocks: usize) -> String {
    let stage = |(own, device): (Range<usize>, &Opened)| {
        let last = own.end - 1;
        let own = if own.len() == 1 { last.to_string() } else { format!("{}-{last}", own.start) };
        format!("{own} on {}", device.info.name)
    };
    stages.blocks(blocks).map(stage).collect::<Vec<_>>().join(", ")
}

/// The number type of a model, such as `f16`; with `(integers)` if a GPU multiplies packed weights in these.
pub(crate) fn types(model: &Model) -> String {
    let mut types = model.dtype().name().to_owned();
    if on_gpus(model).any(|(_, arithmetic)| arithmetic == Arithmetic::Integers) {
        types.push_str(" (integers)");
    }
    types
}

/// The GPUs of a model, with the arithmetic of products with packed weights.
fn on_gpus(model: &Model) -> impl Iterator<Item = (DeviceName, Arithmetic)> {
    let stages = model.stages().zip(model.arithmetic().clone(), |device, arithmetic| {
        (device.info.class != DeviceClass::Cpu).then_some((device.info.name, arithmetic))
    });
    stages.iter().copied().flatten().collect::<Vec<_>>().into_iter()
}

/// Applies the options in `place` to the builder of a model.
pub(crate) fn on<'a>(place: &PlaceArgs, devices: Vec<Opened>, model: ModelBuilder<'a>) -> ModelBuilder<'a> {
    let model = model.devices(devices, place.layers.clone().unwrap_or_default());
    let model = model.dtype(place.dtype).kernels(place.kernels).memory(place.memory);
    let model = place.lora.iter().fold(model, |model, (folder, scale)| model.adapter(folder, *scale));
    let model = model.offload_experts(place.offload_experts).experts_on(place.experts);
    let arithmetic = if place.exact { ArithmeticChoice::Floats } else { place.arithmetic };
    model.arithmetic(arithmetic).quant(place.quant)
}

/// Loads a text model from a folder.
///
/// # Errors
/// As [`model`]; [`Error::Setting`] for models of speech and of embeddings, before their weights are read.
pub(crate) fn text_model(
    folder: &Path,
    place: &PlaceArgs,
    devices: Vec<Opened>,
    plan: Option<&Plan>,
    tokens: usize,
) -> Result<Model> {
    if is_speech_model(folder)? {
        let why = "is a model of speech; use `kiln transcribe`".to_owned();
        return Err(Error::Setting { name: "--model", why });
    }
    if is_embedder(folder)? {
        let why = "makes embeddings, and cannot continue a text; use `kiln embed`".to_owned();
        return Err(Error::Setting { name: "--model", why });
    }
    model(folder, place, devices, plan, tokens)
}

/// Whether the model in a folder makes embeddings alone, and cannot continue a text.
pub(crate) fn is_embedder(folder: &Path) -> Result<bool> {
    Ok(models::configure(&ConfigFile::read(folder)?)?.is_bidirectional())
}

/// Whether the model in a folder takes audio.
pub(crate) fn is_speech_model(folder: &Path) -> Result<bool> {
    Ok(models::configure(&ConfigFile::read(folder)?)?.features().is_some())
}

/// Loads a model from a folder. Shows a progress bar on a terminal.
///
/// `tokens`: the minimum length of a sequence.
pub(crate) fn model(
    folder: &Path,
    place: &PlaceArgs,
    devices: Vec<Opened>,
    plan: Option<&Plan>,
    tokens: usize,
) -> Result<Model> {
    let bar = display::bar("loading");
    let on_progress = |LoadProgress { read, total, .. }| {
        if read == 0 {
            // Reading a tokenizer leaves up to 80 MiB of freed memory, into which weights do not fit.
            allocator::return_freed_memory();
        }
        bar.set_length(total);
        bar.set_position(read);
    };
    let model = on(place, devices, Model::builder(folder))
        .tokens(tokens)
        .on_progress(on_progress)
        .plan(plan.cloned())
        .load();
    bar.finish_and_clear();
    if let Ok(model) = &model
        && model.placement().count() > 1
    {
        note(format_args!("layers: {}", division(&model.stages(), model.causal().needs().len())));
    }
    if let (Ok(model), ArithmeticChoice::Fastest) = (&model, place.arithmetic) {
        for (device, arithmetic) in on_gpus(model) {
            let fastest = if arithmetic == Arithmetic::Integers { "integers" } else { "floats" };
            note(format_args!("packed weights are multiplied in {fastest} on {device}"));
        }
    }
    model
}
