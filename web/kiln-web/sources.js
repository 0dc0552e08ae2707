// The files of a model, wherever it is: at an address, on a hub, or chosen by the visitor.

import { download, fileError, latest } from "./storage.js";

/** Files beside the weights, as far as a model has them. */
const SMALL = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "modules.json",
];

const INDEX = "model.safetensors.index.json";

/**
 * The names and Blobs of a model's files.
 *
 * `source` is the address of a GGUF file or of a folder (it ends with `/`), the name of a repository on the hub, or
 * an array of Files. `file` names the one to take of several GGUF files.
 */
export async function collect(source, { file, hub, revision = "main", signal, onBytes, hasher }) {
    if (Array.isArray(source)) return chosen(source);
    const isAddress = /^(https?:|\.{0,2}\/)/.test(source);
    if (!isAddress) return await ofHub(source, { file, hub, revision, signal, onBytes, hasher });
    const url = new URL(source, self.location.href).href;
    if (/\.gguf$/i.test(new URL(url).pathname)) {
        const name = decodeURIComponent(new URL(url).pathname.split("/").pop());
        return [[name, await needed(url, { signal, onBytes: onBytes(name) })]];
    }
    if (!url.endsWith("/")) {
        throw fileError(`${source}: is neither a folder, which ends with /, nor a .gguf file`);
    }
    return await ofFolder(url, { signal, onBytes });
}

async function needed(url, options) {
    const blob = await download(url, options);
    if (!blob) throw fileError(`${url}: there is no such file`);
    return blob;
}

/** Files that the visitor chose. Those of a folder have its name before theirs. */
function chosen(files) {
    return files.map((file) => [file.webkitRelativePath?.replace(/^[^/]*\//, "") || file.name, file]);
}

/** The files of a folder that no one lists: each is asked for. */
async function ofFolder(url, { signal, onBytes }) {
    const files = [];
    const add = async (name, isNeeded = false) => {
        const options = { signal, onBytes: onBytes(name) };
        const blob = await (isNeeded ? needed : download)(url + name, options);
        if (blob) files.push([name, blob]);
        return blob;
    };
    await add("config.json", true);
    for (const name of SMALL) await add(name);
    const modules = files.find(([name]) => name === "modules.json");
    if (modules) {
        for (const { path } of JSON.parse(await modules[1].text())) if (path) await add(`${path}/config.json`);
        await add("config_sentence_transformers.json");
        await add("sentence_bert_config.json");
    }
    const index = await add(INDEX);
    if (index) {
        const shards = new Set(Object.values(JSON.parse(await index.text()).weight_map));
        for (const shard of shards) await add(shard, true);
    } else {
        await add("model.safetensors", true);
    }
    return files;
}

async function ofHub(repository, { file, hub = "https://huggingface.co", revision, signal, onBytes, hasher }) {
    const listing = `${hub}/api/models/${repository}/tree/${revision}?recursive=1`;
    let entries;
    try {
        entries = (await latest(listing, { signal })).filter(({ type }) => type === "file");
    } catch (error) {
        if (error.status !== 401 && error.status !== 404) throw error;
        throw fileError(`${repository}: the hub has no such repository, or it is not public`);
    }
    const base = `${hub}/${repository}/resolve/${revision}/`;
    const isFolder = entries.some(({ path }) => path === "config.json") && !file;
    const wanted = isFolder ? entries.filter(({ path }) => isOfFolder(path, entries)) : ggufOf(repository, entries, file);
    const files = [];
    for (const { path, oid, lfs } of wanted) {
        const url = base + path.split("/").map(encodeURIComponent).join("/");
        files.push([path, await needed(url, { signal, onBytes: onBytes(path), version: lfs?.oid ?? oid, sha256: lfs?.oid, hasher })]);
    }
    return files;
}

function isOfFolder(path, entries) {
    const isSharded = entries.some((entry) => entry.path === INDEX);
    if (path.endsWith(".safetensors")) {
        return isSharded ? /^model-\d+-of-\d+\.safetensors$/.test(path) : path === "model.safetensors";
    }
    return ["config.json", INDEX, ...SMALL].includes(path) || /^(\d+_\w+\/config|.*sentence_.*)\.json$/.test(path);
}

/** The GGUF file whose name contains `file`, or all its parts. */
function ggufOf(repository, entries, file) {
    const all = entries.filter(({ path }) => /\.gguf$/i.test(path) && !/(^|\/)mmproj/i.test(path));
    if (!all.length) throw fileError(`${repository}: has neither config.json nor a GGUF file`);
    const named = file ? all.filter(({ path }) => path.toLowerCase().includes(file.toLowerCase())) : all;
    const models = new Set(named.map(({ path }) => path.replace(/-\d{5}-of-\d{5}(?=\.gguf$)/i, "")));
    if (models.size === 1) return named;
    const names = all.map(({ path }) => path).join(", ");
    const why = models.size ? "has several GGUF files" : `has no GGUF file with ${file} in its name`;
    throw fileError(`${repository}: ${why}; set \`file\` to one of ${names}`);
}
