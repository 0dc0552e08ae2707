#!/usr/bin/env python3
"""Measure a server of OpenAI's API by the number of clients.

    python tools/bench_serve.py --url http://127.0.0.1:8080 [--model NAME] [--clients 1,4,16] [--rounds 3]
                                [--prompt 64] [--tokens 64] [--json FILE]

Each client sends two requests to /v1/completions, one after the other: a prompt of about --prompt tokens, of its own, and
--tokens new ones, greedy, past the end of the text (`ignore_eos`, which Kiln, vLLM and llama-server have). Printed are medians of
the rounds: tokens a second of all clients, and the time to the first token and between tokens of one. Needs Python alone.
"""
import argparse, http.client, json, statistics, threading, time, urllib.parse

WORDS = "the of and to in a is that for it was on are as with his they at be this from have or by one had not but what all".split()


def prompt(number, tokens):
    """Words that differ by client; nearly all are one token."""
    return " ".join(WORDS[(number * 7 + i * (number + 3)) % len(WORDS)] for i in range(tokens))


def request(url, model, text, tokens, times):
    """Sends one request, and appends the time of its start and of each event with text."""
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    body = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    begun = [time.perf_counter()]
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"bench_serve: {answer.status}: {answer.read().decode()}")
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            begun.append(time.perf_counter())
    times.append(begun)


def measure(url, model, clients, prompt_tokens, tokens):
    times = []

    def client(number):
        for turn in range(2):
            request(url, model, prompt(2 * number + turn, prompt_tokens), tokens, times)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    begun = time.perf_counter()
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    seconds = time.perf_counter() - begun
    if len(times) != 2 * clients: raise SystemExit("bench_serve: a request failed")
    first = [each[1] - each[0] for each in times]
    gaps = [(each[-1] - each[1]) / (tokens - 1) for each in times]
    return 2 * clients * tokens / seconds, statistics.median(first), statistics.median(gaps)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("--url", required=True)
    ap.add_argument("--model")
    ap.add_argument("--clients", default="1,4,16")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--prompt", type=int, default=64)
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--json", metavar="FILE")
    args = ap.parse_args()
    url = urllib.parse.urlparse(args.url)
    if not args.model:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("GET", "/v1/models")
        args.model = json.load(connection.getresponse())["data"][0]["id"]
    measure(url, args.model, 1, args.prompt, args.tokens)  # not counted
    rows = []
    print("| clients | tokens/s | first token, ms | between tokens, ms |\n|---|---|---|---|")
    for clients in map(int, args.clients.split(",")):
        rounds = [measure(url, args.model, clients, args.prompt, args.tokens) for _ in range(args.rounds)]
        rate, first, gap = (statistics.median(column) for column in zip(*rounds))
        rows.append({"clients": clients, "tokens_per_second": rate, "first_ms": first * 1e3, "gap_ms": gap * 1e3})
        print(f"| {clients} | {rate:.1f} | {first * 1e3:.0f} | {gap * 1e3:.1f} |", flush=True)
    if args.json:
        with open(args.json, "w") as file: json.dump(rows, file)


main()
