//! Loading a model: the options, and the checks before the long work.

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use burn::tensor::DType;
use kiln_cache::Plan;
use kiln_core::{
    Error, Result,
    budget::Claim,
    device_state::{DeviceState, Refusals},
    files::FolderSource,
    read_back,
    source::{MemorySource, Source},
    stages::Stages,
};
use kiln_generate::{ChatTemplates, GenerationConfig};
use kiln_kernels::{
    Arithmetic, Choice, Kernels, PackedLayout, Placement,
    device::{self, DeviceClass, DeviceInfo, DeviceName, Opened},
};
use kiln_models::{
    ConfigFile, Configured, LoadTarget, Mixture, RandomWeights,
    checkpoint::{Adapter, Checkpoint, Loader},
    configure, count_elements,
};
use kiln_weights::Format;
use web_time::Instant;

use super::{ArithmeticChoice, Layers, Loaded, Model};
use crate::{
    chat::chat_templates,
    embedding::EmbeddingConfig,
    folder::{generation_config, own_plan, tokenizer},
    self_test::{self, Ends, ModelVerdict, SelfTest, Trusted},
    speech::SpeechConfig,
};

/// The number type of weights, activations and caches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DtypeChoice {
    /// float16 on a GPU that supports it, or bfloat16 if the model's activations are too large for float16;
    /// else float32
    #[default]
    Auto,
    /// float32
    F32,
    /// float16
    F16,
    /// bfloat16, which is an error on the CPU
    Bf16,
}

impl FromStr for DtypeChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(match text {
            "auto" => Self::Auto,
            "f32" | "float32" => Self::F32,
            "f16" | "float16" => Self::F16,
            "bf16" | "bfloat16" => Self::Bf16,
            _ => {
                let known = ["auto", "f32", "f16", "bf16"].map(str::to_owned).into();
                return Err(Error::Unknown { what: "dtype", name: text.to_owned(), known });
            }
        })
    }
}

impl fmt::Display for DtypeChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

/// The progress of loading, in bytes of the files with weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadProgress {
    /// Bytes read so far
    pub read: u64,
    /// Bytes of all files
    pub total: u64,
}

/// Options for loading a model: created by [`Model::builder`], consumed by [`load`](Self::load).
///
/// Every option has a default: the best device, the number type that suits it, and 90 % of its memory.
///
/// ```
/// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
/// use kiln::{DtypeChoice, Model};
///
/// let model = Model::builder(folder)
///     .device("cpu".parse()?)
///     .dtype(DtypeChoice::F32)
///     .memory(1 << 30)
///     .on_progress(|progress| eprintln!("{} of {} bytes", progress.read, progress.total))
///     .load()?;
/// assert_eq!(model.dtype(), kiln::burn::tensor::DType::F32);
/// # Ok::<(), kiln::Error>(())
/// ```
#[must_use = "nothing is loaded before `load`"]
pub struct ModelBuilder<'a> {
    pub(super) weights: WeightSource,
    device: Place,
    /// Stages after the first: number of the first block, and device.
    pub(super) further_stages: Vec<(usize, Opened)>,
    /// Devices among which the blocks are divided, instead of `device` and `further_stages`.
    pub(super) divided: Option<(Vec<Opened>, Layers)>,
    dtype: DtypeChoice,
    pub(super) kernels: Choice,
    pub(super) arithmetic: ArithmeticChoice,
    quant: Option<Mixture>,
    /// Names in GGUF files of the tensors to pack; `None`: all tensors that the mixture packs.
    packed_tensors: Option<BTreeSet<String>>,
    largest_binding: Option<usize>,
    on_progress: Option<Box<dyn FnMut(LoadProgress) + 'a>>,
    pub(super) plan: Option<Plan>,
    pub(super) memory: Option<u64>,
    pub(super) resident_experts: Option<usize>,
    /// The device of experts, if it is not that of their block.
    pub(super) experts_on: Option<DeviceName>,
    self_test: SelfTest,
    pub(super) tokens: usize,
    /// Folders of adapters, with their scales.
    adapters: Vec<(Arc<dyn Source>, f32)>,
}

/// The source of the weights.
#[derive(Debug)]
pub(super) enum WeightSource {
    /// A folder or a GGUF file
    Path(PathBuf),
    Files(Arc<dyn Source>),
    Random(ConfigFile),
}

#[derive(Debug)]
enum Place {
    Named(DeviceName),
    Opened(Box<Opened>),
}

impl fmt::Debug for ModelBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelBuilder")
            .field("weights", &self.weights)
            .field("device", &self.device)
            .field("dtype", &self.dtype)
            .finish_non_exhaustive()
    }
}

impl<'a> ModelBuilder<'a> {
    fn new(weights: WeightSource) -> Self {
        Self {
            weights,
            device: Place::Named(DeviceName::Auto),
            further_stages: Vec::new(),
            divided: None,
            dtype: DtypeChoice::Auto,
            kernels: Choice::Auto,
            arithmetic: ArithmeticChoice::default(),
            quant: None,
            packed_tensors: None,
            largest_binding: None,
            on_progress: None,
            plan: None,
            memory: None,
            resident_experts: None,
            experts_on: None,
            self_test: SelfTest::default(),
            tokens: 0,
            adapters: Vec::new(),
        }
    }

    pub(super) fn folder(folder: &Path) -> Self {
        Self::new(WeightSource::Path(folder.to_owned()))
    }

    /// Prepares to load the files of a Hugging Face folder, or a GGUF file or all its parts, from memory: see
    /// [`Model::from_bytes`].
    pub fn from_bytes<N: Into<String>, B: AsRef<[u8]> + Send + Sync + 'static>(
        files: impl IntoIterator<Item = (N, B)>,
    ) -> Self {
        Self::from_source(Arc::new(MemorySource::new(files)))
    }

    /// Prepares to load the files of a Hugging Face folder, or a GGUF file or all its parts, from a source of
    /// one's own.
    pub fn from_source(source: Arc<dyn Source>) -> Self {
        Self::new(WeightSource::Files(source))
    }

    /// A model with this config and random weights that are generated on the device, for measurements and
    /// tests. It has no tokenizer.
    ///
    /// ```
    /// use kiln::ModelBuilder;
    ///
    /// let config = "model_type=llama,num_hidden_layers=2,hidden_size=64,num_attention_heads=4,\
    ///               intermediate_size=96,vocab_size=97";
    /// let model = ModelBuilder::random(config.parse()?).device("cpu".parse()?).load()?;
    /// let steps = model.generate(vec![1, 2, 3]).max_new_tokens(4).steps()?;
    /// assert_eq!(steps.count(), 4);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn random(config: ConfigFile) -> Self {
        Self::new(WeightSource::Random(config))
    }

    /// Opens this device for the model. Default: `auto`.
    pub fn device(self, name: DeviceName) -> Self {
        Self { device: Place::Named(name), ..self }
    }

    /// Uses a device that is already open.
    pub fn opened(self, device: Opened) -> Self {
        Self { device: Place::Opened(Box::new(device)), ..self }
    }

    /// Divides the blocks among several devices, in this order: a model that is too large for the first one
    /// is computed partly on the next. Devices that get no block are not used. [`memory`](Self::memory)
    /// limits each device but the CPU. It costs what [`stage`](Self::stage) costs, which this replaces.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Layers, Model, device};
    ///
    /// let device = device::open("cpu".parse()?)?;
    /// let model = Model::builder(folder)
    ///     .devices([device.clone(), device], Layers::Numbers(vec![3]))
    ///     .load()?;
    /// assert_eq!(model.placement().count(), 2);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn devices(self, devices: impl IntoIterator<Item = Opened>, layers: Layers) -> Self {
        Self { divided: Some((devices.into_iter().collect(), layers)), ..self }
    }

    /// Computes the blocks from number `first` on, and the head, on another device that is open; to be called
    /// in the order of the blocks. Between different devices, hidden states travel through host memory, steps
    /// are not captured, and the host chooses the tokens. [`memory`](Self::memory) limits each device.
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{Model, device};
    ///
    /// let device = device::open("cpu".parse()?)?;
    /// let model = Model::builder(folder).opened(device.clone()).stage(2, device).load()?;
    /// assert_eq!(model.placement().count(), 2);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn stage(mut self, first: usize, device: Opened) -> Self {
        self.further_stages.push((first, device));
        self
    }

    /// Sets the number type of weights, activations and caches. Default: [`DtypeChoice::Auto`].
    pub fn dtype(self, dtype: DtypeChoice) -> Self {
        Self { dtype, ..self }
    }

    /// Selects the implementation of the kernels. Default: the fastest one for each kernel that the device
    /// supports.
    pub fn kernels(self, kernels: Choice) -> Self {
        Self { kernels, ..self }
    }

    /// Sets the arithmetic of products with packed weights. Default: [`ArithmeticChoice::Auto`].
    ///
    /// ```
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../assets/demo");
    /// use kiln::{ArithmeticChoice, Mixture, Model, expert::kernels::Arithmetic};
    ///
    /// let model = Model::builder(folder)
    ///     .device("cpu".parse()?)
    ///     .quant(Mixture::Q8_0)
    ///     .arithmetic(ArithmeticChoice::Floats)
    ///     .load()?;
    /// assert_eq!(*model.arithmetic().first(), Arithmetic::Floats);
    /// # Ok::<(), kiln::Error>(())
    /// ```
    pub fn arithmetic(self, arithmetic: ArithmeticChoice) -> Self {
        Self { arithmetic, ..self }
    }

    /// Whether no activation is rounded to 8 bits: [`ArithmeticChoice::Floats`] instead of
    /// [`ArithmeticChoice::Auto`].
    pub fn exact(self, exact: bool) -> Self {
        self.arithmetic(if exact { ArithmeticChoice::Floats } else { ArithmeticChoice::Auto })
    }

    /// Packs the weights when they are loaded, in the formats of a mixture, as [`quantize`](crate::quantize)
    /// packs them in a file. `None`, the default: weights keep the format in which they are stored. Random
    /// weights are not packed: loading them is an [`Error::Setting`].
    pub fn quant(self, mixture: impl Into<Option<Mixture>>) -> Self {
        Self { quant: mixture.into(), ..self }
    }

    pub(crate) fn arithmetic_choice(&self) -> ArithmeticChoice {
        self.arithmetic
    }

    /// Packs only the tensors with these names in GGUF files.
    pub(crate) fn packed_tensors(self, names: impl IntoIterator<Item = String>) -> Self {
        Self { packed_tensors: Some(names.into_iter().collect()), ..self }
    }

    /// The headers of the files that are loaded.
    ///
    /// # Errors
    /// The errors of [`Checkpoint::open`]; [`Error::Setting`] for random weights.
    pub(crate) fn checkpoint(&self) -> Result<Checkpoint> {
        match &self.weights {
            WeightSource::Path(path) => Checkpoint::open(path),
            WeightSource::Files(source) => Checkpoint::from_source(source.clone()),
            WeightSource::Random(_) => {
                let why = "is made up; name a folder or a GGUF file".to_owned();
                Err(Error::Setting { name: "model", why })
            }
        }
    }

    /// Sets the size in bytes of the largest tensor that is passed to a kernel. Default and maximum: the
    /// limit of the device.
    pub fn largest_binding(self, bytes: impl Into<Option<usize>>) -> Self {
        Self { largest_binding: bytes.into(), ..self }
    }

    /// Sets a callback for the number of bytes of weights read so far. The first call, with 0, comes before
    /// the first tensor.
    pub fn on_progress(self, on_progress: impl FnMut(LoadProgress) + 'a) -> Self {
        Self { on_progress: Some(Box::new(on_progress)), ..self }
    }

    /// Sets the plan of the caches that will be used: a plan that does not suit the model is an error before
    /// its weights are read. Default: the folder's own plan.
    pub fn plan(self, plan: impl Into<Option<Plan>>) -> Self {
        Self { plan: plan.into(), ..self }
    }

    /// Limits the bytes of device memory for weights, caches and activations together. Default: 90 % of the
    /// device's memory, if it is known.
    pub fn memory(self, bytes: impl Into<Option<u64>>) -> Self {
        Self { memory: bytes.into(), ..self }
    }

    /// Keeps the weights of experts in host memory. Each forward pass copies the experts that its tokens are
    /// routed to, unless they are among the `resident` most recently used experts of their block, which stay
    /// on the device. Steps are not captured with this option. `None`, the default: all experts are on the
    /// device.
    pub fn offload_experts(self, resident: impl Into<Option<usize>>) -> Self {
        Self { resident_experts: resident.into(), ..self }
    }

    /// Computes the experts of a mixture on the CPU, from host memory: for a model that is too large for the
    /// GPU, which computes the rest. Vectors move between them, and weights do not. Steps are not captured
    /// with this option. `None`, the default: experts are computed on the device of the model.
    ///
    /// Loading refuses other devices, models without experts, several devices, and
    /// [`offload_experts`](Self::offload_experts) beside it.
    pub fn experts_on(self, device: impl Into<Option<DeviceName>>) -> Self {
        Self { experts_on: device.into(), ..self }
    }

    /// Adds a LoRA adapter, a folder as peft saves it, whose changes are multiplied by `scale`. Dense weights
    /// are changed once, while the model is loaded. Packed ones, such as all matrices on the CPU, keep the
    /// adapter beside them. Several adapters add up. For adapters that share a model, see
    /// [`Model::with_adapter`].
    pub fn adapter(self, folder: impl Into<PathBuf>, scale: f32) -> Self {
        self.adapter_from_source(Arc::new(FolderSource::new(&folder.into())), scale)
    }

    /// Adds the adapter of a folder, wherever that is.
    pub fn adapter_from_source(mut self, folder: Arc<dyn Source>, scale: f32) -> Self {
        self.adapters.push((folder, scale));
        self
    }

    /// Sets the minimum length of a sequence in tokens: without memory for it, loading fails before the
    /// weights are read. Default: 1.
    pub fn tokens(self, tokens: usize) -> Self {
        Self { tokens, ..self }
    }

    /// Sets when the kernels of the device are compared with their references before use, and the model on
    /// the device with the same model on the CPU. Default: once on each GPU.
    pub fn self_test(self, when: SelfTest) -> Self {
        Self { self_test: when, ..self }
    }

    /// Loads the model.
    ///
    /// # Errors
    /// The errors of [`load_async`](Self::load_async).
    pub fn load(self) -> Result<Model> {
        read_back::wait(self.load_async())
    }

    /// Loads the model. In a browser, it awaits the device; elsewhere, it blocks while the device is opened
    /// and while weights are read and copied.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no such device; [`Error::File`] for a file that is missing, damaged or
    /// contradicts another; [`Error::Unknown`] for an unknown architecture; [`Error::Setting`] for options
    /// that the device does not support and for sizes that no model can have; [`Error::OutOfMemory`] if the
    /// model does not fit.
    pub async fn load_async(mut self) -> Result<Model> {
        let started = Instant::now();
        let devices = self.open_all().await?;
        let mut on_progress = self.on_progress.take();
        let mut on_progress = |progress| {
            if let Some(on_progress) = &mut on_progress {
                on_progress(progress);
            }
        };
        let (mut loaded, adapters) = match &self.weights {
            WeightSource::Random(config) => {
                let adapters = self.read_adapters(&*configure(config)?)?;
                (self.make_up(config, &devices).await?, adapters)
            }
            _ => {
                let checkpoint = self.checkpoint()?;
                let adapters = self.read_adapters(&*configure(&checkpoint.config)?)?;
                (self.load_checkpoint(checkpoint, &devices, &mut on_progress).await?, adapters)
            }
        };
        for adapter in adapters {
            loaded.adapt(adapter, true)?;
        }
        loaded.load_time = started.elapsed();
        Ok(Model { loaded: Arc::new(loaded) })
    }

    /// Reads the adapters before the long work.
    fn read_adapters(&self, configured: &dyn Configured) -> Result<Vec<Adapter>> {
        let names = configured.tensor_names();
        self.adapters.iter().map(|(folder, scale)| Adapter::read(&**folder, &names, *scale)).collect()
    }

    /// Compares some blocks of the model and its head on the device with the same blocks on the CPU: each
    /// kind of block, on 40, 3 and 1 tokens. Also compares captured steps with launched ones. Loading does
    /// this at the first use of a GPU; this method does not store the result. `None` for speech models, for
    /// models with fewer positions than that, and for the CPU.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load); [`Error::DeviceLost`].
    pub fn compare(&self) -> Result<Option<ModelVerdict>> {
        if self.is_divided() || !self.further_stages.is_empty() {
            let why = "are compared one device at a time; load the model on one device".to_owned();
            return Err(Error::Setting { name: "stages", why });
        }
        let device = read_back::wait(self.open_all())?.first().clone();
        let kernels = Kernels::new(self.kernels, &device.device)?;
        let mut checkpoint = self.checkpoint()?;
        let configured = configure(&checkpoint.config)?;
        let dtype = self.dtype_on(&device, &*configured)?;
        if device.info.class == DeviceClass::Cpu || !cfg!(feature = "cpu") {
            return Ok(None);
        }
        if let Some(mixture) = self.quant {
            check_quant(mixture, &kernels, dtype, &device.info)?;
            checkpoint.pack_as(mixture, self.packed_tensors.as_ref())?;
        }
        let binding = self.largest_binding_on(&device);
        let ends = Ends::of(&checkpoint, &*configured, self.copied_experts(), binding);
        let verdict =
            |ends: Ends<'_>| read_back::wait(ends.verdict(&kernels, &kernels, &device, dtype, |_| ()));
        ends.map(verdict).transpose()
    }

    pub(super) async fn open(&self) -> Result<Opened> {
        match &self.device {
            Place::Named(name) => device::open_async(*name).await,
            Place::Opened(device) => Ok((**device).clone()),
        }
    }

    /// Checks that every stage has a block, and that the other options go with several stages.
    pub(super) fn check_stages(&self, stages: &Stages<Opened>, blocks: usize) -> Result<()> {
        self.check_experts(stages)?;
        match stages.blocks(usize::MAX).map(|(own, _)| own.start).find(|first| *first >= blocks) {
            None => Ok(()),
            Some(first) => {
                let why =
                    format!("begin a stage with block {first}, and the model has {blocks} blocks, from 0 on");
                Err(Error::Setting { name: "stages", why })
            }
        }
    }

    async fn load_checkpoint(
        &self,
        mut checkpoint: Checkpoint,
        devices: &Stages<Opened>,
        on_progress: &mut dyn FnMut(LoadProgress),
    ) -> Result<Loaded> {
        let configured = configure(&checkpoint.config)?;
        self.check_stages(devices, configured.needs().len())?;
        let dtype = self.dtype_of(devices, &*configured)?;
        // Small files come first, so that their errors are reported before the long work.
        let generation = generation_config(&checkpoint)?;
        let tokenizer = tokenizer(&checkpoint)?;
        let own_plan = own_plan(&generation);
        let (plan, needs) = (self.plan.as_ref().unwrap_or(&own_plan), configured.needs());
        plan.check(&needs)?;
        let chat_templates = chat_templates(&checkpoint)?;
        let embedding = EmbeddingConfig::read(&checkpoint);
        let mut speech = configured.features().map(|_| SpeechConfig::read(&checkpoint)).transpose()?;
        if let Some((speech, tokenizer)) = speech.as_mut().zip(tokenizer.as_ref()) {
            speech.complete(&checkpoint.config, tokenizer, configured.sizes().vocab);
        }

        self.pack(&mut checkpoint, devices, dtype)?;
        let experts_on = self.experts_device(devices).await?;
        let of_experts = |kernels: &Kernels| checkpoint.held_expert_bytes(kernels, DType::F32);
        let expert_place = self.expert_place(experts_on.as_ref(), of_experts)?;
        let parts = |kernels: &Kernels, device: &Opened| {
            let binding = self.largest_binding_on(device);
            let ends = Ends::of(&checkpoint, &*configured, self.copied_experts(), binding);
            let formats = checkpoint.packed_formats(kernels, dtype);
            self.arithmetic.check(kernels, device, &formats)?;
            Ok((self.arithmetic.possible(device.info.class, &formats), ends))
        };
        let stages = self.trusted_stages(devices, dtype, parts).await?;
        let arithmetic = async |Trusted { kernels, device, .. }: &Trusted| {
            self.arithmetic_on(kernels, device, dtype, &checkpoint.packed_formats(kernels, dtype)).await
        };
        let arithmetic = stages.try_map_async(arithmetic).await?;
        let placement = stages.map(|stage| stage.kernels.clone());
        if let Some(mixture) = self.quant {
            for Trusted { kernels, device, .. } in stages.iter() {
                check_quant(mixture, kernels, dtype, &device.info)?;
            }
        }
        let claims = self.claims(&checkpoint, &*configured, dtype, plan, (devices, &stages))?;
        let refusals = Refusals::of_all(placement.iter().map(Kernels::device));
        let total = checkpoint.bytes();
        let mut read = 0;
        let mut on_progress = |bytes: u64| {
            read += bytes;
            on_progress(LoadProgress { read, total });
        };
        on_progress(0);
        let targets = self.targets(&stages, arithmetic.clone());
        let mut loader = Loader::new(&checkpoint, targets, dtype, &mut on_progress);
        loader.place_experts(expert_place);
        let causal = configured.load(&mut loader, &placement)?;
        let parameters = loader.finish()?;
        wait_for_weights(&placement, &refusals).await?;
        for Trusted { device, .. } in stages.iter() {
            tracing::debug!(target: "kiln::memory", usage = ?device.device.memory_pool_usage(), "loaded");
        }
        Ok(Loaded {
            causal: causal.into(),
            name: name_of(&checkpoint.folder),
            sizes: configured.sizes(),
            captures: stages.iter().all(|stage| stage.captures),
            stages: stages.zip(claims, |stage, claim| (stage.device.clone(), Arc::new(claim))),
            adapters: Vec::new(),
            tensor_names: configured.tensor_names(),
            placement,
            experts_on,
            dtype,
            arithmetic,
            tokenizer: tokenizer.map(Arc::new),
            token_table: Arc::default(),
            generation,
            speech,
            embedding,
            chat_templates,
            plan: own_plan,
            fingerprint: Some(checkpoint.fingerprint()?),
            parameters,
            load_time: Duration::ZERO,
            told: Arc::default(),
        })
    }

    /// Packs the weights, if a mixture was asked for and all devices can compute with it.
    pub(super) fn pack(
        &self,
        checkpoint: &mut Checkpoint,
        devices: &Stages<Opened>,
        dtype: DType,
    ) -> Result<()> {
        let Some(mixture) = self.quant else { return Ok(()) };
        for device in devices.iter() {
            let kernels = Kernels::new(self.kernels, &device.device)?;
            check_quant(mixture, &kernels, dtype, &device.info)?;
        }
        checkpoint.pack_as(mixture, self.packed_tensors.as_ref())
    }

    async fn make_up(&self, config: &ConfigFile, devices: &Stages<Opened>) -> Result<Loaded> {
        if self.quant.is_some() {
            let why = "packs no random weights; save them as a folder and load that".to_owned();
            return Err(Error::Setting { name: "quant", why });
        }
        self.arithmetic.check_unpacked()?;
        let configured = configure(config)?;
        self.check_stages(devices, configured.needs().len())?;
        let dtype = self.dtype_of(devices, &*configured)?;
        let stages = self.trusted_stages(devices, dtype, |_, _| Ok((Vec::new(), None))).await?;
        let arithmetic = async |Trusted { kernels, device, .. }: &Trusted| {
            self.arithmetic_on(kernels, device, dtype, &[]).await
        };
        let arithmetic = stages.try_map_async(arithmetic).await?;
        let placement = stages.map(|stage| stage.kernels.clone());
        let budgets = self.budgets(&stages);
        // Counts all of them first: if weights were generated one by one, minutes would pass before one does
        // not fit.
        let claim = budgets.first().claim("the model's weights", 0)?;
        let elements = count_elements(&*configured, &placement, claim)?;
        let configured_sizes = configured.sizes();
        let of_experts = configured_sizes.expert_elements().saturating_mul(dtype.size() as u64);
        let spared = self.spared(&stages.first().device, &configured_sizes, of_experts)?;
        let mut bytes = elements.iter().map(|elements| elements.saturating_mul(dtype.size() as u64));
        let held = budgets.try_map(|budget| {
            let bytes = bytes.next().unwrap_or(0).saturating_sub(spared);
            budget.claim("the model's weights", bytes)
        })?;
        let held = held.map(Claim::bytes);
        let of_experts = configured_sizes.expert_elements().saturating_mul(DType::F32.size() as u64);
        let experts_on = self.experts_device(devices).await?;
        let expert_place = self.expert_place(experts_on.as_ref(), |_| of_experts)?;
        let mut weights = RandomWeights {
            targets: self.targets(&stages, arithmetic.clone()),
            block: 0,
            dtype,
            expert_place,
            other: None,
            claims: budgets.try_map(|budget| budget.claim("weights", 0))?,
            elements: 0,
        };
        let refusals = Refusals::of_all(placement.iter().map(Kernels::device));
        let causal = configured.load(&mut weights, &placement)?;
        let RandomWeights { mut claims, elements, .. } = weights;
        if self.resident_experts.is_some() {
            // Includes room for the experts that will be resident.
            for (claim, held) in claims.iter_mut().zip(held.iter()) {
                claim.resize(claim.bytes().max(*held))?;
            }
        }
        wait_for_weights(&placement, &refusals).await?;
        Ok(Loaded {
            causal: causal.into(),
            name: "random".to_owned(),
            sizes: configured.sizes(),
            captures: stages.iter().all(|stage| stage.captures),
            stages: stages.zip(claims, |stage, claim| (stage.device.clone(), Arc::new(claim))),
            adapters: Vec::new(),
            tensor_names: configured.tensor_names(),
            placement,
            experts_on,
            dtype,
            arithmetic,
            tokenizer: None,
            token_table: Arc::default(),
            generation: GenerationConfig::default(),
            speech: None,
            embedding: Ok(EmbeddingConfig::default()),
            chat_templates: ChatTemplates::default(),
            plan: Plan::dynamic(),
            fingerprint: None,
            parameters: elements,
            load_time: Duration::ZERO,
            told: Arc::default(),
        })
    }

    /// The stages without parts of their devices that give wrong results. `parts`: the packed formats with
    /// the arithmetic of their products, and the blocks of the model that are compared on a device.
    async fn trusted_stages<'c>(
        &self,
        devices: &Stages<Opened>,
        dtype: DType,
        parts: impl Fn(&Kernels, &Opened) -> Result<(Vec<(Format, Arithmetic)>, Option<Ends<'c>>)>,
    ) -> Result<Stages<Trusted>> {
        let mut known: Vec<(Opened, Trusted)> = Vec::new();
        let trusted = async |device: &Opened| {
            if let Some((_, trusted)) = known.iter().find(|(other, _)| other.device == device.device) {
                return Ok(trusted.clone());
            }
            let kernels = Kernels::new(self.kernels, &device.device)?;
            let (packed, ends) = parts(&kernels, device)?;
            let trusted = self.trusted(kernels, device.clone(), dtype, &packed, ends.as_ref()).await?;
            known.push((device.clone(), trusted.clone()));
            Ok(trusted)
        };
        devices.try_map_async(trusted).await
    }

    /// The device without parts that give wrong results, unless kernels were chosen by name.
    async fn trusted(
        &self,
        kernels: Kernels,
        device: Opened,
        dtype: DType,
        packed: &[(Format, Arithmetic)],
        ends: Option<&Ends<'_>>,
    ) -> Result<Trusted> {
        match self.kernels {
            Choice::Auto => self_test::trusted(kernels, device, dtype, self.self_test, packed, ends).await,
            Choice::Reference | Choice::Wgsl | Choice::Cube => {
                Ok(Trusted { device, kernels, captures: true })
            }
        }
    }

    /// The number type for all stages: by default that of the first device, or float32 if another device does
    /// not support it.
    pub(super) fn dtype_of(&self, devices: &Stages<Opened>, configured: &dyn Configured) -> Result<DType> {
        let dtype = self.dtype_on(devices.first(), configured)?;
        match devices.iter().try_for_each(|device| check_dtype(device, dtype)) {
            Err(_) if self.dtype == DtypeChoice::Auto => Ok(DType::F32),
            supported => supported.map(|()| dtype),
        }
    }

    fn dtype_on(&self, device: &Opened, configured: &dyn Configured) -> Result<DType> {
        let dtype = match self.dtype {
            DtypeChoice::Auto => device.natural_dtype(configured.fits_float16()),
            DtypeChoice::F32 => DType::F32,
            DtypeChoice::F16 => DType::F16,
            DtypeChoice::Bf16 => DType::BF16,
        };
        check_dtype(device, dtype)?;
        Ok(dtype)
    }

    /// The device of each stage, to load weights to it.
    fn targets(&self, stages: &Stages<Trusted>, arithmetic: Stages<Arithmetic>) -> Stages<LoadTarget> {
        stages.zip(arithmetic, |Trusted { kernels, device, .. }, arithmetic| LoadTarget {
            kernels: kernels.clone(),
            arithmetic,
            largest_binding: self.largest_binding_on(device),
            copied: device.is_asynchronous(),
        })
    }

    fn largest_binding_on(&self, device: &Opened) -> usize {
        let limit = device.info.largest_binding;
        self.largest_binding.map_or(limit, |asked| asked.min(limit))
    }
}

/// Checks that the device can compute with weights packed in `mixture`.
///
/// # Errors
/// [`Error::Setting`] if it does not support the codes of the mixture.
pub(crate) fn check_quant(
    mixture: Mixture,
    kernels: &Kernels,
    dtype: DType,
    device: &DeviceInfo,
) -> Result<()> {
    // The CPU packs float32, too, which makes nothing smaller.
    let is_computed = PackedLayout::for_matrix(kernels, mixture.format(), dtype).is_some();
    if is_computed && mixture != Mixture::F32 {
        return Ok(());
    }
    let why = format!("is {mixture}, and {} does not compute from such codes; leave it out", device.name);
    Err(Error::Setting { name: "quant", why })
}

/// Checks that the device computes numbers of this type.
///
/// # Errors
/// [`Error::Setting`] if it does not.
fn check_dtype(device: &Opened, dtype: DType) -> Result<()> {
    let wrong = |why| Err(Error::Setting { name: "dtype", why });
    if !device.device.supports_dtype(dtype) {
        return wrong(format!("{} does not compute {}; use f32", device.info.name, dtype.name()));
    }
    if device.info.class == DeviceClass::Cpu && dtype == DType::BF16 {
        return wrong(
            "the CPU computes bf16 ten times slower than f32; use f32, or f16 for half the memory".to_owned(),
        );
    }
    Ok(())
}

/// Waits until the weights are on their devices.
///
/// # Errors
/// The error of a device; [`Error::OutOfMemory`] if it had no room for them.
async fn wait_for_weights(placement: &Placement, before: &Refusals) -> Result<()> {
    for kernels in placement.iter() {
        DeviceState::of(kernels.device()).finished().await?;
    }
    before.none_since().map_err(|_| Error::refused("the weights"))
}

/// The name of a folder or file. A snapshot in the hub cache is named after its repository, because its
/// folder is named after a commit.
pub fn name_of(folder: &Path) -> String {
    let named = |path: &Path| path.file_name().map(|name| name.display().to_string());
    let repo = || {
        let snapshots = folder.parent().filter(|parent| parent.ends_with("snapshots"))?;
        let repo = named(snapshots.parent()?)?;
        repo.strip_prefix("models--").map(|repo| repo.replacen("--", "/", 1))
    };
    repo().or_else(|| named(folder)).unwrap_or_else(|| folder.display().to_string())
}
