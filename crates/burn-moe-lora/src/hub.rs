//! MoE layers of model files.

use moe_lora_experts::{
    ExpertsError, GluActivation, MlpBiases, MlpWeights, MoeConfig, MoeLayer, MoeWeights,
    RouterScore, SharedConfig,
};
use moe_lora_interchange::{
    Activation, ExpertWeights, HostTensor, HubModel, InterchangeError, ModelConfig, Router,
    RouterWeights, SharedExpertWeights,
};
use moe_lora_parallel::{Mesh, ParallelBackend};

/// The MoE block of one layer of a hub model: its settings and its full weights, in f32 on the host.
///
/// ```no_run
/// use burn::backend::{Autodiff, Flex};
/// use burn_moe_lora::prelude::*;
///
/// type B = Autodiff<Flex>;
/// let hub = HubModel::open("models/qwen3-moe".as_ref())?;
/// let (mesh, device) = (Mesh::<B>::solo(), Default::default());
/// let mut layers: Vec<MoeLayer<B>> = vec![];
/// for layer in hub.config().moe_layers() {
///     layers.push(HubLayer::read(&hub, layer)?.init(&mesh, &device)?);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct HubLayer {
    /// Settings as the model has them, at the path `model.layers.{layer}.mlp`. What no file says may be
    /// changed before [`init`](Self::init), such as the element type, which is that of the layer's input.
    pub config: MoeConfig,
    router: HostTensor,
    /// Added to the logits.
    router_bias: Option<HostTensor>,
    /// Added for the choice alone.
    correction_bias: Option<HostTensor>,
    experts: ExpertWeights,
    shared: Option<SharedExpertWeights>,
}

impl HubLayer {
    /// Reads layer `layer`, counted from 0 over all layers of the model.
    ///
    /// # Errors
    ///
    /// When there is no such layer or it has no experts, or a tensor is missing, has another shape
    /// than the configuration says or is stored in an unsupported type.
    pub fn read(hub: &HubModel, layer: usize) -> Result<Self, InterchangeError> {
        let experts = hub.expert_weights(layer)?;
        let RouterWeights { weight, bias } = hub.router(layer)?;
        // A family has one bias at most.
        let (router_bias, correction_bias) = match hub.config().router {
            Router::GroupedSigmoid { .. } => (None, bias),
            Router::SoftmaxThenTopK { .. } | Router::TopKThenSoftmax => (bias, None),
        };
        Ok(Self {
            config: config(hub.config(), layer),
            router: weight,
            router_bias,
            correction_bias,
            experts,
            shared: hub.shared_expert(layer)?,
        })
    }

    /// The frozen layer with this rank's part of the weights.
    ///
    /// # Errors
    ///
    /// When the topology does not divide a size; every rank of the mesh gets the same error. When the
    /// settings were changed to some that these weights do not fit.
    pub fn init<B: ParallelBackend>(
        &self,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> Result<MoeLayer<B>, ExpertsError> {
        let biases = self.experts.biases.as_ref().map(|biases| MlpBiases {
            gate: biases.gate.data(),
            up: biases.up.data(),
            down: biases.down.data(),
        });
        let shared = self.shared.as_ref().map(|shared| {
            let mlp = mlp(&shared.gate, &shared.up, &shared.down);
            (mlp, shared.output_gate.as_ref().map(HostTensor::data))
        });
        let weights = MoeWeights {
            router: self.router.data(),
            router_bias: self.router_bias.as_ref().map(HostTensor::data),
            correction_bias: self.correction_bias.as_ref().map(HostTensor::data),
            experts: MlpWeights {
                biases,
                ..mlp(&self.experts.gate, &self.experts.up, &self.experts.down)
            },
            shared,
        };
        self.config.init(weights, mesh, device)
    }
}

fn mlp<'a>(gate: &'a HostTensor, up: &'a HostTensor, down: &'a HostTensor) -> MlpWeights<'a> {
    MlpWeights {
        gate: gate.data(),
        up: up.data(),
        down: down.data(),
        biases: None,
    }
}

fn score(router: &Router) -> RouterScore {
    match *router {
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
    }
}

fn config(model: &ModelConfig, layer: usize) -> MoeConfig {
    let activation = match model.activation {
        Activation::Swiglu => GluActivation::Swiglu,
        Activation::ClampedSwiglu { alpha, limit } => GluActivation::ClampedSwiglu { alpha, limit },
    };
    let shared = model.shared_expert.map(|shared| SharedConfig {
        intermediate: shared.intermediate_size,
        gated: shared.gated,
        overlap: false,
    });
    MoeConfig::new(
        format!("model.layers.{layer}.mlp"),
        model.hidden_size,
        model.moe_intermediate_size,
        model.num_experts,
        model.num_experts_per_tok,
    )
    .with_score(score(&model.router))
    .with_activation(activation)
    .with_shared(shared)
}
