//! Which tokens of a run the rows of an activation are.

use std::sync::Arc;

/// The training step, and the number of each row's token among all tokens of the step's batch.
///
/// The numbers are global: no two data-parallel ranks have the same, and a token keeps its own
/// wherever it is sent. Cheap to clone.
///
/// ```
/// use moe_lora_kernels::TokenIds;
///
/// // Step 7 of a rank whose 3 tokens come after 100 of other ranks.
/// let tokens = TokenIds::new(7, 100..103);
/// assert_eq!(tokens.ids(), [100, 101, 102]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenIds {
    step: u64,
    ids: Arc<[u64]>,
}

impl TokenIds {
    /// The tokens `ids` of the step `step`, one a row.
    pub fn new(step: u64, ids: impl IntoIterator<Item = u64>) -> Self {
        Self {
            step,
            ids: ids.into_iter().collect(),
        }
    }

    /// The training step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// The token of each row.
    pub fn ids(&self) -> &[u64] {
        &self.ids
    }
}
