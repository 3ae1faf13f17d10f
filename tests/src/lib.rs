//! Suites that cross crates, and the cases that several of them run: on any backend, over any
//! transport.
//!
//! Output and every gradient equal those of one device with the adapters folded into the weights.

pub mod dense;
pub mod dropout;
pub mod grid;
pub mod grouped;
pub mod moe;
pub mod multi;
pub mod named;
pub mod refusals;
pub mod shared_experts;
pub mod variants;
