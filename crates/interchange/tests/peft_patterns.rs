//! Ranks and scales that differ between the pairs of an adapter.

mod folders;

use folders::{
    CONSTITUTION, PER_EXPERT, SETTINGS, STACKED, adapter_error, assert_contains, copy,
    noise_adapter, noise_pair, open, read, set, settings,
};
use moe_lora_interchange::{
    FactorPair, FileError, GateUp, InterchangeError, ModelConfig, PeftAdapter, PeftLayout,
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn round_trip(adapter: &PeftAdapter, config: &ModelConfig, layout: PeftLayout) -> Value {
    let folder = TempDir::new().unwrap();
    adapter.write(folder.path(), config, layout, "").unwrap();
    assert_eq!(PeftAdapter::read(folder.path(), config).unwrap(), *adapter);
    settings(folder.path())
}

fn down(adapter: &mut PeftAdapter, layer: usize) -> &mut FactorPair {
    adapter
        .layers
        .get_mut(&layer)
        .unwrap()
        .down
        .as_mut()
        .unwrap()
}

#[test]
fn mixed_ranks_and_alphas_are_written_as_patterns() {
    let config = open(CONSTITUTION).config().clone();
    let mut adapter = noise_adapter(&config, 4);
    let shape = [config.hidden_size, config.moe_intermediate_size];
    for layer in 0..2 {
        *down(&mut adapter, layer) = noise_pair(config.num_experts, shape, 2, 90);
        down(&mut adapter, layer).alpha = 0.5;
    }
    let settings = round_trip(&adapter, &config, PeftLayout::Stacked);
    assert_eq!(settings["r"], 4);
    assert_eq!(settings["lora_alpha"], 8);
    assert_eq!(
        settings["rank_pattern"],
        json!({r"mlp\.experts\.down_proj": 2})
    );
    assert_eq!(
        settings["alpha_pattern"],
        json!({r"mlp\.experts\.down_proj": 0.5})
    );
    assert_eq!(adapter.scale(down(&mut adapter.clone(), 1)), 0.25);

    // One layer alone, at a rank of its own.
    *down(&mut adapter, 1) = noise_pair(config.num_experts, shape, 3, 90);
    let settings = round_trip(&adapter, &config, PeftLayout::Stacked);
    assert_eq!(
        settings["rank_pattern"],
        json!({r"layers\.(0)\.mlp\.experts\.down_proj": 2, r"layers\.(1)\.mlp\.experts\.down_proj": 3})
    );
}

#[test]
fn patterns_of_separate_experts_name_them_all() {
    let config = open(PER_EXPERT).config().clone();
    let mut adapter = read(&format!("{PER_EXPERT}/adapter"), &config);
    let Some(GateUp::Separate { up, .. }) = &mut adapter.layers.get_mut(&0).unwrap().gate_up else {
        panic!("expected separate factors");
    };
    let shape = [config.moe_intermediate_size, config.hidden_size];
    *up = noise_pair(config.num_experts, shape, 6, 90);
    let settings = round_trip(&adapter, &config, PeftLayout::PerExpert);
    assert_eq!(settings["r"], 4);
    assert_eq!(
        settings["rank_pattern"],
        json!({r"mlp\.experts\.\d+\.up_proj": 6})
    );
}

#[test]
fn equal_ranks_need_no_patterns() {
    let config = open(CONSTITUTION).config().clone();
    let settings = round_trip(&noise_adapter(&config, 4), &config, PeftLayout::Stacked);
    assert_eq!(settings["rank_pattern"], json!({}));
    assert_eq!(settings["alpha_pattern"], json!({}));
}

/// The alphas of gate-up and down of both layers under these patterns.
fn alphas(patterns: &str) -> [f64; 4] {
    let config = open(CONSTITUTION).config().clone();
    let folder = copy(&format!("{CONSTITUTION}/adapter_sgd"));
    let file = folder.path().join(SETTINGS);
    // Written as text, so that the keys keep this order.
    let text = std::fs::read_to_string(&file).unwrap();
    let text = text.replace(
        "\"alpha_pattern\": {}",
        &format!("\"alpha_pattern\": {patterns}"),
    );
    std::fs::write(&file, text).unwrap();
    let adapter = PeftAdapter::read(folder.path(), &config).unwrap();
    let alphas = adapter.layers.values().flat_map(|layer| layer.pairs());
    let alphas: Vec<f64> = alphas.map(|(_, pair)| pair.alpha).collect();
    alphas.try_into().unwrap()
}

#[test]
fn keys_match_as_in_peft() {
    let config = open(CONSTITUTION).config().clone();
    let common = read(&format!("{CONSTITUTION}/adapter_sgd"), &config);
    let c = common.layers[&0].down.as_ref().unwrap().alpha;
    assert_ne!(c, 1.0);
    // The end of a parameter's name, from a dot on.
    assert_eq!(alphas(r#"{"down_proj": 1}"#), [c, 1.0, c, 1.0]);
    assert_eq!(alphas(r#"{"own_proj": 1}"#), [c; 4]);
    assert_eq!(alphas(r#"{"experts": 1}"#), [c; 4]);
    assert_eq!(alphas(r#"{"": 1}"#), [c; 4]);
    // Its whole name, without what the file puts before it.
    assert_eq!(
        alphas(r#"{"model.layers.1.mlp.experts.down_proj": 1}"#),
        [c, c, c, 1.0]
    );
    assert_eq!(
        alphas(r#"{"base_model.model.model.layers.1.mlp.experts.down_proj": 1}"#),
        [c; 4]
    );
    // An expression, `^` included.
    assert_eq!(alphas(r#"{".*layers\\.1\\..*": 1}"#), [c, c, 1.0, 1.0]);
    assert_eq!(alphas(r#"{"down_proj|gate_up_proj": 1}"#), [1.0; 4]);
    assert_eq!(alphas(r#"{"^model.*down_proj": 1}"#), [c, 1.0, c, 1.0]);
    assert_eq!(alphas(r#"{"^down_proj": 1}"#), [c; 4]);
    // The first of several, in the order of the file and not of the alphabet.
    assert_eq!(alphas(r#"{"down_proj": 1, ".*": 3}"#), [3.0, 1.0, 3.0, 1.0]);
    assert_eq!(alphas(r#"{".*": 3, "down_proj": 1}"#), [3.0; 4]);
}

#[test]
fn patterns_must_fit_the_tensors() {
    let folder = copy(&format!("{}/adapter", STACKED[0]));
    let file = folder.path().join(SETTINGS);
    set(&file, "rank_pattern", Some(json!({"down_proj": 2})));
    assert_contains(
        &adapter_error(&folder, open(STACKED[0]).config()),
        &["experts.lora_A", "shape [32, 16]", "expected [16, 16]"],
    );
    // And the common rank is free where a pattern covers all.
    set(&file, "rank_pattern", Some(json!({".*": 4})));
    set(&file, "r", Some(json!(64)));
    PeftAdapter::read(folder.path(), open(STACKED[0]).config()).unwrap();
}

/// Reads an adapter with these patterns.
fn read_with(patterns: impl IntoIterator<Item = String>) -> Result<PeftAdapter, InterchangeError> {
    let folder = copy(&format!("{}/adapter", STACKED[0]));
    let patterns = patterns.into_iter().map(|key| (key, json!(2)));
    let patterns = Value::Object(patterns.collect());
    set(
        &folder.path().join(SETTINGS),
        "rank_pattern",
        Some(patterns),
    );
    PeftAdapter::read(folder.path(), open(STACKED[0]).config())
}

#[test]
fn more_patterns_than_any_model_needs_are_refused() {
    // A layer that the model does not have each, as an adapter of another model may name.
    let layers = |count: usize| {
        let layers = 1000..1000 + count;
        layers.map(|layer| format!("model.layers.{layer}.mlp.experts.down_proj"))
    };
    let plain = read(
        &format!("{}/adapter", STACKED[0]),
        open(STACKED[0]).config(),
    );
    assert_eq!(read_with(layers(100)).unwrap(), plain);

    let error = read_with(layers(513)).unwrap_err();
    let invalid = |error| {
        matches!(
            error,
            InterchangeError::File(FileError::InvalidField { .. })
        )
    };
    let expected = "rank_pattern=513 patterns, expected at most 512 patterns";
    assert_contains(&error.to_string(), &["adapter_config.json", expected]);
    assert!(invalid(error));
}

/// `\w` is every letter of every script, and each of its 150 counts again: megabytes in a program, of
/// which a file could ask for a thousand.
#[test]
fn a_pattern_of_a_vast_program_is_refused() {
    let begun = Instant::now();
    for vast in [r"\w{150}x", r"(\w{150}x){1000}"] {
        let keys = (0..8).map(|number| format!("{vast}{number}"));
        let error = read_with(keys).unwrap_err();
        let quoted = format!("rank_pattern={:?} is not", format!("{vast}0"));
        assert_contains(
            &error.to_string(),
            &[
                "adapter_config.json",
                &quoted,
                "shorter regular expressions",
            ],
        );
        let unsupported = matches!(
            error,
            InterchangeError::File(FileError::UnsupportedField { .. })
        );
        assert!(unsupported, "{error}");
    }
    // Milliseconds, as a program is given up once it is too large.
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn experts_of_different_ranks_are_refused() {
    let folder = copy(&format!("{PER_EXPERT}/adapter"));
    let pattern = json!({"experts.3.up_proj": 2});
    set(&folder.path().join(SETTINGS), "rank_pattern", Some(pattern));
    assert_contains(
        &adapter_error(&folder, open(PER_EXPERT).config()),
        &[
            "rank_pattern={\"experts.3.up_proj\":2} is not supported",
            "the same for all experts",
            "layers.0.mlp.experts.3.up_proj",
        ],
    );
}

#[test]
fn rank_stabilised_scale_and_fractional_alpha_survive() {
    let config = open(STACKED[0]).config().clone();
    let mut adapter = noise_adapter(&config, 16);
    adapter.rslora = true;
    down(&mut adapter, 0).alpha = 0.1;
    for layer in adapter.layers.values_mut() {
        let Some(GateUp::Fused(pair)) = &mut layer.gate_up else {
            panic!("expected fused factors");
        };
        pair.alpha = 16.0;
    }
    let settings = round_trip(&adapter, &config, PeftLayout::Stacked);
    assert_eq!(settings["use_rslora"], true);
    let scales = adapter.layers[&0]
        .pairs()
        .map(|(_, pair)| adapter.scale(pair));
    assert!(scales.eq([4.0, 0.025]));
    let mut plain = adapter.clone();
    plain.rslora = false;
    let pair = plain.layers[&0].pairs().next().unwrap().1;
    assert_eq!(plain.scale(pair), 1.0);
    round_trip(&plain, &config, PeftLayout::Stacked);
}
