// The methods of OpenAI's client that pages use most, for a model of the page.

/** An object like OpenAI's client, whose requests `fetch` answers. `model` is the one of requests that name none. */
export function openai(fetch, model) {
    const post = (path) => async (body, options) => await send(fetch, path, { model, ...body }, options);
    return {
        chat: { completions: { create: post("/v1/chat/completions") } },
        completions: { create: post("/v1/completions") },
        responses: { create: post("/v1/responses") },
        embeddings: { create: post("/v1/embeddings") },
        audio: {
            transcriptions: { create: (body, options) => sendForm(fetch, "/v1/audio/transcriptions", { model, ...body }, options) },
            translations: { create: (body, options) => sendForm(fetch, "/v1/audio/translations", { model, ...body }, options) },
        },
        models: { list: async () => await checked(await fetch("/v1/models")).then((response) => response.json()) },
    };
}

async function send(fetch, path, body, { signal } = {}) {
    const headers = { "content-type": "application/json" };
    const response = await checked(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
    return body.stream ? new Stream(response) : await response.json();
}

async function sendForm(fetch, path, fields, { signal } = {}) {
    const body = new FormData();
    for (const [name, value] of Object.entries(fields)) {
        for (const one of Array.isArray(value) ? value : [value]) body.append(Array.isArray(value) ? `${name}[]` : name, one);
    }
    const response = await checked(await fetch(path, { method: "POST", body, signal }));
    if (fields.stream) return new Stream(response);
    return response.headers.get("content-type")?.startsWith("application/json") ? await response.json() : await response.text();
}

/** An error of the API: `status`, `code`, `type` and `param`, as OpenAI has them. */
export class APIError extends Error {
    constructor({ message, code, type, param } = {}, status) {
        super(message ?? `status ${status}`);
        Object.assign(this, { name: "APIError", status, code, type, param });
    }
}

async function checked(response) {
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    throw new APIError(error, response.status);
}

/** The events of a response. */
class Stream {
    #response;
    #reader;

    constructor(response) {
        this.#response = response;
    }

    /** Ends the answer where it is. */
    async abort() {
        await (this.#reader ?? this.#response.body).cancel();
    }

    async *[Symbol.asyncIterator]() {
        this.#reader = this.#response.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        try {
            for (;;) {
                const { done, value } = await this.#reader.read();
                if (done) return;
                const lines = (rest + value).split("\n");
                rest = lines.pop();
                for (const line of lines) {
                    if (!line.startsWith("data:")) continue;
                    const data = line.slice("data:".length).trim();
                    if (data === "[DONE]") return;
                    const event = JSON.parse(data);
                    if (event.error) throw new APIError(event.error);
                    yield event;
                }
            }
        } finally {
            await this.#reader.cancel().catch(() => {});
        }
    }
}
