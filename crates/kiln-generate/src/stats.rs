//! What a generation took.

use std::time::{Duration, Instant};

/// Counts and times of a generation so far. Where there is no clock, in a browser, times are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    pub rows: usize,
    /// Tokens fed before the first was chosen, of all rows, padding not counted.
    pub prompt_tokens: usize,
    /// Tokens chosen, of all rows, those that end a row included.
    pub generated: usize,
    /// Tokens that were proposed by assisted decoding, of all rows, and those of them that were accepted.
    pub proposed: usize,
    pub accepted: usize,
    /// Tokens that a grammar forced and that were fed together with others, of all rows.
    pub forced: usize,
    /// From the first call until the scores after the prompt were there.
    pub prefill_time: Duration,
    /// From the first call until the first tokens were chosen.
    pub time_to_first_token: Duration,
    /// From the first tokens until the latest, as the caller saw it: what it did in between counts.
    pub decode_time: Duration,
    /// What repeats the run; `None` where nothing is drawn.
    pub seed: Option<u64>,
}

impl Stats {
    /// Tokens that came after the first of each row: those that `decode_time` was spent on.
    pub fn decoded(&self) -> usize {
        self.generated.saturating_sub(self.rows)
    }
}

/// Fills in the times of [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Clock {
    start: Option<Instant>,
    first: Option<Instant>,
}

impl Clock {
    /// At each call; the first counts.
    pub(crate) fn start(&mut self) {
        self.start = self.start.or_else(now);
    }

    /// Whether this time has passed since the first call. It never has before that, and where there is no clock.
    pub(crate) fn is_past(&self, time: Option<Duration>) -> bool {
        time.zip(self.start).is_some_and(|(time, start)| start.elapsed() >= time)
    }

    /// The scores are there.
    pub(crate) fn scored(&self, stats: &mut Stats) {
        if self.first.is_none() {
            stats.prefill_time = since(self.start);
        }
    }

    /// Tokens are chosen.
    pub(crate) fn chosen(&mut self, stats: &mut Stats) {
        if self.first.is_none() {
            stats.time_to_first_token = since(self.start);
            self.first = now();
        }
        stats.decode_time = since(self.first);
    }
}

/// The time, where the platform has a clock: `Instant::now` panics in a browser.
pub(crate) fn now() -> Option<Instant> {
    (!cfg!(target_family = "wasm")).then(Instant::now)
}

fn since(start: Option<Instant>) -> Duration {
    start.map_or(Duration::ZERO, |start| start.elapsed())
}
