//! Kiln in a browser, for JavaScript. The npm package `web/kiln-web` runs it in a worker, and has the API for
//! pages.
//!
//! Settings and facts cross the border as JSON, files as objects that read without waiting.
#![cfg(target_family = "wasm")]
// The futures of the conformance runner are deep.
#![recursion_limit = "256"]

mod checks;
mod choice;
mod console;
mod files;
mod hash;
mod model;
mod service;

use std::{panic, sync::Once};

use kiln::Error;
use wasm_bindgen::prelude::*;

pub use checks::{conformance, doctor};
pub use choice::{choose_files, read_spec, shards_of, text_files};
pub use files::WebFile;
pub use hash::Sha256;
pub use model::{WebModel, estimate, verdicts};
pub use service::WebResponse;

#[allow(unsafe_code, reason = "the linker makes it")]
unsafe extern "C" {
    /// The constructors of all crates. If no function called them, the linker would wrap each export so that
    /// it does: then every call from JavaScript registers the operations of Burn's compiler again, which took
    /// 70 % of a step.
    fn __wasm_call_ctors();
}

/// Prepares the module, once: each thread calls this when it begins.
#[wasm_bindgen(start)]
pub fn start() {
    static PREPARED: Once = Once::new();
    PREPARED.call_once(|| {
        #[allow(unsafe_code, reason = "nothing ran before")]
        // SAFETY: the constructors run once, before everything else.
        unsafe {
            __wasm_call_ctors();
        }
        panic::set_hook(Box::new(|info| console::panicked(&info.to_string())));
        console::log_warnings();
        // Rayon gives its tasks to the thread that asks for it first. One in `help` would never do them.
        #[cfg(feature = "cpu")]
        kiln::device::threads();
    });
}

/// The memory of this module, as an object of JavaScript.
#[wasm_bindgen(js_name = ownMemory)]
pub fn own_memory() -> JsValue {
    wasm_bindgen::memory()
}

/// This module, as an object of JavaScript, to be started on another thread.
#[cfg(feature = "cpu")]
#[wasm_bindgen(js_name = ownModule)]
pub fn own_module() -> JsValue {
    wasm_bindgen::module()
}

/// Computes on this thread, too, and does not return. `joined` is called when the thread counts.
#[cfg(feature = "cpu")]
#[wasm_bindgen]
pub fn help(joined: &js_sys::Function) {
    kiln::device::help(|| _ = joined.call0(&JsValue::NULL));
}

/// An error for JavaScript, with the name of its kind.
fn thrown(error: &Error) -> JsValue {
    let kind = match error {
        Error::OutOfMemory { .. } | Error::BufferTooLarge { .. } => "OutOfMemoryError",
        Error::Device { .. } | Error::DeviceLost(_) | Error::Execution(_) => "DeviceError",
        Error::File { .. } => "ModelError",
        Error::Setting { .. }
        | Error::Unknown { .. }
        | Error::Prompt { .. }
        | Error::TooLong { .. }
        | Error::ChatTemplate { .. } => "SettingError",
        _ => "KilnError",
    };
    let thrown = js_sys::Error::new(&error.to_string());
    thrown.set_name(kind);
    thrown.into()
}
