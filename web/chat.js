// A chat with a model in this browser. Everything that a model or a person wrote is shown as text, never as HTML.

import { Model } from "./kiln-web/index.js";

const element = (id) => document.getElementById(id);
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

let model;
let running;
/** The conversation, which ends where another model is loaded. */
let messages = [];

function tell(status, trouble = "") {
    element("status").textContent = status;
    element("trouble").textContent = trouble;
}

function showProgress({ stage, file, loaded, total }) {
    const progress = element("progress");
    progress.hidden = false;
    if (total) [progress.value, progress.max] = [loaded, total];
    else progress.removeAttribute("value");
    const of = total ? `${megabytes(loaded)} of ${megabytes(total)}` : megabytes(loaded);
    tell(stage === "download" ? `Fetching ${file}: ${of}` : `Loading to the GPU: ${of}`);
}

async function load(source) {
    for (const id of ["load", "files", "send", "question"]) element(id).disabled = true;
    try {
        const next = await Model.load(source, { onProgress: showProgress });
        model?.dispose();
        model = next;
        messages = [];
        element("turns").replaceChildren();
        const { name, parameters, weightBytes, dtype, positions, adapter, chats } = model.facts;
        const kind = chats ? "" : " It has no template for conversations, so it continues what you write.";
        tell(`${name}: ${(parameters / 1e6).toFixed(0)} million parameters, ${megabytes(weightBytes)} on ${adapter || "the GPU"}, ${dtype}, ${positions} tokens.${kind}`);
        element("question").placeholder = chats ? "Message" : "The beginning of a text";
    } catch (error) {
        tell(model ? `${model.facts.name} is still loaded.` : "", error.message);
    }
    element("progress").hidden = true;
    for (const id of ["load", "files"]) element(id).disabled = false;
    for (const id of ["send", "question"]) element(id).disabled = !model;
    if (model) element("question").focus();
}

function settings() {
    const fields = element("composer").elements;
    const options = { max_new_tokens: Number(fields.tokens.value) || 256 };
    if (fields.cache.value) options.cache = fields.cache.value;
    const temperature = fields.temperature.value;
    if (temperature !== "") Object.assign(options, { do_sample: Number(temperature) > 0 });
    if (Number(temperature) > 0) options.temperature = Number(temperature);
    return options;
}

async function ask(question) {
    const turn = element("turn").content.cloneNode(true).firstElementChild;
    const part = (name) => turn.querySelector(`.${name}`);
    part("question").textContent = question;
    element("turns").append(turn);
    turn.scrollIntoView({ block: "end" });
    for (const [id, hidden] of [["send", true], ["stop", false]]) element(id).hidden = hidden;
    const { chats } = model.facts;
    const conversation = messages;
    let text = "";
    try {
        conversation.push({ role: "user", content: question });
        running = chats ? model.chat(conversation, settings()) : model.generate(question, settings());
        for await (const piece of running) {
            text += piece;
            part("answer").textContent = text;
        }
        const { tokensPerSecond, timeToFirstToken, generated, cache, cacheBytes } = await running.outcome;
        const speed = tokensPerSecond ? `${tokensPerSecond.toFixed(1)} tokens/s, ` : "";
        part("figures").textContent = `${generated} tokens, ${speed}the first after ${timeToFirstToken.toFixed(2)} s; cache ${cache}: ${megabytes(cacheBytes)}`;
    } catch (error) {
        if (error.name !== "AbortError") {
            part("error").textContent = error.message;
            part("error").hidden = false;
        }
    }
    // A question without an answer is not part of the conversation.
    if (text) conversation.push({ role: "assistant", content: text });
    else conversation.pop();
    running = undefined;
    for (const [id, hidden] of [["send", false], ["stop", true]]) element(id).hidden = hidden;
}

element("source").addEventListener("submit", (event) => {
    event.preventDefault();
    load(event.target.elements.model.value.trim());
});
element("files").addEventListener("change", ({ target }) => target.files.length && load(Array.from(target.files)));
element("stop").addEventListener("click", () => running?.abort());
element("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    const question = element("question").value.trim();
    if (!question || running || !model) return;
    element("question").value = "";
    ask(question);
});
element("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        element("composer").requestSubmit();
    }
});
