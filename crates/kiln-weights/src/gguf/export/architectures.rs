//! Differences between the architectures: one function each, in the order of `gguf/config/architectures.rs`.

use super::config::{Folder, wrong};
use crate::{
    Error,
    gguf::{Array, Value},
};

/// A kind of model, as known to Transformers and to llama.cpp.
#[derive(Debug)]
pub(super) struct Architecture {
    pub(super) model_type: &'static str,
    /// Value of `general.architecture`.
    pub(super) name: &'static str,
    pub(super) defaults: Defaults,
    pub(super) describe: fn(&mut Folder<'_>) -> Result<(), Error>,
}

/// Defaults of Transformers for fields that a config leaves out.
#[derive(Debug)]
pub(super) struct Defaults {
    /// `None` for the number of attention heads.
    pub(super) kv_heads: Option<u64>,
    /// `None` for the hidden size divided by the number of heads.
    pub(super) head_dim: Option<u64>,
    pub(super) positions: u64,
    pub(super) eps: f64,
    pub(super) theta: f64,
}

impl Defaults {
    const fn new(kv_heads: Option<u64>, positions: u64) -> Self {
        Self { kv_heads, head_dim: None, positions, eps: 1e-6, theta: 1e4 }
    }

    const fn head_dim(self, size: u64) -> Self {
        Self { head_dim: Some(size), ..self }
    }

    const fn eps(self, eps: f64) -> Self {
        Self { eps, ..self }
    }

    const fn theta(self, theta: f64) -> Self {
        Self { theta, ..self }
    }
}

/// All models that can be written.
pub(super) static ARCHITECTURES: &[Architecture] = &[
    of("llama", "llama", Defaults::new(None, 2048), llama),
    of("mistral", "llama", Defaults::new(Some(8), 131_072), mistral),
    of("mixtral", "llama", Defaults::new(Some(8), 131_072).eps(1e-5).theta(1e6), mixtral),
    of("qwen2", "qwen2", Defaults::new(Some(32), 32_768), qwen),
    of("qwen2_moe", "qwen2moe", Defaults::new(Some(16), 32_768), qwen2_moe),
    of("qwen3", "qwen3", Defaults::new(Some(32), 32_768).head_dim(128), qwen),
    of("qwen3_moe", "qwen3moe", Defaults::new(Some(4), 32_768), qwen3_moe),
    of("phi3", "phi3", Defaults::new(None, 4096).eps(1e-5), phi3),
    of("gemma", "gemma", Defaults::new(Some(16), 8192).head_dim(256), gemma),
    of("gemma2", "gemma2", Defaults::new(Some(4), 8192).head_dim(256), gemma2),
    of("gemma3_text", "gemma3", Defaults::new(Some(4), 131_072).head_dim(256).theta(1e6), gemma3),
    of("mamba", "mamba", Defaults::new(None, MAMBA_POSITIONS).eps(1e-5), mamba),
    of("falcon_mamba", "mamba", Defaults::new(None, MAMBA_POSITIONS).eps(1e-5), mamba),
    of("jamba", "jamba", Defaults::new(Some(8), 262_144), jamba),
];

/// Context length to write for Mamba. The model has no limit, but llama.cpp needs a number.
const MAMBA_POSITIONS: u64 = 1 << 20;

const SILU: [&str; 2] = ["silu", "swish"];

const fn of(
    model_type: &'static str,
    name: &'static str,
    defaults: Defaults,
    describe: fn(&mut Folder<'_>) -> Result<(), Error>,
) -> Architecture {
    Architecture { model_type, name, defaults, describe }
}

fn llama(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    folder.decoder()?;
    folder.rope()?;
    let (vocab, rotated) = (folder.needed("vocab_size")?, folder.rotated()?);
    folder.count("vocab_size", vocab)?;
    folder.count("rope.dimension_count", rotated)
}

fn mistral(folder: &mut Folder<'_>) -> Result<(), Error> {
    llama(folder)?;
    let default = Some(4096).filter(|_| !folder.is_null("sliding_window"));
    let types = folder.get("layer_types").and_then(|types| types.as_array());
    let slides = |kind: &serde_json::Value| kind == "sliding_attention";
    let (some, all) =
        types.map_or((true, true), |types| (types.iter().any(slides), types.iter().all(slides)));
    if some && !all {
        let why =
            "`layer_types` has blocks with and without a window, and in a GGUF file of Mistral all are alike";
        return Err(wrong(why));
    }
    match folder.unsigned("sliding_window")?.or(default).filter(|_| some) {
        Some(window) => folder.count("attention.sliding_window", window),
        None => Ok(()),
    }
}

fn mixtral(folder: &mut Folder<'_>) -> Result<(), Error> {
    llama(folder)?;
    folder.experts(8, 2)?;
    match folder.unsigned("sliding_window")? {
        Some(window) => folder.count("attention.sliding_window", window),
        None => Ok(()),
    }
}

/// Writes Qwen2 or Qwen3. GGUF has no key for the window on some of their blocks.
fn qwen(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    if folder.boolean("use_sliding_window")? == Some(true) {
        return Err(wrong("`use_sliding_window` is true, and a GGUF file of this model has no window"));
    }
    folder.decoder()?;
    folder.rope()
}

fn qwen2_moe(folder: &mut Folder<'_>) -> Result<(), Error> {
    qwen(folder)?;
    folder.qwen_experts([60, 4, 1408], false)?;
    let shared = folder.unsigned("shared_expert_intermediate_size")?.unwrap_or(5632);
    folder.count("expert_shared_feed_forward_length", shared)
}

fn qwen3_moe(folder: &mut Folder<'_>) -> Result<(), Error> {
    qwen(folder)?;
    folder.qwen_experts([128, 8, 768], true)
}

fn phi3(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    folder.decoder()?;
    let trained = folder.trained()?.unwrap_or(4096);
    folder.count("rope.scaling.original_context_length", trained)?;
    folder.rope()?;
    let (rotated, window) = (folder.rotated()?, folder.unsigned("sliding_window")?.unwrap_or(0));
    folder.count("rope.dimension_count", rotated)?;
    // 0 stands for none; without the key, llama.cpp uses a default.
    folder.count("attention.sliding_window", window)
}

fn gemma(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&["gelu_pytorch_tanh", "gelu"])?;
    folder.decoder()?;
    folder.rope()
}

fn gemma2(folder: &mut Folder<'_>) -> Result<(), Error> {
    gemma(folder)?;
    for (key, default) in [("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)] {
        if folder.is_null(key) {
            return Err(wrong(format!("`{key}` is null, and every GGUF file of Gemma 2 has a cap")));
        }
        let cap = folder.number(key)?.unwrap_or(default);
        folder.real(key, cap);
    }
    let window = folder.unsigned("sliding_window")?.unwrap_or(4096);
    folder.count("attention.sliding_window", window)
}

fn gemma3(folder: &mut Folder<'_>) -> Result<(), Error> {
    const PATTERN: &str = "attention.sliding_window_pattern";
    gemma(folder)?;
    if folder.get("attn_logit_softcapping").is_some() {
        return Err(wrong("`attn_logit_softcapping` is set, and GGUF files of Gemma 3 have no such cap"));
    }
    if let Some(cap) = folder.number("final_logit_softcapping")? {
        folder.real("final_logit_softcapping", cap);
    }
    let local = folder.local_theta()?;
    folder.real("rope.freq_base_swa", local);
    let window = folder.unsigned("sliding_window")?.unwrap_or(4096);
    folder.count("attention.sliding_window", window)?;
    // Without a key, the period is 6.
    if let Some(types) = folder.get("layer_types").and_then(|types| types.as_array()) {
        let slides: Vec<bool> = types.iter().map(|kind| kind == "sliding_attention").collect();
        if slides.iter().enumerate().any(|(i, slides)| *slides == (i + 1).is_multiple_of(6)) {
            folder.set(PATTERN, Value::Array(Array::Bool(slides)));
        }
    } else if let Some(period) = folder.unsigned("sliding_window_pattern")?.filter(|period| *period != 6) {
        folder.count(PATTERN, period)?;
    }
    Ok(())
}

/// Writes Mamba or Falcon Mamba.
fn mamba(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    let hidden = folder.needed("hidden_size")?;
    let inner = folder.unsigned("expand")?.unwrap_or(2).saturating_mul(hidden);
    let blocks = folder.needed("num_hidden_layers")?;
    let eps = folder.number("layer_norm_epsilon")?.unwrap_or(folder.architecture.defaults.eps);
    let normed = folder.architecture.model_type == "falcon_mamba";
    if normed && folder.number("mixer_rms_eps")?.is_some_and(|eps| eps as f32 != 1e-6) {
        return Err(wrong("`mixer_rms_eps` is not 1e-6, and GGUF has no key for it"));
    }
    folder.count("context_length", folder.architecture.defaults.positions)?;
    folder.count("embedding_length", hidden)?;
    // There is no feed-forward and no attention, but llama.cpp needs the keys.
    folder.count("feed_forward_length", 0)?;
    folder.count("attention.head_count", 0)?;
    folder.count("block_count", blocks)?;
    let (width, state) = (folder.unsigned("conv_kernel")?, folder.unsigned("state_size")?);
    let rank = folder.time_step_rank("time_step_rank", hidden)?;
    folder.state_space(inner, hidden, [width.unwrap_or(4), state.unwrap_or(16), rank])?;
    folder.real("attention.layer_norm_rms_epsilon", eps);
    folder.set("ssm.dt_b_c_rms", Value::Bool(normed));
    Ok(())
}

fn jamba(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    folder.decoder()?;
    let hidden = folder.needed("hidden_size")?;
    let inner = folder.unsigned("mamba_expand")?.unwrap_or(2).saturating_mul(hidden);
    let (width, state) = (folder.unsigned("mamba_d_conv")?, folder.unsigned("mamba_d_state")?);
    let rank = folder.time_step_rank("mamba_dt_rank", hidden)?;
    folder.state_space(inner, hidden, [width.unwrap_or(4), state.unwrap_or(16), rank])?;
    // Blocks without attention have no heads.
    let period = folder.unsigned("attn_layer_period")?.unwrap_or(8).max(1);
    let offset = folder.unsigned("attn_layer_offset")?.unwrap_or(4);
    let kv_heads =
        i32::try_from(folder.kv_heads()?).map_err(|_| wrong("`num_key_value_heads` is too large"))?;
    let blocks = folder.needed("num_hidden_layers")?;
    let heads = |block| if block % period == offset { kv_heads } else { 0 };
    folder.set("attention.head_count_kv", Value::Array(Array::I32((0..blocks).map(heads).collect())));
    folder.experts(16, 2)
}

/// Upper limit for the number of blocks.
const MOST_BLOCKS: u64 = 4096;

impl Folder<'_> {
    /// Writes the keys of models with attention and feed-forwards.
    fn decoder(&mut self) -> Result<(), Error> {
        let blocks = self.needed("num_hidden_layers")?;
        if blocks > MOST_BLOCKS {
            return Err(wrong(format!(
                "`num_hidden_layers` is {blocks}; at most {MOST_BLOCKS} are possible"
            )));
        }
        let size = self.head_dim()?;
        for (key, number) in [
            ("block_count", blocks),
            ("context_length", self.positions()?),
            ("embedding_length", self.needed("hidden_size")?),
            ("feed_forward_length", self.needed("intermediate_size")?),
            ("attention.head_count", self.needed("num_attention_heads")?),
            ("attention.head_count_kv", self.kv_heads()?),
            ("attention.key_length", size),
            ("attention.value_length", size),
        ] {
            self.count(key, number)?;
        }
        let eps = self.number("rms_norm_eps")?.unwrap_or(self.architecture.defaults.eps);
        self.real("attention.layer_norm_rms_epsilon", eps);
        Ok(())
    }

    fn experts(&mut self, experts: u64, chosen: u64) -> Result<(), Error> {
        let (first, second) = match self.architecture.model_type {
            "mixtral" => ("num_experts", "num_local_experts"),
            _ => ("num_local_experts", "num_experts"),
        };
        let all = self.unsigned(first)?.or(self.unsigned(second)?).unwrap_or(experts);
        let chosen = self.unsigned("num_experts_per_tok")?.unwrap_or(chosen);
        self.count("expert_count", all)?;
        self.count("expert_used_count", chosen)
    }

    /// Writes the keys of Qwen's experts. `normalised` is what llama.cpp hard-codes for the architecture.
    fn qwen_experts(&mut self, [experts, chosen, width]: [u64; 3], normalised: bool) -> Result<(), Error> {
        if self.boolean("norm_topk_prob")?.unwrap_or(false) != normalised {
            let why = format!("`norm_topk_prob` is not {normalised}, as in every GGUF file of this model");
            return Err(wrong(why));
        }
        let dense =
            self.get("mlp_only_layers").and_then(|list| list.as_array()).is_some_and(|list| !list.is_empty());
        if dense || self.unsigned("decoder_sparse_step")?.is_some_and(|step| step != 1) {
            return Err(wrong("some blocks have no experts, and in GGUF files of this model all have"));
        }
        self.experts(experts, chosen)?;
        let width = self.unsigned("moe_intermediate_size")?.unwrap_or(width);
        self.count("expert_feed_forward_length", width)
    }

    /// Returns the time step rank; `auto` stands for a sixteenth of the hidden size, rounded up.
    fn time_step_rank(&self, key: &str, hidden: u64) -> Result<u64, Error> {
        match self.get(key) {
            Some(auto) if auto == "auto" => Ok(hidden.div_ceil(16)),
            _ => Ok(self.unsigned(key)?.unwrap_or(hidden.div_ceil(16))),
        }
    }

    fn state_space(&mut self, inner: u64, hidden: u64, [width, state, rank]: [u64; 3]) -> Result<(), Error> {
        if Some(inner) != hidden.checked_mul(2) {
            return Err(wrong(format!(
                "its state has {inner} channels; llama.cpp needs twice the hidden size {hidden}"
            )));
        }
        self.count("ssm.conv_kernel", width)?;
        self.count("ssm.inner_size", inner)?;
        self.count("ssm.state_size", state)?;
        self.count("ssm.time_step_rank", rank)
    }
}
