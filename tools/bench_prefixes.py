"""Measures the first token of prompts of about 2,000 tokens whose first nine tenths an earlier prompt had.

    python tools/bench_prefixes.py --url http://127.0.0.1:8080 [--rounds 2]

Prints the seconds to the first token, cold and reused, and their ratio. Only Python's own modules are needed.
"""

import argparse
import json
import random
import time
import urllib.request

WORDS = (
    "the quick brown fox jumps over a lazy dog while seven wizards quietly mix potions in the old tower near the river"
).split()


def text(seed, words):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def ask(url, model, instructions, question):
    """Returns the seconds to the first token, and the usage."""
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": question}]
    body = {
        "model": model, "messages": messages, "max_tokens": 8, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    start, first, usage = time.monotonic(), None, None
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise SystemExit(f"bench_prefixes: error: {chunk['error']['message']}")
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = first or time.monotonic() - start
            usage = chunk.get("usage") or usage
    return first, usage


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with urllib.request.urlopen(f"{arguments.url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    for seed in range(arguments.rounds):
        instructions = text(seed, 1800)
        cold, usage = ask(arguments.url, model, instructions, text(1000 + seed, 200))
        hot, reused = ask(arguments.url, model, instructions, text(2000 + seed, 200))
        cached = reused["prompt_tokens_details"]["cached_tokens"]
        print(
            f"cold {cold:.2f} s ({usage['prompt_tokens']} tokens), reused {hot:.2f} s"
            f" ({reused['prompt_tokens']} tokens, {cached} reused): {hot / cold:.3f}"
        )


if __name__ == "__main__":
    main()
