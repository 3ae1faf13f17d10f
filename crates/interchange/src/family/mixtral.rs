//! Mixtral: `block_sparse_moe`, with w1 for the gate, w3 for up and w2 for down.

use super::{Family, OneByOne, USUAL};
use crate::attention::{AttentionBiases, GroupedQueryAttention, QkNorm};
use crate::config::Router;

pub(super) static FAMILY: Family = Family {
    model_type: "mixtral",
    num_experts: &["num_local_experts", "num_experts"],
    intermediate_size: "intermediate_size",
    one_by_one: Some(OneByOne {
        block: "block_sparse_moe",
        gate: "w1",
        up: "w3",
        down: "w2",
    }),
    attention: Some(GroupedQueryAttention {
        qk_norm: QkNorm::None,
        biases: AttentionBiases::Never,
    }),
    read_router: |_, _| Ok(Router::SoftmaxThenTopK { renormalize: true }),
    ..USUAL
};
