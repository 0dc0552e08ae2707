#!/usr/bin/env python3
"""Compare the beam search of `kiln run` with that of Hugging Face Transformers: tokens, scores and time.

    python tools/compare_beams.py --model DIR [--kiln target/release/kiln] [--device cpu] [--num-beams 4] [-n 30] [--threads N]

Ten prompts, the best sequence of each, in float32, without sampling. Where the tokens differ, the scores tell whether it is a near tie: two
sequences whose scores are closer than 1e-3. Times are of generating, without loading; Transformers runs on the CPU, both in turn, each
prompt once. Needs torch and transformers >= 5. Exit status 1 if a prompt differs that is no near tie, 2 for bad input.
"""
import argparse, json, subprocess, sys, time

PROMPTS = [
    "The capital of France is", "Once upon a time, in a small village by the sea,", "def fibonacci(n):\n    ",
    "The three most important things about cooking rice are", "Q: What is the largest planet?\nA:",
    "Dear Sir or Madam,\n\nI am writing to", "Water boils at", "import numpy as np\n\ndef softmax(x):",
    "The history of the Roman Empire begins", "Roses are red,\nviolets are blue,",
]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face model folder")
    ap.add_argument("--kiln", default="target/release/kiln", metavar="FILE", help="the binary (default target/release/kiln)")
    ap.add_argument("--device", default="cpu", help="where Kiln runs (default cpu)")
    ap.add_argument("--num-beams", type=int, default=4, metavar="N")
    ap.add_argument("-n", type=int, default=30, help="new tokens (default 30)")
    ap.add_argument("--threads", type=int, help="CPU threads of both (default all)")
    args = ap.parse_args()
    import torch, transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    if args.threads: torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    equal = ties = wrong = 0
    times = [0.0, 0.0]
    for prompt in PROMPTS:
        command = [args.kiln, "run", "--model", args.model, "--device", args.device, "--dtype", "f32", "--greedy", "--json",
                   "--num-beams", str(args.num_beams), "-n", str(args.n), prompt]
        if args.threads: command += ["--threads", str(args.threads)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(done.stderr, end="", file=sys.stderr)
            return 2
        report = json.loads(done.stdout)
        best = report["completions"][0]
        ids = tokenizer(prompt, return_tensors="pt")
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(**ids, num_beams=args.num_beams, max_new_tokens=args.n, do_sample=False,
                                 return_dict_in_generate=True, output_scores=True)
        seconds = [report["prefill_seconds"] + report["decode_seconds"], time.perf_counter() - start]
        times = [a + b for a, b in zip(times, seconds)]
        # The sequence is filled behind its end.
        theirs = out.sequences[0, ids["input_ids"].shape[1]:].tolist()
        score = out.sequences_scores[0].item()
        same = theirs[:len(best["tokens"])] == best["tokens"]
        near = abs(score - best["score"]) < 1e-3
        equal, ties, wrong = equal + same, ties + (not same and near), wrong + (not same and not near)
        verdict = "equal" if same else "near tie" if near else "DIFFERS"
        print(f"{verdict:<9} {best['score']:.5f} {score:.5f}  {seconds[0]:.2f} s {seconds[1]:.2f} s  {prompt!r}", flush=True)
    print(f"{equal} equal, {ties} near ties, {wrong} differ; Kiln {times[0]:.1f} s, Transformers {times[1]:.1f} s, "
          f"{times[1] / times[0]:.2f} times as fast")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
