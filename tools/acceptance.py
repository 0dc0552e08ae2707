#!/usr/bin/env python3
"""Count which proposals of assisted decoding are accepted, by kind of text, and what they save.

    python tools/acceptance.py --model DIR [--draft DIR] [--kiln target/release/kiln] [--device cpu] [-n 60] [-r 3]

Prompt lookup proposes 10 tokens; with --draft, a draft model proposes. Tokens are the likeliest ones. Tokens per second are those of the median of -r
runs, without and with proposals in turn. Prints a table in Markdown. Exit status 1 if proposals change a text, 2 for bad input.
"""
import argparse, json, statistics, subprocess, sys

ARTICLE = ("The ferry leaves Oslo at nine. It carries four hundred passengers and ninety cars. At noon it stops in Horten, where most of the "
           "cars go ashore. The captain, Ingrid Dahl, has sailed the route for twenty years. In the evening the ferry returns to Oslo.")
PROMPTS = {
    "a copy, word by word": f"Text: {ARTICLE}\nThe same text once more: ",
    "an edit: another name": f"Text: {ARTICLE}\nThe same text, with Bergen instead of Oslo: ",
    "a summary": f"Text: {ARTICLE}\nSummary: ",
    "an answer about a text": f"Text: {ARTICLE}\nQuestion: Who is the captain, and how long has she sailed the route?\nAnswer: ",
    "code": "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\nclass Point3:\n    def __init__(self, x, y, z):\n",
    "JSON": '[\n  {"name": "Alice", "city": "Oslo", "age": 31},\n  {"name": "Bob", "city": "Bergen", "age": 45},\n',
    "a translation": "English: The boat is small. French: Le bateau est petit.\nEnglish: The house is large. French:",
    "a story that repeats itself": "It was a cold morning, and the old man walked down to the harbour because",
}


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face model folder")
    ap.add_argument("--draft", metavar="DIR", help="a smaller model that proposes (default: prompt lookup)")
    ap.add_argument("--kiln", default="target/release/kiln", metavar="FILE", help="the binary (default target/release/kiln)")
    ap.add_argument("--device", default="cpu", help="where Kiln runs (default cpu)")
    ap.add_argument("-n", type=int, default=60, help="new tokens (default 60)")
    ap.add_argument("-r", type=int, default=3, metavar="RUNS", help="runs of each (default 3)")
    args = ap.parse_args()
    assisted = ["--draft", args.draft] if args.draft else ["--prompt-lookup", "10"]
    changed = 0
    print("| text | accepted | of proposed | tokens/s without | with | ratio |\n|---|---|---|---|---|---|")
    for kind, prompt in PROMPTS.items():
        reports = [[], []]
        for _ in range(args.r):
            for way, extra in zip(reports, [[], assisted]):
                command = [args.kiln, "run", "--model", args.model, "--device", args.device, "--greedy", "--json", "-n", str(args.n)]
                done = subprocess.run(command + extra + [prompt], capture_output=True, text=True)
                if done.returncode:
                    print(done.stderr, end="", file=sys.stderr)
                    return 2
                way.append(json.loads(done.stdout))
        rates = [statistics.median((r["generated_tokens"] - 1) / r["decode_seconds"] for r in way) for way in reports]
        plain, looked_up = reports[0][0], reports[1][0]
        if plain["text"] != looked_up["text"]:
            changed += 1
            print(f"{kind}: proposals changed the text", file=sys.stderr)
        print(f"| {kind} | {looked_up['accepted_tokens']} | {looked_up['proposed_tokens']} "
              f"| {rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0]:.2f} |", flush=True)
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
