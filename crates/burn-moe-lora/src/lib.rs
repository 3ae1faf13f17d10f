//! LoRA fine-tuning of Mixture-of-Experts models in burn, exact at every parallel topology.
//!
//! A LoRA adapter adds `s * B A x` to the output of its base linear. On MoE expert layers that
//! output is a *partial sum* once expert tensor parallelism exceeds 1, or once experts are spread
//! over ranks: the dispatcher sums later. Here every adapter arrives in its base's parallel state,
//! output and gradients equal those of one device with `W + s B A` folded into the weight, and
//! the known ways to get it wrong do not compile.
//!
//! ```
//! use burn::backend::{Autodiff, Flex};
//! use burn::tensor::{Distribution, Tensor};
//! use burn_moe_lora::prelude::*;
//!
//! type B = Autodiff<Flex>;
//!
//! // Four ranks as threads: two groups of experts, each expert cut in two.
//! let topology = TopologyConfig::new(4).with_ep(2).with_etp(2).init()?;
//! let outputs = MockWorld::new(4).run(|rank| {
//!     let mesh = Mesh::<B>::new(topology, &rank).unwrap();
//!     let config = MlpConfig::new("mlp.experts", 16, 32).with_experts(8, 0..4);
//!     # let _ = config;
//!     mesh.coordinates()
//! })?;
//! # assert_eq!(outputs[3].ep, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The crates
//!
//! | module | what it holds |
//! |---|---|
//! | [`parallel`] | topology, groups, [`Collective`](parallel::Collective), the four states and the table of operations between them |
//! | [`kernels`] | grouped matrix products, rows sorted by expert |
//! | [`adapters`] | LoRA on column-parallel, row-parallel and replicated linears |
//! | [`experts`] | router, dispatcher, expert MLP, MoE layer, shared experts |
//! | [`interchange`] | hub model directories and PEFT files |
//!
//! # What it does not do
//!
//! It is no trainer: loop, optimizer and data are burn's and yours. It does not shard attention.

pub use moe_lora_adapters as adapters;
pub use moe_lora_experts as experts;
pub use moe_lora_interchange as interchange;
pub use moe_lora_kernels as kernels;
pub use moe_lora_parallel as parallel;

/// What a training loop names.
pub mod prelude {
    pub use moe_lora_adapters::{
        AdapterBackend, ColumnLinear, Init, LinearConfig, LoraConfig, ReplicatedLinear, RowLinear,
        Sharing, Targets, sync_gradients,
    };
    pub use moe_lora_experts::{
        GateUp, MlpConfig, MlpWeights, MoeConfig, MoeLayer, MoeWeights, RouterScore, SharedConfig,
    };
    pub use moe_lora_kernels::RowGroups;
    pub use moe_lora_parallel::{
        Collective, Ep, ExpertTp, Group, Mesh, MockWorld, Topology, TopologyConfig, Tp, Transport,
    };
}
