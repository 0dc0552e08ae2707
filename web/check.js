// What the pages for conformance and for the doctor share: one check at a time, and a report of it.

export const element = (id) => document.getElementById(id);

// Private windows may have none.
navigator.serviceWorker?.register(crossOriginIsolated ? "offline.js?threads" : "offline.js").catch(() => {});

export class Check {
    #lines = [];
    #controller;

    constructor() {
        element("stop").addEventListener("click", () => this.#controller?.abort());
        element("copy").addEventListener("click", async () => {
            const report = this.#lines.join("\n");
            try {
                await navigator.clipboard.writeText(report);
                element("copy").textContent = "Copied";
            } catch {
                // Pages that are not secure have no clipboard.
                element("status").textContent = report;
            }
        });
    }

    tell(status, trouble = "") {
        element("status").textContent = status;
        element("trouble").textContent = trouble;
    }

    /** Adds a line to the report. */
    note(line) {
        this.#lines.push(line);
    }

    onProgress = ({ stage, file, loaded, total }) => {
        const progress = element("progress");
        progress.hidden = false;
        if (total) [progress.value, progress.max] = [loaded, total];
        else progress.removeAttribute("value");
        this.tell(stage === "download" ? `Fetching ${file}` : `${loaded} of ${total} kernels`);
    };

    /** Calls `work` when the visitor starts the check. It returns the adapter and the result. */
    onStart(work) {
        element("check").addEventListener("submit", async (event) => {
            event.preventDefault();
            if (this.#controller) return;
            this.#controller = new AbortController();
            this.#lines = [];
            element("start").hidden = element("copy").hidden = true;
            element("stop").hidden = false;
            this.tell("");
            try {
                const [{ version, adapter, api, driver }, result] = await work(this.#controller.signal);
                const place = [adapter || "an adapter without a name", api, driver].filter(Boolean).join(", ");
                this.note(`kiln ${version} on ${place}`);
                this.note(navigator.userAgent);
                this.note(result);
                this.tell(`${place}: ${result}`);
                element("copy").textContent = "Copy the report";
                element("copy").hidden = false;
            } catch (error) {
                this.tell("", error.name === "AbortError" ? "Stopped." : error.message);
            }
            this.#controller = undefined;
            element("start").hidden = false;
            element("stop").hidden = element("progress").hidden = true;
        });
    }
}
