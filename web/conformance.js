// Compares the visitor's GPU with recordings of Transformers.

import { conformance } from "./kiln-web/index.js";
import { Check, element } from "./check.js";

const check = new Check();
/** The files of a folder that was chosen. */
let chosen;

function show({ name, cache, outcome, max_dlogit: difference, why, reason }) {
    const row = element("results").insertRow();
    const result = { ok: "ok", failed: `FAILED: ${why}`, skipped: `skipped: ${reason}`, differs: `differs, as it must: ${reason}` };
    for (const text of [name, cache, difference == null ? "" : difference.toExponential(1), result[outcome]]) {
        row.insertCell().textContent = text;
    }
    row.className = outcome;
    check.note(`${name}\t${cache}\t${difference ?? ""}\t${result[outcome]}`);
}

element("folder").addEventListener("change", ({ target }) => {
    chosen = target.files.length ? Array.from(target.files) : undefined;
    element("check").elements.source.disabled = chosen !== undefined;
});

check.onStart(async (signal) => {
    const { source, filter, cache } = element("check").elements;
    element("results").replaceChildren();
    element("table").hidden = false;
    let done = 0;
    const onCase = (line) => {
        show(line);
        check.tell(`${++done} cases`);
    };
    const options = { filter: filter.value, cache: cache.value || undefined, onCase, onProgress: check.onProgress, signal };
    const { summary, ...adapter } = await conformance(chosen ?? source.value, options);
    if (!done) throw new Error("no case has this in its name");
    const differ = summary.differ ? `, ${summary.differ} differ as they must` : "";
    return [adapter, `${summary.passed} passed, ${summary.failed} failed, ${summary.skipped} skipped${differ}`];
});
