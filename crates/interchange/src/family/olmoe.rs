//! OLMoE: norms over all of q and k.

use super::{Family, USUAL};
use crate::attention::{AttentionBiases, GroupedQueryAttention, QkNorm};

pub(super) static FAMILY: Family = Family {
    model_type: "olmoe",
    intermediate_size: "intermediate_size",
    attention: Some(GroupedQueryAttention {
        qk_norm: QkNorm::Full,
        biases: AttentionBiases::OnAll("attention_bias"),
    }),
    ..USUAL
};
