//! A cost model: what LoRA on the experts of an MoE model takes at each topology, before a GPU is booked.
//!
//! ```
//! use moe_lora_plan::{Job, Machine, ModelShape, Plan};
//! use std::path::Path;
//!
//! # fn main() -> Result<(), moe_lora_plan::PlanError> {
//! let model = ModelShape::read(Path::new("tests/configs/qwen3-30b-a3b"))?;
//! let plan = Plan::new(&model, &Job::new(8), &Machine::h200())?;
//! let best = &plan.candidates[0];
//! println!("EP {} ETP {}: {:.1} ms", best.sizes.ep, best.sizes.etp, best.time.total_us() / 1e3);
//! # Ok(())
//! # }
//! ```
//!
//! # The model
//!
//! A kernel or collective takes `start + bytes / rate` ([`Cost`]), with constants that the bench
//! measured ([`Machine`]); a GPU's kernels and collectives follow one another. Tokens are spread
//! evenly over the experts, so a rank's experts see `R = T K P` rows, where `T` tokens a rank, `K`
//! experts a token and `P` = ETP.
//!
//! # What it does not model
//!
//! Other types than bf16, which weights, activations, factors, gradients and moments all have; the
//! base model's own products, which are the same at every topology but for the GPU's liking of
//! their shapes; attention scores; experts that get more rows than others; overlap of collectives
//! with products; what an allocator loses between buffers ([`Job::HEADROOM`] is left for it); NCCL
//! rings of more than two ranks, whose start is taken to grow with the logarithm of the ranks.

mod activations;
mod attention;
mod bench;
mod cost;
mod error;
mod job;
mod kernels;
mod machine;
#[cfg(test)]
mod measured;
mod memory;
mod model;
mod plan;
mod traffic;

pub use cost::Cost;
pub use error::PlanError;
pub use job::Job;
pub use kernels::Kernel;
pub use machine::{Link, Machine};
pub use memory::Memory;
pub use model::{ModelShape, Parameters};
pub use plan::{Candidate, Fit, Plan, Time};
pub use traffic::{Collective, Owner, Wire};
