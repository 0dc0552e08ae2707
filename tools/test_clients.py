#!/usr/bin/env python3
"""Test `kiln serve` with client libraries that others wrote.

    pip install openai==2.54.0 litellm==1.110.2 langchain-openai==1.4.3 \\
        llama-index-llms-openai-like==0.8.1 instructor==1.17.0 'pydantic-ai-slim[openai]==2.31.1' \\
        prometheus-client==0.26.0
    python tools/test_clients.py KILN_BINARY MODEL [ARGUMENT OF kiln serve..]

The newest openai cannot be installed beside langchain-openai, llama-index and instructor. It is tested in
another environment:

    pip install openai==3.57.0 litellm==1.110.2 'pydantic-ai-slim[openai]==2.31.1' \\
        prometheus-client==0.26.0

The clients that can be imported are tested, one after another, with their defaults: a field that a client
sends by itself and the server refuses is a failure. MODEL is one to chat with; the checks of a full queue
need a context of 4096 tokens or more. Embeddings are those of the demo model. Prints a line per check. Exit
status 1 if one fails, 2 for bad input.
"""
import argparse
import array
import asyncio
import base64
import contextlib
import http.client
import json
import importlib.metadata
import importlib.util
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from typing import Literal

KEY = "right-key"
DEMO = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../assets/demo")
START = "The capital of France is"
CAPITAL = "What is the capital of France?"
QUESTION = [{"role": "user", "content": CAPITAL}]
# Tokens that a structured answer fits in, with much space between its fields, as small models write it.
LONG = 240
# Answers that are computed at once, and that wait.
ROWS, QUEUE = 2, 2
# Settings that are wrong, the name of the exception and the status.
WRONG = {
    "a wrong key": ({"key": "wrong-key"}, "AuthenticationError", 401),
    "an unknown model": ({"model": "unknown"}, "NotFoundError", 404),
    "a bad temperature": ({"temperature": 3.0}, "BadRequestError", 400),
}

# Clients ask nobody else: not a proxy, nor GitHub for the prices of models.
os.environ |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

passed = failed = 0


def record(client, what, function):
    """Calls a function, and prints whether it passes."""
    global passed
    try:
        result = function()
        if asyncio.iscoroutine(result): asyncio.run(result)
    except Exception as error:
        fail(client, what, error)
    else:
        passed += 1
        print(f"ok {client}: {what}", flush=True)


def fail(client, what, error):
    global failed
    failed += 1
    why = " ".join(f"{type(error).__name__}: {error}".split())
    print(f"FAILED {client}: {what}: {why[:600]}", flush=True)


def check(client, what):
    """Calls the decorated function at once, and prints whether it passes."""
    return lambda function: record(client, what, function)


def equal(found, expected, what):
    assert found == expected, f"{what}: {found!r}, expected {expected!r}"


def until(what, holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what}: did not happen within {seconds} s"
        time.sleep(0.05)


def raised(kind, function):
    """The exception of this kind that a function raises, or that it raises another one from."""
    try:
        found = function()
    except Exception as error:
        chain = error
        while chain is not None:
            if isinstance(chain, kind): return chain
            chain = chain.__cause__ or chain.__context__
        raise AssertionError(f"raised {type(error).__name__}, not {kind.__name__}: {error}") from error
    raise AssertionError(f"no {kind.__name__}, but {found!r}"[:300])


class Server:
    """A server of one model, which needs a key."""

    def __init__(self, binary, model, arguments):
        with tempfile.NamedTemporaryFile("w", suffix=".keys", delete=False) as keys:
            keys.write(KEY + "\n")
        command = [binary, "serve", "--model", model, "--port", "0", "--api-keys", keys.name]
        command += ["--rows", str(ROWS), "--queue", str(QUEUE), *arguments]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.child = subprocess.Popen(command, env=os.environ | {"KILN_API_KEYS": ""}, **output)
        said = ""
        for line in self.child.stdout:
            said += line
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line): break
        else:
            raise SystemExit(f"test_clients: the server ended: {said}")
        # Without a reader, a full pipe would keep the server.
        threading.Thread(target=self.child.stdout.read, daemon=True).start()
        os.unlink(keys.name)
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}/v1"
        card = json.loads(self.get("/v1/models"))["data"][0]
        self.model, self.context = card["id"], card["max_model_len"]

    def end(self):
        self.child.kill()
        self.child.wait()

    def request(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        connection.request(method, path, json.dumps(body) if body else None, headers)
        answer = connection.getresponse()
        assert answer.status == 200, f"{path}: {answer.status} {answer.read().decode()}"
        return connection, answer

    def get(self, path):
        return self.request("GET", path)[1].read().decode()

    def running(self):
        return json.loads(self.get("/health"))["running"]

    @contextlib.contextmanager
    def full(self):
        """Fills all places with long answers. Yields the function that ends them."""
        body = {"model": self.model, "prompt": "Once", "max_tokens": self.context - 16}
        body |= {"ignore_eos": True, "stream": True}
        places = [self.request("POST", "/v1/completions", body) for _ in range(ROWS + QUEUE)]

        def end():
            for connection, answer in places:
                answer.close()
                connection.close()

        try:
            until("the queue is full", lambda: self.running() == len(places))
            yield end
        finally:
            end()
            until("the answers end", lambda: self.running() == 0)


def test_errors(client, library, server, ask):
    """Tests the exceptions of a client. `ask(key=, model=, temperature=)` chats without a further attempt."""
    for what, (settings, kind, status) in WRONG.items():

        @check(client, f"{what}: {getattr(library, kind).__name__}")
        def _():
            error = raised(getattr(library, kind), lambda: ask(**settings))
            equal(error.status_code, status, "status")
            word = {401: "key", 404: "unknown", 400: "temperature"}[status]
            assert word in str(error), f"the message does not say `{word}`: {error}"

    if server.context < 4096:
        print(f"NOT CHECKED: {client}: a full queue: the model's answers are too short", flush=True)
        return

    @check(client, f"a full queue: {library.RateLimitError.__name__}")
    def _():
        with server.full():
            error = raised(library.RateLimitError, ask)
        equal(error.status_code, 429, "status")


def place():
    """A class of answers that are structured."""
    from pydantic import BaseModel

    class Place(BaseModel):
        """A city."""

        name: Literal["Paris", "London"]
        is_capital: bool
        size: Literal["small", "large"]

    return Place


def test_openai(server):
    import openai

    name = "openai"
    settings = {"base_url": server.url, "max_retries": 0, "timeout": 120}
    client = openai.OpenAI(api_key=KEY, **settings)

    def chat(**more):
        given = {"model": server.model, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
        return client.chat.completions.create(**given | more)

    def complete(**more):
        given = {"model": server.model, "prompt": START, "max_tokens": 8, "temperature": 0}
        return client.completions.create(**given | more)

    @check(name, "the list of models, and one of them")
    def _():
        equal([model.id for model in client.models.list()], [server.model], "models")
        equal(client.models.retrieve(server.model).id, server.model, "model")
        raised(openai.NotFoundError, lambda: client.models.retrieve("unknown"))

    @check(name, "a chat, and its usage")
    def _():
        answer = chat()
        message, usage = answer.choices[0].message, answer.usage
        assert message.role == "assistant" and message.content, repr(message)
        assert answer.choices[0].finish_reason in ("stop", "length"), answer.choices[0].finish_reason
        assert usage.prompt_tokens > 0 and 0 < usage.completion_tokens <= 8, repr(usage)
        equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens, "total")

    @check(name, "a chat with the client's defaults")
    def _():
        chunks = client.chat.completions.create(model=server.model, messages=QUESTION, stream=True)
        with chunks: assert any(chunk.choices[0].delta.content for chunk in chunks)

    @check(name, "a streamed chat has the same text, a reason of its end, and no usage")
    def _():
        chunks = list(chat(stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        equal(text, chat().choices[0].message.content, "text")
        equal(chunks[0].choices[0].delta.role, "assistant", "role")
        reasons = [chunk.choices[0].finish_reason for chunk in chunks]
        assert reasons[-1] and not any(reasons[:-1]), repr(reasons)
        assert not any(chunk.usage for chunk in chunks)

    @check(name, "a streamed chat with include_usage")
    def _():
        *chunks, last = chat(stream=True, stream_options={"include_usage": True})
        equal(last.choices, [], "choices of the last chunk")
        equal(last.usage.completion_tokens, chat().usage.completion_tokens, "tokens")
        assert not any(chunk.usage for chunk in chunks)

    @check(name, "log-probabilities of a chat")
    def _():
        tokens = chat(logprobs=True, top_logprobs=4).choices[0].logprobs.content
        assert tokens and all(len(token.top_logprobs) == 4 for token in tokens), repr(tokens)
        for token in tokens:
            best = [other.logprob for other in token.top_logprobs]
            assert best == sorted(best, reverse=True) and sum(map(math.exp, best)) < 1.001, repr(best)
            equal((token.token, token.logprob), (token.top_logprobs[0].token, best[0]), "the likeliest token")

    @check(name, "completions with log-probabilities")
    def _():
        choice = complete(logprobs=3).choices[0]
        found = choice.logprobs
        equal("".join(found.tokens), choice.text, "tokens")
        sizes = [len(each) for each in (found.token_logprobs, found.top_logprobs, found.text_offset)]
        equal(sizes, [len(found.tokens)] * 3, "sizes")
        assert all(len(top) >= 3 for top in found.top_logprobs), repr(found.top_logprobs)

    @check(name, "a streamed completion, and completions of two prompts")
    def _():
        alone = complete().choices[0].text
        equal("".join(chunk.choices[0].text for chunk in complete(stream=True)), alone, "text")
        equal([choice.text for choice in complete(prompt=[START] * 2).choices], [alone] * 2, "texts")

    @check(name, "n=2: choices with the seed, and the next one")
    def _():
        both = chat(n=2, seed=7, temperature=1)
        alone = [chat(seed=seed, temperature=1).choices[0].message.content for seed in (7, 8)]
        equal([choice.index for choice in both.choices], [0, 1], "indices")
        equal([choice.message.content for choice in both.choices], alone, "texts")

    @check(name, "a seed repeats an answer")
    def _():
        equal(*(chat(seed=5, temperature=1).choices[0].message.content for _ in range(2)), "text")

    @check(name, "json_object")
    def _():
        choice = chat(response_format={"type": "json_object"}, max_tokens=LONG).choices[0]
        # A small model may not come to an end.
        if choice.finish_reason == "stop": assert isinstance(json.loads(choice.message.content), dict)

    long = {"model": server.model, "messages": QUESTION, "max_tokens": LONG, "temperature": 0}

    @check(name, "json_schema: parse")
    def _():
        answer = client.chat.completions.parse(response_format=place(), **long)
        assert answer.choices[0].message.parsed.name in ("Paris", "London")

    @check(name, "json_schema: streamed")
    def _():
        with client.chat.completions.stream(response_format=place(), **long) as events:
            kinds = {event.type for event in events}
            assert "content.delta" in kinds and "content.done" in kinds, repr(kinds)
            assert events.get_final_completion().choices[0].message.parsed.size in ("small", "large")

    @check(name, "a tool that must be called is called, and its result is read")
    def _():
        city = {"type": "string", "enum": ["Rome", "Verona"]}
        parameters = {
            "type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False,
        }
        function = {"name": "weather", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = chat(tools=tools, tool_choice=choice, max_tokens=60).choices[0]
            equal(answer.finish_reason, "tool_calls", "finish_reason")
            call = answer.message.tool_calls[0]
            equal(call.function.name, "weather", "name")
            assert json.loads(call.function.arguments)["city"] in city["enum"], call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
        question = {"role": "user", "content": "Does it rain in Rome?"}
        answer = chat(messages=[question, answer.message.model_dump(exclude_none=True), result], tools=tools)
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls"), answer

    @check(name, "errors have a type, a code and a field")
    def _():
        error = raised(openai.BadRequestError, lambda: chat(temperature=3))
        equal((error.type, error.param), ("invalid_request_error", "temperature"), "error")
        error = raised(openai.NotFoundError, lambda: chat(model="unknown"))
        equal((error.code, error.param), ("model_not_found", "model"), "error")

    @check(name, "a stream that is closed early ends its answer")
    def _():
        chunks = chat(stream=True, max_tokens=server.context // 2, extra_body={"ignore_eos": True})
        next(iter(chunks))
        chunks.close()
        until("no answer runs", lambda: server.running() == 0, 10)

    @check(name, "the asynchronous client: two chats at once, one of them streamed")
    async def _():
        given = {"model": server.model, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
        async with openai.AsyncOpenAI(api_key=KEY, **settings) as own:

            async def streamed():
                chunks = await own.chat.completions.create(stream=True, **given)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            whole, text = await asyncio.gather(own.chat.completions.create(**given), streamed())
        equal(text, whole.choices[0].message.content, "text")

    def ask(key=KEY, model=server.model, temperature=0.0):
        given = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": temperature}
        return client.with_options(api_key=key).chat.completions.create(**given)

    test_errors(name, openai, server, ask)
    if server.context < 4096: return
    short = {"model": server.model, "messages": QUESTION, "max_tokens": 8}

    @check(name, "a full queue: Retry-After is waited for")
    def _():
        with server.full():
            begun = time.monotonic()
            own = client.with_options(max_retries=1)
            error = raised(openai.RateLimitError, lambda: own.chat.completions.create(**short))
            seconds = time.monotonic() - begun
        after = int(error.response.headers["retry-after"])
        # By itself, the client would wait for half a second.
        assert seconds >= after >= 1, f"Retry-After is {after}, the client waited for {seconds:.2f} s"

    @check(name, "a full queue: another attempt succeeds once it has room")
    def _():
        with server.full() as end:
            threading.Timer(0.5, end).start()
            own = client.with_options(max_retries=4)
            assert own.chat.completions.create(**short).choices[0].message.content


def test_openai_embeddings(server):
    import openai

    client = openai.OpenAI(api_key=KEY, base_url=server.url, max_retries=0)
    texts = ["What news?", "My lord, the king is dead."]

    @check("openai", "embeddings: base64, which is the default, and float")
    def _():
        default = client.embeddings.create(model=server.model, input=texts)
        floats = client.embeddings.create(model=server.model, input=texts, encoding_format="float")
        coded = client.embeddings.create(model=server.model, input=texts, encoding_format="base64")
        vectors = [item.embedding for item in floats.data]
        decoded = [list(array.array("f", base64.b64decode(item.embedding))) for item in coded.data]
        equal((len(vectors), vectors[0] == vectors[1]), (2, False), "vectors")
        for others in ([item.embedding for item in default.data], decoded):
            equal([len(other) for other in others], [len(one) for one in vectors], "sizes")
            pairs = [pair for one, other in zip(vectors, others) for pair in zip(one, other)]
            assert all(math.isclose(*pair, abs_tol=1e-6) for pair in pairs), "vectors differ"
        assert default.usage.prompt_tokens == default.usage.total_tokens > 0, repr(default.usage)

    @check("openai", "embeddings: a text that is too long: BadRequestError")
    def _():
        ask = lambda: client.embeddings.create(model=server.model, input="news " * 2000)
        raised(openai.BadRequestError, ask)


def test_litellm(server):
    import litellm

    name = "litellm"
    litellm.suppress_debug_info = True
    address = {"api_base": server.url, "api_key": KEY}

    def chat(key=KEY, model=server.model, temperature=0.0, max_tokens=8, **more):
        given = {"api_base": server.url, "api_key": key, "messages": QUESTION, "max_retries": 0}
        given |= {"temperature": temperature, "max_tokens": max_tokens}
        return litellm.completion(model=f"openai/{model}", **given, **more)

    @check(name, "a chat, and its usage")
    def _():
        answer = chat()
        assert answer.choices[0].message.content and answer.usage.completion_tokens > 0, repr(answer)

    @check(name, "a streamed chat, with usage")
    def _():
        chunks = list(chat(stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        equal(text, chat().choices[0].message.content, "text")
        assert chunks[-1].usage.completion_tokens > 0, repr(chunks[-1])

    @check(name, "json_schema")
    def _():
        answer = chat(response_format=place(), max_tokens=LONG)
        place().model_validate_json(answer.choices[0].message.content)

    @check(name, "a completion")
    def _():
        given = {"prompt": START, "max_tokens": 8} | address
        answer = litellm.text_completion(model=f"text-completion-openai/{server.model}", **given)
        assert answer.choices[0].text, repr(answer)

    @check(name, "the asynchronous client")
    async def _():
        given = {"messages": QUESTION, "max_tokens": 8} | address
        answer = await litellm.acompletion(model=f"openai/{server.model}", **given)
        assert answer.choices[0].message.content, repr(answer)

    test_errors(name, litellm, server, chat)


def test_litellm_embeddings(server):
    import litellm

    @check("litellm", "embeddings")
    def _():
        given = {"input": ["What news?"], "api_base": server.url, "api_key": KEY}
        answer = litellm.embedding(model=f"openai/{server.model}", **given)
        assert len(answer.data[0]["embedding"]) > 1, repr(answer)


def test_langchain(server):
    import openai
    from langchain_openai import ChatOpenAI, OpenAI

    name = "langchain-openai"

    def chat(key=KEY, model=server.model, temperature=0.0, max_tokens=8, **more):
        given = {"base_url": server.url, "api_key": key, "model": model, "max_retries": 0}
        return ChatOpenAI(temperature=temperature, max_tokens=max_tokens, **given, **more)

    @check(name, "a chat, and its usage")
    def _():
        answer = chat().invoke("What news?")
        assert answer.content and answer.usage_metadata["output_tokens"] > 0, repr(answer)

    @check(name, "a streamed chat, with usage")
    def _():
        chunks = list(chat(stream_usage=True).stream("What news?"))
        equal("".join(chunk.content for chunk in chunks), chat().invoke("What news?").content, "text")
        assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0, repr(chunks)

    @check(name, "json_schema: with_structured_output")
    def _():
        assert chat(max_tokens=LONG).with_structured_output(place()).invoke(CAPITAL).name

    @check(name, "log-probabilities")
    def _():
        answer = chat(logprobs=True, top_logprobs=2).invoke("What news?")
        assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2, repr(answer)

    @check(name, "a completion")
    def _():
        own = OpenAI(base_url=server.url, api_key=KEY, model=server.model, max_tokens=8)
        assert own.invoke(START)

    @check(name, "the asynchronous client")
    async def _():
        assert (await chat().ainvoke("What news?")).content

    test_errors(name, openai, server, lambda **settings: chat(**settings).invoke("What news?"))


def test_langchain_embeddings(server):
    from langchain_openai import OpenAIEmbeddings

    @check("langchain-openai", "embeddings")
    def _():
        # By default, the texts would be sent as the tokens of OpenAI's own models.
        given = {"base_url": server.url, "api_key": KEY, "model": server.model}
        client = OpenAIEmbeddings(check_embedding_ctx_length=False, **given)
        equal(len(client.embed_documents(["What news?", "My lord!"])), 2, "vectors")


def test_llama_index(server):
    import openai
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    name = "llama-index-llms-openai-like"
    question = [ChatMessage(role="user", content=CAPITAL)]

    def client(key=KEY, model=server.model, temperature=0.0, max_tokens=8, **more):
        given = {"api_base": server.url, "api_key": key, "model": model, "max_retries": 0}
        given |= {"temperature": temperature, "max_tokens": max_tokens, "is_chat_model": True}
        return OpenAILike(**given | more)

    @check(name, "a chat, and its usage")
    def _():
        answer = client().chat(question)
        assert answer.message.content and answer.raw.usage.completion_tokens > 0, repr(answer)

    @check(name, "a streamed chat")
    def _():
        text = "".join(chunk.delta or "" for chunk in client().stream_chat(question))
        equal(text, client().chat(question).message.content, "text")

    @check(name, "a completion, and a streamed one")
    def _():
        own = client(is_chat_model=False)
        equal("".join(chunk.delta for chunk in own.stream_complete(START)), own.complete(START).text, "text")

    @check(name, "json_schema: as_structured_llm")
    def _():
        own = client(should_use_structured_outputs=True, max_tokens=LONG)
        assert own.as_structured_llm(place()).chat(question).raw.name

    @check(name, "the asynchronous client")
    async def _():
        assert (await client().achat(question)).message.content

    def ask(temperature=0.0, **settings):
        # The client checks its own temperature.
        return client(additional_kwargs={"temperature": temperature}, **settings).chat(question)

    test_errors(name, openai, server, ask)


def test_instructor(server):
    import instructor, logging, openai

    # It prints each exception that it raises.
    logging.getLogger("instructor").setLevel(logging.CRITICAL)
    name = "instructor"

    def ask(key=KEY, model=server.model, temperature=0.0, client=openai.OpenAI, **more):
        own = client(api_key=key, base_url=server.url, max_retries=0)
        own = instructor.from_openai(own, mode=instructor.Mode.JSON_SCHEMA)
        given = {"response_model": place(), "messages": QUESTION, "max_tokens": LONG, "max_retries": 1}
        return own, given | {"model": model, "temperature": temperature} | more

    def create(**settings):
        own, given = ask(**settings)
        return own.create(**given)

    @check(name, "json_schema, and its usage")
    def _():
        own, given = ask()
        found, answer = own.create_with_completion(**given)
        assert found.name in ("Paris", "London") and answer.usage.completion_tokens > 0, repr(answer)

    @check(name, "json_schema: streamed")
    def _():
        own, given = ask()
        *_, last = own.create_partial(**given)
        assert last.size in ("small", "large"), repr(last)

    @check(name, "a chat")
    def _():
        assert create(response_model=None).choices[0].message.content

    @check(name, "the asynchronous client")
    async def _():
        own, given = ask(client=openai.AsyncOpenAI)
        async with own.client: assert (await own.create(**given)).name

    test_errors(name, openai, server, create)


def test_pydantic_ai(server):
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider
    import openai

    name = "pydantic-ai"

    @contextlib.asynccontextmanager
    async def agent(key=KEY, model=server.model, temperature=0.0, max_tokens=8, **more):
        async with openai.AsyncOpenAI(api_key=key, base_url=server.url, max_retries=0) as client:
            own = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=client))
            yield Agent(own, model_settings={"temperature": temperature, "max_tokens": max_tokens}, **more)

    @check(name, "a chat, and its usage")
    async def _():
        async with agent() as own: result = await own.run("What news?")
        assert result.output and result.usage.output_tokens > 0, repr(result)

    @check(name, "a streamed chat, with usage")
    async def _():
        async with agent() as own:
            async with own.run_stream("What news?") as result:
                text = "".join([piece async for piece in result.stream_text(delta=True)])
            equal(text, (await own.run("What news?")).output, "text")
        assert result.usage.output_tokens > 0, repr(result.usage)

    @check(name, "json_schema: NativeOutput")
    async def _():
        async with agent(max_tokens=LONG, output_type=NativeOutput(place())) as own:
            assert (await own.run(CAPITAL)).output.name

    # One exception for all statuses.
    names = [kind for _, kind, _ in WRONG.values()] + ["RateLimitError"]
    library = types.SimpleNamespace(**dict.fromkeys(names, ModelHTTPError))

    async def ask(**settings):
        async with agent(**settings) as own: return await own.run("What news?")

    test_errors(name, library, server, lambda **settings: asyncio.run(ask(**settings)))


def test_prometheus(server):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    @check("prometheus-client", "OpenMetrics, with the names that llm-d reads")
    def _():
        found = {metric.name: metric for metric in text_string_to_metric_families(server.get("/metrics"))}
        for end in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            for start in ("vllm:", "kiln_"):
                samples = found[start + end].samples
                equal((found[start + end].type, len(samples)), ("gauge", 1), start + end)
                equal((samples[0].labels, samples[0].value), ({"model_name": server.model}, 0.0), start + end)
        generated = found["vllm:generation_tokens"].samples[0]
        equal((generated.name, generated.value > 0), ("vllm:generation_tokens_total", True), "counter")


# The package, its module, and its tests with a model to chat with and with one of embeddings.
CLIENTS = [
    ("openai", "openai", test_openai, test_openai_embeddings),
    ("litellm", "litellm", test_litellm, test_litellm_embeddings),
    ("langchain-openai", "langchain_openai", test_langchain, test_langchain_embeddings),
    ("llama-index-llms-openai-like", "llama_index.llms.openai_like", test_llama_index, None),
    ("instructor", "instructor", test_instructor, None),
    ("pydantic-ai-slim", "pydantic_ai", test_pydantic_ai, None),
    ("prometheus-client", "prometheus_client", test_prometheus, None),
]


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    ap.add_argument("binary", metavar="KILN_BINARY")
    ap.add_argument("model", metavar="MODEL")
    ap.add_argument("arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="arguments of kiln serve")
    args = ap.parse_args()
    for path in (args.binary, args.model):
        if not os.path.exists(path):
            print(f"test_clients: error: {path} does not exist", file=sys.stderr)
            sys.exit(2)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    installed = [client for client in CLIENTS if is_installed(client[1])]
    for client in CLIENTS:
        if client in installed: print(f"# {client[0]} {importlib.metadata.version(client[0])}")
        else: print(f"NOT CHECKED: {client[0]} is not installed")
    for tests, model, more in ((2, args.model, []), (3, DEMO, ["--pooling", "mean"])):
        if not any(client[tests] for client in installed): continue
        server = Server(args.binary, model, [*args.arguments, *more])
        try:
            for client in installed:
                try:
                    if client[tests]: client[tests](server)
                except Exception as error:
                    # Checks record their own failures. This is one between them, such as of an import.
                    fail(client[0], "the client can be used", error)
        finally:
            server.end()
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
