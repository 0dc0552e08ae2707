"""Records what Transformers does on tiny random models, in the format that `kiln conformance` reads.

Used by mamba_cases.py and experts_cases.py: Python with torch and transformers 5.23.0, on the CPU.
"""

import json
import os

import torch
import transformers
from safetensors.torch import save_file

VOCAB = 97
torch.set_grad_enabled(False)
torch.set_num_threads(1)


def numbers(seed):
    return torch.Generator().manual_seed(seed)


def ids(n, seed, rows=1):
    return torch.randint(3, VOCAB, (rows, n), generator=numbers(seed))


def left_padded():
    """Two rows of ten tokens, three of which are padding in the first, and their mask."""
    padded, mask = ids(10, 5, 2), torch.ones(2, 10, dtype=torch.long)
    padded[0, :3], mask[0, :3] = 0, 0
    return padded, mask


class Recorder:
    def __init__(self, out):
        self.out, self.cases, self.tensors = out, [], {}
        os.makedirs(out, exist_ok=True)

    def model(self, cls, config, name, seed, fixed=lambda key: False):
        """One whose logits are far from flat. Parameters that are `fixed` stay as Transformers makes them."""
        torch.manual_seed(seed)
        made, generator = cls(config).eval(), numbers(seed + 1)
        for key, p in made.named_parameters():
            if fixed(key):
                continue
            if p.dim() >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.25)
            elif "norm" in key or key.endswith(("bias", ".D", "sinks", "scale")):
                p.copy_(p + 0.1 * torch.randn(p.shape, generator=generator))
        for key, b in made.named_buffers():
            if "correction_bias" in key:
                b.copy_(0.3 * torch.randn(b.shape, generator=generator))
            elif key.endswith("layer_scalar"):
                b.copy_(0.9 + 0.2 * torch.rand(b.shape, generator=generator))
        settings = getattr(made, "generation_config", None)
        if settings is not None:
            settings.eos_token_id, settings.pad_token_id, settings.bos_token_id = None, 0, 1
        made.save_pretrained(os.path.join(self.out, "models", name))
        return made

    def put(self, name, tensor):
        self.tensors[name] = tensor.float().clamp(min=-1e30).contiguous()
        return name

    def generate(self, made, name, case, tokens, mask=None, new=12, **arguments):
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
            line[key] = self.put(f"{name}.{case}.{key}", torch.stack(list(rows)))
        if getattr(result, "sequences_scores", None) is not None:
            line["sequences_scores"] = result.sequences_scores.tolist()
        if getattr(result, "beam_indices", None) is not None:
            line["beam_indices"] = result.beam_indices.tolist()
        self.cases.append(line)

    def forward(self, made, name, case, chunks):
        """Feeds `chunks` one after the other through one cache."""
        cache, logits, seen = {}, [], 0
        for chunk in chunks:
            # Bamba counts from 0 again if it is not told.
            positions = torch.arange(seen, seen + chunk.shape[1])[None]
            result = made(input_ids=chunk, position_ids=positions, **cache, use_cache=True)
            seen += chunk.shape[1]
            # Models without attention have another name for it.
            cache = {key: result[key] for key in ("past_key_values", "cache_params") if key in result}
            logits.append(result.logits)
        logits = self.put(f"{name}.{case}.logits", torch.cat(logits, 1))
        chunks = [chunk.tolist() for chunk in chunks]
        self.cases.append(dict(model=name, case=case, chunks=chunks, kwargs={}, logits=logits))

    def usual(self, made, name, long, padded=True):
        """Records the cases that every model has; `long` is the length of the longest prompt, `padded` adds prompts with padding on the left."""
        self.generate(made, name, "greedy", ids(9, 6), new=8)
        self.generate(made, name, "greedy_long", ids(long, 7), new=6)
        if padded:
            self.generate(made, name, "leftpad_b2", *left_padded(), new=6)
        self.forward(made, name, "chunked_dynamic", torch.split(ids(40, 10), [21, 7, 1, 11], dim=1))
        if "other" not in name:
            self.generate(made, name, "beam3", ids(6, 9), new=6, num_beams=3)

    def write(self):
        save_file(self.tensors, os.path.join(self.out, "tensors.safetensors"))
        with open(os.path.join(self.out, "cases.json"), "w") as file:
            versions = dict(transformers=transformers.__version__, torch=torch.__version__)
            json.dump(dict(versions, cases=self.cases), file, indent=1)
        print(f"{len(self.cases)} cases")
