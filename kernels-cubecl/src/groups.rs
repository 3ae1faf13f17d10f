//! Which rows belong to which expert.

#[cfg(feature = "cubecl")]
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
#[cfg(feature = "cubecl")]
use std::sync::Mutex;

use thiserror::Error;

use crate::TokenIds;

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
#[derive(Clone)]
pub struct RowGroups {
    offsets: Arc<[usize]>,
    all_rows: usize,
    tokens: Option<TokenIds>,
    /// What kernels read of it, by device: uploaded at the first use.
    #[cfg(feature = "cubecl")]
    pub(crate) uploaded: Arc<Mutex<Vec<Box<dyn Any + Send + Sync>>>>,
}

impl fmt::Debug for RowGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowGroups")
            .field("offsets", &self.offsets)
            .field("all_rows", &self.all_rows)
            .field("tokens", &self.tokens)
            .finish()
    }
}

impl PartialEq for RowGroups {
    fn eq(&self, other: &Self) -> bool {
        self.offsets == other.offsets
            && self.all_rows == other.all_rows
            && self.tokens == other.tokens
    }
}

impl Eq for RowGroups {}

/// Counts that do not cover an activation.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupError {
    /// Rows are left over or missing.
    #[error(
        "expert row counts {counts:?} sum to {sum}, the activation has {rows} rows (rows at the end that belong to no expert are given with `RowGroups::padded`)"
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
        Self::sorted(counts, rows, |sum| sum == rows)
    }

    /// As [`new`](Self::new), for an activation whose last rows belong to no expert: their output is
    /// zero, and whatever they hold takes no part in any gradient.
    ///
    /// # Errors
    ///
    /// When the counts sum to more than `rows`.
    pub fn padded(counts: &[usize], rows: usize) -> Result<Self, GroupError> {
        Self::sorted(counts, rows, |sum| sum <= rows)
    }

    fn sorted(
        counts: &[usize],
        rows: usize,
        fits: impl Fn(usize) -> bool,
    ) -> Result<Self, GroupError> {
        let sum = counts
            .iter()
            .try_fold(0usize, |sum, count| sum.checked_add(*count));
        if !sum.is_some_and(fits) {
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
        Ok(Self::from_offsets(offsets, rows))
    }

    /// One group of all rows, as a dense linear has it.
    pub fn whole(rows: usize) -> Self {
        Self::from_offsets(vec![0, rows], rows)
    }

    /// The same rows, each `groups` neighbouring groups as one.
    ///
    /// # Panics
    ///
    /// When the number of groups is no multiple.
    pub fn joined(&self, groups: usize) -> Self {
        if groups == 1 {
            return self.clone();
        }
        assert!(
            self.experts().is_multiple_of(groups),
            "{} groups are no multiple of {groups}",
            self.experts()
        );
        let offsets = self.offsets.iter().step_by(groups).copied().collect();
        Self {
            tokens: self.tokens.clone(),
            ..Self::from_offsets(offsets, self.all_rows)
        }
    }

    /// The same rows as one group; padding stays padding.
    pub fn merged(&self) -> Self {
        Self {
            tokens: self.tokens.clone(),
            ..Self::from_offsets(vec![0, self.rows()], self.all_rows)
        }
    }

    fn from_offsets(offsets: Vec<usize>, all_rows: usize) -> Self {
        Self {
            offsets: offsets.into(),
            all_rows,
            tokens: None,
            #[cfg(feature = "cubecl")]
            uploaded: Arc::default(),
        }
    }

    /// The same groups of these tokens, which dropout needs to know.
    ///
    /// # Panics
    ///
    /// When there is not one id for each row of the experts. Padding has none.
    pub fn with_tokens(self, tokens: TokenIds) -> Self {
        assert_eq!(tokens.ids().len(), self.rows(), "number of token ids");
        Self {
            tokens: Some(tokens),
            #[cfg(feature = "cubecl")]
            uploaded: Arc::default(),
            ..self
        }
    }

    /// The tokens of the rows, where they are known.
    pub fn tokens(&self) -> Option<&TokenIds> {
        self.tokens.as_ref()
    }

    /// Number of experts, those without rows included.
    pub fn experts(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Number of rows of the activation, padding included.
    pub fn all_rows(&self) -> usize {
        self.all_rows
    }

    /// Number of rows of the experts.
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

    /// The rows of each expert, where all have equally many, at least one, and no row is left over.
    pub(crate) fn equal_rows(&self) -> Option<usize> {
        let rows = self.range(0).len();
        let equal = (0..self.experts()).all(|expert| self.range(expert).len() == rows);
        (rows > 0 && equal && self.rows() == self.all_rows()).then_some(rows)
    }

    /// # Panics
    ///
    /// When `x [T, k]` and `w [E, n, k]` do not fit each other and these groups.
    pub(crate) fn check(&self, what: &str, x: [usize; 2], w: [usize; 3]) {
        assert!(
            x[0] == self.all_rows && w[0] == self.experts() && x[1] == w[2],
            "{what}: x {x:?} and w {w:?} do not fit {} rows over {} experts",
            self.all_rows,
            self.experts(),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_that_do_not_cover_the_rows_are_refused() {
        assert_eq!(
            RowGroups::new(&[3, 2], 8).unwrap_err().to_string(),
            "expert row counts [3, 2] sum to 5, the activation has 8 rows (rows at the end that belong to no expert are given with `RowGroups::padded`)"
        );
        assert!(RowGroups::new(&[usize::MAX, 2], 1).is_err());
    }

    #[test]
    fn joined_groups_have_the_rows_and_tokens_of_all_of_them() {
        let groups = RowGroups::padded(&[1, 0, 2, 3], 8).unwrap();
        let groups = groups.with_tokens(TokenIds::new(0, 10..16));
        let joined = groups.joined(2);
        assert_eq!(joined.offsets(), [0, 1, 6]);
        assert_eq!(joined.all_rows(), 8);
        assert_eq!(joined.tokens(), groups.tokens());
        assert_eq!(groups.merged().offsets(), [0, 6]);
    }

    #[test]
    fn an_expert_without_rows_has_an_empty_range() {
        let groups = RowGroups::new(&[4, 0, 2], 6).unwrap();
        assert_eq!(groups.offsets(), [0, 4, 4, 6]);
        assert!(groups.range(1).is_empty());
        assert_eq!((groups.experts(), groups.rows()), (3, 6));
    }
}
