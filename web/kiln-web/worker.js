// The worker that holds a model. It answers each call of the page with messages that have the number of the call.

import { kiln, start as startModule, threads } from "./module.js";
import { tellPanics } from "./panics.js";
import { collect, collectBeginnings, fixtures, isWeights } from "./sources.js";
import { Reader, fileError, forget, list, megabytes, readVerdicts, room, writeVerdicts } from "./storage.js";

tellPanics();

let model;
/** Calls that can be ended, by their number. */
const running = new Map();
/** One thing is computed at a time. */
let queue = Promise.resolve();

const calls = {
    async load(call, { source, options }, signal) {
        const { hub, device, threads, ...own } = options;
        await start(device, threads);
        const tell = (progress) => self.postMessage({ call, progress });
        const onBytes = downloads(call);
        const settings = { name: nameOf(source), ...own, verdicts: await readVerdicts() };
        // What does not fit is not fetched.
        const found = Array.isArray(source) ? undefined : await estimated(source, { hub, settings, signal, onBytes });
        if (found) tell({ stage: "estimate", loaded: 0, total: found.fileBytes, estimate: found });
        const hasher = () => new kiln.Sha256();
        const files = await collect(source, { hub, signal, onBytes, hasher });
        await startThreads(signal);
        const onProgress = (loaded, total) => tell({ stage: "load", loaded, total });
        model = await kiln.WebModel.load(opened(files), JSON.stringify(settings), onProgress);
        await writeVerdicts(kiln.verdicts());
        return JSON.parse(model.facts());
    },

    async estimate(call, { source, options }, signal) {
        const { hub, device, threads, ...own } = options;
        await start(device, threads);
        const onBytes = downloads(call);
        const told = await estimated(source, { hub, settings: { name: nameOf(source), ...own }, signal, onBytes });
        if (!told) throw fileError(`${source}: the memory is known only once the files are fetched; load the model`);
        return told;
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

    savePrefixes: async (_, { cacheSalt }) => new Blob([await model.savePrefixes(cacheSalt)]),

    restorePrefixes: (_, { blob }) => model.restorePrefixes(new kiln.WebFile("the saved prompts", new Reader(blob))),

    memory: () => ({ heapBytes: kiln.ownMemory().buffer.byteLength }),

    async conformance(call, { source, filter = "", cache, device, threads }, signal) {
        await start(device, threads);
        const onBytes = downloads(call);
        const files = await fixtures(source, filter, { signal, onBytes });
        await startThreads(signal);
        const onCase = (line) => {
            signal.throwIfAborted();
            self.postMessage({ call, line: JSON.parse(line) });
        };
        const result = await inTurn(signal, () => kiln.conformance(opened(files), filter, cache, onCase)).catch((error) => {
            signal.throwIfAborted();
            throw error;
        });
        return JSON.parse(result);
    },

    async doctor(call, { full, device, threads }, signal) {
        await start(device, threads);
        await startThreads(signal);
        const onKernel = (loaded, total) => self.postMessage({ call, progress: { stage: "compare", loaded, total } });
        return JSON.parse(await inTurn(signal, () => kiln.doctor(full ?? false, onKernel)));
    },

    list: () => list(),

    forget: (_, { beginning }) => forget(beginning),
};

/** Tells the page how much of each file has arrived. */
const downloads = (call) => (file) => (loaded, total) => self.postMessage({ call, progress: { stage: "download", file, loaded, total } });

async function start(device, threads) {
    if (navigator.gpu) watchDevices();
    await startModule(device, threads);
}

/** Lets the page start the other threads: it notices when one fails, and ends them. */
async function startThreads(signal) {
    started ??= new Promise((resolve) => {
        if (threads === 1) return resolve();
        onThreads = resolve;
        self.postMessage({ threads: { count: threads - 1, module: kiln.ownModule(), memory: kiln.ownMemory() } });
    });
    const aborted = new Promise((resolve) => signal.addEventListener("abort", resolve, { once: true }));
    await Promise.race([started, aborted]);
    signal.throwIfAborted();
}
let started;
let onThreads;

/** Resolves when a GPU is lost. */
let lost;

/** Tells the page when a GPU is lost: what waits for it would wait for ever. */
function watchDevices() {
    if (lost) return;
    const { requestDevice } = GPUAdapter.prototype;
    lost = new Promise((resolve) => {
        GPUAdapter.prototype.requestDevice = async function (...descriptor) {
            const device = await requestDevice.apply(this, descriptor);
            device.lost.then(resolve);
            return device;
        };
    });
    lost.then(({ reason, message }) => self.postMessage({ lost: message || reason }));
}

/** Whether an error is that of a lost GPU, which may be told a little later. The page knows it then. */
const isOfLostDevice = async ({ name }) =>
    name === "DeviceError" && lost && (await Promise.race([lost, new Promise((resolve) => setTimeout(resolve, LOST_WITHIN))]));
const LOST_WITHIN = 1000;

const opened = (files) => files.map(([name, blob]) => new kiln.WebFile(name, new Reader(blob)));

/** The name of a model; files that were chosen have none together. */
const nameOf = (source) => (Array.isArray(source) ? undefined : decodeURIComponent(source).replace(/\/$/, "").split("/").pop());

/** Most bytes of a file's beginning that are fetched for an estimate. */
const LONGEST_HEADER = 1 << 26;

/**
 * What a model takes: memory of the GPU, and room in the browser. An error if there is too little; `undefined` if that is
 * known only once the files are here.
 */
async function estimated(source, { hub, settings, signal, onBytes }) {
    if (Array.isArray(source)) {
        const files = await collect(source, {});
        const fileBytes = files.filter(([name]) => isWeights(name)).reduce((sum, [, { size }]) => sum + size, 0);
        return { ...JSON.parse(await kiln.estimate(opened(files), JSON.stringify(settings))), downloadBytes: 0, fileBytes };
    }
    let known = [];
    for (let bytes = 1 << 20; bytes <= LONGEST_HEADER; bytes *= 4) {
        const { files, weights } = await collectBeginnings(source, bytes, known, { hub, signal, onBytes });
        const sum = (of) => weights.reduce((sum, file) => sum + of(file), 0);
        const [downloadBytes, fileBytes] = [sum(({ missing }) => missing), sum(({ size }) => size)];
        const left = (await room()) + sum(({ freed }) => freed);
        if (downloadBytes > left) {
            throw fileError(`${source}: ${megabytes(downloadBytes)} are to be fetched, and the browser keeps ${megabytes(left)} more for this site; delete models that are stored`);
        }
        if (weights.some(({ blob }) => !blob)) return undefined;
        const readers = weights.map(({ blob, size }) => new Reader(blob, size));
        const all = [...opened(files), ...weights.map(({ name }, at) => new kiln.WebFile(name, readers[at]))];
        try {
            return { ...JSON.parse(await kiln.estimate(all, JSON.stringify(settings))), downloadBytes, fileBytes };
        } catch (error) {
            if (!readers.some(({ lacks }) => lacks)) throw error;
        }
        known = weights.filter((_, at) => !readers[at].lacks);
    }
    return undefined;
}

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

self.onmessage = async ({ data: { call, method, values, abort, threads } }) => {
    if (threads) return onThreads();
    if (abort !== undefined) {
        running.get(abort)?.abort();
        return;
    }
    const controller = new AbortController();
    running.set(call, controller);
    try {
        self.postMessage({ call, result: await calls[method](call, values, controller.signal) });
    } catch (error) {
        if (await isOfLostDevice(error ?? {})) return;
        self.postMessage({ call, error: { name: error?.name ?? "Error", message: error?.message ?? String(error) } });
    } finally {
        running.delete(call);
    }
};
