//! How many tokens the experts get.

use std::sync::{Arc, Mutex, PoisonError};

use moe_lora_parallel::{Mesh, ParallelBackend};

/// Counts the choices of a router, on the host and on this rank alone. Clones share the counts.
#[derive(Clone, Debug)]
pub struct TokenCounter(Arc<Mutex<Vec<usize>>>);

impl TokenCounter {
    pub(crate) fn new(num_experts: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![0; num_experts])))
    }

    pub(crate) fn add(&self, experts: &[usize]) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        experts.iter().for_each(|expert| counts[*expert] += 1);
    }

    /// The choices of each global expert in all passes since the last call.
    ///
    /// Layers that are run again in the backward pass are counted again there: take the counts
    /// before it, and once before the forward pass.
    pub fn take(&self) -> Vec<usize> {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let none = vec![0; counts.len()];
        std::mem::replace(&mut counts, none)
    }
}

/// The tokens of a layer's experts, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertLoad {
    /// Tokens that chose each global expert; they sum to `K` times the number of tokens.
    pub tokens: Vec<usize>,
}

impl ExpertLoad {
    /// The loads of layers from the counts that this rank has [taken](TokenCounter::take), one
    /// exchange of host integers for all. Every rank calls it and gets the same.
    ///
    /// Each rank's tokens are its own, as [`MoeLayer::forward`](crate::MoeLayer::forward) takes them.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn over_ranks<B: ParallelBackend>(local: &[Vec<usize>], mesh: &Mesh<B>) -> Vec<Self> {
        let mut all = mesh.sum_each(&local.concat()).into_iter();
        let layers = local.iter().map(|counts| Self {
            tokens: all.by_ref().take(counts.len()).collect(),
        });
        layers.collect()
    }

    /// Number of experts that no token chose.
    pub fn idle(&self) -> usize {
        self.tokens.iter().filter(|tokens| **tokens == 0).count()
    }

    /// Tokens of the busiest expert over the mean: 1 when all have as many, `E / K` when all tokens
    /// choose the same. 1 without tokens.
    pub fn imbalance(&self) -> f64 {
        let sum: usize = self.tokens.iter().sum();
        let most = self.tokens.iter().max().copied().unwrap_or_default();
        match sum {
            0 => 1.0,
            sum => (most * self.tokens.len()) as f64 / sum as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_start_anew_when_they_are_taken() {
        let counter = TokenCounter::new(4);
        let clone = counter.clone();
        counter.add(&[0, 3, 3]);
        clone.add(&[1]);
        assert_eq!(counter.take(), [1, 1, 0, 2]);
        assert_eq!(clone.take(), [0; 4]);
    }

    #[test]
    fn imbalance_runs_from_one_to_experts_over_choices() {
        let load = |tokens: &[usize]| ExpertLoad {
            tokens: tokens.into(),
        };
        assert_eq!(load(&[3, 3, 3, 3]).imbalance(), 1.0);
        assert_eq!(load(&[6, 6, 0, 0]).imbalance(), 2.0);
        assert_eq!(load(&[6, 3, 2, 1]).imbalance(), 2.0);
        assert_eq!(load(&[0, 0]).imbalance(), 1.0);
        assert_eq!(load(&[6, 6, 0, 0]).idle(), 2);
    }
}
