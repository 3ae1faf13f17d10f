//! The four adapters of the table: their shapes, and the bytes that they have to move.

pub const TOKENS: usize = 4096;
pub const HIDDEN: usize = 2048;
pub const FFN: usize = 2688;
/// Of the adapters.
pub const RANK: usize = 32;
pub const EXPERTS: usize = 4;

/// An adapter of one projection.
#[derive(Clone, Copy)]
pub struct Case {
    pub name: &'static str,
    /// Down (fc2, row-parallel, its sum suppressed) or up (fc1, column-parallel).
    pub down: bool,
    pub grouped: bool,
}

pub const CASES: [Case; 4] = [
    Case {
        name: "one fc2",
        down: true,
        grouped: false,
    },
    Case {
        name: "one fc1",
        down: false,
        grouped: false,
    },
    Case {
        name: "grouped fc2",
        down: true,
        grouped: true,
    },
    Case {
        name: "grouped fc1",
        down: false,
        grouped: true,
    },
];

/// bf16.
const BYTES: usize = 2;

impl Case {
    /// Columns of a rank's input, of the delta and of the base that it joins, in a group of `ranks`.
    pub fn widths(&self, ranks: usize) -> [usize; 3] {
        match self.down {
            true => [FFN / ranks, HIDDEN / ranks, HIDDEN],
            false => [HIDDEN, FFN / ranks, FFN / ranks],
        }
    }

    /// Bytes of a rank's input and of the base.
    pub fn activation_bytes(&self, ranks: usize) -> [usize; 2] {
        let [input, _, base] = self.widths(ranks);
        [input, base].map(|width| TOKENS * width * BYTES)
    }

    fn factor_bytes(&self, ranks: usize) -> usize {
        let [input, delta, _] = self.widths(ranks);
        let rank_a = if self.down { RANK } else { RANK / ranks };
        let experts = if self.grouped { EXPERTS } else { 1 };
        experts * (rank_a * input + delta * RANK) * BYTES
    }

    /// The least that a forward pass moves: input and factors read, the base's slice read and
    /// written. The `[T, r]` between them stays in the cache.
    pub fn forward_bytes(&self, ranks: usize) -> usize {
        let [input, delta, _] = self.widths(ranks);
        TOKENS * (input + 2 * delta) * BYTES + self.factor_bytes(ranks)
    }

    /// The least that a backward pass moves: the slice of the cotangent, input and factors read,
    /// the input's gradient and the factors' written.
    pub fn backward_bytes(&self, ranks: usize) -> usize {
        let [input, delta, _] = self.widths(ranks);
        TOKENS * (2 * input + delta) * BYTES + 2 * self.factor_bytes(ranks)
    }
}
