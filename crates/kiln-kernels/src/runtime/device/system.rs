//! The machine that the devices belong to.

use kiln_core::{Error, Result};

/// Most useful threads per core: with more, they wait for each other, for minutes.
const THREADS_A_CORE: usize = 32;

/// Limits computation to `threads` CPU threads. Works only before the first computation.
///
/// # Errors
/// [`Error::Setting`] for 0, for many times more threads than cores, or after the first computation.
pub fn limit_threads(threads: usize) -> Result<()> {
    let wrong = |why: String| Error::Setting { name: "threads", why };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let most = cores.saturating_mul(THREADS_A_CORE);
    if threads == 0 || threads > most {
        return Err(wrong(format!(
            "is {threads}, must be from 1 to {most}; there are {cores} cores, and more threads than cores are not faster"
        )));
    }
    #[cfg(feature = "cpu")]
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().map_err(|e| wrong(e.to_string()))?;
    Ok(())
}

/// Limits the CPU to these instructions, like machines that lack better ones: a name
/// that `kiln_simd::Instructions` has.
///
/// # Errors
/// [`Error::Setting`] for another name, or for instructions that this machine does not have.
pub fn limit_instructions(name: &str) -> Result<()> {
    let wrong = |why: String| Error::Setting { name: "KILN_INSTRUCTIONS", why };
    #[cfg(feature = "cpu")]
    {
        use kiln_simd::Instructions;

        let here = || Instructions::ALL.into_iter().filter(|instructions| instructions.are_here());
        let names = || here().map(Instructions::name).collect::<Vec<_>>().join(", ");
        let Some(best) = here().find(|instructions| instructions.name() == name) else {
            return Err(wrong(format!("is `{name}`, must be one of those of this machine: {}", names())));
        };
        kiln_simd::limit(best);
        Ok(())
    }
    #[cfg(not(feature = "cpu"))]
    Err(wrong(format!("is `{name}`, but this kiln was built without the CPU")))
}

/// The number of threads that the CPU computes with.
pub fn threads() -> usize {
    #[cfg(feature = "cpu")]
    return kiln_products::threads::all();
    #[cfg(not(feature = "cpu"))]
    1
}

/// Computes on this thread, too, for as long as the program runs: in a browser, the page makes the threads.
/// `joined` is called when [`threads`] counts this one.
#[cfg(all(feature = "cpu", target_family = "wasm"))]
pub fn help(joined: impl FnOnce()) {
    kiln_products::threads::help(joined);
}

/// The operating system and its version; `None` in builds without a way to ask.
#[cfg(feature = "wgpu")]
pub(super) fn version() -> Option<String> {
    #[cfg(feature = "cpu")]
    return sysinfo::System::long_os_version();
    #[cfg(not(feature = "cpu"))]
    None
}

/// Bytes of system memory; `None` in builds without a way to ask, and in browsers.
#[cfg(any(feature = "cpu", all(feature = "wgpu", not(target_family = "wasm"))))]
#[allow(clippy::unnecessary_wraps, reason = "some builds do not know")]
pub(super) fn memory() -> Option<u64> {
    #[cfg(all(feature = "cpu", not(target_family = "wasm")))]
    {
        use sysinfo::{MemoryRefreshKind, RefreshKind, System};

        let what = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
        let system = System::new_with_specifics(what);
        // The limit of a container may be below the memory of the machine.
        let limit = system.cgroup_limits().map_or(u64::MAX, |limits| limits.total_memory);
        Some(limit.min(system.total_memory()))
    }
    #[cfg(any(not(feature = "cpu"), target_family = "wasm"))]
    None
}
