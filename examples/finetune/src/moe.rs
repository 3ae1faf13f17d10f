//! The MoE blocks of one rank.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn_moe_lora::adapters::{Adaptable, AdapterBackend, AdapterNorm, AnyLinear, adapter_norms};
use burn_moe_lora::experts::{
    GluActivation, MlpBiases, MlpWeights, MoeConfig, MoeLayer, MoeWeights, RouterScore,
    SharedConfig,
};
use burn_moe_lora::interchange::{Activation, HostTensor, HubModel, ModelConfig, Router};
use burn_moe_lora::parallel::{Mesh, ParallelBackend};

/// The MoE block of every layer that has one: frozen weights and the adapters on them, the only thing that is trained.
#[derive(Module, Debug)]
pub struct MoeBlocks<B: Backend> {
    /// The blocks, in the order of their layers.
    pub layers: Vec<MoeLayer<B>>,
    /// The layer of each, counted from 0 over all layers of the model.
    #[module(skip)]
    pub numbers: Vec<usize>,
}

impl<B: ParallelBackend> MoeBlocks<B> {
    /// Reads this rank's part of every block, without adapters.
    ///
    /// `overlap` places the shared experts' collectives around those of the dispatcher; the numbers are the same.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape than the configuration implies, or sizes that the topology does not
    /// divide. Every rank gets the same error.
    pub fn load(hub: &HubModel, overlap: bool, mesh: &Mesh<B>, device: &B::Device) -> Result<Self> {
        let numbers: Vec<usize> = hub.config().moe_layers().collect();
        let layers = numbers.iter();
        Ok(Self {
            layers: layers
                .map(|layer| load_layer(hub, *layer, overlap, mesh, device))
                .collect::<Result<_>>()?,
            numbers,
        })
    }
}

/// The routed experts' linears, layer by layer. Those of shared experts are left out, as the files of PEFT adapters written
/// here hold none for them.
impl<B: Backend> Adaptable<B> for MoeBlocks<B> {
    fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
        let layers = self.layers.iter();
        layers.flat_map(|layer| layer.experts.linears()).collect()
    }

    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
        let layers = self.layers.iter_mut();
        layers
            .flat_map(|layer| layer.experts.linears_mut())
            .collect()
    }
}

impl<B: Backend> MoeBlocks<B> {
    /// The choices of this rank's tokens since the last call, by layer and expert.
    pub fn take_counts(&self) -> Vec<Vec<usize>> {
        let layers = self.layers.iter();
        layers.map(|layer| layer.router.counter().take()).collect()
    }
}

impl<B: AdapterBackend> MoeBlocks<B> {
    /// How far the adapters move each expert, by layer: the norm of its deltas. Every rank calls it.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn expert_norms(&self, mesh: &Mesh<B>) -> Vec<Vec<f64>> {
        let of_layer = |layer: &MoeLayer<B>| {
            let linears = adapter_norms(&layer.experts.trained_weights(), mesh);
            let [experts, _] = layer.router.weight.dims();
            let norm = |expert: usize| {
                // A delta that the experts share is every expert's.
                let of = |linear: &AdapterNorm| linear.experts[expert % linear.experts.len()];
                linears.iter().map(of).fold(0.0, f64::hypot)
            };
            (0..experts).map(norm).collect()
        };
        self.layers.iter().map(of_layer).collect()
    }

    /// Merges every adapter into its weight and drops it.
    ///
    /// # Errors
    /// A function between the factors of an adapter.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn merge(&mut self, mesh: &Mesh<B>) -> Result<()> {
        for layer in &mut self.layers {
            layer.merge(mesh)?;
        }
        Ok(())
    }
}

fn load_layer<B: ParallelBackend>(
    hub: &HubModel,
    layer: usize,
    overlap: bool,
    mesh: &Mesh<B>,
    device: &B::Device,
) -> Result<MoeLayer<B>> {
    let config = hub.config();
    let experts = hub.expert_weights(layer)?;
    let router = hub.router(layer)?;
    let shared = hub.shared_expert(layer)?;
    let bias = router.bias.as_ref().map(HostTensor::data);
    let (router_bias, correction_bias) = match config.router {
        // The one bias that a family has is added to the logits or for the choice alone.
        Router::GroupedSigmoid { .. } => (None, bias),
        Router::SoftmaxThenTopK { .. } | Router::TopKThenSoftmax => (bias, None),
    };
    let weights = MoeWeights {
        router: router.weight.data(),
        router_bias,
        correction_bias,
        experts: MlpWeights {
            gate: experts.gate.data(),
            up: experts.up.data(),
            down: experts.down.data(),
            biases: experts.biases.as_ref().map(|biases| MlpBiases {
                gate: biases.gate.data(),
                up: biases.up.data(),
                down: biases.down.data(),
            }),
        },
        shared: shared.as_ref().map(|shared| {
            let mlp = MlpWeights {
                gate: shared.gate.data(),
                up: shared.up.data(),
                down: shared.down.data(),
                biases: None,
            };
            (mlp, shared.output_gate.as_ref().map(HostTensor::data))
        }),
    };
    let path = format!("model.layers.{layer}.mlp");
    Ok(moe_config(config, &path, overlap).init(weights, mesh, device)?)
}

fn moe_config(config: &ModelConfig, path: &str, overlap: bool) -> MoeConfig {
    let score = match config.router {
        Router::SoftmaxThenTopK { renormalize } => RouterScore::SoftmaxThenTopK { renormalize },
        Router::TopKThenSoftmax => RouterScore::TopKThenSoftmax,
        Router::GroupedSigmoid {
            groups,
            top_groups,
            renormalize,
            scale,
        } => RouterScore::SigmoidThenTopK {
            n_group: groups,
            topk_group: top_groups,
            renormalize,
            scaling_factor: scale,
        },
    };
    let activation = match config.activation {
        Activation::Swiglu => GluActivation::Swiglu,
        Activation::ClampedSwiglu { alpha, limit } => GluActivation::ClampedSwiglu { alpha, limit },
    };
    let shared = config.shared_expert.map(|shared| SharedConfig {
        intermediate: shared.intermediate_size,
        gated: shared.gated,
        overlap,
    });
    MoeConfig::new(
        path,
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
    )
    .with_score(score)
    .with_activation(activation)
    .with_shared(shared)
}
