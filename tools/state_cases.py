"""Records what Transformers does on tiny models whose mixers have states: matrices and short convolutions.

    python tools/state_cases.py tests/fixtures/transformers-5.23.0-states            (Python with torch and transformers 5.23.0, on the CPU)

`kiln conformance` runs the folder. Each `model_type` has a model with its usual settings, and one called `.._other` with the settings that the first
one leaves out. Some prompts are longer than the chunks in which Transformers scans.
"""

import sys

import transformers
from recorder import VOCAB, Recorder

recorder = Recorder(sys.argv[1])

sizes = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, attn_implementation="eager",
)
experts = dict(experts_implementation="eager", moe_intermediate_size=24, shared_expert_intermediate_size=20)
delta = dict(head_dim=16, rms_norm_eps=1e-3, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4)
other_delta = dict(
    head_dim=24, linear_key_head_dim=12, linear_value_head_dim=7, linear_num_key_heads=3, linear_num_value_heads=3, linear_conv_kernel_dim=3,
    rms_norm_eps=1e-4, attention_bias=True, tie_word_embeddings=True, layer_types=["full_attention", "linear_attention", "linear_attention"], num_hidden_layers=3,
    rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.5),
)
models = (
    ("qwen3_5_text", "Qwen3_5Text", dict(**delta)),
    ("qwen3_5_text_other", "Qwen3_5Text", dict(**other_delta)),
    ("qwen3_5_moe_text", "Qwen3_5MoeText", dict(**delta, **experts, num_experts=5, num_experts_per_tok=2)),
    ("qwen3_next", "Qwen3Next", dict(**delta, **experts, num_experts=5, num_experts_per_tok=2)),
    ("qwen3_next_other", "Qwen3Next", dict(
        **other_delta, **experts, num_experts=4, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[1])),
    ("lfm2", "Lfm2", dict(layer_types=["conv", "conv", "full_attention", "conv"], intermediate_size=60, block_multiple_of=8)),
    ("lfm2_other", "Lfm2", dict(
        layer_types=["full_attention", "conv", "conv"], num_hidden_layers=3, conv_L_cache=5, block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
        norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    ("lfm2_moe", "Lfm2Moe", dict(
        layer_types=["conv", "full_attention", "conv", "conv"], experts_implementation="eager", moe_intermediate_size=24, num_experts=5,
        num_experts_per_tok=2, num_dense_layers=1)),
    ("lfm2_moe_other", "Lfm2Moe", dict(
        layer_types=["conv", "full_attention", "conv", "full_attention"], experts_implementation="eager", moe_intermediate_size=17, num_experts=4,
        num_experts_per_tok=3, num_dense_layers=2, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.7)),
)

for seed, (name, cls, settings) in enumerate(models, 331):
    config = getattr(transformers, f"{cls}Config")(**{**sizes, **settings})
    made = recorder.model(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, name, seed)
    recorder.usual(made, name, long=75)

recorder.write()
