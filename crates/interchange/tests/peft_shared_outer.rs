//! Adapters whose factors on the hidden side are shared by all experts.

mod folders;

use folders::{
    CONSTITUTION, EXPERTS, PER_EXPERT, SETTINGS, Tensors, adapter_error, assert_contains, bytes,
    deltas, edit, floats, noise, open, set, settings, tensors,
};
use moe_lora_checkpoint::{AdapterEntry, AdapterSharing, Axis, Checkpoint, Dtype, TensorLayout};
use moe_lora_interchange::{
    ExpertAdapter, FactorPair, GateUp, ModelConfig, PeftAdapter, PeftLayout,
};
use serde_json::json;
use tempfile::TempDir;

const RANK: usize = 2;

/// On gate and up together, or on each of them, and on down.
fn adapter(config: &ModelConfig, fused: bool) -> PeftAdapter {
    let (hidden, ffn, experts) = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
    );
    let fc1 = |rows: usize, seed: u32| {
        let (a, b) = (
            noise([1, RANK, hidden], seed),
            noise([experts, rows, RANK], seed + 1),
        );
        FactorPair::new(a, b, 4.0).unwrap()
    };
    let layer = |layer: u32| ExpertAdapter {
        gate_up: Some(match fused {
            true => GateUp::Fused(fc1(2 * ffn, 20 * layer)),
            false => GateUp::Separate {
                gate: fc1(ffn, 20 * layer),
                up: fc1(ffn, 20 * layer + 5),
            },
        }),
        down: Some({
            let (a, b) = (
                noise([experts, RANK, ffn], 77 + layer),
                noise([1, hidden, RANK], 78),
            );
            FactorPair::new(a, b, 4.0).unwrap()
        }),
    };
    PeftAdapter {
        rslora: false,
        layers: (0..config.num_hidden_layers)
            .map(|l| (l, layer(l as u32)))
            .collect(),
    }
}

fn write(adapter: &PeftAdapter, config: &ModelConfig) -> TempDir {
    let folder = TempDir::new().unwrap();
    adapter
        .write(folder.path(), config, PeftLayout::SharedOuter, "")
        .unwrap();
    folder
}

fn config() -> ModelConfig {
    open(CONSTITUTION).config().clone()
}

#[test]
fn shared_factors_have_a_leading_axis_of_one() {
    let config = config();
    let (hidden, ffn, experts) = (
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
    );
    for (fused, targets) in [
        (
            true,
            json!(["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]),
        ),
        (
            false,
            json!([
                "mlp.experts.down_proj",
                "mlp.experts.gate_proj",
                "mlp.experts.up_proj"
            ]),
        ),
    ] {
        let adapter = adapter(&config, fused);
        let folder = write(&adapter, &config);
        assert_eq!(PeftAdapter::read(folder.path(), &config).unwrap(), adapter);
        assert_eq!(settings(folder.path())["target_modules"], targets);
        assert_eq!(settings(folder.path())["target_parameters"], json!(null));

        let file = tensors(folder.path());
        let shape = |name: &str| file[&format!("{EXPERTS}.{name}.weight")].0.clone();
        assert_eq!(shape("down_proj.lora_A"), [experts, RANK, ffn]);
        assert_eq!(shape("down_proj.lora_B"), [1, hidden, RANK]);
        if fused {
            assert_eq!(shape("gate_up_proj.lora_A"), [1, RANK, hidden]);
            assert_eq!(shape("gate_up_proj.lora_B"), [experts, 2 * ffn, RANK]);
            assert_eq!(file.len(), 2 * 4);
        } else {
            assert_eq!(shape("up_proj.lora_A"), [1, RANK, hidden]);
            assert_eq!(shape("gate_proj.lora_B"), [experts, ffn, RANK]);
            assert_eq!(file.len(), 2 * 6);
        }
    }
}

/// As Megatron-Bridge writes models whose experts lie one by one: what is not shared is a tensor
/// for each of them.
fn number_experts(file: &mut Tensors) {
    for (projection, factor) in [("gate_proj", 'B'), ("up_proj", 'B'), ("down_proj", 'A')] {
        for layer in 0..2 {
            let experts = EXPERTS.replace("layers.0", &format!("layers.{layer}"));
            let name = |module: String| format!("{experts}.{module}.lora_{factor}.weight");
            let (shape, data) = file.remove(&name(projection.to_owned())).unwrap();
            let values = floats(&data);
            for (expert, values) in values.chunks(values.len() / shape[0]).enumerate() {
                let entry = (shape[1..].to_vec(), bytes(values));
                file.insert(name(format!("{expert}.{projection}")), entry);
            }
        }
    }
}

#[test]
fn experts_one_by_one_beside_the_shared_factor_are_read() {
    let config = config();
    let adapter = adapter(&config, false);
    let folder = write(&adapter, &config);
    edit(folder.path(), number_experts);
    let names = json!(["gate_proj", "up_proj", "down_proj"]);
    set(&folder.path().join(SETTINGS), "target_modules", Some(names));
    assert_eq!(PeftAdapter::read(folder.path(), &config).unwrap(), adapter);

    let lost = format!("{EXPERTS}.1.up_proj.lora_B.weight");
    edit(folder.path(), |file| drop(file.remove(&lost)));
    assert_contains(&adapter_error(&folder, &config), &["lacks", &lost]);
}

#[test]
fn expanded_adapters_have_the_same_deltas() {
    let config = config();
    for fused in [true, false] {
        let shared = adapter(&config, fused);
        let expanded = shared.expand(config.num_experts).unwrap();
        for (layer, own) in &shared.layers {
            let pairs = own.pairs().zip(expanded.layers[layer].pairs());
            for ((name, own), (_, expanded_pair)) in pairs {
                let experts = config.num_experts;
                assert_eq!(expanded_pair.a.shape()[0], experts);
                assert_eq!(expanded_pair.b.shape()[0], experts);
                assert_eq!(
                    deltas(&shared, own),
                    deltas(&expanded, expanded_pair),
                    "{name}"
                );
            }
        }
        let target = TempDir::new().unwrap();
        let layout = match fused {
            true => PeftLayout::Stacked,
            false => PeftLayout::PerExpert,
        };
        let refused = shared.write(target.path(), &config, layout, "");
        assert_contains(
            &refused.unwrap_err().to_string(),
            &[
                "a factor that the experts share",
                "PeftLayout::SharedOuter",
                "expand",
            ],
        );
        expanded.write(target.path(), &config, layout, "").unwrap();
        assert_eq!(PeftAdapter::read(target.path(), &config).unwrap(), expanded);

        let error = shared.expand(config.num_experts + 1).unwrap_err();
        assert_contains(
            &error.to_string(),
            &["shape [8,", "expected 1 or 9 experts"],
        );
    }
}

#[test]
fn shared_gate_and_up_fuse_exactly() {
    let config = config();
    let separate = adapter(&config, false);
    let fused = separate.fuse_gate_up().unwrap();
    let expanded = separate.expand(config.num_experts).unwrap().fuse_gate_up();
    assert_eq!(fused.expand(config.num_experts).unwrap(), expanded.unwrap());
    let folder = write(&fused, &config);
    assert_eq!(PeftAdapter::read(folder.path(), &config).unwrap(), fused);
}

#[test]
fn shared_factors_come_back_from_a_checkpoint_and_expand_to_those_of_each_expert() {
    let config = config();
    let (hidden, experts) = (config.hidden_size, config.num_experts);
    for fused in [true, false] {
        let shared = adapter(&config, fused);
        let folder = TempDir::new().unwrap();
        let manifest = shared.write_checkpoint(folder.path(), &config).unwrap();
        let outer = |entry: &AdapterEntry| entry.sharing == AdapterSharing::SharedOuter;
        assert!(manifest.adapters.values().all(outer));
        // No axis of experts, so that every expert parallel rank holds the factor.
        for (factor, shape) in [
            (
                format!("{}.lora_A", if fused { "gate_up_proj" } else { "up_proj" }),
                [RANK, hidden],
            ),
            ("down_proj.lora_B".to_owned(), [hidden, RANK]),
        ] {
            let key = format!("model.layers.1.mlp.experts.{factor}");
            let found = manifest.tensor(&key).unwrap().layout.clone();
            let expected = TensorLayout::new(key, Dtype::F32, shape).with_axis(0, Axis::ExpertTp);
            assert_eq!(found, expected);
        }

        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let back = PeftAdapter::from_checkpoint(&checkpoint).unwrap();
        assert_eq!(back, shared);
        for (name, pair) in back.layers.values().flat_map(|layer| layer.pairs()) {
            let leading = [pair.a.shape()[0], pair.b.shape()[0]];
            let expected = if name == "down" {
                [experts, 1]
            } else {
                [1, experts]
            };
            assert_eq!(leading, expected, "{name}");
        }
        let each = back.expand(experts).unwrap();
        let folder = TempDir::new().unwrap();
        let manifest = each.write_checkpoint(folder.path(), &config).unwrap();
        let own = |entry: &AdapterEntry| entry.sharing == AdapterSharing::PerExpert;
        assert!(manifest.adapters.values().all(own));
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        assert_eq!(PeftAdapter::from_checkpoint(&checkpoint).unwrap(), each);
        for (layer, own) in &shared.layers {
            let pairs = own.pairs().zip(each.layers[layer].pairs());
            for ((name, own), (_, of_each)) in pairs {
                let sizes = [of_each.a.shape()[0], of_each.b.shape()[0]];
                assert_eq!(sizes, [experts; 2]);
                assert_eq!(deltas(&shared, own), deltas(&each, of_each), "{name}");
            }
        }
    }
}

/// The error after one tensor of the first layer was replaced.
fn replaced(name: &str, shape: &[usize]) -> String {
    let config = config();
    let folder = write(&adapter(&config, true), &config);
    edit(folder.path(), |file| {
        let values = noise(shape, 0);
        let entry = (shape.to_vec(), bytes(values.data()));
        file.insert(format!("{EXPERTS}.{name}.weight"), entry)
            .unwrap();
    });
    adapter_error(&folder, &config)
}

#[test]
fn factors_of_other_experts_sides_or_ranks_are_refused() {
    let config = config();
    let (hidden, ffn) = (config.hidden_size, config.moe_intermediate_size);
    assert_eq!(config.num_experts, 8);
    // 8 against 4 experts, neither of which is shared.
    assert_contains(
        &replaced("gate_up_proj.lora_A", &[4, RANK, hidden]),
        &["gate_up_proj.lora_A", "[4, 2, 64], expected [1, 2, 64]"],
    );
    assert_contains(
        &replaced("gate_up_proj.lora_B", &[4, 2 * ffn, RANK]),
        &["gate_up_proj.lora_B", "[4, 96, 2], expected [8, 96, 2]"],
    );
    // The wrong side.
    assert_contains(
        &replaced("gate_up_proj.lora_A", &[8, RANK, hidden]),
        &["[8, 2, 64], expected [1, 2, 64]"],
    );
    assert_contains(
        &replaced("down_proj.lora_A", &[1, RANK, ffn]),
        &["[1, 2, 48], expected [8, 2, 48]"],
    );
    // Another rank on one of the two.
    assert_contains(
        &replaced("down_proj.lora_B", &[1, hidden, 4]),
        &["[1, 64, 4], expected [1, 64, 2]"],
    );
}

#[test]
fn a_factor_without_its_partner_is_missing_one() {
    let config = config();
    for fused in [true, false] {
        let projection = if fused { "gate_up_proj" } else { "up_proj" };
        for factor in ['A', 'B'] {
            let folder = write(&adapter(&config, fused), &config);
            let name = format!("{EXPERTS}.{projection}.lora_{factor}.weight");
            edit(folder.path(), |file| drop(file.remove(&name)));
            assert_contains(&adapter_error(&folder, &config), &["lacks", &name]);
        }
    }
    // Both are there for a projection that is no target.
    let folder = write(&adapter(&config, true), &config);
    let file = folder.path().join(SETTINGS);
    set(&file, "target_modules", Some(json!(["gate_up_proj"])));
    assert_contains(
        &adapter_error(&folder, &config),
        &["unexpected", "down_proj.lora_A"],
    );
    set(
        &file,
        "target_modules",
        Some(json!(["gate_up_proj", "q_proj"])),
    );
    assert_contains(&adapter_error(&folder, &config), &["target_modules=q_proj"]);
}

#[test]
fn adapters_that_share_the_wrong_side_are_not_written() {
    let config = config();
    let target = TempDir::new().unwrap();
    let mut wrong = adapter(&config, true);
    let (hidden, ffn) = (config.hidden_size, config.moe_intermediate_size);
    let down = FactorPair::new(noise([1, RANK, ffn], 0), noise([8, hidden, RANK], 1), 4.0).unwrap();
    wrong.layers.get_mut(&1).unwrap().down = Some(down);
    let refused = wrong.write(target.path(), &config, PeftLayout::SharedOuter, "");
    assert_contains(
        &refused.unwrap_err().to_string(),
        &[
            "layer 1",
            "on down",
            "hidden side alone",
            "PeftLayout::PerExpert",
        ],
    );
    let refused = wrong.write_checkpoint(target.path(), &config);
    assert_eq!(
        refused.unwrap_err().to_string(),
        "layer 1 shares the factor of down_proj on the side of the intermediate extent alone, which is not trained here (give each expert a copy with expand)"
    );
    assert_eq!(target.path().read_dir().unwrap().count(), 0, "leftovers");
}

#[test]
fn one_sided_adapters_are_named() {
    let config = config();
    let mut one_sided = adapter(&config, true);
    assert!(one_sided.one_sided_layers().is_empty());
    one_sided.layers.get_mut(&1).unwrap().down = None;
    assert_eq!(one_sided.one_sided_layers(), [1]);
    let folder = write(&one_sided, &config);
    assert_eq!(
        PeftAdapter::read(folder.path(), &config).unwrap(),
        one_sided
    );
}

#[test]
fn magnitudes_and_experts_of_their_own_are_not_written() {
    let config = open(PER_EXPERT).config().clone();
    let target = TempDir::new().unwrap();
    let mut dora = adapter(&config, false);
    let down = dora.layers.get_mut(&0).unwrap().down.as_mut().unwrap();
    down.magnitude = Some(noise([config.num_experts, config.hidden_size], 3));
    let refused = dora.write(target.path(), &config, PeftLayout::SharedOuter, "");
    assert_contains(
        &refused.unwrap_err().to_string(),
        &["a DoRA magnitude on down", "PeftLayout::PerExpert"],
    );
}
