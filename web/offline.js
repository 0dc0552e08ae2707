// A service worker: after the first visit, the pages open without a network. Models are kept elsewhere, by kiln-web.

const CACHE = "kiln-pages";
// Only pages that are isolated have threads.
const FORMS = ["module", "module-cpu", ...(self.location.search === "?threads" ? ["module-threads"] : [])];
const FILES = [
    ...["", "index.html", "page.css", "page.js", "local.js", "check.css", "check.js"],
    ...["conformance.html", "conformance.js", "doctor.html", "doctor.js"],
    ...["index.js", "worker.js", "sources.js", "storage.js", "openai.js", "microphone.js", "module.js", "panics.js", "thread.js"].map((name) => `kiln-web/${name}`),
    ...FORMS.flatMap((form) => ["kiln_web.js", "kiln_web_bg.wasm"].map((name) => `kiln-web/${form}/${name}`)),
].map((name) => new URL(name, self.registration.scope).href);

self.addEventListener("install", (event) => {
    self.skipWaiting();
    event.waitUntil(fill());
});

self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("fetch", (event) => {
    const address = event.request.url.replace(/[?#].*$/, "");
    if (event.request.method === "GET" && FILES.includes(address)) event.respondWith(answer(event, address));
});

/** Keeps all files, as they are now: those of two versions do not go together. */
async function fill() {
    const fetched = await Promise.all(FILES.map((address) => fetch(address, { cache: "no-cache" })));
    const wrong = fetched.find(({ ok }) => !ok);
    if (wrong) throw new Error(`${wrong.url}: the server answers ${wrong.status}`);
    const cache = await caches.open(CACHE);
    // Browsers refuse to open a page with a response that was redirected.
    const own = (response) => (response.redirected ? new Response(response.body, response) : response);
    await Promise.all(FILES.map((address, at) => cache.put(address, own(fetched[at]))));
}

/** The file as it is now; without a network, as it was when all were kept. */
async function answer(event, address) {
    const kept = await (await caches.open(CACHE)).match(address);
    try {
        const response = await fetch(event.request);
        const version = ({ headers }) => headers.get("etag") ?? headers.get("last-modified");
        if (response.ok && kept && version(response) !== version(kept)) refill(event);
        return response;
    } catch (error) {
        if (kept) return kept;
        throw error;
    }
}

let filling;

function refill(event) {
    filling ??= fill()
        .catch(() => {}) // The next visit does it.
        .finally(() => (filling = undefined));
    event.waitUntil(filling);
}
