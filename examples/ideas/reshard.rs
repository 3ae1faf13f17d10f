//! Saved by four ranks at ep = 2, etp = 2, loaded by ranks of other topologies, and written anew for one.

use std::path::Path;

use burn::backend::{Autodiff, Flex};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::checkpoint::{Checkpoint, GroupSizes, Strictness, reshard};
use burn_moe_lora::prelude::*;
use moe_lora_examples::{HIDDEN, Result, assert_close, moe_layer, noise};

type B = Autodiff<Flex>;

const TOKENS: usize = 8;

fn layer(mesh: &Mesh<B>) -> Result<MoeLayer<B>> {
    let mut layer = moe_layer(mesh)?;
    let targets = Targets::new(["*"]);
    layer.add_adapters(&targets, &LoraConfig::new(4, 8.0), &Default::default())?;
    Ok(layer)
}

/// This rank's tokens.
fn tokens(mesh: &Mesh<B>) -> Tensor<B, 2> {
    let own = TOKENS / mesh.topology().world_size();
    let first = mesh.rank() * own * HIDDEN;
    let own_values = noise(5, TOKENS * HIDDEN)[first..first + own * HIDDEN].to_vec();
    Tensor::from_data(
        TensorData::new(own_values, [own, HIDDEN]),
        &Default::default(),
    )
}

fn values(y: Tensor<B, 2>) -> Vec<f32> {
    y.into_data().to_vec().unwrap()
}

/// Trains a step on four ranks, saves, and returns what the layer then gives for the whole batch.
fn save(folder: &Path) -> Result<Vec<f32>> {
    let topology = TopologyConfig::new(4).with_ep(2).with_etp(2).init()?;
    let outputs = MockWorld::new(4).run_result(|rank| -> Result<_> {
        let mesh = Mesh::<B>::new(topology, &rank)?;
        let mut layer = layer(&mesh)?;
        let mut optimizer = AdamWConfig::new().init();
        let loss = layer.forward(tokens(&mesh), &mesh).powi_scalar(2).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        let grads = sync_gradients(&layer.trained_weights(), grads, &mesh);
        layer = optimizer.step(0.01, layer, grads);
        // ANCHOR: save
        save_checkpoint(folder, 1, &layer.trained_weights(), &optimizer, &mesh)?;
        // ANCHOR_END: save
        Ok(values(layer.forward(tokens(&mesh), &mesh)))
    })?;
    Ok(outputs.concat())
}

/// What ranks at `ep` and `etp` give that load the checkpoint.
fn load(folder: &Path, ep: usize, etp: usize) -> Result<Vec<f32>> {
    let (world, topology) = (ep * etp, TopologyConfig::new(ep * etp));
    let topology = topology.with_ep(ep).with_etp(etp).init()?;
    let outputs = MockWorld::new(world).run_result(|rank| -> Result<_> {
        let mesh = Mesh::<B>::new(topology, &rank)?;
        let (layer, mut optimizer) = (layer(&mesh)?, AdamWConfig::new().init());
        // ANCHOR: load
        let checkpoint = Checkpoint::open(folder)?;
        let (layer, report) = load_checkpoint(
            &checkpoint,
            layer,
            |layer| layer.trained_weights(),
            &mut optimizer,
            &mesh,
            Strictness::Exact,
        )?;
        if mesh.rank() == 0 {
            println!("ep {ep}, etp {etp}: {report}");
        }
        // ANCHOR_END: load
        Ok(values(layer.forward(tokens(&mesh), &mesh)))
    })?;
    Ok(outputs.concat())
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let saved = folder.path().join("saved");
    let expected = save(&saved)?;
    for (ep, etp) in [(2, 2), (1, 1), (4, 1), (1, 4), (2, 1)] {
        assert_close(&load(&saved, ep, etp)?, &expected);
    }

    let moved = folder.path().join("moved");
    // ANCHOR: reshard
    let checkpoint = Checkpoint::open(&saved)?;
    reshard(&checkpoint, &moved, GroupSizes::new(4, 1), |_progress| {})?;
    // ANCHOR_END: reshard
    let moved = Checkpoint::open(&moved)?;
    for entry in &checkpoint.manifest().tensors {
        let key = &entry.layout.key;
        assert_eq!(moved.full(key)?.bytes, checkpoint.full(key)?.bytes); // to the bit
    }
    Ok(())
}
