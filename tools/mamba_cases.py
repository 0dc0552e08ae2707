"""Records what Transformers does on tiny Mamba models of other sizes than those of the other recordings.

    python tools/mamba_cases.py tests/fixtures/transformers-5.23.0-mamba        (Python with torch and transformers 5.23.0, on the CPU)

`kiln conformance` runs the folder. Models: `mamba_other` (biases in and out, none of the convolution, three inputs of it, untied
embeddings) and `falcon_mamba`.
"""

import json
import os
import sys

import torch
import transformers
from safetensors.torch import save_file
from transformers import FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

VOCAB = 97
torch.set_grad_enabled(False)
torch.set_num_threads(1)
out = sys.argv[1]
os.makedirs(out, exist_ok=True)
cases, tensors = [], {}


def numbers(seed):
    return torch.Generator().manual_seed(seed)


def ids(n, seed, rows=1):
    return torch.randint(3, VOCAB, (rows, n), generator=numbers(seed))


def model(cls, config, name, seed):
    """One whose logits are far from flat."""
    torch.manual_seed(seed)
    made, generator = cls(config).eval(), numbers(seed + 1)
    for key, p in made.named_parameters():
        if p.dim() >= 2 and "A_log" not in key:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
        elif "norm" in key:
            p.copy_(p + 0.1 * torch.randn(p.shape, generator=generator))
        elif key.endswith("bias") or key.endswith(".D"):
            p.copy_(p + 0.1 * torch.randn(p.shape, generator=generator))
    settings = made.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = None, 0, 1
    made.save_pretrained(os.path.join(out, "models", name))
    return made


def record(made, name, case, tokens, mask=None, new=12, **arguments):
    mask = torch.ones_like(tokens) if mask is None else mask
    result = made.generate(
        tokens,
        attention_mask=mask,
        max_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **arguments,
    )
    line = dict(
        model=name,
        case=case,
        input_ids=tokens.tolist(),
        attention_mask=mask.tolist(),
        max_new_tokens=new,
        kwargs=arguments,
        sequences=result.sequences.tolist(),
    )
    for key, rows in (("logits", result.logits), ("scores", result.scores)):
        tensors[f"{name}.{case}.{key}"] = torch.stack(list(rows)).float().clamp(min=-1e30).contiguous()
        line[key] = f"{name}.{case}.{key}"
    if getattr(result, "sequences_scores", None) is not None:
        line["sequences_scores"] = result.sequences_scores.tolist()
    if getattr(result, "beam_indices", None) is not None:
        line["beam_indices"] = result.beam_indices.tolist()
    cases.append(line)


sizes = dict(vocab_size=VOCAB, residual_in_fp32=True, pad_token_id=0)
other = MambaConfig(
    **sizes, hidden_size=40, state_size=20, num_hidden_layers=3, conv_kernel=3, expand=3, use_bias=True,
    use_conv_bias=False, tie_word_embeddings=False,
)
falcon = FalconMambaConfig(
    **sizes, hidden_size=24, state_size=6, num_hidden_layers=2, conv_kernel=4, expand=2, time_step_rank=4,
    mixer_rms_eps=1e-3, tie_word_embeddings=False,
)
padded, mask = ids(10, 5, 2), torch.ones(2, 10, dtype=torch.long)
padded[0, :3], mask[0, :3] = 0, 0
for name, cls, config, seed in (
    ("mamba_other", MambaForCausalLM, other, 71),
    ("falcon_mamba", FalconMambaForCausalLM, falcon, 81),
):
    made = model(cls, config, name, seed)
    record(made, name, "greedy", ids(9, 6))
    record(made, name, "greedy_short", ids(2, 6))
    record(made, name, "greedy_long", ids(40, 7), new=8)
    record(made, name, "greedy_b2", ids(7, 8, 2), new=8)
    record(made, name, "greedy_nocache", ids(9, 6), use_cache=False)
    record(made, name, "beam3", ids(6, 9), new=8, num_beams=3)
    if not config.use_bias:
        # With a bias in front of the convolution, Transformers lets padding change the tokens behind it.
        record(made, name, "leftpad_b2", padded, mask, new=8)

save_file(tensors, os.path.join(out, "tensors.safetensors"))
with open(os.path.join(out, "cases.json"), "w") as file:
    versions = dict(transformers=transformers.__version__, torch=torch.__version__)
    json.dump(dict(versions, cases=cases), file, indent=1)
print(f"{len(cases)} cases")
