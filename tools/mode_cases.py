"""Records tests/data/modes.json: tokens and scores of Transformers' guidance, DoLa and contrastive search on random settings.

Guidance is of Transformers 5; the other two are no longer in it, and are of 4.47. So this is run twice, and each run replaces its own records:

    python tools/mode_cases.py tests/fixtures/transformers-5.23.0/models tests/data/modes.json
    python tools/mode_cases.py tests/fixtures/transformers-4.47.1/models tests/data/modes.json
"""

import json
import math
import pathlib
import random
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM

NEW = 14
random.seed(5)
MODELS, OUT = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
IS_5 = not transformers.__version__.startswith("4.")


def row(low, high):
    return [random.randrange(3, 97) for _ in range(random.randrange(low, high))]


def padded(rows):
    longest = max(map(len, rows))
    ids = [[0] * (longest - len(row)) + row for row in rows]
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def processors(rows):
    # Repetition penalties of 4.47 also count padding.
    if len(rows) > 1 and not IS_5:
        return {}
    return random.choice([{}, {}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}])


def cases():
    """Name of the model, settings, prompts, negative prompts."""
    if IS_5:
        for i in range(24):
            scale = random.choice([0.0, 0.5, 1.5, 3.0, 7.5, -1.0])
            rows = [row(1, 12) for _ in range(1 if i % 2 else 3)]
            negative = random.choice([None, [row(1, 14) for _ in rows]])
            yield "llama", {"guidance_scale": scale, **processors(rows)}, rows, negative
    else:
        for i in range(24):
            layers = random.choice(["low", "high", [0], [1], [2, 1], [0, 1, 2], [0, 2, 3]])
            name = ["llama", "llama_tied"][i % 4 // 2]
            if (name, layers) == ("llama_tied", "low"):
                layers = "high"  # None of the three layers is a low one where embeddings are tied.
            rows = [row(1, 12) for _ in range(1 if i % 2 else 3)]
            yield name, {"dola_layers": layers, **processors(rows)}, rows, None
        for i in range(24):
            settings = {"penalty_alpha": random.choice([0.2, 0.4, 0.6, 0.9]), "top_k": random.choice([2, 3, 4, 8])}
            rows = [row(1, 12) for _ in range(1 if i % 2 else 3)]
            yield ["llama", "llama_tied"][i % 4 // 2], {**settings, **processors(rows)}, rows, None


def record(model, settings, prompts, negative):
    ids, mask = padded(prompts)
    extra = {}
    if negative:
        extra["negative_prompt_ids"], extra["negative_prompt_attention_mask"] = padded(negative)
    ends = random.choice([None, None, random.randrange(3, 97)])
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=ends,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
        **extra,
    )
    number = lambda x: round(x, 5) if math.isfinite(x) else None
    return {
        "settings": settings,
        "eos_token_id": [] if ends is None else [ends],
        "prompts": prompts,
        "negative_prompts": negative or [],
        "tokens": out.sequences[:, ids.shape[1] :].tolist(),
        # Of the first step.
        "scores": [[number(x) for x in scores] for scores in out.scores[0].tolist()],
    }


@torch.no_grad()
def main():
    models = {}
    records = []
    for name, settings, prompts, negative in cases():
        if name not in models:
            models[name] = AutoModelForCausalLM.from_pretrained(MODELS / name).float().eval()
            models[name].generation_config = transformers.GenerationConfig()
        records.append({"model": name, **record(models[name], settings, prompts, negative)})
    recorded = json.loads(OUT.read_text()) if OUT.exists() else {}
    recorded[f"transformers {transformers.__version__}"] = records
    OUT.write_text("{\n" + ",\n".join(
        f'"{version}": [\n' + ",\n".join(json.dumps(record) for record in records) + "\n]"
        for version, records in sorted(recorded.items())
    ) + "\n}\n")


main()
