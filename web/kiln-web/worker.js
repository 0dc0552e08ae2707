// The worker that holds a model. It answers each call of the page with messages that have the number of the call.

import init, { Sha256, WebFile, WebModel, conformance, doctor, verdicts } from "./module/kiln_web.js";
import { collect, fixtures } from "./sources.js";
import { Reader, forget, list, readVerdicts, writeVerdicts } from "./storage.js";

// What the module says before it ends.
const log = console.error;
console.error = (...values) => {
    if (String(values[0]).startsWith("kiln panicked")) self.postMessage({ panic: String(values[0]).split("\n")[0] });
    log(...values);
};

let model;
/** Calls that can be ended, by their number. */
const running = new Map();
/** One thing is computed at a time. */
let queue = Promise.resolve();

const calls = {
    async load(call, { source, options }, signal) {
        const { hub, ...own } = options;
        await start();
        const tell = (progress) => self.postMessage({ call, progress });
        const onBytes = (name) => (loaded, total) => tell({ stage: "download", file: name, loaded, total });
        const hasher = () => new Sha256();
        const files = await collect(source, { hub, signal, onBytes, hasher });
        const onProgress = (loaded, total) => tell({ stage: "load", loaded, total });
        // Files that were chosen have no name together.
        const name = Array.isArray(source) ? undefined : decodeURIComponent(source).replace(/\/$/, "").split("/").pop();
        const settings = { name, ...own, verdicts: await readVerdicts() };
        model = await WebModel.load(opened(files), JSON.stringify(settings), onProgress);
        await writeVerdicts(verdicts());
        return JSON.parse(model.facts());
    },

    generate: (call, { prompt, options }, signal) =>
        answer(call, signal, (onPiece) => model.generate(prompt, JSON.stringify(options), onPiece)),

    chat: (call, { conversation, options }, signal) =>
        answer(call, signal, (onPiece) => model.chat(JSON.stringify(conversation), JSON.stringify(options), onPiece)),

    async fetch(call, { method, path, headers, body }, signal) {
        const response = await model.fetch(method, path, JSON.stringify(headers), body);
        const abort = () => response.abort();
        try {
            self.postMessage({ call, head: { status: response.status, headers: JSON.parse(response.headers) } });
            signal.addEventListener("abort", abort);
            if (signal.aborted) abort();
            for (let bytes; (bytes = await response.next()); ) self.postMessage({ call, bytes }, [bytes.buffer]);
            signal.throwIfAborted();
        } finally {
            signal.removeEventListener("abort", abort);
            response.free();
        }
    },

    embed: (_, { texts }, signal) => inTurn(signal, () => model.embed(texts)),

    count: (_, { text }) => model.count(text),

    async conformance(call, { source, filter = "", cache }, signal) {
        await start();
        const onBytes = (file) => (loaded, total) => self.postMessage({ call, progress: { stage: "download", file, loaded, total } });
        const files = await fixtures(source, filter, { signal, onBytes });
        const onCase = (line) => {
            signal.throwIfAborted();
            self.postMessage({ call, line: JSON.parse(line) });
        };
        const result = await inTurn(signal, () => conformance(opened(files), filter, cache, onCase)).catch((error) => {
            signal.throwIfAborted();
            throw error;
        });
        return JSON.parse(result);
    },

    async doctor(call, { full }, signal) {
        await start();
        const onKernel = (loaded, total) => self.postMessage({ call, progress: { stage: "compare", loaded, total } });
        return JSON.parse(await inTurn(signal, () => doctor(full ?? false, onKernel)));
    },

    list: () => list(),

    forget: (_, { beginning }) => forget(beginning),
};

async function start() {
    await init();
    if (!navigator.gpu) {
        throw Object.assign(new Error("this browser has no WebGPU, or it is switched off"), { name: "DeviceError" });
    }
}

const opened = (files) => files.map(([name, blob]) => new WebFile(name, new Reader(blob)));

/** Computes something after what was asked for before it. */
function inTurn(signal, compute) {
    const done = queue.then(() => {
        signal.throwIfAborted();
        return compute();
    });
    queue = done.catch(() => {});
    return done;
}

/** Computes an answer, and sends its pieces. */
async function answer(call, signal, compute) {
    const onPiece = (piece) => {
        if (signal.aborted) return false;
        self.postMessage({ call, piece });
        return true;
    };
    return JSON.parse(await inTurn(signal, () => compute(onPiece)));
}

self.onmessage = async ({ data: { call, method, values, abort } }) => {
    if (abort !== undefined) {
        running.get(abort)?.abort();
        return;
    }
    const controller = new AbortController();
    running.set(call, controller);
    try {
        self.postMessage({ call, result: await calls[method](call, values, controller.signal) });
    } catch (error) {
        self.postMessage({ call, error: { name: error?.name ?? "Error", message: error?.message ?? String(error) } });
    } finally {
        running.delete(call);
    }
};
