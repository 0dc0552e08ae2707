// The worker that holds a model. It answers each call of the page with messages that have the number of the call.

import init, { Sha256, WebFile, WebModel } from "./module/kiln_web.js";
import { collect } from "./sources.js";
import { Reader, forget, list } from "./storage.js";

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
        await init();
        if (!navigator.gpu) {
            throw Object.assign(new Error("this browser has no WebGPU, or it is switched off"), { name: "DeviceError" });
        }
        const tell = (progress) => self.postMessage({ call, progress });
        const onBytes = (name) => (loaded, total) => tell({ stage: "download", file: name, loaded, total });
        const hasher = () => new Sha256();
        const files = await collect(source, { hub, signal, onBytes, hasher });
        const opened = files.map(([name, blob]) => new WebFile(name, new Reader(blob)));
        const onProgress = (loaded, total) => tell({ stage: "load", loaded, total });
        // Files that were chosen have no name together.
        const name = Array.isArray(source) ? undefined : decodeURIComponent(source).replace(/\/$/, "").split("/").pop();
        model = await WebModel.load(opened, JSON.stringify({ name, ...own }), onProgress);
        return JSON.parse(model.facts());
    },

    generate: (call, { prompt, options }, signal) =>
        answer(call, signal, (onPiece) => model.generate(prompt, JSON.stringify(options), onPiece)),

    chat: (call, { conversation, options }, signal) =>
        answer(call, signal, (onPiece) => model.chat(JSON.stringify(conversation), JSON.stringify(options), onPiece)),

    embed: (_, { texts }, signal) => inTurn(signal, () => model.embed(texts)),

    count: (_, { text }) => model.count(text),

    list: () => list(),

    forget: (_, { beginning }) => forget(beginning),
};

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
