export default {
    // The package finds its worker and its WebAssembly beside itself.
    optimizeDeps: { exclude: ["kiln-web"] },
    worker: { format: "es" },
    build: { target: "esnext" },
};
