//! The console of the browser.

use std::io;

use tracing::Level;
use wasm_bindgen::prelude::*;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = console)]
    fn error(text: &str);
    #[wasm_bindgen(js_namespace = console)]
    fn warn(text: &str);
}

/// Writes the message of a panic, after which the module is of no use. The worker passes such lines on.
pub(crate) fn panicked(message: &str) {
    error(&format!("kiln panicked: {message}"));
}

/// Writes warnings and errors of the crates to the console.
pub(crate) fn log_warnings() {
    let subscriber = tracing_subscriber::fmt().with_max_level(Level::WARN).with_writer(|| Line);
    _ = subscriber.without_time().with_ansi(false).try_init();
}

/// A line of the console.
struct Line;

impl io::Write for Line {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        warn(String::from_utf8_lossy(bytes).trim_end());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
