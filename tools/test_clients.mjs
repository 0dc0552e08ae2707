// Tests `kiln serve` with client libraries in JavaScript that others wrote. `test_clients.py` is the same for
// Python.
//
//     npm install --prefix DIR openai@7.57.0 @anthropic-ai/sdk@1.14.0 ollama@0.6.4 ai@7.0.173 \
//         @ai-sdk/openai-compatible@3.0.92 zod@4.6.7
//     KILN_NODE_MODULES=DIR/node_modules node tools/test_clients.mjs \
//         KILN_BINARY MODEL [ARGUMENT OF kiln serve..]
//
// The clients need Node 22.12 or later, and are tested with their defaults: a field that a client sends by
// itself and the server refuses is a failure. MODEL is one to chat with; the checks of a full queue need a
// context of 4096 tokens or more. Embeddings are those of the demo model. Prints a line per check. Exit
// status 1 if one fails, 2 for bad input.
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const modules = process.env.KILN_NODE_MODULES;
const load = createRequire(modules ? join(modules, "x.js") : import.meta.url);
const [binary, model, ...serverArguments] = process.argv.slice(2);
if (!model) {
    console.error("test_clients: error: say which binary and which model to test");
    process.exit(2);
}
// Keys and addresses of the user's own are not for this server, and warnings are not for this output.
for (const name of Object.keys(process.env)) {
    if (/^(ANTHROPIC|OLLAMA|OPENAI)_/.test(name)) delete process.env[name];
}
globalThis.AI_SDK_LOG_WARNINGS = false;

const KEY = "right-key";
const DEMO = join(fileURLToPath(import.meta.url), "../../assets/demo");
const CAPITAL = "What is the capital of France?";
const QUESTION = [{ role: "user", content: CAPITAL }];
const RAIN = [{ role: "user", content: "Does it rain in Rome?" }];
const COUNT = [{ role: "user", content: "Count from 1 to 1000, with all numbers in between." }];
/** Tokens that a structured answer fits in. */
const LONG = 240;
/** Answers that are computed at once, and that wait. */
const [ROWS, QUEUE] = [2, 2];
/** Each wait ends after this many milliseconds. */
const PATIENCE = 60_000;
/** The schema of a tool's arguments, and of a structured answer. */
const WEATHER = {
    type: "object",
    properties: { city: { type: "string", enum: ["Rome", "Verona"] } },
    required: ["city"],
    additionalProperties: false,
};
const PLACE = {
    type: "object",
    properties: { name: { type: "string", enum: ["Paris", "London"] }, is_capital: { type: "boolean" } },
    required: ["name", "is_capital"],
    additionalProperties: false,
};
const CITIES = ["Rome", "Verona"];

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

function assert(holds, why) {
    if (!holds) throw new Error(typeof why === "string" ? why : JSON.stringify(why));
}

function equal(found, expected, what) {
    const [own, other] = [found, expected].map((value) => JSON.stringify(value));
    assert(own === other, `${what}: ${own}, expected ${other}`);
}

async function until(what, holds, patience = PATIENCE) {
    for (const end = Date.now() + patience; Date.now() < end; await pause(30)) {
        if (await holds()) return;
    }
    throw new Error(`${what}: did not happen within ${patience / 1000} s`);
}

/** The exception of this class that a function throws. */
async function thrown(kind, work) {
    let found;
    try {
        found = await work();
    } catch (error) {
        assert(error instanceof kind, `${error?.constructor?.name}, not ${kind.name}: ${error?.message}`);
        return error;
    }
    throw new Error(`no ${kind.name}, but ${JSON.stringify(found)}`.slice(0, 300));
}

async function collected(stream) {
    const parts = [];
    for await (const part of stream) parts.push(part);
    return parts;
}

const children = new Set();
process.on("exit", () => children.forEach((child) => child.kill("SIGKILL")));
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(1));

/** A server, which needs a key. */
class Server {
    static async start(folder, ...more) {
        const own = ["--port", "0", "--rows", String(ROWS), "--queue", String(QUEUE)];
        const parameters = ["serve", "--model", folder, ...own, ...serverArguments, ...more];
        const env = { ...process.env, KILN_API_KEYS: KEY };
        const child = spawn(binary, parameters, { env, stdio: ["ignore", "pipe", "pipe"] });
        children.add(child);
        let output = "";
        let hasEnded = false;
        for (const stream of [child.stdout, child.stderr]) stream.on("data", (data) => (output += data));
        child.on("error", (error) => (output += error));
        child.on("close", () => (hasEnded = true));
        const server = new Server();
        await until("the server starts", () => {
            assert(!hasEnded, `the server ended: ${output}`);
            server.root = /http:\/\/127\.0\.0\.1:\d+/.exec(output)?.[0];
            return server.root;
        }, 300_000);
        server.child = child;
        server.url = `${server.root}/v1`;
        const [card] = (await server.get("/v1/models")).data;
        [server.model, server.context] = [card.id, card.max_model_len];
        return server;
    }

    end() {
        this.child.kill("SIGKILL");
        children.delete(this.child);
    }

    async get(path) {
        const response = await fetch(this.root + path, { headers: { authorization: `Bearer ${KEY}` } });
        assert(response.ok, `${path}: ${response.status}`);
        return response.json();
    }

    isIdle() {
        return until("no answer runs", async () => (await this.get("/health")).running === 0, 10_000);
    }

    /** Does something while all places are filled by long answers. */
    async full(work) {
        const body = { model: this.model, prompt: "Once", max_tokens: this.context - 16, ignore_eos: true, stream: true };
        const headers = { authorization: `Bearer ${KEY}`, "content-type": "application/json" };
        const ends = new AbortController();
        const given = { method: "POST", headers, body: JSON.stringify(body), signal: ends.signal };
        for (let place = 0; place < ROWS + QUEUE; place += 1) await fetch(`${this.url}/completions`, given);
        try {
            await until("the queue is full", async () => (await this.get("/health")).running === ROWS + QUEUE);
            return await work();
        } finally {
            ends.abort();
            await this.isIdle();
        }
    }
}

let passed = 0;
let failed = 0;

function fail(client, what, error) {
    failed += 1;
    const why = `${error?.constructor?.name}: ${error?.message}`.replaceAll(/\s+/g, " ").slice(0, 600);
    console.log(`FAILED ${client}: ${what}: ${why}`);
}

async function check(client, what, work) {
    try {
        await work();
        passed += 1;
        console.log(`ok ${client}: ${what}`);
    } catch (error) {
        fail(client, what, error);
    }
}

/** Tests the exceptions of a client. `ask({ key, model, temperature })` chats without a further attempt. */
async function errors(client, server, kinds, status, ask) {
    const wrong = {
        "a wrong key": [{ key: "wrong-key" }, kinds[0], 401, "key"],
        "an unknown model": [{ model: "unknown" }, kinds[1], 404, "unknown"],
        "a bad temperature": [{ temperature: 3 }, kinds[2], 400, "temperature"],
    };
    const settings = { key: KEY, model: server.model, temperature: 0 };
    for (const [what, [own, kind, expected, word]] of Object.entries(wrong)) {
        await check(client, `${what}: ${kind.name}`, async () => {
            const error = await thrown(kind, () => ask({ ...settings, ...own }));
            equal(status(error), expected, "status");
            assert(error.message.includes(word), `the message does not say \`${word}\`: ${error.message}`);
        });
    }
    if (server.context < 4096) {
        console.log(`NOT CHECKED: ${client}: a full queue: the model's answers are too short`);
        return;
    }
    await check(client, `a full queue: ${kinds[3].name}`, async () => {
        const error = await server.full(() => thrown(kinds[3], () => ask(settings)));
        equal(status(error), 429, "status");
    });
}

async function testOpenai(server) {
    const { OpenAI } = load("openai");
    const { zodResponseFormat, zodTextFormat } = load("openai/helpers/zod");
    const { z } = load("zod");
    const settings = { baseURL: server.url, maxRetries: 0, timeout: 120_000 };
    const client = new OpenAI({ apiKey: KEY, ...settings });
    const given = { model: server.model, messages: QUESTION, max_tokens: 8, temperature: 0 };
    const chat = (more) => client.chat.completions.create({ ...given, ...more });
    const place = z.object({ name: z.enum(["Paris", "London"]), is_capital: z.boolean() });
    const kinds = ["AuthenticationError", "NotFoundError", "BadRequestError", "RateLimitError"].map((kind) => OpenAI[kind]);
    const status = (error) => error.status;

    await check("openai", "the list of models, and one of them", async () => {
        equal((await collected(client.models.list())).map(({ id }) => id), [server.model], "models");
        equal((await client.models.retrieve(server.model)).id, server.model, "model");
    });

    await check("openai", "a chat, and its usage", async () => {
        const { choices: [choice], usage } = await chat();
        assert(choice.message.content && ["stop", "length"].includes(choice.finish_reason), choice);
        assert(usage.prompt_tokens > 0 && usage.completion_tokens > 0 && usage.completion_tokens <= 8, usage);
    });

    await check("openai", "a chat with the client's defaults", async () => {
        const answer = await client.chat.completions.create({ model: server.model, messages: QUESTION });
        assert(answer.choices[0].message.content, answer);
    });

    await check("openai", "a streamed chat has the same text, and its usage", async () => {
        const text = (await chat()).choices[0].message.content;
        const chunks = await collected(await chat({ stream: true, stream_options: { include_usage: true } }));
        equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), text, "text");
        assert(chunks.at(-1).usage.completion_tokens > 0, chunks.at(-1));
        const stream = client.chat.completions.stream(given);
        equal(await stream.finalContent(), text, "text of the helper");
        assert((await stream.finalChatCompletion()).choices[0].finish_reason, "no finish_reason");
    });

    await check("openai", "json_schema: parse, by zod", async () => {
        const format = { response_format: zodResponseFormat(place, "place"), max_tokens: LONG };
        const { choices: [{ message }] } = await client.chat.completions.parse({ ...given, ...format });
        assert(["Paris", "London"].includes(message.parsed.name), message);
    });

    const tool = { type: "function", function: { name: "weather", description: "Tells the weather.", parameters: WEATHER } };
    await check("openai", "a tool that must be called is called, and its result is read", async () => {
        let answer;
        for (const tool_choice of ["required", { type: "function", function: { name: "weather" } }]) {
            answer = (await chat({ messages: RAIN, tools: [tool], tool_choice, max_tokens: 60 })).choices[0];
            equal(answer.finish_reason, "tool_calls", "finish_reason");
            assert(CITIES.includes(JSON.parse(answer.message.tool_calls[0].function.arguments).city), answer);
        }
        const result = { role: "tool", tool_call_id: answer.message.tool_calls[0].id, content: "It rains." };
        const { choices: [{ message }] } = await chat({ messages: [...RAIN, answer.message, result], tools: [tool] });
        assert(message.content || message.tool_calls, message);
    });

    await check("openai", "a tool that is called in a stream", async () => {
        const forced = { messages: RAIN, tools: [tool], tool_choice: "required", max_tokens: 60 };
        const call = await client.chat.completions.stream({ ...given, ...forced }).finalFunctionToolCall();
        assert(call.name === "weather" && CITIES.includes(JSON.parse(call.arguments).city), call);
    });

    await check("openai", "the runner of tools", async () => {
        const asked = [];
        const own = { ...tool.function, parse: JSON.parse, function: ({ city }) => (asked.push(city), "It rains.") };
        const forced = { tools: [{ type: "function", function: own }], tool_choice: { type: "function", function: { name: "weather" } } };
        const runner = client.chat.completions.runTools({ ...given, ...forced, messages: RAIN, max_tokens: 60 });
        equal(await runner.finalFunctionToolCallResult(), "It rains.", "result");
        assert(CITIES.includes(asked[0]), asked);
    });

    await check("openai", "a stream that is closed early ends its answer", async () => {
        const stream = await chat({ stream: true, max_tokens: server.context / 2, ignore_eos: true });
        for await (const _ of stream) break;
        await server.isIdle();
    });

    await errors("openai", server, kinds, status, ({ key, model, temperature }) =>
        client.withOptions({ apiKey: key }).chat.completions.create({ ...given, model, temperature }));

    const asked = { model: server.model, input: CAPITAL, max_output_tokens: 8, temperature: 0 };
    const respond = (more) => client.responses.create({ ...asked, ...more });
    const name = "openai responses";

    await check(name, "a response, its text and its usage", async () => {
        const { output_text, usage } = await respond();
        equal(output_text, (await chat()).choices[0].message.content, "text");
        assert(usage.input_tokens > 0 && usage.output_tokens > 0, usage);
    });

    await check(name, "a response with the client's defaults", async () => {
        const answer = await client.responses.create({ model: server.model, input: CAPITAL });
        assert(answer.output_text && answer.status === "completed", answer);
    });

    await check(name, "a stream has the same text", async () => {
        const events = await collected(await respond({ stream: true, max_output_tokens: LONG }));
        const text = events.filter(({ type }) => type === "response.output_text.delta").map(({ delta }) => delta).join("");
        equal(text, (await respond({ max_output_tokens: LONG })).output_text, "text");
        equal([events[0].type, events.at(-1).type], ["response.created", "response.completed"], "events");
        const final = await client.responses.stream({ ...asked, max_output_tokens: LONG }).finalResponse();
        equal(final.output_text, text, "text of the helper");
    });

    await check(name, "json_schema: parse, by zod", async () => {
        const format = { text: { format: zodTextFormat(place, "place") }, max_output_tokens: LONG };
        const { output_parsed } = await client.responses.parse({ ...asked, ...format });
        assert(["Paris", "London"].includes(output_parsed.name), output_parsed);
    });

    await check(name, "a function that must be called is called, and its output is read", async () => {
        const tools = [{ type: "function", name: "weather", parameters: WEATHER, strict: false }];
        const forced = { input: RAIN, tools, tool_choice: { type: "function", name: "weather" }, max_output_tokens: 60 };
        const answer = await respond(forced);
        const [call] = answer.output;
        assert(call.type === "function_call" && CITIES.includes(JSON.parse(call.arguments).city), answer);
        const output = { type: "function_call_output", call_id: call.call_id, output: "It rains." };
        const after = await respond({ input: [output], previous_response_id: answer.id, tools, max_output_tokens: 60 });
        // Or the client keeps the conversation.
        const again = await respond({ input: [...RAIN, ...answer.output, output], tools, max_output_tokens: 60 });
        equal(after.output_text, again.output_text, "text");
        const events = await collected(await respond({ ...forced, stream: true }));
        const done = events.find(({ type }) => type === "response.function_call_arguments.done");
        equal(done.arguments, call.arguments, "streamed arguments");
    });

    await check(name, "previous_response_id, retrieve and delete", async () => {
        const first = await respond({ input: "My name is Ada.", max_output_tokens: 30 });
        const second = await respond({ input: "What is my name?", previous_response_id: first.id, max_output_tokens: 30 });
        assert(second.output_text.includes("Ada"), second.output_text);
        equal((await client.responses.retrieve(first.id)).output_text, first.output_text, "text");
        await client.responses.delete(first.id);
        await thrown(OpenAI.NotFoundError, () => client.responses.retrieve(first.id));
    });

    await check(name, "a stream that is closed early ends its answer", async () => {
        const stream = await respond({ input: COUNT, stream: true, max_output_tokens: server.context / 2 });
        for await (const _ of stream) break;
        await server.isIdle();
    });

    await errors(name, server, kinds, status, ({ key, model, temperature }) =>
        client.withOptions({ apiKey: key }).responses.create({ ...asked, model, temperature }));
}

async function testOpenaiEmbeddings(server) {
    const { OpenAI } = load("openai");
    const client = new OpenAI({ apiKey: KEY, baseURL: server.url, maxRetries: 0 });
    await check("openai", "embeddings: base64, which is the default, and float", async () => {
        const given = { model: server.model, input: ["What news?", "My lord!"] };
        const [own, floats] = [await client.embeddings.create(given), await client.embeddings.create({ ...given, encoding_format: "float" })];
        equal(own.data.length, 2, "vectors");
        for (const [at, { embedding }] of floats.data.entries()) {
            equal(own.data[at].embedding.length, embedding.length, "size");
            assert(embedding.every((value, place) => Math.abs(value - own.data[at].embedding[place]) < 1e-6), "vectors differ");
        }
    });
}

async function testAnthropic(server) {
    const { Anthropic } = load("@anthropic-ai/sdk");
    const { betaTool } = load("@anthropic-ai/sdk/helpers/beta/json-schema");
    const { zodOutputFormat } = load("@anthropic-ai/sdk/helpers/zod");
    const { z } = load("zod");
    const name = "@anthropic-ai/sdk";
    const settings = { baseURL: server.root, maxRetries: 0, timeout: 120_000 };
    const client = new Anthropic({ apiKey: KEY, ...settings });
    const given = { model: server.model, messages: QUESTION, max_tokens: 30, temperature: 0 };
    const create = (more) => client.messages.create({ ...given, ...more });
    const text = ({ content }) => content.filter(({ type }) => type === "text").map((block) => block.text).join("");

    await check(name, "the list of models, and one of them", async () => {
        equal((await collected(client.models.list())).map(({ id }) => id), [server.model], "models");
        equal((await client.models.retrieve(server.model)).type, "model", "type");
    });

    await check(name, "a message, its usage and the identity of its request", async () => {
        const message = await create();
        assert(text(message).includes("Paris") && message.stop_reason === "end_turn", message);
        assert(message.usage.input_tokens > 0 && message.usage.output_tokens > 0, message.usage);
        assert(message._request_id, "no request-id");
    });

    await check(name, "a message with the client's defaults", async () => {
        assert(text(await client.messages.create({ model: server.model, messages: QUESTION, max_tokens: 1000 })), "no text");
    });

    await check(name, "a streamed message has the same text, end and usage", async () => {
        const whole = await create();
        const stream = client.messages.stream(given);
        const pieces = [];
        stream.on("text", (piece) => pieces.push(piece));
        const final = await stream.finalMessage();
        equal([pieces.join(""), text(final)], [text(whole), text(whole)], "text");
        equal([final.stop_reason, final.usage.output_tokens], [whole.stop_reason, whole.usage.output_tokens], "end");
        const events = await collected(await create({ stream: true }));
        equal([events[0].type, events.at(-1).type], ["message_start", "message_stop"], "events");
    });

    await check(name, "a system message, several turns, and a stop sequence", async () => {
        const turns = [{ role: "user", content: "My name is Ada." }];
        turns.push({ role: "assistant", content: (await create({ messages: turns })).content });
        turns.push({ role: "user", content: "What is my name?" });
        const message = await create({ messages: turns, system: "Be brief.", stop_sequences: ["Ada"] });
        equal([message.stop_reason, message.stop_sequence], ["stop_sequence", "Ada"], text(message));
    });

    const tool = { name: "weather", description: "Tells the weather.", input_schema: WEATHER };
    const forced = { messages: RAIN, tools: [tool], tool_choice: { type: "tool", name: "weather" }, max_tokens: 60 };
    await check(name, "a tool that must be called is called, and its result is read", async () => {
        const message = await create(forced);
        const [call] = message.content;
        assert(message.stop_reason === "tool_use" && call.type === "tool_use", message);
        assert(CITIES.includes(call.input.city), call);
        const content = [{ type: "tool_result", tool_use_id: call.id, content: "It rains." }];
        const turns = [...RAIN, { role: "assistant", content: message.content }, { role: "user", content }];
        assert((await create({ messages: turns, tools: [tool] })).content.length, "no answer");
        const stream = client.messages.stream({ ...given, ...forced });
        let json = "";
        stream.on("inputJson", (piece) => (json += piece));
        equal((await stream.finalMessage()).content[0].input, call.input, "streamed input");
        equal(JSON.parse(json), call.input, "pieces of the input");
    });

    await check(name, "json_schema: parse, by zod", async () => {
        const place = z.object({ name: z.enum(["Paris", "London"]), is_capital: z.boolean() });
        const format = { output_config: { format: zodOutputFormat(place) }, max_tokens: LONG };
        const { parsed_output } = await client.messages.parse({ ...given, ...format });
        assert(["Paris", "London"].includes(parsed_output.name), parsed_output);
    });

    await check(name, "count_tokens counts what a message counts", async () => {
        const { usage } = await create();
        const { input_tokens } = await client.messages.countTokens({ model: server.model, messages: QUESTION });
        equal(usage.input_tokens + usage.cache_read_input_tokens, input_tokens, "tokens");
    });

    await check(name, "the runner of tools (beta)", async () => {
        const asked = [];
        const run = ({ city }) => (asked.push(city), "It rains.");
        const own = betaTool({ name: "weather", description: "Tells the weather.", inputSchema: WEATHER, run });
        const runner = client.beta.messages.toolRunner({ ...given, ...forced, tools: [own], max_iterations: 2 });
        equal((await collected(runner)).at(-1).stop_reason, "tool_use", "stop_reason");
        assert(CITIES.includes(asked[0]), asked);
    });

    await check(name, "the key as `authToken`", async () => {
        assert(text(await new Anthropic({ authToken: KEY, apiKey: null, ...settings }).messages.create(given)), "no text");
    });

    await check(name, "a stream that is closed early ends its answer", async () => {
        const stream = await create({ messages: COUNT, stream: true, max_tokens: server.context / 2 });
        for await (const { type } of stream) if (type === "content_block_delta") break;
        await server.isIdle();
    });

    const kinds = ["AuthenticationError", "NotFoundError", "BadRequestError", "RateLimitError"].map((kind) => Anthropic[kind]);
    await errors(name, server, kinds, ({ status }) => status, ({ key, model, temperature }) =>
        client.withOptions({ apiKey: key }).messages.create({ ...given, model, temperature }));
}

async function testOllama(server) {
    const { Ollama } = load("ollama");
    const host = server.root.replace("http://", "");
    const client = new Ollama({ host, headers: { Authorization: `Bearer ${KEY}` } });
    const options = { temperature: 0, num_predict: 8 };
    const given = { model: server.model, messages: QUESTION, options };
    const chat = (more) => client.chat({ ...given, ...more });

    await check("ollama", "the list of models, those that are loaded, and one of them", async () => {
        for (const { models } of [await client.list(), await client.ps()]) equal(models.map((own) => own.name), [server.model], "models");
        const shown = await client.show({ model: server.model });
        assert(shown.capabilities.includes("completion") && shown.details && shown.template, shown);
    });

    await check("ollama", "a chat, and its counts", async () => {
        const answer = await chat();
        assert(answer.message.content && answer.done && answer.eval_count > 0 && answer.prompt_eval_count > 0, answer);
    });

    await check("ollama", "a chat with the client's defaults", async () => {
        assert((await client.chat({ model: server.model, messages: QUESTION })).message.content, "no text");
    });

    await check("ollama", "a streamed chat has the same text", async () => {
        const parts = await collected(await chat({ stream: true }));
        equal(parts.map(({ message }) => message.content).join(""), (await chat()).message.content, "text");
        equal([parts.at(-1).done, parts[0].done], [true, false], "end");
    });

    await check("ollama", "a text, whole, streamed and raw", async () => {
        const asked = { model: server.model, prompt: CAPITAL, options };
        const { response } = await client.generate(asked);
        equal(response, (await chat()).message.content, "the text of a chat");
        const parts = await collected(await client.generate({ ...asked, stream: true }));
        equal(parts.map((part) => part.response).join(""), response, "text");
        const raw = await client.generate({ ...asked, prompt: "The capital of France is", raw: true });
        assert(raw.response.includes("Paris"), raw.response);
    });

    await check("ollama", "a schema as `format`", async () => {
        const { message } = await chat({ format: PLACE, options: { temperature: 0, num_predict: LONG } });
        assert(["Paris", "London"].includes(JSON.parse(message.content).name), message);
    });

    await check("ollama", "tools, and the result of one", async () => {
        const tool = { type: "function", function: { name: "weather", description: "Tells the weather.", parameters: WEATHER } };
        const call = { function: { name: "weather", arguments: { city: "Rome" } } };
        const result = { role: "tool", tool_name: "weather", content: "It rains." };
        const turns = [RAIN, [...RAIN, { role: "assistant", content: "", tool_calls: [call] }, result]];
        for (const messages of turns) {
            // The model may call it or not.
            const { message } = await chat({ messages, tools: [tool], options: { temperature: 0, num_predict: 60 } });
            assert(message.content || message.tool_calls?.length, message);
        }
    });

    await check("ollama", "keep_alive: 0 unloads a model, and the next chat loads it again", async () => {
        equal((await client.generate({ model: server.model, prompt: "", keep_alive: 0 })).done_reason, "unload", "reason");
        equal((await client.ps()).models, [], "models");
        assert((await chat()).message.content, "no text");
    });

    await check("ollama", "a stream that is aborted ends its answer", async () => {
        const stream = await chat({ messages: COUNT, stream: true, options: { num_predict: server.context / 2 } });
        const error = await collected((async function* () {
            for await (const part of stream) {
                stream.abort();
                yield part;
            }
        })()).catch((error) => error);
        equal(error.name, "AbortError", "error");
        await server.isIdle();
    });

    // The class of errors has no name outside.
    const kind = (await chat({ model: "unknown" }).catch((error) => error)).constructor;
    await errors("ollama", server, [kind, kind, kind, kind], (error) => error.status_code, ({ key, model, temperature }) =>
        new Ollama({ host, headers: { Authorization: `Bearer ${key}` } }).chat({ ...given, model, options: { temperature, num_predict: 8 } }));

    await check("ollama", "models are not changed: ResponseError 403", async () => {
        for (const change of [
            () => client.pull({ model: "llama3.2" }),
            () => client.push({ model: "llama3.2" }),
            () => client.create({ model: "mine", from: server.model }),
            () => client.copy({ source: server.model, destination: "mine" }),
            () => client.delete({ model: server.model }),
        ]) equal((await thrown(kind, change)).status_code, 403, "status");
    });
}

async function testOllamaEmbeddings(server) {
    const { Ollama } = load("ollama");
    const client = new Ollama({ host: server.root, headers: { Authorization: `Bearer ${KEY}` } });
    await check("ollama", "embeddings, also in the older form", async () => {
        const { embeddings } = await client.embed({ model: server.model, input: ["What news?", "My lord!"] });
        equal([embeddings.length, embeddings[0].length], [2, embeddings[1].length], "sizes");
        const { embedding } = await client.embeddings({ model: server.model, prompt: "What news?" });
        equal(embedding, embeddings[0], "vector");
    });
}

async function testAi(server) {
    const ai = load("ai");
    const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
    const { z } = load("zod");
    const name = "ai";
    const provider = (apiKey = KEY, more = {}) => createOpenAICompatible({ name: "kiln", baseURL: server.url, apiKey, ...more });
    const model = provider().chatModel(server.model);
    const structured = provider(KEY, { supportsStructuredOutputs: true }).chatModel(server.model);
    const given = { model, prompt: CAPITAL, maxOutputTokens: 30, temperature: 0, maxRetries: 0 };
    const place = z.object({ name: z.enum(["Paris", "London"]), is_capital: z.boolean() });

    await check(name, "generateText, and its usage", async () => {
        const { text, usage, finishReason } = await ai.generateText(given);
        assert(text.includes("Paris") && finishReason === "stop", text);
        assert(usage.inputTokens > 0 && usage.outputTokens > 0, usage);
    });

    await check(name, "generateText with the client's defaults", async () => {
        assert((await ai.generateText({ model, prompt: CAPITAL })).text, "no text");
    });

    await check(name, "streamText has the same text, with usage", async () => {
        const own = provider(KEY, { includeUsage: true }).chatModel(server.model);
        const result = ai.streamText({ ...given, model: own });
        equal((await collected(result.textStream)).join(""), (await ai.generateText(given)).text, "text");
        assert((await result.usage).outputTokens > 0, await result.usage);
    });

    await check(name, "several turns, with instructions", async () => {
        const messages = [{ role: "user", content: "My name is Ada." }];
        messages.push(...(await ai.generateText({ ...given, prompt: undefined, messages })).response.messages);
        messages.push({ role: "user", content: "What is my name?" });
        const { text } = await ai.generateText({ ...given, prompt: undefined, instructions: "Be brief.", messages });
        assert(text.includes("Ada"), text);
    });

    const long = { ...given, model: structured, maxOutputTokens: LONG };
    for (const [what, schema] of [["zod", place], ["a JSON schema", ai.jsonSchema(PLACE)]]) {
        await check(name, `generateObject by ${what}, and Output.object`, async () => {
            const { object } = await ai.generateObject({ ...long, schema });
            assert(["Paris", "London"].includes(object.name), object);
            const { output } = await ai.generateText({ ...long, output: ai.Output.object({ schema }) });
            assert(["Paris", "London"].includes(output.name), output);
        });
    }

    await check(name, "streamObject", async () => {
        const result = ai.streamObject({ ...long, schema: place });
        await collected(result.partialObjectStream);
        assert(["Paris", "London"].includes((await result.object).name), await result.object);
    });

    await check(name, "generateObject with the client's defaults, which ask for any JSON", async () => {
        // A small model may not keep to the schema.
        const error = await ai.generateObject({ ...long, model, schema: place }).catch((error) => error);
        assert(error.object || ai.NoObjectGeneratedError.isInstance(error), String(error));
    });

    const asked = [];
    const weather = ai.tool({
        description: "Tells the weather.",
        inputSchema: z.object({ city: z.enum(CITIES) }),
        execute: ({ city }) => (asked.push(city), "It rains."),
    });
    const rain = { ...given, prompt: RAIN[0].content, tools: { weather }, maxOutputTokens: 60 };
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
        const which = toolChoice.toolName ?? toolChoice;
        await check(name, `a tool that must be called is called: ${which}`, async () => {
            const { toolCalls, finishReason } = await ai.generateText({ ...rain, toolChoice });
            assert(toolCalls[0].toolName === "weather" && CITIES.includes(toolCalls[0].input.city), toolCalls);
            equal([finishReason, asked.pop()], ["tool-calls", toolCalls[0].input.city], "call");
            const streamed = ai.streamText({ ...rain, toolChoice });
            await streamed.consumeStream();
            equal((await streamed.toolCalls)[0].input, toolCalls[0].input, "streamed input");
        });
    }

    await check(name, "the result of a tool is read in the next step", async () => {
        const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "auto" : "required" });
        const { steps } = await ai.generateText({ ...rain, prepareStep, stopWhen: ai.isStepCount(2) });
        equal(steps.length, 2, "steps");
        assert(steps[1].text || steps[1].toolCalls.length, steps[1]);
    });

    await check(name, "a completion", async () => {
        const own = provider().completionModel(server.model);
        assert((await ai.generateText({ ...given, model: own, prompt: "The capital of France is" })).text, "no text");
    });

    await check(name, "a stream that is aborted ends its answer", async () => {
        const ends = new AbortController();
        const result = ai.streamText({ ...given, messages: COUNT, prompt: undefined, maxOutputTokens: server.context / 2, abortSignal: ends.signal });
        for await (const _ of result.textStream) ends.abort();
        await server.isIdle();
    });

    const kinds = [ai.APICallError, ai.APICallError, ai.APICallError, ai.APICallError];
    await errors(name, server, kinds, (error) => error.statusCode, ({ key, model, temperature }) =>
        ai.generateText({ ...given, model: provider(key).chatModel(model), temperature }));
}

async function testAiEmbeddings(server) {
    const ai = load("ai");
    const { createOpenAICompatible } = load("@ai-sdk/openai-compatible");
    await check("ai", "embeddings", async () => {
        const provider = createOpenAICompatible({ name: "kiln", baseURL: server.url, apiKey: KEY });
        const { embeddings } = await ai.embedMany({ model: provider.embeddingModel(server.model), values: ["What news?", "My lord!"] });
        equal([embeddings.length, embeddings[0].length], [2, embeddings[1].length], "sizes");
    });
}

/** The packages of a client, and its tests with a model to chat with and with one of embeddings. */
const CLIENTS = [
    [["openai", "zod"], testOpenai, testOpenaiEmbeddings],
    [["@anthropic-ai/sdk", "zod"], testAnthropic, null],
    [["ollama"], testOllama, testOllamaEmbeddings],
    [["ai", "@ai-sdk/openai-compatible", "zod"], testAi, testAiEmbeddings],
];

/** The version of a package; `null` if it is not installed. */
function version(name) {
    for (const folder of load.resolve.paths(name)) {
        try {
            return JSON.parse(readFileSync(join(folder, name, "package.json"))).version;
        } catch {}
    }
    return null;
}

const packages = [...new Set(CLIENTS.flatMap(([needed]) => needed))];
const versions = Object.fromEntries(packages.map((name) => [name, version(name)]));
for (const [name, own] of Object.entries(versions)) {
    console.log(own ? `# ${name} ${own}` : `NOT CHECKED: ${name} is not installed`);
}
const installed = CLIENTS.filter(([needed]) => needed.every((name) => versions[name]));
for (const [tests, folder, ...more] of [[1, model], [2, DEMO, "--pooling", "mean"]]) {
    const server = await Server.start(folder, ...more);
    for (const client of installed) {
        try {
            await client[tests]?.(server);
        } catch (error) {
            // Checks record their own failures. This is one between them, such as of an import.
            fail(client[0][0], "the client can be used", error);
        }
    }
    server.end();
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
