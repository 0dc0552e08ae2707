use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Barrier, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use super::{LINGER, Shared, Team, Work};

fn team(threads: usize) -> Team {
    Team::new(threads).expect("the system has threads")
}

/// Shares the numbers below `n`, and returns the sum of those that were taken.
fn sum(team: &Team, n: usize) -> usize {
    let (next, sum) = (AtomicUsize::new(0), AtomicUsize::new(0));
    team.share(&|| {
        loop {
            let taken = next.fetch_add(1, Ordering::Relaxed);
            if taken >= n {
                return;
            }
            sum.fetch_add(taken, Ordering::Relaxed);
        }
    });
    sum.into_inner()
}

#[test]
fn each_piece_is_done_once() {
    for threads in [0, 1, 3] {
        let team = team(threads);
        for n in 0..2000 {
            assert_eq!(sum(&team, n), n * n.saturating_sub(1) / 2, "{threads} threads");
        }
    }
}

#[test]
fn all_threads_work_on_a_shared_task() {
    let team = team(2);
    let all = Barrier::new(3);
    team.share(&|| {
        all.wait();
    });
}

#[test]
fn all_threads_work_after_they_slept() {
    let team = team(2);
    for _ in 0..20 {
        thread::sleep(3 * LINGER);
        let all = Barrier::new(3);
        team.share(&|| {
            all.wait();
        });
    }
}

/// In this test no thread ever checks for work.
#[test]
fn ending_a_computation_does_not_wait_for_threads_that_never_joined() {
    let shared = Shared::default();
    let work: Work<'_> = &|| ();
    for _ in 0..3 {
        drop(shared.open(&work));
        assert_eq!(shared.join(0), None, "it has ended");
    }
}

#[test]
fn a_thread_joins_a_computation_once() {
    let (shared, calls) = (Shared::default(), AtomicUsize::new(0));
    let work: Work<'_> = &|| {
        calls.fetch_add(1, Ordering::Relaxed);
    };
    let ended = shared.open(&work);
    assert_eq!(shared.join(0), Some(1));
    assert_eq!(shared.join(1), None);
    drop(ended);
    assert_eq!(calls.into_inner(), 1);
}

#[test]
fn a_second_computation_does_not_wait_for_the_first() {
    let team = team(1);
    let (begun, goes_on) = (Barrier::new(2), Barrier::new(2));
    thread::scope(|scope| {
        scope.spawn(|| {
            let calls = AtomicUsize::new(0);
            team.share(&|| {
                if calls.fetch_add(1, Ordering::Relaxed) == 0 {
                    begun.wait();
                    goes_on.wait();
                }
            });
        });
        begun.wait();
        assert_eq!(sum(&team, 100), 4950);
        goes_on.wait();
    });
}

#[test]
fn nested_computations_complete() {
    let team = team(2);
    let sums = Mutex::new(Vec::new());
    team.share(&|| {
        let sum = sum(&team, 10);
        sums.lock().expect("nobody panics").push(sum);
    });
    assert!(sums.into_inner().expect("nobody panics").iter().all(|&sum| sum == 45));
}

#[test]
fn threads_may_share_work_concurrently() {
    let team = team(2);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    assert_eq!(sum(&team, 100), 4950);
                }
            });
        }
    });
}

#[test]
fn threads_that_others_made_help_until_they_are_stopped() {
    let (team, joined) = (team(0), Barrier::new(3));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                team.help(|| {
                    joined.wait();
                });
            });
        }
        joined.wait();
        assert_eq!(team.threads(), 2);
        let all = Barrier::new(3);
        team.share(&|| {
            all.wait();
        });
        team.stop();
    });
    assert_eq!((team.threads(), sum(&team, 100)), (0, 4950));
}

#[test]
fn panics_reach_the_caller() {
    let team = team(1);
    for there in [false, true] {
        let both = Barrier::new(2);
        let here = thread::current().id();
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.share(&|| {
                both.wait();
                if (thread::current().id() != here) == there {
                    resume_unwind(Box::new("planted"));
                }
            });
        }));
        assert_eq!(result.expect_err("one of both panics").downcast_ref::<&str>(), Some(&"planted"));
        assert_eq!(sum(&team, 100), 4950);
    }
}

#[test]
fn a_panic_does_not_affect_the_next_computation() {
    let team = team(1);
    let both = Barrier::new(2);
    let result = catch_unwind(AssertUnwindSafe(|| {
        team.share(&|| {
            both.wait();
            resume_unwind(Box::new("planted"));
        });
    }));
    assert!(result.is_err());
    assert_eq!(sum(&team, 100), 4950);
}

#[test]
fn a_team_can_be_dropped_awake_or_asleep() {
    for slept in [Duration::ZERO, 3 * LINGER] {
        let team = team(3);
        assert_eq!(sum(&team, 10), 45);
        thread::sleep(slept);
    }
}
