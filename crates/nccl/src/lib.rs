//! Ranks on GPUs: the NCCL transport of `moe-lora-parallel`, for burn's CUDA backend.
//!
//! With the feature `cuda`, `Nccl` is one rank: a thread of a process with several GPUs, or
//! a process with one, started by torchrun or SLURM ([`Launch`]). Processes find each other over TCP
//! at rank 0 ([`rendezvous`]) and prove a shared [`Token`].
//!
//! The CUDA driver (12.5 or later) and NCCL are loaded when a rank starts: the crate compiles where
//! there is neither.

#[cfg(feature = "cuda")]
mod backend;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod board;
#[cfg(feature = "cuda")]
mod communicator;
#[cfg(feature = "cuda")]
mod device;
mod error;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod frame;
#[cfg(feature = "cuda")]
mod group;
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
mod host;
mod launch;
#[cfg(feature = "cuda")]
mod nccl;
pub mod rendezvous;
mod token;
#[cfg(feature = "cuda")]
mod world;

#[cfg(feature = "cuda")]
pub use backend::CudaBackend;
#[cfg(feature = "cuda")]
pub use device::gpu_count;
pub use error::StartError;
pub use launch::Launch;
#[cfg(feature = "cuda")]
pub use nccl::{Nccl, NcclConfig};
pub use token::Token;
