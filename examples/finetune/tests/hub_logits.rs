//! The dense layers around a slow MoE block give the logits and losses recorded for hub models.

mod files;
mod oracle;

use std::path::Path;

use anyhow::Context;
use burn::backend::Flex;
use burn::tensor::{Int, Tensor};
use files::{Tensors, asset, fixture, read_json, read_tensors};
use finetune::loss::next_byte_loss;
use finetune::model::CausalLm;
use finetune::text::Batch;
use oracle::{SlowMoe, dense_config};

struct Model {
    dense: CausalLm<Flex>,
    blocks: Vec<SlowMoe>,
}

impl Model {
    fn load(folder: &Path, adapter: Option<&Path>) -> Self {
        let config = read_json(&folder.join("config.json"));
        let weights = read_tensors(&folder.join("model.safetensors"));
        let dense = CausalLm::load(&dense_config(&config), &Default::default(), |name| {
            weights.get(name).cloned().context("no such tensor")
        })
        .unwrap();
        let blocks = (0..dense.config().layers)
            .map(|layer| SlowMoe::of(&weights, &config, layer, adapter))
            .collect();
        Self { dense, blocks }
    }

    fn logits(&self, ids: Tensor<Flex, 2, Int>) -> Tensor<Flex, 3> {
        self.dense
            .forward_with(ids, |layer, tokens| self.blocks[layer].forward(tokens))
    }
}

/// Largest difference relative to the largest expected value.
fn relative_error(found: Tensor<Flex, 3>, reference: &Tensors, name: &str) -> f32 {
    let (shape, expected) = &reference[name];
    assert_eq!(found.dims().as_slice(), shape.as_slice());
    let found = found.into_data().to_vec::<f32>().unwrap();
    files::relative_error(&found, expected)
}

fn check_adapted_logits(kind: &str) {
    let folder = fixture(&format!("hf/{kind}"));
    let model = Model::load(&folder, Some(&folder.join("adapter")));
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let ids = Batch::new((0..13).collect(), 13).unwrap();
    let logits = model.logits(ids.tensor(&Default::default()));
    let error = relative_error(logits, &reference, "logits_adapted");
    println!("{kind}: {error:.2e}");
    assert!(error <= 1e-5, "{kind} differs by {error}");

    // The same input without the adapter must miss, or the comparison could not see the adapter at all.
    let base = Model::load(&folder, None);
    let missed = relative_error(
        base.logits(ids.tensor(&Default::default())),
        &reference,
        "logits_adapted",
    );
    assert!(
        missed > 1e-3,
        "{kind} without its adapter differs by only {missed}"
    );
}

#[test]
fn qwen3_moe_logits_with_the_adapter() {
    check_adapted_logits("qwen3_moe");
}

#[test]
fn qwen2_moe_logits_with_the_adapter() {
    check_adapted_logits("qwen2_moe");
}

#[test]
fn olmoe_logits_with_the_adapter() {
    check_adapted_logits("olmoe");
}

fn recorded_batch(reference: &Tensors, index: usize) -> Batch {
    let (shape, ids) = &reference["input_ids"];
    let count = shape[1] * shape[2];
    let ids = &ids[index * count..][..count];
    Batch::new(ids.iter().map(|&id| id as i32).collect(), shape[2]).unwrap()
}

#[test]
fn constitution_logits_without_an_adapter() {
    let folder = asset("qwen3-moe-constitution");
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let model = Model::load(&folder, None);
    let ids = recorded_batch(&reference, 0).tensor(&Default::default());
    let error = relative_error(model.logits(ids), &reference, "logits_base_batch0");
    println!("constitution: {error:.2e}");
    assert!(error <= 1e-5, "logits differ by {error}");
}

#[test]
fn constitution_loss_at_the_start_of_training() {
    let folder = asset("qwen3-moe-constitution");
    let reference = read_tensors(&folder.join("reference.safetensors"));
    let losses = read_json(&folder.join("reference.json"));
    let expected = losses["runs"]["sgd"][0].as_f64().unwrap();
    let model = Model::load(&folder, Some(&folder.join("adapter_start")));
    let batch = recorded_batch(&reference, 0);
    let ids = batch.tensor::<Flex>(&Default::default());
    let loss = next_byte_loss(model.logits(ids.clone()), ids);
    assert_eq!(loss.count, batch.predicted());
    let total = loss.count;
    let found = f64::from(loss.over(total).into_scalar());
    assert!(
        (found - expected).abs() <= 1e-5,
        "loss is {found}, recorded {expected}"
    );
}

#[test]
fn constitution_parameters_are_all_counted() {
    let folder = asset("qwen3-moe-constitution");
    let weights = read_tensors(&folder.join("model.safetensors"));
    let dense: usize = weights
        .iter()
        .filter(|(name, _)| !name.contains(".mlp."))
        .map(|(_, (_, values))| values.len())
        .sum();
    assert_eq!(Model::load(&folder, None).dense.parameter_count(), dense);
}
