//! Grouped matrix multiplication: rows sorted by expert, one weight per expert.
//!
//! Knows no ranks. [`grouped_matmul`] is differentiable on autodiff backends with a hand-written
//! backward pass of two grouped products; every backend has the per-expert path of
//! [`GroupedBackend`], which is the reference for faster ones.

mod backend;
#[cfg(feature = "flex")]
mod flex;
#[cfg(any(feature = "ndarray", feature = "cubecl"))]
mod generic;
mod groups;
mod per_expert;

pub use backend::{GroupedBackend, grouped_matmul, linear};
pub use groups::{GroupError, RowGroups};
