//! Hub model folders and PEFT adapter folders, in and out, as `f32` tensors on the host.
//!
//! ```no_run
//! use moe_lora_interchange::{HubModel, PeftAdapter};
//! use std::path::Path;
//!
//! # fn main() -> Result<(), moe_lora_interchange::InterchangeError> {
//! let model = HubModel::open(Path::new("Qwen3-30B-A3B"))?;
//! let adapter = PeftAdapter::read(Path::new("my-adapter"), model.config())?;
//! let experts = model.expert_weights(0)?;
//! for (name, pair) in adapter.layers[&0].pairs() {
//!     println!("{name}: rank {}, scale {}", pair.rank(), adapter.scale(pair));
//! }
//! println!("gate {:?}", experts.gate.shape());
//! # Ok(())
//! # }
//! ```
//!
//! # What it reads and writes
//!
//! | folder | files |
//! |---|---|
//! | model | `config.json` and `model.safetensors`, or the shards that `model.safetensors.index.json` names; written by a [`ModelWriter`] |
//! | adapter | `adapter_config.json` and `adapter_model.safetensors`, in any [`PeftLayout`] |
//!
//! An adapter also comes from and goes to the sharded checkpoints of training
//! ([`PeftAdapter::from_checkpoint`], [`PeftAdapter::write_checkpoint`]), and merges into the experts
//! of its model ([`ExpertWeights::merge`]) with the bits of a merge in training.
//!
//! # Model families
//!
//! | `model_type` | experts on disk | router | beside the routed experts |
//! |---|---|---|---|
//! | `qwen3_moe` | one by one | softmax, then top-k | |
//! | `qwen2_moe` | one by one | softmax, then top-k | a gated shared expert |
//! | `olmoe` | one by one | softmax, then top-k | |
//! | `mixtral` | one by one, as w1, w3 and w2 | softmax, then top-k | |
//! | `deepseek_v3` | one by one | sigmoid, bias for the choice, groups | shared experts, dense layers first |
//! | `gpt_oss` | stacked, transposed, gate and up interleaved, biases | top-k, then softmax | |
//!
//! All are read into one form, [`ExpertWeights`], and given back in their own by
//! [`ExpertWeights::into_hub`]. What transformers 5 stacked instead of storing it one by one is read
//! and written as well. Each row is a table in a file of `family/`.
//!
//! Tensors stored as `f32`, `bf16` or `f16` are widened to `f32`, which is exact. Symbols: `E`
//! experts, `H` hidden size, `F` expert intermediate size, `r` rank; weights are `[d_out, d_in]`.
//!
//! # Safety limits
//!
//! Files are taken as hostile. Every declared size is compared with the file before anything is
//! allocated, shard names cannot leave the folder, and a setting that would change the numbers and
//! is not understood here is refused by name. Output is staged in a temporary folder next to its
//! destination and renamed into place, so a failed write leaves earlier files as they were. Model
//! files are memory mapped: they must not be cut short by others while a [`HubModel`] is open.
//!
//! # What it does not do
//!
//! No downloads, no pickled `.bin` files, no quantised weights and no adapters on modules other than
//! the experts. The attention of DeepSeek-V3 and GPT-OSS is not described.

mod attention;
mod block;
mod config;
mod error;
mod experts;
mod family;
mod hub;
mod merge;
mod model_writer;
mod peft;
mod projection;
mod stacked;

pub use attention::{AttentionConfig, QkNorm};
pub use block::{RouterWeights, SharedExpertWeights};
pub use config::{Activation, ModelConfig, Router, SharedExpert};
pub use error::InterchangeError;
pub use experts::{ExpertBiases, ExpertWeights};
pub use family::Family;
pub use hub::HubModel;
pub use model_writer::{MAX_SHARD_BYTES, ModelWriter};
pub use moe_lora_files::{FileError, HostTensor};
pub use peft::{ExpertAdapter, FactorPair, GateUp, PeftAdapter, PeftLayout};
pub use stacked::Stacked;
