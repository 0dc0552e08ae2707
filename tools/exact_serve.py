#!/usr/bin/env python3
"""Test that `kiln serve` gives a request, among many others, bit for bit the answer that it gives it alone.

    python tools/exact_serve.py KILN_BINARY MODEL [--requests 1000] [--seed 0] [--clients 24] [--rows 16]
        [--queue 1000] [--prefix-memory 1GiB] [--prefill-chunk 32] [--longest TOKENS] [--cancelled 0.15]
        [--pause 0.1] [--patience 600] [ARGUMENT OF kiln serve..]

Random requests (caches, samplers, penalties, grammars, streams, shared beginnings) come and go at a loaded
server, and some leave early. Then a second server, with one row and no memory of prompts, answers each alone,
in another order. Texts, log-probabilities, reasons and counts must be the same. Prints each difference, and a
table. Exit status 1 for a difference, an error, or a server that failed or does not end; 2 for bad input.

With `--memory SIZE` (of kiln serve) little above the weights, answers that have begun must wait for memory.
The server does not count them. With `--cancelled 0`, its metrics show a number that it is at least.
"""
import argparse
import collections
import http.client
import json
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time

KEYS = ["first-key", "second-key"]
DEFAULT = "default cache"
SMALL = "residual=32,group=32"
CACHES = ["dynamic", "static", "sliding", "sink:window=64,sinks=4", f"quantized:nbits=4,{SMALL}",
          f"quantized:nbits=2,{SMALL}", f"quantized:format=quanto,{SMALL}", f"quantized:format=hqq,{SMALL}",
          "quantized:format=fp8", "none"]
WORDS = """the quick brown fox jumps over a lazy dog while seven wizards, quietly, mix potions in the old
tower; who goes there? My lord, I am no king. 1594 naïve 東京 speak: "come" and (go) now""".split()
STOPS = [" the", "e", ",", "\n", "I am", "zebra"]
NAMES = {"type": "string", "enum": ["Rome", "Paris", "London", "Los Angeles"]}
FIELDS = {"city": NAMES, "size": {"type": "integer", "minimum": 0, "maximum": 999},
          "note": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}}
SCHEMAS = [{"type": "object", "properties": FIELDS, "required": ["city", "size"]},
           {"type": "array", "items": NAMES, "minItems": 1, "maxItems": 4}, {"type": "number"}]
BEGUN, ENDED = "time_to_first_token_seconds_count", "e2e_request_latency_seconds_count"


class Server:
    """A server of one model. `port` is None if it does not start. `silent`: a request has no answer."""

    def __init__(self, binary, model, arguments, caches):
        command = [binary, "serve", "--model", model, "--port", "0", *arguments]
        for cache in caches: command += ["--allow-cache", cache]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.child = subprocess.Popen(command, env=os.environ | {"KILN_API_KEYS": ",".join(KEYS)}, **output)
        self.said, self.port, self.silent = collections.deque(maxlen=40), None, False
        for line in self.child.stdout:
            self.said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        # Without a reader, a full pipe would keep the server.
        threading.Thread(target=lambda: self.said.extend(self.child.stdout), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.kill()
        self.child.wait()

    def open(self, method, path, body=None, key=KEYS[0]):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        return connection

    def ask(self, method, path, body=None):
        connection = self.open(method, path, body)
        with connection.getresponse() as answer: text = answer.read().decode()
        connection.close()
        return answer.status, text

    def card(self):
        return json.loads(self.ask("GET", "/v1/models")[1])["data"][0]

    def metrics(self):
        text = self.ask("GET", "/metrics")[1]
        return {name: float(value) for name, value in re.findall(r"^kiln_(\w+)\{.*\} (\S+)$", text, re.M)}

    def fault(self):
        """Waits until nothing runs. Returns what is wrong with the server, if anything is."""
        end, props = time.monotonic() + 30, None
        try:
            while time.monotonic() < end:
                status, health = self.ask("GET", "/health")
                props = json.loads(self.ask("GET", "/props")[1])
                if status != 200: return f"/health: {status} {health}"
                if props["running"] == props["waiting"] == 0: return None
                time.sleep(0.1)
        except (OSError, http.client.HTTPException) as error:
            return f"{error!r}; its last lines: {''.join(self.said)}"
        return f"{props['running']} answers still run and {props['waiting']} wait"


class Drawer:
    """Draws requests. Those of equal numbers and seeds are equal."""

    def __init__(self, server, caches, options):
        self.server, self.caches, self.seed, self.cancelled = server, caches, options.seed, options.cancelled
        self.model = server.card()["id"]
        self.longest = options.longest or server.card()["max_model_len"] // 2
        draw, self.per_word = random.Random(f"{self.seed} beginnings"), 1.0
        self.pool = self.tokens(self.words(draw, 4000))
        self.per_word = len(self.pool) / 4000
        self.beginnings = [self.words(draw, 4 + int(share * self.longest)) for share in (0.2, 0.5, 0.8)]
        self.begun = [self.tokens(text) for text in self.beginnings]

    def tokens(self, text):
        body = {"content": text, "add_special": True}
        return json.loads(self.server.ask("POST", "/tokenize", body)[1])["tokens"]

    def words(self, draw, tokens):
        return " ".join(draw.choice(WORDS) for _ in range(max(1, int(tokens / self.per_word))))

    def draw(self, number):
        """Returns a request: path, body, key, kinds, and when its client leaves: seconds, pieces or None."""
        draw = random.Random(f"{self.seed} {number}")

        def some(share): return draw.random() < share
        def between(least, most): return round(draw.uniform(least, most), 2)
        def has(kind, share):
            # Draws whether the request is of this kind.
            kinds.extend([kind] if (drawn := some(share)) else [])
            return drawn

        body = {"model": self.model, "seed": draw.randrange(2**31), "max_tokens": draw.randint(1, 64)}
        most = draw.randint(1, self.longest if some(0.25) else min(48, self.longest))
        cache = draw.choice(self.caches)
        if some(0.1): cache = DEFAULT
        else: body["kiln"] = {"cache": cache}
        # Each of its steps computes the whole text again.
        if cache == "none": body["max_tokens"], most = draw.randint(1, 12), min(most, 48)
        kinds, text, start = [cache], self.words(draw, most), []
        if has("shared beginning", 0.35):
            at = draw.randrange(len(self.beginnings))
            start, most = self.begun[at], max(1, min(most, self.longest - len(self.begun[at])))
            text = f"{self.beginnings[at]} {self.words(draw, most)}"
        if has("greedy", 0.3):
            body["temperature"] = 0
        else:
            kinds.append("sampled")
            if some(0.9): body["temperature"] = between(0.2, 1.6)
            if some(0.4): body["top_p"] = between(0.5, 1)
            if some(0.3): body["top_k"] = draw.randint(1, 100)
            if some(0.3): body["min_p"] = between(0, 0.2)
            if some(0.1): body["typical_p"] = between(0.5, 1)
        if has("penalties", 0.3):
            body["presence_penalty"] = between(-1, 2)
            if some(0.5): body["frequency_penalty"] = between(-1, 2)
            if some(0.5): body["repetition_penalty"] = between(1, 1.5)
        if has("logit_bias", 0.15):
            biased = draw.choices(self.pool, k=draw.randint(1, 8))
            body["logit_bias"] = {str(token): between(-100, 10) for token in biased}
        if has("stop", 0.2): body["stop"] = draw.sample(STOPS, draw.randint(1, 3))
        if has("n > 1", 0.25): body["n"] = draw.randint(2, 3)
        if has("streamed", 0.5): body |= {"stream": True, "stream_options": {"include_usage": True}}
        if some(0.1): body["cache_salt"] = draw.choice("ab")
        chat, top = has("chat", 0.5), draw.randint(0, 5)
        if chat and has("grammar", 0.4):
            schema = {"type": "json_schema", "json_schema": {"name": "it", "schema": draw.choice(SCHEMAS)}}
            body["response_format"] = schema if some(0.75) else {"type": "json_object"}
        elif has("no early end", 0.2):
            least = draw.randint(1, body["max_tokens"])
            body |= {"ignore_eos": True} if some(0.5) else {"min_tokens": least}
        # The prompt comes last, where a difference that is printed can do without its end.
        if chat:
            turns = [text, "I am no king.", self.words(draw, 8)] if some(0.2) else [text]
            roles = zip(["user", "assistant", "user"], turns)
            body |= {"logprobs": True, "top_logprobs": top,
                     "messages": [{"role": role, "content": text} for role, text in roles]}
        else:
            at = draw.randrange(len(self.pool) - most)
            tokens = start + self.pool[at:at + most]
            body |= {"logprobs": top, "prompt": text if has("text", 0.5) else tokens}
        leaves = (draw.expovariate(4) if some(0.6) else draw.randint(1, 20)) if some(self.cancelled) else None
        path = "/v1/chat/completions" if chat else "/v1/completions"
        return path, body, KEYS[some(0.25)], kinds, leaves


def pieces(answer, end):
    """The objects of a stream, or the one of another answer. A stream that lasts beyond `end` is an error."""
    if not answer.getheader("content-type", "").startswith("text/event-stream"):
        yield json.loads(answer.read())
        return
    for line in answer:
        # Comments keep a stream open that says nothing.
        if time.monotonic() > end: raise TimeoutError("the answer takes too long")
        if line.startswith(b"data: [DONE]"): return
        if line.startswith(b"data: "):
            yield (piece := json.loads(line.removeprefix(b"data: ")))
            if "error" in piece: return
    raise http.client.HTTPException("the stream has no end")


def merge(into, new):
    """Adds a piece of a choice: texts and lists go on, the rest is told once."""
    for name, value in new.items():
        old, name = into.get(name), "message" if name == "delta" else name
        if isinstance(value, dict):
            merge(into.setdefault(name, {}), value)
        elif old is not None and isinstance(value, (str, list)) and name not in ("role", "finish_reason"):
            into[name] = old + value
        elif value is not None:
            into[name] = value


def send(server, request, patience):
    """Sends a request. Returns its answer as one object, and cached tokens; (None, 0) if its client left."""
    path, body, key, _, leaves = request
    # A client that leaves after a time does so wherever its answer is then.
    end = time.monotonic() + (leaves if isinstance(leaves, float) else patience)
    while True:
        if server.silent: return {"error": {"message": "not sent, as an earlier request has no answer"}}, 0
        connection = None
        try:
            connection = server.open("POST", path, body, key)
            connection.sock.settimeout(max(0.001, end - time.monotonic()))
            with connection.getresponse() as answer:
                if answer.status == 429:
                    time.sleep(random.uniform(0.1, float(answer.getheader("retry-after", 1))))
                    continue
                choices, rest = collections.defaultdict(dict), {}
                for count, piece in enumerate(pieces(answer, end), 1):
                    for choice in piece.get("choices", []): merge(choices[choice["index"]], choice)
                    rest |= {name: piece[name] for name in ("usage", "error") if piece.get(name)}
                    if isinstance(leaves, int) and count >= leaves and body.get("stream"): return None, 0
                cached = rest.get("usage", {}).pop("prompt_tokens_details", {}).get("cached_tokens", 0)
                whole = {"status": answer.status, "choices": [choices[at] for at in sorted(choices)]}
                return whole | rest, cached
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, TimeoutError) and isinstance(leaves, float): return None, 0
            server.silent = True
            return {"error": {"message": f"no answer: {error!r}"}}, 0
        finally:
            if connection: connection.close()


def difference(loaded, alone, where="answer"):
    """The first place where two answers differ, and both values; None if they are the same bits."""
    if type(loaded) is type(alone) is dict:
        # A first error tells more than the choices that lack.
        for name in sorted(loaded.keys() | alone.keys(), key=lambda name: (name != "error", name)):
            if found := difference(loaded.get(name), alone.get(name), f"{where}.{name}"): return found
    elif type(loaded) is type(alone) is list:
        for at, (one, other) in enumerate(zip(loaded, alone)):
            if found := difference(one, other, f"{where}[{at}]"): return found
        if len(loaded) != len(alone): return f"{where}: {len(loaded)} items under load, {len(alone)} alone"
    elif json.dumps(loaded) != json.dumps(alone):
        # As JSON, since -0.0 is no other number than 0.0 to Python.
        return f"{where}: {json.dumps(loaded)[:300]} under load, {json.dumps(alone)[:300]} alone"
    return None


def watch(server, over, seen):
    """Counts from the metrics how many answers run and wait, and those that wait though they have begun."""
    before = counted = 0
    while not over.wait(0.02):
        try:
            now = server.metrics()
            running, waiting = now["num_requests_running"], now["num_requests_waiting"]
            begun = int(max(0, now[BEGUN] - now[ENDED] - running))
        except (OSError, http.client.HTTPException, KeyError):
            continue
        seen["running"], seen["waiting"] = max(seen["running"], running), max(seen["waiting"], waiting)
        # The numbers are not of one moment, so only a number that two looks see counts.
        steady, before = min(begun, before), begun
        seen["begun again"] += max(0, steady - counted)
        counted = steady


def under_load(server, requests, options):
    """Sends the requests from several clients. Returns the answers, in the order of the requests."""
    answers, numbers, over = [None] * len(requests), queue.Queue(), threading.Event()
    seen = collections.Counter()
    for number in range(len(requests)): numbers.put(number)

    def client(at):
        draw = random.Random(at)
        while True:
            try: number = numbers.get_nowait()
            except queue.Empty: return
            time.sleep(draw.expovariate(1 / options.pause) if options.pause else 0)
            answers[number] = send(server, requests[number], options.patience)

    threads = [threading.Thread(target=client, args=(at,), daemon=True) for at in range(options.clients)]
    watcher = threading.Thread(target=watch, args=(server, over, seen), daemon=True)
    for thread in [*threads, watcher]: thread.start()
    for thread in threads: thread.join()
    over.set()
    watcher.join()
    return answers, seen


def refused(caches, options, arguments):
    """Why a server cannot have these caches, by their names. The name None is that it does not start."""
    with Server(options.binary, options.model, [*arguments, "--rows", "1"], caches) as server:
        if server.port is None: return {None: "".join(server.said).strip()}
        body, why = {"model": server.card()["id"], "prompt": "a", "max_tokens": 2}, {}
        for cache in caches:
            status, text = server.ask("POST", "/v1/completions", body | {"kiln": {"cache": cache}})
            if status != 200: why[cache] = json.loads(text)["error"]["message"]
        return why


def fail(why):
    print(f"exact_serve: error: {why}", file=sys.stderr)
    raise SystemExit(2)


def report(requests, answers, results, caches, seen):
    """Prints what differs, and the table. Returns how many were compared, were equal, and are errors."""
    rows, errors = collections.defaultdict(collections.Counter), collections.Counter()
    for number, ((_, body, _, kinds, _), (answer, cached)) in enumerate(zip(requests, answers)):
        marks = ["sent", "left" if answer is None else "compared"] + ["reused"] * (cached > 0)
        if answer is not None:
            what = difference(answer, results[number])
            if answer.get("error"): errors[re.sub(r"\d[\d.]*", "N", answer["error"]["message"])] += 1
            if what is None: marks.append("equal")
            else: print(f"DIFFERENT {number}: {what}\n    {json.dumps(body)[:700]}", flush=True)
        for kind in [*kinds, "all"]: rows[kind].update(marks)
    columns = ["sent", "left", "reused", "compared", "equal"]
    print(f"\n{'':44}" + "".join(f"{column:>10}" for column in columns))
    for kind in [DEFAULT, *caches, *sorted(rows.keys() - {DEFAULT, *caches, "all"}), "all"]:
        print(f"{kind:44}" + "".join(f"{rows[kind][column]:10}" for column in columns))
    for error, count in errors.items(): print(f"errors under load: {count}: {error}")
    waited = f"at least {seen['begun again']}" if seen["given up"] == 0 else "unknown, as some were given up"
    print(f"answers that had begun and waited again: {waited}")
    return rows["all"]["compared"], rows["all"]["equal"], errors.total()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("binary", metavar="KILN_BINARY")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--rows", default="16", help="rows of the loaded server")
    parser.add_argument("--queue", default="1000", help="answers that may wait in it")
    parser.add_argument("--prefix-memory", default="1GiB", help="of the loaded server")
    parser.add_argument("--prefill-chunk", default="32", help="tokens, for both servers")
    parser.add_argument("--longest", type=int, help="most tokens of a prompt, about (half of the context)")
    parser.add_argument("--cancelled", type=float, default=0.15, help="share of requests whose client leaves")
    parser.add_argument("--pause", type=float, default=0.1, help="mean seconds of a client between requests")
    parser.add_argument("--patience", type=float, default=600, help="seconds until an answer is given up")
    options, arguments = parser.parse_known_args()
    if not os.access(options.binary, os.X_OK): fail(f"{options.binary} is no program")
    if options.requests < 1 or options.clients < 1: fail("--requests and --clients must be at least 1")
    arguments += ["--prefill-chunk", options.prefill_chunk]
    why, faults = refused(CACHES, options, arguments), []
    if None in why:
        if none := refused([], options, arguments): fail(none[None])
        why = {cache: text for cache in CACHES for text in refused([cache], options, arguments).values()}
    for cache, text in why.items(): print(f"left out: {cache}: {' '.join(text.split())}", flush=True)
    caches = [cache for cache in CACHES if cache not in why]

    def run(own, work):
        with Server(options.binary, options.model, [*arguments, *own], caches) as server:
            if server.port is None: fail("".join(server.said))
            start, result = time.monotonic(), work(server)
            took = time.monotonic() - start
            if fault := server.fault(): faults.append(f"the server with {' '.join(own)}: {fault}")
            return result, took

    def loaded(server):
        drawer = Drawer(server, caches, options)
        requests = [drawer.draw(number) for number in range(options.requests)]
        answers, seen = under_load(server, requests, options)
        now = server.metrics() if server.fault() is None else {BEGUN: 1, ENDED: 0}
        seen["given up"] = int(now[BEGUN] - now[ENDED])
        return requests, answers, seen

    own = ["--rows", options.rows, "--queue", options.queue, "--prefix-memory", options.prefix_memory]
    (requests, answers, seen), took = run(own, loaded)
    print(f"{len(requests)} requests of {options.clients} clients took {took:.0f} s, up to"
          f" {seen['running']:.0f} answers at once, and {seen['waiting']:.0f} that waited", flush=True)
    stay = [number for number, (answer, _) in enumerate(answers) if answer is not None]
    random.Random(options.seed).shuffle(stay)

    def alone(server):
        return {at: send(server, (*requests[at][:4], None), options.patience)[0] for at in stay}

    results, took = run(["--rows", "1", "--prefix-memory", "none"], alone)
    print(f"{len(stay)} of them, one by one, took {took:.0f} s", flush=True)
    compared, equal, errors = report(requests, answers, results, caches, seen)
    for fault in faults: print(f"FAILED {fault}")
    print(f"{equal} of {compared} requests equal those alone")
    return int(equal < compared or errors > 0 or bool(faults))


if __name__ == "__main__":
    sys.exit(main())
