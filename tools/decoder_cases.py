"""Records what Transformers does on tiny decoders that differ in norms, rotations, windows, factors and feed-forwards.

    python tools/decoder_cases.py tests/fixtures/transformers-5.23.0-decoders        (Python with torch and transformers 5.23.0, on the CPU)

`kiln conformance` runs the folder. Each `model_type` has a model with its usual settings, and one called `.._other` with the settings that the first
one leaves out: biases, windows, lists of blocks, tied embeddings, stretched rotary positions. Prompts are longer than windows.
"""

import json
import os
import sys

import torch
import transformers
from recorder import VOCAB, Recorder, ids
from safetensors.torch import load_file, save_file

recorder = Recorder(sys.argv[1])

sizes = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, attn_implementation="eager",
)
heads = dict(head_dim=12)
experts = dict(experts_implementation="eager")
latent = dict(num_key_value_heads=4, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=500.0)
models = (
    ("ministral3", "Ministral3", dict(**heads, rope_parameters=dict(yarn, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.7))),
    ("ministral3_other", "Ministral3", dict(
        **heads, sliding_window=24, tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=500.0, original_max_position_embeddings=7, llama_4_scaling_beta=0.5))),
    ("smollm3", "SmolLM3", dict(no_rope_layer_interval=2)),
    ("smollm3_other", "SmolLM3", dict(
        no_rope_layers=[0, 1, 1], use_sliding_window=True, sliding_window=8, attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
    ("olmo2", "Olmo2", dict()),
    ("olmo2_other", "Olmo2", dict(attention_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-3, num_key_value_heads=1)),
    ("olmo3", "Olmo3", dict(num_hidden_layers=4, sliding_window=8)),
    ("olmo3_other", "Olmo3", dict(
        sliding_window=11, layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=yarn, sliding_attention=dict(rope_type="default", rope_theta=700.0)))),
    ("exaone4", "Exaone4", dict(num_hidden_layers=4, sliding_window=8, sliding_window_pattern=2)),
    ("exaone4_other", "Exaone4", dict(**heads, sliding_window=None, layer_types=["full_attention"] * 3, tie_word_embeddings=True)),
    ("granite", "Granite", dict(embedding_multiplier=3.0, logits_scaling=1.7, residual_multiplier=0.4, attention_multiplier=0.2)),
    ("granite_other", "Granite", dict(attention_multiplier=0.3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    ("cohere2", "Cohere2", dict(num_hidden_layers=4, sliding_window=8)),
    ("cohere2_other", "Cohere2", dict(
        sliding_window=8, layer_types=["full_attention", "sliding_attention", "full_attention"], attention_bias=True, logit_scale=0.3,
        tie_word_embeddings=False)),
    ("glm4", "Glm4", dict(**heads, rms_norm_eps=1e-4)),
    ("glm4_other", "Glm4", dict(head_dim=16, attention_bias=False, rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=0.25))),
    ("starcoder2", "Starcoder2", dict()),
    ("starcoder2_other", "Starcoder2", dict(use_bias=False, sliding_window=8, hidden_act="gelu", tie_word_embeddings=False, norm_epsilon=1e-3)),
    ("gpt2", "GPT2", dict(n_positions=64, activation_function="gelu_new")),
    ("gpt2_other", "GPT2", dict(
        n_positions=64, n_inner=40, activation_function="gelu", scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False)),
    ("gpt_neox", "GPTNeoX", dict(num_key_value_heads=4, head_dim=8)),
    ("gpt_neox_other", "GPTNeoX", dict(
        num_key_value_heads=4, head_dim=8, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new", tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=1.0))),
    ("gpt_oss", "GptOss", dict(**heads, **experts, num_hidden_layers=4, sliding_window=8, num_local_experts=5, num_experts_per_tok=2)),
    ("gpt_oss_other", "GptOss", dict(
        head_dim=16, **experts, intermediate_size=17, attention_bias=False, sliding_window=8, num_local_experts=4, num_experts_per_tok=3,
        swiglu_limit=0.75, swiglu_alpha=0.9, layer_types=["full_attention", "sliding_attention", "full_attention"],
        tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    ("gpt_oss_mxfp4", "GptOss", dict(
        head_dim=16, **experts, hidden_size=64, intermediate_size=96, num_hidden_layers=2, sliding_window=8, num_local_experts=4,
        num_experts_per_tok=2)),
    ("glm4_moe", "Glm4Moe", dict(
        **heads, **experts, rms_norm_eps=1e-4, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, first_k_dense_replace=1)),
    ("glm4_moe_other", "Glm4Moe", dict(
        head_dim=16, **experts, moe_intermediate_size=17, n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=0, n_shared_experts=2,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=False, use_qk_norm=True, attention_bias=True)),
    ("phi", "Phi", dict(num_key_value_heads=4)),
    ("phi_other", "Phi", dict(qk_layernorm=True, hidden_act="gelu", rope_parameters=dict(rope_type="default", rope_theta=300.0, partial_rotary_factor=1.0))),
    ("seed_oss", "SeedOss", dict(**heads)),
    ("seed_oss_other", "SeedOss", dict(**heads, attention_bias=False, attention_out_bias=True, mlp_bias=True)),
    ("ernie4_5", "Ernie4_5", dict(**heads)),
    ("ernie4_5_other", "Ernie4_5", dict(head_dim=16, use_bias=True, tie_word_embeddings=False, rope_parameters=dict(yarn))),
    ("deepseek_v3", "DeepseekV3", dict(
        **latent, **experts, q_lora_rank=12, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2, first_k_dense_replace=1)),
    ("deepseek_v3_other", "DeepseekV3", dict(
        **latent, **experts, q_lora_rank=None, rope_interleave=False, attention_bias=True, tie_word_embeddings=True, moe_intermediate_size=17,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=2, norm_topk_prob=False,
        rope_parameters=dict(yarn, mscale=1.0, mscale_all_dim=0.7))),
    ("deepseek_v2", "DeepseekV2", dict(
        **latent, **experts, q_lora_rank=12, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, first_k_dense_replace=1)),
    ("deepseek_v2_other", "DeepseekV2", dict(
        **latent, **experts, q_lora_rank=None, attention_bias=True, mlp_bias=True, moe_intermediate_size=24, n_routed_experts=6,
        num_experts_per_tok=2, topk_method="group_limited_greedy", n_group=3, topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5,
        rope_parameters=dict(yarn, mscale=0.7, mscale_all_dim=0.7))),
    ("glm4_moe_lite", "Glm4MoeLite", dict(
        **latent, **experts, q_lora_rank=12, head_dim=8, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, rms_norm_eps=1e-5)),
    ("glm4_moe_lite_other", "Glm4MoeLite", dict(
        **latent, **experts, head_dim=8, q_lora_rank=None, moe_intermediate_size=24, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2,
        mlp_layer_types=["sparse", "dense", "sparse"], routed_scaling_factor=1.1, tie_word_embeddings=True)),
    ("llama4_text", "Llama4Text", dict(
        **heads, num_hidden_layers=4, attention_chunk_size=8, no_rope_layer_interval=2, interleave_moe_layer_step=2, intermediate_size_mlp=56,
        num_local_experts=5, floor_scale=16, attn_scale=0.5)),
    ("llama4_text_other", "Llama4Text", dict(
        head_dim=16, attention_chunk_size=11, no_rope_layers=[1, 0, 1], layer_types=["chunked_attention", "chunked_attention", "full_attention"],
        moe_layers=[0, 2], intermediate_size_mlp=24, num_local_experts=4, num_experts_per_tok=2, use_qk_norm=False, attention_bias=True,
        floor_scale=9, tie_word_embeddings=True, rope_parameters=dict(
            rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
)


def in_mxfp4(weight):
    """Rounds a matrix of experts [experts, in, out] in place; returns what official folders store of it."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([values, -values])
    blocks = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1).clamp_min(1e-30).log2().floor() - 2
    codes = (blocks / torch.exp2(exponents)[..., None])[..., None].sub(values).abs().argmin(-1)
    weight.copy_((values[codes] * torch.exp2(exponents)[..., None]).flatten(-2).transpose(1, 2))
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8)


def store_in_mxfp4(made, folder):
    """Rounds all experts of a model, and stores them in its folder as official ones do."""
    path = os.path.join(folder, "model.safetensors")
    stored = load_file(path)
    for name in [name for name in stored if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = in_mxfp4(made.get_parameter(name))
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del stored[name]
    save_file(stored, path, metadata={"format": "pt"})
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file, indent=2)


for seed, (name, cls, settings) in enumerate(models, 201):
    config = getattr(transformers, f"{cls}Config")(**{**sizes, **settings})
    made = recorder.model(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, name, seed)
    if "mxfp4" in name:
        store_in_mxfp4(made, os.path.join(sys.argv[1], "models", name))
    recorder.usual(made, name, long=45)
    # Numbers beyond 1.036 times the largest of the prompt become NaN in Transformers. These prompts have none.
    if seed := {"smollm3": 8, "glm4": 7, "deepseek_v3": 8}.get(name):
        fp8 = dict(cache_implementation="quantized", cache_config=dict(backend="fp8"))
        recorder.generate(made, name, "fp8", ids(45, seed), new=12, **fp8)
        recorder.generate(made, name, "fp8_beam3", ids(45, seed), new=8, num_beams=3, **fp8)

recorder.write()
