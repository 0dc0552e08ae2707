//! The one module with `unsafe`. Each function says what it trusts.
#![allow(unsafe_code, reason = "everything else is forbidden to; see the lint table of the workspace")]

use std::{fs::File, io, path::Path};

use libloading::Library;
use memmap2::Mmap;

/// Maps a file for reading.
///
/// Trusts that nobody truncates or rewrites the file while it is mapped: reading a page that is gone kills the
/// process, as it does every runtime that maps its weights. The contents themselves are trusted with nothing.
pub fn map_file(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is read-only and private to this process; see above for other writers.
    unsafe { Mmap::map(&file) }
}

/// Whether the system's loader finds the shared library `name`.
///
/// Trusts what the library does when it is loaded, as using it would.
pub fn can_load(name: &str) -> bool {
    // SAFETY: see above; nothing of it is called.
    unsafe { Library::new(name) }.is_ok()
}
