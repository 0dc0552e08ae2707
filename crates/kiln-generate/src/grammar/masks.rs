//! Masks that are computed while the device computes.

use std::{
    fmt, mem,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread,
    time::Duration,
};

use kiln_core::{Error, Result, model::TokenId};
use llguidance::CancellationHandle;

use super::matcher::{Matcher, Next};
use crate::contained::contained;

/// Maximum time for the masks of all rows after one step. One mask takes milliseconds, and with an ambiguous
/// grammar seconds.
const STEP_TIME: Duration = Duration::from_secs(20);

/// The continuation of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advance {
    /// The row that it continues: its own index, except for beams.
    pub parent: usize,
    /// Number of that row's tokens that are rewound first.
    pub rewind: usize,
    /// Tokens that were chosen. Empty for a row that waits or has ended.
    pub tokens: Vec<TokenId>,
    /// Tokens that may be chosen next, as drafted by a draft model. The row does not advance by them.
    pub draft: Vec<TokenId>,
}

impl Advance {
    /// Continues row `row` with `token`.
    pub fn token(row: usize, token: TokenId) -> Self {
        Self { parent: row, tokens: vec![token], ..Self::default() }
    }
}

/// The tokens that may follow in a row: one [`Next`] after its tokens, and one more after each token of its
/// draft, up to the first that may not follow.
pub type Nexts = Vec<Next>;

/// Computes the masks of all rows on a separate thread, while the device computes.
///
/// The thread ends when this value is dropped. Without threads (in a browser), [`wait`](Self::wait) computes
/// the masks.
pub struct Masks {
    rows: usize,
    name: &'static str,
    /// Number of steps whose masks were not waited for.
    pending: usize,
    /// Masks that were put back.
    known: Option<Vec<Nexts>>,
    /// Maximum time to wait for one step.
    pub(super) time: Duration,
    worker: Worker,
}

enum Worker {
    Thread {
        steps: Sender<Vec<Advance>>,
        answers: Receiver<Result<Vec<Nexts>>>,
        halt: Arc<Halt>,
    },
    Here {
        rows: Vec<Matcher>,
        steps: Vec<Vec<Advance>>,
    },
    /// The computation failed, for this reason.
    Failed(String),
}

impl fmt::Debug for Masks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Masks")
            .field("rows", &self.rows)
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

impl Masks {
    /// Begins to compute the masks of the first tokens of `rows`.
    ///
    /// # Errors
    /// [`Error::Setting`] if the system cannot start a thread.
    pub fn new(rows: Vec<Matcher>) -> Result<Self> {
        let name = rows.first().map_or("grammar", Matcher::name);
        let mut masks = Self::idle(rows, name)?;
        let first = (0..masks.rows).map(|parent| Advance { parent, ..Advance::default() });
        masks.advance(first.collect())?;
        Ok(masks)
    }

    fn halt(&self) {
        if let Worker::Thread { halt, .. } = &self.worker {
            halt.halt();
        }
    }

    fn idle(rows: Vec<Matcher>, name: &'static str) -> Result<Self> {
        let count = rows.len();
        let worker = match cfg!(target_family = "wasm") {
            true => Worker::Here { rows, steps: Vec::new() },
            false => spawned(rows).map_err(|why| Error::Setting { name, why })?,
        };
        Ok(Self { rows: count, name, pending: 0, known: None, time: STEP_TIME, worker })
    }

    /// Number of rows after the last step.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Begins to compute the masks after a step, with one [`Advance`] per row.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`] for a parent that does not exist, and errors of an earlier step.
    pub fn advance(&mut self, step: Vec<Advance>) -> Result<()> {
        if let Some(row) = step.iter().map(|row| row.parent).find(|row| *row >= self.rows) {
            return Err(Error::NoSuchRow { row, rows: self.rows });
        }
        self.rows = step.len();
        self.pending += 1;
        match &mut self.worker {
            // If the thread has ended, `wait` reports it.
            Worker::Thread { steps, .. } => drop(steps.send(step)),
            Worker::Here { steps, .. } => steps.push(step),
            Worker::Failed(why) => return Err(Error::Setting { name: self.name, why: why.clone() }),
        }
        Ok(())
    }

    /// Waits for the masks of each row after the earliest step that was not waited for.
    ///
    /// # Errors
    /// [`Error::Setting`] for a token that may not follow, and if a grammar takes too much work. Every later
    /// call returns an error, too.
    pub fn wait(&mut self) -> Result<Vec<Nexts>> {
        if let Some(known) = self.known.take() {
            return Ok(known);
        }
        let Some(pending) = self.pending.checked_sub(1) else {
            let why = "no masks are being computed; say first how the rows go on".into();
            return Err(Error::Setting { name: self.name, why });
        };
        self.pending = pending;
        let failed = |why: String| Err(Error::Setting { name: self.name, why });
        let answer = match &mut self.worker {
            Worker::Thread { answers, .. } => match answers.recv_timeout(self.time) {
                Ok(answer) => answer,
                Err(RecvTimeoutError::Timeout) => {
                    let seconds = self.time.as_secs();
                    failed(format!(
                        "the tokens that may follow take longer than {seconds} s to compute; make it simpler"
                    ))
                }
                Err(RecvTimeoutError::Disconnected) => {
                    failed("the thread that computes masks has ended".into())
                }
            },
            Worker::Here { rows, steps } => advanced(rows, steps.remove(0), &Halt::default()),
            Worker::Failed(why) => failed(why.clone()),
        };
        if let Err(error) = &answer {
            let why = match error {
                Error::Setting { why, .. } => why.clone(),
                other => other.to_string(),
            };
            self.halt();
            self.worker = Worker::Failed(why);
        }
        answer
    }

    /// Makes the next [`wait`](Self::wait) return these masks, which an earlier one returned. No row has
    /// advanced since.
    pub(crate) fn put_back(&mut self, nexts: Vec<Nexts>) {
        self.known = Some(nexts);
    }
}

impl Drop for Masks {
    fn drop(&mut self) {
        self.halt();
    }
}

/// Makes the thread abandon the mask that it computes.
#[derive(Default)]
struct Halt {
    halted: AtomicBool,
    /// Handle of the row whose mask is being computed.
    row: Mutex<Option<CancellationHandle>>,
}

impl Halt {
    fn halt(&self) {
        let row = self.row.lock().unwrap_or_else(PoisonError::into_inner);
        self.halted.store(true, Ordering::Relaxed);
        row.iter().for_each(CancellationHandle::cancel);
    }

    /// Notes that `row` is being worked on, unless the thread is to stop.
    fn begin(&self, row: &Matcher) -> Result<()> {
        let mut current = self.row.lock().unwrap_or_else(PoisonError::into_inner);
        if self.halted.load(Ordering::Relaxed) {
            let why = "the tokens that may follow are no longer waited for".into();
            return Err(Error::Setting { name: row.name(), why });
        }
        *current = row.cancellation();
        Ok(())
    }
}

fn spawned(mut rows: Vec<Matcher>) -> Result<Worker, String> {
    let (steps, asked) = mpsc::channel();
    let (answer, answers) = mpsc::channel();
    let halt = Arc::new(Halt::default());
    let halted = halt.clone();
    let work = move || {
        // The loop ends when either side of a channel is dropped.
        for step in asked {
            let made = advanced(&mut rows, step, &halted);
            if answer.send(made).is_err() {
                return;
            }
        }
    };
    let begun = thread::Builder::new().name("kiln-masks".into()).spawn(work);
    begun.map_err(|e| format!("no thread can be started to compute masks: {e}"))?;
    Ok(Worker::Thread { steps, answers, halt })
}

/// Advances the rows by `step`. Returns the tokens that may follow in each.
fn advanced(rows: &mut Vec<Matcher>, step: Vec<Advance>, halt: &Halt) -> Result<Vec<Nexts>> {
    let name = rows.first().map_or("grammar", Matcher::name);
    contained(|| {
        *rows = inherited(rows, &step);
        let follow = |(row, step): (&mut Matcher, &Advance)| {
            halt.begin(row)?;
            followed(row, step)
        };
        rows.iter_mut().zip(&step).map(follow).collect()
    })
    .unwrap_or_else(|why| Err(Error::Setting { name, why: format!("llguidance fails on it: {why}") }))
}

/// The parent of each row. The last row that continues a parent takes the parent itself, and the others take
/// clones.
fn inherited(rows: &mut Vec<Matcher>, step: &[Advance]) -> Vec<Matcher> {
    let mut left = vec![0; rows.len()];
    for step in step {
        left.get_mut(step.parent).into_iter().for_each(|left| *left += 1);
    }
    let mut parents: Vec<Option<Matcher>> = mem::take(rows).into_iter().map(Some).collect();
    let inherit = |step: &Advance| {
        let (left, parent) = (left.get_mut(step.parent)?, parents.get_mut(step.parent)?);
        *left -= 1;
        if *left == 0 { parent.take() } else { parent.clone() }
    };
    step.iter().filter_map(inherit).collect()
}

fn followed(row: &mut Matcher, step: &Advance) -> Result<Nexts> {
    row.rewind(step.rewind)?;
    step.tokens.iter().try_for_each(|token| row.accept(*token))?;
    let mut nexts = vec![row.peek()?];
    let before = row.accepted();
    for token in &step.draft {
        if nexts.last().is_none_or(|next| !next.mask.allows(*token)) {
            break;
        }
        row.accept(*token)?;
        nexts.push(row.peek()?);
    }
    row.rewind(row.accepted() - before)?;
    Ok(nexts)
}
