//! Mixture-of-Experts layers, exact under expert and expert tensor parallelism.
//!
//! [`MoeLayer`] routes this rank's tokens, brings them to their experts with [`Dispatch`], runs
//! the [`SwigluMlp`] of the experts with their collectives suppressed, and sums the terms on the
//! way back. [`SharedExperts`] run beside it on the dense tensor parallel group.

mod activation;
mod dispatcher;
mod error;
mod layer;
mod load;
mod mlp;
mod order;
mod router;
mod shared;
mod tokens;

pub use activation::GluActivation;
pub use dispatcher::Dispatch;
pub use error::ExpertsError;
pub use layer::{MoeConfig, MoeLayer, MoeWeights, SharedConfig, WeighAt};
pub use load::{ExpertLoad, TokenCounter};
pub use mlp::{MlpBiases, MlpConfig, MlpWeights, SwigluMlp};
pub use order::SlotOrder;
pub use router::{RouterScore, Routing, TopKRouter};
pub use shared::SharedExperts;
