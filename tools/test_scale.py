#!/usr/bin/env python3
"""Test `kiln serve` behind programs that spread requests over several servers.

    pip install 'ray[serve]==2.60.0' vllm-router==0.1.17 sglang-router==0.3.2 openai==3.57.0 \\
        prometheus-client==0.26.0 kubernetes-validate==1.37.0
    python tools/test_scale.py KILN_BINARY MODEL [--only PART] [ARGUMENT OF kiln serve..]

Parts: `kubernetes` (the example's objects against the schema), `metrics` (the names that llm-d reads),
`vllm-router`, `sglang-router` and `ray`. The routers have three servers, and Ray has three nodes on this machine.
Answers must equal those of one server. Then a server, or a node, is killed while streams run. A part whose package
is not installed is NOT CHECKED.

MODEL is a small one to chat with, such as the demo model. Needs Linux. Prints a line per check. Exit status 1 if one
fails, 2 for bad input.
"""
import argparse, contextlib, functools, http.client, importlib.metadata, json, os, re, signal, socket, subprocess
import sys, tempfile, threading, time

HERE = os.path.dirname(os.path.abspath(__file__))
RAY, KUBERNETES = os.path.join(HERE, "../examples/ray"), os.path.join(HERE, "../examples/kubernetes/kiln.yaml")
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
# The name of the model, which also marks our servers among the processes of this machine.
NAME = f"scale-{os.getpid()}"
# What the tests give to each server. With short chunks, short prompts are reused.
OPTIONS = ["--alias", NAME, "--threads", "1", "--prefill-chunk", "32"]
SERVERS, SCHEMAS = 3, "1.31"
STORY = "The river flows past the old mill and the small white church, where {} once lived. " * 3
NAMES = ["Anna", "Bertram", "Cecilia", "Duncan", "Emilia", "Fabian", "Gloria", "Hamlet", "Isabella"]
# Seconds in which a server, and a cluster, must have started; for one answer; after a loss, until requests succeed.
START, CLUSTER, PATIENCE, RECOVERY = 60, 180, 60, 15
# Metrics that llm-d's endpoint picker must find, and those that it reads if they are there.
LLM_D = ["vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"]
LLM_D_OPTIONAL = ["vllm:cache_config_info", "vllm:lora_requests_info"]
os.environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "RAY_USAGE_STATS_ENABLED": "0"}
passed = failed = 0
say = functools.partial(print, file=sys.stdout, flush=True)


def check(name):
    """Calls the decorated function at once, and prints whether it passes, and what it says."""

    def run(function):
        global passed
        try:
            said = function()
        except Exception as error:
            fail(name, error)
        else:
            passed += 1
            say(f"ok {name}" + (f": {said}" if said else ""))

    return run


def fail(name, error):
    global failed
    failed += 1
    say(f"FAILED {name}: " + " ".join(f"{type(error).__name__}: {error}".split())[:600])


def equal(found, expected, what):
    assert found == expected, f"{what}: {str(found)[:250]}, expected {str(expected)[:250]}"


def until(what, holds, seconds):
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"{what}: did not happen within {seconds} s"
        time.sleep(0.1)
    return found


def at_once(function, arguments):
    """Calls a function in a thread for each argument, and returns the results. Raises the first error."""
    results, errors = [None] * len(arguments), []

    def run(at, argument):
        try: results[at] = function(argument)
        except Exception as error: errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(arguments)]
    for thread in threads: thread.start()
    end = time.monotonic() + 2 * PATIENCE
    for thread in threads: thread.join(max(0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "requests hang"
    if errors: raise errors[0]
    return results


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextlib.contextmanager
def ended(child):
    """Ends a process after use."""
    try:
        yield child
    finally:
        child.terminate()
        try: child.wait(40)
        except subprocess.TimeoutExpired: child.kill()
        child.wait()


def ask(port, path, body=None):
    """Returns the status, the headers and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


def answers(port, path="/ready"):
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(port, path)[0] == 200


def question(name, **settings):
    prompt = STORY.format(*[name] * 3) + "What is there?"
    return {"model": NAME, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 24} | settings


def long_question(name):
    return question(name, max_tokens=LONG, ignore_eos=True)


def chat(port, body):
    """Returns the text of an answer, and how many tokens of its prompt were reused."""
    status, _, data = ask(port, CHAT, body)
    assert status == 200, f"status {status}: {data[:200]}"
    answer = json.loads(data)
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def stream(port, body, pieces=None):
    """Returns how a stream ends and its text. Reads at most `pieces` lines, then leaves.

    "whole": as it should; "told": with an error that every client sees; "silent": cut, and it seems to be whole;
    "refused": it does not begin.
    """
    text = ""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    with contextlib.closing(connection):
        try:
            connection.request("POST", CHAT, json.dumps(body | {"stream": True}), {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200: return "refused", f"status {answer.status}: {answer.read()[:200]}"
            rest = b""
            # `readline` would end in silence where a chunked body is cut; `read1` raises an error.
            while data := answer.read1(65536):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if pieces is not None and (pieces := pieces - 1) < 0: return "left", text
                    if not line.startswith(b"data: "): continue
                    if line == b"data: [DONE]": return "whole", text
                    event = json.loads(line[6:])
                    if "error" in event: return "told", text
                    text += event["choices"][0]["delta"].get("content") or ""
            return "silent", text
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException):
            return "told" if text else "refused", text


def metric(port, name):
    """The sum of a metric, over its labels."""
    text = ask(port, "/metrics")[2].decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M))


def our_servers():
    """The process and port of each `kiln serve` that this program, or what it has started, runs."""
    found = {}
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline") as file:
            words = file.read().split("\0")
            if NAME in words and "--port" in words: found[int(process)] = int(words[words.index("--port") + 1])
    return found


def front():
    """The process of the deployment `Front`, which Ray names."""
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline") as file:
            if file.read().startswith("ray::ServeReplica:default:Front"): return process


def parent(process):
    with open(f"/proc/{process}/stat") as file: return int(file.read().rpartition(")")[2].split()[1])


def missing(part, *packages):
    """Whether a package is not installed. Says so, or which versions are tested."""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            say(f"NOT CHECKED {part}: {package} is not installed")
            return True
    say(f"{part}: {', '.join(versions)}")


def start(port):
    command = [BINARY, "serve", "--model", MODEL, *OPTIONS, *EXTRA, "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kubernetes():
    if missing("kubernetes", "kubernetes-validate", "PyYAML"): return
    import kubernetes_validate, yaml

    with open(KUBERNETES) as file: text = file.read()
    objects = list(yaml.safe_load_all(text))
    for item in objects:

        @check(f"kubernetes: {item['kind']} fits the schema of {SCHEMAS}, and nothing is unknown")
        def _():
            kubernetes_validate.validate(item, SCHEMAS, strict=True)

    @check("kubernetes: names, ports, labels and times fit together")
    def _():
        kinds = {item["kind"]: item for item in objects}
        deployment, service = kinds["Deployment"]["spec"], kinds["Service"]["spec"]
        pod = deployment["template"]["spec"]
        [container] = pod["containers"]
        labels = deployment["template"]["metadata"]["labels"].items()
        assert deployment["selector"]["matchLabels"].items() <= labels and service["selector"].items() <= labels
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        named = [service["ports"][0]["targetPort"]]
        named += [container[f"{kind}Probe"]["httpGet"]["port"] for kind in ("startup", "readiness", "liveness")]
        assert set(named) <= set(ports), f"{named} of {ports}"
        equal({mount["name"] for mount in container["volumeMounts"]}, {volume["name"] for volume in pod["volumes"]}, "volumes")
        arguments = dict(zip(container["args"][1::2], container["args"][2::2]))
        equal(int(arguments["--port"]), ports[named[0]], "the port")
        sleep = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] > int(arguments["--drain"]) + sleep, "pods are killed too early"
        [key] = [item["valueFrom"]["secretKeyRef"] for item in container["env"] if item["name"] == "KILN_API_KEYS"]
        assert f"kubectl create secret generic {key['name']} --from-literal={key['key']}=" in text, "the key is not made"

    @check("kubernetes: kiln serve takes the arguments of the example, and its probes need no key")
    def _():
        kinds = {item["kind"]: item for item in objects}
        [container] = kinds["Deployment"]["spec"]["template"]["spec"]["containers"]
        port, arguments = free_port(), list(container["args"])
        for option, value in ("--model", MODEL), ("--port", str(port)):
            arguments[arguments.index(option) + 1] = value
        variables = os.environ | {"KILN_API_KEYS": "right-key"}
        with ended(subprocess.Popen([BINARY, *arguments, *EXTRA], stderr=subprocess.DEVNULL, env=variables)) as server:
            for kind in "startup", "readiness", "liveness":
                path = container[f"{kind}Probe"]["httpGet"]["path"]
                until(f"{path} answers", lambda: server.poll() is not None or answers(port, path), START)
                assert server.poll() is None, "kiln serve has ended"
            equal(ask(port, MODELS)[0], 401, "the status without a key")


def metrics(port):
    if missing("metrics", "prometheus-client"): return
    from prometheus_client import openmetrics, parser

    chat(port, question("Metrics"))
    _, headers, body = ask(port, "/metrics")
    text = body.decode()

    @check("metrics: prometheus_client parses them as what they say to be")
    def _():
        assert "openmetrics" in headers["content-type"], headers["content-type"]
        import prometheus_client.openmetrics.parser as strict

        families = {family.name for family in strict.text_string_to_metric_families(text)}
        return f"{len(families)} families"

    @check("metrics: prometheus_client parses them as Prometheus's text, which llm-d reads, with llm-d's gauges")
    def _():
        families = {family.name: family for family in parser.text_string_to_metric_families(text)}
        for name in LLM_D:
            assert name in families, f"there is no {name}"
            equal(families[name].type, "gauge", name)
            # llm-d takes the first one, so there must be no other.
            equal(len(families[name].samples), 1, f"samples of {name}")
        # Types that Prometheus's text does not know make llm-d give up all metrics.
        types = set(re.findall(r"^# TYPE \S+ (\S+)$", text, re.M))
        assert types <= {"counter", "gauge", "histogram", "summary", "untyped"}, types
        there = [name for name in LLM_D_OPTIONAL if name in families]
        if "vllm:cache_config_info" in there:
            [sample] = families["vllm:cache_config_info"].samples
            for label in "block_size", "num_gpu_blocks": int(sample.labels[label])
        return f"of the optional ones: {', '.join(there) or 'none'}"


def spread(part, port, single, ports):
    """Checks that answers are those of one server, and that requests with the same beginning share a server."""

    @check(f"{part}: answers and streams of several threads are those of one server")
    def _():
        bodies = [question(name) for name in NAMES]
        expected = [chat(single, body)[0] for body in bodies]
        equal([text for text, _ in at_once(lambda body: chat(port, body), bodies)], expected, "answers")
        equal(at_once(lambda body: stream(port, body), bodies), [("whole", text) for text in expected], "streams")

    @check(f"{part}: requests with the same beginning reach the same server, others are spread")
    def _():
        bodies = [question(f"{name} the second") for name in NAMES]
        for body in bodies: chat(port, body)
        last = "Who lived there? Say nothing about the mill."
        for body in bodies: body["messages"] += [{"role": "assistant", "content": "A river."}, {"role": "user", "content": last}]
        reused = [chat(port, body)[1] for body in bodies]
        assert min(reused) > 0, f"tokens reused: {reused}"
        served = [int(metric(server, "kiln_request_success_total")) for server in ports]
        assert sum(count > 0 for count in served) > 1, f"answers of the servers: {served}"
        return f"tokens reused: {min(reused)} or more; answers of the servers: {served}"

    @check(f"{part}: errors keep their status and sentence")
    def _():
        for body in question("x", temperature=3), question("x", unknown=1), question("x", messages=[]):
            (status, _, found), (expected, _, sentence) = ask(port, CHAT, body), ask(single, CHAT, body)
            # sglang-router reads the fields itself, and drops those that it does not know.
            if part == "sglang-router" and "unknown" in body: continue
            equal(status, expected, "the status")
            if part != "sglang-router": equal(json.loads(found), json.loads(sentence), "the error")
        path = MODELS + "/org%2Fname?a=b%2Fc"
        if part == "ray": equal(ask(port, path)[2], ask(single, path)[2], "the error of an unknown model")

    @check(f"{part}: a client that leaves costs no further passes")
    def _():
        before = sum(metric(server, "kiln_generation_tokens_total") for server in ports)
        equal(stream(port, long_question("the Leaver"), pieces=6)[0], "left", "the stream")
        until("servers are idle", lambda: not sum(metric(server, "kiln_num_requests_running") for server in ports), 20)
        time.sleep(0.5)
        tokens = sum(metric(server, "kiln_generation_tokens_total") for server in ports) - before
        assert tokens < LONG, f"{tokens:.0f} tokens were made for nobody"


def loss(part, port, single, lose):
    """Runs streams while `lose` ends a server, and checks what becomes of them."""
    stops, threads, ends, errors = threading.Event(), [], [], []
    names = [f"{name} the {number}" for number in ("third", "fourth") for name in NAMES[:6]]
    expected = dict(zip(names, at_once(lambda name: stream(single, long_question(name)), names)))

    def run(name):
        while not stops.is_set():
            began = time.monotonic()
            try:
                end, text = stream(port, long_question(name))
            except Exception as error:
                end, text = "hangs" if isinstance(error, TimeoutError) else "fails", repr(error)
            right = expected[name][1]
            if end == "whole" and text != right or end in ("told", "silent") and not right.startswith(text): end = "wrong"
            ends.append((began, end, text))
            if end == "refused": time.sleep(0.5)

    for name in names:
        threads.append(threading.Thread(target=run, args=[name], daemon=True))
        threads[-1].start()

    @check(f"{part}: a server is lost while streams run")
    def _():
        time.sleep(2)
        return lose()

    lost = time.monotonic()
    time.sleep(RECOVERY + 5)
    stops.set()
    for thread in threads: thread.join(PATIENCE + 10)
    count = {kind: sum(end == kind for _, end, _ in ends) for kind in dict.fromkeys(end for _, end, _ in ends)}

    @check(f"{part}: no stream hangs, none is wrong, and others go on")
    def _():
        assert not any(thread.is_alive() for thread in threads), "streams hang"
        bad = [(end, text[:150]) for _, end, text in ends if end in ("hangs", "fails", "wrong")]
        assert not bad, f"{bad[:2]} of {count}"
        went_on = sum(began < lost and end == "whole" for began, end, _ in ends)
        assert went_on, f"{count}"
        return ", ".join(f"{number} {kind}" for kind, number in count.items())

    @check(f"{part}: a stream that was cut ends with an error")
    def _():
        assert not count.get("silent"), f"{count['silent']} streams end as if they were whole"
        assert count.get("told"), f"no stream was cut: {count}"

    @check(f"{part}: requests succeed after the loss")
    def _():
        late = [(end, text) for began, end, text in ends if began > lost + RECOVERY]
        assert late and all(end == "whole" for end, _ in late), f"{[pair for pair in late if pair[0] != 'whole'][:2]}"
        first = [end for began, end, _ in ends if lost < began]
        return f"{first.count('refused')} of {len(first)} new requests were refused"


def router(part, module, single):
    if missing(part, part): return
    ports = [free_port() for _ in range(SERVERS)]
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ended(start(port))) for port in ports]
        for port in ports: until("a server starts", lambda: answers(port), START)
        port = free_port()
        command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        command += ["--worker-urls", *(f"http://127.0.0.1:{port}" for port in ports)]
        command += ["--health-check-interval-secs", "2", "--prometheus-port", str(free_port())]
        log = stack.enter_context(tempfile.TemporaryFile())
        stack.enter_context(ended(subprocess.Popen(command, stdout=log, stderr=log)))
        until("the router starts", lambda: answers(port, MODELS), START)
        spread(part, port, single, ports)

        def lose():
            runs = lambda at: metric(ports[at], "kiln_num_requests_running")
            servers[until("a server is busy", lambda: list(filter(runs, range(SERVERS))), 20)[0]].kill()

        loss(part, port, single, lose)


def openai_error(port, children):
    """Kills the server of a stream of OpenAI's client."""
    if missing("ray: the error of a cut stream for OpenAI's client", "openai"): return
    import openai

    @check("ray: OpenAI's client raises the error of a stream that was cut")
    def _():
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        body = long_question("the Last")
        body["extra_body"] = {"ignore_eos": body.pop("ignore_eos")}
        try:
            for number, _ in enumerate(client.chat.completions.create(**body, stream=True)):
                if number != 5: continue
                busy = [process for process, own in children().items() if metric(own, "kiln_num_requests_running")]
                os.kill(busy[0], signal.SIGKILL)
        except openai.APIError as error:
            return f"{type(error).__name__}: {error}"
        raise AssertionError("the client sees no error")


def ray(single):
    if missing("ray", "ray"): return
    # Replicas import the example, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.abspath(RAY), os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, RAY)
    import logging, ray
    from ray import serve
    from ray.cluster_utils import Cluster
    import kiln_on_ray

    port, before = free_port(), set(our_servers())
    size = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=size | {"include_dashboard": False})
    children = lambda: {process: own for process, own in our_servers().items() if process not in before}
    all_run = lambda: (found := children()) if len(children()) == SERVERS and all(map(answers, children().values())) else None
    try:
        others = {cluster.add_node(**size) for _ in range(SERVERS - 1)}
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.WARNING)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(proxy_location="HeadOnly", http_options={"port": port})
        arguments = {"model": MODEL, "kiln": BINARY, "options": " ".join([*OPTIONS, *EXTRA]), "replicas": str(SERVERS)}
        serve.run(kiln_on_ray.app(arguments))

        @check("ray: each node has a server")
        def _():
            nodes = {parent(parent(process)) for process in until("servers run", all_run, START)}
            equal(len(nodes), SERVERS, "nodes with a server")

        spread("ray", port, single, list(children().values()))

        @check("ray: a server that died is replaced, and requests succeed meanwhile")
        def _():
            process = min(children())
            os.kill(process, signal.SIGKILL)
            bodies, end = [question(name) for name in NAMES], time.monotonic() + CLUSTER
            expected = [chat(single, body)[0] for body in bodies]
            while process in children() or not all_run():
                assert time.monotonic() < end, "no server has replaced it"
                equal([chat(port, body)[0] for body in bodies], expected, "answers")

        def lose():
            busy = [process for process, own in children().items() if metric(own, "kiln_num_requests_running")]
            raylets = {node.all_processes["raylet"][0].process.pid: node for node in others}
            # With the node of `Front`, all streams would be lost.
            raylets.pop(parent(front()), None)
            process = next((process for process in busy if parent(parent(process)) in raylets), None)
            assert process, f"no server is busy that can be lost: {len(busy)} of {SERVERS} are busy"
            node = raylets[parent(parent(process))]
            cluster.remove_node(node, allow_graceful=False)
            others.remove(node)
            until("the server of a node that is gone ends", lambda: process not in children(), 40)

        loss("ray", port, single, lose)

        openai_error(port, children)

        @check("ray: a node that joins gets a server")
        def _():
            others.add(cluster.add_node(**size))
            until("there are as many servers as before", all_run, CLUSTER)
            chat(port, question("the Newcomer"))
    finally:
        with contextlib.suppress(Exception): serve.shutdown()
        ray.shutdown()
        cluster.shutdown()

    @check("ray: everything is stopped at the end")
    def _():
        until("the servers end", lambda: not children(), 40)


def main():
    global BINARY, MODEL, EXTRA, LONG
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    parser.add_argument("--only", choices=["kubernetes", "metrics", "vllm-router", "sglang-router", "ray"])
    arguments, EXTRA = parser.parse_known_args()
    BINARY, MODEL = os.path.abspath(arguments.binary), arguments.model
    if os.path.exists(MODEL): MODEL = os.path.abspath(MODEL)
    single = free_port()
    with ended(start(single)) as server:
        until("kiln serve starts", lambda: server.poll() is not None or answers(single), START)
        if server.poll() is not None:
            print("kiln serve does not start", file=sys.stderr)
            sys.exit(2)
        context = json.loads(ask(single, "/props")[2])["context"]
        LONG = min(1000, context - 150)
        parts = {
            "kubernetes": kubernetes,
            "metrics": lambda: metrics(single),
            "vllm-router": lambda: router("vllm-router", "vllm_router.launch_router", single),
            "sglang-router": lambda: router("sglang-router", "sglang_router.launch_router", single),
            "ray": lambda: ray(single),
        }
        for name, part in parts.items():
            if arguments.only not in (None, name): continue
            # Ray writes much when a node is lost; `say` writes to the output of before.
            with tempfile.TemporaryFile("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                try:
                    part()
                except Exception as error:
                    fail(name, error)
    say(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
