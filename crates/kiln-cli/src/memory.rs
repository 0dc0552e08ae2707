//! Options for the KV cache and for running requests.

use clap::Args;
use kiln::{Error, Offload, OnOutOfMemory, Plan, Request, Result, expert::STRATEGIES};

/// The KV cache and its placement.
#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    #[arg(short, long, value_name = "NAME[:KEY=VALUE,..]", help = caches())]
    pub(crate) cache: Option<String>,
    /// Cache of sliding-window layers [default: `sliding` with `dynamic` and `static`]
    #[arg(long, hide_short_help = true, value_name = "NAME[:KEY=VALUE,..]")]
    pub(crate) cache_windowed: Option<String>,
    /// Count positions in a sink cache as this version of transformers did: 4.47
    #[arg(long, hide_short_help = true, value_name = "VERSION")]
    pub(crate) compat: Option<String>,
    /// Keep the cache in host memory
    ///
    /// A layer is on the device only while it is computed. `all` is the default; `full` moves only layers
    /// without a window, which grow with the text; `layers=N` keeps the last N layers on the device; `auto`
    /// moves layers when memory runs out.
    #[arg(long, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "all")]
    pub(crate) offload: Option<Offload>,
    /// When memory runs out: offload, quantize or fail
    ///
    /// `offload` moves layers of the cache to host memory: the tokens stay the same. `quantize` packs the
    /// cache to 4 bits per number: the tokens change. `fail` ends with an error.
    #[arg(long, default_value_t, value_name = "WHAT")]
    pub(crate) on_oom: OnOutOfMemory,
    /// Capture the decode step once and replay it, where the device supports it [default]
    #[arg(long, hide_short_help = true, conflicts_with = "no_compile")]
    pub(crate) compile: bool,
    /// Do not capture the decode step
    #[arg(long, hide_short_help = true)]
    pub(crate) no_compile: bool,
}

impl CacheArgs {
    /// Returns `plan` with the requested layers in host memory.
    pub(crate) fn offloaded(&self, plan: Plan) -> Plan {
        match self.offload {
            Some(offload) => plan.offloaded(offload),
            None => plan,
        }
    }

    /// The requested plan; `None`: the model's own.
    pub(crate) fn plan(&self) -> Result<Option<Plan>> {
        let windowed = self.cache_windowed.as_deref().map(|text| self.named(text)).transpose()?;
        if self.cache.is_none() && windowed.is_none() && self.compat.is_none() {
            return Ok(None);
        }
        let plan = self.named(self.cache.as_deref().unwrap_or("dynamic"))?;
        Ok(Some(match windowed {
            Some(windowed) => plan.windowed(windowed),
            None => plan,
        }))
    }

    fn named(&self, text: &str) -> Result<Plan> {
        let plan = Plan::named(text)?;
        match &self.compat {
            Some(version) if plan.global.strategy.settings.iter().any(|(key, _)| *key == "compat") => {
                let (global, rest) = text.split_at(text.find(" + ").unwrap_or(text.len()));
                let separator = if global.contains(':') { ',' } else { ':' };
                Plan::named(&format!("{global}{separator}compat={version}{rest}"))
            }
            Some(_) => Err(Error::Setting {
                name: "--compat",
                why: format!(
                    "`{}` is the same in every version; it goes with --cache sink",
                    plan.global.strategy.name
                ),
            }),
            None => Ok(plan),
        }
    }

    /// Whether to capture the decode step; `None`: the cache's default.
    pub(crate) fn compile(&self) -> Option<bool> {
        compile(self.compile, self.no_compile)
    }
}

/// Whether steps are captured; `None`: the device's default.
pub(crate) fn compile(yes: bool, no: bool) -> Option<bool> {
    match (yes, no) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

/// The help text of `--cache`.
fn caches() -> String {
    let names: Vec<&str> = STRATEGIES.iter().map(|strategy| strategy.name).collect();
    format!(
        "KV cache: {}; `kiln caches` describes them [default: the model's, else dynamic]",
        names.join(", ")
    )
}

/// Options for running requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running {
    prefill_chunk: Option<usize>,
    compile: Option<bool>,
    on_oom: OnOutOfMemory,
}

impl Running {
    pub(crate) fn new(prefill_chunk: Option<usize>, memory: &CacheArgs) -> Result<Self> {
        let on_oom = match memory.offload {
            Some(Offload::AsNeeded) => OnOutOfMemory::Offload,
            _ => memory.on_oom,
        };
        match prefill_chunk {
            Some(0) => {
                let why = "is 0, must be at least 1".to_owned();
                Err(Error::Setting { name: "--prefill-chunk", why })
            }
            _ => Ok(Self { prefill_chunk, compile: memory.compile(), on_oom }),
        }
    }

    pub(crate) fn of(self, request: Request<'_>) -> Request<'_> {
        request.prefill_chunk(self.prefill_chunk).compile(self.compile).on_oom(self.on_oom)
    }
}
