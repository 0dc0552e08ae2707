// The chat page of `kiln serve`. Everything that comes from the server or the user is shown as text, never as HTML.
// `web/local.js` uses it for a model in the browser, which answers in place of a server.

const element = (id) => document.getElementById(id);
const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** An error whose message is a sentence for the user. */
class Failure extends Error {
    constructor(message, isAboutKey = false) {
        super(message);
        this.isAboutKey = isAboutKey;
    }
}

// ---- What this browser tab remembers ----

/** Browsers may refuse storage; the page then works until it is reloaded. */
function read(name, otherwise) {
    try {
        return JSON.parse(sessionStorage.getItem(`kiln.${name}`)) ?? otherwise;
    } catch {
        return otherwise;
    }
}

function write(name, value) {
    try {
        sessionStorage.setItem(`kiln.${name}`, JSON.stringify(value));
    } catch (error) {
        console.warn("The conversation will not survive a reload:", error);
    }
}

/** A turn is a question and its answer: `question`, `answer`, `reasoning`, `error` and `figures`. */
let turns = read("turns", []);
/** A name for the prompts of this conversation, whose caches can then be saved apart from others. */
let salt = read("salt", "");
let key = read("key", "");
/** Values of the fields, by their names. */
const settings = read("settings", {});
/** The turn that is being answered, if any, and what stops it. */
let running = null;
let controller = null;

// ---- Requests ----

async function request(path, body, signal) {
    const headers = {};
    if (key) headers.authorization = `Bearer ${key}`;
    if (body) headers["content-type"] = "application/json";
    const method = body ? "POST" : "GET";
    const ask = globalThis.kilnFetch ?? fetch;
    const response = await ask(path, { method, headers, body: body && JSON.stringify(body), signal }).catch(() => {
        throw new Failure("The server does not answer. Is it still running?");
    });
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({}));
    const why = error?.message ?? `status ${response.status}`;
    const seconds = Number(response.headers.get("retry-after"));
    switch (response.status) {
        case 401:
            throw new Failure(key ? "The server does not accept this key." : "This server needs a key.", true);
        case 429:
            throw new Failure(`The server is busy. Try again ${seconds ? `in ${seconds} s` : "later"}.`);
        default:
            throw new Failure(`The server ${response.status < 500 ? "refuses this" : "has failed"}: ${why}.`);
    }
}

/** The events of a streamed answer. */
async function* events(response) {
    const brokeOff = () => new Failure("The server went away in the middle of the answer.");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
        const { done, value } = await reader.read().catch(() => { throw brokeOff(); });
        if (done) throw brokeOff();
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines.filter((line) => line.startsWith("data:"))) {
            const data = line.slice("data:".length).trim();
            if (data === "[DONE]") return;
            const event = JSON.parse(data);
            if (event.error) throw new Failure(`The answer broke off: ${event.error.message}.`);
            yield event;
        }
    }
}

/** The conversation, for a file. Only a page with a model of its own has a `salt`, a name for its prompts. */
export const conversation = () => ({ turns, salt, system: settings.system ?? "", cache: element("cache").value });

/** Shows a conversation of a file in place of this one. */
export function show(told) {
    const text = (value) => (typeof value === "string" ? value : "");
    const others = told.turns.map((turn) => ({
        question: text(turn?.question),
        answer: text(turn?.answer),
        reasoning: text(turn?.reasoning),
        error: "",
        figures: null,
    }));
    const [system, cache] = [text(told.system), text(told.cache)];
    stop();
    turns = others;
    salt = text(told.salt);
    write("turns", turns);
    write("salt", salt);
    Object.assign(settings, { system, cache });
    write("settings", settings);
    element("settings-form").elements.system.value = system;
    element("cache").value = cache;
    showSettings();
    showTurns();
    element("question").focus();
}

/** The request for the last answer. Turns without an answer, because it failed, are left out of it. */
function requestBody() {
    const messages = [];
    if (settings.system) messages.push({ role: "system", content: settings.system });
    for (const turn of turns) {
        const isLast = turn === turns.at(-1);
        if (isLast || turn.answer) messages.push({ role: "user", content: turn.question });
        if (!isLast && turn.answer) messages.push({ role: "assistant", content: turn.answer });
    }
    const body = { model: element("model").value, messages, stream: true, stream_options: { include_usage: true } };
    for (const { name, value } of element("settings-form").querySelectorAll("input")) {
        if (value !== "") body[name] = Number(value);
    }
    if (element("cache").value) body.kiln = { cache: element("cache").value };
    // Other servers share the beginnings of all conversations.
    if (globalThis.kilnFetch) {
        if (!salt) write("salt", (salt = crypto.randomUUID()));
        body.cache_salt = salt;
    }
    return body;
}

/** Answers the last turn, anew if it has an answer. */
async function answer() {
    const turn = turns.at(-1);
    const figures = { pieces: 0 };
    running = turn;
    controller = new AbortController();
    const { signal } = controller;
    showTurns();
    pollSoon();
    try {
        if (!element("model").value) await showModels();
        const body = requestBody();
        Object.assign(turn, { answer: "", reasoning: "", error: "", figures });
        const begin = performance.now();
        let first;
        for await (const { choices, usage } of events(await request("v1/chat/completions", body, signal))) {
            const { delta, finish_reason: reason } = choices?.[0] ?? {};
            if (delta?.content || delta?.reasoning_content) {
                const now = performance.now();
                first ??= now;
                figures.pieces += 1;
                figures.wait = (first - begin) / 1000;
                figures.decode = (now - first) / 1000;
                turn.answer += delta.content ?? "";
                turn.reasoning += delta.reasoning_content ?? "";
            }
            if (reason) figures.reason = reason;
            if (usage) figures.usage = usage;
            showSoon(turn);
        }
    } catch (failure) {
        if (!signal.aborted) {
            if (!(failure instanceof Failure)) console.error(failure);
            turn.error = failure instanceof Failure ? failure.message : "The page does not understand the answer.";
            if (failure.isAboutKey) askForKey(failure.message);
        }
    }
    running = null;
    write("turns", turns);
    showTurns();
    pollSoon();
}

// ---- The conversation ----

/** Splits a text at its ``` fences. */
function parts(text) {
    const found = [];
    let lines = [];
    let fence = "";
    const end = () => {
        const part = lines.join("\n");
        if (part.trim() || fence) found.push({ tag: fence ? "pre" : "div", text: part });
        lines = [];
    };
    for (const line of text.split("\n")) {
        const mark = /^\s*(`{3,})([^`]*)$/.exec(line);
        if (mark && !fence) {
            end();
            fence = mark[1];
        } else if (mark && mark[1].length >= fence.length && !mark[2].trim()) {
            end();
            fence = "";
        } else {
            lines.push(line);
        }
    }
    end();
    return found;
}

/** Shows a text that may be longer than before; parts that did not change keep the user's selection. */
function showText(parent, text) {
    const found = parts(text);
    found.forEach((part, index) => {
        let child = parent.children[index];
        if (child?.localName !== part.tag) {
            const fresh = document.createElement(part.tag);
            fresh.className = part.tag === "pre" ? "" : "text";
            child ? child.replaceWith(fresh) : parent.append(fresh);
            child = fresh;
        }
        if (child.textContent !== part.text) child.textContent = part.text;
    });
    while (parent.children.length > found.length) parent.lastElementChild.remove();
}

/** The line below an answer. Without the server's count, a piece of the stream counts as a token. */
function describe({ pieces, wait, decode, reason, usage }, isRunning) {
    const tokens = usage?.completion_tokens ?? pieces;
    const words = [];
    if (tokens) words.push(`${usage ? "" : "about "}${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (tokens > 1 && decode > 0) words.push(`${((tokens - 1) / decode).toFixed(1)} tokens/s`);
    if (wait !== undefined) words.push(`first token after ${wait.toFixed(2)} s`);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) words.push(`prompt of ${usage.prompt_tokens} tokens${cached ? `, ${cached} of them cached` : ""}`);
    if (reason === "length") words.push("cut off at the limit of tokens");
    else if (!reason && !isRunning) words.push("stopped");
    return words.join(" · ");
}

const articles = new WeakMap();

function showTurn(turn) {
    const main = element("conversation");
    const isAtEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 40;
    if (!articles.has(turn)) articles.set(turn, element("turn").content.cloneNode(true).firstElementChild);
    const article = articles.get(turn);
    const show = (name, text) => {
        const shown = article.querySelector(name);
        shown.hidden = !text;
        (shown.querySelector(".text") ?? shown).textContent = text;
    };
    article.ariaBusy = String(turn === running);
    show(".question", turn.question);
    show(".reasoning", turn.reasoning);
    showText(article.querySelector(".answer"), turn.answer);
    show(".error", turn.error);
    show(".figures", turn.figures && !turn.error ? describe(turn.figures, turn === running) : "");
    if (isAtEnd) main.scrollTop = main.scrollHeight;
    return article;
}

let frame = 0;

/** Shows what has come since the last frame, all at once. */
function showSoon(turn) {
    frame ||= requestAnimationFrame(() => {
        frame = 0;
        showTurn(turn);
    });
}

function showTurns() {
    const shown = turns.map(showTurn);
    for (const article of [...element("turns").children]) if (!shown.includes(article)) article.remove();
    element("turns").append(...shown.filter((article) => !article.isConnected));
    element("empty").hidden = turns.length > 0;
    element("retry").hidden = turns.length === 0 || running !== null;
    element("send").hidden = running !== null;
    element("stop").hidden = running === null;
}

// ---- The state of the server ----

let wake = () => {};
let isPollWanted = false;
let needsKey = false;

export function pollSoon() {
    isPollWanted = true;
    wake();
}

/** Asks for the state at most once a second: every second during an answer, else every ten seconds. */
async function watch() {
    for (;;) {
        isPollWanted = false;
        await poll();
        await pause(1000);
        if (isPollWanted || (running && !needsKey)) continue;
        const woken = new Promise((resolve) => { wake = resolve; });
        await (needsKey ? woken : Promise.race([woken, pause(9000)]));
    }
}

async function poll() {
    try {
        if (element("trouble").textContent || !element("model").value) await showModels();
        const model = element("model").value;
        const state = await (await request(`props?model=${encodeURIComponent(model)}`)).json();
        document.title = `${model} · Kiln`;
        element("trouble").textContent = "";
        needsKey = false;
        if (!state.loaded) {
            fill("cache", [["", "default"]]);
            element("cache-label").hidden = true;
            element("status").textContent = "The model is loaded with the first question.";
            return;
        }
        const caches = [state.cache, ...state.caches.filter((cache) => cache !== state.cache)];
        fill("cache", caches.map((cache, index) => (index === 0 ? ["", `${cache} (default)`] : [cache, cache])));
        element("cache-label").hidden = caches.length < 2;
        element("status").textContent = [
            `${state.device}, ${state.dtype}`,
            `weights ${size(state.memory.weights)}`,
            `caches ${size(state.memory.caches)}`,
            `context of ${state.context} tokens`,
            `${state.running} running, ${state.waiting} waiting`,
        ].join(" · ");
    } catch (failure) {
        if (!(failure instanceof Failure)) console.error(failure);
        const why = failure instanceof Failure ? failure.message : "The state of the server is unknown.";
        element("status").textContent = "";
        element("trouble").textContent = why;
        if (failure.isAboutKey) askForKey(why);
    }
    element("key-button").hidden = !key && !needsKey;
}

export async function showModels() {
    const { data } = await (await request("v1/models")).json();
    fill("model", data.map(({ id }) => [id, id]));
    element("model").disabled = data.length < 2;
}

/** Fills a chooser with pairs of a value and its text, and chooses what the user chose before. */
function fill(id, choices) {
    const select = element(id);
    // An open list would close.
    if (select.dataset.choices === JSON.stringify(choices)) return;
    select.dataset.choices = JSON.stringify(choices);
    select.replaceChildren(...choices.map(([value, text]) => new Option(text, value)));
    select.value = choices.some(([value]) => value === settings[id]) ? settings[id] : choices[0]?.[0];
}

function size(bytes) {
    const power = bytes < 1024 ? 0 : Math.min(3, Math.floor(Math.log2(bytes) / 10));
    return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${["bytes", "KiB", "MiB", "GiB"][power]}`;
}

function askForKey(reason) {
    needsKey = true;
    element("key-reason").textContent = reason;
    if (!element("key-dialog").open) element("key-dialog").showModal();
}

// ---- The user ----

function stop() {
    controller?.abort();
}

/** Whether all settings are in range; shows the first that is not. */
function checkSettings() {
    const isValid = element("settings-form").checkValidity();
    if (!isValid) element("settings").open = true;
    return isValid || element("settings-form").reportValidity();
}

element("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = element("question").value.trim();
    if (running || !question || !checkSettings()) return;
    element("question").value = "";
    turns.push({ question, answer: "", reasoning: "", error: "", figures: null });
    answer();
    element("conversation").scrollTop = element("conversation").scrollHeight;
});

element("question").addEventListener("keydown", (event) => {
    // Enter also ends the composition of a character.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    element("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !element("key-dialog").open) stop();
});

element("stop").addEventListener("click", () => {
    stop();
    element("question").focus();
});

element("retry").addEventListener("click", () => {
    if (checkSettings()) answer();
});

element("new-chat").addEventListener("click", () => {
    stop();
    turns = [];
    salt = "";
    write("turns", turns);
    write("salt", salt);
    showTurns();
    element("question").focus();
});

element("key-button").addEventListener("click", () => askForKey("Requests are sent with a key."));

element("key-dialog").addEventListener("submit", () => {
    key = element("key").value.trim();
    element("key").value = "";
    write("key", key);
    needsKey = false;
    pollSoon();
});

const fields = [...document.querySelectorAll("#settings-form [name], select")];

function showSettings() {
    const set = element("settings-form").querySelectorAll("[name]:not(:placeholder-shown)").length;
    element("settings-summary").textContent = set ? `Settings (${set} set)` : "Settings";
}

for (const field of fields) {
    if (field.localName !== "select") field.value = settings[field.name] ?? "";
    field.addEventListener("input", () => {
        settings[field.name] = field.value;
        write("settings", settings);
        showSettings();
        // Another model has other caches.
        if (field.id === "model") pollSoon();
    });
}

addEventListener("pagehide", () => {
    stop();
    write("turns", turns);
});

showSettings();
showTurns();
watch();
