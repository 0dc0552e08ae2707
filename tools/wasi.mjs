// Runs a WebAssembly program of wasm32-wasip1, such as a test program.
//
//     node --no-warnings tools/wasi.mjs PROGRAM.wasm ARGUMENTS
import { readFileSync } from "node:fs";
import { WASI } from "node:wasi";

const [, , program, ...rest] = process.argv;
const wasi = new WASI({ version: "preview1", args: [program, ...rest], env: process.env });
const { instance } = await WebAssembly.instantiate(readFileSync(program), wasi.getImportObject());
process.exitCode = wasi.start(instance);
