// Measures prompt and decode speed of a GGUF file with llama.cpp, as `kiln bench` measures it, and writes a report that `kiln bench --against` reads.
//
//     npm install --prefix DIR --ignore-scripts node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64-vulkan@3.22.1
//     cp tools/bench_llama.mjs DIR && node DIR/bench_llama.mjs FILE.gguf [--gpu vulkan|cuda|metal|none] [-p 128] [-n 32] [-r 5] [--threads 2] [--json REPORT]
//
// `pp<P>`: P random tokens from an empty cache. `tg<N>`: N greedy tokens behind one. Each is run once uncounted, then -r times; tokens a second, and
// their sample standard deviation. On software Vulkan, which llama.cpp leaves out by default, set GGML_VK_VISIBLE_DEVICES=0.
import { writeFileSync } from "node:fs";
import { parseArgs } from "node:util";
import { getLlama } from "node-llama-cpp";

function fail(message) {
    console.error(`bench_llama: error: ${message}`);
    process.exit(2);
}

function count(text, name) {
    if (!/^\d+$/.test(text)) {
        fail(`-${name} is "${text}", and must be a whole number`);
    }
    return Number(text);
}

const options = Object.fromEntries(["gpu", "threads", "json"].map((name) => [name, { type: "string" }]));
const short = Object.fromEntries(["p", "n", "r"].map((name) => [name, { type: "string", short: name }]));
let parsed;
try {
    parsed = parseArgs({ options: { ...options, ...short }, allowPositionals: true });
} catch (error) {
    fail(error.message);
}
const { values, positionals } = parsed;
if (positionals.length !== 1) {
    fail("say which GGUF file to measure");
}
const [p, n, r] = [["p", "128"], ["n", "32"], ["r", "5"]].map(([name, usual]) => count(values[name] ?? usual, name));
const threads = count(values.threads ?? "2", "-threads");
const gpu = values.gpu === "none" ? false : (values.gpu ?? "vulkan");

const llama = await getLlama({ gpu, build: "never", logLevel: "error", maxThreads: threads }).catch((error) => fail(error.message));
const model = await llama.loadModel({ modelPath: positionals[0] }).catch((error) => fail(error.message));
const context = await model.createContext({ contextSize: Math.max(p, n + 1) + 8, batchSize: 512, threads });
const sequence = context.getSequence();

// From 1,000 on, tokens are words in all vocabularies that are measured.
const prompt = Array.from({ length: p }, (_, i) => 1000 + ((i * 7919) % 10000));

async function seconds(work) {
    await sequence.clearHistory();
    const start = process.hrtime.bigint();
    await work();
    return Number(process.hrtime.bigint() - start) / 1e9;
}

async function prefill() {
    await sequence.evaluateWithoutGeneratingNewTokens(prompt);
}

async function decode() {
    let left = n;
    // End tokens end nothing here.
    for await (const _ of sequence.evaluate([1000], { temperature: 0, yieldEogToken: true })) {
        left -= 1;
        if (left === 0) {
            break;
        }
    }
}

const results = [];
for (const [test, tokens, work] of [[`pp${p}`, p, prefill], [`tg${n}`, n, decode]]) {
    if (tokens === 0) {
        continue;
    }
    await seconds(work);
    const samples = [];
    for (let i = 0; i < r; i++) {
        samples.push(tokens / (await seconds(work)));
    }
    const mean = samples.reduce((sum, x) => sum + x, 0) / r;
    const stddev = Math.sqrt(samples.reduce((sum, x) => sum + (x - mean) ** 2, 0) / Math.max(r - 1, 1));
    results.push({ test, tokens_per_second: mean, stddev, samples });
    console.log(`${test.padEnd(8)} ${mean.toFixed(2).padStart(10)} tokens/s ± ${stddev.toFixed(2)}`);
}
const gpus = gpu ? await llama.getGpuDeviceNames() : [];
console.log(`llama.cpp ${llama.llamaCppRelease.release}, ${gpu || "cpu"} ${gpus.join(", ")}, ${threads} threads, layers on the GPU: ${model.gpuLayers}`);
if (values.json) {
    const report = { tool: "llama.cpp", version: llama.llamaCppRelease.release, threads, dtype: model.fileInfo.metadata.general.file_type?.toString() ?? "", results };
    writeFileSync(values.json, JSON.stringify(report, null, 1));
}
process.exit(0);
