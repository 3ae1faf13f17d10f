//! A whole MoE layer, with dropout: one step gives the same loss, norm and next loss at every topology.

use burn::backend::{Autodiff, Flex};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::adapters::GradientPlan;
use burn_moe_lora::prelude::*;
use moe_lora_examples::{Result, assert_close, noise};

type B = Autodiff<Flex>;

const HIDDEN: usize = 8;
const WIDE: usize = 16;
const EXPERTS: usize = 4;
const TOKENS: usize = 8;

// ANCHOR: layer
fn layer(mesh: &Mesh<B>) -> Result<MoeLayer<B>> {
    let device = Default::default();
    let router = noise(1, EXPERTS * HIDDEN);
    let [gate, up, down] = [2, 3, 4].map(|seed| noise(seed, EXPERTS * WIDE * HIDDEN));
    let experts = MlpWeights {
        gate: &gate,
        up: &up,
        down: &down,
        biases: None,
    };
    let weights = MoeWeights {
        router: &router,
        experts,
        ..Default::default()
    };
    let mut layer = MoeConfig::new("mlp", HIDDEN, WIDE, EXPERTS, 2).init(weights, mesh, &device)?;

    let targets = Targets::new(["experts.gate_up_proj", "experts.down_proj"]);
    let config = LoraConfig::new(4, 8.0)
        .with_init_b(Init::Xavier)
        .with_dropout(Dropout::before_a(0.25));
    layer.add_adapters(&targets, &config, &device)?;
    Ok(layer)
}
// ANCHOR_END: layer

/// Loss, gradient norm and the loss after the step, as rank 0 has them.
fn step(world: usize, ep: usize, etp: usize) -> Result<[f32; 3]> {
    // ANCHOR: mesh
    let topology = TopologyConfig::new(world)
        .with_ep(ep)
        .with_etp(etp)
        .init()?;
    let outcomes = MockWorld::new(world).run_result(|rank| -> Result<_> {
        let mesh = Mesh::<B>::new(topology, &rank)?;
        // ANCHOR_END: mesh
        let mut layer = layer(&mesh)?;
        // This rank's own tokens of the batch.
        let (first, count) = (mesh.rank() * TOKENS / world, TOKENS / world);
        let batch = noise(5, TOKENS * HIDDEN);
        let own = batch[first * HIDDEN..][..count * HIDDEN].to_vec();
        let x = Tensor::from_data(TensorData::new(own, [count, HIDDEN]), &Default::default());

        // ANCHOR: step
        let ids = TokenIds::new(0, first as u64..(first + count) as u64); // step 0, global ids
        let loss = layer
            .forward_tokens(x.clone(), &ids, &mesh)
            .powi_scalar(2)
            .sum();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        let grads = sync_gradients(&layer.trained_weights(), grads, &mesh);
        let (grads, norm) = clip_gradients(&layer.trained_weights(), grads, &mesh, 1.0)?;
        layer = SgdConfig::new().init().step(0.1, layer, grads);
        // ANCHOR_END: step

        let after = layer.forward_tokens(x, &ids, &mesh).powi_scalar(2).sum();
        if (world, etp) == (4, 1) {
            // ANCHOR: plan
            let plan = GradientPlan::of(&layer.trained_weights(), mesh.topology());
            assert_eq!(plan.to_string(), include_str!("gradient_plan.txt"));
            // ANCHOR_END: plan
        }
        Ok([loss.into_scalar(), norm as f32, after.into_scalar()])
    })?;
    let total = |at: usize| outcomes.iter().map(|outcome| outcome[at]).sum();
    Ok([total(0), outcomes[0][1], total(2)])
}

fn main() -> Result<()> {
    let alone = step(1, 1, 1)?;
    for (world, ep, etp) in [(2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 2, 1)] {
        let [loss, norm, after] = step(world, ep, etp)?;
        assert_close(&[loss, norm, after], &alone);
    }
    println!("loss, norm, loss after the step: {alone:?}");
    Ok(())
}
