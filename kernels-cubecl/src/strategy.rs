//! How grouped products are computed.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which path an adapter's grouped products take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Strategy {
    /// `Grouped` where the device has the kernels, `PerExpert` elsewhere.
    #[default]
    Auto,
    /// One kernel for the experts together. Refused where there is none.
    Grouped,
    /// burn's own matmul for each expert: the reference, on every backend.
    PerExpert,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Grouped => "grouped",
            Self::PerExpert => "per-expert",
        })
    }
}

/// How an adapter's products are computed: never what they are, but for the rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Compute {
    /// The path.
    pub strategy: Strategy,
    /// Whether f32 products may be rounded to TF32 (10 bits) on tensor cores. Off by default: they
    /// then have all of f32's bits.
    pub tf32: bool,
}
