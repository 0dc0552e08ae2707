"""Records what peft computes with LoRA adapters of tiny models.

    python tools/adapter_cases.py tests/fixtures/transformers-5.23.0-adapters

Needs torch, transformers 5.23.0 and peft 0.21.2, on the CPU. `kiln conformance` runs the folder; `adapters/` has the adapters, and the argument
`adapter` of a case names one.
"""

import os
import shutil
import sys

import peft
import torch
import transformers
from recorder import VOCAB, Recorder, ids, left_padded, numbers

recorder = Recorder(sys.argv[1])
sizes = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, pad_token_id=0, attn_implementation="eager")
gpt2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_ctx=64, attn_implementation="eager")
mamba2 = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_heads=8, head_dim=8, state_size=16, n_groups=2, expand=2, chunk_size=8)
every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

models = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes), {
        "llama_all": dict(r=4, lora_alpha=8, target_modules=every + ["lm_head"]),
        "llama_patterns": dict(r=2, lora_alpha=3, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
                               rank_pattern={"down_proj": 5}, alpha_pattern={"layers.1.self_attn.q_proj": 9})}),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**sizes), {
        "qwen2_some": dict(r=3, lora_alpha=6, target_modules=["k_proj", "up_proj"], layers_to_transform=[0, 2])}),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config(**sizes), {
        "phi3_fused": dict(r=4, lora_alpha=4, target_modules=["qkv_proj", "gate_up_proj"])}),
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config(**gpt2), {
        "gpt2_conv1d": dict(r=4, lora_alpha=8, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)}),
    "mamba2": (transformers.Mamba2ForCausalLM, transformers.Mamba2Config(**mamba2), {
        "mamba2_in": dict(r=4, lora_alpha=8, target_modules=["in_proj"])}),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(**sizes, num_local_experts=4, experts_implementation="eager"), {
        "mixtral_attention": dict(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"])}),
}

for seed, (name, (cls, config, adapters)) in enumerate(models.items(), 701):
    for adapter, settings in adapters.items():
        made = recorder.model(cls, config, name, seed)
        made = peft.get_peft_model(made, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        generator = numbers(seed + 50)
        for key, p in made.named_parameters():
            if "lora_" in key:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
        folder = os.path.join(recorder.out, "adapters", adapter)
        made.save_pretrained(folder, save_embedding_layers=False)
        os.remove(os.path.join(folder, "README.md"))
        first = len(recorder.cases)
        recorder.generate(made, name, f"{adapter}_greedy", ids(9, 6), new=8)
        if name != "mamba2":
            recorder.generate(made, name, f"{adapter}_leftpad_b2", *left_padded(), new=6)
        recorder.generate(made, name, f"{adapter}_beam3", ids(6, 9), new=6, num_beams=3)
        recorder.forward(made, name, f"{adapter}_chunked", torch.split(ids(40, 10), [21, 7, 1, 11], dim=1))
        for case in recorder.cases[first:]:
            case["kwargs"] = dict(case["kwargs"], adapter=adapter)

recorder.write()
