//! Adapters as the tensors of a checkpoint: what an import writes, and what comes back.

mod folders;

use folders::{CONSTITUTION, assert_contains, noise, noise_adapter, noise_pair, open};
use moe_lora_checkpoint::{
    AdapterActivation, AdapterEntry, Axis, Checkpoint, Dtype, GroupSizes, Save, TensorLayout,
};
use moe_lora_interchange::{GateUp, InterchangeError, ModelConfig, PeftAdapter};
use std::collections::BTreeMap;
use tempfile::TempDir;

const RANK: usize = 4;

fn config() -> ModelConfig {
    open(CONSTITUTION).config().clone()
}

/// Gate and up apart on the first layer and fused on the others.
fn adapter(config: &ModelConfig) -> PeftAdapter {
    let mut adapter = noise_adapter(config, RANK);
    let shape = [config.moe_intermediate_size, config.hidden_size];
    let pair = |seed| noise_pair(config.num_experts, shape, RANK, seed);
    let separate = GateUp::Separate {
        gate: pair(50),
        up: pair(60),
    };
    adapter.layers.get_mut(&0).unwrap().gate_up = Some(separate);
    adapter
}

fn imported(adapter: &PeftAdapter, config: &ModelConfig) -> (TempDir, Checkpoint) {
    let folder = TempDir::new().unwrap();
    adapter.write_checkpoint(folder.path(), config).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    (folder, checkpoint)
}

/// The error of reading a checkpoint whose adapters have other settings.
fn refused(change: impl FnOnce(&mut BTreeMap<String, AdapterEntry>)) -> InterchangeError {
    let config = config();
    let (folder, checkpoint) = imported(&adapter(&config), &config);
    let place = GroupSizes::new(1, 1).place(0).unwrap();
    let save = Save::begin(folder.path(), place, 0).unwrap();
    let manifest = checkpoint.manifest();
    let layouts = manifest.tensors.iter().map(|entry| entry.layout.clone());
    let layouts = Vec::from_iter(layouts);
    save.write(&layouts, |shard| Ok(checkpoint.read(shard)?.into()))
        .unwrap();
    let mut adapters = manifest.adapters.clone();
    change(&mut adapters);
    save.commit(adapters).unwrap();
    let changed = Checkpoint::open(folder.path()).unwrap();
    PeftAdapter::from_checkpoint(&changed).unwrap_err()
}

#[test]
fn adapters_come_back_from_a_checkpoint_with_their_scaling() {
    let config = config();
    for rslora in [false, true] {
        let mut adapter = adapter(&config);
        adapter.rslora = rslora;
        let (_folder, checkpoint) = imported(&adapter, &config);
        let mut entries = checkpoint.manifest().adapters.values();
        assert!(entries.all(|entry| entry.rslora == rslora));
        assert_eq!(PeftAdapter::from_checkpoint(&checkpoint).unwrap(), adapter);
    }
}

#[test]
fn linears_of_mixed_scaling_are_refused() {
    const LINEAR: &str = "model.layers.1.mlp.experts.gate_up_proj";
    let error = refused(|adapters| adapters.get_mut(LINEAR).unwrap().rslora = true);
    assert!(
        matches!(&error, InterchangeError::MixedScales { linear } if linear == LINEAR),
        "{error}"
    );
    assert_contains(&error.to_string(), &[LINEAR, "rank-stabilised"]);
}

#[test]
fn a_function_between_the_factors_is_refused() {
    const LINEAR: &str = "model.layers.1.mlp.experts.down_proj";
    for activation in [
        AdapterActivation::Silu,
        AdapterActivation::Gelu,
        AdapterActivation::Relu,
    ] {
        let error = refused(|adapters| adapters.get_mut(LINEAR).unwrap().activation = activation);
        assert!(
            matches!(&error, InterchangeError::Nonlinear { linear } if linear == LINEAR),
            "{error}"
        );
        assert_contains(&error.to_string(), &[LINEAR, "a function between A and B"]);
    }
}

#[test]
fn an_import_has_the_layouts_of_training() {
    let config = config();
    let (experts, hidden, ffn) = (
        config.num_experts,
        config.hidden_size,
        config.moe_intermediate_size,
    );
    let mut adapter = adapter(&config);
    for pair in adapter.layers.values_mut().flat_map(|l| l.pairs_mut()) {
        let rows = pair.1.b.shape()[1];
        pair.1.magnitude = Some(noise([experts, rows], 3));
    }
    let (_folder, checkpoint) = imported(&adapter, &config);
    let of_experts = |shape: &[usize]| {
        TensorLayout::new("", Dtype::F32, [&[experts], shape].concat()).with_axis(0, Axis::Ep)
    };
    let cut = |shape: &[usize], axis| of_experts(shape).with_axis(axis, Axis::ExpertTp);
    let (r, a, b, m) = (RANK, "lora_A", "lora_B", "lora_magnitude_vector");
    for (linear, factor, expected) in [
        ("1.mlp.experts.gate_up_proj", a, cut(&[r, hidden], 1)),
        (
            "1.mlp.experts.gate_up_proj",
            b,
            cut(&[2 * ffn, r], 1).with_fragments(1, 2),
        ),
        (
            "1.mlp.experts.gate_up_proj",
            m,
            cut(&[2 * ffn], 1).with_fragments(1, 2),
        ),
        ("0.mlp.experts.gate_proj", a, cut(&[r, hidden], 1)),
        ("0.mlp.experts.gate_proj", b, cut(&[ffn, r], 1)),
        ("0.mlp.experts.gate_proj", m, cut(&[ffn], 1)),
        ("0.mlp.experts.up_proj", a, cut(&[r, hidden], 1)),
        ("0.mlp.experts.up_proj", b, cut(&[ffn, r], 1)),
        ("1.mlp.experts.down_proj", a, cut(&[r, ffn], 2)),
        ("1.mlp.experts.down_proj", b, cut(&[hidden, r], 1)),
        ("1.mlp.experts.down_proj", m, cut(&[hidden], 1)),
    ] {
        let key = format!("model.layers.{linear}.{factor}");
        let found = &checkpoint.manifest().tensor(&key).unwrap().layout;
        assert_eq!(*found, TensorLayout { key, ..expected });
    }
    assert_eq!(PeftAdapter::from_checkpoint(&checkpoint).unwrap(), adapter);
}
