// Language models on the visitor's GPU: the API for pages. All work is done in a worker.

/** What a model was told to load, and where it runs. See index.d.ts for all types. */
export class Model {
    #worker;
    #facts;

    constructor(worker, facts) {
        this.#worker = worker;
        this.#facts = facts;
    }

    /** Loads a model: from an address, a repository of the hub, or files that the visitor chose. */
    static async load(source, { onProgress, signal, ...options } = {}) {
        const worker = new Remote();
        try {
            const files = typeof source === "string" || source instanceof URL ? String(source) : Array.from(source);
            const facts = await worker.call("load", { source: files, options }, { onProgress, signal });
            return new Model(worker, facts);
        } catch (error) {
            worker.end(error);
            throw error;
        }
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

    /** Frees everything. Answers under way end with an error. */
    dispose() {
        this.#worker.end(new Error("the model was disposed of"));
    }
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
        const onPiece = (piece) => {
            this.#pieces.push(piece);
            this.#wake();
        };
        /** Counts and times, once the answer has ended. */
        this.outcome = worker.call(method, values, { onPiece, signal: this.#controller.signal });
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

/** A worker, whose methods are called by messages. */
class Remote {
    #worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    #calls = new Map();
    #last = 0;
    #ended;
    #panic;

    constructor() {
        this.#worker.onmessage = ({ data: { call, result, error, piece, progress, panic } }) => {
            if (panic) {
                this.#panic = panic;
                return;
            }
            const waiting = this.#calls.get(call);
            if (piece !== undefined) return waiting?.onPiece?.(piece);
            if (progress) return waiting?.onProgress?.(progress);
            this.#calls.delete(call);
            if (error) waiting?.reject(Object.assign(new Error(error.message), { name: error.name }));
            else waiting?.resolve(result);
        };
        this.#worker.onerror = (event) => {
            event.preventDefault?.();
            const why = this.#panic ?? event.message ?? "the worker cannot be started";
            this.end(Object.assign(new Error(`the module failed (${why}); load the model again`), { name: "ModuleError" }));
        };
    }

    call(method, values, { onPiece, onProgress, signal } = {}) {
        if (this.#ended) return Promise.reject(this.#ended);
        const call = ++this.#last;
        return new Promise((resolve, reject) => {
            this.#calls.set(call, { resolve, reject, onPiece, onProgress });
            this.#worker.postMessage({ call, method, values });
            const abort = () => this.#worker.postMessage({ abort: call });
            if (signal?.aborted) abort();
            signal?.addEventListener("abort", abort, { once: true });
        });
    }

    end(error) {
        this.#ended ??= error;
        this.#worker.terminate();
        for (const { reject } of this.#calls.values()) reject(this.#ended);
        this.#calls.clear();
    }
}

async function once(method, values) {
    const worker = new Remote();
    try {
        return await worker.call(method, values);
    } finally {
        worker.end(new Error("the worker has ended"));
    }
}
