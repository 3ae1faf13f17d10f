//! Adapters on a model of one's own: `bring-your-own [ETP] [FOLDER]`.

mod model;

use std::path::Path;

use anyhow::Result;
use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn_moe_lora::prelude::*;
use model::Model;

type B = Autodiff<Flex>;
const STEPS: usize = 20;

// ANCHOR: train
/// Trains on this rank's tokens and gives their losses, step by step.
fn train(config: &ModelConfig, mesh: &Mesh<B>, folder: &Path) -> Result<Vec<f32>> {
    let device = Default::default();
    let mut model = Model::load(config, mesh, &device)?.no_grad();
    let targets = Targets::new(["experts.gate_up_proj", "experts.down_proj"]);
    let report = model.add_adapters(&targets, &LoraConfig::new(8, 16.0), &device)?;
    if mesh.rank() == 0 {
        print!("{report}");
    }
    // The ranks' losses add up: each has the mean over its own tokens, divided by the ranks.
    let ranks = mesh.topology().world_size();
    let batch = Tensor::arange(0..config.vocab_size as i64, &device);
    let tokens = batch.chunk(ranks, 0)[mesh.rank()].clone();
    let next = (tokens.clone() * 5 + 3).remainder_scalar(config.vocab_size as i32);
    let cross_entropy = CrossEntropyLossConfig::new().init(&device);
    let (mut optimizer, mut losses) = (AdamWConfig::new().init(), Vec::new());
    for step in 0..STEPS {
        let logits = model.forward(tokens.clone(), mesh);
        let loss = cross_entropy.forward(logits, next.clone()) / ranks as f32;
        losses.push(loss.clone().into_scalar());
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = sync_gradients(&model.trained_weights(), grads, mesh);
        if step == 0 {
            check_gradients(&model.trained_weights(), &grads)?;
        }
        let (grads, _) = clip_gradients(&model.trained_weights(), grads, mesh, 1.0)?;
        model = optimizer.step(1e-2, model, grads);
    }
    let weights = model.trained_weights();
    save_checkpoint(folder, STEPS as u64, &weights, &optimizer, mesh)?;
    Ok(losses)
}
// ANCHOR_END: train

// ANCHOR: run
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let etp = args.next().map_or(Ok(2), |etp| etp.parse())?;
    let out = args.next().unwrap_or("target/bring_your_own".into());
    let [saved, peft] = ["saved", "peft"].map(|name| Path::new(&out).join(name));

    let config = ModelConfig::read(Path::new(env!("CARGO_MANIFEST_DIR")))?;
    let topology = TopologyConfig::new(etp).with_etp(etp).init()?;
    let ranks = MockWorld::new(etp)
        .run_result(|rank| train(&config, &Mesh::new(topology, &rank)?, &saved))?;
    let loss = |step: usize| ranks.iter().map(|losses| losses[step]).sum::<f32>();
    println!("loss {:.4} -> {:.4}", loss(0), loss(STEPS - 1));

    let adapter = PeftAdapter::from_checkpoint(&Checkpoint::open(&saved)?)?;
    adapter.write(&peft, &config, PeftLayout::Stacked, "my/model")?;
    println!("for PEFT: {}", peft.display());
    Ok(())
}
// ANCHOR_END: run
