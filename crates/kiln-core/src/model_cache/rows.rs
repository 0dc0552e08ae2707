//! Adding and removing rows of a cache between two passes.

use std::mem;

use super::{LayerCache, ModelCache, groups::RowGroup, shared::SharedBuffers};
use crate::{Error, Result};

impl ModelCache {
    /// Appends the rows of `other` with everything that they hold. Nothing is copied, and strategies may
    /// differ. A cache that holds nothing has no rows.
    ///
    /// # Errors
    /// [`Error::WrongMemory`] for the cache of another model; [`Error::Poisoned`]. Then this cache is
    /// unchanged, and `other` is dropped.
    pub fn join(&mut self, mut other: Self) -> Result<()> {
        self.check_usable()?;
        other.check_usable()?;
        other.give_back_all()?;
        let (own, others) = (self.kinds(), other.kinds());
        if own != others {
            let layer = own.iter().zip(&others).take_while(|(a, b)| a == b).count();
            return Err(Error::WrongMemory { layer, wanted: "such" });
        }
        if other.rows().is_some() {
            let here = if self.rows().is_some() { self.take_groups() } else { Vec::new() };
            self.set_groups(here.into_iter().chain(other.take_groups()).collect());
            *self.lent.get_mut() |= *other.lent.get_mut();
            self.keeps_apart = false;
        }
        // The claim to the joined rows is made again below.
        drop(other);
        self.claim_given();
        Ok(())
    }

    /// Removes a row with everything that it holds, and returns it as a cache of one row. Later rows move up.
    /// A row that failed leaves empty, so that the others can go on without it.
    ///
    /// # Errors
    /// [`Error::NoSuchRow`]; the device's error in copying. Then the cache holds the same rows.
    pub fn leave(&mut self, row: usize) -> Result<Self> {
        let rows = self.rows().unwrap_or(0);
        let mut of_groups = self.groups.iter().map(|group| group.rows.unwrap_or(rows)).enumerate();
        let mut own = row;
        let (i, of_group) = of_groups
            .find(|&(_, of_group)| {
                let is_here = own < of_group;
                own -= if is_here { 0 } else { of_group };
                is_here
            })
            .ok_or(Error::NoSuchRow { row, rows })?;
        self.give_back(i)?;
        let group = &mut self.groups[i];
        let leaving = if of_group == 1 {
            // At least one group must be left.
            let empty = group.snapshot();
            let leaving = mem::replace(group, empty);
            group.discard();
            leaving
        } else if group.poisoned {
            group.rows = Some(of_group - 1);
            group.snapshot()
        } else {
            let others: Vec<usize> = (0..of_group).filter(|&other| other != own).collect();
            let (leaving, staying) = (group.select(&[own])?, group.select(&others)?);
            *group = staying;
            leaving
        };
        if of_group == 1 && self.groups.len() > 1 {
            self.groups.remove(i);
        }
        let groups = mem::take(&mut self.groups);
        self.set_groups(groups);
        self.rows = (rows > 1).then_some(rows - 1);
        self.keeps_apart = false;
        if self.groups.iter().all(|group| group.region.is_none()) {
            self.shared = SharedBuffers::default();
        }
        self.recount();

        let claims = self.further_claims();
        let mut left = Self {
            groups: vec![leaving],
            rows: Some(1),
            claims,
            lent: (*self.lent.get_mut()).into(),
            ..Self::new(Vec::new())
        };
        left.groups[0].rows = None;
        if left.is_poisoned() {
            left.discard();
        }
        left.claim_given();
        Ok(left)
    }

    /// Number of rows; `None` if the cache holds nothing and takes any number.
    pub fn rows(&self) -> Option<usize> {
        match &self.groups[..] {
            [group] if group.poisoned => self.rows,
            [group] => group.stored_rows().or(self.rows),
            groups => groups.iter().map(|group| group.rows).sum(),
        }
    }

    /// Lists the rows that failed in the middle of a pass and could not be restored.
    pub fn poisoned_rows(&self) -> Vec<usize> {
        let rows = self.rows().unwrap_or(0);
        let of_group = |group: &RowGroup| std::iter::repeat_n(group.poisoned, group.rows.unwrap_or(rows));
        let poisoned = self.groups.iter().flat_map(of_group).enumerate();
        poisoned.filter_map(|(row, poisoned)| poisoned.then_some(row)).collect()
    }

    /// Takes all groups out, each with its number of rows.
    fn take_groups(&mut self) -> Vec<RowGroup> {
        let rows = self.rows();
        let mut groups = mem::take(&mut self.groups);
        groups.iter_mut().for_each(|group| group.rows = group.rows.or(rows));
        groups
    }

    fn set_groups(&mut self, mut groups: Vec<RowGroup>) {
        if let [only] = &mut groups[..] {
            self.rows = only.rows.take();
        }
        self.groups = groups;
    }

    /// Returns, for each block, whether it has keys, keys of an encoder, and a state.
    fn kinds(&self) -> Vec<[bool; 3]> {
        let kinds = |LayerCache { keys, encoder, state }: &LayerCache| {
            [keys.is_some(), encoder.is_some(), state.is_some()]
        };
        self.groups.first().map_or_else(Vec::new, |group| group.layers.iter().map(kinds).collect())
    }
}
