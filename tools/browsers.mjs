// The browsers of tests and benchmarks, headless, on WebGPU in software: Chromium and Firefox as Debian has them, or
// $CHROMIUM and $FIREFOX. puppeteer-core is looked for in $KILN_NODE_MODULES.
import { createRequire } from "node:module";
import { join } from "node:path";

export const modules = process.env.KILN_NODE_MODULES;
const puppeteer = createRequire(modules ? join(modules, "x.js") : import.meta.url)("puppeteer-core");

const settings = {
    chrome: {
        executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
        args: ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan",
            // A microphone that beeps, and needs no permission.
            "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"],
    },
    firefox: {
        executablePath: process.env.FIREFOX ?? "/usr/bin/firefox-esr",
        extraPrefsFirefox: { "dom.webgpu.enabled": true, "gfx.webgpu.ignore-blocklist": true,
            "media.navigator.streams.fake": true, "media.navigator.permission.disabled": true },
    },
};

/** The names of the browsers: all, or `only` one. */
export const names = (only) => Object.keys(settings).filter((name) => !only || only === name);

/** Starts a browser. Calls to it end after `patience` milliseconds. */
export const launch = (name, patience) => puppeteer.launch({ browser: name, headless: true, protocolTimeout: patience, ...settings[name] });
