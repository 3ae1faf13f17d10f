//! Parallel states, topology, groups and collectives for LoRA on Mixture-of-Experts models in
//! burn.
//!
//! Three layers, none skipped: a raw [`Collective`], the autograd pair of each row of [`TABLE`]
//! ([`region`]), and the typed values of [`state`] whose methods are those rows.
//!
//! Symbols, here and in the crates above: `T` tokens, `H` hidden size, `F` expert intermediate
//! size, `E` experts, `K` experts per token, `r` LoRA rank, `P` size of the group in question.
//!
//! Convention: there is one loss. Inside a tensor-parallel group each rank runs backward on its
//! own copy of it; over data and expert-parallel ranks it is the sum of their local losses.

#[cfg(any(feature = "flex", feature = "ndarray", feature = "cubecl"))]
mod backend;
mod collective;
mod error;
mod group;
mod mesh;
mod mock;
pub mod region;
mod signature;
pub mod state;
mod topology;

pub use collective::{Collective, CollectiveOp, Solo, range_of};
pub use error::{CollectiveError, TopologyError, raise};
pub use group::{Dp, Ep, ExpertDp, ExpertTp, Group, GroupKind, GroupName, Tp};
pub use mesh::{Mesh, Transport};
pub use mock::*;
pub use region::{ParallelBackend, TABLE, Transition, all_to_all};
pub use signature::Signature;
pub use state::{Fanout, Features, Partial, Replicated, Sharded, Tokens};
pub use topology::{Coordinates, Topology, TopologyConfig, shard_extent};
