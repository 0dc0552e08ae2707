#!/usr/bin/env python3
"""Treat `kiln serve` badly, and check that it stays well.

    python tools/chaos_serve.py KILN_BINARY MODEL [--soak SECONDS] [ARGUMENT OF kiln serve..]

Clients leave, read slowly or not at all, send garbage, floods and lies, and come by the thousand. After each
check the server is as before: healthy, idle, with as many handles and threads, and a greedy and a sampled
answer have the same tokens and log-probabilities. Checks of signals have servers of their own.

--soak then keeps 24 clients busy for that time. A fifth of their requests is cancelled. The memory of the last
tenth of the time must be that of the fifth tenth. Before, it still grows.

MODEL is a small one with a short context, such as the demo model: some answers go on to its end. Needs Python
alone, Linux, and 4,000 file handles. Prints a line per check. Exit status 1 if one fails, 2 for bad input.
"""
import argparse, asyncio, atexit, collections, contextlib, functools, http.client, json, os, random, re, resource
import signal, socket, statistics, struct, subprocess, sys, tempfile, threading, time

# A key, and a word of all prompts, that no log may have.
KEY, MARK = "key-of-chaos", "Quodlibetarian"
# Seconds in which the headers and the body of a request must have come, and what a busy machine may add.
HEADER_TIME, BODY_TIME, SLACK = 10, 60, 10
# Seconds for which nobody may stop others; seconds in which 99 of 100 refusals come.
STOPPED, REFUSED = 4, 4
CHAT, TEXT, EMBED, TOKENS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize"
FIELDS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../crates/kiln-serve/src/fields.rs")
VALUES = ["null", "true", "0", "-1", "1e99", '""', '"x"', "[]", "{}", "[[]]", "[null]", '{"x":0}']
# Fields within others, with `@` for a value.
WITHIN = ['"stream":true,"stream_options":{"include_usage":@}', '"kiln":{"cache":@}', '"logit_bias":{"5":@}', '"stop":[@]']
MESSAGES = ['@', '{"role":@,"content":"x"}', '{"role":"user","content":@}', '{"role":"user","content":[@]}']
MESSAGES += ['{"role":"user","content":[{"type":"text","text":@}]}', '{"role":"assistant","content":"","tool_calls":@}']
MESSAGES += ['{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":@}}]}', '{"role":"assistant","tool_calls":[@]}']
FUNCTIONS = ["@", '{"name":@}', '{"name":"f","parameters":{"type":@}}', '{"name":"f","parameters":{"properties":{"x":@}}}']
FORMATS = ['{"type":@}', *(f'{{"type":"json_schema","json_schema":{schema}}}' for schema in
    ("@", '{"schema":@}', '{"schema":{"type":"string","pattern":@}}', '{"schema":{"$ref":@}}'))]
WITHIN_CHAT = ['"tools":[@]', '"documents":[@]', '"chat_template_kwargs":{"messages":@}', *(f'"messages":[{m}]' for m in MESSAGES),
    *(f'"tool_choice":"required","tools":[{{"type":"function","function":{f}}}]' for f in FUNCTIONS),
    *(f'"response_format":{f}' for f in FORMATS)]
CACHES = ["dynamic", "static", "sliding", "sink:window=128,sinks=4", "quantized:nbits=4,residual=64", "none"]
CACHES += [f"quantized:format={name}" for name in ("quanto", "hqq", "fp8")]
# A template that reads tools, and has marks that are known.
TEMPLATE = """{% if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools> Write <tool_call>..</tool_call>.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
CHUNKED, CLOSE = "transfer-encoding: chunked", "connection: close"
LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
passed = failed = 0


def check(name, server=None):
    """Calls the decorated function, then looks whether the server is well. Prints whether both hold."""

    def run(function):
        global passed
        try:
            said = function()
            if server: server.check_well()
        except Exception as error:
            fail(name, error)
            with contextlib.suppress(Exception):
                if server: server.settle(120)
        else:
            passed += 1
            print(f"ok {name}" + (f": {said}" if said else ""), flush=True)
        if server and server.child.poll() is not None:
            fail("the server runs", "".join(server.log)[-500:])
            finish()

    return run


def fail(name, error):
    global failed
    failed += 1
    print(f"FAILED {name}: " + " ".join(f"{type(error).__name__}: {error}".split())[:600], flush=True)


def finish():
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


def equal(found, expected, what):
    assert found == expected, f"{what}: {str(found)[:250]}, expected {str(expected)[:250]}"


def until(what, holds, seconds=30):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what}: did not happen within {seconds} s"
        time.sleep(0.05)


def at_once(*functions):
    """Calls each function in a thread. Raises the first error, after all have ended."""
    errors = []

    def run(function):
        try: function()
        except Exception as error: errors.append(error)

    threads = [threading.Thread(target=run, args=[function], daemon=True) for function in functions]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    if errors: raise errors[0]


def spread(times):
    return f"median {statistics.median(times):.3f} s, p99 {sorted(times)[len(times) * 99 // 100]:.3f} s"


def judge(answer, what, *statuses):
    """Returns the body of an answer that is whole, of status 200 or 4xx, with an error in OpenAI's form."""
    assert answer, f"{what}: the connection is cut"
    status, headers, body = answer
    told = f"{what}: {status} {body[-300:]}"
    assert (status == 200 or 400 <= status < 500) and (not statuses or status in statuses), told
    kind = headers.get("content-type")
    if status != 200:
        assert kind == "application/json", f"{told}, without an error"
        error = json.loads(body)["error"]
        assert error["message"] and error["type"] and {"param", "code"} <= set(error), told
    elif kind == "text/event-stream": assert body.endswith(b"data: [DONE]\n\n"), told
    elif kind == "application/json": json.loads(body)
    return body


class Wire:
    """A connection, on which any bytes are sent."""

    def __init__(self, port, data=b"", buffer=None):
        self.socket = socket.socket()
        if buffer: self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(150)
        self.socket.connect(("127.0.0.1", port))
        self.file = self.socket.makefile("rb")
        self.send(data)

    def send(self, data):
        # An answer may come, and the connection be closed, before all is sent.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError): self.socket.sendall(data)
        return self

    def answer(self):
        """The status, headers and body of the next answer; None if the connection is closed instead."""
        try: line = self.file.readline()
        except ConnectionResetError: return None
        if not line: return None
        status, headers, body = int(line.split()[1]), http.client.parse_headers(self.file), b""
        if headers.get("transfer-encoding") != "chunked":
            return status, headers, self.file.read(int(headers.get("content-length", -1)))
        while size := int(self.file.readline() or b"-1", 16):
            assert size > 0, f"the answer is cut after {body[-200:]}"
            body += self.file.read(size)
            self.file.readline()
        self.file.readline()
        return status, headers, body

    def end(self):
        """The last event of a stream: its regular end, or an error."""
        answer = self.answer()
        assert answer and answer[0] == 200, f"no stream, but {answer}"
        last = answer[2].rstrip().rsplit(b"data: ", 1)[-1]
        assert last == b"[DONE]" or b'"error"' in last, f"the stream ends with {last[-200:]}"
        return last

    def is_closed(self):
        """Whether nothing more can come. Drops what has come."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 16): pass
        except BlockingIOError: return False
        except OSError: pass
        return True

    def close(self, reset=False):
        if reset: self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.file.close()
        self.socket.close()


class Server:
    """A server of one model, which needs a key."""

    def __init__(self, binary, model, arguments, environment={}):
        self.log = []
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("keys", KEY), ("template", TEMPLATE)):
                with open(f"{folder}/{name}", "w") as file: file.write(text)
            command = [binary, "serve", "--model", model, "--pooling", "mean", "--api-keys", f"{folder}/keys"]
            for option, value in (("--template", f"{folder}/template"), ("--port", "0")):
                if option not in arguments: command += [option, value]
            output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
            environment = os.environ | {"KILN_API_KEYS": ""} | environment
            self.child = subprocess.Popen(command + arguments, env=environment, **output)
            atexit.register(self.child.kill)
            resource.prlimit(self.child.pid, resource.RLIMIT_NOFILE, LIMITS)
            for line in self.child.stdout:
                self.log.append(line)
                if found := re.search(r"http://127\.0\.0\.1:(\d+)", line): break
            else: raise SystemExit(f"chaos_serve: the server ended: {''.join(self.log)}")
        # Without a reader, a full pipe would keep the server.
        self.reader = threading.Thread(target=lambda: self.log.extend(self.child.stdout), daemon=True)
        self.reader.start()
        self.port = int(found[1])
        self.lines = [f"host: 127.0.0.1:{self.port}", f"authorization: Bearer {KEY}", "content-type: application/json"]
        card = self.get("/v1/models")["data"][0]
        self.model, self.context = card["id"], card["max_model_len"]
        self.long = {"max_tokens": self.context - 60, "ignore_eos": True, "stream": True}
        # The second ones are of prompts whose beginnings are known.
        self.answers = [self.reference() for _ in range(2)][1]
        time.sleep(1)
        self.idle, self.all_idle = self.handles_and_threads(), self.handles_and_threads(all=True)

    def end(self, status=0, seconds=20, number=signal.SIGTERM):
        """Sends a signal, and checks how the server ends."""
        self.child.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired): self.child.wait(seconds)
        ended = self.child.poll()
        self.child.kill()
        self.reader.join(10)
        equal(ended, status, f"exit status within {seconds} s")

    def text(self, prompt="Once", **more):
        return {"model": self.model, "prompt": f"{MARK} {prompt}", "max_tokens": 2} | more

    def chat(self, content="What news?", **more):
        messages = [{"role": "user", "content": f"{MARK} {content}"}]
        return {"model": self.model, "messages": messages, "max_tokens": 2} | more

    def embed(self, text="x", **more):
        return {"model": self.model, "input": f"{MARK} {text}"} | more

    def request(self, path, body=None, *more, first=None, lines=None):
        """The bytes of a request. `first`, `lines`: its first line, and its headers but for `more`."""
        lines = [first or f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", *(lines or self.lines), *more]
        if body is not None and not isinstance(body, bytes): body = json.dumps(body).encode()
        if body is not None and not any("length" in line or "transfer" in line for line in lines):
            lines.append(f"content-length: {len(body)}")
        return "".join(line + "\r\n" for line in [*lines, ""]).encode("latin-1") + (body or b"")

    def begin(self, path, body, buffer=None):
        return Wire(self.port, self.request(path, body), buffer)

    def ask(self, path, body=None, *more, **settings):
        with contextlib.closing(Wire(self.port, self.request(path, body, CLOSE, *more, **settings))) as wire:
            return wire.answer()

    def get(self, path):
        return json.loads(judge(self.ask(path), path, 200))

    def runs(self, name="running"):
        return self.get("/props")[name]

    def metric(self, name):
        return float(re.search(rf"^kiln_{name}\S* (\S+)", judge(self.ask("/metrics"), name).decode(), re.M)[1])

    def reference(self):
        """A sampled and a greedy answer, with log-probabilities."""
        settings = {"max_tokens": 24, "temperature": 1, "seed": 7, "logprobs": 3}
        bodies = (TEXT, self.text(**settings)), (CHAT, self.chat(temperature=0, max_tokens=24, logprobs=True))
        return [json.loads(judge(self.ask(*each), "a reference answer", 200))["choices"] for each in bodies]

    def handles_and_threads(self, all=False):
        """Numbers of open handles and of threads. Those of HTTP, which come and go, count with `all`."""
        names = []
        for task in os.listdir(f"/proc/{self.child.pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                with open(f"/proc/{self.child.pid}/task/{task}/comm") as file: names.append(file.read().strip())
        return len(os.listdir(f"/proc/{self.child.pid}/fd")), len(names) - (0 if all else names.count("http"))

    def settle(self, seconds=30):
        until("no answer runs or waits", lambda: self.runs() == self.runs("waiting") == 0, seconds)
        # The last connections are closed soon.
        with contextlib.suppress(AssertionError): until("", lambda: self.handles_and_threads() == self.idle, seconds)
        equal(self.handles_and_threads(), self.idle, "handles and threads")

    def check_well(self):
        equal(self.get("/health")["status"], "ok", "health")
        self.settle()
        equal(self.reference(), self.answers, "the reference answers")

    def beside(self, *functions):
        """Calls functions at once, while a client asks again and again, which they must not stop."""
        over, times = threading.Event(), []

        def client():
            while not over.is_set():
                begun = time.monotonic()
                judge(self.ask(TEXT, self.text(max_tokens=6)), "another request", 200)
                times.append(time.monotonic() - begun)

        def work():
            try: at_once(*functions)
            finally: over.set()

        at_once(work, client)
        assert times and max(times) < STOPPED, f"others were stopped for {max(times):.1f} s"
        return f"others' answers took {spread(times)}, at most {max(times):.2f} s"

    def judge_all(self, path, bodies):
        """Sends bodies on one connection. Each has an answer, and none cuts the connection."""
        wire, counts = Wire(self.port), collections.Counter()
        for body in bodies:
            answer = wire.send(self.request(path, body)).answer()
            judge(answer, f"{path} {body[:100]} .. {body[-100:]}")
            counts[answer[0]] += 1
            if answer[1].get("connection") == "close": wire = wire.close() or Wire(self.port)
        wire.close()
        return counts


async def crowd(server, count, request, pause=0):
    """Sends a request on each of many connections at once. Returns statuses, answers and times."""
    begun = time.monotonic()

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        connected = time.monotonic() - begun
        await asyncio.sleep(begun + pause - time.monotonic())
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return int(answer[9:12] or 0), answer, connected, time.monotonic() - begun

    return list(zip(*await asyncio.wait_for(asyncio.gather(*(one() for _ in range(count))), 120)))


def clients(server):
    @check("clients that leave in mid-stream: their answers end", server)
    def _():
        ended = server.metric("request_success_total")
        wires = [server.begin(TEXT, server.text(**server.long, n=2)) for _ in range(8)]
        for number, wire in enumerate(wires):
            while b"data: " not in wire.file.readline(): pass
            wire.close(reset=number % 2)
        until("the answers end", lambda: server.runs() == server.runs("waiting") == 0)
        equal(server.metric("request_success_total"), ended, "answers that went on to their end")

    @check("clients that leave while they wait", server)
    def _():
        first = server.begin(TEXT, server.text(**server.long, n=16))
        until("all rows are full", lambda: server.runs() == 16)
        wires = [server.begin(TEXT, server.text(**server.long | {"stream": number % 2 > 0})) for number in range(12)]
        until("12 wait", lambda: server.runs("waiting") == 12)
        for number, wire in enumerate(wires): wire.close(reset=number % 3)
        until("none waits", lambda: server.runs("waiting") == 0)
        equal((server.runs(), first.end()), (16, b"[DONE]"), "the answers that run, and their end")
        first.close()

    @check("clients that leave while their prompts are computed", server)
    def _():
        draw = random.Random(1)
        for number in range(40):
            prompt = [draw.randrange(100, 1000) for _ in range(server.context - 20)]
            wire = server.begin(TEXT, server.text(prompt=prompt, stream=number % 2 > 0))
            time.sleep(number / 400)
            wire.close(reset=number % 3)

    for name, size in (("1 byte a second", 1), ("nothing", 0)):

        @check(f"a reader that reads {name}: its answer is given up, others are not stopped", server)
        def _():
            wire = server.begin(TEXT, server.text(**server.long, n=14, logprobs=20), buffer=4096)

            def read():
                until("its answer runs", lambda: server.runs() >= 14)
                for _ in range(6):
                    if size: wire.socket.recv(size)
                    time.sleep(1)
                until("its answer ends", lambda: server.runs() <= 1, 60)

            said = server.beside(read)
            if not size: wire.end()
            wire.close()
            return said

    # Fewer handles than connections: some wait to be accepted.
    for count, handles in ((1500, LIMITS[0]), (200, 64)):

        @check(f"{count} connections at once, and {handles} file handles: all are served", server)
        def _():
            resource.prlimit(server.child.pid, resource.RLIMIT_NOFILE, (handles, LIMITS[1]))
            try: statuses, _, _, times = asyncio.run(crowd(server, count, server.request("/health", None, CLOSE), 2))
            finally: resource.prlimit(server.child.pid, resource.RLIMIT_NOFILE, LIMITS)
            equal(collections.Counter(statuses), {200: count}, "statuses")
            return f"answered within {max(times):.1f} s"

    @check("2,000 requests at once: 200, or soon 429 with Retry-After", server)
    def _():
        request = server.request(TEXT, server.text(max_tokens=64, ignore_eos=True), CLOSE)
        statuses, answers, connected, answered = asyncio.run(crowd(server, 2000, request))
        equal(set(statuses), {200, 429}, "statuses")
        refused = [number for number, status in enumerate(statuses) if status == 429]
        for number in refused: assert re.search(rb"\r\nretry-after: [1-9]\d*\r\n", answers[number]), answers[number]
        times = [answered[number] for number in refused]
        assert sorted(times)[len(times) * 99 // 100] < REFUSED, f"refusals took {spread(times)}"
        return f"{len(times)} were refused: {spread(times)}, of which connecting took {spread(connected)}"


def lies(server):
    ask, body = server.request, json.dumps(server.text()).encode()
    size, garbage = len(body), random.Random(2).randbytes(3000)
    chunk = b"%x\r\n%s\r\n" % (size, body)
    floods = {
        "200 headers": ask("/health", None, *(f"x-{number}: y" for number in range(200))),
        "a header of 40 KB": ask("/health", None, "x: " + "y" * 40_000),
        "a header of 10 MB": ask("/health", None, "x: " + "y" * 10_000_000),
        "an address of 70 KB": ask("/" + "x" * 70_000),
    }
    lies = {
        "a chunk of a wrong size": ask(TEXT, b"5\r\n" + chunk, CHUNKED), "a chunk of no size": ask(TEXT, b"zz\r\n" + body, CHUNKED),
        "a chunk of -1 bytes": ask(TEXT, b"-1\r\n" + body, CHUNKED), "chunks without an end": ask(TEXT, chunk, CHUNKED),
        "a chunk that is too short": ask(TEXT, b"%x\r\n%s\r\n0\r\n\r\n" % (size + 40, body), CHUNKED),
        "a chunk of 2^80 bytes": ask(TEXT, b"1" + b"0" * 20 + b"\r\n" + body, CHUNKED),
        "a chunk with an endless extension": ask(TEXT, b"5;" + b"x" * 200_000, CHUNKED),
        "5,000 trailers": ask(TEXT, chunk + b"0\r\n" + b"x: y\r\n" * 5000 + b"\r\n", CHUNKED),
        "a length and chunks": ask(TEXT, chunk + b"0\r\n\r\n", CHUNKED, "content-length: 5"),
        "a longer body than it says": ask(TEXT, body, f"content-length: {size - 9}"),
        "a shorter body than it says": ask(TEXT, body, f"content-length: {size + 9}"),
        "two lengths": ask(TEXT, body, f"content-length: {size}", "content-length: 5"),
        "a length of -5": ask(TEXT, body, "content-length: -5"), "a length of 2^80": ask(TEXT, body, f"content-length: {1 << 80}"),
        "an unknown encoding": ask(TEXT, body, "transfer-encoding: gzip"),
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(300), "zeros": bytes(3000), "spaces": b" " * 3000,
        "random bytes": garbage, "a word": b"POST\r\n\r\n\r\n", "no host": b"GET / HTTP/1.1\r\n\r\n",
        "HTTP/0.9": b"GET /health\r\n\r\n", "HTTP/7.1": b"GET /health HTTP/7.1\r\n\r\n",
        "HTTP/2 and ones": PREFACE + b"\xff" * 3000, "HTTP/2 and random bytes": PREFACE + garbage,
    }
    for kind, cases, refused in (("floods", floods, {404, 414, 431}), ("lies and garbage", lies, {400, 403})):

        @check(f"{kind}: {len(cases)} are refused, and the connection is closed", server)
        def _():
            for name, data in cases.items():
                wire = Wire(server.port, data)
                # Nothing more comes, so that nobody waits for the rest.
                with contextlib.suppress(OSError): wire.socket.shutdown(socket.SHUT_WR)
                # A length is ignored where there are chunks.
                allowed = {200, 400} if name == "a length and chunks" else refused
                if data.startswith(PREFACE): wire.file.read()
                else:
                    while answer := wire.answer(): assert answer[0] in allowed, f"{name}: {answer[0]} {answer[2][:200]}"
                wire.close()

    @check("whole chunks, HTTP/1.0 and 100-continue are answered", server)
    def _():
        bytewise = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        judge(server.ask(TEXT, bytewise, CHUNKED), "chunks", 200)
        for given in (server.text(), server.text(stream=True)):
            judge(server.ask(TEXT, given, first=f"POST {TEXT} HTTP/1.0"), "HTTP/1.0", 200)
        wire = Wire(server.port, ask(TEXT, body, "expect: 100-continue"))
        equal(wire.file.readline() + wire.file.readline(), b"HTTP/1.1 100 Continue\r\n\r\n", "the first answer")
        judge(wire.answer(), "100-continue", 200)
        wire.close()

    @check("pipelined requests are answered in order", server)
    def _():
        bodies = [(TEXT, server.text(seed=seed, stream=seed > 9)) for seed in range(12)] + [(TOKENS, {"content": "x"})]
        bodies += [("/v1/models", None), ("/nothing", None), (CHAT, server.chat(temperature=3))]
        random.Random(4).shuffle(bodies)
        wire = Wire(server.port, b"".join(ask(*each) for each in bodies))
        plain = lambda body: re.sub(rb'"(id|created|cached_tokens)":[^,}]*', b"", body)
        for path, body in bodies:
            equal(plain(judge(wire.answer(), path)), plain(judge(server.ask(path, body), path)), f"{path} {body}")
        wire.close()

    @check("a body of 100 MB: 413", server)
    def _():
        for line in ("content-length: 100000000", CHUNKED):
            wire = Wire(server.port, ask(TEXT, b"", line) + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 1600)
            judge(wire.answer(), line, 413)
            wire.close()


def bodies(server):
    @check("JSON that is none, not UTF-8, deep, or has numbers that do not exist", server)
    def _():
        values = ['"\\ud800"', '"\\udc00\\ud800"', "NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"\\u0000"', '"\x01"', '"\xff"']
        values += ["[" * 10_000 + "]" * 10_000, '{"x":' * 10_000 + "1" + "}" * 10_000, "1" * 10_000, '"' + "x" * 10**6 + '"']
        whole = [b"", b"null", b'"x"', b"[]", b"{", b"{}{}", b"\xff\xfe{}", b"[" * 10_000, b'{"x":' * 10_000]
        for field in ("model", "prompt", "temperature", "seed", "stop", "logit_bias", "user", "x"):
            whole += [json.dumps(server.text())[:-1].encode() + f', "{field}": {value}}}'.encode("latin-1") for value in values]
        return dict(server.judge_all(TEXT, whole))

    @check("every prefix of a body", server)
    def _():
        body = json.dumps(server.chat(stop=["x"], response_format={"type": "text"}, kiln={})).encode()
        counts = server.judge_all(CHAT, [body[:length] for length in range(len(body) + 1)])
        equal(counts, {400: len(body), 200: 1}, "statuses")

    @check("every field with a value of every type, and keys that are there twice", server)
    def _():
        with open(FIELDS) as file: source = file.read()

        def fields(*tables):
            of = lambda table: source.split(f"pub const {table}:")[1].split("];")[0]
            return [f'"{name}":@' for table in tables for name in re.findall(r'\("(\w+)",', of(table))]

        cases = [(CHAT, server.chat(), fields("CHAT", "COMMON") + WITHIN + WITHIN_CHAT)]
        cases += [(TEXT, server.text(), fields("COMPLETIONS", "COMMON") + WITHIN)]
        cases += [(EMBED, server.embed(), fields("EMBEDDINGS") + ['"input":[@]'])]
        cases += [(TOKENS, {"content": "x"}, ['"content":@', '"add_special":@', '"x":@'])]
        cases += [("/detokenize", {"tokens": [5]}, ['"tokens":@', '"tokens":[@]'])]
        counts = collections.Counter()
        for path, base, fields in cases:
            values = [field.replace("@", value) for field in fields for value in VALUES]
            counts += server.judge_all(path, [f"{json.dumps(base)[:-1]}, {value}}}".encode() for value in values])
        return dict(counts)

    @check("2,000 random changes of bodies", server)
    def _():
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-z]{1,5}"}}, "required": ["a"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        cases = [(TEXT, server.text(seed=3, stop=["x", "yz"], logit_bias={"5": 1.5}, logprobs=2, stream=True))]
        cases += [(CHAT, server.chat(response_format=form, top_p=0.5, chat_template_kwargs={"x": [1, {}]}))]
        cases += [(CHAT, server.chat(tools=tools, tool_choice="required", n=2)), (EMBED, server.embed(encoding_format="base64"))]
        counts = collections.Counter()

        def changed(body, draw):
            for _ in range(draw.randint(1, 3)):
                at, length = draw.randrange(len(body)), draw.randint(1, 12)
                match draw.randrange(4):
                    case 0: body[at] ^= 1 << draw.randrange(8)
                    case 1: del body[at + 1 : at + 1 + length]
                    case 2: body[at:at] = body[at : at + length]
                    case _: body[at : at + 1] = draw.choice(VALUES).encode()
            return bytes(body)

        def send(path, body, draw):
            counts.update(server.judge_all(path, [changed(bytearray(json.dumps(body).encode()), draw) for _ in range(500)]))

        at_once(*(functools.partial(send, *case, random.Random(seed)) for seed, case in enumerate(cases)))
        return dict(counts)


def costs(server):
    def ask(path, body, *statuses):
        return lambda: judge(server.ask(path, body), f"{path} {str(body)[:80]}", *statuses)

    @check("prompts of 15 MB: 400, and others are not stopped", server)
    def _():
        text = "word and another, " * 830_000
        return server.beside(ask(TEXT, server.text(text), 400), ask(CHAT, server.chat(text), 400), ask(TOKENS, {"content": text}, 200))

    @check("values and tools for templates that are large or deep", server)
    def _():
        deep = functools.reduce(lambda inner, _: {"type": "object", "properties": {"x": inner}}, range(50), {})
        wide = {"type": "object", "properties": {f"property-{number}": {"type": "string"} for number in range(3000)}}
        given = ({"x": "y" * 10_000_000}, {f"k{number}": number for number in range(100_000)}, {"x": [[]] * 100_000}, {"x": deep})
        asks = [ask(CHAT, server.chat(chat_template_kwargs=each)) for each in given]
        for schema in (wide, deep):
            tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            asks += [ask(CHAT, server.chat(tools=tools, tool_choice=choice), 400) for choice in ("auto", "required")]
        return server.beside(lambda: [each() for each in asks])

    @check("patterns and schemas that explode", server)
    def _():
        patterns = ["(a+)+b", "(x{0,1000}){0,1000}", "((((x{1,50}){1,50}){1,50}){1,50}){1,50}", "(.*a.{200})|(.*b.{200})", "(?=a)b"]
        patterns += ["(a?){500}a{500}", ".*a.{20}", "(.*a.{12}.*){10}", "(.{0,300}a){40}", "((a{0,99}b{0,99}){0,99}c){0,99}"]
        schemas = [{"type": "object", "properties": {"x": {"type": "string", "pattern": each}}, "required": ["x"]} for each in patterns]
        schemas += [{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}]
        schemas += [{"allOf": [{"anyOf": [{"properties": {f"{i}-{j}": {}}} for i in range(10)]} for j in range(10)]}]
        schemas += [{"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1900)}}]
        forms = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in schemas]
        asks = [ask(CHAT, server.chat(max_tokens=40, response_format=form), 200, 400) for form in forms]
        return server.beside(*(lambda part=part: [each() for each in asks[part::4]] for part in range(4)))

    values = json.dumps(server.chat())[:-1].encode() + b', "tools": [' + b'{"":1},' * 2_300_000 + b"{}]}"
    check("bodies with millions of values: others are not stopped", server)(lambda: server.beside(*[ask(CHAT, values, 400, 413)] * 4))

    @check("stop strings of 14 MB: others are not stopped", server)
    def _():
        wire = server.begin(TEXT, server.text(**server.long, n=14, stop=["x" * 7_000_000, "y" * 7_000_000]))
        return server.beside(lambda: (wire.file.readline(), time.sleep(6), wire.close()))

    many, long = [[100 + number] * (server.context - 20) for number in range(128)], "word and another, " * 830_000
    cases = {"many texts": [ask(EMBED, server.embed(input=many), 200)], "15 MB of text": [ask(EMBED, server.embed(long), 400)] * 3}
    for name, asks in cases.items():
        check(f"embeddings of {name}: others are not stopped", server)(lambda: server.beside(*asks))


def guards(server):
    host, key, kind = server.lines
    body = server.text()

    @check("keys: missing, wrong, shorter and longer ones are refused", server)
    def _():
        wrong = ["", KEY[:-1], KEY + "x", "x" + KEY, KEY.upper(), f"{KEY},{KEY}", KEY[::-1], "x" * 20_000]
        lines = [f"authorization: {start}" for start in ("", f"Basic {KEY}", KEY, *(f"Bearer {each}" for each in wrong))]
        for line in [*lines, f"x-api-keys: {KEY}"]:
            for path, given in ((TEXT, body), ("/v1/models", None), ("/props", None), ("/metrics", None), ("/nothing", None)):
                judge(server.ask(path, given, lines=[host, kind, line]), f"{path} {line[:60]}", 401)
        judge(server.ask("/health", lines=[host]), "health", 200)

    @check("keys: the time does not tell how much of a key is right", server)
    def _():
        wire, times = Wire(server.port), ([], [])
        for number in range(1200):
            wrong = ("x" + KEY[1:], KEY[:-1] + "x")[number % 2]
            data = server.request("/props", lines=[host, f"authorization: Bearer {wrong}"])
            begun = time.perf_counter()
            equal(wire.send(data).answer()[0], 401, "status")
            times[number % 2].append(time.perf_counter() - begun)
        wire.close()
        first, last = (statistics.median(each) * 1e6 for each in times)
        assert max(first, last) < 1.3 * min(first, last), f"{first:.0f} and {last:.0f} us"
        return f"wrong at the beginning {first:.0f} us, at the end {last:.0f} us"

    @check("other hosts, origins and types of bodies are refused", server)
    def _():
        for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "evil.example:127.0.0.1", "0.0.0.0", ""):
            judge(server.ask("/health", lines=[f"host: {name}", key]), f"host {name}", 403)
        for name in ("http://evil.example", "null", "http://localhost.evil.example", "file://", "http://127.0.0.1.evil.example:80"):
            answer = server.ask(TEXT, body, f"origin: {name}")
            judge(answer, f"origin {name}", 403)
            assert "access-control-allow-origin" not in answer[1], f"origin {name}: {answer[1]}"
        judge(server.ask(TEXT, body, f"origin: http://localhost:{server.port}"), "an origin on this machine", 200)
        for name in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonp", ""):
            judge(server.ask(TEXT, body, lines=[host, key, f"content-type: {name}"]), f"type {name}", 415)
        judge(server.ask(TEXT, body, lines=[host, key]), "no type", 415)

    @check("addresses that lead elsewhere: 404", server)
    def _():
        paths = ["/v1/models/../../etc/passwd", "/../etc/passwd", "//etc/passwd", "/etc/passwd", "/v1/models/%2e%2e%2fetc%2fpasswd"]
        paths += ["/page.css/../../Cargo.toml", "/page.js%00.css", "/v1/models//etc/passwd", "/v1/models/%00", "/v1/models/%ff"]
        for path in [*paths, f"http://127.0.0.1:{server.port}/etc/passwd"]: judge(server.ask(path), path, 404)
        for method in ("PUT", "DELETE", "TRACE", "FOO"):
            judge(server.ask(TEXT, first=f"{method} {TEXT} HTTP/1.1"), method, 405)


def slow_clients(server):
    """Opens 200 slow connections to a server. Returns the function that checks how they fared."""
    get, length = server.request("/health"), "content-length: 999"
    # Data sent at once, seconds between further bytes (0: none come), and the seconds that a connection has.
    kinds = {
        "nothing is sent, as if the client's machine is gone": (b"", 0, HEADER_TIME),
        "HTTP/2 is begun": (PREFACE[:9], 0, HEADER_TIME),
        "HTTP/2 without a request": (PREFACE + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]), 0, HEADER_TIME),
        "an answer, and no other request": (get, 0, HEADER_TIME),
        "empty lines": (b"\r\n", 0, HEADER_TIME),
        "headers without an end": (get[:-2], 0, HEADER_TIME),
        "headers, a byte every 3 s": (get[:-2] + b"x: ", 3, HEADER_TIME),
        "a body without an end": (server.request(TEXT, b"{", length), 0, BODY_TIME),
        "a body, a byte every 5 s": (server.request(TEXT, b"{", length), 5, BODY_TIME),
        "chunks without an end": (server.request(TEXT, b"1\r\n{\r\n", CHUNKED), 0, BODY_TIME),
    }
    wires = [(kind, Wire(server.port, kinds[kind][0])) for kind in kinds for _ in range(20)]
    body = server.text(**server.long, n=14, logprobs=20)
    unread = [server.begin(TEXT, body, buffer=4096) for _ in range(3)]
    times, errors, begun, closed, still = [], [], time.monotonic(), {}, []

    def watch():
        for second in range(1, BODY_TIME + 2 * SLACK):
            asked = time.monotonic()
            # All are open at first.
            try: judge(server.ask(TEXT, server.text()), "a request beside slow connections", 200)
            except Exception as error: errors.append(error)
            times.append(time.monotonic() - asked)
            for number, (kind, wire) in enumerate(wires):
                if number in closed: continue
                if wire.is_closed(): closed[number] = time.monotonic() - begun
                elif (every := kinds[kind][1]) and second % every == 0: wire.send(b"x")
            time.sleep(max(0, begun + second - time.monotonic()))
        # Their clients cannot see whether they are closed.
        still.append(server.handles_and_threads()[0] - server.idle[0] - len(wires) + len(closed))
        for wire in unread + [wire for _, wire in wires]: wire.close()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def results():
        thread.join()

        @check("200 slow connections: others are served", server)
        def _():
            if errors: raise errors[0]
            return f"answers took {spread(times)}"

        @check("slow connections are closed: answers that nobody reads")
        def _():
            equal(still, [0], f"open connections of 3, after {BODY_TIME + 2 * SLACK} s")

        for kind, (_, _, limit) in kinds.items():

            @check(f"slow connections are closed: {kind}")
            def _():
                own = [closed.get(number, float("inf")) for number, (each, _) in enumerate(wires) if each == kind]
                assert max(own) < limit + SLACK, f"{limit} s are allowed; the last was closed after {max(own):.0f} s"
                return f"after {max(own):.0f} s"

    return results


def signals(start):
    def streams(server, count):
        wires = [server.begin(TEXT, server.text(**server.long)) for _ in range(count)]
        until("they wait", lambda: server.runs("waiting") >= count // 2)
        return wires

    def is_refused(server):
        try: Wire(server.port).close()
        except ConnectionRefusedError: return True

    @check("SIGTERM, --drain 30: open answers end, no new ones begin, status 0")
    def _():
        server = start("--rows", "1", "--drain", "30")
        wires, whole = streams(server, 6), server.begin(TEXT, server.text(max_tokens=40))
        time.sleep(0.3)
        server.child.terminate()
        until("connections are refused", lambda: is_refused(server), 5)
        equal([wire.end() for wire in wires], [b"[DONE]"] * 6, "the last events")
        judge(whole.answer(), "an answer that is not streamed", 200)
        equal(server.child.wait(10), 0, "exit status")

    for name, more in (("a stream ends with an error", {}), ("an answer that is not streamed is an error", {"stream": False})):

        @check(f"SIGTERM, --drain 1: {name}, status 0")
        def _():
            server = start("--rows", "1", "--drain", "1")
            wires, last = streams(server, 80), server.begin(TEXT, server.text(**server.long | more))
            time.sleep(0.3)
            server.end()
            if more: assert last.answer(), "the connection is cut"
            else: equal([b'"error"' in wire.end() for wire in (wires[0], last)], [False, True], "ends with an error")

    @check("a second SIGTERM ends the server at once")
    def _():
        server = start("--rows", "1")
        wires = streams(server, 200)
        server.child.terminate()
        time.sleep(1)
        equal(server.child.poll(), None, f"exit status after the first, with {len(wires)} streams")
        server.end(130, 3)

    @check("SIGTERM ends a server with 1,024 silent connections")
    def _():
        server = start("--drain", "1")
        wires = [Wire(server.port) for _ in range(1024)]
        time.sleep(1)
        server.end(seconds=5)
        for wire in wires: wire.close()

    @check("SIGKILL, and a start on the same port at once: the same answers")
    def _():
        server = start("--rows", "1")
        wires = streams(server, 20)
        server.end(-signal.SIGKILL, number=signal.SIGKILL)
        again = start("--rows", "1", "--port", str(server.port))
        equal(again.answers, server.answers, "the reference answers")
        again.end()
        for wire in wires: wire.close()


def logs(server, start):
    @check("no text of a request, and no key, is logged, also with KILN_LOG=trace")
    def _():
        own = start("--drain", "1", environment={"KILN_LOG": "trace", "RUST_LOG": "trace"})
        for path, body in ((TEXT, own.text()), (CHAT, own.chat()), (EMBED, own.embed()), (TOKENS, {"content": MARK})):
            judge(own.ask(f"{path}?{MARK}", body, f"x: {MARK}"), path, 200)
            own.judge_all(path, [json.dumps(body | {MARK: 1}).encode(), json.dumps(body).encode()[:-9], b"\xff" + MARK.encode()])
        tool = {"type": "function", "function": {"name": MARK, "parameters": {"type": "object", "pattern": MARK + "("}}}
        given = {"tools": [tool], "tool_choice": "required"}, {"stop": MARK, "stream": True}, {"kiln": {"cache": MARK}}
        for more in given: judge(own.ask(CHAT, own.chat(max_tokens=9, **more)), more)
        judge(own.ask(f"/{MARK}"), MARK, 404)
        own.begin(TEXT, own.text(**own.long, n=16)).close(reset=True)
        own.end()
        for log in ("".join(own.log), "".join(server.log)):
            # Characters that are logged one by one, some of them twice, are words, too.
            characters = re.sub(r"(.)\1+", r"\1", "".join(re.findall(r"'(.)'", log)))
            for word in (MARK, KEY): assert word not in log, f"{word} in {log[log.find(word) - 99:][:200]!r}"
            assert MARK not in characters, "the prompt is logged, a character a line, such as " + re.search(r".*'.'.*", log)[0]


def soak(start, seconds):
    allow = [part for cache in CACHES for part in ("--allow-cache", cache)]
    # The memory for beginnings of prompts is full soon.
    server = start("--prefix-memory", "64MiB", *allow)
    caches = [each for each in CACHES if server.ask(TEXT, server.text(kiln={"cache": each}))[0] == 200]
    print(f"# soak: caches {', '.join(caches)}; refused: {', '.join(set(CACHES) - set(caches)) or 'none'}", flush=True)
    time.sleep(12)
    idle, counts, begun = server.handles_and_threads(all=True), collections.Counter(), time.monotonic()
    words = "the of and to in a is that for it was on are as with his they at be this from have or by one had".split()

    def client(number):
        draw = random.Random(number)
        while time.monotonic() < begun + seconds:
            text = " ".join(words * draw.randint(0, 1) + draw.choices(words, k=draw.randint(1, 120)))
            settings = {"max_tokens": draw.randint(1, 60), "temperature": draw.choice([0, 0.8]), "seed": draw.randrange(99)}
            settings |= {"stream": draw.random() < 0.6, "n": draw.choice([1, 1, 1, 3]), "kiln": {"cache": draw.choice(caches)}}
            # This one computes all tokens again for each one.
            if settings["kiln"]["cache"] == "none": settings["max_tokens"] = 3
            form = {"response_format": {"type": "json_object"}}
            cases = [(TEXT, server.text(text, **settings, logprobs=5)), (CHAT, server.chat(text, **settings))] * 2
            cases += [(CHAT, server.chat(text, **settings, **form)), (EMBED, server.embed(text)), (TOKENS, {"content": text})]
            path, body = draw.choice(cases)
            wire = server.begin(path, body)
            leaves = draw.random() < 0.2
            if leaves: time.sleep(draw.random() * 0.5)
            else: judge(wire.answer(), f"{path} {body}", 200)
            wire.close(reset=draw.random() < 0.5)
            counts["cancelled" if leaves else "done"] += 1

    def resident():
        with open(f"/proc/{server.child.pid}/status") as file: return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024

    def watch():
        for tenth in range(1, 11):
            sizes, tokens, since = [], server.metric("generation_tokens_total"), time.monotonic()
            while time.monotonic() < begun + seconds * tenth / 10:
                sizes.append(resident())
                time.sleep(0.2)
            means.append(statistics.mean(sizes))
            rate = (server.metric("generation_tokens_total") - tokens) / (time.monotonic() - since)
            handles, threads = server.handles_and_threads(all=True)
            print(f"# {tenth}/10: RSS {means[-1]:.1f} MiB, {threads} threads, {handles} handles, {counts['done']} answered, "
                f"{counts['cancelled']} cancelled, {rate:.0f} tokens/s", flush=True)

    means = []

    @check("soak: every request is answered", server)
    def _():
        at_once(watch, *(functools.partial(client, number) for number in range(24)))
        return f"{counts['done']}, beside {counts['cancelled']} that were cancelled"

    @check("soak: handles and threads are as before")
    def _():
        time.sleep(12)
        equal(server.handles_and_threads(all=True), idle, "handles and threads")

    @check("soak: memory does not grow")
    def _():
        ratio = f"RSS of the last tenth / of the fifth: {means[9] / means[4]:.3f}"
        assert means[9] <= 1.05 * means[4], ratio
        return ratio

    server.end()


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("binary", metavar="KILN_BINARY")
    ap.add_argument("model", metavar="MODEL")
    ap.add_argument("--soak", metavar="SECONDS", type=int, default=0)
    args, more = ap.parse_known_args()
    wrong = [f"{path} does not exist" for path in (args.binary, args.model) if not os.path.exists(path)]
    wrong += ["4,000 file handles are not allowed"] * (LIMITS[1] < 4000)
    if wrong:
        print(f"chaos_serve: error: {wrong[0]}", file=sys.stderr)
        sys.exit(2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMITS[1], LIMITS[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def start(*arguments, **settings):
        return Server(args.binary, args.model, [*arguments, *more], **settings)

    begun = time.monotonic()
    server, results = start("--rows", "16", "--queue", "16"), slow_clients(start())
    for tests in (clients, lies, bodies, costs, guards): tests(server)
    signals(start)
    results()
    logs(server, start)

    @check("after all, no more threads than before", server)
    def _():
        time.sleep(12)
        found, before = server.handles_and_threads(all=True), server.all_idle
        # Threads for work that blocks end after a while without any.
        assert found[0] == before[0] and found[1] <= before[1], f"handles and threads: {found}, expected {before}"

    server.end()
    print(f"# {time.monotonic() - begun:.0f} s", flush=True)
    if args.soak: soak(start, args.soak)
    finish()


if __name__ == "__main__":
    main()
