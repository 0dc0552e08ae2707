// The WebAssembly module, in one of its two forms: for the GPU, or for the processor.

/** The functions of the module that was started, and `memory`. */
export let kiln;

/**
 * Starts the module for a device: `wgpu`, `cpu`, or `auto`, which is the GPU if there is one.
 */
export async function start(device = "auto") {
    if (kiln) return;
    if (!["auto", "cpu", "wgpu"].includes(device)) {
        throw Object.assign(new Error(`device: is \`${device}\`, must be auto, wgpu or cpu`), { name: "SettingError" });
    }
    const hasGpu = device !== "cpu" && (await navigator.gpu?.requestAdapter().catch(() => null));
    if (device === "wgpu" && !hasGpu) {
        const why = navigator.gpu ? "this browser finds no GPU" : "this browser has no WebGPU, or it is switched off";
        throw Object.assign(new Error(`${why}; leave out \`device\` to use the processor`), { name: "DeviceError" });
    }
    const module = await (hasGpu ? import("./module/kiln_web.js") : import("./module-cpu/kiln_web.js"));
    const { memory } = await module.default();
    kiln = { ...module, memory };
}
