//! Adapter folders: both layouts, and each way in which one can be wrong.

mod folders;

use folders::{
    CONSTITUTION, DORA, PER_EXPERT, STACKED, adapter_error, assert_contains, at, copy, open, set,
};
use moe_lora_interchange::{
    ExpertAdapter, FactorPair, GateUp, HostTensor, ModelConfig, PeftAdapter, PeftLayout,
};
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const EXPERTS: &str = "base_model.model.model.layers.0.mlp.experts";

/// Every stacked adapter of the fixtures, with its model's configuration.
fn stacked() -> Vec<(String, ModelConfig)> {
    let mut found: Vec<_> = STACKED
        .map(|model| (format!("{model}/adapter"), open(model).config().clone()))
        .into();
    for name in ["adapter_start", "adapter_sgd"] {
        found.push((
            format!("{CONSTITUTION}/{name}"),
            open(CONSTITUTION).config().clone(),
        ));
    }
    found
}

/// The file's tensors, by name: shape and bytes.
fn tensors(folder: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(folder.join("adapter_model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            (
                name.to_owned(),
                (view.shape().to_vec(), view.data().to_vec()),
            )
        })
        .collect()
}

/// Rewrites the tensors of an adapter.
fn edit(folder: &TempDir, change: impl FnOnce(&mut BTreeMap<String, (Vec<usize>, Vec<u8>)>)) {
    let mut named = tensors(folder.path());
    change(&mut named);
    let views = named.iter().map(|(name, (shape, bytes))| {
        (
            name,
            TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).unwrap(),
        )
    });
    serialize_to_file(
        views,
        None,
        &folder.path().join("adapter_model.safetensors"),
    )
    .unwrap();
}

fn settings(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join("adapter_config.json")).unwrap()).unwrap()
}

/// PEFT keeps its targets as a set.
fn sort(targets: &mut Value) {
    let names = targets.as_array_mut().unwrap();
    names.sort_by_key(|name| name.to_string());
}

fn keys(value: &Value) -> Vec<&String> {
    value.as_object().unwrap().keys().collect()
}

#[test]
fn stacked_adapters_come_back_equal_to_the_byte() {
    for (folder, config) in stacked() {
        let adapter = PeftAdapter::read(&at(&folder), &config).unwrap();
        let target = TempDir::new().unwrap();
        adapter
            .write(target.path(), &config, PeftLayout::Stacked, "base/model")
            .unwrap();
        assert!(tensors(&at(&folder)) == tensors(target.path()), "{folder}");
        assert_eq!(
            PeftAdapter::read(target.path(), &config).unwrap(),
            adapter,
            "{folder}"
        );

        let (mut theirs, ours) = (settings(&at(&folder)), settings(target.path()));
        sort(&mut theirs["target_parameters"]);
        assert_eq!(keys(&theirs), keys(&ours));
        for field in [
            "r",
            "lora_alpha",
            "target_parameters",
            "target_modules",
            "peft_type",
        ] {
            assert_eq!(theirs[field], ours[field], "{folder}: {field}");
        }
        assert_eq!(ours["base_model_name_or_path"], "base/model");
    }
}

#[test]
fn per_expert_adapter_comes_back_equal_to_the_byte() {
    let (folder, config) = (
        at(PER_EXPERT).join("adapter"),
        open(PER_EXPERT).config().clone(),
    );
    let adapter = PeftAdapter::read(&folder, &config).unwrap();
    assert_eq!(
        (adapter.rank, adapter.alpha, adapter.scale()),
        (4, 8.0, 2.0)
    );
    let Some(GateUp::Separate { gate, .. }) = &adapter.layers[&0].gate_up else {
        panic!("expected separate factors");
    };
    assert_eq!(
        (gate.a.shape(), gate.b.shape()),
        (&[8, 4, 32][..], &[8, 16, 4][..])
    );

    let target = TempDir::new().unwrap();
    adapter
        .write(target.path(), &config, PeftLayout::PerExpert, "")
        .unwrap();
    assert!(tensors(&folder) == tensors(target.path()));
    assert_eq!(PeftAdapter::read(target.path(), &config).unwrap(), adapter);
    assert_eq!(keys(&settings(&folder)), keys(&settings(target.path())));

    let error = adapter
        .write(target.path(), &config, PeftLayout::Stacked, "")
        .unwrap_err();
    assert_contains(&error.to_string(), &["layer 0", "PeftLayout::PerExpert"]);
    assert!(
        tensors(&folder) == tensors(target.path()),
        "lost by a failed write"
    );
}

#[test]
fn fused_factors_divide_into_gate_and_up() {
    for (folder, config) in stacked() {
        let fused = PeftAdapter::read(&at(&folder), &config).unwrap();
        let target = TempDir::new().unwrap();
        fused
            .write(target.path(), &config, PeftLayout::PerExpert, "")
            .unwrap();
        let separate = PeftAdapter::read(target.path(), &config).unwrap();
        for (layer, adapter) in &fused.layers {
            let Some(GateUp::Fused(pair)) = &adapter.gate_up else {
                panic!("expected fused factors");
            };
            let Some(GateUp::Separate { gate, up }) = &separate.layers[layer].gate_up else {
                panic!("expected separate factors");
            };
            assert_eq!((&gate.a, &up.a), (&pair.a, &pair.a));
            for expert in 0..config.num_experts {
                let halves = [gate.b.outer(expert), up.b.outer(expert)].concat();
                assert_eq!(halves, pair.b.outer(expert));
            }
            assert_eq!(separate.layers[layer].down, adapter.down);
        }
    }
}

#[test]
fn a_lone_parameter_lies_at_the_bare_name() {
    let config = open(CONSTITUTION).config().clone();
    let whole = PeftAdapter::read(&at(CONSTITUTION).join("adapter_sgd"), &config).unwrap();
    let mut gate_up = whole.clone();
    gate_up
        .layers
        .values_mut()
        .for_each(|layer| layer.down = None);
    let mut down = whole.clone();
    down.layers
        .values_mut()
        .for_each(|layer| layer.gate_up = None);
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
        let target = TempDir::new().unwrap();
        adapter
            .write(target.path(), &config, PeftLayout::Stacked, "")
            .unwrap();
        assert_eq!(PeftAdapter::read(target.path(), &config).unwrap(), *adapter);
        let mut found = settings(target.path())["target_parameters"].clone();
        sort(&mut found);
        assert_eq!(found, targets);
        assert_eq!(
            tensors(target.path())
                .keys()
                .any(|name| name.contains("base_layer")),
            adapter
                .layers
                .values()
                .any(|layer| layer.gate_up.is_some() && layer.down.is_some())
        );

        adapter
            .write(target.path(), &config, PeftLayout::PerExpert, "")
            .unwrap();
        assert_eq!(settings(target.path())["target_modules"], modules);
        let read = PeftAdapter::read(target.path(), &config).unwrap();
        assert!(read.layers.keys().eq(adapter.layers.keys()));
    }
}

#[test]
fn suffix_targets_select_the_same_experts_as_an_expression() {
    let config = open(PER_EXPERT).config().clone();
    let folder = copy(&format!("{PER_EXPERT}/adapter"));
    let expected = PeftAdapter::read(folder.path(), &config).unwrap();
    let file = folder.path().join("adapter_config.json");
    set(
        &file,
        "target_modules",
        Some(json!(["up_proj", "down_proj", "gate_proj"])),
    );
    assert_eq!(PeftAdapter::read(folder.path(), &config).unwrap(), expected);
}

#[test]
fn rank_stabilised_scale_and_fractional_alpha_survive() {
    let config = open(STACKED[0]).config().clone();
    let mut adapter = PeftAdapter::read(&at(STACKED[0]).join("adapter"), &config).unwrap();
    (adapter.alpha, adapter.rslora) = (0.1, true);
    let target = TempDir::new().unwrap();
    adapter
        .write(target.path(), &config, PeftLayout::Stacked, "")
        .unwrap();
    assert_eq!(PeftAdapter::read(target.path(), &config).unwrap(), adapter);
    assert_eq!(adapter.scale(), 0.05);
}

/// The error of the first stacked adapter after `field` of its configuration was set.
fn setting_error(field: &str, value: Option<Value>) -> String {
    let folder = copy(&format!("{}/adapter", STACKED[0]));
    set(&folder.path().join("adapter_config.json"), field, value);
    adapter_error(&folder, open(STACKED[0]).config())
}

#[test]
fn settings_that_change_the_numbers_are_refused_by_name() {
    for (field, value, part) in [
        ("use_dora", json!(true), "use_dora=true is not supported"),
        ("lora_bias", json!(true), "lora_bias=true is not supported"),
        (
            "rank_pattern",
            json!({"down_proj": 2}),
            "rank_pattern={\"down_proj\":2}",
        ),
        (
            "alpha_pattern",
            json!({"down_proj": 2}),
            "alpha_pattern={\"down_proj\":2}",
        ),
        (
            "modules_to_save",
            json!(["lm_head"]),
            "modules_to_save=[\"lm_head\"]",
        ),
        ("fan_in_fan_out", json!(true), "fan_in_fan_out=true"),
        ("layers_to_transform", json!([0]), "layers_to_transform=[0]"),
        ("layers_to_transform", json!(0), "layers_to_transform=0"),
        ("use_something_new", json!(true), "use_something_new=true"),
        ("bias", json!("all"), "bias=\"all\""),
        (
            "init_lora_weights",
            json!("pissa"),
            "init_lora_weights=\"pissa\"",
        ),
        ("peft_type", json!("IA3"), "peft_type=\"IA3\""),
        (
            "target_modules",
            json!(["q_proj"]),
            "target_modules=[\"q_proj\"]",
        ),
        (
            "target_parameters",
            json!(["mlp.gate.weight"]),
            "target_parameters=mlp.gate.weight",
        ),
        ("peft_version", json!("0.18.1"), "peft_version=0.18.1"),
        ("r", json!(0), "r=0, expected"),
        ("r", json!(-4), "r=-4, expected"),
        ("r", json!(u64::MAX), "r=18446744073709551615, expected"),
        ("lora_alpha", json!("8"), "lora_alpha=\"8\", expected"),
    ] {
        assert_contains(
            &setting_error(field, Some(value)),
            &["adapter_config.json", part],
        );
    }
    for field in ["peft_type", "r", "lora_alpha", "target_parameters"] {
        let expected = format!("adapter_config.json has no field {field:?}");
        assert_contains(&setting_error(field, None), &[&expected]);
    }
    // 2F = H in this fixture: nothing but the version tells which way its factors lie.
    assert_contains(
        &setting_error("peft_version", None),
        &["peft_version=null", "transposed"],
    );
}

#[test]
fn magnitudes_are_refused() {
    let folder = copy(&format!("{DORA}/adapter"));
    let config = open(DORA).config().clone();
    assert_contains(
        &adapter_error(&folder, &config),
        &["use_dora=true is not supported"],
    );
    set(
        &folder.path().join("adapter_config.json"),
        "use_dora",
        Some(json!(false)),
    );
    assert_contains(
        &adapter_error(&folder, &config),
        &[
            "unexpected",
            "experts.0.down_proj.lora_magnitude_vector",
            "and more",
        ],
    );
}

#[test]
fn modules_that_are_not_whole_sets_of_experts_are_refused() {
    let config = open(PER_EXPERT).config().clone();
    for (targets, parts) in [
        (
            json!(["gate_proj", "up_proj", "q_proj"]),
            ["target_modules=q_proj", "of experts"],
        ),
        (
            json!(["gate_proj", "down_proj"]),
            ["[\"gate_proj\",\"down_proj\"]", "together"],
        ),
        (
            json!("all-linear"),
            ["target_modules=\"all-linear\"", "of experts"],
        ),
        (json!("(?<=experts).*"), ["(?<=experts)", "look-around"]),
        (json!("("), ["target_modules=\"(\"", "regular expressions"]),
        (json!([1]), ["target_modules=[1]", "expected a string"]),
        (
            json!(".*down_proj"),
            ["unexpected", "experts.0.gate_proj.lora_A"],
        ),
        (
            json!(r".*experts\.1\..*"),
            ["target_modules=", "of experts"],
        ),
    ] {
        let folder = copy(&format!("{PER_EXPERT}/adapter"));
        set(
            &folder.path().join("adapter_config.json"),
            "target_modules",
            Some(targets),
        );
        assert_contains(&adapter_error(&folder, &config), &parts);
    }
}

#[test]
fn a_partial_adapter_is_an_error_both_ways() {
    let (stacked, older) = (
        open(STACKED[0]).config().clone(),
        open(PER_EXPERT).config().clone(),
    );
    let cases = [
        (
            STACKED[0],
            &stacked,
            format!("{EXPERTS}.base_layer.lora_B.weight"),
        ),
        (
            PER_EXPERT,
            &older,
            format!("{EXPERTS}.7.up_proj.lora_A.weight"),
        ),
    ];
    for (fixture, config, name) in cases {
        let folder = copy(&format!("{fixture}/adapter"));
        edit(&folder, |tensors| drop(tensors.remove(&name)));
        assert_contains(
            &adapter_error(&folder, config),
            &["lacks", &name, "partial"],
        );

        let folder = copy(&format!("{fixture}/adapter"));
        let extra = name.replace("layers.0", "layers.1");
        edit(&folder, |tensors| {
            tensors.insert(extra.clone(), tensors[&name].clone());
        });
        assert_contains(&adapter_error(&folder, config), &["unexpected", &extra]);
    }

    // A layer that is wholly absent.
    let config = open(CONSTITUTION).config().clone();
    let folder = copy(&format!("{CONSTITUTION}/adapter_sgd"));
    edit(&folder, |tensors| {
        tensors.retain(|name, _| !name.contains("layers.1"))
    });
    assert_contains(
        &adapter_error(&folder, &config),
        &["lacks", "layers.1.mlp.experts.base_layer"],
    );

    // A model that claims far more than the file holds is settled by the first names that are
    // missing.
    let mut vast = older;
    vast.num_experts = 1 << 16;
    let folder = copy(&format!("{PER_EXPERT}/adapter"));
    assert_contains(
        &adapter_error(&folder, &vast),
        &["lacks", "experts.8.gate_proj", "and more"],
    );
}

#[test]
fn an_adapter_of_another_model_or_rank() {
    let folder = copy(&format!("{}/adapter", STACKED[0]));
    let mut config = open(STACKED[0]).config().clone();
    config.moe_intermediate_size = 24;
    assert_contains(
        &adapter_error(&folder, &config),
        &["base_layer.lora_B", "shape [32, 32]", "expected [48, 32]"],
    );
    assert_contains(
        &setting_error("r", Some(json!(8))),
        &["base_layer.lora_A", "shape [32, 32]", "expected [64, 32]"],
    );
}

#[test]
fn weights_that_are_damaged_or_absent() {
    let config = open(STACKED[0]).config().clone();
    let folder = copy(&format!("{}/adapter", STACKED[0]));
    let file = folder.path().join("adapter_model.safetensors");
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    assert_contains(
        &adapter_error(&folder, &config),
        &["adapter_model.safetensors", "cut short"],
    );
    fs::remove_file(&file).unwrap();
    assert_contains(
        &adapter_error(&folder, &config),
        &["cannot open", "adapter_model.safetensors"],
    );
    fs::write(folder.path().join("adapter_config.json"), "").unwrap();
    assert_contains(
        &adapter_error(&folder, &config),
        &["adapter_config.json is not a JSON object"],
    );
}

#[test]
fn adapters_that_cannot_be_written() {
    let config = open(STACKED[0]).config().clone();
    let whole = PeftAdapter::read(&at(STACKED[0]).join("adapter"), &config).unwrap();
    let target = TempDir::new().unwrap();
    let write = |adapter: &PeftAdapter| {
        let result = adapter.write(target.path(), &config, PeftLayout::Stacked, "");
        result.unwrap_err().to_string()
    };

    let mut adapter = whole.clone();
    adapter.layers.insert(1, ExpertAdapter::default());
    assert_contains(&write(&adapter), &["layer 1 is not in"]);
    adapter.layers.clear();
    assert_contains(&write(&adapter), &["no factors"]);
    adapter = whole.clone();
    adapter.alpha = f64::NAN;
    assert_contains(&write(&adapter), &["lora_alpha=NaN"]);
    adapter = whole.clone();
    adapter.rank = 2;
    assert_contains(
        &write(&adapter),
        &["lora_A", "[8, 4, 32]", "expected [8, 2, 32]"],
    );
    adapter = whole;
    let transposed = FactorPair::new(
        HostTensor::new([8, 4, 32], vec![0.0; 1024]).unwrap(),
        HostTensor::new([8, 16, 4], vec![0.0; 512]).unwrap(),
    );
    adapter.layers.get_mut(&0).unwrap().down = Some(transposed.unwrap());
    assert_contains(
        &write(&adapter),
        &["lora_A", "[8, 4, 32]", "expected [8, 4, 16]"],
    );
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0, "leftovers");
}
