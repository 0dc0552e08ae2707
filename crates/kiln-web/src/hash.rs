//! Hashes of files that do not fit in memory, which browsers do not compute.

use sha2::Digest;
use wasm_bindgen::prelude::*;

/// A SHA-256 that gets its bytes piece by piece.
#[wasm_bindgen]
#[derive(Debug, Default)]
pub struct Sha256(sha2::Sha256);

#[wasm_bindgen]
impl Sha256 {
    #[wasm_bindgen(constructor)]
    pub fn new() -> Self {
        Self::default()
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of all bytes so far, in hexadecimal digits.
    pub fn hex(&self) -> String {
        self.0.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
