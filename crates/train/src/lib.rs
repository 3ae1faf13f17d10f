//! Runs of burn-train's `Learner` in which adapters alone are trained and recorded.
//!
//! A model says with [`Finetune`] what its loss is and where its adapters are. [`Adapted`] makes of it
//! what `Learner` trains: gradients are summed over the ranks, the base is neither optimised nor
//! recorded, and every step has [`StepStats`], which [`AdapterMetric`] shows as curves.
//!
//! Every rank runs a `Learner` of its own on its own tokens, in a folder of its own
//! ([`Adapted::training`]). All numbers are those of all ranks together, the same on each. Ranks stop
//! early together where rank 0 decides for them ([`Adapted::agreed`]).
//!
//! # What it does not do
//!
//! A record is that of a rank and of its topology: to move adapters, save them with
//! [`save_checkpoint`](moe_lora_adapters::save_checkpoint). burn's own strategies for several devices
//! are not for these models, whose groups do what they would; `Learner`'s default is the one to use.

mod adapted;
mod agreed;
mod metric;
mod record;
mod stats;
mod training;

pub use adapted::{Adapted, Finetune};
pub use agreed::Agreed;
pub use metric::AdapterMetric;
pub use record::AdapterRecord;
pub use stats::StepStats;
pub use training::{AdapterTraining, Batches};
