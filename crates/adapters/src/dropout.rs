//! Dropout of an adapter in training, the same at every topology.

use std::fmt;

use burn::tensor::backend::Backend;
use moe_lora_kernels::{DropoutKey, DropoutMask, RowGroups, fnv1a};
use moe_lora_parallel::GroupKind;
use serde::{Deserialize, Serialize};

use crate::{Lora, Placement};

/// Dropout of an adapter. What is kept is divided by `1 - probability`.
///
/// The mask is a function of the config's seed, the step, the linear's path, and each element's global
/// expert, token and feature: no topology, padding or order of rows changes it, and it is drawn again
/// in the backward pass rather than kept. The step and the tokens come with the rows, see
/// [`RowGroups::with_tokens`]. As in burn, it is the identity on backends without autodiff.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dropout {
    /// Probability that an element is dropped, in `0..1`.
    pub probability: f64,
    /// What is dropped.
    pub at: DropoutAt,
}

/// Where an adapter drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DropoutAt {
    /// Elements of the adapter's input: `s B A drop(x)`, as in PEFT. The base sees all of it.
    BeforeA,
    /// Elements of the delta: `drop(s B A x)`.
    AfterB,
}

impl fmt::Display for Dropout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = match self.at {
            DropoutAt::BeforeA => "before A",
            DropoutAt::AfterB => "after B",
        };
        write!(f, "{} {at}", self.probability)
    }
}

impl Dropout {
    /// Drops elements of the adapter's input.
    pub fn before_a(probability: f64) -> Self {
        Self {
            probability,
            at: DropoutAt::BeforeA,
        }
    }

    /// Drops elements of the delta.
    pub fn after_b(probability: f64) -> Self {
        Self {
            probability,
            at: DropoutAt::AfterB,
        }
    }
}

impl<B: Backend, G: GroupKind, P: Placement> Lora<B, G, P> {
    /// The rank's part of the mask of its input or its delta, where that is dropped from.
    ///
    /// # Panics
    ///
    /// When the rows come without the ids of their tokens.
    pub(crate) fn mask(
        &self,
        at: DropoutAt,
        rows: &RowGroups,
        device: &B::Device,
    ) -> Option<DropoutMask> {
        let dropout = self.config().dropout?;
        if dropout.at != at || dropout.probability == 0.0 || !B::ad_enabled(device) {
            return None;
        }
        if rows.tokens().is_none() {
            panic!(
                "{}: dropout of {} has no ids of the tokens (call RowGroups::with_tokens on the rows, or MoeLayer::forward_tokens)",
                self.path(),
                dropout.probability
            );
        }
        let (rows, expert) = match self.first_expert() {
            Some(first) => (self.rows_of_experts(rows), first),
            // Groups mean nothing to a weight of all rows.
            None => (rows.merged(), 0),
        };
        let key = DropoutKey {
            seed: self.config().seed,
            layer: fnv1a(self.path()),
        };
        let features = match at {
            DropoutAt::BeforeA => std::iter::once(self.a.layout().columns()).collect(),
            DropoutAt::AfterB => self.b.layout().rows(),
        };
        let mask = DropoutMask::new(dropout.probability, key, &rows);
        Some(mask.with_first_expert(expert).with_features(&features))
    }
}
