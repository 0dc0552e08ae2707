//! How work is divided among threads on the CPU.

use std::sync::{
    Mutex, OnceLock,
    atomic::{AtomicUsize, Ordering},
};

use kiln_threads::Team;

/// Pieces of work a thread: a few, so that one that was interrupted is helped by the others.
const PIECES: usize = 4;

/// Products of fewer pairs of numbers than these take less time than it takes to share them.
pub const ONE_THREAD: usize = 1 << 18;

/// How many threads should compute the products of that many pairs of numbers.
fn threads(products: usize) -> usize {
    if products < ONE_THREAD { 1 } else { rayon::current_num_threads() }
}

/// In how many pieces that work should come.
pub fn pieces(products: usize) -> usize {
    match threads(products) {
        1 => 1,
        threads => threads * PIECES,
    }
}

/// Does `work` with each piece, on as many threads as that many products are worth.
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

/// The threads beside those that call kernels; `None` where there is only one.
fn team() -> Option<&'static Team> {
    static TEAM: OnceLock<Option<Team>> = OnceLock::new();
    // Without threads, whoever calls a kernel does all of its work.
    let team = || Team::new(rayon::current_num_threads() - 1).ok().filter(|team| team.threads() > 0);
    TEAM.get_or_init(team).as_ref()
}
