//! Statistics of a generation.

use std::time::Duration;

use web_time::Instant;

/// Counts and times of a generation so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    pub rows: usize,
    /// Number of tokens of all rows that were fed before the first was chosen, without padding.
    pub prompt_tokens: usize,
    /// Number of tokens of the prompt that an engine had in the cache of another one, and that were not fed.
    pub reused: usize,
    /// Whether these end with an answer that an engine [reused](crate::Engine::with_answers_reused): bits may
    /// differ from those of the prompt alone.
    pub reused_answer: bool,
    /// Number of tokens of all rows that were chosen, including those that end a row.
    pub generated: usize,
    /// Number of tokens of all rows that assisted decoding drafted, and number of those that were accepted.
    pub proposed: usize,
    pub accepted: usize,
    /// Number of tokens of all rows that a grammar forced and that were fed together with others.
    pub forced: usize,
    /// Time from the first call to the scores after the prompt.
    pub prefill_time: Duration,
    /// Time from the first call to the choice of the first tokens.
    pub time_to_first_token: Duration,
    /// Time from the first tokens to the latest, as the caller saw it, including the caller's own work.
    pub decode_time: Duration,
    /// Seed that repeats the run; `None` without sampling.
    pub seed: Option<u64>,
}

impl Stats {
    /// Number of tokens after the first of each row, which `decode_time` was spent on.
    pub fn decoded(&self) -> usize {
        self.generated.saturating_sub(self.rows)
    }
}

/// Records the [`Stats`] of a generation.
#[derive(Debug)]
pub(crate) struct StatsRecorder {
    pub(crate) stats: Stats,
    start: Option<Instant>,
    first: Option<Instant>,
}

impl StatsRecorder {
    pub(crate) fn new(stats: Stats) -> Self {
        Self { stats, start: None, first: None }
    }

    /// Called at each step; the first call counts.
    pub(crate) fn start(&mut self) {
        self.start.get_or_insert_with(Instant::now);
    }

    /// Whether this time has passed since the first call. It never has before that.
    pub(crate) fn is_past(&self, time: Option<Duration>) -> bool {
        time.zip(self.start).is_some_and(|(time, start)| start.elapsed() >= time)
    }

    /// Records that the scores are there.
    pub(crate) fn scored(&mut self) {
        if self.first.is_none() {
            self.stats.prefill_time = since(self.start);
        }
    }

    /// Records that tokens were chosen.
    pub(crate) fn chosen(&mut self) {
        if self.first.is_none() {
            self.stats.time_to_first_token = since(self.start);
            self.first = Some(Instant::now());
        }
        self.stats.decode_time = since(self.first);
    }
}

fn since(start: Option<Instant>) -> Duration {
    start.map_or(Duration::ZERO, |start| start.elapsed())
}
