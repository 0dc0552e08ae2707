// Tests the npm package web/kiln-web in headless Chromium and Firefox (or $CHROMIUM and $FIREFOX), on WebGPU in software.
//
//     tools/build_web.sh
//     npm install --prefix DIR puppeteer-core@24.43.1 openai@6.49.0 vite@8.4.0
//     KILN_NODE_MODULES=DIR/node_modules node tools/test_web.mjs KILN_BINARY [chrome|firefox|both [CHECKS]]
//
// Prints a line per check. CHECKS is a regular expression for the names of those to run; many need the ones before them.
// KILN_TEST_SPEECH names a folder that tools/speech.py makes, for transcription. KILN_TEST_TURNS is the number of models
// with threads that are loaded one after the other, by default 4.
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, symlinkSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { extname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { launch, modules, names } from "./browsers.mjs";

const [binary, only, checks = ""] = process.argv.slice(2);
if (!binary) {
    console.error("test_web: error: say which kiln to compare with");
    process.exit(2);
}
const root = fileURLToPath(new URL("..", import.meta.url));
const demo = join(root, "assets/demo");
/** Each step ends after this many milliseconds. */
const PATIENCE = 240_000;
const TURNS = Number(process.env.KILN_TEST_TURNS ?? 4);

/** The beginning of a worker whose GPU is lost when the page says so. */
const LOSES = `const { requestDevice: given } = globalThis.GPUAdapter?.prototype ?? {};
if (given) GPUAdapter.prototype.requestDevice = async function (...wanted) {
    const device = await given.apply(this, wanted);
    new BroadcastChannel("lose").onmessage = () => device.destroy();
    return device;
};
`;
/** What an isolated page demands of its workers. */
const EMBEDS = { "cross-origin-embedder-policy": "require-corp" };
/** A request for the beginning of a file. */
const PART = /^bytes=0-\d+$/;

/** A server of the package and of models, which can be told to fail. */
class Site {
    /** Requests for files of models. */
    asked = [];
    /** Further folders, by the beginnings of their addresses. */
    folders = {};
    /** What to do wrong: `offline` for models, `down` for everything, `cut` in the middle of weights, `damage` their bytes,
     * send them `whole` alone, have no script for a `thread`. */
    fault = undefined;

    async start() {
        this.server = createServer((request, response) => this.answer(request, response));
        await new Promise((resolve) => this.server.listen(0, "127.0.0.1", resolve));
        this.address = `http://127.0.0.1:${this.server.address().port}`;
        return this;
    }

    answer(request, response) {
        const path = new URL(request.url, this.address).pathname;
        if (this.fault === "down") return request.socket.destroy();
        if (["/", "/isolated"].includes(path)) {
            const isolated = path === "/" ? {} : { "cross-origin-opener-policy": "same-origin", ...EMBEDS };
            return response.writeHead(200, { "content-type": "text/html", ...isolated }).end("<!doctype html><title>test</title>");
        }
        if (path === "/web/kiln-web/thread.js" && this.fault === "thread") return response.writeHead(404).end();
        if (path.startsWith("/web/fixtures/")) return this.send(request, response, join(root, "tests", path.slice(5)));
        if (path === "/web/kiln-web/worker.js") {
            const own = readFileSync(join(root, path), "utf8");
            return response.writeHead(200, { "content-type": "text/javascript", etag: '"1"', ...EMBEDS }).end(LOSES + own);
        }
        if (path.startsWith("/web/")) return this.send(request, response, join(root, path.replace(/\/$/, "/index.html")));
        for (const [begin, folder] of Object.entries(this.folders)) {
            if (path.startsWith(begin)) return this.send(request, response, join(folder, path.slice(begin.length)));
        }
        this.asked.push(PART.test(request.headers.range) ? `${path}, a part` : path);
        if (this.fault === "offline") return request.socket.destroy();
        const file = /^\/hub\/api\//.test(path) ? undefined : path.split("/").pop();
        if (!file) return this.list(response);
        return this.send(request, response, join(demo, file), file.endsWith(".safetensors") ? this.fault : undefined);
    }

    /** The listing of a repository, as the hub gives it. */
    list(response) {
        const weights = readFileSync(join(demo, "model.safetensors"));
        const oid = createHash("sha256").update(weights).digest("hex");
        const names = ["config.json", "generation_config.json", "tokenizer.json"];
        const entries = names.map((path) => ({ type: "file", path }));
        entries.push({ type: "file", path: "model.safetensors", lfs: { oid } });
        response.writeHead(200, { "content-type": "application/json" }).end(JSON.stringify(entries));
    }

    send(request, response, file, fault) {
        if (!statSync(file, { throwIfNoEntry: false })?.isFile()) return response.writeHead(404).end();
        let bytes = readFileSync(file);
        if (fault === "damage") bytes = Buffer.from(bytes.map((byte, at) => (at === bytes.length - 5 ? byte ^ 1 : byte)));
        const types = { ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".html": "text/html", ".css": "text/css" };
        const headers = { "content-type": types[extname(file)] ?? "application/octet-stream", etag: '"1"', "accept-ranges": "bytes", ...EMBEDS };
        const [, first, last] = /^bytes=(\d+)-(\d*)$/.exec((fault !== "whole" && request.headers.range) || "") ?? [];
        const begin = Number(first ?? 0);
        const rest = bytes.subarray(begin, last ? Number(last) + 1 : undefined);
        if (first) headers["content-range"] = `bytes ${begin}-${begin + rest.length - 1}/${bytes.length}`;
        response.writeHead(first ? 206 : 200, { ...headers, "content-length": rest.length });
        if (fault === "cut" && !first) {
            response.write(rest.subarray(0, rest.length >> 1));
            return setTimeout(() => request.socket.destroy(), 200);
        }
        response.end(rest);
    }
}

/** The greedy text of the demo model, by the native program. */
function native(prompt, tokens, ...more) {
    const args = ["run", "--model", demo, "--device", "cpu", "--temperature", "0", "-n", String(tokens), ...more, prompt];
    return execFileSync(binary, args, { encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
}

let [passed, failed] = [0, 0];

async function check(name, work) {
    if (!new RegExp(checks).test(name)) return;
    const begin = Date.now();
    let timer;
    try {
        const late = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error(`took over ${PATIENCE / 1000} s`)), PATIENCE)));
        await Promise.race([work(), late]);
        passed += 1;
        console.log(`ok ${name} (${((Date.now() - begin) / 1000).toFixed(1)} s)`);
    } catch (error) {
        failed += 1;
        console.log(`FAILED ${name}: ${error.message}`);
    } finally {
        clearTimeout(timer);
    }
}

function equal(got, wanted) {
    if (JSON.stringify(got) !== JSON.stringify(wanted)) {
        throw new Error(`is ${JSON.stringify(got)}, not ${JSON.stringify(wanted)}`);
    }
}

function matches(text, pattern) {
    if (!pattern.test(text)) throw new Error(`${JSON.stringify(text)} does not match ${pattern}`);
}

async function open(browser, site, path = "/") {
    const page = await browser.newPage();
    page.complaints = [];
    page.on("console", (line) => line.type() === "error" && page.complaints.push(line.text()));
    page.on("pageerror", (error) => page.complaints.push(String(error)));
    await page.goto(site.address + path);
    await page.evaluate(async () => {
        Object.assign(window, await import("/web/kiln-web/index.js"));
        /** The message of the error of `work`. */
        window.error = async (work) => {
            try {
                await work();
            } catch (error) {
                return `${error.name}: ${error.message}`;
            }
            return "no error";
        };
    });
    return page;
}

const load = (page, source, options = {}) =>
    page.evaluate(
        async (source, options) => {
            window.model?.dispose();
            window.model = await Model.load(source, options);
            return window.model.facts;
        },
        source,
        options,
    );

const generate = (page, prompt, options) =>
    page.evaluate(
        async (prompt, options) => {
            const answer = model.generate(prompt, options);
            return { text: await answer.text(), ...(await answer.outcome) };
        },
        prompt,
        options,
    );

async function run(name, browser) {
    const site = await new Site().start();
    const page = await open(browser, site);
    const greedy = { do_sample: false };
    const PROMPT = "The Constitution";
    await check(`${name}: a folder loads, and its facts are told`, async () => {
        const facts = await load(page, "/demo/", { dtype: "f32" });
        equal([facts.name, facts.dtype, facts.chats], ["demo", "f32", true]);
        console.log(`#   ${facts.adapter || "an adapter without a name"}, ${facts.loadSeconds.toFixed(1)} s`);
    });
    const text = native(PROMPT, 24);
    /** Compares a text with the native one, which begins with the prompt. */
    const same = (answer, wanted) => equal((PROMPT + answer.text).trim(), wanted.trim());
    for (const compile of [true, false]) {
        await check(`${name}: greedy text is that of the native program${compile ? "" : ", with launched steps"}`, async () => {
            const answer = await generate(page, PROMPT, { ...greedy, max_new_tokens: 24, compile });
            same(answer, text);
            equal([answer.generated, answer.stopReason], [24, "length"]);
            console.log(`#   ${answer.tokensPerSecond.toFixed(1)} tokens/s, first token ${answer.timeToFirstToken.toFixed(2)} s`);
        });
    }
    for (const [cache, tokens] of Object.entries({ static: 12, "sink:window=8,sinks=2": 12, "quantized:nbits=4": 12, none: 3 })) {
        await check(`${name}: --cache ${cache} gives the native text`, async () => {
            const answer = await generate(page, PROMPT, { ...greedy, max_new_tokens: tokens, cache });
            equal(answer.cache, cache);
            same(answer, native(PROMPT, tokens, "--cache", cache));
        });
    }
    const further = [{ repetition_penalty: 1.3 }, { prompt_lookup_num_tokens: 3 }, { penalty_alpha: 0.6, top_k: 4 }, { dola_layers: "low" }];
    for (const settings of further) {
        const set = Object.entries(settings).flatMap(([name, value]) => ["--set", `${name}=${value}`]);
        await check(`${name}: ${set.join(" ")} gives the native text`, async () => {
            same(await generate(page, PROMPT, { ...greedy, ...settings, max_new_tokens: 6 }), native(PROMPT, 6, ...set));
        });
    }
    await check(`${name}: a seed repeats an answer`, async () => {
        const first = await generate(page, PROMPT, { do_sample: true, max_new_tokens: 6 });
        const again = await generate(page, PROMPT, { do_sample: true, max_new_tokens: 6, seed: first.seed });
        equal([again.text, again.seed], [first.text, first.seed]);
    });
    await check(`${name}: a grammar is kept to`, async () => {
        const answer = await generate(page, "The date is ", { grammar: { regex: "[0-9]{4}-[0-9]{2}" }, seed: 1, max_new_tokens: 20 });
        matches(answer.text, /^\d{4}-\d\d$/);
    });
    await check(`${name}: beams`, async () => {
        const answer = await generate(page, PROMPT, { num_beams: 3, do_sample: false, max_new_tokens: 8 });
        same(answer, native(PROMPT, 8, "--num-beams", "3"));
    });
    await check(`${name}: a conversation is answered`, async () => {
        const answer = await page.evaluate(async () => await model.chat([{ role: "user", content: "What news?" }], { do_sample: false, max_new_tokens: 8 }).text());
        if (!answer.trim()) throw new Error("there is no answer");
    });
    await check(`${name}: an answer can be ended, and the next one is whole`, async () => {
        const ended = await page.evaluate(async () => {
            const answer = model.generate("ROMEO:", { max_new_tokens: 200, do_sample: false });
            let pieces = 0;
            for await (const _ of answer) if (++pieces === 5) answer.abort();
            return await answer.outcome;
        });
        equal(ended.stopReason, null);
        if (ended.generated > 50) throw new Error(`${ended.generated} tokens were generated`);
        const answer = await generate(page, PROMPT, { ...greedy, max_new_tokens: 24 });
        same(answer, text);
    });
    const QUESTIONS = ["What news?", "Who are you?", "Speak.", "Where is the king?"];
    const ask = { temperature: 0, max_tokens: 8 };
    await check(`${name}: OpenAI's form gives the same answer, whole and streamed`, async () => {
        const [answer, whole, streamed, usage] = await page.evaluate(async (content, ask) => {
            const messages = [{ role: "user", content }];
            const answer = await model.chat(messages, { do_sample: false, max_new_tokens: ask.max_tokens }).text();
            const create = (body) => model.openai.chat.completions.create({ messages, ...ask, ...body });
            const { choices, usage } = await create({});
            let streamed = "";
            for await (const { choices } of await create({ stream: true })) streamed += choices[0]?.delta.content ?? "";
            return [answer, choices[0].message.content, streamed, usage];
        }, QUESTIONS[0], ask);
        equal([whole, streamed], [answer, answer]);
        equal(usage.completion_tokens, ask.max_tokens);
    });
    await check(`${name}: answers that are asked for at once are those of each alone`, async () => {
        const [together, alone] = await page.evaluate(async (questions, ask) => {
            const answer = async (content) => (await model.openai.chat.completions.create({ messages: [{ role: "user", content }], ...ask, logprobs: true })).choices[0];
            const together = await Promise.all(questions.map(answer));
            const alone = [];
            for (const question of questions) alone.push(await answer(question));
            return [together, alone];
        }, QUESTIONS, ask);
        equal(together, alone);
    });
    await check(`${name}: an address of the server gives the native text`, async () => {
        const text = await page.evaluate(async (prompt) => {
            const body = JSON.stringify({ model: model.facts.name, prompt, max_tokens: 8, temperature: 0 });
            const response = await model.fetch("/v1/completions", { method: "POST", headers: { "content-type": "application/json" }, body });
            return (await response.json()).choices[0].text;
        }, PROMPT);
        same({ text }, native(PROMPT, 8));
    });
    await check(`${name}: a schema is kept to, and a cache chosen`, async () => {
        const value = await page.evaluate(async () => {
            const schema = { type: "object", properties: { year: { type: "integer", minimum: 1, maximum: 9 } }, required: ["year"], additionalProperties: false };
            const { choices } = await model.openai.chat.completions.create({
                messages: [{ role: "user", content: "When?" }],
                response_format: { type: "json_schema", json_schema: { name: "when", schema } },
                kiln: { cache: "quantized:nbits=4" },
                seed: 1,
                max_tokens: 40,
            });
            return JSON.parse(choices[0].message.content);
        });
        if (!(value.year >= 1 && value.year <= 9)) throw new Error(JSON.stringify(value));
    });
    await check(`${name}: a prompt that begins like an earlier one is computed from there, with the same answer`, async () => {
        const [first, again, cold] = await page.evaluate(async () => {
            const prompt = Array.from({ length: 300 }, (_, at) => `word ${at}`).join(" ");
            const ask = async (end, settings) => {
                const { choices, usage } = await model.openai.completions.create({ prompt: prompt.slice(0, 800) + end, max_tokens: 6, temperature: 0, ...settings });
                return [choices[0].text, usage.prompt_tokens_details.cached_tokens];
            };
            return [await ask(" first", {}), await ask(" and again", {}), await ask(" and again", { cache_salt: "cold" })];
        });
        equal([first[1], cold[1], again[0]], [0, 0, cold[0]]);
        if (!(again[1] >= 256)) throw new Error(`${again[1]} tokens were reused`);
    });
    await check(`${name}: what was computed of prompts is saved, and restored into a model that is loaded anew`, async () => {
        const told = await page.evaluate(async () => {
            const prompt = Array.from({ length: 300 }, (_, at) => `word ${at}`).join(" ").slice(0, 800);
            const ask = async (model) => {
                const { choices, usage } = await model.openai.completions.create({ prompt, max_tokens: 6, temperature: 0 });
                return [choices[0].text, usage.prompt_tokens_details.cached_tokens];
            };
            const [text] = await ask(model);
            const saved = await model.savePrefixes();
            const other = await Model.load("/demo/");
            const half = await error(() => other.restorePrefixes(saved.slice(0, saved.size / 2)));
            const bytes = new Uint8Array(await saved.arrayBuffer());
            bytes[bytes.length - 9] ^= 1;
            const damaged = await error(() => other.restorePrefixes(new Blob([bytes])));
            const [cold, none] = await ask(other);
            other.dispose();
            const third = await Model.load("/demo/");
            const count = await third.restorePrefixes(saved);
            const [hot, reused] = await ask(third);
            third.dispose();
            return { same: [cold === text, hot === text], none, count, reused, half, damaged };
        });
        equal([told.same, told.none], [[true, true], 0]);
        if (!(told.count >= 1 && told.reused >= 256)) throw new Error(`${told.count} prompts, ${told.reused} tokens`);
        matches(told.half, /ModelError: the saved prompts: .*not a whole/);
        matches(told.damaged, /ModelError: the saved prompts: was altered/);
    });
    await check(`${name}: an answer of the server that is given up ends`, async () => {
        const running = await page.evaluate(async () => {
            const body = { messages: [{ role: "user", content: "Go on." }], max_tokens: 300, ignore_eos: true, stream: true };
            for await (const _ of await model.openai.chat.completions.create(body)) break;
            for (let turns = 0; turns < 200; turns++) {
                const { running } = await (await model.fetch("/health")).json();
                if (!running) return 0;
                await new Promise((resolve) => setTimeout(resolve, 50));
            }
            return "still running";
        });
        equal(running, 0);
    });
    const openaiFolder = modules && join(modules, "openai");
    if (openaiFolder && statSync(openaiFolder, { throwIfNoEntry: false })) {
        site.folders["/openai/"] = openaiFolder;
        await check(`${name}: OpenAI's own client works with the page's fetch`, async () => {
            const text = await page.evaluate(async (content, ask) => {
                const { default: OpenAI } = await import("/openai/index.mjs");
                const client = new OpenAI({ apiKey: "none", baseURL: `${location.origin}/v1`, fetch: model.fetch, dangerouslyAllowBrowser: true });
                const stream = await client.chat.completions.create({ model: model.facts.name, messages: [{ role: "user", content }], ...ask, stream: true });
                let text = "";
                for await (const { choices } of stream) text += choices[0]?.delta.content ?? "";
                return text;
            }, QUESTIONS[0], ask);
            if (!text.trim()) throw new Error("there is no answer");
        });
    } else {
        console.log("# NOT CHECKED: OpenAI's own client; the npm package openai is not in KILN_NODE_MODULES");
    }
    await check(`${name}: recordings of Transformers`, async () => {
        const { summary } = await page.evaluate(async () => await conformance("/web/fixtures/transformers-5.23.0/", { filter: "llama/greedy" }));
        equal([summary.failed, summary.passed > 2], [0, true]);
    });
    await check(`${name}: the microphone is recorded as a WAV file`, async () => {
        const { type, seconds, told, loudest } = await page.evaluate(async () => {
            const recording = await record();
            await new Promise((resolve) => setTimeout(resolve, 2500));
            const told = recording.seconds;
            const file = await recording.stop();
            const heard = await new OfflineAudioContext(1, 1, 16000).decodeAudioData(await file.arrayBuffer());
            return { type: file.type, seconds: heard.duration, told, loudest: Math.max(...heard.getChannelData(0).map(Math.abs)) };
        });
        equal(type, "audio/wav");
        if (!(told > 2 && Math.abs(seconds - told) < 1 && loudest > 0.01)) throw new Error(`${told} s, then ${seconds} s, at most ${loudest}`);
    });
    await check(`${name}: a check can be stopped`, async () => {
        const stopped = async () => {
            const controller = new AbortController();
            return await error(() => conformance("/web/fixtures/transformers-5.23.0/", { filter: "llama/", onCase: () => controller.abort(), signal: controller.signal }));
        };
        matches(await page.evaluate(stopped), /AbortError/);
    });
    const refusals = [
        ["a setting that nobody knows", () => model.generate("a", { temprature: 1 }).text(), /SettingError: unknown setting `temprature`/],
        ["a cache that nobody knows", () => model.generate("a", { cache: "elastic" }).text(), /SettingError: unknown cache strategy `elastic`/],
        ["another way to choose a cache", () => model.generate("a", { use_cache: false }).text(), /SettingError: use_cache: .*`cache`/],
        ["a setting of a wrong type", () => model.generate("a", { max_new_tokens: "ten" }).text(), /SettingError: .*max_new_tokens/],
        ["a cache that the model cannot have", () => model.generate("a", { cache: "sliding" }).text(), /SettingError: .*window/],
        ["a conversation that is none", () => model.chat({ messages: "a" }).text(), /SettingError: conversation: .*sequence/],
        ["embeddings without pooling", () => model.embed(["a"]), /SettingError: pooling/],
        ["a field that nobody knows", () => model.openai.chat.completions.create({ messages: [], temprature: 1 }), /APIError: .*temprature/],
        ["a model that is not there", () => model.openai.embeddings.create({ model: "other", input: "a" }), /APIError: .*other/],
        ["a folder without recordings", () => conformance("/demo/"), /ModelError: .*cases.json/],
        ["a thread too few", () => Model.load("/demo/", { threads: 0 }), /SettingError: threads: is 0, must be/],
        ["threads of a GPU", () => Model.load("/demo/", { device: "wgpu", threads: 1 }), /SettingError: threads: .*`wgpu`/],
        ["a thread more than a page has", () => Model.load("/demo/", { device: "cpu", threads: 2 }), /SettingError: threads: .*isolated/],
        ["a device that nobody knows", () => Model.load("/demo/", { device: "gpu" }), /SettingError: device: is `gpu`/],
        ["an option that nobody knows", () => Model.load("/demo/", { dytpe: "f32" }), /SettingError: .*dytpe/],
        ["a name that is no model's", () => Model.load("demo"), /ModelError: .*write ORG\/NAME/],
        ["a quant that a repository does not have", () => Model.load("kiln/demo:Q4_K_M", { hub: `${location.origin}/hub` }), /ModelError: .*has no GGUF files/],
        ["a folder that is not there", () => Model.load("/nothing/at/all/x.gguf"), /ModelError: .*there is no such file/],
        ["an address that is no model", () => Model.load("https://127.0.0.1:1/x"), /ModelError: .*neither a folder/],
        ["a server that is not there", () => Model.load("http://127.0.0.1:1/demo/"), /ModelError: .*cannot be fetched/],
    ];
    for (const [what, work, wanted] of refusals) {
        await check(`${name}: ${what} is refused`, async () => {
            matches(await page.evaluate(`error(${work})`), wanted);
        });
    }
    await check(`${name}: the memory of a model is told before it is fetched`, async () => {
        site.asked.length = 0;
        const estimate = await page.evaluate(async () => await Model.estimate("/estimate/", { dtype: "f32" }));
        equal(site.asked.filter((path) => path.endsWith("model.safetensors")), []);
        const bytes = statSync(join(demo, "model.safetensors")).size;
        equal([estimate.downloadBytes, estimate.fileBytes, estimate.architecture], [bytes, bytes, "llama"]);
        const facts = await load(page, "/estimate/", { dtype: "f32", selfTest: false });
        equal([estimate.weightBytes, estimate.parameters, estimate.positions], [facts.weightBytes, facts.parameters, facts.positions]);
        const again = await page.evaluate(async () => await Model.estimate("/estimate/", { dtype: "f32" }));
        equal(again, { ...estimate, downloadBytes: 0 });
    });
    await check(`${name}: a model that does not fit is not fetched`, async () => {
        site.asked.length = 0;
        matches(await page.evaluate(() => error(() => Model.load("/small/", { memory: 1e6 }))), /OutOfMemoryError: .*memory/);
        equal(site.asked.filter((path) => path.endsWith("model.safetensors")), []);
    });
    await check(`${name}: a server that sends whole files alone will do`, async () => {
        site.fault = "whole";
        matches(await page.evaluate(() => error(() => Model.estimate("/whole/"))), /ModelError: .*only once the files are fetched/);
        await load(page, "/whole/", { selfTest: false });
        site.fault = undefined;
    });
    await check(`${name}: a GPU that is lost ends the answer, and the next one has it again`, async () => {
        const { length } = page.complaints;
        const [pieces, why, answer] = await page.evaluate(async (prompt) => {
            const answer = model.generate(prompt, { max_new_tokens: 500, do_sample: false });
            let pieces = 0;
            const why = await error(async () => {
                for await (const _ of answer) if (++pieces === 3) new BroadcastChannel("lose").postMessage("now");
            });
            return [pieces, why, await model.generate(prompt, { max_new_tokens: 24, do_sample: false }).text()];
        }, PROMPT);
        // Browsers report what was asked of it afterwards.
        page.complaints.length = length;
        matches(why, /DeviceError: the GPU was lost/);
        if (pieces < 3 || pieces > 400) throw new Error(`${pieces} pieces`);
        same({ text: answer }, text);
    });
    await check(`${name}: files that were chosen load`, async () => {
        const loaded = await page.evaluate(async () => {
            const names = ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors"];
            const file = async (name) => new File([await (await fetch(`/demo/${name}`)).blob()], name);
            const other = await Model.load(await Promise.all(names.map(file)), { selfTest: false });
            const text = await other.generate("The Constitution", { do_sample: false, max_new_tokens: 4 }).text();
            other.dispose();
            return text;
        });
        same({ text: loaded }, native(PROMPT, 4));
    });
    await check(`${name}: a model that is stored loads without the network`, async () => {
        site.asked.length = 0;
        site.fault = "offline";
        await load(page, "/demo/", { selfTest: false });
        const stored = site.asked.filter((path) => path.endsWith(".safetensors"));
        equal(stored, []);
        site.fault = undefined;
    });
    await check(`${name}: a download that is cut says so, and goes on`, async () => {
        site.fault = "cut";
        const cut = () => error(() => Model.load("/cut/", { selfTest: false }));
        matches(await page.evaluate(cut), /ModelError: .*the connection ended/);
        site.fault = undefined;
        await load(page, "/cut/", { selfTest: false });
        const answer = await generate(page, PROMPT, { ...greedy, max_new_tokens: 24 });
        same(answer, text);
    });
    await check(`${name}: damaged weights are found by their hash, and not kept`, async () => {
        site.fault = "damage";
        const hub = `${site.address}/hub`;
        const damaged = (hub) => error(() => Model.load("kiln/demo", { hub, selfTest: false }));
        matches(await page.evaluate(damaged, hub), /ModelError: .*SHA-256/);
        site.fault = undefined;
        await load(page, "kiln/demo", { hub, selfTest: false });
    });
    await check(`${name}: two pages load one model at once, and fetch it once`, async () => {
        const other = await open(browser, site);
        site.asked.length = 0;
        await Promise.all([page, other].map((one) => load(one, "/twice/", { selfTest: false })));
        const fetched = site.asked.filter((path) => path.endsWith("model.safetensors"));
        equal(fetched.length, 1);
        await other.close();
    });
    await check(`${name}: the processor gives the native text, and can be stopped`, async () => {
        const facts = await load(page, "/demo/", { device: "cpu" });
        equal([facts.adapter, facts.dtype], ["WebAssembly (1 thread)", "f32"]);
        const answer = await generate(page, PROMPT, { ...greedy, max_new_tokens: 24 });
        same(answer, text);
        console.log(`#   ${answer.tokensPerSecond.toFixed(1)} tokens/s, first token ${answer.timeToFirstToken.toFixed(2)} s`);
        const [ended, chat] = await page.evaluate(async (content, ask) => {
            const answer = model.generate("ROMEO:", { max_new_tokens: 450, do_sample: false });
            for await (const _ of answer) break;
            const { choices } = await model.openai.chat.completions.create({ messages: [{ role: "user", content }], ...ask });
            return [await answer.outcome, choices[0].message.content];
        }, QUESTIONS[0], ask);
        equal(ended.stopReason, null);
        if (ended.generated > 400) throw new Error(`${ended.generated} tokens were generated`);
        if (!chat.trim()) throw new Error("there is no answer");
    });
    await check(`${name}: a page that is isolated has threads on the processor, which give the native text`, async () => {
        const other = await open(browser, site, "/isolated");
        const every = await load(other, "/demo/", { device: "cpu" });
        matches(every.adapter, /^WebAssembly \(\d+ threads?\)$/);
        for (let turn = 0; turn < TURNS; turn++) {
            const facts = await load(other, "/demo/", { device: "cpu", threads: 3 });
            equal(facts.adapter, "WebAssembly (3 threads)");
            same(await generate(other, PROMPT, { ...greedy, max_new_tokens: 24 }), text);
        }
        const ended = await other.evaluate(() => error(() => Model.load("/demo/", { device: "cpu", threads: 2, signal: AbortSignal.abort() })));
        matches(ended, /AbortError/);
        site.fault = "thread";
        matches(await other.evaluate(() => error(() => Model.load("/demo/", { device: "cpu", threads: 2 }))), /ModuleError: the module failed/);
        site.fault = undefined;
        equal(other.complaints.filter((line) => !/404|thread.js/.test(line)), []);
        await other.close();
    });
    await check(`${name}: recordings of Transformers, on the processor`, async () => {
        const { summary } = await page.evaluate(async () => await conformance("/web/fixtures/transformers-5.23.0/", { filter: "llama/greedy", device: "cpu" }));
        equal([summary.failed, summary.passed > 2], [0, true]);
    });
    await check(`${name}: stored files are listed, and deleted`, async () => {
        const [before, after] = await page.evaluate(async () => {
            const before = await Model.stored();
            await Model.forget();
            return [before, await Model.stored()];
        });
        equal([before.some(({ url, complete }) => url.endsWith("/demo/model.safetensors") && complete), after], [true, []]);
    });
    await check(`${name}: nothing complained`, async () => {
        // Browsers report each request that fails.
        equal(page.complaints.filter((line) => !/Failed to load resource|ERR_|NetworkError|404/.test(line)), []);
    });
    for (const [file, wanted] of [["index.html", /Models run in this browser/], ["conformance.html", /Compare/], ["doctor.html", /maxBufferSize/]]) {
        await check(`${name}: ${file} opens`, async () => {
            const other = await browser.newPage();
            const complaints = [];
            other.on("pageerror", (error) => complaints.push(String(error)));
            await other.goto(`${site.address}/web/${file}`, { waitUntil: "load" });
            await other.waitForFunction((wanted) => new RegExp(wanted).test(document.body.innerText), {}, wanted.source);
            equal(complaints, []);
            await other.close();
        });
    }
    await check(`${name}: the page of the server chats with a model in the browser`, async () => {
        const other = await browser.newPage();
        await other.goto(`${site.address}/web/index.html`);
        await other.type("input[name=source]", "/demo/");
        await other.click("#load");
        await other.waitForFunction(() => document.getElementById("model").value === "demo", { timeout: PATIENCE });
        await other.click("#settings-summary");
        await other.type("[name=max_tokens]", "6");
        await other.type("#question", "What news?");
        await other.click("#send");
        await other.waitForFunction(() => /6 tokens/.test(document.querySelector(".figures")?.textContent), { timeout: PATIENCE });
        equal(await other.$eval("#failure", (failure) => failure.textContent), "");
        // A saved conversation, in a page that is opened anew. It is too short to have a cache.
        const chat = await other.evaluate(() => new Promise((resolve) => {
            const link = HTMLAnchorElement.prototype.click;
            HTMLAnchorElement.prototype.click = async function () {
                HTMLAnchorElement.prototype.click = link;
                resolve(await (await fetch(this.href)).text());
            };
            document.getElementById("save-chat").click();
        }));
        await other.click("#new-chat");
        await other.evaluate((chat) => {
            const files = new DataTransfer();
            files.items.add(new File([chat], "demo.kiln-chat"));
            const input = document.getElementById("open-chat");
            input.files = files.files;
            input.dispatchEvent(new Event("change"));
        }, chat);
        await other.waitForFunction(() => /too short for a cache/.test(document.getElementById("loading").textContent), { timeout: PATIENCE });
        equal(await other.$eval(".question", (question) => question.textContent), "What news?");
        await other.close();
    });
    await check(`${name}: without a network, the pages open, and a stored model answers`, async () => {
        let other = await browser.newPage();
        await other.goto(`${site.address}/web/doctor.html`);
        await other.evaluate(async () => await navigator.serviceWorker.ready);
        await other.close();
        site.fault = "down";
        for (const [file, wanted] of [["", /Models run in this browser/], ["index.html", /Models run in this browser/], ["conformance.html", /Compare/]]) {
            other = await browser.newPage();
            await other.goto(`${site.address}/web/${file}`);
            await other.waitForFunction((wanted) => new RegExp(wanted).test(document.body.innerText), {}, wanted.source);
            await other.close();
        }
        other = await browser.newPage();
        await other.goto(`${site.address}/web/index.html`);
        await other.type("input[name=source]", "/demo/");
        await other.click("#load");
        await other.waitForFunction(() => document.getElementById("model").value === "demo", { timeout: PATIENCE });
        equal(await other.$eval("#failure", (failure) => failure.textContent), "");
        await other.close();
        site.fault = undefined;
    });
    await check(`${name}: the example without a bundler answers`, async () => {
        const other = await browser.newPage();
        await other.goto(`${site.address}/web/examples/plain.html?model=/demo/`);
        await other.waitForSelector("button:enabled", { timeout: PATIENCE });
        await other.click("button");
        await other.waitForFunction(() => document.getElementById("answer").textContent.trim(), { timeout: PATIENCE });
        await other.close();
    });
    const speech = process.env.KILN_TEST_SPEECH;
    if (speech) {
        await check(`${name}: the example that transcribes does so`, async () => {
            site.folders["/whisper/"] = join(speech, "whisper-tiny.en");
            const other = await browser.newPage();
            // Whisper takes minutes on a GPU in software.
            await other.goto(`${site.address}/web/examples/transcribe.html?model=/whisper/&device=cpu`);
            await other.waitForSelector("input:enabled", { timeout: PATIENCE });
            const input = await other.$("input");
            await input.uploadFile(join(speech, "speech/0870.wav"));
            await other.waitForFunction(() => document.getElementById("transcript").textContent, { timeout: PATIENCE });
            const native = [binary, ["transcribe", "--model", join(speech, "whisper-tiny.en"), "--device", "cpu", join(speech, "speech/0870.wav")]];
            const wanted = execFileSync(...native, { encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
            equal(await other.$eval("#transcript", (transcript) => transcript.textContent.trim()), wanted.trim());
            await other.close();
        });
    } else {
        console.log("# NOT CHECKED: transcription; KILN_TEST_SPEECH names no folder with Whisper and speech");
    }
    const vite = modules && join(modules, "vite/bin/vite.js");
    if (vite && statSync(vite, { throwIfNoEntry: false })) {
        await check(`${name}: the example with Vite is built, and answers`, async () => {
            const folder = mkdtempSync(join(tmpdir(), "kiln-vite-"));
            try {
                cpSync(join(root, "web/examples/vite"), folder, { recursive: true });
                mkdirSync(join(folder, "node_modules"));
                symlinkSync(join(root, "web/kiln-web"), join(folder, "node_modules/kiln-web"));
                execFileSync(process.execPath, [vite, "build", "--base", "/vite/"], { cwd: folder, stdio: "ignore" });
                site.folders["/vite/"] = join(folder, "dist");
                const other = await browser.newPage();
                await other.goto(`${site.address}/vite/index.html?model=/demo/`);
                await other.waitForFunction(() => document.getElementById("answer").textContent.trim(), { timeout: PATIENCE });
                await other.close();
            } finally {
                rmSync(folder, { recursive: true });
            }
        });
    } else {
        console.log("# NOT CHECKED: the example with Vite; the npm package vite is not in KILN_NODE_MODULES");
    }
    await check(`${name}: the page for conformance compares`, async () => {
        const other = await browser.newPage();
        await other.goto(`${site.address}/web/conformance.html`);
        await other.type("input[name=filter]", "mel/");
        await other.click("#start");
        await other.waitForFunction(() => /passed/.test(document.getElementById("status").textContent), { timeout: PATIENCE });
        matches(await other.$eval("#status", (status) => status.textContent), / 2 passed, 0 failed, 0 skipped$/);
        await other.close();
    });
    site.server.close();
}

for (const name of names(only === "both" ? undefined : only)) {
    let browser;
    try {
        browser = await launch(name, PATIENCE);
        console.log(`# ${await browser.version()}`);
        await run(name, browser);
    } catch (error) {
        failed += 1;
        console.log(`FAILED ${name}: ${error.stack}`);
    } finally {
        await browser?.close();
    }
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
