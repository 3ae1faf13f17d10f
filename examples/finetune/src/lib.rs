//! The parts of the main job that are neither adapters nor experts.
//!
//! The job fine-tunes the experts of a hub-layout Mixture-of-Experts model with LoRA at any expert topology. This
//! library holds what surrounds the MoE block: the frozen dense layers, the loss, the text, the flags and the report.
//! The block itself is a closure that [`model::CausalLm::forward_with`] calls once a layer.
//!
//! # Symbols
//! `N` sequences of a batch, `L` their length, `T = N * L` tokens (rows), `H` hidden size, `V` vocabulary,
//! `D` head size. Weights are `[d_out, d_in]`, so a linear is `y = x W^T (+ b)`.
//!
//! # What it does not do
//! No key-value cache, no sliding window, no RoPE scaling, no padding: every sequence of a batch has the same length.

pub mod args;
pub mod attention;
pub mod config;
pub mod decoder;
pub mod linear;
pub mod loss;
pub mod model;
pub mod norm;
pub mod precision;
pub mod report;
pub mod rope;
pub mod text;
pub mod weights;
