//! burn-train's `Learner` trains the adapters of an MoE layer on four ranks: metrics over all ranks, records
//! without the base, and one type parameter for the backend.
//!
//! ```sh
//! cargo run -p learner
//! cargo run -p learner --features wgpu
//! cargo run --release -p learner --features cuda
//! ```

use std::path::Path;

use burn::data::dataloader::DataLoaderBuilder;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn::train::Learner;
use burn_moe_lora::experts::TokenCounter;
use burn_moe_lora::prelude::*;
use burn_moe_lora::train::Batches;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const RANKS: usize = 4;
const HIDDEN: usize = 16;
const WIDE: usize = 32;
const EXPERTS: usize = 8;
/// Tokens of a step on each rank.
const TOKENS: usize = 16;

// ANCHOR: model
/// A model is a burn module; here one layer, which learns to turn its input around.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    layer: MoeLayer<B>,
}

impl<B: AdapterBackend> Finetune<B> for Model<B> {
    type Batch = Tensor<B, 2>;

    fn loss(&self, x: Tensor<B, 2>, mesh: &Mesh<B>) -> Tensor<B, 1> {
        let y = self.layer.forward(x.clone(), mesh);
        let all = (RANKS * TOKENS * HIDDEN) as f64; // the mean over all ranks
        (y + x).powi_scalar(2).sum().div_scalar(all)
    }

    fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        self.layer.trained_weights()
    }

    fn counters(&self) -> Vec<&TokenCounter> {
        vec![self.layer.router.counter()]
    }
}
// ANCHOR_END: model

/// Made-up values in -1..1, the same in every run.
fn noise(seed: usize, count: usize) -> Vec<f32> {
    let at = |i: usize| ((i * 37 + seed * 101 + i / 7 * 13) % 64) as f32 / 32.0 - 1.0;
    (0..count).map(at).collect()
}

fn model<B: AdapterBackend>(mesh: &Mesh<B>, device: &B::Device) -> Result<Model<B>> {
    let router = noise(1, EXPERTS * HIDDEN);
    let small = |seed| noise(seed, EXPERTS * WIDE * HIDDEN);
    let [gate, up, down] = [2, 3, 4].map(|seed| small(seed).iter().map(|w| w / 4.0).collect());
    let [gate, up, down]: &[Vec<f32>; 3] = &[gate, up, down];
    let weights = MoeWeights {
        router: &router,
        experts: MlpWeights {
            gate,
            up,
            down,
            biases: None,
        },
        ..Default::default()
    };
    let mut layer = MoeConfig::new("mlp", HIDDEN, WIDE, EXPERTS, 2).init(weights, mesh, device)?;
    layer.add_adapters(&Targets::new(["*"]), &LoraConfig::new(8, 16.0), device)?;
    Ok(Model { layer })
}

// ANCHOR: data
/// Makes the batch of one rank from the number of a step: each rank has its own tokens.
struct Own {
    rank: usize,
}

impl<B: Backend> Batcher<B, usize, Tensor<B, 2>> for Own {
    fn batch(&self, steps: Vec<usize>, device: &B::Device) -> Tensor<B, 2> {
        let values = noise(10 + steps[0] * RANKS + self.rank, TOKENS * HIDDEN);
        Tensor::from_data(TensorData::new(values, [TOKENS, HIDDEN]), device)
    }
}

fn batches<B: AdapterBackend>(rank: usize, steps: std::ops::Range<usize>) -> Batches<B, Model<B>> {
    let steps = InMemDataset::new(steps.collect());
    DataLoaderBuilder::new(Own { rank })
        .batch_size(1)
        .build(steps)
}
// ANCHOR_END: data

// ANCHOR: run
/// Trains on the ranks of a mock world, each a thread, and returns the adapters' norm on each.
fn run<B: TrainBackend>(folder: &Path) -> Result<Vec<f64>> {
    let topology = TopologyConfig::new(RANKS).with_ep(2).with_etp(2).init()?;
    let norms = MockWorld::new(RANKS).run_result(|rank| -> Result<_> {
        let (mesh, device) = (Mesh::<B>::new(topology, &rank)?, Default::default());
        let model = Adapted::new(model(&mesh, &device)?, mesh.clone()).with_max_norm(1.0);

        let mut training = model
            .training(
                folder,
                batches(mesh.rank(), 0..8),
                batches(mesh.rank(), 8..10),
            )
            .num_epochs(4)
            .with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
            .metrics((
                AdapterMetric::loss(),
                AdapterMetric::idle_experts(),
                AdapterMetric::imbalance(),
                AdapterMetric::adapter_norm(),
            ))
            .metric_train_numeric(AdapterMetric::gradient_norm());
        for expert in 0..EXPERTS {
            let norm = AdapterMetric::adapter_norm_of_expert("mlp.experts.down_proj", expert);
            training = training.metric_train_numeric(norm);
            training = training.metric_train_numeric(AdapterMetric::tokens_of_expert(0, expert));
        }
        let learner = Learner::new(model, AdamWConfig::new().init(), 1e-2);
        let trained = training.launch(learner).model;

        let norms = adapter_norms(&trained.model.trained_weights(), trained.mesh());
        Ok(norms.iter().map(|norm| norm.total()).sum())
    })?;
    Ok(norms)
}
// ANCHOR_END: run

// ANCHOR: backend
#[cfg(feature = "cuda")]
type Device = burn::backend::Cuda;
#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
type Device = burn::backend::Wgpu;
#[cfg(not(any(feature = "wgpu", feature = "cuda")))]
type Device = burn::backend::Flex;

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let norms = run::<burn::backend::Autodiff<Device>>(folder.path())?;
    // ANCHOR_END: backend
    // Every rank has the same number, above zero: B has left its start.
    assert!(norms[0] > 0.0 && norms.iter().all(|norm| *norm == norms[0]));
    let losses = losses(folder.path(), 1)?.zip(losses(folder.path(), 4)?);
    for (first, last) in losses {
        assert!(
            last < first,
            "the loss of a held-out step went from {first} to {last}"
        );
    }
    println!("norm of the adapters: {}", norms[0]);
    Ok(())
}

/// The losses of the held-out steps after an epoch, from the file that burn-train keeps of each metric.
fn losses(folder: &Path, epoch: usize) -> Result<impl Iterator<Item = f64>> {
    let file = folder.join(format!("rank-0/valid/epoch-{epoch}/Loss.log"));
    let text = std::fs::read_to_string(file)?;
    let values = text
        .lines()
        .map(|line| line.split(',').next().unwrap_or(line).parse());
    Ok(values
        .collect::<std::result::Result<Vec<f64>, _>>()?
        .into_iter())
}
