#!/usr/bin/env python3
"""Which format llama.cpp gives each tensor in each mixture, for the tests of kiln-weights.

    python tools/mixture_cases.py LLAMA_QUANTIZE     writes tests/data/weights/mixtures.json

Writes models of zeros whose sizes decide what mixtures do, and asks `llama-quantize --dry-run` for the formats (llama.cpp as in the source
package llama-cpp-python 0.3.36 of PyPI). Needs the Python package gguf. A case has the architecture, what the metadata says, the names and the shapes of the tensors, rows first, and their
formats by the name of the mixture. Bad input: one line on stderr, exit status 2.
"""
import json, re, subprocess, sys, tempfile
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / "tests/data/weights/mixtures.json"
MIXTURES = ("F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K_S Q3_K_M Q3_K_L Q4_K_S Q4_K_M Q5_K_S Q5_K_M Q6_K IQ4_NL IQ4_XS").split()
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def model(architecture, blocks, heads, kv_heads, columns=256, experts=0, tied=False, parts=MATRICES, attends=lambda i: True):
    shapes = {"token_embd.weight": [2, columns], "output_norm.weight": [columns]}
    if not tied:
        shapes["output.weight"] = [2, columns]
    for i in range(blocks):
        shapes[f"blk.{i}.attn_norm.weight"] = [columns]
        for part in parts:
            if part.startswith("attn") and not attends(i):
                continue
            stack = [experts] if part.endswith("exps") else []
            shapes[f"blk.{i}.{part}.weight"] = stack + [2, columns]
    kv = kv_heads if all(map(attends, range(blocks))) else [kv_heads * attends(i) for i in range(blocks)]
    numbers = {"block_count": blocks, "context_length": 64, "embedding_length": columns, "feed_forward_length": columns,
               "attention.head_count": heads, "attention.head_count_kv": kv, "expert_count": experts, "expert_used_count": min(experts, 2)}
    return {"architecture": architecture, "numbers": numbers, "order": " ".join(shapes), "tensors": shapes}


def models():
    expert = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    mixer = ("ssm_in", "ssm_conv1d", "ssm_x", "ssm_dt", "ssm_out")
    return [
        model("llama", 32, 4, 1),
        model("llama", 17, 4, 4, tied=True),
        model("llama", 9, 6, 2, columns=96, tied=True),
        model("llama", 2, 3, 1, columns=40),
        model("llama", 80, 8, 1, parts=("attn_v", "ffn_down")),
        model("llama", 16, 4, 1, experts=8, parts=expert),
        model("qwen2", 80, 4, 4, parts=("attn_v",)),
        model("qwen2moe", 9, 2, 2, experts=4, parts=expert + ("ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")),
        model("phi3", 9, 4, 4, parts=("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
        model("jamba", 12, 4, 1, parts=MATRICES + mixer, attends=lambda i: i % 4 == 2),
        model("mamba", 3, 0, 0, tied=True, parts=mixer),
    ]


def write(case, path):
    import gguf, numpy

    name = case["architecture"]
    writer = gguf.GGUFWriter(path, name)
    for key, value in case["numbers"].items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{name}.{key}", value)
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", 1e-5)
    for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank"):
        writer.add_uint32(f"{name}.ssm.{key}", 4)
    writer.add_uint32(f"{name}.rope.scaling.original_context_length", 64)
    for tensor, shape in case["tensors"].items():
        writer.add_tensor(tensor, numpy.zeros(shape, numpy.float32))
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()


def formats(quantize, case, path, mixture):
    run = subprocess.run([quantize, "--dry-run", path, mixture], capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(f"{quantize} {mixture} failed:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    found = {}
    for line in (run.stdout + run.stderr).splitlines():
        if line := re.match(r"\[ *\d+/ *\d+\] +(\S+) .* type = +(\w+),.*?(?:\((\w+)\))?$", line):
            found[line[1]] = (line[3] or line[2]).lower()
    return [found[tensor] for tensor in case["tensors"]]


def main():
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        print("mixture_cases: error: name llama-quantize of llama.cpp: python tools/mixture_cases.py LLAMA_QUANTIZE", file=sys.stderr)
        raise SystemExit(2)
    cases = models()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        for case in cases:
            write(case, path)
            case["formats"] = {mixture.lower(): " ".join(formats(sys.argv[1], case, path, mixture)) for mixture in MIXTURES}
            print(case["architecture"], len(case["tensors"]), "tensors")
    OUT.write_text("[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]\n")


if __name__ == "__main__":
    main()
