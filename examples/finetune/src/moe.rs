//! The MoE blocks of one rank.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn_moe_lora::HubLayer;
use burn_moe_lora::adapters::{Adaptable, AdapterBackend, AdapterNorm, AnyLinear, adapter_norms};
use burn_moe_lora::experts::MoeLayer;
use burn_moe_lora::interchange::HubModel;
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
        // ANCHOR: load
        let load = |layer: &usize| -> Result<MoeLayer<B>> {
            let mut layer = HubLayer::read(hub, *layer)?;
            layer.config = layer.config.with_overlap(overlap);
            Ok(layer.init(mesh, device)?)
        };
        // ANCHOR_END: load
        Ok(Self {
            layers: numbers.iter().map(load).collect::<Result<_>>()?,
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
