/** `auto`: the GPU, or the processor where there is none. The processor computes in float32. */
export type Device = "auto" | "wgpu" | "cpu";

export interface LoadOptions {
    device?: Device;
    /**
     * Threads of the processor, at most 32; of no effect where `auto` finds a GPU. Only an isolated page can have more than
     * one. Default: all that the processor has. Bits may differ with their number.
     */
    threads?: number;
    /** Number type of weights, activations and caches. Default: float16 where the adapter has it. */
    dtype?: "auto" | "f32" | "f16";
    /** The caches of requests that name none, as in `kiln run --cache`. Default: as the folder says. */
    cache?: string;
    /** Most bytes of GPU memory for weights, caches and activations together. */
    memory?: number;
    /**
     * Most bytes of copies of the beginnings of prompts. A request of `fetch` or `openai` that begins like an earlier one,
     * such as the next one of a conversation, is computed from there, with the same bits. Default: 256 MiB. 0: none.
     */
    prefixMemory?: number;
    /** Whether the kernels are compared with their references before use. Default: true. */
    selfTest?: boolean;
    /** Address of the hub. Default: https://huggingface.co */
    hub?: string;
    onProgress?: (progress: Progress) => void;
    signal?: AbortSignal;
}

export interface Progress {
    stage: "estimate" | "download" | "load" | "compare";
    /** Name of the file that is downloaded. */
    file?: string;
    /** Bytes, or kernels. */
    loaded: number;
    total?: number;
    /** What the model takes, at the stage `estimate`. */
    estimate?: Estimate;
}

export interface Estimate {
    architecture: string;
    parameters: number;
    /** Longest sequence in tokens. */
    positions: number;
    dtype: string;
    /** Bytes of the weights on the GPU. */
    weightBytes: number;
    cache: string;
    cacheBytesPerToken: number;
    /** Bytes of the files of weights, and those that are not stored. */
    fileBytes: number;
    downloadBytes: number;
}

export interface Facts {
    name: string;
    dtype: string;
    parameters: number;
    weightBytes: number;
    /** Longest sequence in tokens. */
    positions: number;
    cache: string;
    /** Whether the model has a template for conversations. */
    chats: boolean;
    adapter: string;
    api: string;
    loadSeconds: number;
}

/** Settings of Transformers' GenerationConfig by their names, and Kiln's own. */
export interface GenerateOptions {
    max_new_tokens?: number;
    do_sample?: boolean;
    temperature?: number;
    top_k?: number;
    top_p?: number;
    seed?: number | string;
    stop_strings?: string | string[];
    num_beams?: number;
    /** The cache, such as `quantized:nbits=4`. */
    cache?: string;
    grammar?: { json_schema: object } | { json_object: true } | { regex: string } | { lark: string };
    /** Whether decode steps are recorded once and replayed. Default: true. */
    compile?: boolean;
    signal?: AbortSignal;
    [setting: string]: unknown;
}

export interface Message {
    role: string;
    content: string;
    [field: string]: unknown;
}

export interface Outcome {
    promptTokens: number;
    generated: number;
    /** `null`: the page ended the answer. */
    stopReason: "end_of_text" | "stop_string" | "length" | "time" | null;
    stopString: string | null;
    /** Seconds. */
    timeToFirstToken: number;
    decodeTime: number;
    tokensPerSecond: number | null;
    cache: string;
    cacheBytes: number;
    /** Repeats the answer; `null` without sampling. */
    seed: string | null;
}

export interface Answer extends AsyncIterable<string> {
    readonly outcome: Promise<Outcome>;
    text(): Promise<string>;
    abort(): void;
}

type Create = (body: Record<string, unknown>, options?: { signal?: AbortSignal }) => Promise<any>;

/** Each `create` resolves to the object of OpenAI's API; with `stream: true`, to an async iterable of its events. */
export interface OpenAI {
    chat: { completions: { create: Create } };
    completions: { create: Create };
    responses: { create: Create };
    embeddings: { create: Create };
    audio: { transcriptions: { create: Create }; translations: { create: Create } };
    models: { list(): Promise<any> };
}

export class Model {
    /** `source`: a model on the hub, `ORG/NAME[:FILE or QUANT][@REVISION]`, an address, or files. */
    static load(source: string | URL | Iterable<File>, options?: LoadOptions): Promise<Model>;
    /**
     * The memory that a model takes, from its configs and the beginnings of its weight files. It fails if that is more than
     * `memory` or than one buffer may have, or if the browser has no room for the files. `load` does the same before it
     * downloads weights.
     */
    static estimate(source: string | URL | Iterable<File>, options?: LoadOptions): Promise<Estimate>;
    static stored(): Promise<{ url: string; bytes: number; complete: boolean }[]>;
    static forget(beginning?: string): Promise<void>;
    readonly facts: Facts;
    /** Answers a request as `kiln serve` does: for clients of OpenAI, Anthropic and ollama that take a `fetch`. */
    readonly fetch: typeof globalThis.fetch;
    /** An object like OpenAI's client; `model` may be left out. */
    readonly openai: OpenAI;
    generate(prompt: string, options?: GenerateOptions): Answer;
    chat(conversation: Message[] | { messages: Message[]; tools?: object[] }, options?: GenerateOptions): Answer;
    embed(texts: string[]): Promise<Float32Array[]>;
    count(text: string): Promise<number>;
    /**
     * The beginnings of prompts that the model keeps for `fetch` and `openai`, up to `prefixMemory` bytes, as a file. After
     * a later `load` of the same model, `restorePrefixes` takes it, and prompts that begin like these are computed from
     * there, with the same bits. It fails if the file is damaged, or was computed by another model, device, number of threads or version.
     * `cacheSalt`: only those of requests with this `cache_salt`. The file has the tokens of the prompts.
     */
    savePrefixes(options?: { cacheSalt?: string }): Promise<Blob>;
    /** Returns the number of beginnings in the file. */
    restorePrefixes(file: Blob): Promise<number>;
    /** Bytes of the module's own memory, which does not shrink. Weights and caches are on the GPU. */
    memory(): Promise<{ heapBytes: number }>;
    dispose(): void;
}

export interface CaseResult {
    /** `MODEL/CASE` */
    name: string;
    cache: string;
    outcome: "ok" | "failed" | "skipped" | "differs";
    /** Largest difference of logits. */
    max_dlogit?: number | null;
    why?: string;
    reason?: string;
}

export interface Adapter {
    version: string;
    adapter: string;
    api: string;
    driver: string;
    class: string;
}

export interface Recording {
    /** The length so far. */
    readonly seconds: number;
    /** Ends the recording. The file is for `model.openai.audio.transcriptions.create({ file })`. */
    stop(): Promise<File>;
}

/** Records the microphone, from now on. The browser asks the visitor. */
export function record(): Promise<Recording>;

/** Compares this browser's GPU with recordings of Transformers: a fixture folder. */
export function conformance(
    source: string | URL | Iterable<File>,
    options?: { filter?: string; cache?: string; device?: Device; threads?: number; onCase?: (result: CaseResult) => void; onProgress?: (progress: Progress) => void; signal?: AbortSignal },
): Promise<Adapter & { summary: { passed: number; failed: number; skipped: number; differ: number } }>;

/** Compares the kernels of this browser's GPU with their references. */
export function doctor(options?: { full?: boolean; device?: Device; threads?: number; onProgress?: (progress: Progress) => void; signal?: AbortSignal }): Promise<
    Adapter & { kernels: { kernel: string; path: string; dtype: string; compared: number; wrong: number; why: string | null }[] }
>;
