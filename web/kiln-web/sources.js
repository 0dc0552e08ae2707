// The files of a model, wherever it is: at an address, on a hub, or chosen by the visitor.

import { kiln } from "./module.js";
import { beginning, download, fileError, latest } from "./storage.js";

const INDEX = "model.safetensors.index.json";
const WEIGHTS = "model.safetensors";
/** Whether a file holds weights. */
export const isWeights = (name) => /\.(gguf|safetensors)$/i.test(name);
/** Texts that say how large a model is, or which files it has. Others, such as tokenizers, are larger. */
const isConfig = (name) => /(^|\/)(config|generation_config|modules|model\.safetensors\.index)\.json$/.test(name);

/**
 * The names and Blobs of a model's files.
 *
 * `source` is the address of a GGUF file or of a folder (it ends with `/`), the name of a model on the hub, or an array
 * of Files.
 */
export async function collect(source, { hub, signal, onBytes, hasher, get = whole }) {
    if (Array.isArray(source)) return chosen(source);
    const isAddress = /^(https?:|\.{0,2}\/)/.test(source);
    if (!isAddress) return await ofHub(source, { hub, signal, onBytes, hasher, get });
    const url = new URL(source, self.location.href).href;
    if (/\.gguf$/i.test(new URL(url).pathname)) {
        const name = decodeURIComponent(new URL(url).pathname.split("/").pop());
        return [[name, await needed(url, { name, signal, onBytes: onBytes(name), get })]];
    }
    if (!url.endsWith("/")) {
        throw fileError(`${source}: is neither a folder, which ends with /, nor a .gguf file`);
    }
    return await ofFolder(url, { signal, onBytes, get });
}

/**
 * The names and Blobs of the files of a fixture folder, as far as cases with `filter` in `MODEL/CASE` need them. It is at
 * an address that ends with `/`, or was chosen.
 */
export async function fixtures(source, filter, { signal, onBytes }) {
    if (Array.isArray(source)) return chosen(source);
    const base = new URL(source, self.location.href).href;
    const files = [];
    for (const name of ["cases.json", "tensors.safetensors"]) {
        files.push([name, await needed(base + name, { signal, onBytes: onBytes(name) })]);
    }
    const cases = casesOf(await files[0][1].text()).filter(({ model, case: name }) => `${model}/${name}`.includes(filter));
    const named = (kind, names) => Array.from(new Set(names.filter(Boolean)), (name) => `${kind}/${name}/`);
    const models = named("models", cases.flatMap(({ model, kwargs }) => [model, kwargs?.assistant_model]));
    const withoutFolder = ["models/proc/", "models/quant/", "models/mel/"];
    for (const folder of models.filter((folder) => !withoutFolder.includes(folder))) {
        const own = await ofFolder(base + folder, { signal, onBytes: (name) => onBytes(folder + name) });
        files.push(...own.map(([name, blob]) => [folder + name, blob]));
    }
    for (const folder of named("adapters", cases.map(({ kwargs }) => kwargs?.adapter))) {
        for (const name of ["adapter_config.json", "adapter_model.safetensors"]) {
            files.push([folder + name, await needed(base + folder + name, { signal, onBytes: onBytes(folder + name) })]);
        }
    }
    return files;
}

/** The cases of a recording; none if it is damaged, which the module then says. */
function casesOf(text) {
    try {
        const { cases } = JSON.parse(text);
        return Array.isArray(cases) ? cases : [];
    } catch {
        return [];
    }
}

/**
 * What is needed to tell the memory of a model: its configs, and the first `bytes` of each file of weights. The result
 * has `files`, as `collect` has them, and for each file of weights its `name` and what `beginning` tells. Those that are
 * `known` are not fetched again.
 */
export async function collectBeginnings(source, bytes, known, options) {
    const weights = [];
    const get = async (url, { name, ...options }) => {
        if (!isWeights(name)) return isConfig(name) ? await download(url, options) : new Blob();
        const found = known.find((file) => file.name === name) ?? (await beginning(url, bytes, options));
        if (found) weights.push({ name, ...found });
        return found && new Blob();
    };
    const files = await collect(source, { ...options, get });
    return { files: files.filter(([name]) => isConfig(name)), weights };
}

const whole = (url, { name: _, ...options }) => download(url, options);

async function needed(url, { get = whole, ...options }) {
    const blob = await get(url, options);
    if (!blob) throw fileError(`${url}: there is no such file`);
    return blob;
}

const shards = async (index) => kiln.shardsOf(new Uint8Array(await index.arrayBuffer()));

/** Files that the visitor chose. Those of a folder have its name before theirs. */
function chosen(files) {
    return files.map((file) => [file.webkitRelativePath?.replace(/^[^/]*\//, "") || file.name, file]);
}

/** The files of a folder that no one lists: each is asked for. */
async function ofFolder(url, { signal, onBytes, get = whole }) {
    const files = [];
    const add = async (name, isNeeded = false) => {
        const options = { name, signal, onBytes: onBytes(name) };
        const blob = await (isNeeded ? needed(url + name, { get, ...options }) : get(url + name, options));
        if (blob) files.push([name, blob]);
        return blob;
    };
    for (const name of kiln.textFiles()) await add(name, name === "config.json");
    const modules = await add("modules.json");
    if (modules) {
        for (const { path } of JSON.parse(await modules.text())) if (path) await add(`${path}/config.json`);
        await add("config_sentence_transformers.json");
        await add("sentence_bert_config.json");
    }
    const index = await add(INDEX);
    if (index) {
        for (const shard of await shards(index)) await add(shard, true);
    } else {
        await add(WEIGHTS, true);
    }
    return files;
}

async function ofHub(name, { hub = "https://huggingface.co", signal, onBytes, hasher, get }) {
    const { repo, revision } = JSON.parse(kiln.readSpec(name));
    let entries;
    try {
        entries = await latest(`${hub}/api/models/${repo}/tree/${encodeURIComponent(revision)}?recursive=1`, { signal });
    } catch (error) {
        if (error.status !== 401 && error.status !== 404) throw error;
        throw fileError(`${repo}: the hub has no such repository, or it is not public`);
    }
    const listed = new Map(entries.filter(({ type }) => type === "file").map((entry) => [entry.path, entry]));
    const { files: wanted, indexed } = JSON.parse(kiln.chooseFiles(name, Array.from(listed.keys())));
    const files = [];
    const add = async (path) => {
        const url = `${hub}/${repo}/resolve/${encodeURIComponent(revision)}/${path.split("/").map(encodeURIComponent).join("/")}`;
        const { oid, lfs, size } = listed.get(path) ?? {};
        const version = lfs?.oid ?? oid;
        const sha256 = lfs?.oid;
        const blob = await needed(url, { name: path, signal, onBytes: onBytes(path), version, size, sha256, hasher, get });
        files.push([path, blob]);
        return blob;
    };
    for (const path of wanted) await add(path);
    if (indexed) for (const shard of await shards(await add(INDEX))) await add(shard);
    if (indexed === false) await add(WEIGHTS);
    return files;
}
