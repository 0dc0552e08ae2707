"""Records what Transformers does on tiny models of Gemma 4.

    python tools/gemma4_cases.py tests/fixtures/transformers-5.23.0-gemma4            (Python with torch and transformers 5.23.0, on the CPU)

`kiln conformance` runs the folder. `gemma4_text` shares keys and has per-layer embeddings, as the small models do; `gemma4_text_other` has experts,
and keys as values, as the large ones do; `gemma4_text_dense` has neither. `gemma4` is a folder with images.
"""

import sys

import transformers
from recorder import VOCAB, Recorder, ids, left_padded

recorder = Recorder(sys.argv[1])

sizes = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16,
    max_position_embeddings=128, pad_token_id=0, attn_implementation="eager", experts_implementation="eager", sliding_window=8,
    vocab_size_per_layer_input=VOCAB,
)
sliding, full = "sliding_attention", "full_attention"
models = (
    ("gemma4_text", dict(
        num_hidden_layers=6, layer_types=[sliding, full, sliding, sliding, sliding, full], num_kv_shared_layers=3, use_double_wide_mlp=True,
        hidden_size_per_layer_input=12, final_logit_softcapping=30.0)),
    ("gemma4_text_other", dict(
        num_hidden_layers=4, layer_types=[sliding, full, sliding, full], hidden_size_per_layer_input=0, attention_k_eq_v=True,
        num_global_key_value_heads=1, enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=20)),
    ("gemma4_text_dense", dict(
        num_hidden_layers=3, layer_types=[full, sliding, full], hidden_size_per_layer_input=0, attention_bias=True, tie_word_embeddings=False,
        rms_norm_eps=1e-3, rope_parameters={
            full: dict(rope_type="proportional", rope_theta=700.0, partial_rotary_factor=0.5),
            sliding: dict(rope_type="default", rope_theta=300.0)})),
)

for seed, (name, settings) in enumerate(models, 391):
    config = transformers.Gemma4TextConfig(**{**sizes, **settings})
    made = recorder.model(transformers.Gemma4ForCausalLM, config, name, seed)
    recorder.usual(made, name, long=45)

unified = dict(num_hidden_layers=3, layer_types=[sliding, sliding, full], num_kv_shared_layers=0, attention_k_eq_v=True, num_global_key_value_heads=1)
config = transformers.Gemma4UnifiedTextConfig(**{**sizes, **unified})
recorder.usual(recorder.model(transformers.Gemma4UnifiedForCausalLM, config, "gemma4_unified_text", 395), "gemma4_unified_text", long=45)

vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8, patch_size=8)
config = transformers.Gemma4Config(text_config={**sizes, **models[0][1]}, vision_config=vision, audio_config=None)
config._attn_implementation = "eager"
made = recorder.model(transformers.Gemma4ForConditionalGeneration, config, "gemma4", 396)
recorder.generate(made, "gemma4", "greedy", ids(9, 6), new=8)
recorder.generate(made, "gemma4", "leftpad_b2", *left_padded(), new=6)

recorder.write()
