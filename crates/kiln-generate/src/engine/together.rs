//! The generations that share passes: one cache holds the rows of all.

use std::{ops::Range, sync::Arc};

use burn::tensor::Tensor;
use kiln_core::{Error, Result, model::CausalModel};

use super::{Event, Generating, Job, RequestId};
use crate::{
    feeder::{Feeder, Output},
    generation::{JoiningRows, Reading},
};

/// Generations whose rows are in one cache, one after the other.
#[derive(Debug)]
pub(super) struct Together<T> {
    /// `None` as long as there are no rows.
    feeder: Option<Feeder<'static>>,
    jobs: Vec<Job<T>>,
    /// Whether steps may be captured. Given up with the first recording that the device gives up.
    capture: bool,
    /// Whether a pass began whose tokens are not all chosen.
    pub(super) in_pass: bool,
    /// The error of a generation whose rows could not be taken out: the rows of the cache are not those of
    /// the jobs any more.
    lost: Option<Error>,
}

impl<T> Default for Together<T> {
    fn default() -> Self {
        Self { feeder: None, jobs: Vec::new(), capture: true, in_pass: false, lost: None }
    }
}

impl<T> Together<T> {
    pub(super) fn rows(&self) -> usize {
        self.jobs.iter().map(|job| job.rows).sum()
    }
}

impl<T: Generating> Together<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// The user of each generation.
    pub(super) fn users(&self) -> impl Iterator<Item = u64> {
        self.jobs.iter().map(|job| job.share.user)
    }

    pub(super) fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// Whether a generation could draft tokens in passes of its own.
    pub(super) fn may_draft(&mut self) -> bool {
        self.jobs.iter_mut().any(|job| job.own.generation().may_draft())
    }

    /// Number of bytes that the cache holds on devices.
    pub(super) fn device_bytes(&self) -> usize {
        self.feeder.as_ref().map_or(0, |feeder| feeder.cache.device_bytes())
    }

    /// The generation that came last.
    pub(super) fn latest(&self) -> Option<RequestId> {
        self.jobs.iter().map(|job| job.id).max()
    }

    /// The rows of a generation, in the cache.
    fn rows_of(&self, at: usize) -> Range<usize> {
        let first = self.jobs[..at].iter().map(|job| job.rows).sum();
        first..first + self.jobs[at].rows
    }

    /// Adds a generation and its rows. If they cannot join, it fails.
    pub(super) fn join(&mut self, model: &Arc<dyn CausalModel>, mut job: Job<T>, events: &mut Vec<Event<T>>) {
        let generation = job.own.generation();
        let device = generation.runner.device().clone();
        let capture = self.capture && generation.captures();
        let JoiningRows { cache, left_pad } = generation.give_rows();
        let joined = match &mut self.feeder {
            Some(feeder) => feeder.join(cache, left_pad),
            empty => {
                *empty = Some(Feeder::new(model.clone(), cache, left_pad, capture, &device));
                Ok(())
            }
        };
        match joined {
            Ok(()) => self.jobs.push(job),
            Err(error) => events.push(Event::Failed(job.id, job.own, error)),
        }
    }

    /// Removes a generation and its rows; `None` if it is not here. If its rows cannot be taken out, they are
    /// computed again when it goes on, and so are all others.
    pub(super) fn leave(&mut self, id: RequestId) -> Option<Job<T>> {
        let at = self.jobs.iter().position(|job| job.id == id)?;
        let rows = self.rows_of(at);
        let mut job = self.jobs.remove(at);
        let left = match (&mut self.feeder, &self.lost) {
            (Some(feeder), None) => feeder.leave(rows),
            (_, lost) => Err(lost.clone().unwrap_or(Error::Poisoned)),
        };
        match left {
            Ok(cache) => job.own.generation().runner.take_back(cache),
            Err(error) => {
                self.lost = Some(error.clone());
                job.lost = Some(error);
            }
        }
        if self.jobs.is_empty() {
            self.give_up();
        }
        Some(job)
    }

    /// Removes all generations without their rows, which cannot be trusted.
    pub(super) fn give_up(&mut self) -> Vec<Job<T>> {
        self.capture &= !self.feeder.take().is_some_and(|feeder| feeder.lost);
        (self.in_pass, self.lost) = (false, None);
        std::mem::take(&mut self.jobs)
    }

    /// Feeds each row its next token, and lets each generation choose by its logits. Returns the generations
    /// that are over.
    pub(super) async fn pass(&mut self, events: &mut Vec<Event<T>>) -> Result<Vec<Job<T>>> {
        let Some(feeder) = &mut self.feeder else { return Ok(Vec::new()) };
        let tokens: Result<Vec<_>> =
            self.jobs.iter_mut().map(|job| job.own.generation().runner.next_tokens()).collect();
        let Output::Logits(logits) = feeder.step(Some(Tensor::cat(tokens?, 0)))? else {
            return Err(Error::Execution("a step kept its scores on the device".into()));
        };
        self.in_pass = true;
        let mut first = 0;
        let mut readings: Vec<Result<Reading>> = Vec::new();
        for job in &mut self.jobs {
            let own = logits.clone().narrow(0, first, job.rows);
            readings.push(job.own.generation().start_step(own));
            first += job.rows;
        }
        drop(logits);
        let mut over = Vec::new();
        let mut failed = Vec::new();
        for (job, reading) in self.jobs.iter_mut().zip(readings) {
            let step = match reading {
                Ok(reading) => job.own.generation().finish_step(reading).await,
                Err(error) => Err(error),
            };
            match step.and_then(|step| job.take(step, events)) {
                Ok(is_last) => over.extend(is_last.then_some(job.id)),
                Err(error) => failed.push((job.id, error)),
            }
        }
        self.in_pass = false;
        // The contents of the cache may never have been written.
        feeder.refusals.none_since()?;
        for (id, error) in failed {
            if let Some(job) = self.leave(id) {
                events.push(Event::Failed(id, super::without_cache(job.own), error));
            }
        }
        Ok(over.into_iter().filter_map(|id| self.leave(id)).collect())
    }

    /// The generations with a row that failed in a pass, or that `error` names.
    pub(super) fn failed(&self, error: &Error) -> Vec<RequestId> {
        let mut failed = self.feeder.as_ref().map_or_else(Vec::new, |feeder| feeder.cache.poisoned_rows());
        if let Error::Row { row, .. } = error {
            failed.push(*row);
        }
        let of = |at: &usize| self.rows_of(*at).any(|row| failed.contains(&row));
        (0..self.jobs.len()).filter(of).map(|at| self.jobs[at].id).collect()
    }

    pub(super) fn ids(&self) -> Vec<RequestId> {
        self.jobs.iter().map(|job| job.id).collect()
    }

    /// Whether the device refused a part of what the cache holds, or gave up the recording that wrote it.
    pub(super) fn is_refused(&self) -> bool {
        self.feeder.as_ref().is_some_and(|feeder| feeder.lost || feeder.refusals.none_since().is_err())
    }

    /// Takes the error of rows that are not those of the jobs.
    pub(super) fn take_lost(&mut self) -> Option<Error> {
        self.lost.take()
    }
}
