//! Threads that share one computation after the other, each of some microseconds.
//!
//! A pass of a language model is hundreds of products, each of which waits for the one before. Two things make a pool of threads
//! for tasks, such as rayon's, slow at them. Its threads sleep between products, and waking one takes as long as a product does. And
//! who shares a product waits until every thread has had its part, even one that the system has not woken yet.
//!
//! So threads of a [`Team`] look for more work for [`LINGER`] before they sleep, and yield their core to whatever else wants it. **Nobody waits
//! for a thread that has not begun**: whoever shares a computation ends it when its own part returns.
//!
//! **Invariant:** a computation is called only by threads that joined it, and nobody joins one that has ended. So it may borrow from the stack of
//! the one who shares it: that is the one thing here that is `unsafe`.

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
    time::{Duration, Instant},
};

/// For how long threads look for more work: longer than it takes to choose a token.
pub const LINGER: Duration = Duration::from_micros(500);

/// Looks at what others do, before a thread yields its core.
const SPINS: usize = 256;

/// The flag of [`Shared::joined`] that a computation can be joined.
const OPEN: u64 = 1 << 63;

/// Where in [`Shared::joined`] the number of the computation begins. Fewer threads than that fit below it.
const NUMBER: u32 = 16;

/// What is shared. To be called by several threads at the same time.
type Work<'a> = &'a (dyn Fn() + Sync);

/// Threads that help with computations.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    /// Held by the one whose computation is shared.
    leads: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Team {
    /// A team of that many threads, beside the one that calls [`share`](Self::share).
    ///
    /// # Errors
    /// What the system says where it has no more threads.
    pub fn new(threads: usize) -> io::Result<Self> {
        let mut team = Self { shared: Arc::default(), leads: Mutex::default(), threads: Vec::new() };
        for i in 0..threads {
            let shared = team.shared.clone();
            let thread = thread::Builder::new().name(format!("kiln-{i}"));
            team.threads.push(thread.spawn(move || shared.help())?);
        }
        Ok(team)
    }

    /// How many threads help.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Calls `work` here, and once on each thread that has time for it meanwhile. It returns when all of them have returned from it.
    ///
    /// So `work` takes pieces off a list until none is left. While another computation is shared, or from within one, it is called here alone.
    ///
    /// # Panics
    /// Where `work` does, on any thread.
    pub fn share(&self, work: &(dyn Fn() + Sync)) {
        let _leads = match self.leads.try_lock() {
            Ok(leads) => leads,
            Err(TryLockError::Poisoned(leads)) => leads.into_inner(),
            Err(TryLockError::WouldBlock) => return work(),
        };
        // One that is there was left by a computation whose own thread panicked, too.
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
        self.shared.stops.store(true, Ordering::SeqCst);
        self.shared.begin();
        for thread in self.threads.drain(..) {
            // Threads catch every panic.
            let _ = thread.join();
        }
    }
}

#[derive(Debug, Default)]
struct Shared {
    /// Computations that have been shared so far
    begun: AtomicU64,
    /// Threads that joined the computation, its number, and [`OPEN`]
    joined: AtomicU64,
    /// The computation, while there are threads that joined it or may
    work: AtomicPtr<Work<'static>>,
    /// Threads that sleep, or are about to
    sleep: AtomicUsize,
    awake: Condvar,
    sleeping: Mutex<()>,
    /// Of a thread that helped
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stops: AtomicBool,
}

/// Ends the computation when it is dropped, and waits for the threads that joined it.
struct Ended<'a>(&'a Shared);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        self.0.joined.fetch_and(!OPEN, Ordering::AcqRel);
        wait_until(None, || self.0.joined.load(Ordering::Acquire).is_multiple_of(1 << NUMBER));
    }
}

impl Shared {
    /// Has threads join `work` until what is returned is dropped.
    fn open<'a>(&'a self, work: &'a Work<'_>) -> Ended<'a> {
        self.work.store(ptr::from_ref(work).cast_mut().cast(), Ordering::Relaxed);
        let number = self.begun.load(Ordering::Relaxed).wrapping_add(1);
        self.joined.store(OPEN | number << NUMBER, Ordering::Release);
        let ended = Ended(self);
        self.begin();
        ended
    }

    /// Tells all threads to look.
    fn begin(&self) {
        self.begun.fetch_add(1, Ordering::SeqCst);
        // Whoever counts itself later looks at what has begun before it sleeps.
        if self.sleep.load(Ordering::SeqCst) > 0 {
            let _sleeping = locked(&self.sleeping);
            self.awake.notify_all();
        }
    }

    /// What a thread does all its life.
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

    /// Helps with the computation, if it has not ended and is not the one that was `seen`. Returns its number.
    fn join(&self, seen: u64) -> Option<u64> {
        let number = |joined: u64| (joined & !OPEN) >> NUMBER;
        let one_more = |joined: u64| (joined & OPEN != 0 && number(joined) != seen).then_some(joined + 1);
        let joined = self.joined.fetch_update(Ordering::Acquire, Ordering::Relaxed, one_more).ok()?;
        let work = self.work.load(Ordering::Relaxed);
        // SAFETY: `open` has stored it before the flag that was seen, and whoever called it waits until `joined` is 0 before
        // what it borrows ends.
        #[expect(unsafe_code, reason = "threads of a team outlive what they are lent")]
        let work: Work<'_> = unsafe { *work };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
            let mut first = locked(&self.panic);
            match *first {
                None => *first = Some(panic),
                // Dropping it may panic.
                Some(_) => mem::forget(panic),
            }
        }
        self.joined.fetch_sub(1, Ordering::Release);
        Some(number(joined))
    }
}

/// Looks until it is true, or for that long. Returns whether it is.
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

/// No code that can panic runs while they are locked.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
