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
mamba_2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=20, mamba_chunk_size=16)
other_mamba_2 = dict(mamba_n_heads=6, mamba_d_head="auto", mamba_d_state=9, mamba_expand=3, mamba_d_conv=3, mamba_conv_bias=False, mamba_chunk_size=8)
factors = dict(embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6, logits_scaling=0.7)
more_factors = dict(
    lm_head_multiplier=0.7, embedding_multiplier=2.5, mlp_multipliers=[0.8, 0.6], key_multiplier=0.6, attention_in_multiplier=1.3,
    attention_out_multiplier=0.9, ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7], ssm_in_multiplier=1.4, ssm_out_multiplier=0.8)
nemotron = dict(
    num_hidden_layers=None, head_dim=12, mamba_num_heads=4, mamba_head_dim=10, ssm_state_size=18, chunk_size=16, experts_implementation="eager",
    moe_intermediate_size=24, moe_shared_expert_intermediate_size=20)
models = (
    ("qwen3_5_text", "Qwen3_5Text", dict(**delta)),
    ("qwen3_5_text_other", "Qwen3_5Text", dict(**other_delta)),
    ("qwen3_5_moe_text", "Qwen3_5MoeText", dict(**delta, **experts, num_experts=5, num_experts_per_tok=2)),
    ("qwen3_next", "Qwen3Next", dict(**delta, **experts, num_experts=5, num_experts_per_tok=2)),
    ("qwen3_next_other", "Qwen3Next", dict(
        **other_delta, **experts, num_experts=4, num_experts_per_tok=3, norm_topk_prob=False, mlp_only_layers=[1])),
    ("lfm2", "Lfm2", dict(layer_types=["conv", "conv", "full_attention", "conv"], intermediate_size=60, block_multiple_of=8)),
    ("lfm2_other", "Lfm2", dict(
        layer_types=["full_attention", "conv", "conv"], num_hidden_layers=3, conv_L_cache=5, conv_bias=True, block_auto_adjust_ff_dim=False, tie_word_embeddings=False,
        norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    ("lfm2_moe", "Lfm2Moe", dict(
        layer_types=["conv", "full_attention", "conv", "conv"], experts_implementation="eager", moe_intermediate_size=24, num_experts=5,
        num_experts_per_tok=2, num_dense_layers=1)),
    ("lfm2_moe_other", "Lfm2Moe", dict(
        layer_types=["conv", "full_attention", "conv", "full_attention"], experts_implementation="eager", moe_intermediate_size=17, num_experts=4,
        num_experts_per_tok=3, num_dense_layers=2, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.7)),
    ("mamba2", "Mamba2", dict(state_size=20, num_heads=4, head_dim=16, n_groups=2, chunk_size=16)),
    ("mamba2_other", "Mamba2", dict(
        state_size=9, num_heads=6, head_dim=16, n_groups=1, expand=3, conv_kernel=3, use_conv_bias=False, residual_in_fp32=False, chunk_size=8,
        tie_word_embeddings=True, layer_norm_epsilon=1e-3, num_hidden_layers=2)),
    ("bamba", "Bamba", dict(**mamba_2, mamba_n_groups=2, attn_layer_indices=[1, 3])),
    ("bamba_other", "Bamba", dict(
        **other_mamba_2, attn_layer_indices=[0], num_hidden_layers=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-3,
        rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.75))),
    ("granitemoehybrid", "GraniteMoeHybrid", dict(
        **mamba_2, **factors, layer_types=["mamba", "attention", "mamba", "mamba"], experts_implementation="eager", num_local_experts=5,
        num_experts_per_tok=2, shared_intermediate_size=24, position_embedding_type="nope")),
    ("granitemoehybrid_other", "GraniteMoeHybrid", dict(
        **other_mamba_2, **factors, layer_types=["attention", "mamba", "attention"], num_hidden_layers=3, num_local_experts=0, shared_intermediate_size=52,
        position_embedding_type="rope", attention_bias=True, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=500.0))),
    ("falcon_h1", "FalconH1", dict(**mamba_2, **more_factors, mamba_n_groups=2, mamba_d_ssm=64)),
    ("falcon_h1_other", "FalconH1", dict(
        **other_mamba_2, mamba_d_ssm=None, num_hidden_layers=2, mamba_rms_norm=True, mamba_norm_before_gate=False, projectors_bias=True, mlp_bias=True,
        attention_bias=True, attention_in_multiplier=0.8, ssm_in_multiplier=0.7, mlp_multipliers=[0.6, 1.2], tie_word_embeddings=True, rms_norm_eps=1e-3)),
    ("falcon_h1_norm", "FalconH1", dict(**mamba_2, mamba_d_ssm=64, mamba_n_groups=2, num_hidden_layers=1, mamba_rms_norm=True)),
    ("nemotron_h", "NemotronH", dict(
        **nemotron, layers_block_type=["mamba", "moe", "attention", "mlp", "mamba", "moe"], n_groups=2, n_routed_experts=5, num_experts_per_tok=2,
        routed_scaling_factor=2.5, time_step_min=1e-9)),
    ("nemotron_h_other", "NemotronH", dict(
        **nemotron, layers_block_type=["mlp", "mamba", "moe", "attention", "moe"], n_groups=1, conv_kernel=3, use_conv_bias=False, mlp_bias=True,
        n_routed_experts=6, num_experts_per_tok=3, n_group=3, topk_group=2, norm_topk_prob=False, moe_latent_size=20, time_step_min=0.9,
        layer_norm_epsilon=1e-3)),
)

for seed, (name, cls, settings) in enumerate(models, 331):
    config = getattr(transformers, f"{cls}Config")(**{**sizes, **settings})
    made = recorder.model(transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, name, seed)
    # With a bias in front of the convolution, Transformers lets padding change the tokens after it.
    recorder.usual(made, name, long=75, padded=not settings.get("conv_bias"))

recorder.write()
