//! A team of threads for a sequence of short shared computations, each of a few microseconds.
//!
//! A pass of a language model consists of hundreds of products, each of which waits for the previous one. Two
//! properties make a task-based thread pool such as rayon's slow at them. Its threads sleep between products,
//! and waking one takes as long as a product. And the caller waits until every thread has done its part, even
//! one that the system has not woken yet.
//!
//! The threads of a [`Team`] therefore look for more work for [`LINGER`] before they sleep, and yield their
//! core to others meanwhile, except in browsers, where no thread can. **Nobody waits for a thread that has
//! not begun**: the caller ends the computation when its own part returns.
//!
//! **Invariant:** a computation is called only by threads that joined it, and no thread joins one that has
//! ended. A computation may therefore borrow from the stack of its caller; this is the only `unsafe` code
//! here.

#[cfg(test)]
mod tests;

use std::{
    any::Any,
    hint, io, mem,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    ptr,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use web_time::Instant;

/// How long threads look for more work: longer than it takes to choose a token.
pub const LINGER: Duration = Duration::from_micros(500);

/// Number of checks before a waiting thread yields its core.
const SPINS: usize = 256;

/// Flag in [`Shared::joined`] for a computation that can be joined.
const OPEN: u64 = 1 << 63;

/// Lowest bit of the computation's number in [`Shared::joined`]. The number of joined threads fits below it.
const NUMBER: u32 = 16;

/// A shared computation, to be called by several threads at the same time.
type Work<'a> = &'a (dyn Fn() + Sync);

/// A team of threads that help with computations.
#[derive(Debug, Default)]
pub struct Team {
    shared: Arc<Shared>,
    /// Held by the caller whose computation is shared.
    leads: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Team {
    /// Creates a team of `threads` threads, in addition to the one that calls [`share`](Self::share).
    ///
    /// # Errors
    /// The system's error if it has no more threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let mut team = Self { shared: Arc::default(), leads: Mutex::default(), threads: Vec::new() };
        for i in 0..threads {
            let shared = team.shared.clone();
            let thread = thread::Builder::new().name(format!("kiln-{i}"));
            team.threads.push(thread.spawn(move || shared.help())?);
        }
        Ok(team)
    }

    /// Number of threads that help.
    pub fn threads(&self) -> usize {
        self.threads.len() + self.shared.guests.load(Ordering::Relaxed)
    }

    /// Helps with computations on this thread until [`stop`](Self::stop) is called. This is for programs
    /// whose host makes the threads, as browsers do. `joined` is called first, when the thread counts.
    pub fn help(&self, joined: impl FnOnce()) {
        self.shared.guests.fetch_add(1, Ordering::Relaxed);
        joined();
        self.shared.help();
        self.shared.guests.fetch_sub(1, Ordering::Relaxed);
    }

    /// Lets all threads that help return.
    pub fn stop(&self) {
        self.shared.stops.store(true, Ordering::SeqCst);
        self.shared.begin();
    }

    /// Calls `work` here, and once on each thread that is free meanwhile. Returns when all of these calls
    /// have returned.
    ///
    /// `work` should therefore take pieces off a list until none is left. While another computation is
    /// shared, or from within one, `work` is called only here.
    ///
    /// # Panics
    /// If `work` panics, on any thread.
    pub fn share(&self, work: &(dyn Fn() + Sync)) {
        let _leads = match self.leads.try_lock() {
            Ok(leads) => leads,
            Err(TryLockError::Poisoned(leads)) => leads.into_inner(),
            Err(TryLockError::WouldBlock) => return work(),
        };
        // A leftover panic is from a computation that also panicked on its own thread.
        let left = locked(&self.shared.panic).take();
        drop(left);
        {
            let _ended = self.shared.open(&work);
            work();
        }
        let panic = locked(&self.shared.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.stop();
        for thread in self.threads.drain(..) {
            // Threads catch every panic.
            let _ = thread.join();
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// Number of computations that have been shared so far.
    begun: AtomicU64,
    /// Number of threads that joined the computation, the computation's number, and [`OPEN`].
    joined: AtomicU64,
    /// The computation, as long as threads have joined it or may join it.
    work: AtomicPtr<Work<'static>>,
    /// Number of threads that sleep, or are about to.
    sleep: AtomicUsize,
    awake: Condvar,
    sleeping: Mutex<()>,
    /// Panic of a thread that helped.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stops: AtomicBool,
    /// Number of threads that help, besides those that the team made.
    guests: AtomicUsize,
}

/// Ends the computation when dropped, and waits for the threads that joined it.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.joined.fetch_and(!OPEN, Ordering::AcqRel);
        wait_until(None, || self.0.joined.load(Ordering::Acquire).is_multiple_of(1 << NUMBER));
    }
}

impl Shared {
    /// Lets threads join `work` until the returned guard is dropped.
    fn open<'a>(&'a self, work: &'a Work<'_>) -> Ended<'a> {
        self.work.store(ptr::from_ref(work).cast_mut().cast(), Ordering::Relaxed);
        let number = self.begun.load(Ordering::Relaxed).wrapping_add(1);
        self.joined.store(OPEN | number << NUMBER, Ordering::Release);
        let ended = Ended(self);
        self.begin();
        ended
    }

    /// Makes all threads check for work.
    fn begin(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        // A thread that increments `sleep` later checks `begun` before it sleeps.
        if self.sleep.load(Ordering::SeqCst) > 0 {
            let _sleeping = locked(&self.sleeping);
            self.awake.notify_all();
        }
    }

    /// Main loop of a thread.
    fn help(&self) {
        let mut seen = 0;
        loop {
            if !wait_until(Some(LINGER), || self.begun.load(Ordering::Acquire) != seen) {
                self.sleep_after(seen);
            }
            let begun = self.begun.load(Ordering::Acquire);
            if self.stops.load(Ordering::SeqCst) {
                return;
            }
            seen = self.join(seen).unwrap_or(begun);
        }
    }

    fn sleep_after(&self, seen: u64) {
        let mut sleeping = locked(&self.sleeping);
        self.sleep.fetch_add(1, Ordering::SeqCst);
        while self.begun.load(Ordering::SeqCst) == seen {
            sleeping = self.awake.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleep.fetch_sub(1, Ordering::SeqCst);
    }

    /// Helps with the computation, unless it has ended or has the number `seen`. Returns the computation's
    /// number.
    fn join(&self, seen: u64) -> Option<u64> {
        let number = |joined: u64| (joined & !OPEN) >> NUMBER;
        let one_more = |joined: u64| (joined & OPEN != 0 && number(joined) != seen).then_some(joined + 1);
        let joined = self.joined.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).ok()?;
        let work = self.work.load(Ordering::Relaxed);
        // SAFETY: `open` stored the pointer before it set the flag that was seen here, and the caller of
        // `open` waits until `joined` is 0 before the borrowed data ends.
        #[expect(unsafe_code, reason = "threads of a team outlive what they are lent")]
        let work: Work<'_> = unsafe { *work };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
            let mut first = locked(&self.panic);
            match *first {
                None => *first = Some(panic),
                // Dropping the panic may panic.
                Some(_) => mem::forget(panic),
            }
        }
        self.joined.fetch_sub(1, Ordering::Release);
        Some(number(joined))
    }
}

/// Waits until `is_true` returns true, or for the duration `most`. Returns whether it was true.
fn wait_until(most: Option<Duration>, is_true: impl Fn() -> bool) -> bool {
    for _ in 0..SPINS {
        if is_true() {
            return true;
        }
        hint::spin_loop();
    }
    let begun = Instant::now();
    while most.is_none_or(|most| begun.elapsed() < most) {
        if is_true() {
            return true;
        }
        thread::yield_now();
    }
    false
}

/// Locks a mutex. No code that can panic runs while one is locked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
