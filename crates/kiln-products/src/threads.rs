//! Division of work among threads on the CPU.

use std::sync::{
    Mutex, OnceLock,
    atomic::{AtomicUsize, Ordering},
};

use kiln_threads::Team;

/// Number of pieces of work per thread: a few, so that others help a thread that was interrupted.
const PIECES: usize = 4;

/// Number of pairs of numbers below which computing their products takes less time than sharing the work.
pub const ONE_THREAD: usize = 1 << 18;

/// Number of threads that should compute the products of `products` pairs of numbers.
fn threads(products: usize) -> usize {
    if products < ONE_THREAD { 1 } else { rayon::current_num_threads() }
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
    let Some(team) = team().filter(|_| threads(products) > 1) else {
        return pieces.into_iter().for_each(work);
    };
    let pieces: Vec<Mutex<Option<P>>> = pieces.into_iter().map(|piece| Mutex::new(Some(piece))).collect();
    let next = AtomicUsize::new(0);
    team.share(&|| {
        while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Some(piece) = piece.lock().ok().and_then(|mut piece| piece.take()) {
                work(piece);
            }
        }
    });
}

/// Returns the threads besides those that call kernels; `None` if there is only one thread.
fn team() -> Option<&'static Team> {
    static TEAM: OnceLock<Option<Team>> = OnceLock::new();
    // Without further threads, the caller of a kernel does all of its work.
    let team = || Team::new(rayon::current_num_threads() - 1).ok().filter(|team| team.threads() > 0);
    TEAM.get_or_init(team).as_ref()
}
