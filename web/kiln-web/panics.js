/** Passes the message of a panic to the page. */
export function tellPanics() {
    const log = console.error;
    console.error = (...values) => {
        if (String(values[0]).startsWith("kiln panicked")) self.postMessage({ panic: String(values[0]).split("\n")[0] });
        log(...values);
    };
}
