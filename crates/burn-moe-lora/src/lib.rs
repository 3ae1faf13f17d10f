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
//! use burn::optim::{GradientsParams, Optimizer, SgdConfig};
//! use burn::tensor::{Distribution, Tensor};
//! use burn_moe_lora::prelude::*;
//!
//! type B = Autodiff<Flex>;
//! let (router, w) = (vec![0.1; 8 * 16], vec![0.1; 8 * 32 * 16]); // full weights, as a model file has them
//! let topology = TopologyConfig::new(4).with_ep(2).with_etp(2).init()?;
//! MockWorld::new(4).run_result(|rank| -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//!     let (mesh, device) = (Mesh::<B>::new(topology, &rank)?, Default::default());
//!     let experts = MlpWeights { gate: &w, up: &w, down: &w, biases: None };
//!     let weights = MoeWeights { router: &router, experts, ..Default::default() };
//!     let config = MoeConfig::new("model.layers.0.mlp", 16, 32, 8, 2); // its path in files, H, F, experts, top k
//!     let mut layer = config.init(weights, &mesh, &device)?;
//!     layer.add_adapters(&Targets::new(["gate_up_proj", "down_proj"]), &LoraConfig::new(4, 8.0), &device)?;
//!
//!     let x = Tensor::random([5, 16], Distribution::Default, &device); // this rank's own tokens
//!     let loss = layer.forward(x, &mesh).powi_scalar(2).sum();
//!     let grads = GradientsParams::from_grads(loss.backward(), &layer);
//!     let grads = sync_gradients(&layer.trained_weights(), grads, &mesh);
//!     layer = SgdConfig::new().init().step(0.1, layer, grads);
//!     assert_eq!(layer.trained_weights().len(), 4); // A and B of fc1 and fc2
//!     Ok(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # The crates
//!
//! | module | what it holds |
//! |---|---|
//! | [`parallel`] | topology, groups, [`Collective`](parallel::Collective), the four states and the table of operations between them |
//! | [`kernels`] | grouped matrix products, rows sorted by expert; dropout |
//! | [`adapters`] | LoRA on column-parallel, row-parallel and replicated linears |
//! | [`experts`] | router, dispatcher, expert MLP, MoE layer, shared experts |
//! | [`checkpoint`] | sharded checkpoints that load at any topology |
//! | [`interchange`] | hub model directories, whose layers [`HubLayer`] reads, and PEFT files |
//! | `nccl` | with the feature of that name, ranks on GPUs |
//! | `train` | with the feature of that name, runs of burn-train's `Learner` |
//!
//! # What it does not do
//!
//! It is no trainer: loop, optimizer and data are burn's and yours. It does not shard attention.

mod hub;

pub use hub::HubLayer;
pub use moe_lora_adapters as adapters;
pub use moe_lora_checkpoint as checkpoint;
pub use moe_lora_experts as experts;
pub use moe_lora_interchange as interchange;
pub use moe_lora_kernels as kernels;
#[cfg(feature = "nccl")]
pub use moe_lora_nccl as nccl;
pub use moe_lora_parallel as parallel;
#[cfg(feature = "train")]
pub use moe_lora_train as train;

/// What a training loop names, and what saves and exports.
pub mod prelude {
    pub use crate::HubLayer;
    pub use moe_lora_adapters::{
        Activation, Adaptable, AdapterBackend, AdapterReport, AnyLinear, ColumnLinear, ColumnLora,
        Dropout, GradientPlan, Init, LinearConfig, LoraConfig, LoraPlus, Recompute,
        ReplicatedLinear, ReplicatedLora, RowLinear, RowLora, Sharing, Slot, Strategy, Targets,
        TokenIds, TrainBackend, TrainedWeight, adapter_norms, check_gradients, clip_gradients,
        gradient_norm, load_adapters, load_checkpoint, save_checkpoint, sync_gradients,
    };
    pub use moe_lora_checkpoint::{Checkpoint, Strictness};
    pub use moe_lora_experts::{
        ExpertLoad, GluActivation, MlpBiases, MlpConfig, MlpWeights, MoeConfig, MoeLayer,
        MoeWeights, RouterScore, SharedConfig, SlotOrder, WeighAt,
    };
    pub use moe_lora_interchange::{HubModel, ModelConfig, PeftAdapter, PeftLayout};
    pub use moe_lora_kernels::RowGroups;
    #[cfg(feature = "nccl")]
    pub use moe_lora_nccl::{Nccl, NcclConfig};
    pub use moe_lora_parallel::{
        Collective, Dp, Ep, ExpertDp, ExpertTp, Fanout, Group, Mesh, MockWorld, Partial,
        Replicated, Sharded, Topology, TopologyConfig, Tp, Transport,
    };
    #[cfg(feature = "train")]
    pub use moe_lora_train::{Adapted, AdapterMetric, Finetune};
}

/// The README's code compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
