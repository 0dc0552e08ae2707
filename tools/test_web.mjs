// Tests the npm package web/kiln-web in headless Chromium and Firefox (or $CHROMIUM and $FIREFOX), on WebGPU in software.
//
//     tools/build_web.sh
//     npm install --prefix DIR puppeteer-core@24.43.1
//     KILN_NODE_MODULES=DIR/node_modules node tools/test_web.mjs KILN_BINARY [chrome|firefox]
//
// Prints a line per check.
import { execFileSync } from "node:child_process";
import { createHash } from "node:crypto";
import { readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { extname, join } from "node:path";
import { fileURLToPath } from "node:url";

const modules = process.env.KILN_NODE_MODULES;
const puppeteer = createRequire(modules ? join(modules, "x.js") : import.meta.url)("puppeteer-core");
const [binary, only] = process.argv.slice(2);
if (!binary) {
    console.error("test_web: error: say which kiln to compare with");
    process.exit(2);
}
const root = fileURLToPath(new URL("..", import.meta.url));
const demo = join(root, "assets/demo");
const browsers = {
    chrome: {
        executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
        args: ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"],
    },
    firefox: {
        executablePath: process.env.FIREFOX ?? "/usr/bin/firefox-esr",
        extraPrefsFirefox: { "dom.webgpu.enabled": true, "gfx.webgpu.ignore-blocklist": true },
    },
};
/** Each step ends after this many milliseconds. */
const PATIENCE = 240_000;

/** A server of the package and of models, which can be told to fail. */
class Site {
    /** Requests for files of models. */
    asked = [];
    /** What to do wrong: `offline`, `cut` in the middle of weights, `damage` their bytes. */
    fault = undefined;

    async start() {
        this.server = createServer((request, response) => this.answer(request, response));
        await new Promise((resolve) => this.server.listen(0, "127.0.0.1", resolve));
        this.address = `http://127.0.0.1:${this.server.address().port}`;
        return this;
    }

    answer(request, response) {
        const path = new URL(request.url, this.address).pathname;
        if (path === "/") return response.writeHead(200, { "content-type": "text/html" }).end("<!doctype html><title>test</title>");
        if (path.startsWith("/package/")) return this.send(request, response, join(root, "web/kiln-web", path.slice(9)));
        this.asked.push(path);
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
        const types = { ".js": "text/javascript", ".wasm": "application/wasm" };
        const headers = { "content-type": types[extname(file)] ?? "application/octet-stream", etag: '"1"', "accept-ranges": "bytes" };
        const begin = Number(/^bytes=(\d+)-$/.exec(request.headers.range ?? "")?.[1] ?? 0);
        if (begin) headers["content-range"] = `bytes ${begin}-${bytes.length - 1}/${bytes.length}`;
        const rest = bytes.subarray(begin);
        response.writeHead(begin ? 206 : 200, { ...headers, "content-length": rest.length });
        if (fault === "cut" && !begin) {
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

async function open(browser, site) {
    const page = await browser.newPage();
    page.complaints = [];
    page.on("console", (line) => line.type() === "error" && page.complaints.push(line.text()));
    page.on("pageerror", (error) => page.complaints.push(String(error)));
    await page.goto(site.address);
    await page.evaluate(async () => {
        const { Model } = await import("/package/index.js");
        window.Model = Model;
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
    const refusals = [
        ["a setting that nobody knows", () => model.generate("a", { temprature: 1 }).text(), /SettingError: unknown setting `temprature`/],
        ["a cache that nobody knows", () => model.generate("a", { cache: "elastic" }).text(), /SettingError: unknown cache strategy `elastic`/],
        ["another way to choose a cache", () => model.generate("a", { use_cache: false }).text(), /SettingError: use_cache: .*`cache`/],
        ["a setting of a wrong type", () => model.generate("a", { max_new_tokens: "ten" }).text(), /SettingError: .*max_new_tokens/],
        ["a cache that the model cannot have", () => model.generate("a", { cache: "sliding" }).text(), /SettingError: .*window/],
        ["a conversation that is none", () => model.chat({ messages: "a" }).text(), /SettingError: conversation: .*sequence/],
        ["embeddings without pooling", () => model.embed(["a"]), /SettingError: pooling/],
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
    site.server.close();
}

for (const [name, { executablePath, args, extraPrefsFirefox }] of Object.entries(browsers)) {
    if (only && only !== name) continue;
    let browser;
    try {
        browser = await puppeteer.launch({ browser: name, executablePath, headless: true, args, extraPrefsFirefox, protocolTimeout: PATIENCE });
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
