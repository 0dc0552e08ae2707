#!/usr/bin/env python3
"""Measure the numbers of a server: Kiln alone, beside llama-server, and beside continuous batching of Transformers.

    python tools/serve_numbers.py KILN_BINARY MODEL.gguf [--llama-server PATH] [--transformers FOLDER --python PYTHON]
        [--only N1,N4,..] [--rounds 3] [--cores apart|both] [--isa avx2] [--json FILE]
        [--long 2000] [--arrivals 100] [--crowd 2000]

Starts the servers on the CPU, and stops them in any case. Prints a Markdown table of medians over the rounds, in which
the servers take turns. One client of one thread asks all of them. `--cores apart` gives the servers core 0 and one
thread, and the client core 1; `both` gives all cores to all, and a thread for each. `--isa` limits Kiln and PyTorch
to these instructions; choose a llama-server with the same.

    N1   tokens/s with 16 clients / with 1              N7   largest gap between tokens while a long prompt comes in
    N2   tokens/s with 16 clients / llama-server's      N8   first token of a long prompt, 90 % shared / cold
    N3   tokens/s with 16 clients / Transformers'       N10  passes from a disconnect to a free place
    N4   tokens/s with 1 client / `kiln bench`          N12  bytes of caches / of the tokens that they hold
    N5   tokens/s sampled / greedy                      N13  tokens/s with half the memory for caches / with all
    N6   p99 of the first token / llama-server's        N15  2,000 requests at once: refusals, and those admitted

tools/exact_serve.py measures N9 (equal to alone), and tools/chaos_serve.py N14 (memory after many requests). The test
`rows_of_different_lengths_share_launches` counts N11 (launches on a GPU).

Prompts have 64 words of their own, and answers 64 tokens (`ignore_eos`), greedy. Each client sends two requests, one
after the other; a single client sends four. N3: Kiln has the folder, and Transformers no HTTP. N4: `kiln bench` is the
time of its prompt and its decode of the same lengths. N6: requests arrive at random, at 70 % of the rate that the
slower server reaches with 16 clients. N7: the time of a chunk is its mean share of a long prompt alone. N12: while 16
answers of 600 tokens come and go, at the times at which rows have 450 to 550 tokens on average. N15: answers have 16
tokens. Needs Python alone, and for N3 one that has Transformers. Exit status 2 for bad input, or a server
that fails.
"""
import argparse
import contextlib
import heapq
import json
import math
import os
import random
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

NUMBERS = "N1 N2 N3 N4 N5 N6 N7 N8 N10 N12 N13 N15".split()
WORDS = "the of and to in a is that for it was on are as with his they at be this from have or by one had not but what".split()
ROWS, QUEUE, TOKENS = 16, 256, 64
AVX2 = {"KILN_INSTRUCTIONS": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
# The lowest values of N1 and N2, by the format of the file.
LEAST = {"q4_k_m": (3, 1.3), "q8_0": (4, 1.5), "f16": (4, 1.15)}


class Failure(Exception):
    """An error for the user: one sentence."""


def prompt(words, *seed):
    draw = random.Random(str(seed))
    return " ".join(draw.choice(WORDS) for _ in range(words))


def p99(values):
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def pin(options):
    """Puts a child on the cores of the servers."""
    return lambda: os.sched_setaffinity(0, options.server_cores)


class Call:
    """A request, `after` seconds from now, and its answer. `then` gives requests to send at its end, `on_text` at a text."""

    def __init__(self, text=None, tokens=0, path="/v1/completions", after=0.0, then=None, refusable=False, **fields):
        self.path, self.tokens, self.after, self.then, self.refusable, self.on_text = path, tokens, after, then, refusable, None
        self.fields = {"prompt": text, "max_tokens": tokens, "temperature": 0, **fields} if text else None
        self.times, self.text, self.usage, self.status = [], "", {}, None
        self.raw, self.content = b"", b""

    def connect(self, server):
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        body = b""
        if self.fields:
            stream = {"model": server.model, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
            body = json.dumps(self.fields | stream).encode()
        head = f"{'POST' if body else 'GET'} {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        self.request = f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    def send(self):
        self.sent = time.perf_counter()
        self.socket.sendall(self.request)

    def read(self):
        """Reads the bytes that are there. Returns whether the answer has ended."""
        data = self.socket.recv(1 << 16)
        self.ended = time.perf_counter()
        self.raw += data
        if self.status is None:
            head, found, rest = self.raw.partition(b"\r\n\r\n")
            if not found: return not data
            self.status, self.raw, head = int(head.split()[1]), rest, head.lower()
            self.is_chunked, self.is_stream = b"transfer-encoding: chunked" in head, b"text/event-stream" in head
            self.length = int(head.partition(b"content-length:")[2].split()[0]) if b"content-length:" in head else None
        over = not data
        while self.is_chunked:
            size, found, rest = self.raw.partition(b"\r\n")
            if not found or len(rest) < int(size, 16) + 2: break
            size = int(size, 16)
            self.content, self.raw, over = self.content + rest[:size], rest[size + 2:], over or size == 0
        if not self.is_chunked: self.content, self.raw = self.content + self.raw, b""
        while self.is_stream and b"\n" in self.content:
            line, _, self.content = self.content.partition(b"\n")
            if line.startswith((b"data: {", b"error: {")): self.event(json.loads(line.partition(b": ")[2]))
        return over or self.length is not None and len(self.content) >= self.length

    def event(self, event):
        if "error" in event: raise Failure(f"{self.path}: {event['error']}")
        if new := "".join(choice["text"] for choice in event.get("choices", [])):
            self.times.append(self.ended)
            self.text += new
        self.usage = event.get("usage") or self.usage

    def check(self):
        if self.status == 429 and self.refusable: return
        if self.status != 200: raise Failure(f"{self.path}: status {self.status}: {self.content.decode(errors='replace')[:300]}")
        if self.fields and self.usage.get("completion_tokens") != self.tokens or self.tokens and not self.times:
            raise Failure(f"{self.path}: an answer has {self.usage.get('completion_tokens')} tokens instead of {self.tokens}")

    def first(self): return self.times[0] - self.sent
    def whole(self): return self.ended - self.sent


class Client:
    """Sends requests to a server, and reads the answers, in one thread."""

    def __init__(self, server):
        self.server, self.poller, self.due, self.number = server, selectors.DefaultSelector(), [], 0

    def add(self, calls):
        for call in calls or []:
            self.number += 1
            heapq.heappush(self.due, (time.perf_counter() + call.after, self.number, call))

    def drop(self, call):
        with contextlib.suppress(KeyError, ValueError): self.poller.unregister(call.socket)
        call.socket.close()

    def run(self, calls, patience=900):
        """Runs until all requests have ended. Returns the first ones."""
        self.add(calls)
        end = time.perf_counter() + patience
        while self.due or self.poller.get_map():
            now, ready = time.perf_counter(), []
            if now > end: raise Failure(f"{self.server.name}: no end of the answers after {patience} seconds")
            while self.due and self.due[0][0] <= now: ready.append(heapq.heappop(self.due)[2])
            # All connect before the first is sent, so that a crowd comes at once.
            for call in ready: call.connect(self.server)
            for call in ready:
                call.send()
                self.poller.register(call.socket, selectors.EVENT_READ, call)
            for key, _ in self.poller.select(max(0, self.due[0][0] - time.perf_counter()) if self.due else 1):
                call = key.data
                if call.socket.fileno() < 0: continue
                before = len(call.times)
                if call.read():
                    self.drop(call)
                    call.check()
                    if call.then: self.add(call.then(call))
                elif call.on_text and len(call.times) > before:
                    self.add(call.on_text(call))
        return calls


class Server:
    """A process that answers at a port, once `/health` says so."""

    def __init__(self, name, command, options, stack, environment):
        self.name, self.model = name, "default"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = stack.enter_context(tempfile.TemporaryFile("w+"))
        out = {"stdout": self.log, "stderr": subprocess.STDOUT, "env": os.environ | environment}
        self.child = subprocess.Popen([*map(str, command), "--port", str(self.port)], preexec_fn=pin(options), **out)
        stack.callback(lambda: (self.child.kill(), self.child.wait()))
        end, started = time.perf_counter() + 120, False
        while not started:
            time.sleep(0.1)
            with contextlib.suppress(OSError, Failure): started = self.get("/health")
            if self.child.poll() is not None or time.perf_counter() > end:
                self.log.seek(0)
                raise Failure(f"{name} does not start ({self.child.returncode}): {' '.join(self.log.read().split())[-300:]}")
        self.model = self.get("/v1/models")["data"][0]["id"]
        self.ask([Call(prompt(64, "warm up", turn), 8) for turn in range(2)])

    def ask(self, calls): return Client(self).run(calls)
    def get(self, path): return json.loads(self.ask([Call(path=path)])[0].content)


def as_transformers(folder, threads):
    """Continuous batching of Transformers, in a process of its own: reads the prompts of clients, and prints tokens a second."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(int(threads))
    texts, tokens = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Without these, the caches take 60 % of the memory of the machine.
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=16 * ROWS, max_batch_tokens=512)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=batching, warmup=False) as manager:
        for texts in ([[prompt(64, "warm up")]], texts):
            left = {str(client): [tokenizer(text)["input_ids"] for text in own] for client, own in enumerate(texts)}
            start, made, running, begins = time.perf_counter(), 0, list(left), list(left)
            while running:
                for client in begins: manager.add_request(left[client].pop(), client, max_new_tokens=tokens, eos_token_id=-1)
                result, begins = manager.get_result(timeout=1), []
                if not manager.is_running() or result and result.error: raise SystemExit(f"Transformers fails: {result}")
                if result and result.is_finished():
                    made, client = made + len(result.generated_tokens), result.request_id
                    if left[client]: begins = [client]
                    else: running.remove(client)
            speed = made / (time.perf_counter() - start)
    print(json.dumps(speed))


class Measurement:
    """The measured values of each round, by name: `METHOD [SERVER ..]`. A value is measured when a round first needs it."""

    def __init__(self, options, stack):
        self.options, self.stack, self.servers, self.values, self.texts, self.round = options, stack, {}, {}, {}, 0
        self.environment = AVX2 if options.isa else {}

    def server(self, name):
        if name not in self.servers: self.servers[name] = self.start(name)
        return self.servers[name]

    def start(self, name):
        options, threads = self.options, self.options.threads
        if name == "llama":
            place = {"LD_LIBRARY_PATH": os.path.dirname(os.path.abspath(options.llama_server))}
            context = ROWS * (options.long + 8 * TOKENS)
            command = [options.llama_server, "-m", options.model, "-np", ROWS, "-c", context, "-t", threads, "-tb", threads]
            return Server("llama-server", command, options, self.stack, place)
        more = ["--dtype", "f32"] if name == "kiln-f32" else []
        if name == "kiln-small": more = ["--memory", self.half()]
        model = options.transformers if name == "kiln-f32" else options.model
        command = [options.kiln, "serve", "-m", model, "-d", "cpu", "--threads", threads, "--rows", ROWS, "--queue", QUEUE, *more]
        return Server(name, command, options, self.stack, self.environment)

    def run(self, *command, **options):
        """The output of another program on the cores of the servers, as JSON."""
        options |= {"env": os.environ | self.environment, "preexec_fn": pin(self.options)}
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
        if done.returncode: raise Failure(f"{' '.join(map(str, command[:3]))} fails: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(done.stdout)

    def take(self, name):
        """The value of this round."""
        values, (method, *arguments) = self.values.setdefault(name, []), name.split()
        if len(values) <= self.round:
            values.append(getattr(self, method)(*arguments))
            print(f"round {self.round + 1}: {name}: {values[-1]}", file=sys.stderr, flush=True)
        return values[self.round]

    def median(self, name):
        name, _, part = name.partition(": ")
        middle = min if name == "equal" else statistics.median
        return middle(value[part] if part else value for value in self.values[name])

    def clients(self, server, clients, turns, kind, more=(), **fields):
        """Each client sends its next request at the end of the one before. Returns all requests, and tokens a second."""
        calls = []

        def send(client, turn):
            seed = {"seed": 1000 * client + turn} if fields else {}
            then = (lambda _: [send(client, turn + 1)]) if turn + 1 < turns else None
            calls.append(Call(prompt(64, kind, self.round, client, turn), TOKENS, then=then, **seed, **fields))
            return calls[-1]

        first = [send(client, 0) for client in range(clients)]
        server.ask([*first, *more])
        seconds = max(call.ended for call in calls) - min(call.sent for call in calls)
        return calls, len(calls) * TOKENS / seconds

    def rate(self, server, clients, kind="greedy"):
        clients, turns = int(clients), 4 if clients == "1" else 2
        if server == "transformers":
            texts = [[prompt(64, "greedy", self.round, client, turn) for turn in range(turns)] for client in range(clients)]
            command = [self.options.python, __file__, "--as-transformers", self.options.transformers, self.options.threads]
            return self.run(*command, input=json.dumps([texts, TOKENS]))
        fields = {"temperature": 0.7, "top_p": 0.9} if kind == "sampled" else {}
        return self.clients(self.server(server), clients, turns, kind if clients > 1 else "one", **fields)[1]

    def single(self):
        """Tokens a second of one client: with the time of the prompts, and between tokens."""
        calls, rate = self.clients(self.server("kiln"), 1, 4, "single")
        between = sum(call.times[-1] - call.times[0] for call in calls) / len(calls) / (TOKENS - 1)
        return {"whole": rate, "decode": 1 / between, "prompt": statistics.median(call.usage["prompt_tokens"] for call in calls)}

    def bench(self):
        """The same of `kiln bench`."""
        tokens, length = TOKENS, int(self.take("single")["prompt"])
        report = self.run(self.options.kiln, "bench", "-m", self.options.model, "-d", "cpu", "--threads", self.options.threads,
                          "-p", length, "-n", tokens, "--depth", length, "-r", 3, "-o", "json")
        before, decode = (result["tokens_per_second"] for result in report["results"])
        return {"whole": tokens / (length / before + (tokens - 1) / decode), "decode": decode}

    def arrivals(self, server):
        """p99 of the seconds to the first token, of requests that arrive at random."""
        saturation = min(self.take(f"rate {name} 16") for name in ("kiln", "llama")) / TOKENS
        draw, at, calls = random.Random(f"arrivals {self.round}"), 0.0, []
        for number in range(self.options.arrivals):
            at += draw.expovariate(0.7 * saturation)
            calls.append(Call(prompt(64, "arrivals", self.round, number), TOKENS, after=at))
        return p99([call.first() for call in self.server(server).ask(calls)])

    def meeting(self, server):
        """Seconds: the largest gap of a stream that a long prompt meets, and a chunk and a step alone."""
        server, length = self.server(server), self.options.long
        alone = server.ask([Call(prompt(length, "alone", self.round), 1)])[0]
        long, waiting = Call(prompt(length, "meets", self.round), 1), [1]
        stream = Call(prompt(64, "stream", self.round), 4 * TOKENS)
        stream.on_text = lambda call: [long] if len(call.times) >= 16 and waiting and waiting.pop() else []
        server.ask([stream])
        if waiting or stream.ended < long.ended: raise Failure("N7: the stream ends before the long prompt")
        chunks = math.ceil(alone.usage["prompt_tokens"] / self.server("kiln").get("/props")["prefill_chunk"])
        gaps = [(after - before, after > long.sent) for before, after in zip(stream.times, stream.times[1:])]
        step = statistics.median(gap for gap, is_met in gaps if not is_met)
        return {"gap": max(gap for gap, is_met in gaps if is_met), "unit": alone.first() / chunks + step, "alone": alone.first()}

    def shared(self):
        """Seconds to the first token of a long prompt, cold and with 90 % of an earlier one."""
        length = self.options.long
        start = prompt(length * 9 // 10, "shared", self.round)
        tails = [prompt(length - length * 9 // 10, tail, self.round) for tail in "ab"]
        cold, hot = [self.server("kiln").ask([Call(f"{start} {tail}", 8)])[0] for tail in tails]
        reused = hot.usage["prompt_tokens_details"]["cached_tokens"]
        return {"cold": cold.first(), "hot": hot.first(), "tokens": hot.usage["prompt_tokens"], "reused": reused}

    def leaving(self):
        """Passes, by the tokens of another answer, from a disconnect until one answer less runs: the most of eight."""
        draw, found, left, client = random.Random(self.round), [], [], Client(self.server("kiln"))

        def early(_): raise Failure("N10: the answers end too early")

        streams = [Call(prompt(64, "leaving", self.round, number), 4 * TOKENS, then=early) for number in range(ROWS)]

        def polled(poll):
            times = streams[0].times
            if left and json.loads(poll.content)["running"] < ROWS - len(found):
                at = left.pop()
                found.append((sum(each > at for each in times), poll.ended - at))
            elif not left and all(len(stream.times) > 3 for stream in streams):
                client.drop(streams[1 + len(found)])
                left.append(time.perf_counter())
            if len(found) < 8: return [Call(path="/health", after=0.001 if left else draw.uniform(0.02, 0.1), then=polled)]
            for stream in streams: client.drop(stream)

        client.run([*streams, Call(path="/health", then=polled)])
        times = streams[0].times
        step = statistics.median(after - before for before, after in zip(times[4:], times[5:]))
        return {"passes": max(found)[0], "seconds": max(seconds for _, seconds in found), "step": step}

    def memory(self, name):
        """Tokens a second, the most bytes of caches, and the mean length of a prompt."""
        server, held = self.server(name), []

        def polled(poll):
            props = json.loads(poll.content)
            held.append(props["memory"]["caches"])
            return [Call(path="/props", after=0.02, then=polled)] if props["running"] or len(held) < 25 else []

        calls, rate = self.clients(server, ROWS, 2, "memory", [Call(path="/props", then=polled)])
        self.texts[name] = {call.fields["prompt"]: call.text for call in calls}
        length = statistics.mean(call.usage["prompt_tokens"] for call in calls)
        return {"rate": rate, "caches": max(held), "prompt": length}

    def held(self):
        """MB of caches, and of the tokens that they hold, while rows have 450 to 550 tokens on average."""
        server, polls, calls = self.server("kiln"), [], []
        of = self.run(self.options.kiln, "inspect", self.options.model, "--json")
        token = 4 * 2 * of["layers"] * of["kv_heads"] * of["head_dim"]

        def polled(poll):
            props = json.loads(poll.content)
            polls.append((poll.ended, props["memory"]["caches"]))
            return [Call(path="/props", after=0.1, then=polled)] if props["running"] or len(polls) < 25 else []

        def send(client, turn):
            then = (lambda _: [send(client, turn + 1)]) if turn < 1 else None
            calls.append(Call(prompt(64, "held", self.round, client, turn), 600, then=then))
            return calls[-1]

        server.ask([*[send(client, 0) for client in range(ROWS)], Call(path="/props", then=polled)])
        found = []
        for at, held in polls:
            rows = [call.usage["prompt_tokens"] + sum(time < at for time in call.times) for call in calls
                    if call.sent < at < call.ended and call.times[0] < at]
            if len(rows) == ROWS and 450 <= statistics.mean(rows) <= 550: found.append((held / 1e6, token * sum(rows) / 1e6))
        if not found: raise Failure("N12: the rows never have 450 to 550 tokens on average")
        return {"held": statistics.median(held for held, _ in found), "live": statistics.median(live for _, live in found)}

    def half(self):
        """A limit of memory: weights, activations as docs/memory.md counts them, and half of the caches of 16 whole answers."""
        props, length = self.server("kiln").get("/props"), TOKENS + self.take("memory kiln")["prompt"]
        of = self.run(self.options.kiln, "inspect", self.options.model, "--json")
        hidden, keys = of["hidden"], of["kv_heads"] * of["head_dim"]
        token = 4 * max(2 * hidden + 3 * of["heads"] * of["head_dim"] + 6 * keys, 3 * (hidden + of["intermediate"]))
        activations = token * (props["prefill_chunk"] + ROWS) + 8 * of["vocab"] * (ROWS + 1)
        caches = 4 * 2 * of["layers"] * keys * length * ROWS
        return int(props["memory"]["weights"] + activations + caches / 2)

    def equal(self):
        """The share of texts that are the same with half the memory."""
        full, small = self.texts["kiln"], self.texts["kiln-small"]
        return sum(full[text] == small[text] for text in full) / len(full)

    def crowd(self):
        """Many requests at once: milliseconds of the slowest refusal, p99 of the admitted, and of as many alone."""
        server, number = self.server("kiln"), self.options.crowd
        calls = server.ask([Call(prompt(64, "crowd", self.round, each), 16, refusable=True) for each in range(number)])
        admitted = [call.whole() for call in calls if call.status == 200]
        refused = [call.whole() for call in calls if call.status == 429]
        if not refused: raise Failure(f"N15: none of {number} requests is refused; choose a larger --crowd")
        few = server.ask([Call(prompt(64, "few", self.round, each), 16) for each in range(len(admitted))])
        few = p99([call.whole() for call in few])
        middle = statistics.median(refused)
        return {"refusal": 1e3 * max(refused), "admitted": len(admitted), "p99": p99(admitted), "few": few}


def rows(options):
    """The rows of the table: number, what, target, Kiln's value and the one that divides it (`NAME: PART`), and unit."""
    name, words = os.path.basename(options.model).lower(), f"{options.long:,} words"
    alone, beside = next((least for kind, least in LEAST.items() if kind in name), LEAST["f16"])
    return [
        ("N1", "16 clients / 1", ">=", alone, "rate kiln 16", "rate kiln 1", "t/s"),
        ("N2", "16 clients / llama-server", ">=", beside, "rate kiln 16", "rate llama 16", "t/s"),
        ("N3", "16 clients / Transformers, float32", ">=", 3, "rate kiln-f32 16", "rate transformers 16", "t/s"),
        ("N4", "1 client / `kiln bench`, with prompts", ">=", 0.93, "single: whole", "bench: whole", "t/s"),
        ("N4", "1 client / `kiln bench`, between tokens", ">=", 0.93, "single: decode", "bench: decode", "t/s"),
        ("N5", "sampled / greedy", ">=", 0.85, "rate kiln 16 sampled", "rate kiln 16", "t/s"),
        ("N6", "p99 of the first token / llama-server", "<=", 0.7, "arrivals kiln", "arrivals llama", "s"),
        ("N7", f"largest gap, {words} come in / (chunk + step)", "<=", 1.5, "meeting kiln: gap", "meeting kiln: unit", "s"),
        ("N7", "largest gap / llama-server", "<=", 0.25, "meeting kiln: gap", "meeting llama: gap", "s"),
        ("N8", f"first token of {words}, 90 % shared / cold", "<=", 0.2, "shared: hot", "shared: cold", "s"),
        ("N10", "passes from a disconnect to a free place", "<=", 1, "leaving: passes", "", ""),
        ("N12", "bytes of caches / of their tokens", "<=", 1.1, "held: held", "held: live", "MB"),
        ("N13", "half the memory for caches / all", ">=", 0.6, "memory kiln-small: rate", "memory kiln: rate", "t/s"),
        ("N13", "share of equal texts", ">=", 1, "equal", "", ""),
        ("N15", f"slowest refusal of {options.crowd:,} at once", "<=", 100, "crowd: refusal", "", "ms"),
        ("N15", "p99 of the admitted / as many alone", "<=", 1.1, "crowd: p99", "crowd: few", "s"),
    ]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name in ("kiln", "model"): parser.add_argument(name)
    parser.add_argument("--llama-server", metavar="PATH")
    parser.add_argument("--transformers", metavar="FOLDER", help="the model as a folder, for N3")
    parser.add_argument("--python", help="a Python that has Transformers")
    parser.add_argument("--only", metavar="N1,N4,..", type=lambda text: text.split(","), default=NUMBERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", choices=["apart", "both"], default="apart")
    parser.add_argument("--isa", choices=["avx2"])
    parser.add_argument("--json", metavar="FILE", help="write the values of all rounds here")
    parser.add_argument("--long", type=int, default=2000, help="words of a long prompt")
    parser.add_argument("--arrivals", type=int, default=100, help="requests of N6")
    parser.add_argument("--crowd", type=int, default=2000, help="requests of N15")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    for program in filter(None, [options.kiln, options.llama_server, options.python]):
        if not os.access(program, os.X_OK): raise Failure(f"{program} is not a program")
    for path in filter(None, [options.model, options.transformers]):
        if not os.path.exists(path): raise Failure(f"{path} is not there")
    if wrong := set(options.only) - set(NUMBERS): raise Failure(f"--only knows {', '.join(NUMBERS)}, and not {', '.join(wrong)}")
    if bool(options.transformers) != bool(options.python): raise Failure("--transformers and --python go together")
    if min(options.rounds, options.arrivals, options.crowd, options.long // 10) < 1: raise Failure("a number is too small")
    if options.cores == "apart" and len(cores) < 2: raise Failure("`--cores apart` needs two cores")
    options.server_cores = cores[:1] if options.cores == "apart" else cores
    options.threads = len(options.server_cores)
    os.sched_setaffinity(0, cores[1:2] if options.cores == "apart" else cores)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    return options


def main():
    options = arguments()
    needed = {"llama": (options.llama_server, "no --llama-server"), "transformers": (options.transformers, "no --transformers")}
    lacking = {name: why for name, (there, why) in needed.items() if not there}
    # Each row with the reason for which it cannot be measured.
    chosen = [(row, "".join(why for name, why in lacking.items() if f" {name}" in f"{row[4]} {row[5]}"))
              for row in rows(options) if row[0] in options.only]
    with contextlib.ExitStack() as stack:
        measure = Measurement(options, stack)
        for measure.round in range(options.rounds):
            for name in [name for row, why in chosen if not why for name in (row[5], row[4]) if name]:
                measure.take(name.partition(":")[0])
    print("| number | what | target | Kiln | other | value | met |\n|---|---|---|---|---|---|---|")
    table = []
    for (number, what, sign, bound, mine, other, unit), why in chosen:
        cells = ["", "", why, ""]
        if not why:
            top, under = measure.median(mine), measure.median(other) if other else 1
            shown = [f"{each:.{3 if unit == 's' else 1}f} {unit}".strip() for each in (top, under)]
            is_met = top / under >= bound if sign == ">=" else top / under <= bound
            cells = [shown[0], shown[1] if other else "", f"{top / under:.2f}", "yes" if is_met else "no"]
        table.append([number, what, f"{sign} {bound}", *cells])
        print(f"| {' | '.join(table[-1])} |")
    if options.json:
        report = {"options": vars(options), "table": table, "rounds": measure.values}
        with open(options.json, "w") as file: json.dump(report, file, indent=1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-transformers"]: sys.exit(as_transformers(*sys.argv[2:]))
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        main()
    except (Failure, OSError) as error:
        print(f"serve_numbers: error: {error}", file=sys.stderr)
        sys.exit(2)
