#!/usr/bin/env python3
"""What llama.cpp's converter makes of configs and names of tensors, for the tests of kiln-weights.

    python tools/gguf_cases.py LLAMA_CPP        writes tests/data/gguf/cases.json

Makes a small random model of each architecture with transformers, and converts it to GGUF with `conversion/` of the folder LLAMA_CPP, a
source tree of llama.cpp (the source package llama-cpp-python 0.3.36 of PyPI has one in `vendor`). A case has the metadata, the shapes of all
tensors, rows first, and the factors of rotary positions, beside the config and the tensors of the checkpoint. Needs torch and transformers
5.23. Bad input: one line on stderr, exit status 2.
"""
import json, logging, os, sys, tempfile
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "tests/data/gguf/cases.json"
VOCAB = 96


def configs(T):
    common = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=16384, rms_norm_eps=1e-5)
    with_ = lambda **changed: {**common, **changed}
    layer_normed = lambda **changed: {name: value for name, value in with_(**changed).items() if name != "rms_norm_eps"}
    mamba = dict(vocab_size=VOCAB, hidden_size=64, state_size=16, num_hidden_layers=2, expand=2)
    experts = dict(num_experts=2, num_experts_per_tok=1)
    llama3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192,
                  rope_theta=500000.0)
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096, rope_theta=1e6, beta_fast=16.0)
    yarn_of_full = dict(full_attention=yarn, sliding_attention=dict(rope_type="default", rope_theta=1e6))
    long = dict(rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75, original_max_position_embeddings=4096,
                short_factor=[1.0 + 0.25 * i for i in range(6)], long_factor=[2.0 + 0.5 * i for i in range(6)])
    delta = dict(linear_key_head_dim=8, linear_value_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4)
    latent = dict(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=8, v_head_dim=16)
    mamba_2 = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2)
    neox = T.GPTNeoXConfig(**layer_normed(num_key_value_heads=4), layer_norm_eps=1e-5, rotary_pct=0.25)
    return [
        T.LlamaConfig(**common, attention_bias=True, mlp_bias=True, rope_parameters=llama3),
        T.LlamaConfig(**common, tie_word_embeddings=True, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4)),
        T.MixtralConfig(**common, num_local_experts=2, num_experts_per_tok=1, sliding_window=None, head_dim=16),
        T.Qwen2Config(**common, rope_parameters=yarn),
        T.Qwen2MoeConfig(**common, **experts, moe_intermediate_size=32, shared_expert_intermediate_size=48),
        T.Qwen3Config(**common, head_dim=32),
        T.Qwen3MoeConfig(**common, **experts, moe_intermediate_size=32, head_dim=32, norm_topk_prob=True),
        T.Phi3Config(**common, original_max_position_embeddings=4096, sliding_window=2047, rope_parameters=long, pad_token_id=0),
        T.Gemma4TextConfig(**with_(num_hidden_layers=6), head_dim=16, global_head_dim=32, sliding_window=128, num_kv_shared_layers=2,
                           use_double_wide_mlp=True, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
                           layer_types=["sliding_attention", "full_attention"] * 3, final_logit_softcapping=30.0, pad_token_id=0),
        T.Gemma4TextConfig(**with_(num_hidden_layers=4), head_dim=16, global_head_dim=32, sliding_window=128, num_kv_shared_layers=0,
                           hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1, enable_moe_block=True,
                           num_experts=2, top_k_experts=1, moe_intermediate_size=32, pad_token_id=0,
                           layer_types=["sliding_attention", "full_attention"] * 2),
        T.GemmaConfig(**common, head_dim=32),
        T.Gemma2Config(**common, head_dim=32, query_pre_attn_scalar=32, sliding_window=128),
        T.Gemma3TextConfig(**with_(num_hidden_layers=7), head_dim=32, query_pre_attn_scalar=32, sliding_window=128),
        T.MambaConfig(**mamba),
        T.FalconMambaConfig(**mamba),
        T.JambaConfig(**with_(num_hidden_layers=6), **experts, expert_layer_period=2, expert_layer_offset=1, attn_layer_period=3,
                      attn_layer_offset=1, mamba_d_state=16, mamba_dt_rank=8),
        T.SmolLM3Config(**with_(num_hidden_layers=4), pad_token_id=0),
        T.Olmo2Config(**common),
        T.Olmo3Config(**with_(num_hidden_layers=4), sliding_window=128, rope_parameters=yarn_of_full),
        T.Exaone4Config(**with_(num_hidden_layers=4), sliding_window=128, sliding_window_pattern=4),
        T.GraniteConfig(**common, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.25, attention_multiplier=0.125),
        T.Cohere2Config(**layer_normed(num_hidden_layers=4), sliding_window=128, logit_scale=0.25, rotary_pct=1.0),
        T.Glm4Config(**common, head_dim=16, pad_token_id=0),
        T.Glm4MoeConfig(**common, head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
                        first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, use_qk_norm=True, attention_bias=True,
                        pad_token_id=0),
        T.Starcoder2Config(**layer_normed(), norm_epsilon=1e-5, sliding_window=None),
        T.PhiConfig(**layer_normed(num_key_value_heads=4, intermediate_size=256), layer_norm_eps=1e-5, partial_rotary_factor=0.5),
        T.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_ctx=128),
        neox,
        T.Ernie4_5Config(**common, head_dim=16),
        T.SeedOssConfig(**common, head_dim=16),
        T.GptOssConfig(**common, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=128, pad_token_id=0,
                       rope_parameters=dict(yarn, truncate=False)),
        T.Ministral3Config(**common, head_dim=16, sliding_window=None,
                           rope_parameters=dict(yarn, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
        T.Qwen3_5TextConfig(**with_(num_hidden_layers=4), head_dim=16, **delta),
        T.Qwen3_5MoeTextConfig(**with_(num_hidden_layers=4), head_dim=16, **delta, **experts, moe_intermediate_size=32,
                               shared_expert_intermediate_size=48),
        T.Qwen3NextConfig(**with_(num_hidden_layers=4), head_dim=16, **delta, **experts, moe_intermediate_size=32,
                          shared_expert_intermediate_size=48),
        T.DeepseekV2Config(**with_(num_key_value_heads=4, num_hidden_layers=3), **latent, q_lora_rank=None, n_routed_experts=4, num_experts_per_tok=2,
                           moe_intermediate_size=32, first_k_dense_replace=1, routed_scaling_factor=2.5),
        T.DeepseekV3Config(**with_(num_key_value_heads=4, num_hidden_layers=3), **latent, q_lora_rank=24, n_routed_experts=4, num_experts_per_tok=2,
                           moe_intermediate_size=32, first_k_dense_replace=1, n_group=2, topk_group=1,
                           rope_parameters=dict(yarn, mscale=0.707, mscale_all_dim=0.707)),
        T.Glm4MoeLiteConfig(**with_(num_key_value_heads=4, num_hidden_layers=3), **latent, head_dim=8, q_lora_rank=24, n_routed_experts=4,
                            num_experts_per_tok=2, moe_intermediate_size=32, num_nextn_predict_layers=0, first_k_dense_replace=1,
                            pad_token_id=0),
        T.Llama4TextConfig(**with_(num_hidden_layers=4), head_dim=16, intermediate_size_mlp=48, interleave_moe_layer_step=2, num_local_experts=2,
                           num_experts_per_tok=1, rope_parameters=llama3),
        T.Lfm2Config(**with_(num_hidden_layers=3), layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False),
        T.Lfm2MoeConfig(**with_(num_hidden_layers=3), **experts, layer_types=["conv", "full_attention", "conv"], moe_intermediate_size=32,
                        num_dense_layers=1),
        T.Mamba2Config(vocab_size=VOCAB, hidden_size=64, state_size=16, num_hidden_layers=2, num_heads=8, head_dim=16, n_groups=2),
        T.GraniteMoeHybridConfig(**common, layer_types=["mamba", "attention"], **mamba_2, num_local_experts=2, num_experts_per_tok=1,
                                 shared_intermediate_size=48, position_embedding_type="nope", embedding_multiplier=12.0,
                                 attention_multiplier=0.125),
        T.FalconH1Config(**common, **mamba_2, mamba_d_ssm=128, mamba_norm_before_gate=False),
        T.NemotronHConfig(**layer_normed(num_hidden_layers=None), head_dim=16, layers_block_type=["mamba", "attention", "mlp", "moe"],
                          mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, n_routed_experts=2, num_experts_per_tok=1,
                          moe_intermediate_size=32, moe_shared_expert_intermediate_size=48, time_step_min=1e-9),
        T.NemotronHConfig(**layer_normed(num_hidden_layers=None), head_dim=16, layers_block_type=["mamba", "attention", "mlp"],
                          mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, n_groups=2, time_step_min=1e-9),
        T.BertConfig(vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                     max_position_embeddings=128, layer_norm_eps=1e-6),
    ]


def convert(folder, file, file_type="ALL_F32", with_size=False):
    """Converts the checkpoint in `folder` without a tokenizer, which these models do not have. Programs that run the file need `with_size`."""
    import gguf, torch
    from conversion import get_model_class
    from conversion.base import ModelBase

    hparams = ModelBase.load_hparams(folder, False)
    base = get_model_class(hparams["architectures"][0])
    # A class that only passes on what it is asked.
    base = getattr(base, "Ministral3Model", base)

    def set_vocab(self):
        self.gguf_writer.add_tokenizer_model("none")
        if with_size:
            self.gguf_writer.add_vocab_size(hparams["vocab_size"])

    # Gemma 3 counts the tokens.
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(hparams["vocab_size"])}}, "added_tokens": []}))
    model = type("WithoutVocabulary", (base,), {"set_vocab": set_vocab, "model_arch": base.model_arch})
    # Blocks that predict further tokens are no part of these models.
    model.no_mtp = model.no_mtp or hparams["model_type"].startswith(("qwen3_5", "qwen3_next"))
    # The converter knows the names of older versions.
    if hparams["model_type"] == "granitemoehybrid":
        hparams["layer_types"] = [name.replace("full_", "").replace("linear_attention", "mamba") for name in hparams["layer_types"]]
    if hparams["model_type"] == "falcon_h1":
        hparams["head_dim"] = hparams["hidden_size"] // hparams["num_attention_heads"]
    if hparams["model_type"] == "nemotron_h":
        hparams["mamba_d_head"] = hparams["mamba_head_dim"]
        if "moe" not in hparams["layers_block_type"]:
            hparams = {name: value for name, value in hparams.items() if name not in ("n_routed_experts", "num_experts_per_tok")}
    if hparams["model_type"] == "gpt_neox":
        # Only older versions of Transformers store it, and the converter asks for it.
        hparams["rotary_pct"] = hparams["rope_parameters"]["partial_rotary_factor"]
    with torch.inference_mode():
        model(folder, gguf.LlamaFileType[file_type], file, hparams=hparams).write()


def case(config, folder):
    import gguf, transformers
    from safetensors.numpy import load_file

    auto = transformers.AutoModel if config.model_type == "bert" else transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder)
    convert(folder, folder / "model.gguf")
    reader = gguf.GGUFReader(folder / "model.gguf")
    kept = lambda key: key == "general.architecture" or not key.startswith(("GGUF.", "general.", "tokenizer."))
    metadata = [[key, [t.name for t in field.types], field.contents()] for key, field in reader.fields.items() if kept(key)]
    drop = ("architectures", "dtype", "transformers_version", "use_cache")
    return {
        "config": {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k not in drop},
        "metadata": metadata,
        "tensors": {t.name: [int(n) for n in reversed(t.shape)] for t in reader.tensors},
        "factors": {t.name: t.data.tolist() for t in reader.tensors if t.name.startswith("rope_")},
        "checkpoint": {name: list(t.shape) for name, t in load_file(folder / "model.safetensors").items()},
    }


def main():
    if len(sys.argv) != 2 or not os.path.isdir(os.path.join(sys.argv[1], "conversion")):
        print("gguf_cases: error: name a source tree of llama.cpp: python tools/gguf_cases.py LLAMA_CPP", file=sys.stderr)
        raise SystemExit(2)
    sys.path[:0] = [sys.argv[1], os.path.join(sys.argv[1], "gguf-py")]
    import transformers
    logging.disable(logging.WARNING)
    cases = []
    for config in configs(transformers):
        with tempfile.TemporaryDirectory() as folder:
            cases.append(case(config, Path(folder)))
        print(config.model_type, len(cases[-1]["checkpoint"]), "tensors")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("[\n" + ",\n".join(json.dumps(one, separators=(",", ":")) for one in cases) + "\n]\n")


if __name__ == "__main__":
    main()
