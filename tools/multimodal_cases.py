"""Records what Transformers does with text on tiny multimodal models, whose folders have towers for images beside the text model.

    python tools/multimodal_cases.py tests/fixtures/transformers-5.23.0-multimodal        (Python with torch and transformers 5.23.0, on the CPU)

`kiln conformance` runs the folder. Models are named after the whole, or after the text model where
nothing else has its type. `mistral3_ministral3` is a Mistral 3 over Ministral 3.
"""

import sys

import torch
import transformers
from recorder import VOCAB, Recorder, ids, left_padded

recorder = Recorder(sys.argv[1])

text = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
pixtral = dict(vision, model_type="pixtral", head_dim=8)
qwen = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=32, patch_size=8)
mrope = dict(rope_type="default", rope_theta=700.0, mrope_section=[2, 2, 2])
beta = dict(rope_type="yarn", rope_theta=500.0, factor=4.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.7)
delta = dict(
    head_dim=32, linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4, full_attention_interval=2,
    rms_norm_eps=1e-4,
    rope_parameters=dict(rope_type="default", rope_theta=700.0, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True),
)
models = (
    ("gemma3", "Gemma3", dict(
        text_config=dict(text, head_dim=12, sliding_window=8, num_hidden_layers=7, query_pre_attn_scalar=16),
        vision_config=dict(vision, model_type="siglip_vision_model"), mm_tokens_per_image=4)),
    ("mistral3", "Mistral3", dict(
        text_config=dict(text, model_type="mistral", head_dim=12, sliding_window=None), vision_config=pixtral, tie_word_embeddings=False)),
    ("mistral3_ministral3", "Mistral3", dict(
        text_config=dict(text, model_type="ministral3", head_dim=12, rope_parameters=beta), vision_config=pixtral, tie_word_embeddings=True)),
    ("llava", "Llava", dict(text_config=dict(text, model_type="llama"), vision_config=dict(vision, model_type="clip_vision_model"))),
    ("qwen2_5_vl_text", "Qwen2_5_VL", dict(
        text_config=dict(text, rope_parameters=dict(mrope, mrope_section=[1, 1, 2])), vision_config=dict(qwen, fullatt_block_indexes=[0]),
        tie_word_embeddings=True)),
    ("qwen3_vl_text", "Qwen3VL", dict(
        text_config=dict(text, head_dim=12, rope_parameters=dict(mrope, mrope_interleaved=True)),
        vision_config=dict(qwen, num_position_embeddings=16, deepstack_visual_indexes=[0]), tie_word_embeddings=False)),
    ("qwen3_5", "Qwen3_5", dict(
        text_config=dict(text, **delta), vision_config=dict(qwen, num_position_embeddings=16), tie_word_embeddings=True)),
    ("qwen3_5_moe", "Qwen3_5Moe", dict(
        text_config=dict(
            text, **delta, moe_intermediate_size=24, shared_expert_intermediate_size=20, num_experts=5, num_experts_per_tok=2,
            experts_implementation="eager"),
        vision_config=dict(qwen, num_position_embeddings=16), tie_word_embeddings=False)),
    ("llama4", "Llama4", dict(
        text_config=dict(text, head_dim=12, attention_chunk_size=8, no_rope_layer_interval=3, intermediate_size_mlp=24, num_local_experts=3),
        vision_config=dict(
            vision, num_attention_heads=2, pixel_shuffle_ratio=0.5, projector_input_dim=16, projector_output_dim=16, vision_output_dim=16))),
)
for seed, (name, cls, settings) in enumerate(models, 301):
    config = getattr(transformers, f"{cls}Config")(**settings)
    config._attn_implementation = "eager"
    made = recorder.model(getattr(transformers, f"{cls}ForConditionalGeneration"), config, name, seed)
    recorder.generate(made, name, "greedy", ids(9, 6), new=8)
    recorder.generate(made, name, "greedy_long", ids(45, 7), new=6)
    recorder.generate(made, name, "leftpad_b2", *left_padded(), new=6)

recorder.write()
