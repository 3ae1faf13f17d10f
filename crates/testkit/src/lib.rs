//! Ranks, oracles and tolerances for the tests of the workspace.
//!
//! An oracle is dense, of one device and in plain `f64` loops: it shares no code with the library.
//! A test makes full tensors ([`noise`]), gives each rank of a [`MockWorld`] its part through the
//! library, brings the ranks' results together ([`unshard`]) and compares them with the oracle
//! ([`assert_close`]).
//!
//! [`MockWorld`]: moe_lora_parallel::MockWorld

mod conformance;
mod dora;
mod dropout;
mod factors;
mod kernels;
mod matrix;
mod member;
mod mlp;
pub mod oracle;
mod ranks;
mod saved;
mod shard;
mod tolerance;

pub use conformance::{Body, Host, conformance};
pub use dora::{row_lengths, scaled_columns};
pub use dropout::dropout_masks;
pub use factors::{factors, gradient, load_start, synced_gradient};
pub use kernels::kernels;
pub use matrix::{Matrix, Noise, central_differences, noise};
pub use member::Member;
pub use mlp::{
    GateUpTargets, MlpCase, MlpValues, SHARING, factor_axes, scale, shared_factors, shared_pair,
};
pub use ranks::{Ad, Mocked, Ranks, TrainingBackend, mock, panic_message, ranks};
pub use saved::saved_tensors;
pub use shard::{Axis, shard, unshard, unshard_experts};
pub use tolerance::{
    assert_all_close, assert_close, assert_far, epsilon, error, limit, norm_error, relative_error,
    tolerance,
};
