//! The factor pairs on the experts of one layer.

use super::FactorPair;

/// The factors of the map that yields gate and up.
#[derive(Debug, Clone, PartialEq)]
pub enum GateUp {
    /// One pair over gate and up together: `a` `[E, r, H]`, `b` `[E, 2F, r]`, rows of the gate
    /// first.
    Fused(FactorPair),
    /// A pair each: `a` `[E, r, H]`, `b` `[E, F, r]`.
    Separate {
        /// The factors of the gate.
        gate: FactorPair,
        /// The factors of up.
        up: FactorPair,
    },
}

/// The factors on the experts of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertAdapter {
    /// On gate and up (fc1), if they are adapted.
    pub gate_up: Option<GateUp>,
    /// On down (fc2), if it is adapted: `a` `[E, r, F]`, `b` `[E, H, r]`.
    pub down: Option<FactorPair>,
}

impl ExpertAdapter {
    /// The pairs with what they are on: `gate_up`, or `gate` and `up`, then `down`.
    pub fn pairs(&self) -> impl Iterator<Item = (&'static str, &FactorPair)> {
        let [first, second] = match &self.gate_up {
            None => [None, None],
            Some(GateUp::Fused(pair)) => [Some(("gate_up", pair)), None],
            Some(GateUp::Separate { gate, up }) => [Some(("gate", gate)), Some(("up", up))],
        };
        let down = self.down.as_ref().map(|pair| ("down", pair));
        [first, second, down].into_iter().flatten()
    }

    /// As [`pairs`](Self::pairs), to change them.
    pub fn pairs_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut FactorPair)> {
        let [first, second] = match &mut self.gate_up {
            None => [None, None],
            Some(GateUp::Fused(pair)) => [Some(("gate_up", pair)), None],
            Some(GateUp::Separate { gate, up }) => [Some(("gate", gate)), Some(("up", up))],
        };
        let down = self.down.as_mut().map(|pair| ("down", pair));
        [first, second, down].into_iter().flatten()
    }
}
