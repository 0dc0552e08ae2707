//! Limits on the cost of a stranger's grammar.

use std::{sync::mpsc, thread, time::Duration};

use llguidance::api::ParserLimits;

use crate::contained::contained;

/// Maximum size in bytes of a schema, a regular expression or a grammar.
pub(super) const MOST_SOURCE: usize = 64 << 10;
/// Maximum time to compile a grammar.
const COMPILE_TIME: Duration = Duration::from_secs(10);
/// Stack size of the thread that compiles: rules and references are followed by recursion, a level of which
/// takes up to 4 KiB. Unused pages take no memory.
const STACK: usize = 256 << 20;

/// The limits of one parser. A unit of fuel takes about 20 to 70 ns.
pub(super) fn parser() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 1000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 20_000,
        // Each state takes 1 to 2 KiB.
        max_lexer_states: 50_000,
        max_grammar_size: 100_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Runs `work` on a thread with a large stack, within [`COMPILE_TIME`]. A panic is an error.
///
/// Work that takes longer is abandoned: it ends by the limits of the parser.
pub(super) fn within_time<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    if cfg!(target_family = "wasm") {
        return contained(work);
    }
    let (send, receive) = mpsc::sync_channel(1);
    let thread = thread::Builder::new().name("kiln-grammar".into()).stack_size(STACK);
    let begun = thread.spawn(move || send.send(contained(work)));
    begun.map_err(|e| format!("no thread can be started to compile it: {e}"))?;
    let seconds = COMPILE_TIME.as_secs();
    receive
        .recv_timeout(COMPILE_TIME)
        .unwrap_or_else(|_| Err(format!("compiling it takes longer than {seconds} s; make it simpler")))
}
