//! Which tokens of a run the rows of an activation are, and which adapter each is for.

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
    slots: Option<Arc<[Slot]>>,
}

/// Which of several named adapters a token is for.
///
/// A function of the name alone: the same on every rank and in every layer, whatever else is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u64);

impl Slot {
    /// The base model: no adapter.
    pub const BASE: Self = Self(0);

    /// The adapter of this name.
    pub fn named(name: &str) -> Self {
        Self(fnv1a(name))
    }

    /// From its number.
    pub fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// As a number to send.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// A hash of a name that is the same on every platform and release: FNV-1a.
pub fn fnv1a(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

impl TokenIds {
    /// The tokens `ids` of the step `step`, one a row.
    pub fn new(step: u64, ids: impl IntoIterator<Item = u64>) -> Self {
        Self {
            step,
            ids: ids.into_iter().collect(),
            slots: None,
        }
    }

    /// The same tokens, each for the adapter of its slot. All ranks say so of theirs, or none.
    ///
    /// # Panics
    ///
    /// When there is not one slot for each token.
    pub fn with_slots(mut self, slots: impl IntoIterator<Item = Slot>) -> Self {
        let slots: Arc<[Slot]> = slots.into_iter().collect();
        assert_eq!(slots.len(), self.ids.len(), "number of slots of tokens");
        self.slots = Some(slots);
        self
    }

    /// Those of the tokens `rows`, in that order.
    ///
    /// # Panics
    ///
    /// When there are not so many tokens.
    pub fn pick(&self, rows: &[usize]) -> Self {
        let slots = self.slots.as_ref();
        Self {
            step: self.step,
            ids: rows.iter().map(|row| self.ids[*row]).collect(),
            slots: slots.map(|slots| rows.iter().map(|row| slots[*row]).collect()),
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

    /// The slot of each row's token, where there are any.
    pub fn slots(&self) -> Option<&[Slot]> {
        self.slots.as_deref()
    }
}
