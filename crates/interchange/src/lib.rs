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
//! println!("gate {:?}, scale {}", experts.gate.shape(), adapter.scale());
//! # Ok(())
//! # }
//! ```
//!
//! # What it reads and writes
//!
//! | folder | files |
//! |---|---|
//! | model | `config.json` and `model.safetensors`, or the shards that `model.safetensors.index.json` names |
//! | adapter | `adapter_config.json` and `adapter_model.safetensors`, in either [`PeftLayout`] |
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
//! No downloads, no tokenizers, no pickled `.bin` files, no quantised weights, no DoRA magnitudes
//! and no adapters on modules other than the experts.

mod config;
mod error;
mod hub;
mod peft;
mod projection;

pub use config::{Family, ModelConfig};
pub use error::InterchangeError;
pub use hub::{ExpertWeights, HubModel, write_model};
pub use moe_lora_files::{FileError, HostTensor};
pub use peft::{ExpertAdapter, FactorPair, GateUp, PeftAdapter, PeftLayout};
