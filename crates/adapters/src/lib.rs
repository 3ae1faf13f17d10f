//! LoRA adapters that arrive in the parallel state of their base.
//!
//! An adapter adds `s * B A x` (`s = alpha / r`) to a base linear's output, and the two can only
//! be added in the same parallel state. [`Linear`] pairs a frozen weight with adapters placed to
//! match: [`ColumnLora`] for column-parallel bases, [`RowLora`] for row-parallel ones, summed or
//! suppressed, [`ReplicatedLora`] for the rest. Every factor is one weight for all rows or one an
//! expert ([`Weight`]). Several adapters with names serve one linear side by side, each row using the
//! one of its token's slot ([`MultiLora`]). A layer or
//! a model of them is [`Adaptable`]: adapters are put on all of its targets at once.
//!
//! No number here depends on the topology: not the scale, not the start values, not the merged
//! weight.

mod adaptable;
mod any_linear;
mod burn_linear;
mod checkpoint;
mod clip;
mod combination;
mod config;
mod dora;
mod dropout;
mod error;
mod gradient;
mod init;
mod linear;
mod linear_config;
mod lora;
mod lora_plus;
mod merge;
mod multi;
mod named;
mod norm;
mod optimizer;
mod pattern;
mod pissa;
mod recompute;
mod report;
mod shard;
mod silent;
mod slots;
mod stack;
mod sync;
mod targets;
mod trained_weight;
mod weight;

pub use adaptable::Adaptable;
pub use any_linear::AnyLinear;
pub use checkpoint::{load_adapters, load_checkpoint, save_checkpoint, stored_adapters};
pub use clip::{clip_gradients, gradient_norm};
pub use config::{LoraConfig, Sharing};
pub use dropout::{Dropout, DropoutAt};
pub use error::{AdapterError, ClipError, ResumeError};
pub use gradient::{GradientPlan, GradientRow};
pub use init::{Init, InitKey};
pub use linear::{ColumnLinear, Linear, ReplicatedLinear, RowLinear};
pub use linear_config::LinearConfig;
pub use lora::{ColumnLora, Lora, ReplicatedLora, RowLora};
pub use lora_plus::LoraPlus;
pub use moe_lora_kernels::{Activation, Compute, Slot, Strategy, TokenIds};
pub use multi::{MultiLora, NamedLora};
pub use named::NamedSet;
pub use norm::{AdapterNorm, adapter_norms};
pub use optimizer::{OptimizerParts, ResumableOptimizer};
pub use pissa::PissaStart;
pub use recompute::Recompute;
pub use report::{AdapterReport, ReportRow};
pub use shard::{ShardAxis, WeightLayout};
pub use silent::check_gradients;
pub use sync::sync_gradients;
pub use targets::{Target, Targets};
pub use trained_weight::TrainedWeight;
pub use weight::{
    AdapterBackend, Column, ColumnWeight, PlacedWeight, Placement, ReplicatedWeight, Row,
    RowWeight, TrainBackend, Weight, Whole,
};
