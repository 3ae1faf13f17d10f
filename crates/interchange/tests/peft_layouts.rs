//! Adapters through every layout that can hold them, to the bit.

mod folders;

use folders::{
    CONSTITUTION, DORA, PER_EXPERT, SETTINGS, STACKED, adapters, assert_contains, at, copy, deltas,
    noise, open, read, set, settings, tensors,
};
use moe_lora_interchange::{
    ExpertAdapter, FactorPair, GateUp, HostTensor, ModelConfig, PeftAdapter, PeftLayout,
};
use serde_json::{Value, json};
use tempfile::TempDir;

fn write(adapter: &PeftAdapter, config: &ModelConfig, layout: PeftLayout) -> TempDir {
    let folder = TempDir::new().unwrap();
    adapter
        .write(folder.path(), config, layout, "base/model")
        .unwrap();
    folder
}

/// PEFT keeps its targets as a set.
fn sort(targets: &mut Value) {
    if let Some(names) = targets.as_array_mut() {
        names.sort_by_key(|name| name.to_string());
    }
}

fn keys(value: &Value) -> Vec<&String> {
    value.as_object().unwrap().keys().collect()
}

fn is_fused(adapter: &PeftAdapter) -> bool {
    let mut layers = adapter.layers.values();
    layers.all(|layer| matches!(layer.gate_up, Some(GateUp::Fused(_))))
}

#[test]
fn every_adapter_comes_back_from_its_own_layout_equal_to_the_byte() {
    let found = adapters();
    assert_eq!(found.len(), 7);
    for (folder, config) in found {
        let adapter = read(&folder, &config);
        let layout = match is_fused(&adapter) {
            true => PeftLayout::Stacked,
            false => PeftLayout::PerExpert,
        };
        let copy = write(&adapter, &config, layout);
        assert!(tensors(&at(&folder)) == tensors(copy.path()), "{folder}");
        assert_eq!(
            PeftAdapter::read(copy.path(), &config).unwrap(),
            adapter,
            "{folder}"
        );

        let (mut theirs, ours) = (settings(&at(&folder)), settings(copy.path()));
        sort(&mut theirs["target_parameters"]);
        assert_eq!(keys(&theirs), keys(&ours));
        for field in [
            "r",
            "lora_alpha",
            "rank_pattern",
            "alpha_pattern",
            "use_rslora",
            "use_dora",
            "target_parameters",
            "peft_type",
        ] {
            assert_eq!(theirs[field], ours[field], "{folder}: {field}");
        }
        assert_eq!(ours["base_model_name_or_path"], "base/model");
    }
}

#[test]
fn every_adapter_survives_each_layout_that_can_hold_it() {
    for (folder, config) in adapters() {
        let adapter = read(&folder, &config);
        let dora = folder.contains("dora");

        // One pair per expert holds all of them. Fused ones come back as two pairs.
        let copy = write(&adapter, &config, PeftLayout::PerExpert);
        let back = PeftAdapter::read(copy.path(), &config).unwrap();
        let again = write(&back, &config, PeftLayout::PerExpert);
        assert!(tensors(copy.path()) == tensors(again.path()), "{folder}");
        for (layer, own) in &adapter.layers {
            let found = &back.layers[layer];
            assert_eq!(found.down, own.down, "{folder}");
            let Some(GateUp::Separate { gate, up }) = &found.gate_up else {
                panic!("expected separate factors");
            };
            match own.gate_up.as_ref().unwrap() {
                GateUp::Separate { .. } => assert_eq!(found, own, "{folder}"),
                GateUp::Fused(pair) => {
                    assert_eq!((&gate.a, &up.a), (&pair.a, &pair.a));
                    assert_eq!((gate.alpha, up.alpha), (pair.alpha, pair.alpha));
                    for expert in 0..config.num_experts {
                        let halves = [gate.b.outer(expert), up.b.outer(expert)].concat();
                        assert_eq!(halves, pair.b.outer(expert));
                    }
                }
            }
        }

        // The stacked layout holds it as it is or, without magnitudes, fused.
        let target = TempDir::new().unwrap();
        let stack =
            |adapter: &PeftAdapter| adapter.write(target.path(), &config, PeftLayout::Stacked, "");
        let fused = adapter.fuse_gate_up().unwrap();
        if dora {
            assert_contains(
                &stack(&fused).unwrap_err().to_string(),
                &["a DoRA magnitude", "PeftLayout::PerExpert"],
            );
        } else {
            if !is_fused(&adapter) {
                let refused = stack(&adapter).unwrap_err().to_string();
                assert_contains(
                    &refused,
                    &["layer 0", "PeftLayout::PerExpert", "fuse_gate_up"],
                );
            }
            stack(&fused).unwrap();
            assert_eq!(PeftAdapter::read(target.path(), &config).unwrap(), fused);
        }

        // Factors of their own for all experts are not shared.
        let refused = adapter.write(target.path(), &config, PeftLayout::SharedOuter, "");
        let held = if dora {
            "magnitude"
        } else {
            "not shared on the hidden side"
        };
        assert_contains(
            &refused.unwrap_err().to_string(),
            &["layer 0", held, "PeftLayout::PerExpert"],
        );
    }
}

#[test]
fn fusing_gate_and_up_keeps_their_deltas() {
    let config = open(PER_EXPERT).config().clone();
    for rslora in [false, true] {
        let mut separate = read(&format!("{PER_EXPERT}/adapter"), &config);
        separate.rslora = rslora;
        let fused = separate.fuse_gate_up().unwrap();
        let (Some(GateUp::Separate { gate, up }), Some(GateUp::Fused(pair))) =
            (&separate.layers[&0].gate_up, &fused.layers[&0].gate_up)
        else {
            panic!("expected separate and fused factors");
        };
        assert_eq!((gate.rank(), pair.rank()), (4, 8));
        assert_eq!(pair.alpha, if rslora { 8.0 * 2f64.sqrt() } else { 16.0 });
        let one = config.moe_intermediate_size * config.hidden_size;
        let (gate, up) = (deltas(&separate, gate), deltas(&separate, up));
        let experts = gate.chunks(one).zip(up.chunks(one));
        let expected: Vec<f64> = experts.flat_map(|(g, u)| [g, u].concat()).collect();
        let found = deltas(&fused, pair);
        let largest = expected.iter().fold(0f64, |most, v| most.max(v.abs()));
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 4e-16 * largest);
        }
    }
}

#[test]
fn gate_and_up_of_different_scales_do_not_fuse() {
    let config = open(PER_EXPERT).config().clone();
    let mut adapter = read(&format!("{PER_EXPERT}/adapter"), &config);
    let Some(GateUp::Separate { up, .. }) = &mut adapter.layers.get_mut(&0).unwrap().gate_up else {
        panic!("expected separate factors");
    };
    up.alpha = 4.0;
    assert_contains(
        &adapter.fuse_gate_up().unwrap_err().to_string(),
        &["scale 2 on gate and 1 on up", "PeftLayout::PerExpert"],
    );
    // Nothing else depends on it.
    let copy = write(&adapter, &config, PeftLayout::PerExpert);
    assert_eq!(PeftAdapter::read(copy.path(), &config).unwrap(), adapter);
}

#[test]
fn magnitudes_are_read_for_every_expert_and_projection() {
    let config = open(DORA).config().clone();
    let adapter = read(&format!("{DORA}/adapter"), &config);
    let stored = tensors(&at(DORA).join("adapter"));
    let Some(GateUp::Separate { up, .. }) = &adapter.layers[&0].gate_up else {
        panic!("expected separate factors");
    };
    let magnitude = up.magnitude.as_ref().unwrap();
    assert_eq!(magnitude.shape(), [8, 16]);
    for expert in 0..8 {
        let name = format!(
            "{}.{expert}.up_proj.lora_magnitude_vector",
            folders::EXPERTS
        );
        assert_eq!(folders::bytes(magnitude.outer(expert)), stored[&name].1);
    }

    let mut partial = adapter;
    partial
        .layers
        .get_mut(&0)
        .unwrap()
        .down
        .as_mut()
        .unwrap()
        .magnitude = None;
    let target = TempDir::new().unwrap();
    let refused = partial.write(target.path(), &config, PeftLayout::PerExpert, "");
    assert_contains(
        &refused.unwrap_err().to_string(),
        &["layer 0 has no magnitude on down"],
    );
}

#[test]
fn magnitudes_beside_stacked_parameters_are_refused() {
    let folder = copy(&format!("{}/adapter", STACKED[0]));
    set(&folder.path().join(SETTINGS), "use_dora", Some(json!(true)));
    assert_contains(
        &folders::adapter_error(&folder, open(STACKED[0]).config()),
        &[
            "use_dora=true is not supported",
            "a module for every expert",
        ],
    );
}

#[test]
fn a_lone_parameter_lies_at_the_bare_name() {
    let config = open(CONSTITUTION).config().clone();
    let whole = read(&format!("{CONSTITUTION}/adapter_sgd"), &config);
    let mut gate_up = whole.clone();
    for layer in gate_up.layers.values_mut() {
        layer.down = None;
    }
    let mut down = whole.clone();
    for layer in down.layers.values_mut() {
        layer.gate_up = None;
    }
    let mut one_layer = whole.clone();
    one_layer.layers.remove(&0);
    let mut uneven = whole;
    uneven.layers.get_mut(&1).unwrap().down = None;

    for (adapter, targets, modules) in [
        (
            &gate_up,
            json!(["mlp.experts.gate_up_proj"]),
            r".*experts\.\d+\.(gate_proj|up_proj)",
        ),
        (
            &down,
            json!(["mlp.experts.down_proj"]),
            r".*experts\.\d+\.(down_proj)",
        ),
        (
            &one_layer,
            json!([
                "model.layers.1.mlp.experts.down_proj",
                "model.layers.1.mlp.experts.gate_up_proj"
            ]),
            r".*layers\.(1)\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)",
        ),
        (
            &uneven,
            json!([
                "mlp.experts.gate_up_proj",
                "model.layers.0.mlp.experts.down_proj"
            ]),
            r".*layers\.(1)\.mlp\.experts\.\d+\.(gate_proj|up_proj)|.*layers\.(0)\.mlp\.experts\.\d+\.(gate_proj|up_proj|down_proj)",
        ),
    ] {
        let copy = write(adapter, &config, PeftLayout::Stacked);
        assert_eq!(PeftAdapter::read(copy.path(), &config).unwrap(), *adapter);
        let mut found = settings(copy.path())["target_parameters"].clone();
        sort(&mut found);
        assert_eq!(found, targets);
        let nested = tensors(copy.path());
        let mut layers = adapter.layers.values();
        assert_eq!(
            nested.keys().any(|name| name.contains("base_layer")),
            layers.any(|layer| layer.gate_up.is_some() && layer.down.is_some())
        );

        let copy = write(adapter, &config, PeftLayout::PerExpert);
        assert_eq!(settings(copy.path())["target_modules"], modules);
        let read = PeftAdapter::read(copy.path(), &config).unwrap();
        assert!(read.layers.keys().eq(adapter.layers.keys()));
    }
    assert_eq!(gate_up.one_sided_layers(), [0, 1]);
    assert_eq!(uneven.one_sided_layers(), [1]);
    assert!(one_layer.one_sided_layers().is_empty());
}

#[test]
fn suffix_targets_select_the_same_experts_as_an_expression() {
    let config = open(PER_EXPERT).config().clone();
    let folder = copy(&format!("{PER_EXPERT}/adapter"));
    let expected = PeftAdapter::read(folder.path(), &config).unwrap();
    let names = json!(["up_proj", "down_proj", "gate_proj"]);
    set(&folder.path().join(SETTINGS), "target_modules", Some(names));
    assert_eq!(PeftAdapter::read(folder.path(), &config).unwrap(), expected);
}

#[test]
fn adapters_that_cannot_be_written() {
    let config = open(STACKED[0]).config().clone();
    let whole = read(&format!("{}/adapter", STACKED[0]), &config);
    let target = TempDir::new().unwrap();
    let write = |adapter: &PeftAdapter| {
        let result = adapter.write(target.path(), &config, PeftLayout::Stacked, "");
        result.unwrap_err().to_string()
    };
    let with_down = |change: &dyn Fn(&mut FactorPair)| {
        let mut adapter = whole.clone();
        change(adapter.layers.get_mut(&0).unwrap().down.as_mut().unwrap());
        adapter
    };

    let mut adapter = whole.clone();
    adapter.layers.insert(1, ExpertAdapter::default());
    assert_contains(&write(&adapter), &["layer 1 is not in"]);
    adapter.layers.clear();
    assert_contains(&write(&adapter), &["no factors"]);
    assert_contains(
        &write(&with_down(&|down| down.alpha = f64::NAN)),
        &["lora_alpha=NaN"],
    );
    assert_contains(
        &write(&with_down(&|down| down.a = noise([8, 2, 16], 0))),
        &["lora_B", "[8, 32, 4]", "expected [8 or 1, 32, 2]"],
    );
    assert_contains(
        &write(&with_down(&|down| {
            down.a = noise([8, 4, 32], 0);
            down.b = noise([8, 16, 4], 0);
        })),
        &["lora_A", "[8, 4, 32]", "expected [8, 4, 16]"],
    );
    assert_contains(
        &write(&with_down(&|down| {
            down.a = HostTensor::new([8, 0, 16], vec![]).unwrap();
            down.b = HostTensor::new([8, 32, 0], vec![]).unwrap();
        })),
        &["lora_A", "at least one expert and one rank"],
    );
    assert_eq!(target.path().read_dir().unwrap().count(), 0, "leftovers");
}

#[test]
fn a_write_that_fails_leaves_the_adapter_that_was_there() {
    let config = open(PER_EXPERT).config().clone();
    let adapter = read(&format!("{PER_EXPERT}/adapter"), &config);
    let copy = write(&adapter, &config, PeftLayout::PerExpert);
    let before = tensors(copy.path());
    let refused = adapter.write(copy.path(), &config, PeftLayout::Stacked, "");
    refused.unwrap_err();
    assert!(tensors(copy.path()) == before);
    assert_eq!(PeftAdapter::read(copy.path(), &config).unwrap(), adapter);
}
