#!/usr/bin/env python3
"""Record what Hugging Face Transformers makes of watermarks on the CPU, for the tests of Kiln's own.

    python tools/watermark_cases.py [tests/data/watermarks.json]

Green lists, g-values, processed scores, detections, and tokens of the model `llama` of tests/fixtures. Lists that are long are
recorded by their length, their first numbers and a checksum. Needs transformers 5 and torch.
"""
import json, pathlib, sys

import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, SynthIDTextWatermarkingConfig, WatermarkDetector, WatermarkingConfig
from transformers.generation import SynthIDTextWatermarkLogitsProcessor, WatermarkLogitsProcessor

ROOT = pathlib.Path(__file__).resolve().parent.parent
LLAMA = ROOT / "tests/fixtures/transformers-5.23.0/models/llama"
VOCABULARIES = [3, 97, 2048, 20_001, 49_152, 128_256]
SYNTH_IDS = [
    {"ngram_len": 5, "keys": [654, 400, 836, 123, 340, 443, 597, 160, 57]},
    {"ngram_len": 2, "keys": [1, -7], "sampling_table_size": 1000, "sampling_table_seed": 12, "context_history_size": 3},
    {"ngram_len": 3, "keys": [2**62, 5, 6], "skip_first_ngram_calls": True, "sampling_table_seed": -3},
    {"ngram_len": 1, "keys": [11, 12, 13], "context_history_size": 0},
    {"ngram_len": 2, "keys": [3, 4], "debug_mode": True},
]


def numbers(seed, count, below):
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def scores(seed, rows, vocab):
    """Scores with few digits, some of them removed."""
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    values = (values * 64).round() / 64
    values[:, ::7] = -float("inf")
    return values


def flat(tensor):
    return [None if value == -float("inf") else value for value in tensor.tolist()]


def checksum(values):
    return sum((i + 1) * value for i, value in enumerate(values)) % 2**32


def green_lists():
    for vocab in VOCABULARIES:
        for i, config in enumerate([{}, {"greenlist_ratio": 0.5, "hashing_key": 2**40 + 3}, {"hashing_key": -35}]):
            processor = WatermarkLogitsProcessor(vocab_size=vocab, device="cpu", **config)
            ids = numbers(vocab + i, 3, vocab)
            green = processor._get_greenlist_ids(torch.tensor(ids)).tolist()
            yield {"vocab": vocab, "config": config, "ids": ids, "size": len(green), "first": green[:5],
                   "checksum": checksum(green)}


def own_green():
    """Which of some tokens are green behind others, by the token itself."""
    for vocab in [97, 49_152]:
        for config in [{}, {"context_width": 3}, {"context_width": 2, "hashing_key": 123_456_789_012, "greenlist_ratio": 0.4}]:
            config = {"seeding_scheme": "selfhash", **config}
            processor = WatermarkLogitsProcessor(vocab_size=vocab, device="cpu", **config)
            ids = numbers(vocab, 4, vocab)
            tokens = numbers(vocab + 1, 24, vocab)
            green = [token in processor._get_greenlist_ids(torch.tensor([*ids, token])) for token in tokens]
            yield {"vocab": vocab, "config": config, "ids": ids, "tokens": tokens, "green": "".join("01"[g] for g in green)}


def processed():
    for vocab, config in [(97, {}), (97, {"seeding_scheme": "selfhash"}), (97, {"seeding_scheme": "selfhash", "context_width": 4}),
                          (97, {"bias": -0.7, "greenlist_ratio": 0.6}), (97, {"context_width": 9}),
                          (97, {"seeding_scheme": "selfhash", "context_width": 4, "bias": 1.3, "hashing_key": 99})]:
        processor = WatermarkLogitsProcessor(vocab_size=vocab, device="cpu", **config)
        ids = numbers(5, 6, vocab)
        given = scores(vocab, 1, vocab)
        changed = processor(torch.tensor([ids]), given)[0] != given[0]
        yield {"config": config, "ids": ids, "scores": flat(given[0]), "changed": changed.nonzero()[:, 0].tolist()}


def synth_ids():
    for config in SYNTH_IDS:
        full = SynthIDTextWatermarkingConfig(**config)
        processor = full.construct_processor(97, "cpu")
        ids = torch.tensor([numbers(3, 24, 97) + numbers(3, 8, 97)])
        steps, row = [], numbers(8, 4, 97)
        # Tokens repeat, so that contexts do.
        for step, token in enumerate([5, 9, 5, 9, 5, 9, 60, 5, 9]):
            given = scores(step, 1, 31)
            steps.append({"ids": list(row), "generated": step, "scores": flat(given[0]),
                          "out": flat(processor(torch.tensor([row]), given)[0])})
            row.append(token)
        processor = full.construct_processor(97, "cpu")
        g_values = processor.compute_g_values(ids)[0]
        yield {"config": config, "ids": ids[0].tolist(), "eos_token_id": ids[0, 29].item(),
               "table": checksum(processor.sampling_table.tolist()),
               "g_values": ["".join(map(str, row)) for row in g_values.tolist()],
               "context_repetition_mask": "".join("01"[m] for m in processor.compute_context_repetition_mask(ids)[0]),
               "eos_token_mask": "".join("01"[m] for m in processor.compute_eos_token_mask(ids, ids[0, 29].item())[0]),
               "steps": steps}


def generated():
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    prompts = [[14, 14, 15, 31, 22, 28, 14, 50, 26, 79], [37, 91, 40, 7, 52, 67, 64]]
    configs = [WatermarkingConfig(), WatermarkingConfig(seeding_scheme="selfhash"), WatermarkingConfig(bias=4.0, hashing_key=77),
               WatermarkingConfig(seeding_scheme="selfhash", context_width=3, bias=5.0),
               WatermarkingConfig(seeding_scheme="selfhash", context_width=9, bias=5.0, greenlist_ratio=0.5),
               SynthIDTextWatermarkingConfig(**SYNTH_IDS[0]), SynthIDTextWatermarkingConfig(**SYNTH_IDS[1])]
    for config in configs:
        for rows in [prompts[:1], prompts]:
            length = max(map(len, rows))
            ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
            out = model.generate(input_ids=ids, attention_mask=mask, watermarking_config=config, do_sample=False,
                                 max_new_tokens=40, eos_token_id=None, pad_token_id=0)
            yield {"config": config.to_dict(), "prompts": rows, "tokens": out[:, length:].tolist()}
    rows = prompts[:1]
    out = model.generate(input_ids=torch.tensor(rows), do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    yield {"config": None, "prompts": rows, "tokens": out[:, len(rows[0]):].tolist()}


def detected(generations):
    model = AutoConfig.from_pretrained(LLAMA)
    for case in generations:
        if case["config"] and "keys" in case["config"]:
            continue
        for ignore in [False, True]:
            config = case["config"] or WatermarkingConfig().to_dict()
            detector = WatermarkDetector(model, "cpu", config, ignore_repeated_ngrams=ignore)
            # The first token begins a text, and is not scored.
            for tokens in case["tokens"] + [[1] + case["tokens"][0]]:
                out = detector(torch.tensor([tokens]), return_dict=True)
                yield {"config": config, "ids": tokens, "ignore_repeated_ngrams": ignore,
                       "num_tokens_scored": int(out.num_tokens_scored[0]), "num_green_tokens": int(out.num_green_tokens[0]),
                       "z_score": out.z_score[0].item(), "p_value": out.p_value[0].item(), "prediction": out.prediction[0].item()}


def main():
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "tests/data/watermarks.json"
    generations = list(generated())
    tails = [-8.0, -1.0, 0.0, 0.3, 2.0, 3.0, 3.5, 3.6, 5.0, 12.0, 37.0, 50.0]
    recorded = {
        "transformers": transformers.__version__, "torch": torch.__version__,
        "green_lists": list(green_lists()), "own_green": list(own_green()), "processed": list(processed()),
        "synth_ids": list(synth_ids()), "generations": generations, "detections": list(detected(generations)),
        "p_values": [[z, (0.5 * torch.special.erfc(torch.tensor(z, dtype=torch.float64) / 2**0.5)).item()] for z in tails],
    }
    parts = [f"{json.dumps(name)}: " + (json.dumps(part) if not isinstance(part, list) else
             "[\n" + ",\n".join(json.dumps(case) for case in part) + "\n]") for name, part in recorded.items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(f"{path}: {sum(len(part) for part in recorded.values() if isinstance(part, list))} cases")


main()
