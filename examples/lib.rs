//! Shared by the examples.

use std::path::PathBuf;

/// The folder named by the first argument, or the demo model's.
pub fn model_folder() -> PathBuf {
    match std::env::args_os().nth(1) {
        Some(folder) => folder.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets/demo"),
    }
}
