// Files of models in the origin's private file system, which all pages of an origin share. For workers.
//
// A file is named after the SHA-256 of its address. Beside it, `.json` says how much of it has arrived: a
// download that was cut off goes on, and a file that is not whole is never read.

/** Where files are, as long as the page has a private file system: private windows may have none. */
async function folder() {
    try {
        const root = await navigator.storage.getDirectory();
        return await root.getDirectoryHandle("kiln", { create: true });
    } catch {
        return undefined;
    }
}

async function nameOf(url) {
    const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(url));
    return Array.from(new Uint8Array(digest), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

async function readNote(place, name) {
    try {
        const file = await (await place.getFileHandle(`${name}.json`)).getFile();
        return JSON.parse(await file.text());
    } catch {
        return undefined;
    }
}

async function withFile(place, name, work) {
    const handle = await place.getFileHandle(name, { create: true });
    const access = await handle.createSyncAccessHandle();
    try {
        return work(access);
    } finally {
        access.close();
    }
}

const writeText = (place, name, text) =>
    withFile(place, name, (access) => {
        access.truncate(0);
        access.write(new TextEncoder().encode(text), { at: 0 });
        access.flush();
    });

const writeNote = (place, name, note) => writeText(place, `${name}.json`, JSON.stringify(note));

async function remove(place, name) {
    for (const entry of [`${name}.json`, name]) await place.removeEntry(entry).catch(() => {});
}

export const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/** An error of a file, for people. */
export function fileError(message) {
    return Object.assign(new Error(message), { name: "ModelError" });
}

async function request(url, options) {
    try {
        return await fetch(url, options);
    } catch (error) {
        if (error.name === "AbortError") throw error;
        const why = "cannot be fetched; there is no connection, or the server does not allow this page (CORS)";
        throw Object.assign(fileError(`${url}: ${why}`), { isUnreachable: true });
    }
}

/** Whether there is no such file. Servers of pages may answer with a page instead, which no file of a model is. */
const isAbsent = ({ status, headers }) => status === 404 || headers.get("content-type")?.startsWith("text/html");

/** The JSON at `url`, as it is now; without a connection, as it was the last time. */
export async function latest(url, { signal } = {}) {
    const place = await folder();
    const name = await nameOf(url);
    try {
        const response = await request(url, { signal });
        if (!response.ok) throw Object.assign(fileError(`${url}: the server answers ${response.status}`), { status: response.status });
        const content = await response.json();
        // Another page may write the same.
        if (place) await writeNote(place, name, { url, absent: true, content }).catch(() => {});
        return content;
    } catch (error) {
        const note = error.isUnreachable && place ? await readNote(place, name) : undefined;
        if (note) return note.content;
        throw error;
    }
}

/**
 * The file at `url`, as a Blob; `undefined` if there is none. It is fetched once, and kept, and so is the fact that there
 * is none.
 *
 * `onBytes` gets the bytes that have arrived, and all. `version` names what the file holds, if that is known: a stored
 * file of another version is fetched again. `sha256` is what the bytes must hash to: `hasher` makes an object with
 * `update` and `hex`.
 */
export async function download(url, { signal, onBytes = () => {}, version, sha256, hasher } = {}) {
    const place = await folder();
    if (!place) return await downloadToMemory(url, { signal, onBytes, sha256, hasher });
    const name = await nameOf(url);
    // Of two pages that want the same file, one fetches it.
    return await navigator.locks.request(`kiln ${name}`, { signal }, async () => {
        let note = await readNote(place, name);
        if (note && note.version !== version) {
            await remove(place, name);
            note = undefined;
        }
        if (note?.absent) return undefined;
        const whole = async () => await (await place.getFileHandle(name)).getFile();
        if (note?.complete) {
            const file = await whole().catch(() => undefined);
            if (file?.size === note.size) {
                onBytes(note.size, note.size);
                return file;
            }
            await remove(place, name);
            note = undefined;
        }
        const found = await fetchInto(place, name, url, note, { signal, onBytes, version });
        if (!found) {
            await writeNote(place, name, { url, version, absent: true });
            return undefined;
        }
        const file = await whole();
        if (sha256 && (await hashOf(file, hasher)) !== sha256) {
            await remove(place, name);
            throw fileError(`${url}: has other bytes than its SHA-256 says; load it again`);
        }
        await writeNote(place, name, { url, version, size: file.size, complete: true });
        return file;
    });
}

/**
 * The first bytes of the file at `url`, without storing them; the whole file if it is stored. `undefined` if there is none.
 *
 * The result has `blob`, the `size` of the whole file, how many bytes of it are `missing` here, and how many a stored file
 * of another version gives back (`freed`). There is no `blob` if the server sends no parts, or the size is unknown.
 */
export async function beginning(url, bytes, { signal, version, size } = {}) {
    const place = await folder();
    const name = place && (await nameOf(url));
    const note = place && (await readNote(place, name));
    const stored = note?.version === version ? note : undefined;
    if (stored?.complete) {
        const file = await (await place.getFileHandle(name)).getFile().catch(() => undefined);
        if (file?.size === stored.size) return { blob: file, size: file.size, missing: 0, freed: 0 };
    }
    const freed = note && !stored ? (note.size ?? note.received ?? 0) : 0;
    const unknown = { size, missing: size, freed };
    let response;
    try {
        response = await request(url, { signal, headers: { Range: `bytes=0-${bytes - 1}` } });
    } catch (error) {
        if (error.name === "AbortError") throw error;
        // Whoever fetches the file gets the error.
        return unknown;
    }
    if (isAbsent(response)) return undefined;
    if (!response.ok) return unknown;
    const isPart = response.status === 206;
    // Without CORS headers for it, `content-range` cannot be read.
    const told = isPart ? response.headers.get("content-range")?.split("/")[1] : response.headers.get("content-length");
    const whole = Number(told) || size;
    const missing = whole && whole - (stored?.received ?? 0);
    if (!whole || (!isPart && whole > bytes)) {
        await response.body?.cancel();
        return { size: whole, missing, freed };
    }
    return { blob: await response.blob(), size: whole, missing, freed };
}

/** Fetches a file, or the rest of it, into the private file system. */
async function fetchInto(place, name, url, note, { signal, onBytes, version }) {
    const headers = note?.etag ? { Range: `bytes=${note.received}-`, "If-Range": note.etag } : {};
    let response = await request(url, { signal, headers });
    if (response.status === 416) response = await request(url, { signal });
    if (isAbsent(response)) return false;
    if (!response.ok) throw fileError(`${url}: the server answers ${response.status} ${response.statusText}`);
    const goesOn = response.status === 206;
    const begin = goesOn ? note.received : 0;
    const length = Number(response.headers.get("content-length")) || undefined;
    // A body that is packed for the way has another length.
    const size = response.headers.get("content-encoding") || !length ? undefined : begin + length;
    const etag = response.headers.get("etag") ?? undefined;
    const handle = await place.getFileHandle(name, { create: true });
    const access = await handle.createSyncAccessHandle();
    let received = begin;
    let reason;
    try {
        access.truncate(begin);
        for (const reader = response.body.getReader(); ; ) {
            const { done, value } = await reader.read();
            if (done) break;
            received += access.write(value, { at: received });
            onBytes(received, size);
        }
        access.flush();
    } catch (error) {
        reason = error;
    } finally {
        access.close();
    }
    if (reason?.name === "QuotaExceededError") {
        await remove(place, name);
        const { quota, usage } = await navigator.storage.estimate();
        const wants = size ? ` and the file has ${megabytes(size)}` : "";
        throw fileError(`${url}: the browser has no room: it allows this site ${megabytes(quota)}, ${megabytes(usage)} are taken${wants}; delete models that are stored`);
    }
    if (reason || (size !== undefined && received !== size)) {
        // Goes on from here the next time.
        if (etag) await writeNote(place, name, { url, version, etag, received, complete: false });
        else await remove(place, name);
        if (reason?.name === "AbortError") throw reason;
        throw fileError(`${url}: the connection ended after ${megabytes(received)}; load it again, and it goes on from there`);
    }
    return true;
}

async function downloadToMemory(url, { signal, onBytes, sha256, hasher }) {
    const response = await request(url, { signal });
    if (isAbsent(response)) return undefined;
    if (!response.ok) throw fileError(`${url}: the server answers ${response.status} ${response.statusText}`);
    const size = Number(response.headers.get("content-length")) || undefined;
    const parts = [];
    let received = 0;
    for (const reader = response.body.getReader(); ; ) {
        const { done, value } = await reader.read().catch((error) => {
            if (error.name === "AbortError") throw error;
            throw fileError(`${url}: the connection ended after ${megabytes(received)}; load it again`);
        });
        if (done) break;
        parts.push(value);
        received += value.length;
        onBytes(received, size);
    }
    const blob = new Blob(parts);
    if (sha256 && (await hashOf(blob, hasher)) !== sha256) {
        throw fileError(`${url}: has other bytes than its SHA-256 says; load it again`);
    }
    return blob;
}

async function hashOf(blob, hasher) {
    const hash = hasher();
    for (let at = 0; at < blob.size; at += 1 << 24) {
        hash.update(new Uint8Array(await blob.slice(at, at + (1 << 24)).arrayBuffer()));
    }
    return hash.hex();
}

const VERDICTS = "self-test.txt";

/** The results of comparisons of kernels that this browser made, in this version; empty if there are none. */
export async function readVerdicts() {
    try {
        const place = await folder();
        const { browser, verdicts } = JSON.parse(await (await (await place.getFileHandle(VERDICTS)).getFile()).text());
        return browser === navigator.userAgent ? verdicts : "";
    } catch {
        return "";
    }
}

/** Keeps them. If that fails, the next load compares again. */
export async function writeVerdicts(verdicts) {
    const place = await folder();
    if (!place || !verdicts) return;
    const text = JSON.stringify({ browser: navigator.userAgent, verdicts });
    await writeText(place, VERDICTS, text).catch(() => {});
}

/** The notes of all files, with the files' names. */
async function notes(place) {
    const names = [];
    // A listing that changes while it is read may not end.
    for await (const entry of place.keys()) if (entry.endsWith(".json")) names.push(entry.slice(0, -".json".length));
    return await Promise.all(names.map(async (name) => [name, await readNote(place, name)]));
}

/** What is stored: addresses, bytes, and whether all have arrived. */
export async function list() {
    const place = await folder();
    const found = place ? (await notes(place)).map(([, note]) => note) : [];
    return found
        .filter((note) => note && !note.absent)
        .map(({ url, size, received, complete }) => ({ url, bytes: size ?? received, complete }));
}

/** Deletes the files whose address begins so. */
export async function forget(beginning) {
    const place = await folder();
    if (!place) return;
    for (const [name, note] of await notes(place)) {
        if (!note || note.url.startsWith(beginning)) await remove(place, name);
    }
}

/** How many bytes the browser still keeps for this site; `undefined` if it does not say, or keeps nothing. */
export async function room() {
    if (!(await folder())) return undefined;
    const { quota, usage } = (await navigator.storage?.estimate?.().catch(() => undefined)) ?? {};
    return quota === undefined ? undefined : Math.max(0, quota - usage);
}

/** A Blob as the module reads it: at any offset, without waiting. It may be the beginning of a file of `size` bytes. */
export class Reader {
    /** Whether bytes after the end of the Blob were asked for. */
    lacks = false;

    constructor(blob, size = blob.size) {
        this.blob = blob;
        this.size = size;
        this.files = new FileReaderSync();
    }

    getSize() {
        return this.size;
    }

    read(into, { at }) {
        const bytes = new Uint8Array(this.files.readAsArrayBuffer(this.blob.slice(at, at + into.length)));
        into.set(bytes);
        this.lacks ||= bytes.length === 0 && at < this.size;
        return bytes.length;
    }
}
