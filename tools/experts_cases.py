"""Records what Transformers does on tiny mixtures of experts.

    python tools/experts_cases.py tests/fixtures/transformers-5.23.0-experts        (Python with torch and transformers 5.23.0, on the CPU)

`kiln conformance` runs the folder. Models: `mixtral` (2 of 4 experts), `mixtral_window` (3 of 5, a window of 8 tokens), `qwen3_moe` (2 of 6,
weights that add up to 1, a dense layer between them), `qwen3_moe_other` (1 of 8 in every other layer, weights as the softmax has them, biases)
`qwen2_moe` (3 of 5 and a shared one, in all layers but one, windows in the even ones), `qwen2_moe_other` (2 of 4 and a shared one in every
other layer, weights that add up to 1, no biases), and `jamba_other` (2 of 3 in two of five layers, attention in two, three inputs of the convolution). Prompts of more than 16 tokens
take the product that is grouped by expert.
"""

import sys

import torch
from recorder import VOCAB, Recorder, ids, left_padded
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

recorder = Recorder(sys.argv[1])

sizes = dict(
    vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0,
    attn_implementation="eager", experts_implementation="eager",
)
qwen = dict(head_dim=12, intermediate_size=40)
models = (
    ("mixtral", MixtralForCausalLM, 91, MixtralConfig(
        **sizes, intermediate_size=48, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)),
    ("mixtral_window", MixtralForCausalLM, 93, MixtralConfig(
        **sizes, intermediate_size=20, num_hidden_layers=2, num_local_experts=5, num_experts_per_tok=3, sliding_window=8)),
    ("qwen3_moe", Qwen3MoeForCausalLM, 95, Qwen3MoeConfig(
        **sizes, **qwen, moe_intermediate_size=24, num_hidden_layers=3, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
        mlp_only_layers=[1])),
    ("qwen3_moe_other", Qwen3MoeForCausalLM, 97, Qwen3MoeConfig(
        **sizes, **qwen, moe_intermediate_size=17, num_hidden_layers=4, num_experts=8, num_experts_per_tok=1, decoder_sparse_step=2,
        attention_bias=True)),
    ("qwen2_moe", Qwen2MoeForCausalLM, 101, Qwen2MoeConfig(
        **sizes, intermediate_size=40, moe_intermediate_size=24, shared_expert_intermediate_size=36, num_hidden_layers=4, num_experts=5,
        num_experts_per_tok=3, mlp_only_layers=[1], use_sliding_window=True, sliding_window=8, max_window_layers=3)),
    ("qwen2_moe_other", Qwen2MoeForCausalLM, 103, Qwen2MoeConfig(
        **sizes, intermediate_size=40, moe_intermediate_size=17, shared_expert_intermediate_size=30, num_hidden_layers=2, num_experts=4,
        num_experts_per_tok=2, decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False)),
    ("jamba_other", JambaForCausalLM, 99, JambaConfig(
        **sizes, intermediate_size=20, num_hidden_layers=5, attn_layer_period=3, attn_layer_offset=1, expert_layer_period=2,
        expert_layer_offset=1, num_experts=3, num_experts_per_tok=2, mamba_d_state=5, mamba_d_conv=3, mamba_expand=2)),
)
for name, cls, seed, config in models:
    made = recorder.model(cls, config, name, seed, fixed=lambda key: "A_log" in key)
    recorder.generate(made, name, "greedy", ids(9, 6))
    recorder.generate(made, name, "greedy_long", ids(45, 7), new=8)
    recorder.generate(made, name, "greedy_b2", ids(30, 8, 2), new=8)
    recorder.generate(made, name, "leftpad_b2", *left_padded(), new=8)
    recorder.generate(made, name, "beam3", ids(6, 9), new=8, num_beams=3)
    if "jamba" not in name:
        # Transformers forgets the state of a Jamba in front of a chunk of several tokens.
        chunks = torch.split(ids(70, 10), [41, 7, 1, 21], dim=1)
        recorder.forward(made, name, "chunked_dynamic", chunks)

recorder.write()
