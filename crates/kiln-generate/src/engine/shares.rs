//! Shares of the engine: whose generation begins next.

use std::collections::BTreeMap;

/// Whose generation it is, and how urgent.
///
/// The user who had the fewest tokens is next: one user's long queue does not delay another's single request.
/// Among those of one user, the lowest `priority` is first, then the earliest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    pub user: u64,
    pub priority: i64,
}

/// Numbers of tokens that were computed for each user. (start-time fair queueing)
#[derive(Debug, Default)]
pub(super) struct Shares(BTreeMap<u64, u64>);

impl Shares {
    /// Notes a generation of `user`. `active`: the users that had any before. One who comes back after a rest
    /// has saved nothing up.
    pub(super) fn enter(&mut self, user: u64, active: &[u64]) {
        if active.is_empty() {
            self.0.clear();
        }
        if !active.contains(&user) {
            let least = active.iter().map(|user| self.used(*user)).min().unwrap_or(0);
            let used = self.used(user).max(least);
            self.0.insert(user, used);
        }
    }

    pub(super) fn charge(&mut self, user: u64, tokens: usize) {
        *self.0.entry(user).or_default() += tokens as u64;
    }

    pub(super) fn used(&self, user: u64) -> u64 {
        self.0.get(&user).copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::Shares;

    #[test]
    fn users_who_rest_save_nothing_up_and_owe_what_they_used() {
        let mut shares = Shares::default();
        shares.enter(1, &[]);
        shares.charge(1, 100);
        shares.enter(2, &[1]);
        assert_eq!((shares.used(1), shares.used(2)), (100, 100));
        shares.charge(2, 5);
        // The first comes back while the second goes on.
        shares.charge(2, 200);
        shares.enter(1, &[2]);
        assert_eq!(shares.used(1), 305);
        shares.enter(1, &[]);
        assert_eq!((shares.used(1), shares.used(2)), (0, 0));
    }
}
