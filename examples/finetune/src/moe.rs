//! The MoE blocks of one rank.

use anyhow::{Context, Result, ensure};
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn_moe_lora::adapters::{AdapterBackend, TrainedWeight};
use burn_moe_lora::experts::{
    GateUpTargets, MlpWeights, MoeConfig, MoeLayer, MoeWeights, RouterScore, SharedConfig,
};
use burn_moe_lora::interchange::{HostTensor, HubModel, ModelConfig};
use burn_moe_lora::parallel::{Mesh, ParallelBackend};

/// The MoE block of every layer: frozen weights and the adapters on them, the only thing that is trained.
#[derive(Module, Debug)]
pub struct MoeBlocks<B: Backend> {
    /// One block a layer.
    pub layers: Vec<MoeLayer<B>>,
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
        let layers = 0..hub.config().num_hidden_layers;
        Ok(Self {
            layers: layers
                .map(|layer| load_layer(hub, layer, overlap, mesh, device))
                .collect::<Result<_>>()?,
        })
    }
}

impl<B: Backend> MoeBlocks<B> {
    /// Paths of the routed experts' linears, layer by layer.
    ///
    /// Those of shared experts are left out, as the files of PEFT adapters written here hold none for them.
    pub fn targets(&self, gate_up: GateUpTargets) -> Vec<String> {
        let layers = self.layers.iter();
        layers
            .flat_map(|layer| layer.experts.targets(gate_up))
            .collect()
    }

    /// The factors of every adapter, in an order that is the same on every rank.
    pub fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        let layers = self.layers.iter();
        layers.flat_map(MoeLayer::trained_weights).collect()
    }
}

impl<B: AdapterBackend> MoeBlocks<B> {
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
    let path = format!("model.layers.{layer}.mlp");
    let hidden = config.hidden_size;
    let shared_size = config.shared_expert_intermediate_size;

    let experts = hub.expert_weights(layer)?;
    let router = matrix(hub, &format!("{path}.gate"), [config.num_experts, hidden])?;
    let shared = shared_size
        .map(|size| SharedTensors::read(hub, &path, size))
        .transpose()?;
    let block =
        moe_config(config, &path).with_shared(shared_size.map(|intermediate| SharedConfig {
            intermediate,
            gated: true,
            overlap,
        }));
    let weights = MoeWeights {
        router: router.data(),
        experts: MlpWeights {
            gate: experts.gate.data(),
            up: experts.up.data(),
            down: experts.down.data(),
            biases: None,
        },
        shared: shared.as_ref().map(SharedTensors::weights),
        ..Default::default()
    };
    Ok(block.init(weights, mesh, device)?)
}

fn moe_config(config: &ModelConfig, path: &str) -> MoeConfig {
    let renormalize = config.norm_topk_prob;
    MoeConfig::new(
        path,
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
    )
    .with_score(RouterScore::SoftmaxThenTopK { renormalize })
}

/// The shared expert of a layer and its gate.
struct SharedTensors {
    gate_proj: HostTensor,
    up_proj: HostTensor,
    down_proj: HostTensor,
    /// `[1, H]`.
    gate: HostTensor,
}

impl SharedTensors {
    fn read(hub: &HubModel, path: &str, size: usize) -> Result<Self> {
        let hidden = hub.config().hidden_size;
        let part = |name: &str, shape| matrix(hub, &format!("{path}.{name}"), shape);
        Ok(Self {
            gate_proj: part("shared_expert.gate_proj", [size, hidden])?,
            up_proj: part("shared_expert.up_proj", [size, hidden])?,
            down_proj: part("shared_expert.down_proj", [hidden, size])?,
            gate: part("shared_expert_gate", [1, hidden])?,
        })
    }

    fn weights(&self) -> (MlpWeights<'_>, Option<&[f32]>) {
        let mlp = MlpWeights {
            gate: self.gate_proj.data(),
            up: self.up_proj.data(),
            down: self.down_proj.data(),
            biases: None,
        };
        (mlp, Some(self.gate.data()))
    }
}

/// Reads `{name}.weight`, which must have this shape.
fn matrix(hub: &HubModel, name: &str, shape: [usize; 2]) -> Result<HostTensor> {
    let name = format!("{name}.weight");
    let found = hub
        .shape(&name)
        .with_context(|| format!("cannot read weight '{name}'"))?;
    ensure!(
        found == shape,
        "weight '{name}' has shape {found:?} but config.json implies {shape:?} \
         (check that the two files belong to one model)"
    );
    hub.tensor(&name)
        .with_context(|| format!("cannot read weight '{name}'"))
}
