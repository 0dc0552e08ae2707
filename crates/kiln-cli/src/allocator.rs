//! The allocator of the program.

/// Keeps the memory of one step for the next. That of the C library is given back to the system and cleared
/// again in every step, which takes up to half of the time on the CPU (docs/performance.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Returns freed memory to the system, which the allocator would keep for later.
#[expect(unsafe_code, reason = "a function of C that takes no pointer")]
pub(crate) fn return_freed_memory() {
    // SAFETY: it may be called at any time.
    unsafe { libmimalloc_sys::mi_collect(true) };
}
