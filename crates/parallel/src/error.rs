//! What can go wrong between ranks.

use std::cell::Cell;
use std::time::Duration;

use thiserror::Error;

use crate::{CollectiveOp, GroupName};

/// A topology that cannot be laid over the world, or sizes that it does not divide.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum TopologyError {
    /// A size of zero.
    #[error("{name}=0 is not a parallel size (use 1 for no parallelism)")]
    Zero {
        /// Which size.
        name: &'static str,
    },
    /// The world is not a whole number of replicas.
    #[error(
        "world_size={world} is not divisible by {product} ranks a replica, {sizes} (choose sizes whose product divides the world size)"
    )]
    World {
        /// Number of ranks.
        world: usize,
        /// Ranks that one replica takes.
        product: usize,
        /// The sizes as `name=value`.
        sizes: String,
    },
    /// A rank outside the world.
    #[error("rank={rank} is outside world_size={world} (ranks count from 0)")]
    Rank {
        /// The rank asked for.
        rank: usize,
        /// Number of ranks.
        world: usize,
    },
    /// An extent that a group does not divide.
    #[error(
        "{what}={extent} is not divisible by {by}={size} (choose {})",
        divisible(what, *extent, by, *size)
    )]
    Indivisible {
        /// The extent's name.
        what: &'static str,
        /// The extent.
        extent: usize,
        /// The name of the parallel size.
        by: &'static str,
        /// The parallel size.
        size: usize,
    },
    /// The transport's world is not the topology's.
    #[error(
        "the transport has {transport} ranks, the topology {topology} (start as many ranks as the topology says)"
    )]
    Transport {
        /// Ranks of the transport.
        transport: usize,
        /// Ranks of the topology.
        topology: usize,
    },
}

/// What to change. A rank is the user's own, other extents are the model's.
fn divisible(what: &str, extent: usize, by: &str, size: usize) -> String {
    match what {
        "lora rank" => format!("a multiple of {size} as rank"),
        _ => format!("a divisor of {extent} as {by}"),
    }
}

/// A collective that did not complete. Every rank of the group gets one.
///
/// `rank` and all other rank numbers are ranks of the world.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CollectiveError {
    /// The ranks disagree on what they call.
    #[error(
        "{op} on group {group} at rank {rank}: ranks disagree: {calls} (every rank of a group issues the same operation, shape and dtype in the same order)"
    )]
    Mismatch {
        /// What this rank called.
        op: CollectiveOp,
        /// The group.
        group: GroupName,
        /// This rank.
        rank: usize,
        /// What each rank called.
        calls: String,
    },
    /// A rank did not come in time.
    #[error(
        "{op} on group {group} at rank {rank}: no call from ranks {missing:?} within {waited:?} (they called fewer collectives, or share an autodiff graph with this rank)"
    )]
    Timeout {
        /// What this rank called.
        op: CollectiveOp,
        /// The group.
        group: GroupName,
        /// This rank.
        rank: usize,
        /// Ranks that did not call.
        missing: Vec<usize>,
        /// How long this rank waited.
        waited: Duration,
    },
    /// A rank has ended and cannot come any more.
    #[error("{op} on group {group} at rank {rank}: rank {departed} {reason}")]
    Departed {
        /// What this rank called.
        op: CollectiveOp,
        /// The group.
        group: GroupName,
        /// This rank.
        rank: usize,
        /// The rank that ended.
        departed: usize,
        /// How it ended.
        reason: String,
    },
    /// Sizes that do not fit the tensor or the group.
    #[error(
        "{op} on group {group} at rank {rank}: {sizes} (one size a rank, summing to the extent)"
    )]
    Sizes {
        /// What this rank called.
        op: CollectiveOp,
        /// The group.
        group: GroupName,
        /// This rank.
        rank: usize,
        /// The sizes and the extent they should sum to.
        sizes: String,
    },
    /// The transport below failed: a library call, a connection, a device.
    #[error("{op} on group {group} at rank {rank}: {reason}")]
    Transport {
        /// What this rank called.
        op: CollectiveOp,
        /// The group.
        group: GroupName,
        /// This rank.
        rank: usize,
        /// What failed, and how.
        reason: String,
    },
}

thread_local! {
    static SUPERVISED: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as one whose panics are caught and reported as errors, so that [`raise`]
/// unwinds without printing.
pub(crate) fn supervise() {
    SUPERVISED.set(true);
}

/// Ends a forward or backward pass with a transport's error.
///
/// burn's backward pass has no error path, so the error travels as a panic. A launcher such as
/// [`MockWorld::run`](crate::MockWorld::run) catches it and returns it as the [`CollectiveError`]
/// that it is; elsewhere it is an ordinary panic with the error's message.
///
/// # Panics
///
/// Always.
pub fn raise(error: CollectiveError) -> ! {
    if SUPERVISED.get() {
        std::panic::resume_unwind(Box::new(error))
    }
    panic!("{error}")
}
