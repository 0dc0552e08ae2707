//! GGUF files: recorded, written and damaged ones.
