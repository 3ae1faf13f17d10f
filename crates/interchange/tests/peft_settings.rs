//! Each way in which an adapter folder can be wrong.

mod folders;

use folders::{
    CONSTITUTION, DORA, EXPERTS, PER_EXPERT, STACKED, adapter_error, assert_contains, copy, edit,
    open, set,
};
use serde_json::{Value, json};
use std::fs;

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
            json!({"down_proj": 0}),
            "rank_pattern[\"down_proj\"]=0, expected a number from 1",
        ),
        (
            "rank_pattern",
            json!({"down_proj": 2.5}),
            "rank_pattern[\"down_proj\"]=2.5, expected",
        ),
        ("rank_pattern", json!([2]), "rank_pattern=[2], expected"),
        (
            "rank_pattern",
            json!({"(?<!o)_proj": 2}),
            "rank_pattern=\"(?<!o)_proj\" is not supported",
        ),
        (
            "alpha_pattern",
            json!({"down_proj": "2"}),
            "alpha_pattern[\"down_proj\"]=\"2\", expected",
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
        (
            "peft_version",
            json!("0.18.1"),
            "peft_version=0.18.1, expected 0.19.1 or later",
        ),
        ("peft_version", json!(18), "peft_version=18, expected"),
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
}

#[test]
fn magnitudes_that_the_settings_do_not_call_for_are_unexpected() {
    let folder = copy(&format!("{DORA}/adapter"));
    let config = open(DORA).config().clone();
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

    let folder = copy(&format!("{PER_EXPERT}/adapter"));
    set(
        &folder.path().join("adapter_config.json"),
        "use_dora",
        Some(json!(true)),
    );
    assert_contains(
        &adapter_error(&folder, &config),
        &[
            "lacks",
            "experts.0.gate_proj.lora_magnitude_vector",
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
        edit(folder.path(), |tensors| drop(tensors.remove(&name)));
        assert_contains(
            &adapter_error(&folder, config),
            &["lacks", &name, "partial"],
        );

        let folder = copy(&format!("{fixture}/adapter"));
        let extra = name.replace("layers.0", "layers.1");
        edit(folder.path(), |tensors| {
            tensors.insert(extra.clone(), tensors[&name].clone());
        });
        assert_contains(&adapter_error(&folder, config), &["unexpected", &extra]);
    }

    // A layer that is wholly absent.
    let config = open(CONSTITUTION).config().clone();
    let folder = copy(&format!("{CONSTITUTION}/adapter_sgd"));
    edit(folder.path(), |tensors| {
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
