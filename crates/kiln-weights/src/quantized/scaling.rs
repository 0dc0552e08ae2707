//! Scaling of the numbers that codes represent to the numbers of the matrix.

use super::{check, wrong};
use crate::Error;

/// The scales of a matrix.
#[derive(Clone, Debug)]
pub(super) enum Scaling {
    /// A scale per block of numbers. Blocks extend through the whole matrix as if it were one row.
    Blocks { scales: Vec<f32>, block: usize },
    /// A scale per row, and a common factor. Both products are rounded.
    Rows { scales: Vec<f32>, factor: f32 },
    /// A zero point and a scale per row and group of columns.
    Groups(Groups),
}

/// Scaling by `(code - zero) * scale`.
#[derive(Clone, Debug)]
pub(super) struct Groups {
    /// Scales `[rows, count]`.
    scales: Vec<f32>,
    /// Zero points `[rows, count]`.
    zeros: Vec<f32>,
    /// Groups per row.
    count: usize,
    columns: Columns,
}

/// The assignment of columns to groups.
#[derive(Clone, Debug)]
enum Columns {
    /// Groups are this many consecutive columns.
    InOrder(usize),
    /// The group of each column.
    Listed(Vec<usize>),
}

impl Groups {
    /// Creates groups. `scales` and `zeros` are `[rows, count]`. `listed` assigns each column to a group;
    /// without it, `size` consecutive columns are a group.
    ///
    /// # Errors
    /// [`Error::Quantized`] if lengths do not match, or if a column belongs to a group that does not exist.
    pub(super) fn new(
        [rows, columns]: [usize; 2],
        size: usize,
        listed: Option<&[i32]>,
        scales: Vec<f32>,
        zeros: Vec<f32>,
    ) -> Result<Self, Error> {
        let count = scales.len().checked_div(rows).unwrap_or(0);
        check("scales", scales.len(), count * rows)?;
        check("zero points", zeros.len(), scales.len())?;
        let columns = match listed {
            Some(listed) => {
                check("columns in groups", listed.len(), columns)?;
                let group = |&group: &i32| usize::try_from(group).ok().filter(|group| *group < count);
                let missing = |group: &i32| {
                    wrong("columns in groups", format!("name group {group}, and there are {count} groups"))
                };
                let groups = listed.iter().map(|listed| group(listed).ok_or_else(|| missing(listed)));
                let groups = groups.collect::<Result<_, _>>()?;
                group_in_order(listed).map_or(Columns::Listed(groups), Columns::InOrder)
            }
            None if size == 0 => return Err(wrong("groups", "have 0 columns".to_owned())),
            None => {
                check("groups of columns", count, columns.div_ceil(size))?;
                Columns::InOrder(size)
            }
        };
        Ok(Self { scales, zeros, count, columns })
    }

    fn apply(&self, first: usize, columns: usize, numbers: &mut [f32]) {
        let Self { scales, zeros, count, columns: order } = self;
        // Without groups, there are no columns.
        let each = (*count).max(1);
        let groups = scales.chunks_exact(each).zip(zeros.chunks_exact(each)).skip(first);
        for (row, (scales, zeros)) in numbers.chunks_exact_mut(columns).zip(groups) {
            match order {
                Columns::InOrder(size) => {
                    for (group, (scale, zero)) in row.chunks_mut(*size).zip(scales.iter().zip(zeros)) {
                        group.iter_mut().for_each(|number| *number = (*number - zero) * scale);
                    }
                }
                Columns::Listed(groups) => {
                    for (number, &group) in row.iter_mut().zip(groups) {
                        *number = (*number - zeros[group]) * scales[group];
                    }
                }
            }
        }
    }
}

/// Returns the size of a group, if the list of each column's group (`g_idx`) consists of consecutive groups
/// of equal size.
pub fn group_in_order(listed: &[i32]) -> Option<usize> {
    let size = listed.iter().take_while(|group| **group == 0).count();
    let is_in_order = |(column, group): (usize, &i32)| Some(*group as usize) == column.checked_div(size);
    listed.iter().enumerate().all(is_in_order).then_some(size).filter(|size| *size > 0)
}

impl Scaling {
    /// Returns the scale of the block that starts at `column` of a row, and its zero point, in the same units
    /// as the unscaled numbers (0 if the matrix has no zero points); `None` if groups are not consecutive, or
    /// for a place outside of the matrix.
    pub(super) fn of_block(&self, row: usize, column: usize, columns: usize) -> Option<(f32, f32)> {
        let (scale, zero) = match self {
            Self::Blocks { scales, block } => (scales.get((row * columns + column) / block), 0.0),
            Self::Rows { scales, factor } => return Some((scales.get(row)? * factor, 0.0)),
            Self::Groups(Groups { scales, zeros, count, columns: Columns::InOrder(size) }) => {
                let group = row * count + column / size;
                (scales.get(group), *zeros.get(group)?)
            }
            Self::Groups(_) => return None,
        };
        Some((*scale?, zero))
    }

    /// Returns how many consecutive numbers of a row share a scale; `None` if groups are not consecutive.
    pub(super) fn group(&self, columns: usize) -> Option<usize> {
        match self {
            Self::Blocks { block, .. } => Some(*block),
            Self::Rows { .. } => Some(columns),
            Self::Groups(Groups { columns: Columns::InOrder(size), .. }) => Some(*size),
            Self::Groups(_) => None,
        }
    }

    /// Scales whole rows of `columns` numbers, starting at row `first`.
    pub(super) fn apply(&self, first: usize, columns: usize, numbers: &mut [f32]) {
        match self {
            Self::Blocks { scales, block } => {
                let (mut at, mut rest) = (first * columns, numbers);
                let mut scales = scales.iter().skip(at / block);
                while let Some(scale) = scales.next().filter(|_| !rest.is_empty()) {
                    let (numbers, behind) = rest.split_at_mut(rest.len().min(block - at % block));
                    numbers.iter_mut().for_each(|number| *number *= scale);
                    at += numbers.len();
                    rest = behind;
                }
            }
            Self::Rows { scales, factor } => {
                for (row, scale) in numbers.chunks_exact_mut(columns).zip(scales.iter().skip(first)) {
                    row.iter_mut().for_each(|number| *number = *number * scale * factor);
                }
            }
            Self::Groups(groups) => groups.apply(first, columns, numbers),
        }
    }
}

/// Transposes a matrix `[columns, rows]` to `[rows, columns]`.
pub(super) fn transposed<T: Copy>(numbers: &[T], rows: usize) -> Vec<T> {
    let of_row = |row| numbers.iter().skip(row).step_by(rows.max(1)).copied();
    (0..rows).flat_map(of_row).collect()
}
