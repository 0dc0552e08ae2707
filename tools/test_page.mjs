// Tests the chat page of `kiln serve` as a person would use it, in headless Chromium and Firefox (or $CHROMIUM and $FIREFOX).
//
//     npm install --prefix DIR puppeteer-core@24.43.1
//     KILN_NODE_MODULES=DIR/node_modules node tools/test_page.mjs KILN_BINARY MODEL [ARGUMENT OF kiln serve..]
//
// Prints a line per check. If the server allows one cache only, the chooser is tested with a made-up second one.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { join } from "node:path";

const modules = process.env.KILN_NODE_MODULES;
const puppeteer = createRequire(modules ? join(modules, "x.js") : import.meta.url)("puppeteer-core");
const [binary, model, ...serverArguments] = process.argv.slice(2);
if (!model) {
    console.error("test_page: error: say which binary and which model to test");
    process.exit(2);
}
const executables = {
    chrome: process.env.CHROMIUM ?? "/usr/bin/chromium",
    firefox: process.env.FIREFOX ?? "/usr/bin/firefox-esr",
};
const KEY = "right-key";
/** Each wait ends after this many milliseconds. */
const PATIENCE = 60_000;

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

function assert(holds, why) {
    if (!holds) throw new Error(why);
}

async function until(what, holds, patience = PATIENCE) {
    for (const end = Date.now() + patience; Date.now() < end; await pause(30)) {
        const value = await holds();
        if (value) return value;
    }
    throw new Error(`${what}: did not happen within ${patience / 1000} s`);
}

const children = new Set();
process.on("exit", () => children.forEach((child) => child.kill("SIGKILL")));
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(1));

/** Starts a server, and waits for the line with its address. */
async function serve(port, environment = {}) {
    const parameters = ["serve", "--model", model, "--port", String(port), ...serverArguments];
    const env = { ...process.env, KILN_API_KEYS: "", ...environment };
    const child = spawn(binary, parameters, { env, stdio: ["ignore", "pipe", "pipe"] });
    children.add(child);
    let output = "";
    let hasEnded = false;
    child.stdout.on("data", (data) => (output += data));
    child.stderr.on("data", (data) => (output += data));
    const ended = new Promise((resolve) => {
        child.on("error", (error) => resolve((output += error)));
        child.on("exit", resolve);
    }).then(() => {
        hasEnded = true;
        children.delete(child);
    });
    const address = await until("the server starts", () => {
        assert(!hasEnded, `the server ended: ${output}`);
        return /http:\/\/127\.0\.0\.1:\d+/.exec(output)?.[0];
    }, 300_000);
    const end = async () => {
        child.kill("SIGKILL");
        await ended;
    };
    return { address, port: new URL(address).port, end };
}

/** Keeps the bodies of the page's requests in `bodies`, and adds a cache if the server has only one. */
function spy() {
    window.bodies = [];
    const original = window.fetch;
    window.fetch = async (path, options) => {
        if (options?.body) window.bodies.push(JSON.parse(options.body));
        const response = await original(path, options);
        if (!path.startsWith("props") || !response.ok) return response;
        const state = await response.json();
        window.allowed = state.caches;
        if (state.caches.length < 2) state.caches = [state.cache, "quantized:nbits=4"];
        return Response.json(state);
    };
}

/** A person at a page. */
class Visitor {
    complaints = [];
    foreign = [];

    static async open(browser, address) {
        const visitor = new Visitor();
        const page = await browser.newPage();
        visitor.page = page;
        page.on("console", (line) => line.type() === "error" && visitor.complaints.push(line.text()));
        page.on("pageerror", (error) => visitor.complaints.push(String(error)));
        page.on("request", (request) => {
            // Firefox has icons of its own in `data:`; the page's would be blocked.
            const isOwn = [`${address}/`, "data:"].some((start) => request.url().startsWith(start));
            if (!isOwn) visitor.foreign.push(request.url());
        });
        await page.evaluateOnNewDocument(spy);
        await page.goto(address);
        return visitor;
    }

    /** The visible text of all elements of a selector, one after another. */
    async text(selector) {
        return this.page.$$eval(selector, (all) => all.filter((one) => one.checkVisibility()).map((one) => one.innerText).join("\n"));
    }

    isVisible(selector) {
        return this.page.$eval(selector, (one) => one.checkVisibility());
    }

    bodies() {
        return this.page.evaluate(() => window.bodies);
    }

    async set(name, value) {
        await this.page.$eval("#settings", (settings) => (settings.open = true));
        await this.page.$eval(`[name=${name}]`, (field) => field.select());
        await this.page.keyboard.press("Backspace");
        await this.page.type(`[name=${name}]`, value);
    }

    async send(text) {
        await this.page.type("#question", text);
        await this.page.keyboard.press("Enter");
    }

    answered() {
        return until("the answer ends", () => this.isVisible("#send"));
    }

    /** What is shown of the last turn. */
    last(selector) {
        return this.text(`article:last-child ${selector}`);
    }
}

let passed = 0;
let failed = 0;

async function check(name, work) {
    try {
        await work();
        passed += 1;
        console.log(`ok ${name}`);
    } catch (error) {
        failed += 1;
        console.log(`FAILED ${name}: ${error.message}`);
    }
}

async function conversation(name, browser, server) {
    const visitor = await Visitor.open(browser, server.address);
    const { page } = visitor;
    const policy = (await fetch(server.address)).headers.get("content-security-policy");

    await check(`${name}: the model, the device and the memory are shown`, async () => {
        await until("memory", async () => /weights [\d.]+ [KMG]iB · caches [\d.]+ \w+/.test(await visitor.text("#status")));
        assert((await page.title()).endsWith(" · Kiln"), await page.title());
        assert(await page.$eval("#model", (select) => select.value), "no model is chosen");
    });

    await check(`${name}: a message gets a streamed answer`, async () => {
        await visitor.set("max_tokens", "150");
        await page.evaluate(() => {
            window.lengths = new Set();
            const look = () => window.lengths.add(document.querySelector(".answer")?.textContent.length ?? 0);
            new MutationObserver(look).observe(document.getElementById("turns"), { subtree: true, childList: true, characterData: true });
        });
        await visitor.send("What is a cache?");
        await until("Stop is shown", () => visitor.isVisible("#stop"));
        await visitor.answered();
        assert(await visitor.last(".answer"), "the answer is empty");
        const steps = await page.evaluate(() => window.lengths.size);
        assert(steps > 2, `the answer came in ${steps} steps`);
        assert(!(await visitor.text(".error")), await visitor.text(".error"));
    });

    await check(`${name}: tokens, speed and the first token's time are shown`, async () => {
        const figures = await visitor.last(".figures");
        assert(/^\d+ tokens · [\d.]+ tokens\/s · first token after [\d.]+ s · prompt of \d+ tokens/.test(figures), figures);
    });

    await check(`${name}: only what the user set is sent`, async () => {
        const [body] = await visitor.bodies();
        assert(Object.keys(body).sort().join() === "max_tokens,messages,model,stream,stream_options", Object.keys(body));
        assert(body.max_tokens === 150 && body.messages.length === 1, JSON.stringify(body));
    });

    await check(`${name}: an answer that reaches its limit says so`, async () => {
        await visitor.set("max_tokens", "2");
        await page.click("#retry");
        await visitor.answered();
        assert((await visitor.last(".figures")).includes("cut off at the limit of tokens"), await visitor.last(".figures"));
        assert((await page.$$("article")).length === 1, "the answer was not replaced");
    });

    await check(`${name}: a second turn contains the first`, async () => {
        const answer = await page.evaluate(() => JSON.parse(sessionStorage.getItem("kiln.turns"))[0].answer);
        await visitor.set("system", "Be brief.");
        await visitor.set("temperature", "0");
        await visitor.set("seed", "7");
        await visitor.send("And then?");
        await visitor.answered();
        const body = (await visitor.bodies()).at(-1);
        const [system, ...turns] = body.messages;
        assert(system.role === "system" && system.content === "Be brief.", JSON.stringify(system));
        const expected = [["user", "What is a cache?"], ...(answer ? [["assistant", answer]] : []), ["user", "And then?"]];
        assert(answer, "the first answer is empty");
        assert(JSON.stringify(turns.map(({ role, content }) => [role, content])) === JSON.stringify(expected), JSON.stringify(turns));
        assert(body.temperature === 0 && body.seed === 7, JSON.stringify(body));
    });

    for (const way of ["Escape", "the button"]) {
        await check(`${name}: ${way} stops an answer`, async () => {
            await visitor.set("max_tokens", "");
            // A model may end an answer before it can be stopped.
            for (let attempt = 0; attempt < 5; attempt += 1) {
                await page.click("#retry");
                await until("the answer begins", async () => (await visitor.last(".answer")) || (await visitor.isVisible("#send")));
                await (way === "Escape" ? page.keyboard.press("Escape") : page.$eval("#stop", (button) => button.click()));
                await visitor.answered();
                if ((await visitor.last(".figures")).endsWith("stopped")) break;
            }
            assert((await visitor.last(".figures")).endsWith("stopped"), await visitor.last(".figures"));
            await until("the server stops, too", async () => (await (await fetch(`${server.address}/props`)).json()).running === 0);
        });
    }

    await check(`${name}: the cache chooser changes the request`, async () => {
        await visitor.set("max_tokens", "8");
        const chosen = await page.$eval("#cache", (select) => select.options[1].value);
        await page.select("#cache", chosen);
        await page.click("#retry");
        await visitor.answered();
        const body = (await visitor.bodies()).at(-1);
        assert(body.kiln?.cache === chosen, JSON.stringify(body.kiln));
        const isAllowed = await page.evaluate((cache) => window.allowed.includes(cache), chosen);
        const error = await visitor.last(".error");
        assert(isAllowed ? !error : !error || /^The server .*\.$/.test(error), error);
        await page.select("#cache", "");
    });

    await check(`${name}: Shift+Enter begins a new line`, async () => {
        await page.focus("#question");
        await page.keyboard.type("one");
        await page.keyboard.down("Shift");
        await page.keyboard.press("Enter");
        await page.keyboard.up("Shift");
        await page.keyboard.type("two");
        assert((await page.$eval("#question", (field) => field.value)) === "one\ntwo", "the text differs");
        await page.$eval("#question", (field) => (field.value = ""));
    });

    await check(`${name}: a setting out of range is not sent`, async () => {
        const before = (await visitor.bodies()).length;
        await visitor.set("temperature", "-1");
        await visitor.send("Too cold?");
        await pause(200);
        assert((await visitor.bodies()).length === before, "it was sent");
        assert(await visitor.isVisible("[name=temperature]"), "the setting is not shown");
        await page.click("#retry");
        assert((await visitor.bodies()).length === before, "it was sent by Retry");
        await visitor.set("temperature", "");
        await page.$eval("#question", (field) => (field.value = ""));
    });

    await check(`${name}: the conversation survives a reload`, async () => {
        const before = await visitor.text("#turns");
        await page.reload();
        assert((await visitor.text("#turns")) === before, "the text differs");
        assert((await page.$eval("[name=seed]", (field) => field.value)) === "7", "the seed is lost");
    });

    await check(`${name}: code is in blocks, and markup is text`, async () => {
        const answer = "Look:\n```js\nlet a = 1;\n```\n<b onclick=x>no</b>\n\nend\n````\n```\n````\n```open";
        await page.evaluate((answer) => {
            const turns = [{ question: "<i>q</i>", answer, reasoning: "because", error: "", figures: null }];
            // The page saves its own turns when it is left.
            addEventListener("pagehide", () => sessionStorage.setItem("kiln.turns", JSON.stringify(turns)));
        }, answer);
        await page.reload();
        const found = await page.$$eval(".answer > *", (all) => all.map((one) => [one.localName, one.textContent]));
        const expected = [["div", "Look:"], ["pre", "let a = 1;"], ["div", "<b onclick=x>no</b>\n\nend"], ["pre", "```"], ["pre", ""]];
        assert(JSON.stringify(found) === JSON.stringify(expected), JSON.stringify(found));
        assert((await visitor.text(".question")) === "<i>q</i>", "the question differs");
        assert(!(await visitor.text(".reasoning")).includes("because"), "the reasoning is not folded");
        await page.click(".reasoning summary");
        assert((await visitor.text(".reasoning")).includes("because"), "the reasoning does not unfold");
    });

    await check(`${name}: every field and button has a name`, async () => {
        const nameless = await page.$$eval("button, input, select, textarea", (all) =>
            all.filter((one) => !one.textContent.trim() && !one.labels?.length).map((one) => one.outerHTML),
        );
        assert(nameless.length === 0, nameless.join());
        assert(await page.$("#turns[aria-live=polite] .answer"), "answers are not announced");
    });

    await check(`${name}: the page fits a phone`, async () => {
        const before = page.viewport();
        await page.setViewport({ width: 360, height: 640 });
        const fits = await page.evaluate(() => {
            const { right, bottom } = document.getElementById("send").getBoundingClientRect();
            return document.documentElement.scrollWidth <= 360 && right <= 360 && bottom <= 640;
        });
        assert(fits, "it must be scrolled");
        await page.setViewport(before ?? { width: 1000, height: 800 });
    });

    await check(`${name}: a new chat is empty`, async () => {
        await page.click("#new-chat");
        assert((await page.$$("article")).length === 0 && (await visitor.isVisible("#empty")), "turns are left");
    });

    await check(`${name}: no error on the console`, () => assert(!visitor.complaints.length, visitor.complaints.join("; ")));

    await check(`${name}: a server that goes away is explained`, async () => {
        await visitor.set("max_tokens", "");
        await visitor.send("Count to a thousand.");
        await until("the answer begins", () => visitor.last(".answer"));
        await server.end();
        await visitor.answered();
        const middle = await visitor.last(".error");
        assert(middle === "The server went away in the middle of the answer." || (await visitor.last(".figures")), middle);
        await visitor.send("Are you there?");
        await until("an error is shown", () => visitor.last(".error"));
        const error = await visitor.last(".error");
        assert(error === "The server does not answer. Is it still running?", error);
        await until("the state is shown", async () => (await visitor.text("#trouble")) === error);
    });

    await check(`${name}: the page finds a server that has come back`, async () => {
        const again = await serve(server.port);
        await visitor.set("max_tokens", "8");
        await page.click("#retry");
        await visitor.answered();
        assert(!(await visitor.last(".error")), await visitor.last(".error"));
        await until("the trouble is over", async () => !(await visitor.text("#trouble")) && (await visitor.text("#status")));
        const { messages } = (await visitor.bodies()).at(-1);
        assert(messages.at(-1).content === "Are you there?", JSON.stringify(messages));
        await again.end();
    });

    await check(`${name}: no request to another origin`, () => {
        assert(!visitor.foreign.length, visitor.foreign.join());
        assert(policy === "default-src 'self'", `the policy is ${policy}`);
    });
    await page.close();
}

async function keys(name, browser, server) {
    const visitor = await Visitor.open(browser, server.address);
    const { page } = visitor;
    const give = async (key) => {
        await page.type("#key", key);
        await page.keyboard.press("Enter");
    };
    const reason = (expected) => until(expected, async () => (await visitor.text("#key-reason")) === expected);

    await check(`${name}: the page asks for a key`, () => reason("This server needs a key."));

    await check(`${name}: a wrong key is explained`, async () => {
        await give("wrong-key");
        await reason("The server does not accept this key.");
        assert((await visitor.text("#trouble")) === "The server does not accept this key.", await visitor.text("#trouble"));
        await page.keyboard.press("Escape");
        assert(await visitor.isVisible("#key-button"), "there is no way back to the dialog");
        await visitor.send("Hello?");
        await until("an error is shown", () => visitor.last(".error"));
        assert((await visitor.last(".error")) === "The server does not accept this key.", await visitor.last(".error"));
    });

    await check(`${name}: the right key opens the server, also after a reload`, async () => {
        await give(KEY);
        await until("the state is shown", () => visitor.text("#status"));
        await visitor.set("max_tokens", "8");
        await page.click("#retry");
        await visitor.answered();
        assert(!(await visitor.last(".error")), await visitor.last(".error"));
        await page.reload();
        await until("the state is shown", async () => /weights/.test(await visitor.text("#status")));
        assert(!(await visitor.isVisible("#key-dialog")), "the page asks again");
    });

    await check(`${name}: no error on the console but the refusals`, () => {
        const others = visitor.complaints.filter((line) => !line.includes("401"));
        assert(!others.length, others.join("; "));
    });
    await page.close();
}

for (const [name, executablePath] of Object.entries(executables)) {
    // Chromium's sandbox does not work for root, as which containers run.
    const args = name === "chrome" && process.getuid?.() === 0 ? ["--no-sandbox"] : [];
    let browser;
    try {
        browser = await puppeteer.launch({ browser: name, executablePath, headless: true, args });
        console.log(`# ${await browser.version()}`);
        await conversation(name, browser, await serve(0));
        const server = await serve(0, { KILN_API_KEYS: KEY });
        await keys(name, browser, server);
        await server.end();
    } catch (error) {
        failed += 1;
        console.log(`FAILED ${name}: ${error.message}`);
    } finally {
        await browser?.close();
    }
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
