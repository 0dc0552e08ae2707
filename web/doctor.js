// Compares the kernels on the visitor's GPU with their references, and shows what the adapter can do.

import { doctor } from "./kiln-web/index.js";
import { Check, element } from "./check.js";

const LIMITS = [
    "maxBufferSize",
    "maxStorageBufferBindingSize",
    "maxStorageBuffersPerShaderStage",
    "maxComputeWorkgroupStorageSize",
    "maxComputeInvocationsPerWorkgroup",
    "maxComputeWorkgroupsPerDimension",
];
const check = new Check();

/** Facts that the browser tells, as rows of names and values. */
async function facts() {
    const adapter = await navigator.gpu?.requestAdapter();
    if (!adapter) return [["WebGPU", navigator.gpu ? "no adapter" : "this browser has none, or it is switched off"]];
    const { vendor, architecture, device, description } = adapter.info ?? {};
    return [
        ["Browser", navigator.userAgent],
        ["Adapter", [vendor, architecture, device, description].filter(Boolean).join(" ") || "without a name"],
        ["Features", Array.from(adapter.features).sort().join(", ")],
        ...LIMITS.map((name) => [name, adapter.limits[name]?.toLocaleString("en")]),
    ];
}

const rows = await facts();
for (const [name, value] of rows) {
    const row = element("limits").tBodies[0].insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = value;
}

check.onStart(async (signal) => {
    element("results").replaceChildren();
    element("table").hidden = false;
    for (const [name, value] of rows) check.note(`${name}\t${value}`);
    const { kernels, ...adapter } = await doctor({ full: element("check").elements.full.checked, onProgress: check.onProgress, signal });
    for (const { kernel, path, dtype, compared, wrong, why } of kernels) {
        const row = element("results").insertRow();
        const result = wrong ? `${wrong} WRONG: ${why}` : "right";
        for (const text of [kernel, dtype, path, compared, result]) row.insertCell().textContent = text;
        row.className = wrong ? "failed" : "ok";
        check.note(`${kernel}\t${dtype}\t${path}\t${compared}\t${result}`);
    }
    const wrong = kernels.filter(({ wrong }) => wrong).length;
    const compared = kernels.reduce((sum, { compared }) => sum + compared, 0);
    return [adapter, `${kernels.length - wrong} of ${kernels.length} right in ${compared} comparisons`];
});
