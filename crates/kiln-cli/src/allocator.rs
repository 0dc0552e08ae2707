//! The allocator of the program.

/// Reuses the memory of one step in the next. The allocator of the C library returns it to the system, which
/// clears it again in every step; that takes up to half of the time on the CPU (docs/performance.md).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Returns freed memory, which the allocator would keep for later, to the system.
#[expect(unsafe_code, reason = "a function of C that takes no pointer")]
pub(crate) fn return_freed_memory() {
    // SAFETY: this function may be called at any time.
    unsafe { libmimalloc_sys::mi_collect(true) };
}
