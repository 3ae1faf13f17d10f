//! Ranks as threads.

use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use moe_lora_parallel::{Mesh, MockWorld, Topology};

/// The backend of the suites.
pub type Ad = Autodiff<Flex>;

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
