// Times a GGUF file in headless browsers, beside wllama (llama.cpp in WebAssembly), transformers.js and the native
// program.
//
//     tools/build_web.sh
//     npm install --ignore-scripts --prefix DIR puppeteer-core@24.43.1 @wllama/wllama@3.13.0 @huggingface/transformers@4.3.2
//     KILN_NODE_MODULES=DIR/node_modules node tools/bench_web.mjs KILN_BINARY MODEL.gguf [chrome|firefox|both [ONNX_FOLDER]]
//
// Each gets the file as a Blob that the page holds already, a prompt of about 64 tokens, and 32 tokens to generate, once
// cold and once warm. transformers.js gets ONNX_FOLDER from this server: the model's tokenizer and config, and
// onnx/model_q4.onnx, as tools/onnx_q4.py makes it. The GPU is in software, unless the browser finds another. Prints a
// table.
import { execFileSync } from "node:child_process";
import { createReadStream, readFileSync, statSync } from "node:fs";
import { createServer } from "node:http";
import { basename, extname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { brotliCompressSync, constants, gzipSync } from "node:zlib";
import { launch, modules, names } from "./browsers.mjs";

const [binary, file, only, onnx] = process.argv.slice(2);
if (!binary || !file) {
    console.error("bench_web: error: say which kiln to compare with, and which GGUF file to load");
    process.exit(2);
}
const root = fileURLToPath(new URL("..", import.meta.url));
const wllama = modules && join(modules, "@wllama/wllama/esm");
const transformers = modules && join(modules, "@huggingface/transformers/dist");
const runtime = modules && join(modules, "onnxruntime-web/dist");
const TOKENS = 32;
const WORDS = "the quick brown fox jumps over the lazy dog and then it sleeps under a tree near the old river".split(" ");
/** Prompts that begin differently, so that nothing is reused. */
const prompt = (number) => [`${number}`, ...Array.from({ length: 63 }, (_, at) => WORDS[(at * (number + 1)) % WORDS.length])].join(" ");

/** Pages with threads need these headers. */
const HEADERS = { "cross-origin-opener-policy": "same-origin", "cross-origin-embedder-policy": "require-corp" };
const TYPES = { ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm" };
const server = createServer((request, response) => {
    const path = new URL(request.url, "http://localhost").pathname;
    const places = { "/web/": join(root, "web"), "/wllama/": wllama, "/transformers/": transformers, "/runtime/": runtime, "/onnx/model/": onnx };
    const begin = Object.keys(places).find((begin) => path.startsWith(begin));
    const found = path === "/model.gguf" ? file : begin && places[begin] && join(places[begin], path.slice(begin.length));
    if (path === "/") return response.writeHead(200, { ...HEADERS, "content-type": "text/html" }).end("<!doctype html><title>bench</title>");
    if (!found || !statSync(found, { throwIfNoEntry: false })?.isFile()) return response.writeHead(404, HEADERS).end();
    response.writeHead(200, { ...HEADERS, "content-type": TYPES[extname(found)] ?? "application/octet-stream", "content-length": statSync(found).size });
    createReadStream(found).pipe(response);
});
await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
const address = `http://127.0.0.1:${server.address().port}/`;

/** Loads the file, and answers two prompts. For pages: `begin` loads, and returns a function that streams pieces. */
async function timed(page, begin, options, prompts, tokens) {
    return await page.evaluate(
        async (begin, options, prompts, tokens) => {
            const blob = await (await fetch("/model.gguf")).blob();
            const started = performance.now();
            // A text of this program.
            const { stream, end, heap, threads } = await new Function(`return (${begin})(...arguments)`)(blob, options);
            const times = { load: performance.now() - started };
            for (const [at, prompt] of prompts.entries()) {
                const [asked, arrived] = [performance.now(), []];
                await stream(prompt, tokens, () => arrived.push(performance.now()));
                const [first, last] = [arrived[0], arrived.at(-1)];
                times[at ? "warm" : "cold"] = { first: first - asked, rate: (1000 * (tokens - 1)) / (last - first) };
            }
            times.heap = await heap?.();
            times.threads = threads;
            await end();
            return times;
        },
        begin.toString(),
        options,
        prompts,
        tokens,
    );
}

async function kiln(blob, options) {
    const { Model } = await import("/web/kiln-web/index.js");
    const model = await Model.load([new File([blob], "model.gguf")], options);
    return {
        async stream(prompt, max_new_tokens, onPiece) {
            const answer = model.generate(prompt, { do_sample: false, max_new_tokens, min_new_tokens: max_new_tokens });
            for await (const _ of answer) onPiece();
        },
        heap: async () => (await model.memory()).heapBytes,
        threads: Number(/\((\d+) threads\)/.exec(model.facts.adapter)?.[1]),
        end: () => model.dispose(),
    };
}

async function peer(blob, { layers }) {
    const { Wllama } = await import("/wllama/index.js");
    const model = new Wllama({ default: "/wllama/wasm/wllama.wasm" }, { suppressNativeLog: true });
    await model.loadModel([blob], { n_ctx: 1024, n_gpu_layers: layers });
    return {
        async stream(prompt, max_tokens, onPiece) {
            const stream = await model.createCompletion({ prompt, max_tokens, temperature: 0, ignore_eos: true, stream: true });
            for await (const { choices } of stream) if (choices[0]?.text) onPiece();
        },
        threads: model.getNumThreads(),
        end: () => model.exit(),
    };
}

async function hugging(_, { device }) {
    const { AutoModelForCausalLM, AutoTokenizer, TextStreamer, env } = await import("/transformers/transformers.min.js");
    Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/onnx/", useBrowserCache: false });
    env.backends.onnx.wasm.wasmPaths = "/runtime/";
    const tokenizer = await AutoTokenizer.from_pretrained("model");
    const model = await AutoModelForCausalLM.from_pretrained("model", { dtype: "q4", device });
    return {
        async stream(prompt, max_new_tokens, token_callback_function) {
            const streamer = new TextStreamer(tokenizer, { skip_prompt: true, token_callback_function, callback_function() {} });
            await model.generate({ ...tokenizer(prompt), max_new_tokens, min_new_tokens: max_new_tokens, do_sample: false, streamer });
        },
        threads: device === "wasm" ? env.backends.onnx.wasm.numThreads : undefined,
        end: () => model.dispose(),
    };
}

const rows = [];
const row = (...cells) => rows.push(cells.map(String));
const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;

for (const name of names(only === "both" ? undefined : only)) {
    const runs = [["kiln-web, WebGPU", kiln, { device: "wgpu" }], ["kiln-web, CPU", kiln, { device: "cpu", threads: 1 }], ["kiln-web, CPU", kiln, { device: "cpu" }]];
    if (wllama && statSync(wllama, { throwIfNoEntry: false })) {
        runs.push(["wllama, WebGPU", peer, { layers: 999 }], ["wllama, CPU", peer, { layers: 0 }]);
    }
    if (onnx) runs.push(["transformers.js, WebGPU", hugging, { device: "webgpu" }], ["transformers.js, CPU", hugging, { device: "wasm" }]);
    for (const [what, begin, options] of runs) {
        // A browser for each, so that none has the memory of another.
        const browser = await launch(name, 900_000);
        try {
            const page = await browser.newPage();
            await page.goto(address);
            // Browsers compile a module while it computes, and Kiln keeps the results of comparing kernels.
            await timed(page, begin, options, [prompt(0)], TOKENS);
            const times = await timed(page, begin, options, [prompt(1), prompt(2)], TOKENS);
            const threads = times.threads > 1 ? `, ${times.threads} threads` : "";
            const heap = times.heap ? `${(times.heap / 1e6).toFixed(0)} MB` : "";
            row(`${what}${threads}, ${await browser.version()}`, seconds(times.load), seconds(times.cold.first), seconds(times.warm.first), times.warm.rate.toFixed(1), heap);
        } catch (error) {
            row(`${what}, ${name}: ${error.message.split("\n")[0]}`, "", "", "", "", "");
        } finally {
            await browser.close();
        }
        console.error(rows.at(-1).join(" | "));
    }
}
server.close();
for (const device of ["wgpu", "cpu"]) {
    const bench = ["bench", "--model", file, "--device", device, "-p", "64", "-n", String(TOKENS), "-r", "1", "-o", "json"];
    const native = JSON.parse(execFileSync(binary, bench, { encoding: "utf8", stdio: ["ignore", "pipe", "inherit"] }));
    const [read, wrote] = native.results;
    row(`native, ${native.adapter}`, "", seconds(1000 * read.warm_up), seconds(64_000 / read.tokens_per_second), wrote.tokens_per_second.toFixed(1), "");
}

console.log(`${basename(file)}, prompts of 64 words, ${TOKENS} tokens\n`);
const head = ["", "load", "first token, cold", "warm", "tokens/s", "memory of the module"];
for (const cells of [head, head.map(() => "---"), ...rows]) console.log(`| ${cells.join(" | ")} |`);
console.log("");
for (const form of ["module", "module-cpu", "module-threads"]) {
    const wasm = readFileSync(join(root, "web/kiln-web", form, "kiln_web_bg.wasm"));
    const brotli = brotliCompressSync(wasm, { params: { [constants.BROTLI_PARAM_LGWIN]: 24, [constants.BROTLI_PARAM_SIZE_HINT]: wasm.length } });
    console.log(`${form}: ${wasm.length} bytes, by gzip ${gzipSync(wasm, { level: 9 }).length}, by brotli ${brotli.length}`);
}
