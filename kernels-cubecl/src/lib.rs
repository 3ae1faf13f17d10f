//! Grouped matrix multiplication: rows sorted by expert, one weight per expert; dropout by counter; what
//! DoRA needs beside products.
//!
//! Knows no ranks. [`grouped_matmul`] is differentiable on autodiff backends with a hand-written
//! backward pass of two grouped products; every backend has the per-expert path of
//! [`GroupedBackend`], which is the reference for faster ones.

mod activation;
mod autodiff;
mod backend;
mod columns;
#[cfg(feature = "cubecl")]
mod cube;
mod dropout;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cubecl")]
mod fusion;
mod groups;
mod low_rank;
#[cfg(feature = "ndarray")]
mod ndarray;
mod norms;
mod per_expert;
mod philox;
mod strategy;
mod tokens;

pub use activation::{Activation, Between};
pub use backend::{GroupedBackend, grouped_matmul, linear};
pub use columns::scale_columns;
pub use dropout::{DropoutKey, DropoutMask, add_dropped, dropout, shrink_dropped};
pub use groups::{GroupError, RowGroups};
pub use low_rank::{Expanded, Layout, expand, expand_into, shrink};
pub use norms::{RowTerms, row_norms, row_terms};
pub use strategy::{Compute, Strategy};
pub use tokens::{Slot, TokenIds, fnv1a};
