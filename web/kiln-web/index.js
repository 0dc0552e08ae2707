// Language models on the visitor's GPU: the API for pages. All work is done in a worker.

import { openai } from "./openai.js";
export { record } from "./microphone.js";

/** What a model was told to load, and where it runs. See index.d.ts for all types. */
export class Model {
    #worker;
    #facts;

    constructor(worker, facts) {
        this.#worker = worker;
        this.#facts = facts;
        /** Answers a request as `kiln serve` does: for clients of OpenAI, Anthropic and ollama that take a `fetch`. */
        this.fetch = (input, init) => fetchFrom(worker, input, init);
        /** An object like OpenAI's client. */
        this.openai = openai(this.fetch, facts.name);
    }

    /** Loads a model: from an address, a repository of the hub, or files that the visitor chose. */
    static async load(source, { onProgress, signal, ...options } = {}) {
        const files = isName(source) ? addressOf(source) : Array.from(source);
        const onEvent = ({ progress }) => onProgress?.(progress);
        const worker = new Loaded({ source: files, options });
        return new Model(worker, await worker.open({ onEvent, signal }));
    }

    /** The memory that a model takes, and the bytes that would be downloaded, without loading it. */
    static async estimate(source, { onProgress, signal, ...options } = {}) {
        const files = isName(source) ? addressOf(source) : Array.from(source);
        const onEvent = ({ progress }) => onProgress?.(progress);
        return await once("estimate", { source: files, options }, { onEvent, signal });
    }

    /** The files that are stored for this site. */
    static async stored() {
        return await once("list", {});
    }

    /** Deletes the stored files whose address begins with `beginning`; all of them by default. */
    static async forget(beginning = "") {
        await once("forget", { beginning });
    }

    /** Facts about the model and the device. */
    get facts() {
        return this.#facts;
    }

    /** Continues a text. The result is an async iterator over pieces; its `outcome` is a promise. */
    generate(prompt, { signal, ...options } = {}) {
        return new Answer(this.#worker, "generate", { prompt, options }, signal);
    }

    /** Answers a conversation: an array of messages, or an object with `messages` and `tools`. */
    chat(conversation, { signal, ...options } = {}) {
        const whole = Array.isArray(conversation) ? { messages: conversation } : conversation;
        return new Answer(this.#worker, "chat", { conversation: whole, options }, signal);
    }

    /** The vectors of texts, as Float32Arrays. */
    async embed(texts) {
        return await this.#worker.call("embed", { texts });
    }

    /** The number of tokens of a text. */
    async count(text) {
        return await this.#worker.call("count", { text });
    }

    /** Bytes of the module's own memory, which does not shrink. Weights and caches are on the GPU. */
    async memory() {
        return await this.#worker.call("memory", {});
    }

    /** The beginnings of prompts that the model keeps for `fetch` and `openai`, as a file for `restorePrefixes`. */
    async savePrefixes({ cacheSalt } = {}) {
        return await this.#worker.call("savePrefixes", { cacheSalt });
    }

    /** Takes over saved beginnings of prompts: prompts that begin like these are computed from there. Returns their number. */
    async restorePrefixes(blob) {
        return await this.#worker.call("restorePrefixes", { blob });
    }

    /** Frees everything. Answers under way end with an error. */
    dispose() {
        this.#worker.end(new Error("the model was disposed of"));
    }
}

/**
 * Compares this browser's device with recordings of Transformers: a fixture folder at an address that ends with `/`, or the
 * files of one. `onCase` gets each result.
 */
export async function conformance(source, { filter, cache, device, threads, onCase, onProgress, signal } = {}) {
    const files = isName(source) ? new URL(source, base()).href : Array.from(source);
    const onEvent = ({ line, progress }) => (line ? onCase?.(line) : onProgress?.(progress));
    return await once("conformance", { source: files, filter, cache, device, threads }, { onEvent, signal });
}

/** Compares the kernels of this browser's device with their references: a few inputs of each, or all (`full`). */
export async function doctor({ full, device, threads, onProgress, signal } = {}) {
    return await once("doctor", { full, device, threads }, { onEvent: ({ progress }) => onProgress?.(progress), signal });
}

/** The text of an answer, piece by piece. */
class Answer {
    #pieces = [];
    #waiting;
    #over = false;
    #controller = new AbortController();

    constructor(worker, method, values, signal) {
        signal?.addEventListener("abort", () => this.abort(), { once: true });
        if (signal?.aborted) this.abort();
        const onEvent = ({ piece }) => {
            this.#pieces.push(piece);
            this.#wake();
        };
        /** Counts and times, once the answer has ended. */
        this.outcome = worker.call(method, values, { onEvent, signal: this.#controller.signal });
        // Whoever reads the pieces gets the error there.
        this.outcome.catch(() => {}).finally(() => {
            this.#over = true;
            this.#wake();
        });
    }

    #wake() {
        this.#waiting?.();
        this.#waiting = undefined;
    }

    /** Ends the answer where it is. */
    abort() {
        this.#controller.abort();
    }

    /** The whole text. */
    async text() {
        let text = "";
        for await (const piece of this) text += piece;
        return text;
    }

    async *[Symbol.asyncIterator]() {
        try {
            for (;;) {
                while (this.#pieces.length) yield this.#pieces.shift();
                if (this.#over) break;
                await new Promise((resolve) => (this.#waiting = resolve));
            }
            await this.outcome.catch((error) => {
                // Whoever ended the answer wants no error.
                if (error.name !== "AbortError") throw error;
            });
        } finally {
            this.abort();
        }
    }
}

/** A worker with a model. After it failed, such as when the GPU was lost, the next call loads the model into another. */
class Loaded {
    #values;
    #worker;
    #opening;
    #isDisposed = false;

    constructor(values) {
        this.#values = values;
    }

    async open(options) {
        const worker = new Remote();
        this.#worker = worker;
        try {
            return await worker.call("load", this.#values, options);
        } catch (error) {
            worker.end(error);
            throw error;
        }
    }

    async call(method, values, options) {
        if (this.#worker.isEnded && !this.#isDisposed) {
            this.#opening ??= this.open().finally(() => (this.#opening = undefined));
        }
        const signal = options?.signal;
        const ended = new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason), { once: true }));
        await Promise.race([this.#opening, ended]);
        return await this.#worker.call(method, values, options);
    }

    end(error) {
        this.#isDisposed = true;
        this.#worker.end(error);
    }
}

/** A worker, whose methods are called by messages. */
class Remote {
    #worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    /** Further threads of the processor. */
    #threads = [];
    #calls = new Map();
    #last = 0;
    #ended;
    #panic;

    constructor() {
        this.#worker.onmessage = ({ data }) => {
            if (data.panic) {
                this.#panic = data.panic;
                return;
            }
            if (data.threads) return this.#start(data.threads).catch((error) => this.end(error));
            if (data.lost) {
                const why = `the GPU was lost (${data.lost}); try again`;
                return this.end(Object.assign(new Error(why), { name: "DeviceError" }));
            }
            const waiting = this.#calls.get(data.call);
            if (!("result" in data) && !data.error) return waiting?.onEvent?.(data);
            this.#calls.delete(data.call);
            if (data.error) waiting?.reject(Object.assign(new Error(data.error.message), { name: data.error.name }));
            else waiting?.resolve(data.result);
        };
        this.#worker.onerror = (event) => {
            event.preventDefault?.();
            const why = this.#panic ?? event.message ?? "the worker cannot be started";
            const error = Object.assign(new Error(`the module failed (${why}); try again`), { name: "ModuleError" });
            // The reason may be a GPU that was lost, which is told a little later.
            setTimeout(() => this.end(error), LOST_WITHIN);
        };
    }

    /** Starts threads that compute in the memory of the worker, and tells it when all do. */
    async #start({ count, ...values }) {
        if (this.#ended) return;
        const start = (resolve) => {
            const thread = new Worker(new URL("./thread.js", import.meta.url), { type: "module" });
            this.#threads.push(thread);
            thread.onmessage = ({ data }) => (data.panic ? (this.#panic = data.panic) : resolve());
            thread.onerror = thread.onmessageerror = this.#worker.onerror;
            thread.postMessage(values);
        };
        await Promise.all(Array.from({ length: count }, () => new Promise(start)));
        this.#worker.postMessage({ threads: "ready" });
    }

    call(method, values, { onEvent, signal } = {}) {
        if (this.#ended) return Promise.reject(this.#ended);
        const call = ++this.#last;
        return new Promise((resolve, reject) => {
            this.#calls.set(call, { resolve, reject, onEvent });
            this.#worker.postMessage({ call, method, values });
            const abort = () => this.#worker.postMessage({ abort: call });
            if (signal?.aborted) abort();
            signal?.addEventListener("abort", abort, { once: true });
        });
    }

    get isEnded() {
        return this.#ended !== undefined;
    }

    end(error) {
        this.#ended ??= error;
        for (const worker of [...this.#threads, this.#worker]) worker.terminate();
        for (const { reject } of this.#calls.values()) reject(this.#ended);
        this.#calls.clear();
    }
}

/** Milliseconds within which a lost GPU is told after the first error. */
const LOST_WITHIN = 1000;

const isName = (source) => typeof source === "string" || source instanceof URL;

/** Addresses are relative to the page, as everywhere; the worker is somewhere else. */
const base = () => globalThis.document?.baseURI ?? self.location.href;

/** A whole address; the name of a model on the hub stays as it is. */
const addressOf = (source) => (/^(https?:|\.{0,2}\/)/.test(source) ? new URL(source, base()).href : String(source));

/** Passes a request to the worker. Paths are those of the server. */
async function fetchFrom(worker, input, init) {
    const address = input instanceof Request ? input : new URL(input, self.location.origin);
    const request = new Request(address, init);
    const { pathname, search } = new URL(request.url);
    const body = new Uint8Array(await request.arrayBuffer());
    const values = { method: request.method, path: pathname + search, headers: Array.from(request.headers), body };
    const controller = new AbortController();
    const abort = () => controller.abort();
    request.signal.addEventListener("abort", abort, { once: true });
    if (request.signal.aborted) abort();
    return await new Promise((resolve, reject) => {
        let stream;
        const start = (controller) => (stream = controller);
        const onEvent = ({ head, bytes }) => {
            if (bytes) return stream.enqueue(bytes);
            const isEmpty = [204, 205, 304].includes(head.status);
            const content = new ReadableStream({ start, cancel: abort });
            resolve(new Response(isEmpty ? null : content, head));
        };
        const done = worker.call("fetch", values, { onEvent, signal: controller.signal });
        done.then(
            () => stream?.close(),
            (error) => (stream ? stream.error(error) : reject(error)),
        ).catch(() => {}); // The reader has left.
    });
}

async function once(method, values, options) {
    const worker = new Remote();
    try {
        return await worker.call(method, values, options);
    } finally {
        worker.end(new Error("the worker has ended"));
    }
}
