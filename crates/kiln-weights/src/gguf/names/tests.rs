//! Names and undone changes, by the rules of the conversion.
#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

const HEADS: Heads = Heads { heads: 4, kv_heads: 2, state_heads: 2 };

fn found(model_type: &str, name: &str) -> (String, Option<usize>, Undo) {
    let Source { name, expert, undo } = source(model_type, name, HEADS).unwrap();
    (name, expert, undo)
}

#[test]
fn tensors_of_checkpoints_have_gguf_names() {
    let permuted = |heads| Undo::Permuted { heads };
    for (model_type, name, expected, expert, undo) in [
        ("llama", "model.embed_tokens.weight", "token_embd.weight", None, Undo::Nothing),
        ("llama", "model.norm.weight", "output_norm.weight", None, Undo::Nothing),
        ("llama", "lm_head.weight", "output.weight", None, Undo::Nothing),
        ("llama", "model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight", None, Undo::Nothing),
        ("llama", "model.layers.12.self_attn.q_proj.weight", "blk.12.attn_q.weight", None, permuted(4)),
        ("llama", "model.layers.12.self_attn.q_proj.bias", "blk.12.attn_q.bias", None, permuted(4)),
        ("mistral", "model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight", None, permuted(2)),
        ("llama", "model.layers.1.self_attn.v_proj.weight", "blk.1.attn_v.weight", None, Undo::Nothing),
        ("llama", "model.layers.1.self_attn.o_proj.weight", "blk.1.attn_output.weight", None, Undo::Nothing),
        (
            "llama",
            "model.layers.1.post_attention_layernorm.weight",
            "blk.1.ffn_norm.weight",
            None,
            Undo::Nothing,
        ),
        ("llama", "model.layers.1.mlp.gate_proj.bias", "blk.1.ffn_gate.bias", None, Undo::Nothing),
        ("llama", "model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight", None, Undo::Nothing),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.gate.weight",
            "blk.1.ffn_gate_inp.weight",
            None,
            Undo::Nothing,
        ),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.7.w1.weight",
            "blk.1.ffn_gate_exps.weight",
            Some(7),
            Undo::Nothing,
        ),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.7.w2.weight",
            "blk.1.ffn_down_exps.weight",
            Some(7),
            Undo::Nothing,
        ),
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.7.w3.weight",
            "blk.1.ffn_up_exps.weight",
            Some(7),
            Undo::Nothing,
        ),
        ("qwen2", "model.layers.1.self_attn.q_proj.bias", "blk.1.attn_q.bias", None, Undo::Nothing),
        ("qwen3", "model.layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight", None, Undo::Nothing),
        ("qwen2_moe", "model.layers.1.mlp.gate.weight", "blk.1.ffn_gate_inp.weight", None, Undo::Nothing),
        (
            "qwen2_moe",
            "model.layers.1.mlp.experts.3.up_proj.weight",
            "blk.1.ffn_up_exps.weight",
            Some(3),
            Undo::Nothing,
        ),
        (
            "qwen2_moe",
            "model.layers.1.mlp.shared_expert.down_proj.weight",
            "blk.1.ffn_down_shexp.weight",
            None,
            Undo::Nothing,
        ),
        (
            "qwen2_moe",
            "model.layers.1.mlp.shared_expert_gate.weight",
            "blk.1.ffn_gate_inp_shexp.weight",
            None,
            Undo::Nothing,
        ),
        ("phi3", "model.layers.1.self_attn.qkv_proj.weight", "blk.1.attn_qkv.weight", None, Undo::Nothing),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", "blk.1.ffn_up.weight", None, Undo::Nothing),
        ("gemma", "model.norm.weight", "output_norm.weight", None, Undo::PlusOne),
        (
            "gemma",
            "model.layers.1.post_attention_layernorm.weight",
            "blk.1.ffn_norm.weight",
            None,
            Undo::PlusOne,
        ),
        ("gemma", "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight", None, Undo::Nothing),
        (
            "gemma2",
            "model.layers.1.post_attention_layernorm.weight",
            "blk.1.post_attention_norm.weight",
            None,
            Undo::PlusOne,
        ),
        (
            "gemma2",
            "model.layers.1.pre_feedforward_layernorm.weight",
            "blk.1.ffn_norm.weight",
            None,
            Undo::PlusOne,
        ),
        (
            "gemma2",
            "model.layers.1.post_feedforward_layernorm.weight",
            "blk.1.post_ffw_norm.weight",
            None,
            Undo::PlusOne,
        ),
        (
            "gemma3_text",
            "model.layers.1.self_attn.k_norm.weight",
            "blk.1.attn_k_norm.weight",
            None,
            Undo::PlusOne,
        ),
        ("mamba", "backbone.embeddings.weight", "token_embd.weight", None, Undo::Nothing),
        ("mamba", "backbone.norm_f.weight", "output_norm.weight", None, Undo::Nothing),
        ("mamba", "backbone.layers.1.norm.weight", "blk.1.attn_norm.weight", None, Undo::Nothing),
        ("mamba", "backbone.layers.1.mixer.conv1d.bias", "blk.1.ssm_conv1d.bias", None, Undo::Nothing),
        ("mamba", "backbone.layers.1.mixer.dt_proj.bias", "blk.1.ssm_dt.bias", None, Undo::Nothing),
        ("falcon_mamba", "backbone.layers.1.mixer.A_log", "blk.1.ssm_a", None, Undo::NegativeExp),
        ("mamba", "backbone.layers.1.mixer.D", "blk.1.ssm_d", None, Undo::Nothing),
        ("jamba", "model.layers.1.mamba.A_log", "blk.1.ssm_a", None, Undo::NegativeExp),
        ("jamba", "model.layers.1.mamba.b_layernorm.weight", "blk.1.ssm_b_norm.weight", None, Undo::Nothing),
        (
            "jamba",
            "model.layers.1.feed_forward.router.weight",
            "blk.1.ffn_gate_inp.weight",
            None,
            Undo::Nothing,
        ),
        (
            "jamba",
            "model.layers.1.feed_forward.experts.2.down_proj.weight",
            "blk.1.ffn_down_exps.weight",
            Some(2),
            Undo::Nothing,
        ),
        ("jamba", "model.layers.1.feed_forward.up_proj.weight", "blk.1.ffn_up.weight", None, Undo::Nothing),
        ("jamba", "model.layers.1.pre_ff_layernorm.weight", "blk.1.ffn_norm.weight", None, Undo::Nothing),
        ("jamba", "model.final_layernorm.weight", "output_norm.weight", None, Undo::Nothing),
        ("jamba", "model.layers.4.self_attn.q_proj.weight", "blk.4.attn_q.weight", None, Undo::Nothing),
    ] {
        assert_eq!(found(model_type, name), (expected.to_owned(), expert, undo), "{model_type}: {name}");
    }
}

#[test]
fn unknown_tensors_have_no_gguf_name() {
    for name in [
        "",
        ".weight",
        "model.layers.x.input_layernorm.weight",
        "model.layers.99999999999999999999.input_layernorm.weight",
        "model.layers.0",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.mlp.experts.x.up_proj.weight",
        "model.layers.0.mlp.experts.1.other.weight",
        "model.encoder.layers.0.fc1.weight",
    ] {
        assert_eq!(source("llama", name, HEADS), None, "{name}");
    }
}

#[test]
fn an_expert_is_a_range_of_rows() {
    let expert = |expert| Source { name: String::new(), expert, undo: Undo::Nothing };
    assert_eq!(expert(Some(3)).rows(5), Some(15..20));
    assert_eq!(expert(None).rows(5), Some(0..5));
    assert_eq!(expert(Some(usize::MAX)).rows(2), None);
}

/// `LlamaModel.permute`: `reshape(heads, 2, size / 2).swapaxes(1, 2)`.
fn permute(rows: &[usize], heads: usize) -> Vec<usize> {
    let half = rows.len() / heads / 2;
    let places = (0..heads)
        .flat_map(|head| (0..half).flat_map(move |j| (0..2).map(move |side| (2 * head + side) * half + j)));
    places.map(|place| rows[place]).collect()
}

#[test]
fn permuted_rows_are_found_again() {
    for (heads, rows) in [(1, 2), (1, 8), (3, 12), (4, 256)] {
        let file = permute(&(0..rows).collect::<Vec<_>>(), heads);
        for row in 0..rows {
            assert_eq!(file[Undo::Permuted { heads }.row(row, rows)], row, "{heads} heads, {rows} rows");
        }
    }
    // Sizes that no model has.
    assert_eq!(Undo::Permuted { heads: 0 }.row(3, 8), 3);
    assert_eq!(Undo::Permuted { heads: 8 }.row(3, 8), 3);
    assert_eq!(Undo::PlusOne.row(3, 8), 3);
}

#[test]
fn conversions_of_elements_are_undone() {
    assert_eq!(Undo::Nothing.number(0.25), 0.25);
    assert_eq!(Undo::PlusOne.number(1.0 + 0.25), 0.25);
    for x in [-3.0_f32, 0.0, 0.75, 2.5] {
        let undone = Undo::NegativeExp.number(-x.exp());
        // exp rounds once, which moves the logarithm by half an epsilon, and the result is rounded once more.
        let error = (f64::from(undone) - f64::from(x)).abs();
        assert!(error <= f64::from(f32::EPSILON) * (1.0 + f64::from(x.abs())), "{x}: {undone}");
    }
}
