//! Dense algebra of one device in plain loops: the adapter is folded into the weight, every
//! backward pass is written out by hand.

mod linear;
mod mlp;
mod moe;

pub use linear::{Linear, LinearGrads, Lora};
pub use mlp::{Glu, Mlp, MlpGrads};
pub use moe::{Moe, MoeGrads, Score, Shared};
