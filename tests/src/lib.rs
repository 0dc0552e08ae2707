//! The tests of the workspace are in `main.rs` and its modules.
