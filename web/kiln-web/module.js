// The WebAssembly module, in one of its three forms: for the GPU, for the processor, or for threads of the processor.

/** The functions of the module that was started. */
export let kiln;

/** Number of threads that compute on the processor, with that of the module. */
export let threads = 1;

/**
 * Starts the module for a device: `wgpu`, `cpu`, or `auto`, which is the GPU if there is one. `wanted`: the number of
 * threads on the processor.
 */
export async function start(device = "auto", wanted) {
    if (kiln) return;
    if (!["auto", "cpu", "wgpu"].includes(device)) {
        throw named("SettingError", `device: is \`${device}\`, must be auto, wgpu or cpu`);
    }
    if (wanted !== undefined && !(Number.isInteger(wanted) && wanted >= 1 && wanted <= MOST_THREADS)) {
        throw named("SettingError", `threads: is ${wanted}, must be a whole number from 1 to ${MOST_THREADS}`);
    }
    if (wanted !== undefined && device === "wgpu") {
        throw named("SettingError", "threads: are those of the processor, but `device` is `wgpu`");
    }
    const hasGpu = device !== "cpu" && (await navigator.gpu?.requestAdapter().catch(() => null));
    if (device === "wgpu" && !hasGpu) {
        const why = navigator.gpu ? "this browser finds no GPU" : "this browser has no WebGPU, or it is switched off";
        throw named("DeviceError", `${why}; leave out \`device\` to use the processor`);
    }
    threads = hasGpu ? 1 : threadsOf(wanted);
    const module = await (hasGpu
        ? import("./module/kiln_web.js")
        : threads > 1
          ? import("./module-threads/kiln_web.js")
          : import("./module-cpu/kiln_web.js"));
    await module.default();
    kiln = module;
}

/** Number of threads on the processor: those that are wanted, or as many as it has. */
function threadsOf(wanted) {
    if (wanted > 1 && !self.crossOriginIsolated) {
        const headers = "Cross-Origin-Opener-Policy: same-origin and Cross-Origin-Embedder-Policy: require-corp";
        throw named("SettingError", `threads: is ${wanted}, but only a page that is isolated has more than one; send it with the headers ${headers}`);
    }
    return wanted ?? (self.crossOriginIsolated ? Math.min(navigator.hardwareConcurrency, MOST_THREADS) : 1);
}

/** More than most processors have. */
const MOST_THREADS = 32;

const named = (name, message) => Object.assign(new Error(message), { name });
