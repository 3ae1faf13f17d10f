//! Which rows belong to which expert.

use std::ops::Range;
use std::sync::Arc;

use thiserror::Error;

/// Rows of an activation, sorted by expert: expert `e` has the rows `offsets[e]..offsets[e + 1]`.
///
/// An expert may have no rows. Cheap to clone.
///
/// ```
/// use moe_lora_kernels::RowGroups;
///
/// let groups = RowGroups::new(&[4, 0, 2], 6)?;
/// assert_eq!(groups.range(2), 4..6);
/// # Ok::<(), moe_lora_kernels::GroupError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowGroups {
    offsets: Arc<[usize]>,
}

/// Counts that do not cover an activation.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupError {
    /// Rows are left over or missing.
    #[error(
        "expert row counts {counts:?} sum to {sum}, the activation has {rows} rows (every row belongs to an expert: slice padding rows off first)"
    )]
    Sum {
        /// Rows of each expert.
        counts: Vec<usize>,
        /// Their sum.
        sum: usize,
        /// Rows of the activation.
        rows: usize,
    },
}

impl RowGroups {
    /// Groups of `counts[e]` rows that cover an activation of `rows` rows.
    ///
    /// # Errors
    ///
    /// When the counts do not sum to `rows`. A buffer with padding at its end, whatever the
    /// padding holds, is refused rather than read.
    pub fn new(counts: &[usize], rows: usize) -> Result<Self, GroupError> {
        let sum = counts
            .iter()
            .try_fold(0usize, |sum, count| sum.checked_add(*count));
        if sum != Some(rows) {
            return Err(GroupError::Sum {
                counts: counts.to_vec(),
                sum: sum.unwrap_or(usize::MAX),
                rows,
            });
        }
        let mut offsets = vec![0];
        offsets.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        Ok(Self {
            offsets: offsets.into(),
        })
    }

    /// One group of all rows, as a dense linear has it.
    pub fn whole(rows: usize) -> Self {
        Self {
            offsets: [0, rows].into(),
        }
    }

    /// Number of experts, those without rows included.
    pub fn experts(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    /// The rows of one expert.
    pub fn range(&self, expert: usize) -> Range<usize> {
        self.offsets[expert]..self.offsets[expert + 1]
    }

    /// `[E + 1]`, from 0 to the number of rows.
    pub fn offsets(&self) -> &[usize] {
        &self.offsets
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_do_not_cover_the_rows_are_refused() {
        assert_eq!(
            RowGroups::new(&[3, 2], 8).unwrap_err().to_string(),
            "expert row counts [3, 2] sum to 5, the activation has 8 rows (every row belongs to an expert: slice padding rows off first)"
        );
        assert!(RowGroups::new(&[usize::MAX, 2], 1).is_err());
    }

    #[test]
    fn an_expert_without_rows_has_an_empty_range() {
        let groups = RowGroups::new(&[4, 0, 2], 6).unwrap();
        assert_eq!(groups.offsets(), [0, 4, 4, 6]);
        assert!(groups.range(1).is_empty());
        assert_eq!((groups.experts(), groups.rows()), (3, 6));
    }
}
