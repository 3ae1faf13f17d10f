//! What can go wrong when a layer is built.

use moe_lora_adapters::AdapterError;
use moe_lora_parallel::TopologyError;
use thiserror::Error;

/// A layer that cannot be built as asked.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ExpertsError {
    /// A linear or an adapter does not fit.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// The experts do not divide over the ranks.
    #[error("{path}: {reason}")]
    Topology {
        /// The layer.
        path: String,
        /// The extents.
        reason: TopologyError,
    },
    /// More experts a token than there are, or none.
    #[error("{path}: top_k={top_k} is not in 1..={num_experts} (num_experts={num_experts})")]
    TopK {
        /// The layer.
        path: String,
        /// Experts a token.
        top_k: usize,
        /// Experts.
        num_experts: usize,
    },
    /// The best groups of experts hold too few of them, or there are not so many groups.
    #[error(
        "{path}: topk_group={topk_group} is not in {least}..={n_group} (n_group={n_group} groups of {size} experts, top_k={top_k})"
    )]
    TopkGroup {
        /// The router.
        path: String,
        /// Groups that a token chooses its experts from.
        topk_group: usize,
        /// Groups.
        n_group: usize,
        /// Experts of a group.
        size: usize,
        /// Experts a token.
        top_k: usize,
        /// Groups that hold `top_k` experts.
        least: usize,
    },
    /// Routing weights before a down projection with a bias.
    #[error(
        "{path}: routing weights multiplied in before the down projection do not weigh its bias (choose WeighAt::Output)"
    )]
    UnweighedBias {
        /// The layer.
        path: String,
    },
    /// A weight of another size.
    #[error(
        "{path}: {found} values do not fill shape {expected:?} (pass the full, unsharded tensor)"
    )]
    Shape {
        /// The weight.
        path: String,
        /// Number of values given.
        found: usize,
        /// The full shape.
        expected: Vec<usize>,
    },
    /// Weights of shared experts and their config do not go together.
    #[error(
        "{path}: shared expert weights are {found}, the config says {expected} (give both or neither)"
    )]
    Shared {
        /// The layer.
        path: String,
        /// Whether weights were given.
        found: &'static str,
        /// Whether the config has shared experts.
        expected: &'static str,
    },
}
