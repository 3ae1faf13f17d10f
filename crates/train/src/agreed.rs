//! When to stop, decided once for all ranks.

use burn::train::EarlyStoppingStrategy;
use burn::train::metric::store::EventStoreClient;
use moe_lora_parallel::{Mesh, ParallelBackend};

use crate::Adapted;

/// A strategy of early stopping by which all ranks do what rank 0 decides.
///
/// burn-train takes metrics in on another thread, so that a strategy sees more or fewer of them when
/// it is asked, and two ranks with the same numbers can decide differently: the one that goes on would
/// wait for the other for ever.
#[derive(Clone, Debug)]
pub struct Agreed<B: ParallelBackend, S> {
    strategy: S,
    mesh: Mesh<B>,
}

impl<B: ParallelBackend, S: EarlyStoppingStrategy> EarlyStoppingStrategy for Agreed<B, S> {
    fn should_stop(&mut self, epoch: usize, store: &EventStoreClient) -> bool {
        let here = self.strategy.should_stop(epoch, store);
        self.mesh.sum(usize::from(here && self.mesh.rank() == 0)) > 0
    }
}

impl<B: ParallelBackend, M> Adapted<B, M> {
    /// The strategy, decided by rank 0 for all: what early stopping takes where there are several.
    pub fn agreed<S: EarlyStoppingStrategy>(&self, strategy: S) -> Agreed<B, S> {
        Agreed {
            strategy,
            mesh: self.mesh().clone(),
        }
    }
}
