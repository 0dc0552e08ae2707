#!/usr/bin/env python3
"""Compare what lm-evaluation-harness says of a model through `kiln serve` and through transformers.

    python tools/lm_eval_scores.py KILN_BINARY MODEL_FOLDER [options of `kiln serve`]

The task is local: 40 questions with four answers each, and log-likelihoods of texts. `local-completions` sends each prompt with
`echo` and `logprobs` to /v1/completions; `hf` computes in float32. Scores must be equal, and log-likelihoods within
0.1 %: both compute in float32, and sum in different orders.
Needs the packages lm-eval[api], torch and transformers.
"""
import argparse, json, os, pathlib, random, re, subprocess, sys, tempfile

TASK = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo", "Egypt": "Cairo",
            "Greece": "Athens", "Russia": "Moscow", "Norway": "Oslo", "Cuba": "Havana"}


def questions():
    """Questions whose answers differ in length and sense."""
    drawn = random.Random(3)
    for _ in range(4):
        for country, capital in CAPITALS.items():
            wrong = drawn.sample(sorted(set(CAPITALS.values()) - {capital}), 3)
            choices = [*wrong, capital]
            drawn.shuffle(choices)
            before = drawn.choice(["The capital of {} is", "Q: Which city is the capital of {}?\nA:", "In {}, the largest city is"])
            yield {"text": before.format(country), "choices": [f" {city}" for city in choices], "label": choices.index(capital)}


def evaluated(folder, kind, arguments):
    """The scores, and the log-likelihoods of all answers."""
    out = folder / kind
    command = [sys.executable, "-m", "lm_eval", "--model", kind, "--model_args", arguments, "--tasks", "letters", "--include_path",
               folder, "--output_path", out, "--log_samples", "--batch_size", "4", "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode: sys.exit(f"lm_eval_scores: {kind} failed:\n{done.stderr[-3000:]}")
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]["letters"]
    samples = [json.loads(line) for line in next(out.rglob("samples_*.jsonl")).read_text().splitlines()]
    answers = [float(answer[0]) for sample in sorted(samples, key=lambda one: one["doc_id"]) for answer in sample["filtered_resps"]]
    return {name: results[f"{name},none"] for name in ("acc", "acc_norm")}, answers


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("binary", metavar="KILN_BINARY")
parser.add_argument("model", metavar="MODEL_FOLDER", type=pathlib.Path)
options, more = parser.parse_known_args()
with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    (folder / "letters.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions()))
    (folder / "letters.yaml").write_text(TASK.format(file=folder / "letters.jsonl"))
    model = options.model.resolve()
    server = subprocess.Popen([options.binary, "serve", "-m", model, "--alias", "model", "--port", "0", "--dtype", "f32", *more],
                              stderr=subprocess.PIPE, text=True)
    try:
        address = next((found[0] for line in server.stderr if (found := re.findall(r"http://[\d.]+:\d+", line))), None)
        if address is None: sys.exit("lm_eval_scores: the server did not start")
        arguments = f"model=model,base_url={address}/v1/completions,num_concurrent=4,tokenizer_backend=huggingface,tokenizer={model}"
        served = evaluated(folder, "local-completions", arguments)
    finally:
        server.terminate()
    wanted = evaluated(folder, "hf", f"pretrained={model},dtype=float32")
print("| by | acc | acc_norm |\n|---|---|---|")
for name, (scores, _) in (("transformers", wanted), ("kiln serve", served)): print(f"| {name} | {scores['acc']} | {scores['acc_norm']} |")
far = max(abs(ours - theirs) / max(1, abs(theirs)) for ours, theirs in zip(served[1], wanted[1], strict=True))
print(f"{len(wanted[1])} log-likelihoods; the largest relative difference is {far:.1e}")
sys.exit(0 if served[0] == wanted[0] and far < 1e-3 else 1)
