//! Differences between the architectures: one function each, in the order of `gguf/config/architectures.rs`.
//! Models whose blocks differ are in [`hybrids`], mixtures of experts in
//! [`mixtures`], Gemma 4 in [`gemma4`].

use super::{
    config::{Folder, text, wrong},
    gemma4, hybrids, mixtures,
};
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
    /// Rotated fraction of each head.
    pub(super) rotated: f64,
}

impl Defaults {
    const fn new(kv_heads: Option<u64>, positions: u64) -> Self {
        Self { kv_heads, head_dim: None, positions, eps: 1e-6, theta: 1e4, rotated: 1.0 }
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

    const fn rotated(self, rotated: f64) -> Self {
        Self { rotated, ..self }
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
    of("starcoder2", "starcoder2", Defaults::new(Some(2), 4096).eps(1e-5), starcoder2),
    of("gpt2", "gpt2", Defaults::new(None, 1024).eps(1e-5), gpt2),
    of("gpt_neox", "gptneox", Defaults::new(None, 2048).eps(1e-5).rotated(0.25), gpt_neox),
    of("phi", "phi2", Defaults::new(None, 2048).eps(1e-5).rotated(0.5), phi),
    of("olmo2", "olmo2", Defaults::new(None, 2048).eps(1e-5), olmo2),
    of("olmo3", "olmo2", Defaults::new(None, 2048).eps(1e-5), olmo3),
    of("cohere2", "cohere2", Defaults::new(None, 8192).eps(1e-5), cohere2),
    of("glm4", "glm4", Defaults::new(Some(2), 131_072).head_dim(128).eps(1.5625e-7).rotated(0.5), plain),
    of("glm4_moe", "glm4moe", Defaults::new(Some(8), 131_072).eps(1e-5).rotated(0.5), mixtures::glm4_moe),
    of("exaone4", "exaone4", Defaults::new(Some(32), 2048).eps(1e-5), exaone4),
    of("granite", "granite", Defaults::new(None, 2048), granite),
    of("ernie4_5", "ernie4_5", Defaults::new(Some(2), 131_072).head_dim(128).eps(1e-5).theta(5e5), plain),
    of("smollm3", "smollm3", Defaults::new(Some(4), 32_768).theta(2e6), smollm3),
    of(
        "gpt_oss",
        "gpt-oss",
        Defaults::new(Some(8), 131_072).head_dim(64).eps(1e-5).theta(150_000.0),
        mixtures::gpt_oss,
    ),
    of("seed_oss", "seed_oss", Defaults::new(Some(8), 524_288).head_dim(128), plain),
    of(
        "ministral3",
        "mistral3",
        Defaults::new(Some(8), 262_144).head_dim(128).eps(1e-5).theta(1e6),
        ministral3,
    ),
    of("deepseek_v2", "deepseek2", Defaults::new(None, 2048), mixtures::deepseek),
    of("deepseek_v3", "deepseek2", Defaults::new(None, 4096), mixtures::deepseek),
    of("glm4_moe_lite", "deepseek2", Defaults::new(None, 202_752).eps(1e-5), mixtures::deepseek),
    of(
        "llama4_text",
        "llama4",
        Defaults::new(Some(8), 131_072).head_dim(128).eps(1e-5).theta(5e5),
        mixtures::llama4,
    ),
    of(
        "qwen3_next",
        "qwen3next",
        Defaults::new(Some(2), 32_768).head_dim(256).rotated(0.25),
        hybrids::qwen3_next,
    ),
    of(
        "qwen3_5_text",
        "qwen35",
        Defaults::new(Some(4), 32_768).head_dim(256).rotated(0.25),
        hybrids::qwen3_5,
    ),
    of(
        "qwen3_5_moe_text",
        "qwen35moe",
        Defaults::new(Some(2), 32_768).head_dim(256).rotated(0.25),
        hybrids::qwen3_5_moe,
    ),
    of("lfm2", "lfm2", Defaults::new(Some(8), 128_000).eps(1e-5).theta(1e6), hybrids::lfm2),
    of("lfm2_moe", "lfm2moe", Defaults::new(Some(8), 128_000).eps(1e-5).theta(1e6), hybrids::lfm2_moe),
    of("mamba2", "mamba2", Defaults::new(None, MAMBA_POSITIONS).eps(1e-5), hybrids::mamba2),
    of("granitemoehybrid", "granitehybrid", Defaults::new(None, 2048), hybrids::granite),
    of("nemotron_h", "nemotron_h", Defaults::new(Some(8), 4096).head_dim(128).eps(1e-5), hybrids::nemotron_h),
    of("gemma4_text", "gemma4", Defaults::new(Some(4), 131_072).head_dim(256), gemma4::gemma4),
];

/// Context length to write for Mamba. The model has no limit, but llama.cpp needs a number.
pub(super) const MAMBA_POSITIONS: u64 = 1 << 20;

pub(super) const SILU: [&str; 2] = ["silu", "swish"];

const fn of(
    model_type: &'static str,
    name: &'static str,
    defaults: Defaults,
    describe: fn(&mut Folder<'_>) -> Result<(), Error>,
) -> Architecture {
    Architecture { model_type, name, defaults, describe }
}

pub(super) fn llama(folder: &mut Folder<'_>) -> Result<(), Error> {
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

/// Writes a model of attention and gated feed-forwards whose other settings follow from its tensors.
fn plain(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    folder.decoder()?;
    folder.rope()
}

fn starcoder2(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&["gelu_pytorch_tanh"])?;
    if folder.get("sliding_window").is_some() {
        return Err(wrong("`sliding_window` is set, and a GGUF file of this model has no window"));
    }
    folder.layer_normed("norm_epsilon")?;
    folder.rope()
}

fn gpt2(folder: &mut Folder<'_>) -> Result<(), Error> {
    let named = |name: &str, other: &str| Ok::<_, Error>(folder.unsigned(name)?.or(folder.unsigned(other)?));
    let missing = |name: &str| wrong(format!("`{name}` is missing in config.json"));
    let hidden = named("n_embd", "hidden_size")?.ok_or_else(|| missing("n_embd"))?;
    let blocks = named("n_layer", "num_hidden_layers")?.ok_or_else(|| missing("n_layer"))?;
    let heads = named("n_head", "num_attention_heads")?.ok_or_else(|| missing("n_head"))?;
    let positions = named("n_positions", "max_position_embeddings")?.unwrap_or(1024);
    let inner = folder.unsigned("n_inner")?.unwrap_or(hidden.saturating_mul(4));
    let eps = folder.number("layer_norm_epsilon")?.unwrap_or(folder.architecture.defaults.eps);
    if folder.get("activation_function").is_some_and(|name| name != "gelu_new") {
        return Err(wrong("`activation_function` is not gelu_new, as in every GGUF file of GPT-2"));
    }
    let is_set = |name: &str| Ok::<_, Error>(folder.boolean(name)?.unwrap_or(false));
    if is_set("scale_attn_by_inverse_layer_idx")? || folder.boolean("scale_attn_weights")? == Some(false) {
        return Err(wrong("scores have a factor of their own, which GGUF has no key for"));
    }
    for (key, number) in [
        ("block_count", blocks),
        ("context_length", positions),
        ("embedding_length", hidden),
        ("feed_forward_length", inner),
        ("attention.head_count", heads),
    ] {
        folder.count(key, number)?;
    }
    folder.real("attention.layer_norm_epsilon", eps);
    Ok(())
}

fn gpt_neox(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&["gelu"])?;
    folder.layer_normed("layer_norm_eps")?;
    folder.rope()?;
    let (rotated, parallel) = (folder.rotated()?, folder.boolean("use_parallel_residual")?.unwrap_or(true));
    folder.count("rope.dimension_count", rotated)?;
    folder.set("use_parallel_residual", Value::Bool(parallel));
    Ok(())
}

fn phi(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&["gelu_new"])?;
    if folder.boolean("qk_layernorm")? == Some(true) {
        return Err(wrong("`qk_layernorm` is true, and a GGUF file of this model has no such norms"));
    }
    folder.layer_normed("layer_norm_eps")?;
    folder.rope()?;
    let rotated = folder.rotated()?;
    folder.count("rope.dimension_count", rotated)
}

fn olmo2(folder: &mut Folder<'_>) -> Result<(), Error> {
    plain(folder)
}

fn olmo3(folder: &mut Folder<'_>) -> Result<(), Error> {
    plain(folder)?;
    let window = folder.unsigned("sliding_window")?.unwrap_or(4096);
    folder.count("attention.sliding_window", window)?;
    let theta = folder.theta_of_windows()?;
    folder.real("rope.freq_base_swa", theta);
    let slides = folder.sliding_blocks(4)?;
    folder.set("attention.sliding_window_pattern", Value::Array(Array::Bool(slides)));
    Ok(())
}

fn cohere2(folder: &mut Folder<'_>) -> Result<(), Error> {
    folder.check_activation(&SILU)?;
    folder.layer_normed("layer_norm_eps")?;
    folder.rope()?;
    let (vocab, rotated) = (folder.needed("vocab_size")?, folder.rotated()?);
    let window = folder.unsigned("sliding_window")?.unwrap_or(4096);
    let scale = folder.number("logit_scale")?.unwrap_or(0.0625);
    folder.real("logit_scale", scale);
    folder.count("attention.sliding_window", window)?;
    folder.count("vocab_size", vocab)?;
    folder.count("rope.dimension_count", rotated)?;
    if folder.described.metadata.get("cohere2.rope.scaling.type").is_some() {
        return Err(wrong("positions are stretched, which GGUF files of this model do not have"));
    }
    folder.set("rope.scaling.type", text("none"));
    Ok(())
}

fn exaone4(folder: &mut Folder<'_>) -> Result<(), Error> {
    plain(folder)?;
    let vocab = folder.needed("vocab_size")?;
    folder.count("vocab_size", vocab)?;
    let default = Some(4096).filter(|_| !folder.is_null("sliding_window"));
    let Some(window) = folder.unsigned("sliding_window")?.or(default) else { return Ok(()) };
    folder.count("attention.sliding_window", window)?;
    let slides = folder.sliding_blocks(folder.unsigned("sliding_window_pattern")?.unwrap_or(4))?;
    folder.set("attention.sliding_window_pattern", Value::Array(Array::Bool(slides)));
    Ok(())
}

fn granite(folder: &mut Folder<'_>) -> Result<(), Error> {
    llama(folder)?;
    folder.granite_factors()
}

fn smollm3(folder: &mut Folder<'_>) -> Result<(), Error> {
    llama(folder)?;
    if folder.boolean("use_sliding_window")? == Some(true) {
        return Err(wrong("`use_sliding_window` is true, and a GGUF file of this model has no window"));
    }
    let list = folder.get("no_rope_layers").and_then(|list| list.as_array()).into_iter().flatten();
    let is_usual = |(i, rotates): (usize, &serde_json::Value)| (rotates != 0) == ((i + 1) % 4 != 0);
    match list.enumerate().all(is_usual) {
        true => Ok(()),
        false => {
            Err(wrong("`no_rope_layers` is not every fourth block, as in every GGUF file of this model"))
        }
    }
}

fn ministral3(folder: &mut Folder<'_>) -> Result<(), Error> {
    llama(folder)?;
    let missing = || wrong("`llama_4_scaling_beta` of the rope parameters is missing");
    let growth = folder.parameter("llama_4_scaling_beta")?.ok_or_else(missing)?;
    folder.real("attention.temperature_scale", growth);
    match folder.unsigned("sliding_window")? {
        Some(window) => folder.count("attention.sliding_window", window),
        None => Ok(()),
    }
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
    pub(super) fn decoder(&mut self) -> Result<(), Error> {
        let width = self.needed("intermediate_size")?;
        self.sizes(width)?;
        self.rms_eps("rms_norm_eps")
    }

    pub(super) fn rms_eps(&mut self, field: &str) -> Result<(), Error> {
        let eps = self.number(field)?.unwrap_or(self.architecture.defaults.eps);
        self.real("attention.layer_norm_rms_epsilon", eps);
        Ok(())
    }

    /// Writes the keys of [`decoder`](Self::decoder) for a model with LayerNorms. `eps` is the field of their
    /// epsilon.
    fn layer_normed(&mut self, eps: &str) -> Result<(), Error> {
        let width = self.needed("intermediate_size")?;
        self.sizes(width)?;
        let eps = self.number(eps)?.unwrap_or(self.architecture.defaults.eps);
        self.real("attention.layer_norm_epsilon", eps);
        Ok(())
    }

    /// Writes the sizes of a model whose feed-forwards have this width.
    pub(super) fn sizes(&mut self, width: u64) -> Result<(), Error> {
        let blocks = self.blocks()?;
        let size = self.head_dim()?;
        for (key, number) in [
            ("block_count", blocks),
            ("context_length", self.positions()?),
            ("embedding_length", self.needed("hidden_size")?),
            ("feed_forward_length", width),
            ("attention.head_count", self.needed("num_attention_heads")?),
            ("attention.head_count_kv", self.kv_heads()?),
            ("attention.key_length", size),
            ("attention.value_length", size),
        ] {
            self.count(key, number)?;
        }
        Ok(())
    }

    /// Writes the factors of Granite.
    pub(super) fn granite_factors(&mut self) -> Result<(), Error> {
        for (field, key) in [
            ("attention_multiplier", "attention.scale"),
            ("embedding_multiplier", "embedding_scale"),
            ("residual_multiplier", "residual_scale"),
            ("logits_scaling", "logit_scale"),
        ] {
            let factor = self.number(field)?.unwrap_or(1.0);
            self.real(key, factor);
        }
        Ok(())
    }

    pub(super) fn blocks(&self) -> Result<u64, Error> {
        match self.needed("num_hidden_layers")? {
            blocks if blocks <= MOST_BLOCKS => Ok(blocks),
            blocks => {
                Err(wrong(format!("`num_hidden_layers` is {blocks}; at most {MOST_BLOCKS} are possible")))
            }
        }
    }

    /// Returns for each block whether it is of `kind`, as `layer_types` says; `default` if there is no such
    /// list.
    pub(super) fn blocks_of(&self, kind: &str, default: impl Fn(u64) -> bool) -> Result<Vec<bool>, Error> {
        let blocks = self.blocks()?;
        match self.get("layer_types").and_then(|types| types.as_array()) {
            Some(types) if types.len() as u64 == blocks => Ok(types.iter().map(|of| of == kind).collect()),
            Some(types) => {
                let why =
                    format!("`layer_types` has {} entries, `num_hidden_layers` is {blocks}", types.len());
                Err(wrong(why))
            }
            None => Ok((0..blocks).map(default).collect()),
        }
    }

    /// Returns for each block whether it has a window: all but every `period`th by default.
    fn sliding_blocks(&self, period: u64) -> Result<Vec<bool>, Error> {
        self.blocks_of("sliding_attention", |i| !(i + 1).is_multiple_of(period.max(1)))
    }

    pub(super) fn experts(&mut self, experts: u64, chosen: u64) -> Result<(), Error> {
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
