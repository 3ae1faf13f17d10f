//! Ranks as threads.

use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::AutodiffBackend;
use moe_lora_adapters::AdapterBackend;
use moe_lora_parallel::{Mesh, MockWorld, ParallelBackend, Topology};
use serde::{Serialize, de::DeserializeOwned};

/// The backend of the suites.
pub type Ad = Autodiff<Flex>;

/// A backend that adapters train on.
pub trait TrainingBackend:
    AdapterBackend
    + AutodiffBackend<InnerBackend: ParallelBackend<Base = <Self as ParallelBackend>::Base>>
{
}

impl<B> TrainingBackend for B
where
    B: AdapterBackend + AutodiffBackend,
    B::InnerBackend: ParallelBackend<Base = <B as ParallelBackend>::Base>,
{
}

/// Runs the ranks of any topology: what a case is run on, over whichever transport.
pub trait Ranks<B: ParallelBackend> {
    /// Runs `body` on every rank, with its groups and its device, and returns the results in rank
    /// order. They can be serialised, as a rank may be another process.
    ///
    /// # Panics
    ///
    /// When a rank fails.
    fn run<T: Send + Serialize + DeserializeOwned>(
        &self,
        topology: Topology,
        body: impl Fn(&Mesh<B>, &B::Device) -> T + Sync,
    ) -> Vec<T>;
}

/// Ranks over [`MockWorld`], all of them on the default device.
#[derive(Clone, Copy, Debug)]
pub struct Mocked;

impl<B: ParallelBackend> Ranks<B> for Mocked {
    fn run<T: Send + Serialize + DeserializeOwned>(
        &self,
        topology: Topology,
        body: impl Fn(&Mesh<B>, &B::Device) -> T + Sync,
    ) -> Vec<T> {
        self.run(topology, body)
    }
}

impl Mocked {
    /// As [`Ranks::run`], with results of any type: they stay in the process.
    ///
    /// # Panics
    ///
    /// When a rank fails.
    pub fn run<B: ParallelBackend, T: Send>(
        &self,
        topology: Topology,
        body: impl Fn(&Mesh<B>, &B::Device) -> T + Sync,
    ) -> Vec<T> {
        let results = mock(topology).run(|rank| {
            let mesh = Mesh::new(topology, &rank).expect("world and topology have one size");
            body(&mesh, &Default::default())
        });
        results.unwrap_or_else(|error| panic!("{topology:?}: {error}"))
    }
}

/// A world for a topology, with a timeout that a loaded machine does not reach and a hanging test
/// does not wear out.
pub fn mock(topology: Topology) -> MockWorld {
    MockWorld::new(topology.world_size()).with_timeout(Duration::from_secs(30))
}

/// Runs `f` on every rank of `world` and returns the results in rank order.
///
/// One backward pass a call: burn takes the lock of every graph at the end of one, so a rank that
/// begins a second one before the others have ended the first would wait for them, and they for it.
///
/// # Panics
///
/// When a rank fails.
pub fn ranks<T: Send>(
    world: &MockWorld,
    topology: Topology,
    f: impl Fn(Mesh<Ad>) -> T + Sync,
) -> Vec<T> {
    world
        .run(|rank| f(Mesh::new(topology, &rank).expect("world and topology have one size")))
        .unwrap_or_else(|error| panic!("{topology:?}: {error}"))
}

/// The message that `f` panics with.
///
/// # Panics
///
/// When it does not.
pub fn panic_message<T>(f: impl FnOnce() -> T) -> String {
    let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)) else {
        panic!("a panic was expected");
    };
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => panic
            .downcast_ref::<&str>()
            .expect("the panic has a message")
            .to_string(),
    }
}
