"""`kiln serve` on the nodes of a Ray cluster, behind one address.

    serve run kiln_on_ray:app model=/models/model.gguf replicas=3

Two deployments: `Front` receives the HTTP requests, and `Kiln` has a `kiln serve` on each of its nodes. A `Front`
sends requests with the same beginning to the same `Kiln`, which then has the beginning in its cache.
"""
import asyncio
import ctypes
import json
import shlex
import signal
import socket
import subprocess

import aiohttp
import yarl
from ray import serve
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

# Answers that a server computes at once, and those that it has beyond, so that no row is ever idle.
ROWS, SPARE = 16, 4
# Requests that wait for a server, at each `Front`. More are refused with status 429.
QUEUE = 256
# Times that a request is sent while its server has ended, and Ray has not noticed it yet.
TRIES = 8
# Characters of a prompt that decide where it goes. Kiln reuses prompts by 128 or 256 tokens.
BEGINNING = 512
# Seconds in which the answers of a server that is to end may finish.
DRAIN = 30
# Headers that belong to one connection, or that the next client writes itself.
OWN = {"connection", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@serve.deployment(
    max_ongoing_requests=ROWS + SPARE,
    max_queued_requests=QUEUE,
    health_check_period_s=5,
    health_check_timeout_s=10,
    graceful_shutdown_timeout_s=DRAIN + 15,
    # A request whose server is full goes to the next one of the same order, so all of them may be tried.
    request_router_config={"request_router_class": ROUTER, "request_router_kwargs": {"num_fallback_replicas": 1000}},
)
class Kiln:
    """A `kiln serve` on this node. It listens on 127.0.0.1 alone."""

    async def __init__(self, command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [*command, "--host", "127.0.0.1", "--port", str(port), "--drain", str(DRAIN)]
        # Linux ends the server if Ray kills the replica before it can stop the server itself (PR_SET_PDEATHSIG).
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        self.server = subprocess.Popen(command, preexec_fn=prctl and (lambda: prctl(1, signal.SIGTERM)))
        self.client = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            skip_auto_headers=["accept", "accept-encoding", "content-type", "user-agent"],
            timeout=aiohttp.ClientTimeout(total=None),
        )
        while not await self.answers("/ready"):
            self.check_runs()
            await asyncio.sleep(0.2)

    async def answers(self, path):
        try:
            async with self.client.get(self.url + path, timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def check_runs(self):
        if self.server.poll() is not None:
            raise RuntimeError(f"kiln serve has ended with status {self.server.returncode}")

    async def check_health(self):
        self.check_runs()
        if not await self.answers("/health"): raise RuntimeError("kiln serve does not answer /health with status 200")

    async def forward(self, method, path, headers, body):
        """Yields the status and the headers of an answer, then its body as it comes. Yields `None` if nobody answers."""
        if self.server.poll() is not None:
            yield None
            return
        url = yarl.URL(self.url + path, encoded=True)
        async with self.client.request(method, url, headers=headers, data=body, allow_redirects=False) as answer:
            yield answer.status, passed_on(answer.headers)
            async for piece in answer.content.iter_any():
                yield piece

    async def __del__(self):
        # Ray calls this when the last request of the replica has ended.
        if server := getattr(self, "server", None):
            server.send_signal(signal.SIGTERM)
            await asyncio.to_thread(server.wait)
            await self.client.close()


@serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=DRAIN + 15)
class Front:
    """Finds the server of each request, and passes the answer on."""

    def __init__(self, kiln: DeploymentHandle):
        self.kiln = kiln.options(method_name="forward", stream=True)

    async def __call__(self, request: Request):
        body = await request.body()
        # As the client wrote it: `/v1/models/ORG%2FNAME` is one name.
        path = request.scope.get("raw_path", b"").decode() or request.url.path
        if request.url.query: path += f"?{request.url.query}"
        beginning, first = session(request.headers, body), None
        try:
            for attempt in range(TRIES):
                # Another session is most likely that of another server.
                kiln = self.kiln.options(session_id=beginning and f"{beginning}{attempt or ''}")
                pieces = kiln.remote(request.method, path, passed_on(request.headers), body)
                if first := await anext(pieces): break
        except BackPressureError:
            return refusal(429, "all servers are busy, and too many requests wait; come again later")
        except Exception:
            # The request may be why the server has ended, so no other one is tried.
            return refusal(503, "the server of this request has ended; send the request again")
        if not first: return refusal(503, "no server runs; come again later")
        status, headers = first
        return StreamingResponse(stream(pieces, headers), status, headers)


async def stream(pieces, headers):
    """Yields the body. If the server is lost meanwhile, the client gets an error, not an answer that seems whole."""
    try:
        async for piece in pieces:
            yield piece
    except Exception:
        message = "the server of this answer has ended before the answer"
        kind = headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            # This form is that of Anthropic's API, and clients of OpenAI's API find the error in it, too.
            error = {"type": "error", "error": {"type": "api_error", "message": message}}
            yield f"\n\nevent: error\ndata: {json.dumps(error)}\n\n".encode()
        elif kind.startswith("application/x-ndjson"):
            yield f'\n{json.dumps({"error": message})}\n'.encode()
        else:
            raise


def refusal(status, message):
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, {"retry-after": "1"})


def passed_on(headers):
    return {name.lower(): value for name, value in headers.items() if name.lower() not in OWN}


def session(headers, body):
    """What requests to the same server have in common, or "" if any server will do.

    That is the header `x-session-id`, or else the key and the beginning of the prompt, up to the first message of
    the user: the next turn of a chat then goes where the last one went.
    """
    if given := headers.get("x-session-id"): return given
    try:
        fields = json.loads(body)
        prompt = fields.get("messages") or fields.get("input") or fields.get("prompt")
        if not prompt: return ""
        if isinstance(prompt, list):
            users = [at for at, part in enumerate(prompt) if isinstance(part, dict) and part.get("role") == "user"]
            prompt = prompt[: users[0] + 1] if users else prompt
    except (AttributeError, ValueError):
        return ""
    key = [headers.get("authorization"), headers.get("x-api-key"), fields.get("cache_salt"), fields.get("model")]
    before = [fields.get(name) for name in ("system", "instructions", "tools")]
    return json.dumps(key) + json.dumps([*(part for part in before if part), prompt])[:BEGINNING]


def app(arguments: dict):
    """The application. Arguments are `name=value` of `serve run`, or `args` of a config file:

    - `model`: what `kiln serve --model` takes; the same path on each node
    - `kiln` ("kiln"): the program, on each node
    - `options` (""): further options of `kiln serve`, in one string
    - `replicas` (1): servers; or `min_replicas` and `max_replicas`, to follow the load
    - `cpus` (1), `gpus` (0): what a server takes of its node; `--threads` is `cpus`
    - `fronts` (1): processes that receive requests
    """
    known = {"model", "kiln", "options", "replicas", "min_replicas", "max_replicas", "cpus", "gpus", "fronts"}
    if unknown := set(arguments) - known: raise ValueError(f"unknown arguments: {', '.join(sorted(unknown))}")
    if "model" not in arguments: raise ValueError("the argument `model` is missing")
    cpus = int(arguments.get("cpus", 1))
    command = [arguments.get("kiln", "kiln"), "serve", "--model", arguments["model"], "--rows", str(ROWS)]
    command += ["--threads", str(cpus), *shlex.split(arguments.get("options", ""))]
    options = {"ray_actor_options": {"num_cpus": cpus, "num_gpus": float(arguments.get("gpus", 0))}}
    if "max_replicas" in arguments:
        options["num_replicas"] = None
        options["autoscaling_config"] = {
            "min_replicas": int(arguments.get("min_replicas", 1)),
            "max_replicas": int(arguments["max_replicas"]),
            # Below the limit of a server, which is full when another one is ready.
            "target_ongoing_requests": ROWS * 3 // 4,
            "upscale_delay_s": 10,
            # The cache of a server that ends is lost.
            "downscale_delay_s": 600,
        }
    else:
        options["num_replicas"] = int(arguments.get("replicas", 1))
    kiln = Kiln.options(**options).bind(command)
    return Front.options(num_replicas=int(arguments.get("fronts", 1))).bind(kiln)
