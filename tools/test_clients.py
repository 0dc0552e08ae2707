#!/usr/bin/env python3
"""Test `kiln serve` with client libraries that others wrote.

    pip install openai==2.54.0 litellm==1.110.2 langchain-openai==1.4.3 \\
        llama-index-llms-openai-like==0.8.1 instructor==1.17.0 'pydantic-ai-slim[openai]==2.31.1' \\
        prometheus-client==0.26.0
    python tools/test_clients.py KILN_BINARY MODEL [ARGUMENT OF kiln serve..]

The newest openai cannot be installed beside langchain-openai, llama-index and instructor. It is tested in
another environment, with the clients of other APIs:

    pip install openai==3.57.0 litellm==1.110.2 'pydantic-ai-slim[openai]==2.31.1' \\
        prometheus-client==0.26.0 anthropic==2.13.0 ollama==0.6.3 openai-agents==0.24.0

The clients that can be imported are tested, one after another, with their defaults: a field that a client
sends by itself and the server refuses is a failure. MODEL is one to chat with; the checks of a full queue
need a context of 4096 tokens or more. Embeddings are those of the demo model, which is also the second one
of a server with several models. Clients in JavaScript have a program of their own, `test_clients.mjs`.
Prints a line per check. Exit status 1 if one fails, 2 for bad input.
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
# A question with a long answer, and one with a short.
COUNT = "Count from 1 to 1000, with all numbers in between."
COUNTING = [{"role": "user", "content": "Count from 1 to 9. Write only the numbers."}]
# Tokens that a structured answer fits in, with much space between its fields, as small models write it.
LONG = 240
# The beginning of a prompt that is kept for the next one: some 500 tokens.
STORY = "The river flows past the old mill and the small white church. " * 40
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
# Keys and addresses of the user's own are not for this server.
for variable in [name for name in os.environ if name.startswith(("ANTHROPIC_", "OLLAMA_", "OPENAI_"))]:
    del os.environ[variable]

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
    """A server, which needs a key. The first model is the one to ask."""

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
        self.root = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.root}/v1"
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

    def loaded(self):
        return [model["name"] for model in json.loads(self.get("/api/ps"))["models"]]

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


def test_retries(client, library, server, ask):
    """Tests that a client comes again when the server says. `ask(max_retries=)` chats."""
    if server.context < 4096: return

    @check(client, "a full queue: Retry-After is waited for")
    def _():
        with server.full():
            begun = time.monotonic()
            error = raised(library.RateLimitError, lambda: ask(max_retries=1))
            seconds = time.monotonic() - begun
        after = int(error.response.headers["retry-after"])
        # By itself, the client would wait for half a second.
        assert seconds >= after >= 1, f"Retry-After is {after}, the client waited for {seconds:.2f} s"

    @check(client, "a full queue: another attempt succeeds once it has room")
    def _():
        with server.full() as end:
            threading.Timer(0.5, end).start()
            assert ask(max_retries=4)


def test_close(client, server, stream):
    """Tests that an answer ends with its client. `stream(tokens)` begins a long one."""

    @check(client, "a stream that is closed early ends its answer")
    def _():
        answer = stream(server.context // 2)
        next(iter(answer))
        answer.close()
        until("no answer runs", lambda: server.running() == 0, 10)


def weather(name):
    """The schema of a tool's arguments under the name that an API has for it."""
    city = {"type": "string", "enum": ["Rome", "Verona"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    tool = {"name": "weather", "description": "Tells the weather in a city."}
    return tool | {name: schema | {"additionalProperties": False}}


def one_exception(kind):
    """A library that has the same exception for all statuses."""
    names = [name for _, name, _ in WRONG.values()] + ["RateLimitError"]
    return types.SimpleNamespace(**dict.fromkeys(names, kind))


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
        tools = [{"type": "function", "function": weather("parameters")}]
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            answer = chat(tools=tools, tool_choice=choice, max_tokens=60).choices[0]
            equal(answer.finish_reason, "tool_calls", "finish_reason")
            call = answer.message.tool_calls[0]
            equal(call.function.name, "weather", "name")
            assert json.loads(call.function.arguments)["city"] in ("Rome", "Verona"), call.function.arguments
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

    own = {"stream": True, "extra_body": {"ignore_eos": True}}
    test_close(name, server, lambda tokens: chat(max_tokens=tokens, **own))

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

    def attempt(max_retries):
        own = client.with_options(max_retries=max_retries)
        answer = own.chat.completions.create(model=server.model, messages=QUESTION, max_tokens=8)
        return answer.choices[0].message.content

    test_retries(name, openai, server, attempt)
    test_responses(server, client, settings)


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


def test_responses(server, client, settings):
    """Tests the Responses API of openai."""
    import openai

    name = "openai responses"
    tool = {"type": "function", "strict": False} | weather("parameters")
    rain = "Does it rain in Rome?"

    def create(**more):
        given = {"model": server.model, "input": CAPITAL, "max_output_tokens": 8, "temperature": 0}
        return client.responses.create(**given | more)

    @check(name, "a response, its text and its usage")
    def _():
        answer = create()
        assert answer.output_text and answer.output_text == answer.output[0].content[0].text, repr(answer)
        usage = answer.usage
        assert usage.input_tokens > 0 and 0 < usage.output_tokens <= 8, repr(usage)
        equal(usage.total_tokens, usage.input_tokens + usage.output_tokens, "total")
        equal(answer.output_text, chat_text(client, server), "the text of a chat")

    @check(name, "a response with the client's defaults")
    def _():
        answer = client.responses.create(model=server.model, input=CAPITAL)
        equal((answer.status, answer.store, answer.error), ("completed", True, None), "status")
        assert answer.output_text, repr(answer)

    @check(name, "all that the client's types have is there")
    def _():
        own = openai.OpenAI(api_key=KEY, _strict_response_validation=True, **settings)
        given = {"model": server.model, "input": CAPITAL, "max_output_tokens": 8}
        tools = {"tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
        for more in ({}, tools):
            assert own.responses.create(**given | more).output
            with own.responses.create(stream=True, **given | more) as events: assert list(events)
        answer = own.responses.create(**given)
        own.responses.retrieve(answer.id)
        own.responses.delete(answer.id)

    @check(name, "instructions, and messages of parts")
    def _():
        part = {"type": "input_text", "text": CAPITAL}
        messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [part]}]
        text = create(instructions="Be brief.").output_text
        equal(create(input=messages).output_text, text, "text")
        # Qwen's template has instructions of its own if there are none.
        assert create(instructions="Be brief.").usage.input_tokens != create().usage.input_tokens

    @check(name, "a stream has the same text, and each event its number")
    def _():
        events = list(create(stream=True, max_output_tokens=LONG))
        equal([event.sequence_number for event in events], list(range(len(events))), "numbers")
        kinds = [event.type.removeprefix("response.") for event in events]
        begin = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
        equal(kinds[:5], begin, "the first events")
        end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
        equal(kinds[-4:], end, "the last events")
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        equal(text, events[-1].response.output_text, "text")
        equal(text, create(max_output_tokens=LONG).output_text, "text")

    @check(name, "a response that is cut off says so, also in a stream")
    def _():
        *_, last = create(stream=True, max_output_tokens=2)
        equal(last.type, "response.incomplete", "type")
        expected = "incomplete", "max_output_tokens"
        for answer in (last.response, create(max_output_tokens=2)):
            equal((answer.status, answer.incomplete_details.reason), expected, "end")

    @check(name, "json_schema: parse")
    def _():
        answer = client.responses.parse(
            model=server.model, input=CAPITAL, text_format=place(), max_output_tokens=LONG, temperature=0
        )
        assert answer.output_parsed.name in ("Paris", "London"), repr(answer)

    @check(name, "json_schema: streamed")
    def _():
        given = {"model": server.model, "input": CAPITAL, "max_output_tokens": LONG, "temperature": 0}
        with client.responses.stream(text_format=place(), **given) as events:
            assert "response.output_text.delta" in {event.type for event in events}
            assert events.get_final_response().output_parsed.size in ("small", "large")

    @check(name, "json_object")
    def _():
        answer = create(text={"format": {"type": "json_object"}}, max_output_tokens=LONG)
        # A small model may not come to an end.
        if answer.status == "completed": assert isinstance(json.loads(answer.output_text), dict)

    @check(name, "a function that must be called is called, and its output is read")
    def _():
        for choice in ("required", {"type": "function", "name": "weather"}):
            answer = create(input=rain, tools=[tool], tool_choice=choice, max_output_tokens=60)
            call = answer.output[0]
            equal((call.type, call.name, call.status), ("function_call", "weather", "completed"), "call")
            assert json.loads(call.arguments)["city"] in ("Rome", "Verona"), call.arguments
            equal(answer.output_text, "", "text")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        given = {"tools": [tool], "max_output_tokens": 60}
        after = create(input=[output], previous_response_id=answer.id, **given)
        equal(after.previous_response_id, answer.id, "previous_response_id")
        # Or the client keeps the conversation.
        items = [{"role": "user", "content": rain}, *answer.output, output]
        again = create(input=items, store=False, **given)
        without = {"exclude": {"id", "call_id"}}
        equal(*([item.model_dump(**without) for item in one.output] for one in (after, again)), "output")

    @check(name, "a function of a pydantic model that must be called, with `strict`")
    def _():
        own = {"tools": [openai.pydantic_function_tool(place())], "tool_choice": "required"}
        given = {"model": server.model, "input": CAPITAL, "max_output_tokens": LONG, "temperature": 0}
        answer = client.responses.parse(**given | own)
        assert answer.output[0].parsed_arguments.name in ("Paris", "London"), repr(answer)

    @check(name, "the arguments of a function are streamed")
    def _():
        given = {"input": rain, "tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
        events = {event.type: event for event in create(stream=True, **given)}
        begun = events["response.output_item.added"].item
        equal((begun.type, begun.name), ("function_call", "weather"), "call")
        arguments = events["response.function_call_arguments.done"].arguments
        equal(arguments, create(**given).output[0].arguments, "arguments")

    @check(name, "previous_response_id continues a conversation")
    def _():
        first = create(input="My name is Ada.", max_output_tokens=30)
        second = create(input="What is my name?", previous_response_id=first.id, max_output_tokens=30)
        assert "Ada" in second.output_text, second.output_text
        assert second.usage.input_tokens > first.usage.total_tokens, repr(second.usage)

    @check(name, "a response can be retrieved and deleted; with store=False it is not kept")
    def _():
        answer = create(metadata={"topic": "cities"})
        equal(client.responses.retrieve(answer.id), answer, "response")
        equal(answer.metadata, {"topic": "cities"}, "metadata")
        client.responses.delete(answer.id)
        for gone in (answer.id, create(store=False).id, "resp_unknown"):
            raised(openai.NotFoundError, lambda: client.responses.retrieve(gone))
            raised(openai.NotFoundError, lambda: create(previous_response_id=gone))

    @check(name, "log-probabilities")
    def _():
        answer = create(include=["message.output_text.logprobs"], top_logprobs=2)
        tokens = answer.output[0].content[0].logprobs
        equal("".join(token.token for token in tokens), answer.output_text, "tokens")
        assert all(len(token.top_logprobs) == 2 for token in tokens), repr(tokens)

    @check(name, "cached tokens are counted")
    def _():
        create(input=STORY + "What flows?")
        usage = create(input=STORY + "What is small?").usage
        assert 0 < usage.input_tokens_details.cached_tokens < usage.input_tokens, repr(usage)

    own = {"stream": True, "extra_body": {"kiln": {}}}
    test_close(name, server, lambda tokens: create(max_output_tokens=tokens, input=COUNT, **own))

    @check(name, "the asynchronous client: two responses at once, one of them streamed")
    async def _():
        given = {"model": server.model, "input": CAPITAL, "max_output_tokens": 8, "temperature": 0}
        async with openai.AsyncOpenAI(api_key=KEY, **settings) as own:

            async def streamed():
                events = await own.responses.create(stream=True, **given)
                return [event async for event in events][-1].response.output_text

            whole, text = await asyncio.gather(own.responses.create(**given), streamed())
        equal(text, whole.output_text, "text")

    def ask(key=KEY, model=server.model, temperature=0.0):
        given = {"model": model, "input": CAPITAL, "max_output_tokens": 8, "temperature": temperature}
        return client.with_options(api_key=key).responses.create(**given)

    test_errors(name, openai, server, ask)


def chat_text(client, server):
    """The beginning of the answer to the question, by openai's chat."""
    given = {"model": server.model, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(**given).choices[0].message.content


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

    @check(name, "responses: whole and streamed")
    def _():
        given = {"model": f"openai/{server.model}", "input": CAPITAL, "max_output_tokens": 8} | address
        answer = litellm.responses(**given)
        assert answer.output[0].content[0].text and answer.usage.output_tokens > 0, repr(answer)
        kinds = [event.type for event in litellm.responses(stream=True, **given)]
        assert "response.output_text.delta" in kinds, repr(kinds)

    # The same by other APIs.
    for provider in ("anthropic", "ollama_chat", "ollama"):
        given = {"model": f"{provider}/{server.model}", "messages": QUESTION}
        given |= {"api_base": server.root, "api_key": KEY}
        short = given | {"temperature": 0, "max_tokens": 8}

        @check(name, f"{provider}: a chat with the client's defaults")
        def _():
            assert litellm.completion(**given).choices[0].message.content

        @check(name, f"{provider}: a streamed chat, and the usage of a whole one")
        def _():
            chunks = litellm.completion(stream=True, **short)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            answer = litellm.completion(**short)
            equal(text.strip(), answer.choices[0].message.content.strip(), "text")
            assert answer.usage.prompt_tokens > 0 and answer.usage.completion_tokens > 0, repr(answer.usage)

        @check(name, f"{provider}: json_schema")
        def _():
            answer = litellm.completion(response_format=place(), **short | {"max_tokens": LONG})
            place().model_validate_json(answer.choices[0].message.content)


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
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider
    import openai

    name = "pydantic-ai"

    @contextlib.asynccontextmanager
    async def agent(key=KEY, model=server.model, temperature=0.0, max_tokens=8, kind=OpenAIChatModel, **more):
        async with openai.AsyncOpenAI(api_key=key, base_url=server.url, max_retries=0) as client:
            own = kind(model, provider=OpenAIProvider(openai_client=client))
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

    @check(name, "responses: an answer, a structured one, and one as the arguments of a tool")
    async def _():
        async with agent(kind=OpenAIResponsesModel) as own: assert (await own.run("What news?")).output
        for output in (NativeOutput(place()), place()):
            async with agent(kind=OpenAIResponsesModel, max_tokens=LONG, output_type=output) as own:
                assert (await own.run(CAPITAL)).output.name in ("Paris", "London")

    library = one_exception(ModelHTTPError)

    async def ask(**settings):
        async with agent(**settings) as own: return await own.run("What news?")

    test_errors(name, library, server, lambda **settings: asyncio.run(ask(**settings)))


def test_agents(server):
    import agents, openai

    # Traces would be sent to OpenAI.
    agents.set_tracing_disabled(True)
    name = "openai-agents"

    @agents.function_tool(strict_mode=False)
    def weather(city: Literal["Rome", "Verona"]) -> str:
        """Tells the weather in a city."""
        asked.append(city)
        return f"It rains in {city}."

    # A small model would make up more arguments.
    weather.params_json_schema["additionalProperties"] = False
    asked = []
    kinds = {"Responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
    for api, kind in kinds.items():

        @contextlib.asynccontextmanager
        async def agent(tokens=LONG, kind=kind, choice=None, **more):
            settings = agents.ModelSettings(temperature=0, max_tokens=tokens, tool_choice=choice)
            async with openai.AsyncOpenAI(api_key=KEY, base_url=server.url, max_retries=0) as client:
                model = kind(model=server.model, openai_client=client)
                given = {"name": "guide", "instructions": "Be brief.", "model_settings": settings}
                yield agents.Agent(model=model, **given | more)

        @check(name, f"{api}: an answer, and its usage")
        async def _():
            async with agent() as own: result = await agents.Runner.run(own, CAPITAL)
            assert "Paris" in result.final_output, repr(result.final_output)
            assert result.context_wrapper.usage.output_tokens > 0, repr(result.context_wrapper.usage)

        @check(name, f"{api}: an agent with the client's defaults")
        async def _():
            async with agent(model_settings=agents.ModelSettings()) as own:
                assert (await agents.Runner.run(own, CAPITAL)).final_output

        @check(name, f"{api}: a streamed answer")
        async def _():
            async with agent() as own:
                result = agents.Runner.run_streamed(own, CAPITAL)
                events = [event async for event in result.stream_events()]
                raw = [event.data for event in events if event.type == "raw_response_event"]
                text = "".join(one.delta for one in raw if one.type == "response.output_text.delta")
                equal(text, result.final_output, "text")
                equal(text, (await agents.Runner.run(own, CAPITAL)).final_output, "text")

        @check(name, f"{api}: a second turn")
        async def _():
            async with agent() as own:
                first = await agents.Runner.run(own, "My name is Ada.")
                turns = [*first.to_input_list(), {"role": "user", "content": "What is my name?"}]
                assert "Ada" in (await agents.Runner.run(own, turns)).final_output

        @check(name, f"{api}: json_schema: output_type")
        async def _():
            async with agent(output_type=place()) as own:
                assert (await agents.Runner.run(own, CAPITAL)).final_output.name in ("Paris", "London")

        for choice in ("required", "weather", None):

            @check(name, f"{api}: a tool, with the choice {choice}")
            async def _():
                asked.clear()
                async with agent(tools=[weather], choice=choice) as own:
                    result = await agents.Runner.run(own, "Does it rain in Rome?")
                assert result.final_output, repr(result)
                if choice: equal(asked[0], "Rome", "city")

    @check(name, "Responses: previous_response_id")
    async def _():
        async with agent(kind=agents.OpenAIResponsesModel) as own:
            first = await agents.Runner.run(own, "My name is Ada.")
            given = {"previous_response_id": first.last_response_id}
            second = await agents.Runner.run(own, "What is my name?", **given)
        assert "Ada" in second.final_output, second.final_output


def test_anthropic(server):
    import anthropic

    name = "anthropic"
    settings = {"base_url": server.root, "max_retries": 0, "timeout": 120}
    client = anthropic.Anthropic(api_key=KEY, **settings)
    # Of the newest Claude, nobody may choose the temperature.
    given = {"model": server.model, "messages": QUESTION, "max_tokens": 30, "extra_body": {"temperature": 0}}
    tool = weather("input_schema")
    forced = {"tools": [tool], "tool_choice": {"type": "tool", "name": "weather"}, "max_tokens": 60}
    rain = [{"role": "user", "content": "Does it rain in Rome?"}]

    def create(**more):
        return client.messages.create(**given | more)

    def text(message):
        return "".join(block.text for block in message.content if block.type == "text")

    @check(name, "the list of models, and one of them")
    def _():
        for model in (*client.models.list(), client.models.retrieve(server.model)):
            equal((model.id, model.type, model.display_name), (server.model, "model", server.model), "model")
            assert model.created_at.year > 2000, repr(model)
        raised(anthropic.NotFoundError, lambda: client.models.retrieve("unknown"))

    @check(name, "a message, its usage and the identity of its request")
    def _():
        message = create()
        equal((message.type, message.role, message.model), ("message", "assistant", server.model), "message")
        equal([block.type for block in message.content], ["text"], "blocks")
        assert "Paris" in text(message), repr(message)
        equal((message.stop_reason, message.stop_sequence), ("end_turn", None), "end")
        assert message.usage.input_tokens > 0 and 0 < message.usage.output_tokens <= 30, repr(message.usage)
        assert message._request_id, "no request-id"

    @check(name, "a message with the client's defaults")
    def _():
        assert text(client.messages.create(model=server.model, messages=QUESTION, max_tokens=1000))

    @check(name, "all that the client's types have is there: messages")
    def _():
        own = anthropic.Anthropic(api_key=KEY, _strict_response_validation=True, **settings)
        for more in ({}, forced):
            assert own.messages.create(**given | more).content
            with own.messages.create(stream=True, **given | more) as events: assert list(events)
        own.messages.count_tokens(model=server.model, messages=QUESTION)

    @check(name, "all that the client's types have is there: models")
    def _():
        own = anthropic.Anthropic(api_key=KEY, _strict_response_validation=True, **settings)
        assert list(own.models.list())
        own.models.retrieve(server.model)

    @check(name, "the limit of tokens is the reason of the end")
    def _():
        message = create(max_tokens=2)
        equal((message.stop_reason, message.usage.output_tokens), ("max_tokens", 2), "end")

    @check(name, "a streamed message has the same text, end and usage")
    def _():
        with client.messages.stream(**given) as stream:
            pieces = list(stream.text_stream)
            final = stream.get_final_message()
        whole = create()
        assert len(pieces) > 1, repr(pieces)
        equal("".join(pieces), text(whole), "text")
        equal((text(final), final.stop_reason), (text(whole), whole.stop_reason), "final message")
        equal(final.usage.output_tokens, whole.usage.output_tokens, "tokens")
        equal(final.usage.input_tokens, whole.usage.input_tokens, "tokens of the prompt")

    @check(name, "the events of a stream")
    def _():
        kinds = [event.type for event in create(stream=True)]
        equal(kinds[:2], ["message_start", "content_block_start"], "the first events")
        assert set(kinds[2:-3]) == {"content_block_delta"}, repr(kinds)
        equal(kinds[-3:], ["content_block_stop", "message_delta", "message_stop"], "the last events")

    @check(name, "system: a text, and blocks with cache_control")
    def _():
        block = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        said = create(system="Be brief.")
        equal(text(create(system=[block])), text(said), "text")
        # Qwen's template has a system message of its own if there is none.
        assert said.usage.input_tokens != create().usage.input_tokens, repr(said.usage)

    @check(name, "several turns")
    def _():
        turns = [{"role": "user", "content": "My name is Ada."}]
        turns += [{"role": "assistant", "content": create(messages=turns).content}]
        turns += [{"role": "user", "content": [{"type": "text", "text": "What is my name?"}]}]
        said = text(create(messages=turns))
        assert "Ada" in said, said

    @check(name, "the beginning of an answer is continued")
    def _():
        begun = {"role": "assistant", "content": "The capital of France is the city of"}
        said = text(create(messages=[*QUESTION, begun], max_tokens=4))
        assert said.startswith(" Paris"), repr(said)

    @check(name, "stop_sequences")
    def _():
        message = create(messages=COUNTING, stop_sequences=["5", "none"], max_tokens=60)
        equal((message.stop_reason, message.stop_sequence), ("stop_sequence", "5"), repr(message.content))
        assert "4" in text(message) and "5" not in text(message), text(message)
        with client.messages.stream(**given | {"messages": COUNTING, "stop_sequences": ["5"]}) as stream:
            final = stream.get_final_message()
        equal((final.stop_reason, final.stop_sequence), ("stop_sequence", "5"), repr(final.content))

    @check(name, "a tool that must be called is called, and its result is read")
    def _():
        for choice in (forced["tool_choice"], {"type": "any", "disable_parallel_tool_use": True}):
            message = create(**forced | {"messages": rain, "tool_choice": choice})
            equal(message.stop_reason, "tool_use", "stop_reason")
            call = message.content[0]
            equal((call.type, call.name, call.input), ("tool_use", "weather", {"city": "Rome"}), "call")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "It rains."}
        parts = result | {"content": [{"type": "text", "text": "It rains."}]}
        turns = [*rain, {"role": "assistant", "content": message.content}]
        ask = lambda one: create(messages=[*turns, {"role": "user", "content": [one]}], tools=[tool]).content
        answers = [[block.model_dump(exclude={"id"}) for block in ask(one)] for one in (result, parts)]
        assert answers[0], "no answer"
        equal(*answers, "content")

    @check(name, "a tool that is called in a stream")
    def _():
        with client.messages.stream(**given | forced | {"messages": rain}) as stream:
            events = list(stream)
            final = stream.get_final_message()
        pieces = "".join(event.partial_json for event in events if event.type == "input_json")
        equal((json.loads(pieces), final.content[0].input), ({"city": "Rome"}, {"city": "Rome"}), "input")
        equal((final.stop_reason, final.content[0].name), ("tool_use", "weather"), "end")

    @check(name, "json_schema: parse, and a schema in output_config")
    def _():
        message = client.messages.parse(**given | {"output_format": place(), "max_tokens": LONG})
        assert message.parsed_output.name in ("Paris", "London"), repr(message)
        schema = place().model_json_schema() | {"additionalProperties": False}
        config = {"format": {"type": "json_schema", "schema": schema}}
        message = create(output_config=config, max_tokens=LONG)
        place().model_validate_json(text(message))

    @check(name, "json_schema: streamed")
    def _():
        with client.messages.stream(**given | {"output_format": place(), "max_tokens": LONG}) as stream:
            assert stream.get_final_message().parsed_output.size in ("small", "large")

    @check(name, "count_tokens counts what a message counts")
    def _():
        for more in ({}, {"system": "Be brief."}, {"tools": [tool]}):
            asked = {"model": server.model, "messages": QUESTION} | more
            counted = client.messages.count_tokens(**asked).input_tokens
            usage = create(**more).usage
            equal(usage.input_tokens + usage.cache_read_input_tokens, counted, f"tokens with {more}")
        new = {"system": "Count me, please."}
        usage = create(**new).usage
        counted = client.messages.count_tokens(model=server.model, messages=QUESTION, **new)
        equal((usage.cache_read_input_tokens, usage.input_tokens), (0, counted.input_tokens), "new tokens")

    @check(name, "a beginning that was computed before is read from the cache")
    def _():
        block = {"type": "text", "text": STORY + "A story.", "cache_control": {"type": "ephemeral"}}
        asked = {"system": [block], "max_tokens": 4}
        create(**asked)
        messages = [{"role": "user", "content": "What is small?"}]
        usage = create(messages=messages, **asked).usage
        assert usage.cache_read_input_tokens > 0 and usage.input_tokens > 0, repr(usage)
        counted = client.messages.count_tokens(model=server.model, messages=messages, system=[block])
        equal(usage.input_tokens + usage.cache_read_input_tokens, counted.input_tokens, "tokens")
        with client.messages.stream(**given | asked) as stream: usage = stream.get_final_message().usage
        assert usage.cache_read_input_tokens > 0, repr(usage)

    @check(name, "thinking that is disabled or adaptive, and metadata")
    def _():
        for kind in ("disabled", "adaptive"):
            message = create(thinking={"type": kind}, metadata={"user_id": "somebody"}, service_tier="auto")
            equal(text(message), text(create()), "text")

    @check(name, "the runner of tools (beta)")
    def _():
        asked = []

        @anthropic.beta_tool
        def weather(city: Literal["Rome", "Verona"]) -> str:
            """Tells the weather in a city."""
            asked.append(city)
            return f"It rains in {city}."

        own = {"messages": rain, "tools": [weather], "tool_choice": {"type": "any"}, "max_tokens": 60}
        *_, last = client.beta.messages.tool_runner(max_iterations=2, **given | own)
        equal((asked[0], last.stop_reason), ("Rome", "tool_use"), "call")
        own["tool_choice"] = {"type": "none"}
        assert client.beta.messages.tool_runner(**given | own).until_done()

    @check(name, "the key as `auth_token`")
    def _():
        own = anthropic.Anthropic(auth_token=KEY, **settings)
        assert text(own.messages.create(**given))

    def stream(tokens):
        return create(stream=True, max_tokens=tokens, messages=[{"role": "user", "content": COUNT}])

    test_close(name, server, stream)

    @check(name, "the asynchronous client: two messages at once, one of them streamed")
    async def _():
        async with anthropic.AsyncAnthropic(api_key=KEY, **settings) as own:

            async def streamed():
                async with own.messages.stream(**given) as stream:
                    return "".join([piece async for piece in stream.text_stream])

            whole, pieces = await asyncio.gather(own.messages.create(**given), streamed())
        equal(pieces, text(whole), "text")

    def ask(key=KEY, model=server.model, temperature=0.0):
        own = given | {"model": model, "extra_body": {"temperature": temperature}}
        return client.with_options(api_key=key).messages.create(**own)

    @check(name, "errors have a type")
    def _():
        asks = {
            "authentication_error": lambda: ask(key="wrong-key"),
            "not_found_error": lambda: ask(model="unknown"),
            "invalid_request_error": lambda: ask(temperature=3.0),
        }
        for kind, function in asks.items():
            error = raised(anthropic.APIStatusError, function)
            equal((error.body["type"], error.body["error"]["type"]), ("error", kind), "type")
            assert error.request_id, "no request-id"

    test_errors(name, anthropic, server, ask)
    test_retries(name, anthropic, server, lambda max_retries: text(
        client.with_options(max_retries=max_retries).messages.create(**given)
    ))


def test_ollama(server):
    import datetime, ollama

    name = "ollama"
    address = {"host": f"127.0.0.1:{server.port}", "headers": {"Authorization": f"Bearer {KEY}"}}
    client = ollama.Client(**address)
    options = {"temperature": 0, "num_predict": 8}
    given = {"model": server.model, "messages": QUESTION, "options": options}

    def chat(**more):
        return client.chat(**given | more)

    def generate(prompt=CAPITAL, **more):
        return client.generate(model=server.model, prompt=prompt, **{"options": options} | more)

    @check(name, "the list of models, those that are loaded, and one of them")
    def _():
        for models in (client.list().models, client.ps().models):
            equal([model.model for model in models], [server.model], "models")
            assert models[0].size > 0 and models[0].digest and models[0].details, repr(models)
        assert client.list().models[0].modified_at.year > 2000
        equal(client.ps().models[0].context_length, server.context, "context")
        shown = client.show(server.model)
        assert {"completion", "tools"} <= set(shown.capabilities) and shown.template, repr(shown)
        assert shown.modelinfo["general.parameter_count"] > 0, repr(shown.modelinfo)

    @check(name, "a chat, and its counts")
    def _():
        answer = chat()
        equal((answer.model, answer.message.role), (server.model, "assistant"), "answer")
        assert answer.message.content, repr(answer)
        assert answer.done and answer.done_reason in ("stop", "length"), repr(answer)
        assert answer.prompt_eval_count > 0 and 0 < answer.eval_count <= 8, repr(answer)
        assert answer.total_duration >= answer.eval_duration > 0, repr(answer)

    @check(name, "a chat with the client's defaults, and with `:latest`")
    def _():
        assert client.chat(model=server.model, messages=QUESTION).message.content
        assert chat(model=f"{server.model}:latest").message.content

    @check(name, "a streamed chat has the same text, and counts in its last part")
    def _():
        *parts, last = chat(stream=True)
        whole = chat()
        equal("".join(part.message.content for part in [*parts, last]), whole.message.content, "text")
        assert not any(part.done for part in parts) and last.done, repr(last)
        equal((last.eval_count, last.done_reason), (whole.eval_count, whole.done_reason), "counts")

    @check(name, "several turns, the first of the system")
    def _():
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My name is Ada."}]
        turns += [chat(messages=turns).message, {"role": "user", "content": "What is my name?"}]
        said = chat(messages=turns, options=options | {"num_predict": 30}).message.content
        assert "Ada" in said, said

    @check(name, "a text, whole and streamed, with a system message")
    def _():
        whole = generate(system="Be brief.")
        assert whole.response and whole.done and whole.eval_count > 0, repr(whole)
        pieces = generate(system="Be brief.", stream=True)
        equal("".join(piece.response for piece in pieces), whole.response, "text")
        equal(generate().response, chat().message.content, "the text of a chat")

    @check(name, "a raw text")
    def _():
        assert "Paris" in generate(START, raw=True).response, generate(START, raw=True)

    @check(name, "a schema as `format`, and `json`")
    def _():
        long = {"options": {"temperature": 0, "num_predict": LONG}}
        schema = place().model_json_schema()
        place().model_validate_json(chat(format=schema, **long).message.content)
        place().model_validate_json(generate(format=schema, **long).response)
        answer = chat(format="json", **long)
        # A small model may not come to an end.
        if answer.done_reason == "stop": assert isinstance(json.loads(answer.message.content), dict)

    @check(name, "tools: a Python function, and its result")
    def _():
        def weather(city: str) -> str:
            """Tells the weather in a city.

            Args:
                city: The name of the city
            """

        rain = [{"role": "user", "content": "Does it rain in Rome? Use the tool."}]
        long = {"tools": [weather], "options": {"temperature": 0, "num_predict": 60}}
        message = chat(messages=rain, **long).message
        # The model may call it or not.
        assert message.tool_calls or message.content, repr(message)
        for call in message.tool_calls or []: equal(call.function.name, "weather", "name")
        function = {"name": "weather", "arguments": {"city": "Rome"}}
        called = ollama.Message(role="assistant", tool_calls=[{"function": function}])
        result = {"role": "tool", "tool_name": "weather", "content": "It rains."}
        answer = chat(messages=[*rain, called, result], **long)
        assert answer.message.content or answer.message.tool_calls, repr(answer)
        *parts, last = chat(messages=rain, stream=True, **long)
        calls = [call for part in parts for call in part.message.tool_calls or []]
        equal(len(calls), len(message.tool_calls or []), "calls in a stream")

    @check(name, "options")
    def _():
        own = ollama.Options(temperature=1.0, seed=5, num_predict=8, num_ctx=2048, top_k=40, top_p=0.9)
        equal(*(chat(options=own).message.content for _ in range(2)), "text of a seed")
        said = chat(messages=COUNTING, options={"temperature": 0, "stop": ["5"], "num_predict": 60})
        equal((said.done_reason, "5" in said.message.content), ("stop", False), "end")
        # A model does not think unless it can.
        assert chat(think=False).message.content

    @check(name, "log-probabilities")
    def _():
        tokens = chat(logprobs=True, top_logprobs=2).logprobs
        assert tokens and all(len(token.top_logprobs) == 2 for token in tokens), repr(tokens)

    @check(name, "keep_alive: the time for which a model stays loaded")
    def _():
        chat(keep_alive="5m")
        left = client.ps().models[0].expires_at - datetime.datetime.now(datetime.timezone.utc)
        assert 280 < left.total_seconds() <= 301, repr(left)
        chat(keep_alive=-1)
        equal([model.model for model in client.ps().models], [server.model], "models")

    @check(name, "keep_alive=0 unloads a model, and the next chat loads it again")
    def _():
        said = chat().message.content
        by_text = lambda: client.generate(server.model, keep_alive=0)
        for unload in (by_text, lambda: chat(messages=[], keep_alive=0)):
            equal(unload().done_reason, "unload", "reason")
            equal(list(client.ps().models), [], "models")
            equal(chat().message.content, said, "text")

    @check(name, "keep_alive=0 of a chat unloads the model after it")
    def _():
        assert chat(keep_alive=0).message.content
        until("the model is unloaded", lambda: not client.ps().models, 10)

    @check(name, "keep_alive=0 is for one request: the next chat leaves the model loaded")
    def _():
        client.generate(server.model, keep_alive=0)
        assert chat().message.content
        time.sleep(2)
        equal([model.model for model in client.ps().models], [server.model], "models")

    @check(name, "a model that is asked for without a prompt is loaded")
    def _():
        equal(client.generate(server.model, keep_alive=-1).done_reason, "load", "reason")
        equal([model.model for model in client.ps().models], [server.model], "models")

    @check(name, "models are not changed: ResponseError 403")
    def _():
        for change in (
            lambda: client.pull("llama3.2"),
            lambda: list(client.pull("llama3.2", stream=True)),
            lambda: client.push("llama3.2"),
            lambda: client.create("mine", from_=server.model),
            lambda: client.copy(server.model, "mine"),
            lambda: client.delete(server.model),
        ):
            equal(raised(ollama.ResponseError, change).status_code, 403, "status")

    def long_chat(tokens):
        own = {"temperature": 0, "num_predict": tokens}
        return chat(stream=True, options=own, messages=[{"role": "user", "content": COUNT}])

    test_close(name, server, long_chat)

    @check(name, "the asynchronous client: two chats at once, one of them streamed")
    async def _():
        async with ollama.AsyncClient(**address) as own:

            async def streamed():
                return "".join([part.message.content async for part in await own.chat(stream=True, **given)])

            whole, text = await asyncio.gather(own.chat(**given), streamed())
        equal(text, whole.message.content, "text")

    @check(name, "an error of a stream: ResponseError")
    def _():
        error = raised(ollama.ResponseError, lambda: list(chat(model="unknown", stream=True)))
        equal((error.status_code, "unknown" in error.error), (404, True), "error")

    def ask(key=KEY, model=server.model, temperature=0.0):
        with ollama.Client(**address | {"headers": {"Authorization": f"Bearer {key}"}}) as own:
            return own.chat(**given | {"model": model, "options": options | {"temperature": temperature}})

    test_errors(name, one_exception(ollama.ResponseError), server, ask)


def test_ollama_embeddings(server):
    import ollama

    address = {"host": f"127.0.0.1:{server.port}", "headers": {"Authorization": f"Bearer {KEY}"}}
    client = ollama.Client(**address)
    texts = ["What news?", "My lord, the king is dead."]

    @check("ollama", "embeddings: of several texts, of one, and in the older form")
    def _():
        several = client.embed(server.model, texts)
        vectors = several.embeddings
        equal((len(vectors), vectors[0] == vectors[1], several.model), (2, False, server.model), "vectors")
        assert several.prompt_eval_count > 0, repr(several)
        equal([len(vector) for vector in vectors], [len(vectors[0])] * 2, "sizes")
        alone = client.embed(server.model, texts[0]).embeddings[0]
        for other in (alone, client.embeddings(server.model, texts[0]).embedding):
            pairs = zip(vectors[0], other, strict=True)
            assert all(math.isclose(*pair, abs_tol=1e-6) for pair in pairs), "vectors differ"

    @check("ollama", "embeddings: a text that is too long is cut, unless it is to be refused")
    def _():
        long = "news " * 2000
        equal(len(client.embed(server.model, long).embeddings), 1, "vectors")
        error = raised(ollama.ResponseError, lambda: client.embed(server.model, long, truncate=False))
        equal(error.status_code, 400, "status")

    @check("ollama", "embeddings: the model says that it makes them")
    def _():
        assert "embedding" in client.show(server.model).capabilities


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
    ("openai-agents", "agents", test_agents, None),
    ("anthropic", "anthropic", test_anthropic, None),
    ("ollama", "ollama", test_ollama, test_ollama_embeddings),
    ("prometheus-client", "prometheus_client", test_prometheus, None),
]


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def several_models(binary, model, arguments):
    """Tests a server with two models, by the clients that can be imported."""
    name = "several models"
    names = ["first", "second"]
    both = [*arguments, "--model", DEMO, "--alias", names[0], "--alias", names[1]]

    def askers(server):
        """For each client, a function that asks a model and returns its name and the text."""
        found = {}
        if is_installed("openai"):
            import openai

            own = openai.OpenAI(api_key=KEY, base_url=server.url, max_retries=0)

            def chat(model):
                given = {"model": model, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
                answer = own.chat.completions.create(**given)
                return answer.model, answer.choices[0].message.content

            def respond(model):
                answer = own.responses.create(model=model, input=CAPITAL, max_output_tokens=8, temperature=0)
                return answer.model, answer.output_text

            found["openai"] = chat, openai.NotFoundError
            found["openai responses"] = respond, openai.NotFoundError
        if is_installed("anthropic"):
            import anthropic

            client = anthropic.Anthropic(api_key=KEY, base_url=server.root, max_retries=0)

            def message(model):
                given = {"model": model, "messages": QUESTION, "max_tokens": 8}
                given["extra_body"] = {"temperature": 0}
                answer = client.messages.create(**given)
                return answer.model, answer.content[0].text

            found["anthropic"] = message, anthropic.NotFoundError
        if is_installed("ollama"):
            import ollama

            address = {"host": f"127.0.0.1:{server.port}", "headers": {"Authorization": f"Bearer {KEY}"}}
            local = ollama.Client(**address)

            def talk(model):
                options = {"temperature": 0, "num_predict": 8}
                answer = local.chat(model=model, messages=QUESTION, options=options)
                return answer.model, answer.message.content

            found["ollama"] = talk, ollama.ResponseError
        return found

    def in_turn(server, client, ask, unknown, most):
        @check(name, f"{client}: both are asked in turn, at most {most} loaded")
        def _():
            answers = [ask(model) for model in names * 2]
            equal([model for model, _ in answers], names * 2, "models")
            equal(answers[:2], answers[2:], "answers")
            assert answers[0] != answers[1] and all(text for _, text in answers), repr(answers)
            equal(len(server.loaded()), most, "loaded models")

        @check(name, f"{client}: an unknown model, at most {most} loaded: {unknown.__name__} 404")
        def _():
            equal(raised(unknown, lambda: ask("third")).status_code, 404, "status")

    for most, more in ((2, []), (1, ["--max-models", "1"])):
        server = Server(binary, model, both + more)
        try:
            asks = askers(server)
            for client, (ask, unknown) in asks.items(): in_turn(server, client, ask, unknown, most)
            if is_installed("openai"): several_by_openai(name, server, most)
            if is_installed("anthropic"):
                import anthropic

                @check(name, f"anthropic: the list of models, at most {most} loaded")
                def _():
                    own = anthropic.Anthropic(api_key=KEY, base_url=server.root)
                    equal([model.id for model in own.models.list()], names, "models")

            if is_installed("ollama"):
                import ollama

                @check(name, f"ollama: the list of models, at most {most} loaded")
                def _():
                    headers = {"Authorization": f"Bearer {KEY}"}
                    own = ollama.Client(host=f"127.0.0.1:{server.port}", headers=headers)
                    equal([model.model for model in own.list().models], names, "models")
                    equal([bool(own.show(each).modelinfo) for each in names], [True, True], "shown")
        finally:
            server.end()

    server = Server(binary, DEMO, [*arguments, "--idle-unload", "1"])
    try:

        @check(name, "a model that nobody asks for is unloaded, and loaded again")
        def _():
            equal(server.loaded(), [server.model], "models")
            until("the model is unloaded", lambda: not server.loaded(), 10)
            body = {"model": server.model, "prompt": START, "max_tokens": 4}
            answer = json.loads(server.request("POST", "/v1/completions", body)[1].read())
            assert answer["choices"][0]["text"], repr(answer)
    finally:
        server.end()


def several_by_openai(name, server, most):
    import openai

    client = openai.OpenAI(api_key=KEY, base_url=server.url, max_retries=0)
    given = {"messages": QUESTION, "max_tokens": 8, "temperature": 0}

    @check(name, f"openai: the list of models, at most {most} loaded")
    def _():
        equal([model.id for model in client.models.list()], ["first", "second"], "models")
        equal(client.models.retrieve("second").id, "second", "model")

    long = {"stream": True, "max_tokens": server.context // 2, "extra_body": {"ignore_eos": True}}

    @check(name, f"openai: both at once, at most {most} loaded")
    def _():
        chunks = client.chat.completions.create(model="first", **given | long)
        next(iter(chunks))
        try:
            # An answer is not interrupted: where there is no room, the second model waits for its end.
            if most == 1: threading.Timer(0.5, chunks.close).start()
            answer = client.with_options(max_retries=0).chat.completions.create(model="second", **given)
            assert answer.choices[0].message.content, repr(answer)
        finally:
            chunks.close()
            until("no answer runs", lambda: server.running() == 0, 10)


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
    several_models(args.binary, args.model, args.arguments)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
