//! Mapping from the tensors of a Hugging Face checkpoint to those of a GGUF file, and the changes made by the
//! conversion.
//!
//! Source: `gguf-py/gguf/tensor_mapping.py` and `conversion/*.py` of llama.cpp.

use std::ops::Range;

#[cfg(test)]
mod tests;

/// A change that the conversion made to a tensor, and its inverse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Undo {
    Nothing,
    /// The rows of each head were permuted: the dimensions that rotary positions rotate together are
    /// adjacent, while in a checkpoint they are half a head apart. Vectors are permuted like rows.
    Permuted {
        heads: usize,
    },
    /// 1 was added to all numbers: Gemma's norms multiply by one plus their weights.
    PlusOne,
    /// The numbers `x` became `-exp(x)`: Mamba's `A_log` became `A`.
    NegativeExp,
    /// The rows of each head are followed by those of the same head of another matrix, or preceded by them.
    Half {
        heads: usize,
        second: bool,
    },
}

impl Undo {
    /// Returns the row in the file for row `row` of a tensor with `rows` rows.
    pub fn row(self, row: usize, rows: usize) -> usize {
        if let Self::Half { heads, second } = self {
            let Some(own) = rows.checked_div(heads).filter(|own| *own > 0) else { return row };
            return row / own * 2 * own + usize::from(second) * own + row % own;
        }
        let Self::Permuted { heads } = self else { return row };
        // Sizes that no model has are left unchanged.
        let Some(half) = rows.checked_div(heads).map(|size| size / 2).filter(|half| *half > 0) else {
            return row;
        };
        let (head, within) = (row / (2 * half), row % (2 * half));
        head * 2 * half + within % half * 2 + within / half
    }

    /// Number of consecutive rows of a tensor with `rows` rows that are consecutive in the file.
    pub fn together(self, rows: usize) -> usize {
        match self {
            Self::Permuted { .. } => 1,
            Self::Half { heads, .. } => rows.checked_div(heads).unwrap_or(rows).max(1),
            _ => rows.max(1),
        }
    }

    /// Whether numbers are those of the checkpoint.
    pub fn keeps_numbers(self) -> bool {
        !matches!(self, Self::PlusOne | Self::NegativeExp)
    }

    /// Converts a `number` of the checkpoint to that of the file: the inverse of [`number`](Self::number).
    pub fn stored(self, number: f32) -> f32 {
        match self {
            Self::Nothing | Self::Permuted { .. } | Self::Half { .. } => number,
            Self::PlusOne => number + 1.0,
            // Rounded only once.
            Self::NegativeExp => -f64::from(number).exp() as f32,
        }
    }

    /// Converts a `number` of the file to that of the checkpoint.
    pub fn number(self, number: f32) -> f32 {
        match self {
            Self::Nothing | Self::Permuted { .. } | Self::Half { .. } => number,
            Self::PlusOne => number - 1.0,
            // Rounded only once.
            Self::NegativeExp => (-f64::from(number)).ln() as f32,
        }
    }
}

/// The location of a checkpoint's tensor in a GGUF file. The file may lack dimensions of 1; the order of the
/// numbers is the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Name of the tensor in the file.
    pub name: String,
    /// Index of the matrix in a stack, if the file has the matrices of all experts in one tensor
    /// `[experts, rows, columns]`.
    pub expert: Option<usize>,
    pub undo: Undo,
}

impl Source {
    /// Returns the range of the tensor's `rows` rows in the file's tensor, seen as a matrix; `None` on
    /// overflow.
    pub fn rows(&self, rows: usize) -> Option<Range<usize>> {
        let start = self.expert.unwrap_or(0).checked_mul(rows)?;
        Some(start..start.checked_add(rows)?)
    }
}

/// Head counts of a model, which its conversion depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// `num_attention_heads`
    pub heads: usize,
    /// `num_key_value_heads`
    pub kv_heads: usize,
    /// `linear_num_key_heads`; 0 if there are none.
    pub state_heads: usize,
}

/// Names of tensors outside of blocks: in checkpoints, without `.weight`, and in files.
const OUTSIDE: &[(&str, &str)] = &[
    ("model.embed_tokens", "token_embd"),
    ("backbone.embeddings", "token_embd"),
    ("model.norm", "output_norm"),
    ("model.final_layernorm", "output_norm"),
    ("backbone.norm_f", "output_norm"),
    ("transformer.wte", "token_embd"),
    ("transformer.wpe", "position_embd"),
    ("transformer.ln_f", "output_norm"),
    ("gpt_neox.embed_in", "token_embd"),
    ("gpt_neox.final_layer_norm", "output_norm"),
    // The norm after the last block, in spite of its name.
    ("model.embedding_norm", "token_embd_norm"),
    ("model.embeddings", "token_embd"),
    ("model.norm_f", "output_norm"),
    ("lm_head", "output"),
    ("bert.embeddings.word_embeddings", "token_embd"),
    ("bert.embeddings.position_embeddings", "position_embd"),
    ("bert.embeddings.token_type_embeddings", "token_types"),
    ("bert.embeddings.LayerNorm", "token_embd_norm"),
    ("model.embed_tokens_per_layer", "per_layer_token_embd"),
    ("model.per_layer_model_projection", "per_layer_model_proj"),
    ("model.per_layer_projection_norm", "per_layer_proj_norm"),
];

/// Names of parts of blocks.
const PARTS: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("norm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.q_gate", "attn_q"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    // The matrix of each head, transposed.
    ("self_attn.k_b_proj_transposed", "attn_k_b"),
    ("self_attn.v_b_proj", "attn_v_b"),
    ("self_attn.dense", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
    ("post_self_attn_layernorm", "post_attention_norm"),
    ("post_mlp_layernorm", "post_ffw_norm"),
    ("ln_1", "attn_norm"),
    ("ln_2", "ffn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    // In files one matrix, whose parts are named so when it is read.
    ("attention.q_proj", "attn_q"),
    ("attention.k_proj", "attn_k"),
    ("attention.v_proj", "attn_v"),
    ("attention.dense", "attn_output"),
    ("attention.o_proj", "attn_output"),
    ("attention_norm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
    ("mlp.dense_h_to_4h", "ffn_up"),
    ("mlp.dense_4h_to_h", "ffn_down"),
    ("mlp.router", "ffn_gate_inp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("router.proj", "ffn_gate_inp"),
    ("pre_ff_layernorm", "ffn_norm"),
    // Both matrices, with the rows of the gate first.
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.gate", "ffn_gate_inp"),
    ("block_sparse_moe.gate", "ffn_gate_inp"),
    ("feed_forward.router", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("conv.conv", "shortconv.conv"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.out_proj", "shortconv.out_proj"),
    ("self_attn.out_proj", "attn_output"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.gate", "ffn_gate_inp"),
    ("feed_forward.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("feed_forward.shared_expert.up_proj", "ffn_up_shexp"),
    ("feed_forward.shared_expert.down_proj", "ffn_down_shexp"),
    ("shared_mlp.gate_proj", "ffn_gate"),
    ("shared_mlp.up_proj", "ffn_up"),
    ("shared_mlp.down_proj", "ffn_down"),
    ("block_sparse_moe.router", "ffn_gate_inp"),
    ("block_sparse_moe.shared_mlp.gate_proj", "ffn_gate_shexp"),
    ("block_sparse_moe.shared_mlp.up_proj", "ffn_up_shexp"),
    ("block_sparse_moe.shared_mlp.down_proj", "ffn_down_shexp"),
];

/// Names of parts of state-space mixers, which are called `mixer` or `mamba`.
const MIXER: &[(&str, &str)] = &[
    ("in_proj", "ssm_in"),
    ("conv1d", "ssm_conv1d"),
    ("x_proj", "ssm_x"),
    ("dt_proj", "ssm_dt"),
    ("A_log", "ssm_a"),
    ("D", "ssm_d"),
    ("out_proj", "ssm_out"),
    ("dt_layernorm", "ssm_dt_norm"),
    ("b_layernorm", "ssm_b_norm"),
    ("c_layernorm", "ssm_c_norm"),
    ("norm", "ssm_norm"),
    ("in_proj_qkv", "attn_qkv"),
    // Parts of the same matrix, one after another.
    ("in_proj_q", "attn_qkv"),
    ("in_proj_k", "attn_qkv"),
    ("in_proj_v", "attn_qkv"),
    ("in_proj_z", "attn_gate"),
    ("in_proj_b", "ssm_beta"),
    ("in_proj_a", "ssm_alpha"),
    // Of blocks that are one thing, which is called a mixer whatever it is.
    ("q_proj", "attn_q"),
    ("k_proj", "attn_k"),
    ("v_proj", "attn_v"),
    ("o_proj", "attn_output"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
    ("gate", "ffn_gate_inp"),
    ("shared_experts.up_proj", "ffn_up_shexp"),
    ("shared_experts.down_proj", "ffn_down_shexp"),
    ("fc1_latent_proj", "ffn_latent_down"),
    ("fc2_latent_proj", "ffn_latent_up"),
];

/// Names of the matrices of experts.
const EXPERTS: &[(&str, &str)] = &[
    ("gate_proj", "ffn_gate_exps"),
    ("up_proj", "ffn_up_exps"),
    ("down_proj", "ffn_down_exps"),
    ("w1", "ffn_gate_exps"),
    ("w3", "ffn_up_exps"),
    ("w2", "ffn_down_exps"),
];

/// Prefixes of the numbers of blocks.
const LAYERS: [&str; 5] =
    ["model.layers.", "backbone.layers.", "transformer.h.", "gpt_neox.layers.", "bert.encoder.layer."];

/// Locates the tensor `name` of a checkpoint with this `model_type` in a GGUF file; `None` for a name that no
/// file has.
///
/// The caller checks whether the file has the tensor.
pub fn source(model_type: &str, name: &str, heads: Heads) -> Option<Source> {
    // Tensors without a suffix in checkpoints, and with one in files.
    for (end, found) in [
        (".self_attn.sinks", "attn_sinks.weight"),
        (".e_score_correction_bias", "exp_probs_b.bias"),
        (".expert_bias", "exp_probs_b.bias"),
        (".dt_bias", "ssm_dt.bias"),
        (".layer_scalar", "layer_output_scale.weight"),
        (".router.scale", "ffn_gate_inp.scale"),
        (".router.per_expert_scale", "ffn_down_exps.scale"),
    ] {
        let block = name.strip_suffix(end);
        if let Some(block) =
            block.and_then(|stem| LAYERS.into_iter().find_map(|prefix| stem.strip_prefix(prefix)))
        {
            let block: usize = block.split('.').next()?.parse().ok()?;
            return Some(Source { name: format!("blk.{block}.{found}"), expert: None, undo: Undo::Nothing });
        }
    }
    // `A_log` and `D` have no suffix in either format.
    let suffix = [".weight", ".bias"].into_iter().find(|suffix| name.ends_with(suffix)).unwrap_or_default();
    let stem = name.strip_suffix(suffix)?;
    if let Some(outside) = find(OUTSIDE, stem) {
        let undo = undo(model_type, stem, heads);
        return Some(Source { name: format!("{outside}{suffix}"), expert: None, undo });
    }
    let block = LAYERS.into_iter().find_map(|prefix| stem.strip_prefix(prefix))?;
    let (block, part) = block.split_once('.')?;
    let block: usize = block.parse().ok()?;
    let of_experts = part.split_once(".experts.").map(|(_, expert)| expert);
    let (expert, found) = match of_experts.or(part.strip_prefix("experts.")) {
        Some(expert) => {
            let (expert, matrix) = expert.split_once('.')?;
            (Some(expert.parse().ok()?), find(EXPERTS, matrix)?)
        }
        None => (None, in_block(model_type, part)?),
    };
    // The converter writes this name without its suffix.
    let suffix = if (model_type, found) == ("falcon_h1", "ffn_norm") { "" } else { suffix };
    Some(Source { name: format!("blk.{block}.{found}{suffix}"), expert, undo: undo(model_type, part, heads) })
}

/// Returns the tensor of a GGUF file that has the matrices of gates and of values of all experts, one after
/// the other, and the part that is `name`; `None` if `name` is neither.
pub fn joined_experts(name: &str) -> Option<(String, Undo)> {
    let part = |kind: &str, second| {
        let (block, end) = name.split_once(kind)?;
        Some((format!("{block}.ffn_gate_up_exps.{end}"), Undo::Half { heads: 1, second }))
    };
    part(".ffn_gate_exps.", false).or_else(|| part(".ffn_up_exps.", true))
}

/// Returns the tensor that `name` is a part of in files of such a model as llama.cpp's converter writes them.
pub fn whole(model_type: &str, name: &str) -> String {
    let joined: (&[&str], &str) = match model_type {
        "gpt_neox" => (&["attn_q.", "attn_k.", "attn_v."], "attn_qkv."),
        "gemma4_text" => (&["ffn_gate_exps.", "ffn_up_exps."], "ffn_gate_up_exps."),
        _ => return name.to_owned(),
    };
    joined.0.iter().fold(name.to_owned(), |name, part| name.replacen(part, joined.1, 1))
}

/// Returns the name of a tensor of a GGUF file within its block; the whole name outside of blocks.
pub fn in_block_of(name: &str) -> &str {
    name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, part)| part)
}

/// Returns the number of the block that a tensor of a GGUF file belongs to; `None` for tensors outside of
/// blocks.
pub fn block(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

fn in_block(model_type: &str, part: &str) -> Option<&'static str> {
    if let Some(part) =
        ["mixer.", "mamba.", "linear_attn."].into_iter().find_map(|mixer| part.strip_prefix(mixer))
    {
        return match (model_type, part) {
            // One matrix, with the rows of both parts for each head of keys.
            ("qwen3_next", "in_proj_b" | "in_proj_a") => Some("ssm_ba"),
            _ => find(MIXER, part),
        };
    }
    match (part, model_type) {
        (
            "post_attention_layernorm",
            "gemma2" | "gemma3_text" | "gemma4_text" | "olmo2" | "olmo3" | "exaone4" | "seed_oss" | "gpt_oss"
            | "glm4_moe" | "qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text",
        ) => Some("post_attention_norm"),
        ("post_attention_layernorm", _) => Some("ffn_norm"),
        _ => find(PARTS, part),
    }
}

fn undo(model_type: &str, part: &str, Heads { heads, kv_heads, state_heads }: Heads) -> Undo {
    match (model_type, part) {
        (
            "llama" | "mistral" | "mixtral" | "ministral3" | "smollm3" | "granite" | "granitemoehybrid",
            "self_attn.q_proj" | "self_attn.k_proj",
        ) => Undo::Permuted { heads: if part == "self_attn.q_proj" { heads } else { kv_heads } },
        ("gemma" | "gemma2" | "gemma3_text", part) if part.ends_with("norm") => Undo::PlusOne,
        ("qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text", "self_attn.q_proj") => {
            Undo::Half { heads, second: false }
        }
        ("qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text", "self_attn.q_gate") => {
            Undo::Half { heads, second: true }
        }
        ("qwen3_next", "linear_attn.in_proj_b") => Undo::Half { heads: state_heads, second: false },
        ("qwen3_next", "linear_attn.in_proj_a") => Undo::Half { heads: state_heads, second: true },
        ("qwen3_next" | "qwen3_5_text" | "qwen3_5_moe_text", part)
            if part.ends_with("norm") && part != "linear_attn.norm" =>
        {
            Undo::PlusOne
        }
        (_, "mixer.A_log" | "mamba.A_log" | "linear_attn.A_log") => Undo::NegativeExp,
        _ => Undo::Nothing,
    }
}

fn find(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    table.iter().find(|(known, _)| *known == name).map(|(_, found)| *found)
}
