//! Fine-tunes the experts of a hub-layout Mixture-of-Experts model with LoRA at any expert topology.
//!
//! Each rank ([`ranks`]) is a thread or a process with a [`rank_model::RankModel`] of its own: the frozen dense layers of [`model::CausalLm`],
//! and between them the [`moe::MoeBlocks`], whose adapters a [`trainer::Trainer`] updates. [`job::Job`] is the whole way
//! from flags to files.
//!
//! # Symbols
//! `N` sequences of a batch, `L` their length, `T = N * L` tokens (rows), `H` hidden size, `V` vocabulary,
//! `D` head size. Weights are `[d_out, d_in]`, so a linear is `y = x W^T (+ b)`.
//!
//! # What it does not do
//! No key-value cache, no sliding window, no RoPE scaling, no padding: every sequence of a batch has the same length.

pub mod adapter;
pub mod args;
pub mod attention;
pub mod backend;
pub mod config;
pub mod decoder;
pub mod job;
pub mod linear;
pub mod loss;
pub mod merge;
pub mod metrics;
pub mod model;
pub mod moe;
pub mod norm;
pub mod output;
pub mod picture;
pub mod precision;
pub mod rank_model;
pub mod ranks;
pub mod report;
pub mod rope;
pub mod text;
pub mod trainer;
pub mod weights;
