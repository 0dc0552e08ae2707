#!/usr/bin/env python3
"""Measures Kiln beside llama.cpp on the CPU: the same GGUF files, the same threads, by turns.

    pip install cmake gguf numpy
    tools/bench_llama_cpp.py WORK_FOLDER [--model F16.gguf|FOLDER] [--kiln target/release/kiln] [--threads 1,2] [--rounds 3]
                             [--instructions avx2,avx-vnni,avx512]

llama.cpp is built once in WORK_FOLDER, from the source package of llama-cpp-python 0.3.36 on PyPI, for each set of instructions that is
asked for (its variants haswell, alderlake and icelake). KILN_INSTRUCTIONS has Kiln use the same. Its
quantizer makes the other files of a float16 GGUF file. Without --model, that is a Llama of 1.1 billion made-up weights (22 layers, 2048, 32 heads,
4 key heads, 5632, vocabulary 32000). A folder is converted by llama.cpp's converter, without its tokenizer, which needs torch. Each round runs `llama-bench`, then `kiln bench`; the table has medians, and Kiln's share of llama.cpp.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile

# Variants of llama.cpp's CPU backend. Of those with AVX-512 and VNNI, icelake is the one that has no matrix unit (AMX).
VARIANTS = {"avx2": "haswell", "avx-vnni": "alderlake", "avx512": "icelake"}
PACKAGE = "llama-cpp-python==0.3.36"
FORMATS = ["F16", "Q8_0", "Q4_0", "Q4_K_M"]


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"bench_llama_cpp: error: {' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def llama_cpp(work):
    """The folder of its programs, which are built if they are not there."""
    programs = work / "build" / "bin"
    if (programs / "llama-quantize").exists() and (programs / "llama-bench").exists():
        return programs
    run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python", "-d", work, PACKAGE)
    with tarfile.open(next(work.glob("llama_cpp_python-*.tar.gz"))) as archive:
        archive.extractall(work, filter="data")
    source = next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
    off = ["GGML_NATIVE", "LLAMA_CURL", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER", "LLAMA_BUILD_UI", "LLAMA_OPENSSL"]
    on = ["GGML_BACKEND_DL", "GGML_CPU_ALL_VARIANTS", "BUILD_SHARED_LIBS"]
    switches = [f"-D{name}=OFF" for name in off] + [f"-D{name}=ON" for name in on]
    run("cmake", "-S", source, "-B", work / "build", "-DCMAKE_BUILD_TYPE=Release", *switches)
    variants = [f"ggml-cpu-{variant}" for variant in VARIANTS.values()]
    run("cmake", "--build", work / "build", "--target", *variants, "llama-quantize", "llama-bench", "-j2")
    return programs


def variant_of(programs, instructions):
    """A folder of its programs with one variant of its CPU backend, which they then take."""
    folder = programs.parent / f"bin-{instructions}"
    folder.mkdir(exist_ok=True)
    for path in programs.iterdir():
        link = folder / path.name
        is_another = "ggml-cpu-" in path.name and f"ggml-cpu-{VARIANTS[instructions]}." not in path.name
        if not is_another and not link.exists():
            # They look for the backend where they are themselves: a copy, not a link.
            shutil.copy2(path, link)
    return folder


def made_up(path):
    """A Llama of random weights, in float16."""
    import gguf
    import numpy as np

    layers, hidden, heads, kv_heads, inner, vocab = 22, 2048, 32, 4, 5632, 32000
    head = hidden // heads
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(head)
    writer.add_vocab_size(vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    special = ["<unk>", "<s>", "</s>"]
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)]
    types = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256
    words = [f"\u2581w{number}" for number in range(vocab - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + words)
    writer.add_token_scores([0.0] * len(tokens) + [-float(i) for i in range(len(words))])
    writer.add_token_types(types + [gguf.TokenType.NORMAL] * len(words))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)

    def matrix(name, rows, columns):
        numbers = random.standard_normal((rows, columns), dtype=np.float32) * 0.02
        writer.add_tensor(name, numbers.astype(np.float16))

    def ones(name):
        writer.add_tensor(name, np.ones(hidden, dtype=np.float32))

    matrix("token_embd.weight", vocab, hidden)
    matrix("output.weight", vocab, hidden)
    ones("output_norm.weight")
    for i in range(layers):
        ones(f"blk.{i}.attn_norm.weight")
        ones(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", heads * head, hidden)
        matrix(f"blk.{i}.attn_k.weight", kv_heads * head, hidden)
        matrix(f"blk.{i}.attn_v.weight", kv_heads * head, hidden)
        matrix(f"blk.{i}.attn_output.weight", hidden, heads * head)
        matrix(f"blk.{i}.ffn_gate.weight", inner, hidden)
        matrix(f"blk.{i}.ffn_up.weight", inner, hidden)
        matrix(f"blk.{i}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def converted(work, folder):
    """The float16 GGUF file that llama.cpp's converter makes of a folder."""
    path = work / f"{folder.name}.gguf"
    if not path.exists():
        source = next(work.glob("llama_cpp_python-*/vendor/llama.cpp"))
        sys.path[:0] = [str(source), str(source / "gguf-py")]
        import gguf_cases

        unfinished = path.with_suffix(".part")
        # The converter asks for a tokenizer, which must not be put into the folder itself.
        with tempfile.TemporaryDirectory() as copy:
            for name in ["config.json", *(file.name for file in folder.glob("*.safetensors*"))]:
                (pathlib.Path(copy) / name).symlink_to((folder / name).resolve())
            gguf_cases.convert(pathlib.Path(copy), unfinished, "MOSTLY_F16", with_size=True)
        unfinished.rename(path)
    return path


def of_llama_cpp(programs, path, threads, prompt, tokens):
    out = run(programs / "llama-bench", "-m", path, "-t", threads, "-p", prompt, "-n", tokens, "-r", 1, "-o", "json")
    return [result["avg_ts"] for result in json.loads(out)]


def of_kiln(kiln, path, threads, prompt, tokens, instructions):
    environment = {**os.environ, "KILN_INSTRUCTIONS": instructions}
    out = run(kiln, "bench", "--model", path, "-d", "cpu", "--threads", threads, "-p", prompt, "-n", tokens, "-r", 1, "-o", "json", env=environment)
    return [result["tokens_per_second"] for result in json.loads(out)["results"]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--kiln", default="target/release/kiln")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--instructions", default="avx2,avx-vnni,avx512")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-p", "--prompt", type=int, default=128)
    parser.add_argument("-n", "--tokens", type=int, default=32)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    programs = llama_cpp(args.work)
    model = args.model
    if model is None:
        model = args.work / "made-up-1.1b.gguf"
        if not model.exists():
            unfinished = model.with_suffix(".part")
            made_up(unfinished)
            unfinished.rename(model)
    if model.is_dir():
        model = converted(args.work, model)
    print("| file | instructions | threads | what | llama.cpp, tokens/s | Kiln, tokens/s | Kiln / llama.cpp |\n|---|---|---|---|---|---|---|")
    for name in args.formats.split(","):
        path = model if name == "F16" else args.work / f"{model.stem}.{name}.gguf"
        if not path.exists():
            run(programs / "llama-quantize", model, path, name)
        for instructions in args.instructions.split(","):
            variant = variant_of(programs, instructions)
            for threads in args.threads.split(","):
                rounds = [
                    (
                        of_llama_cpp(variant, path, threads, args.prompt, args.tokens),
                        of_kiln(args.kiln, path, threads, args.prompt, args.tokens, instructions),
                    )
                    for _ in range(args.rounds)
                ]
                for i, what in enumerate([f"prompt of {args.prompt}", f"{args.tokens} tokens"]):
                    theirs, ours = (statistics.median(speeds[side][i] for speeds in rounds) for side in (0, 1))
                    row = [name, instructions, threads, what, f"{theirs:.1f}", f"{ours:.1f}", f"**{ours / theirs:.2f}**"]
                    print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
