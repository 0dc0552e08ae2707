//! Code shared by the examples.

use std::path::PathBuf;

/// Returns the folder named by the first argument, or that of the demo model.
pub fn model_folder() -> PathBuf {
    match std::env::args_os().nth(1) {
        Some(folder) => folder.into(),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../assets/demo"),
    }
}
