// The page of `kiln serve`, for a model in this browser: a form loads it, and its `fetch` takes the place of the server.

import { Model } from "./kiln-web/index.js";

const FORM = `
    <form id="source" class="bar" autocomplete="off">
        <label>Load <input name="source" list="examples" size="36" required
            placeholder="ORG/NAME[:QUANT] of the hub, or an address"></label>
        <datalist id="examples">
            <option value="bartowski/SmolLM2-135M-Instruct-GGUF:Q4_K_M"></option>
            <option value="HuggingFaceTB/SmolLM2-360M-Instruct"></option>
            <option value="Qwen/Qwen3-0.6B"></option>
        </datalist>
        <button id="load">Load</button>
        <label>or files <input id="files" type="file" multiple></label>
        <button type="button" id="cancel" hidden>Cancel</button>
        <button type="button" id="save-chat" disabled title="The conversation, and what the model computed of it">Save chat</button>
        <label>Open chat <input id="open-chat" type="file" accept=".kiln-chat" disabled></label>
        <progress id="progress" hidden></progress>
        <a href="conformance.html">conformance</a>
        <a href="doctor.html">doctor</a>
    </form>
    <p id="loading" role="status">Models run in this browser, and nothing that you write leaves it.</p>
    <p id="failure" class="error" role="alert"></p>`;

const element = (id) => document.getElementById(id);
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

let model;
let controller;
/** The page waits for its first answer until there is a model. */
let ready;
const loaded = new Promise((resolve) => (ready = resolve));
globalThis.kilnFetch = async (path, init) => {
    await loaded;
    return await model.fetch(path, init);
};

function tell(status, failure = "") {
    element("loading").textContent = status;
    element("failure").textContent = failure;
}

/** What the model that is being fetched will take. */
let needs = "";

function onProgress({ stage, file, loaded, total, estimate }) {
    if (stage === "estimate") {
        const { weightBytes, cacheBytesPerToken } = estimate;
        needs = `; it takes ${megabytes(weightBytes)}, and ${(cacheBytesPerToken / 1e3).toFixed(1)} kB for each token`;
        return;
    }
    const progress = element("progress");
    progress.hidden = false;
    if (total) [progress.value, progress.max] = [loaded, total];
    else progress.removeAttribute("value");
    const of = total ? `${megabytes(loaded)} of ${megabytes(total)}` : megabytes(loaded);
    tell(stage === "download" ? `Fetching ${file}: ${of}${needs}` : `Loading: ${of}`);
}

async function load(source) {
    controller = new AbortController();
    needs = "";
    const disable = (is) => {
        for (const id of ["load", "files"]) element(id).disabled = is;
        element("cancel").hidden = !is;
    };
    disable(true);
    try {
        const next = await Model.load(source, { onProgress, signal: controller.signal });
        model?.dispose();
        model = next;
        ready();
        for (const id of ["save-chat", "open-chat"]) element(id).disabled = false;
        const { parameters, weightBytes, adapter } = model.facts;
        tell(`${(parameters / 1e6).toFixed(0)} million parameters, ${megabytes(weightBytes)} on ${adapter || "the GPU"}.`);
        await page.showModels();
        page.pollSoon();
        element("question").focus();
    } catch (error) {
        tell(model ? `${model.facts.name} is still loaded.` : "", error.name === "AbortError" ? "" : error.message);
    }
    element("progress").hidden = true;
    disable(false);
}

/** The first line of a saved conversation, with the number of bytes of the second one, which is JSON. Its caches follow. */
const CHAT = /^kiln-chat\/1 (\d{1,9})\n/;

async function saveChat() {
    const told = page.conversation();
    const head = `${JSON.stringify(told)}\n`;
    const { size } = new Blob([head]);
    const caches = await model.savePrefixes({ cacheSalt: told.salt }).catch((error) => {
        tell("The conversation is saved without its caches.", error.message);
        return "";
    });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`kiln-chat/1 ${size}\n`, head, caches]));
    link.download = `${model.facts.name}.kiln-chat`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function openChat(file) {
    const found = CHAT.exec(await file.slice(0, 64).text());
    if (!found) throw new Error(`${file.name} is not a conversation that this page saved.`);
    const [begin, end] = [found[0].length, found[0].length + Number(found[1])];
    const told = JSON.parse(await file.slice(begin, end).text().catch(() => ""));
    if (!Array.isArray(told?.turns)) throw new Error(`${file.name} has no conversation.`);
    if (page.conversation().turns.length && !confirm("Open it in place of the conversation on this page?")) return;
    page.show(told);
    if (file.size === end) return tell("The conversation is open, without caches.");
    const count = await model.restorePrefixes(file.slice(end)).catch((error) => {
        throw new Error(`The conversation is open, and is computed anew: ${error.message}.`);
    });
    tell(count ? "The conversation is open, with its caches." : "The conversation is open. It was too short for a cache.");
}

/** Does what a button says; an error becomes the page's. */
async function attempt(work) {
    try {
        await work();
    } catch (error) {
        tell("", error instanceof SyntaxError ? "The file is damaged." : error.message);
    }
}

document.querySelector("header").insertAdjacentHTML("afterbegin", FORM);
element("status").textContent = "";
element("source").addEventListener("submit", (event) => {
    event.preventDefault();
    load(event.target.elements.source.value.trim());
});
element("files").addEventListener("change", ({ target }) => target.files.length && load(Array.from(target.files)));
element("save-chat").addEventListener("click", () => attempt(saveChat));
element("open-chat").addEventListener("change", ({ target }) => {
    const [file] = target.files;
    if (file) attempt(() => openChat(file)).finally(() => (target.value = ""));
});
element("cancel").addEventListener("click", () => controller.abort());
// Private windows may have none.
navigator.serviceWorker?.register(crossOriginIsolated ? "offline.js?threads" : "offline.js").catch(() => {});
const page = await import("./page.js");
