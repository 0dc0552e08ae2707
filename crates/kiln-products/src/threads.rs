//! Division of work among threads on the CPU.

use std::sync::{
    LazyLock, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use kiln_threads::Team;

/// Number of pieces of work per thread: a few, so that others help a thread that was interrupted.
const PIECES: usize = 4;

/// Number of pairs of numbers below which computing their products takes less time than sharing the work.
pub const ONE_THREAD: usize = 1 << 18;

/// The threads besides those that call kernels. Without any, the caller of a kernel does all of its work.
static TEAM: LazyLock<Team> =
    LazyLock::new(|| Team::new(rayon::current_num_threads() - 1).unwrap_or_default());

/// Number of threads that compute.
pub fn all() -> usize {
    TEAM.threads() + 1
}

/// Computes on this thread, too, for as long as the program runs. This is for browsers, where the page makes
/// the threads. `joined` is called when the thread counts among [`all`].
pub fn help(joined: impl FnOnce()) {
    TEAM.help(joined);
}

/// Number of threads that should compute the products of `products` pairs of numbers.
fn threads(products: usize) -> usize {
    if products < ONE_THREAD { 1 } else { all() }
}

/// Number of pieces to divide the products of `products` pairs of numbers into.
pub fn pieces(products: usize) -> usize {
    match threads(products) {
        1 => 1,
        threads => threads * PIECES,
    }
}

/// Calls `work` for each piece, on as many threads as `products` products are worth.
pub fn share<P: Send>(products: usize, pieces: Vec<P>, work: impl Fn(P) + Sync) {
    if threads(products) == 1 {
        return pieces.into_iter().for_each(work);
    }
    let pieces: Vec<Mutex<Option<P>>> = pieces.into_iter().map(|piece| Mutex::new(Some(piece))).collect();
    let next = AtomicUsize::new(0);
    TEAM.share(&|| {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(piece) = piece.lock().ok().and_then(|mut piece| piece.take()) {
                work(piece);
            }
        }
    });
}
