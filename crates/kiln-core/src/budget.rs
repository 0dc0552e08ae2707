//! Accounting of device memory, which refuses claims beyond the limit.
//!
//! Weights, caches and the tensors of a forward pass each hold a [`Claim`] to the bytes that they take. A
//! claim that does not fit is refused before anything is allocated: on many devices a failed allocation loses
//! everything that the device holds.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::{Error, Result, error::at_least};

/// The device memory that may be used. Clones share one budget.
#[derive(Clone, Debug, Default)]
pub struct Budget(Arc<Mutex<Ledger>>);

#[derive(Debug, Default)]
struct Ledger {
    /// Limit in bytes; `None`: unknown.
    limit: Option<u64>,
    /// Total memory of the device in bytes; `None`: unknown. A limit beyond it does not help.
    device: Option<u64>,
    /// Size of the largest possible buffer in bytes; `None`: unlimited.
    largest: Option<u64>,
    /// Whether this is the memory of this process.
    own: bool,
    used: u64,
    peak: u64,
    /// Number of allocations so far, and the one that is to fail.
    allocations: u64,
    fail_at: Option<u64>,
}

impl PartialEq for Budget {
    /// Whether both are the same budget, not only equal ones.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Budget {
    /// Creates a budget of `limit` bytes; `None`: the budget only counts.
    pub fn new(limit: Option<u64>) -> Self {
        Self(Arc::new(Mutex::new(Ledger { limit, ..Ledger::default() })))
    }

    /// Marks the budget as one of host memory. There, a refused allocation ends the process, so a large
    /// allocation is tried when it is claimed.
    pub fn of_this_process(self) -> Self {
        self.ledger().own = true;
        self
    }

    pub fn is_of_this_process(&self) -> bool {
        self.ledger().own
    }

    /// Sets the total memory of the device in bytes, so that advice does not go beyond it.
    pub fn set_device_memory(&self, bytes: Option<u64>) {
        self.ledger().device = bytes;
    }

    /// Advice on how to get `missing` more bytes than are left: a higher limit, if the device has the memory.
    /// `None` if there is no limit, or if the device has no more.
    pub fn raise_by(&self, missing: u64) -> Option<String> {
        self.ledger().raise_by(missing)
    }

    pub fn limit(&self) -> Option<u64> {
        self.ledger().limit
    }

    /// Size in bytes of the largest buffer that the device supports; `None`: unlimited.
    pub fn largest_buffer(&self) -> Option<u64> {
        self.ledger().largest
    }

    /// Changes the limit; existing claims stay.
    pub fn set_limit(&self, limit: Option<u64>) {
        let mut ledger = self.ledger();
        ledger.limit = limit;
        ledger.peak = ledger.used;
    }

    /// Sets the size in bytes of the largest buffer that the device supports; `None`: unlimited.
    pub fn set_largest_buffer(&self, bytes: Option<u64>) {
        self.ledger().largest = bytes;
    }

    /// Number of bytes that are claimed now.
    pub fn used(&self) -> u64 {
        self.ledger().used
    }

    /// Largest number of bytes that were claimed at once since the limit was set.
    pub fn peak(&self) -> u64 {
        self.ledger().peak
    }

    /// Number of bytes that are left; `None`: unknown.
    pub fn available(&self) -> Option<u64> {
        let ledger = self.ledger();
        ledger.limit.map(|limit| limit.saturating_sub(ledger.used))
    }

    /// Claims `bytes` for `what`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if fewer bytes are left.
    pub fn claim(&self, what: &'static str, bytes: u64) -> Result<Claim> {
        let mut claim = Claim { budget: self.clone(), what, bytes: AtomicU64::new(0) };
        claim.resize(bytes)?;
        Ok(claim)
    }

    /// Number of allocations so far: claims that grew, and allocations within claims.
    pub fn allocations(&self) -> u64 {
        self.ledger().allocations
    }

    /// Makes the `n`th allocation from now on fail, as if the device had no room for it; 0 is the next one.
    /// For tests.
    pub fn fail_allocation(&self, n: u64) {
        let mut ledger = self.ledger();
        ledger.fail_at = Some(ledger.allocations + n);
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // The numbers are consistent at any time, so a panic while the lock was held did no harm.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ledger {
    fn raise_by(&self, missing: u64) -> Option<String> {
        let limit = self.limit?.saturating_add(missing);
        let possible = self.device.is_none_or(|device| limit <= device);
        possible.then(|| format!("allow at least {} (`memory`)", at_least(limit)))
    }

    /// Counts an allocation of `bytes` beyond what is claimed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if fewer bytes are left, or if this allocation is to fail.
    fn allocate(&mut self, what: &'static str, bytes: u64) -> Result<()> {
        let (number, left) =
            (self.allocations, self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.used)));
        self.allocations += 1;
        let fails = self.fail_at == Some(number) || self.own && !system_has(bytes);
        if fails || bytes > left {
            let available = if fails { 0 } else { left };
            let raise = if fails { None } else { self.raise_by(bytes - left) };
            let advice = raise.unwrap_or_else(|| "use a smaller model, cache or context".to_owned());
            return Err(Error::OutOfMemory { what: what.to_owned(), needed: bytes, available, advice });
        }
        self.used += bytes;
        self.peak = self.peak.max(self.used);
        Ok(())
    }
}

/// Whether the system gives this process `bytes` of memory. Only large amounts are tried.
pub fn system_has(bytes: u64) -> bool {
    const MUCH: u64 = 16 << 20;

    let tried = |bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok();
    bytes < MUCH || usize::try_from(bytes).is_ok_and(tried)
}

/// A claim to bytes of a [`Budget`], which are freed when the claim is dropped.
pub struct Claim {
    budget: Budget,
    what: &'static str,
    /// Atomic, because bytes are split off through a shared reference.
    bytes: AtomicU64,
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Claim({} bytes for {})", self.bytes(), self.what)
    }
}

impl Claim {
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Changes the number of claimed bytes to `bytes`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if fewer bytes are left; then the claim is unchanged.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        let (mut ledger, before) = (self.budget.ledger(), self.bytes());
        match bytes.checked_sub(before) {
            Some(0) => {}
            Some(more) => ledger.allocate(self.what, more)?,
            None => ledger.used -= before - bytes,
        }
        drop(ledger);
        *self.bytes.get_mut() = bytes;
        Ok(())
    }

    /// Moves `bytes` into a claim of their own; `None` if this claim has fewer.
    pub fn split(&self, bytes: u64) -> Option<Self> {
        let less = |have: u64| have.checked_sub(bytes);
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).ok()?;
        Some(Self { budget: self.budget.clone(), what: self.what, bytes: AtomicU64::new(bytes) })
    }

    /// Takes over the bytes that `other` claims, which must be a claim to the same budget.
    pub fn join(&self, mut other: Self) {
        self.bytes.fetch_add(std::mem::take(other.bytes.get_mut()), Ordering::Relaxed);
    }

    /// Counts an allocation within the claim.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if this allocation is to fail ([`Budget::fail_allocation`]).
    pub fn allocates(&self) -> Result<()> {
        self.budget.ledger().allocate(self.what, 0)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.budget.ledger().used -= self.bytes();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn claims_stay_within_the_limit_and_are_released() {
        let budget = Budget::new(Some(100));
        let weights = budget.claim("weights", 60).unwrap();
        let mut cache = budget.claim("cache", 30).unwrap();
        let advice = "allow at least 101 bytes (`memory`)".to_owned();
        let refused = Error::OutOfMemory { what: "cache".to_owned(), needed: 11, available: 10, advice };
        assert_eq!(cache.resize(41), Err(refused));
        assert_eq!((cache.bytes(), budget.used()), (30, 90), "refused, it is as it was");
        drop(weights);
        cache.resize(100).unwrap();
        cache.resize(5).unwrap();
        assert_eq!((budget.used(), budget.peak(), budget.available()), (5, 100, Some(95)));
        let apart = cache.split(3).unwrap();
        assert!(cache.split(3).is_none(), "there are two left");
        assert_eq!((cache.bytes(), apart.bytes(), budget.used()), (2, 3, 5));
        drop(cache);
        assert_eq!(budget.used(), 3);
        let all = budget.claim("cache", 1).unwrap();
        all.join(apart);
        assert_eq!((all.bytes(), budget.used()), (4, 4));
        drop(all);
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_claim_beyond_the_memory_of_the_system_is_an_error() {
        let budget = Budget::new(None).of_this_process();
        // More than there are addresses.
        let refused = budget.claim("the cache", 1 << 62);
        assert!(matches!(refused, Err(Error::OutOfMemory { needed, .. }) if needed == 1 << 62));
        assert!(budget.claim("the cache", 1 << 20).is_ok());
        assert!(Budget::new(None).claim("the cache", 1 << 62).is_ok(), "another's memory");
    }

    #[test]
    fn only_the_chosen_allocation_fails() {
        let budget = Budget::new(None);
        let mut claim = budget.claim("cache", 1).unwrap();
        budget.fail_allocation(1);
        claim.resize(2).unwrap();
        assert!(claim.allocates().is_err());
        assert!(claim.allocates().is_ok());
        assert_eq!(budget.allocations(), 4);
    }
}
