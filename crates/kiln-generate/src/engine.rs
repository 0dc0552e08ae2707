//! Generations that come and go, and share their passes (continuous batching).
//!
//! A prompt is computed by itself, a chunk in each turn. Then its rows join those of the other generations,
//! and one pass gives every row its next token. Generations whose steps are not one token of each row (beams,
//! draft models, contrastive search, guidance, DoLa) keep passes of their own, a step in each turn.
//!
//! Drafts by prompt lookup, and tokens that a grammar forces, save passes where a generation is alone. Once
//! there are others, it shares their passes instead.
//!
//! **Invariant:** a generation gives the tokens that it gives alone, whatever else runs. Rows keep their bits
//! in passes of up to [`EXACT_ROWS`] rows, or more with some models ([`CausalModel::exact_rows`]); each
//! generation has its own settings, sampler and processors.

mod prefixes;
mod shares;
mod together;

#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use kiln_core::{Error, Result, model::CausalModel, read_back};

pub(crate) use self::prefixes::Kept;
use self::{prefixes::Prefixes, shares::Shares, together::Together};
pub use self::{
    prefixes::{PrefixScope, StoredPrefix},
    shares::Share,
};
use crate::generation::{Generation, Step};

/// The most rows of a pass in which each row has the bits that it has alone, with every model and on every
/// device.
pub const EXACT_ROWS: usize = kiln_kernels::INVARIANT_UP_TO;

/// Number of times that a generation is computed again, without a step in between, before its error is final.
const ATTEMPTS: usize = 3;

/// Number of a generation in an [`Engine`]. Later ones have larger numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(u64);

/// A generation in an [`Engine`], and the output that is made of its steps: nothing else ([`Generation`]), or
/// text.
pub trait Generating: Send + 'static {
    type Output;

    fn generation(&mut self) -> &mut Generation<'static>;

    /// Takes one more token of each row that had not ended.
    ///
    /// # Errors
    /// An error ends the generation, and no other one.
    fn take(&mut self, step: Step) -> Result<Option<Self::Output>>;

    /// Whether nothing follows. A generation whose rows have ended is over anyway.
    fn is_over(&self) -> bool {
        false
    }

    /// The rest, after the last step.
    fn end(&mut self) -> Result<Option<Self::Output>> {
        Ok(None)
    }
}

impl Generating for Generation<'static> {
    type Output = Step;

    fn generation(&mut self) -> &mut Self {
        self
    }

    fn take(&mut self, step: Step) -> Result<Option<Step>> {
        Ok(Some(step))
    }
}

/// Something that happened in a turn of an [`Engine`].
#[derive(Debug)]
pub enum Event<T: Generating> {
    /// More of a generation.
    Output(RequestId, T::Output),
    /// The generation is over. Its cache is empty, so that it holds no memory.
    Ended(RequestId, T),
    /// The generation ended with an error, and its cache is empty. Others go on.
    Failed(RequestId, T, Error),
}

/// Runs many generations of one model at once.
///
/// A turn is [`step`](Self::step): nothing is computed in between.
pub struct Engine<T: Generating> {
    model: Arc<dyn CausalModel>,
    /// The most rows that are computed at once.
    rows: usize,
    /// Rows that were too many for the memory; `usize::MAX`: none were.
    too_many: usize,
    submitted: u64,
    waiting: VecDeque<Job<T>>,
    /// Each in passes of its own: its prompt, or all of it.
    apart: Vec<Apart<T>>,
    together: Together<T>,
    /// Beginnings of prompts that were computed; `None`: nothing is reused.
    prefixes: Option<Prefixes>,
    shares: Shares,
    events: Vec<Event<T>>,
}

/// A generation that is in no pass.
#[derive(Debug)]
struct Job<T> {
    id: RequestId,
    share: Share,
    own: T,
    rows: usize,
    /// The error that emptied the cache though tokens were fed; they are fed again first.
    lost: Option<Error>,
    /// Number of times that it began again since its last step.
    attempts: usize,
    /// The generation's own answer to memory that runs out, kept while other generations could make room.
    oom_policy: Option<Arc<dyn crate::OomPolicy>>,
    prefix: Prefix,
}

/// Whether a generation begins with the cache of an earlier prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prefix {
    /// If there is one.
    Allowed,
    /// The prompt is computed after one.
    Used,
    /// Not any more: the prompt is computed, or there was too little memory for it.
    Past,
}

/// A generation in passes of its own.
struct Apart<T> {
    id: RequestId,
    user: u64,
    rows: usize,
    /// Whether its first token is still to come. One prompt is computed at a time.
    starts: bool,
    turn: Turn<T>,
}

enum Turn<T> {
    /// Between two steps.
    Between(Box<Job<T>>),
    /// A step under way. Its future gives the generation back, and the step if there was one.
    Step(Pin<Box<dyn Future<Output = Stepped<T>> + Send>>),
    Ended,
}

type Stepped<T> = (Job<T>, Result<Option<Step>>);

impl<T: Generating> std::fmt::Debug for Engine<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("rows", &self.rows)
            .field("waiting", &self.waiting.len())
            .field("apart", &self.apart.len())
            .field("together", &self.together.rows())
            .finish_non_exhaustive()
    }
}

impl<T: Generating> Engine<T> {
    /// Creates an engine that computes up to `rows` rows at once; generations beyond that wait. With more
    /// than [`CausalModel::exact_rows`], bits of rows may depend on other rows.
    ///
    /// # Errors
    /// [`Error::Setting`] for 0 rows.
    pub fn new(model: Arc<dyn CausalModel>, rows: usize) -> Result<Self> {
        if rows == 0 {
            return Err(Error::Setting { name: "rows", why: "is 0, must be at least 1".into() });
        }
        Ok(Self {
            model,
            rows,
            too_many: usize::MAX,
            submitted: 0,
            waiting: VecDeque::new(),
            apart: Vec::new(),
            together: Together::default(),
            prefixes: None,
            shares: Shares::default(),
            events: Vec::new(),
        })
    }

    /// Keeps copies of caches, of up to `bytes` bytes in host memory: a prompt that begins like an earlier
    /// one of the same [`prefix_scope`](crate::Options::prefix_scope) is computed from there. No bit changes.
    #[must_use]
    pub fn with_prefixes(self, bytes: usize) -> Self {
        Self { prefixes: (bytes > 0).then(|| Prefixes::new(bytes)), ..self }
    }

    /// Keeps caches with the answers, too, so that the next turn of a chat computes its new tokens alone. The
    /// bits of a prompt that begins with an answer may change, and
    /// [`Stats::reused_answer`](crate::Stats::reused_answer) says so. Without
    /// [`with_prefixes`](Self::with_prefixes), nothing is kept.
    #[must_use]
    pub fn with_answers_reused(mut self) -> Self {
        self.prefixes.iter_mut().for_each(|prefixes| prefixes.with_answers = true);
        self
    }

    /// Number of bytes of the copies of caches.
    pub fn prefix_bytes(&self) -> usize {
        self.prefixes.as_ref().map_or(0, Prefixes::bytes)
    }

    /// The copies of caches, the latest used last.
    pub fn stored_prefixes(&self) -> impl Iterator<Item = &StoredPrefix> {
        self.prefixes.iter().flat_map(Prefixes::all)
    }

    /// Adds a copy of a cache, such as one that another engine of the same model kept. Others give way to it.
    /// Copies that are too large are left out, and answers, unless they
    /// [are reused](Self::with_answers_reused).
    pub fn store_prefix(&mut self, prefix: StoredPrefix) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.add(prefix);
        }
    }

    /// Adds a generation. It begins in one of the next turns, in the order of arrival.
    ///
    /// # Errors
    /// [`Error::Setting`] for a generation of another model.
    pub fn submit(&mut self, own: T) -> Result<RequestId> {
        self.submit_for(own, Share::default())
    }

    /// Adds a generation of a user. It begins in one of the next turns, in the order of [`Share`].
    ///
    /// # Errors
    /// As [`submit`](Self::submit).
    pub fn submit_for(&mut self, mut own: T, share: Share) -> Result<RequestId> {
        let generation = own.generation();
        if !Arc::ptr_eq(generation.runner.model(), &self.model) {
            let why = "is a request to another model than the engine's".to_owned();
            return Err(Error::Setting { name: "submit", why });
        }
        let id = RequestId(self.submitted);
        self.submitted += 1;
        generation.runner.prepare_to_join();
        let rows = generation.fed_rows();
        let active: Vec<u64> = self.users().collect();
        self.shares.enter(share.user, &active);
        self.waiting.push_back(Job {
            id,
            share,
            own,
            rows,
            lost: None,
            attempts: 0,
            oom_policy: None,
            prefix: Prefix::Allowed,
        });
        Ok(id)
    }

    /// Ends a generation; its rows are in no pass any more, and its cache is empty. Returns it, unless it was
    /// in the middle of a step of its own. Nothing happens if it is over.
    pub fn cancel(&mut self, id: RequestId) -> Option<T> {
        self.too_many = usize::MAX;
        if let Some(at) = self.waiting.iter().position(|job| job.id == id) {
            return self.waiting.remove(at).map(|job| without_cache(job.own));
        }
        if let Some(at) = self.apart.iter().position(|apart| apart.id == id) {
            return match self.apart.remove(at).turn {
                Turn::Between(job) => Some(without_cache(job.own)),
                Turn::Step(_) | Turn::Ended => None,
            };
        }
        self.together.leave(id).map(|job| without_cache(job.own))
    }

    /// The user of each generation.
    fn users(&self) -> impl Iterator<Item = u64> {
        let waiting = self.waiting.iter().map(|job| job.share.user);
        waiting.chain(self.apart.iter().map(|apart| apart.user)).chain(self.together.users())
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.apart.is_empty() && self.together.is_empty() && self.events.is_empty()
    }

    /// Number of generations that wait for others to end.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Number of bytes that the caches of shared passes hold on devices.
    pub fn cache_bytes(&self) -> usize {
        self.together.device_bytes()
    }

    /// Number of rows that are being computed.
    pub fn running_rows(&self) -> usize {
        self.together.rows() + self.apart.iter().map(|apart| apart.rows).sum::<usize>()
    }

    /// A turn: a chunk of one prompt, a step of each generation with passes of its own, and a pass for all
    /// other rows. Returns at once if there is nothing to do.
    ///
    /// A future that is dropped in the middle loses no event; rows whose step was lost are computed again.
    pub async fn step(&mut self) -> Vec<Event<T>> {
        read_back::yield_now().await;
        if self.together.in_pass {
            // Not a fault of the generations, so it may happen any number of times.
            let error = Error::Execution("a turn of the engine was given up in the middle".into());
            self.begin_again(error, false);
        } else if let Some(error) = self.together.take_lost() {
            self.begin_again(error, true);
        }
        self.admit();
        self.leave_last();
        self.step_apart().await;
        self.step_together().await;
        let running: Vec<u64> = self.together.users().collect();
        running.into_iter().for_each(|user| self.shares.charge(user, 1));
        std::mem::take(&mut self.events)
    }

    /// Begins waiting generations as long as there is room.
    fn admit(&mut self) {
        while let Some(at) = self.next_waiting() {
            let running = self.running_rows();
            let rows = self.rows.min(self.too_many.saturating_sub(1));
            if running > 0 && running + self.waiting[at].rows > rows {
                return;
            }
            let Some(mut job) = self.waiting.remove(at) else { return };
            self.shares.charge(job.share.user, job.own.generation().stats().prompt_tokens);
            // Where others can make room, the generation waits for them instead.
            let policy = job.own.generation().runner.oom_policy_mut();
            if running > 0 {
                job.oom_policy = policy.take().or(job.oom_policy);
            } else {
                *policy = policy.take().or(job.oom_policy.take());
            }
            self.apart.push(Apart::new(job, true));
        }
    }

    /// Lets the last generation leave the shared passes, if it can draft tokens in passes of its own.
    fn leave_last(&mut self) {
        if !self.apart.is_empty() || !self.waiting.is_empty() || self.together.jobs() != 1 {
            return;
        }
        let last = self.together.latest().filter(|_| self.together.may_draft());
        if let Some(job) = last.and_then(|id| self.together.leave(id)) {
            self.apart.push(Apart::new(job, false));
        }
    }

    /// The generation that begins next. Those whose memory others needed are first.
    fn next_waiting(&self) -> Option<usize> {
        let order = |at: &usize| {
            let Job { id, share, lost, .. } = &self.waiting[*at];
            (lost.is_none(), self.shares.used(share.user), share.user, share.priority, *id)
        };
        (0..self.waiting.len()).min_by_key(order)
    }

    /// Goes on with the generations that have passes of their own, and with the first prompt.
    async fn step_apart(&mut self) {
        let mut ready: Vec<(usize, Job<T>, Result<Option<Step>>)> = Vec::new();
        poll_fn(|context| {
            let mut prompts = 0;
            for (at, apart) in self.apart.iter_mut().enumerate() {
                prompts += usize::from(apart.starts);
                if apart.starts && prompts > 1 {
                    continue;
                }
                if let (Some(prefixes), Turn::Between(job)) = (&mut self.prefixes, &mut apart.turn)
                    && apart.starts
                    && job.lost.is_none()
                    && job.prefix == Prefix::Allowed
                    && prefixes.begin(job.own.generation())
                {
                    job.prefix = Prefix::Used;
                    // Such a cache grows, and takes more memory than one that begins at its full size. Where
                    // there is too little, the prompt is computed from its first token, as it is alone.
                    let policy = job.own.generation().runner.oom_policy_mut();
                    job.oom_policy = policy.take().or(job.oom_policy.take());
                }
                if let Poll::Ready((job, step)) = apart.poll(context) {
                    ready.push((at, job, step));
                }
            }
            let goes_on = !ready.is_empty() || !self.together.is_empty() || self.apart.is_empty();
            if goes_on { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        for (at, ..) in ready.iter().rev() {
            // Its future has ended.
            drop(self.apart.remove(*at));
        }
        for (_, job, step) in ready {
            self.stepped_apart(job, step);
        }
    }

    fn stepped_apart(&mut self, mut job: Job<T>, step: Result<Option<Step>>) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.store(job.own.generation());
        }
        let begins_anew = step.is_err() && job.prefix == Prefix::Used && job.lost.is_none();
        job.prefix = if job.prefix == Prefix::Used { Prefix::Past } else { job.prefix };
        match step {
            Ok(None) => self.go_on(job),
            Ok(Some(step)) => match job.take(step, &mut self.events) {
                Ok(true) => self.end(job),
                Ok(false) => self.go_on(job),
                Err(error) => self.fail(job, error),
            },
            Err(error) if is_of_memory(&error) && begins_anew => {
                if self.running_rows() > 0 {
                    self.too_many = self.too_many.min(self.running_rows() + job.rows);
                }
                job.own.generation().begin_anew();
                self.wait(job);
            }
            // Others can make room, or it has not yet done by itself what it can.
            Err(error) if is_of_memory(&error) && (self.running_rows() > 0 || job.oom_policy.is_some()) => {
                self.too_many = self.too_many.min(self.running_rows() + job.rows);
                self.wait_again(job, error);
            }
            Err(error) => self.fail(job, error),
        }
    }

    /// Lets the rows of a generation join the others, if they can. One that is alone drafts tokens instead.
    fn go_on(&mut self, mut job: Job<T>) {
        let is_alone = self.running_rows() == 0 && self.waiting.is_empty();
        let drafts = is_alone && job.own.generation().may_draft();
        if !drafts && job.own.generation().can_join() {
            self.together.join(&self.model, job, &mut self.events);
        } else {
            self.apart.push(Apart::new(job, false));
        }
    }

    /// A pass for all rows that share them.
    async fn step_together(&mut self) {
        if self.together.is_empty() {
            return;
        }
        match self.together.pass(&mut self.events).await {
            Ok(ended) => ended.into_iter().for_each(|job| self.end(job)),
            Err(error) => self.answer(error),
        }
    }

    /// After a pass that failed: rows that did are given up, or one generation waits for memory, or all rows
    /// are computed again.
    fn answer(&mut self, error: Error) {
        let failed = self.together.failed(&error);
        if self.together.is_refused() {
            self.too_many = self.too_many.min(self.running_rows());
            self.begin_again(error, true);
        } else if is_of_memory(&error) {
            self.too_many = self.too_many.min(self.running_rows());
            let gives_way = if failed.is_empty() { self.together.latest() } else { None };
            let only = self.running_rows() == self.together.rows() && self.together.jobs() == 1;
            for id in failed {
                self.together.leave(id).into_iter().for_each(|job| self.wait_again(job, error.clone()));
            }
            let Some(mut job) = gives_way.and_then(|id| self.together.leave(id)) else { return };
            if only {
                // It has a policy of its own for this.
                let policy = job.own.generation().runner.oom_policy_mut();
                *policy = policy.take().or(job.oom_policy.take());
                self.apart.push(Apart::new(job, false));
            } else {
                self.wait_again(job, error);
            }
        } else {
            let ended = if failed.is_empty() { self.together.ids() } else { failed };
            for id in ended {
                self.together.leave(id).into_iter().for_each(|job| self.fail(job, error.cause().clone()));
            }
        }
    }

    /// Computes the rows of all shared passes again. `failed`: too often, and the error is final.
    fn begin_again(&mut self, error: Error, failed: bool) {
        for mut job in self.together.give_up() {
            job.attempts += usize::from(failed);
            if job.is_over() {
                self.end(job);
            } else if job.attempts > ATTEMPTS {
                self.fail(job, error.clone());
            } else {
                self.wait_again(job, error.clone());
            }
        }
    }

    /// Lets a generation begin again later, before those that came after it: its cache is given up.
    fn wait_again(&mut self, mut job: Job<T>, error: Error) {
        job.own.generation().runner.give_up_cache();
        job.lost = Some(error);
        self.wait(job);
    }

    fn wait(&mut self, job: Job<T>) {
        let at = self.waiting.partition_point(|other| other.id < job.id);
        self.waiting.insert(at, job);
    }

    fn end(&mut self, mut job: Job<T>) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.store_answer(job.own.generation());
        }
        match job.own.end() {
            Ok(rest) => {
                self.too_many = usize::MAX;
                self.events.extend(rest.map(|rest| Event::Output(job.id, rest)));
                self.events.push(Event::Ended(job.id, without_cache(job.own)));
            }
            Err(error) => self.fail(job, error),
        }
    }

    fn fail(&mut self, job: Job<T>, error: Error) {
        self.too_many = usize::MAX;
        self.events.push(Event::Failed(job.id, without_cache(job.own), error));
    }
}

impl<T: Generating> Job<T> {
    fn is_over(&mut self) -> bool {
        self.own.is_over() || self.own.generation().is_finished()
    }

    /// Passes a step on. Returns whether it was the last.
    fn take(&mut self, step: Step, events: &mut Vec<Event<T>>) -> Result<bool> {
        self.attempts = 0;
        events.extend(self.own.take(step)?.map(|output| Event::Output(self.id, output)));
        Ok(self.is_over())
    }
}

impl<T: Generating> Apart<T> {
    fn new(job: Job<T>, starts: bool) -> Self {
        Self { id: job.id, user: job.share.user, rows: job.rows, starts, turn: Turn::Between(Box::new(job)) }
    }

    /// Goes on with the step, or begins one.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Stepped<T>> {
        if let Turn::Between(_) = self.turn
            && let Turn::Between(mut job) = std::mem::replace(&mut self.turn, Turn::Ended)
        {
            self.turn = Turn::Step(Box::pin(async move {
                let generation = job.own.generation();
                let step = match job.lost.take() {
                    Some(error) => generation.resume(error).await,
                    None => generation.continue_alone().await,
                };
                (*job, step)
            }));
        }
        match &mut self.turn {
            Turn::Step(step) => step.as_mut().poll(context),
            Turn::Between(_) | Turn::Ended => Poll::Pending,
        }
    }
}

fn without_cache<T: Generating>(mut own: T) -> T {
    own.generation().runner.give_up_cache();
    own
}

fn is_of_memory(error: &Error) -> bool {
    matches!(error.cause(), Error::OutOfMemory { .. } | Error::BufferTooLarge { .. })
}
