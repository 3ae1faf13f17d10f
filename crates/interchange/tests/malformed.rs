//! One test for each way in which a model folder can be wrong.

mod folders;

use folders::{STACKED, assert_contains, copy, open_error, set, write_raw};
use moe_lora_interchange::HubModel;
use serde_json::{Value, json};
use std::fs;
use tempfile::TempDir;

/// The error after `field` of `config.json` was set, or removed.
fn config_error(fixture: usize, field: &str, value: Option<Value>) -> String {
    let folder = copy(STACKED[fixture]);
    set(&folder.path().join("config.json"), field, value);
    open_error(&folder)
}

/// The error of a model whose weights are these bytes.
fn weights_error(write: impl FnOnce(&std::path::Path)) -> String {
    let folder = copy(STACKED[0]);
    write(&folder.path().join("model.safetensors"));
    open_error(&folder)
}

fn header_error(header: impl ToString, data: usize) -> String {
    weights_error(|file| write_raw(file, header.to_string().as_bytes(), data))
}

#[test]
fn every_field_that_has_no_default_is_asked_for_by_name() {
    for (fixture, field) in [
        (0, "model_type"),
        (0, "hidden_act"),
        (0, "vocab_size"),
        (0, "hidden_size"),
        (0, "num_hidden_layers"),
        (0, "num_attention_heads"),
        (0, "num_key_value_heads"),
        (0, "num_experts_per_tok"),
        (0, "moe_intermediate_size"),
        (0, "norm_topk_prob"),
        (0, "rms_norm_eps"),
        (0, "max_position_embeddings"),
        (1, "num_experts"),
        (1, "shared_expert_intermediate_size"),
        (2, "intermediate_size"),
    ] {
        let expected = format!("config.json has no field {field:?} (");
        assert_contains(&config_error(fixture, field, None), &[&expected]);
    }
    assert_contains(
        &config_error(0, "rope_parameters", None),
        &["config.json has no field \"rope_theta\""],
    );
    assert_contains(
        &config_error(0, "rope_parameters", Some(json!({}))),
        &["config.json has no field \"rope_parameters.rope_theta\""],
    );
    assert_contains(
        &config_error(0, "num_local_experts", None),
        &["config.json has no field \"num_experts\""],
    );
}

#[test]
fn two_numbers_of_experts_that_differ_are_refused() {
    for (first, second) in [(8, 4), (8, 16)] {
        let folder = copy(STACKED[0]);
        let file = folder.path().join("config.json");
        set(&file, "num_experts", Some(json!(first)));
        set(&file, "num_local_experts", Some(json!(second)));
        let expected = format!("num_experts={first}, expected num_local_experts={second} (");
        assert_contains(&open_error(&folder), &["config.json", &expected]);
        set(&file, "num_local_experts", Some(json!(first)));
        let model = HubModel::open(folder.path()).unwrap();
        assert_eq!(model.config().num_experts, first);
    }
}

#[test]
fn values_that_make_no_sense() {
    for (fixture, field, value, parts) in [
        (
            0,
            "num_experts_per_tok",
            json!(9),
            ["num_experts_per_tok=9", "from 1 to 8"],
        ),
        (
            0,
            "num_experts_per_tok",
            json!(0),
            ["num_experts_per_tok=0", "from 1 to 8"],
        ),
        (
            0,
            "num_local_experts",
            json!(0),
            ["num_local_experts=0", "from 1 to"],
        ),
        (
            0,
            "num_experts",
            json!(4),
            ["num_experts=4", "expected num_local_experts=8"],
        ),
        (
            0,
            "num_key_value_heads",
            json!(3),
            ["num_key_value_heads=3", "num_attention_heads=4"],
        ),
        (
            1,
            "num_attention_heads",
            json!(6),
            ["num_attention_heads=6", "hidden_size=32"],
        ),
        (0, "head_dim", json!(0), ["head_dim=0", "from 1 to"]),
        (
            0,
            "hidden_size",
            json!(-1),
            ["hidden_size=-1", "expected usize"],
        ),
        (
            0,
            "hidden_size",
            json!("32"),
            ["hidden_size=\"32\"", "expected usize"],
        ),
        (
            0,
            "hidden_size",
            json!(32.5),
            ["hidden_size=32.5", "expected usize"],
        ),
        (
            0,
            "hidden_size",
            json!(u64::MAX),
            ["hidden_size=18446744073709551615", "from 1 to"],
        ),
        (
            0,
            "num_hidden_layers",
            json!(1u64 << 40),
            ["num_hidden_layers=", "from 1 to 65536"],
        ),
        (0, "rms_norm_eps", json!(0.0), ["rms_norm_eps=0", "above 0"]),
        (
            0,
            "rms_norm_eps",
            json!(-1e-6),
            ["rms_norm_eps=-0.000001", "above 0"],
        ),
        (
            0,
            "norm_topk_prob",
            json!(1),
            ["norm_topk_prob=1", "expected a boolean"],
        ),
    ] {
        let message = config_error(fixture, field, Some(value));
        assert_contains(&message, &parts);
    }
}

#[test]
fn what_is_not_supported_is_named_with_its_value() {
    for (fixture, field, value, parts) in [
        (
            0,
            "model_type",
            json!("llama4"),
            [
                "model_type=\"llama4\"",
                "qwen3_moe, qwen2_moe, olmoe, mixtral, deepseek_v3, gpt_oss",
            ],
        ),
        (
            0,
            "hidden_act",
            json!("gelu"),
            ["hidden_act=\"gelu\"", "silu"],
        ),
        (2, "clip_qkv", json!(8.0), ["clip_qkv=8.0", "null"]),
        (
            0,
            "use_sliding_window",
            json!(true),
            ["use_sliding_window=true", "false"],
        ),
        (
            1,
            "layer_types",
            json!(["sliding_attention"]),
            ["layer_types=\"sliding_attention\"", "full_attention"],
        ),
        (
            0,
            "decoder_sparse_step",
            json!(2),
            ["decoder_sparse_step=2", "from 1 to 1"],
        ),
        (
            0,
            "mlp_only_layers",
            json!([0]),
            ["num_hidden_layers=1", "layers with experts among them"],
        ),
        (
            0,
            "rope_parameters",
            json!({"rope_theta": 1e4, "rope_type": "yarn"}),
            ["rope_parameters.rope_type=\"yarn\"", "default"],
        ),
        (
            0,
            "rope_scaling",
            json!({"type": "linear"}),
            ["rope_scaling.type=\"linear\"", "default"],
        ),
        (
            0,
            "rope_parameters",
            json!({"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}),
            ["partial_rotary_factor=0.5", "supported: 1"],
        ),
    ] {
        assert_contains(&config_error(fixture, field, Some(value)), &parts);
    }
}

#[test]
fn a_config_that_is_not_a_json_object() {
    let nested = "[".repeat(100_000);
    for text in [
        &b""[..],
        b"{",
        b"[]",
        b"\xff\xfe",
        b"{\"model_type\": \"\xff\"}",
        b"{\"rms_norm_eps\": NaN}",
        b"{\"rms_norm_eps\": 1e999}",
        b"\x00\x01\x02",
        nested.as_bytes(),
    ] {
        let folder = copy(STACKED[0]);
        fs::write(folder.path().join("config.json"), text).unwrap();
        assert_contains(&open_error(&folder), &["config.json is not a JSON object"]);
    }
}

#[test]
fn a_config_of_unreal_length() {
    let folder = copy(STACKED[0]);
    let file = fs::File::create(folder.path().join("config.json")).unwrap();
    file.set_len(1 << 40).unwrap();
    assert_contains(&open_error(&folder), &["1099511627776 bytes", "67108864"]);
}

#[test]
fn files_that_are_absent_or_folders() {
    let folder = TempDir::new().unwrap();
    assert_contains(&open_error(&folder), &["cannot open", "config.json"]);
    fs::create_dir(folder.path().join("config.json")).unwrap();
    assert_contains(&open_error(&folder), &["config.json is not a regular file"]);

    let message = weights_error(|file| fs::remove_file(file).unwrap());
    assert_contains(&message, &["cannot open", "model.safetensors"]);
    let message = weights_error(|file| {
        fs::remove_file(file).unwrap();
        fs::create_dir(file).unwrap();
    });
    assert_contains(&message, &["model.safetensors is not a regular file"]);
}

#[test]
fn weights_cut_short_anywhere() {
    let whole = fs::read(folders::at(STACKED[0]).join("model.safetensors")).unwrap();
    let total = format!("declares {}", whole.len());
    for (length, part) in [
        (0, "declares 8"),
        (7, "declares 8"),
        (8, "has 8 bytes"),
        (500, "has 500 bytes"),
        (whole.len() - 1, &*total),
    ] {
        let message = weights_error(|file| fs::write(file, &whole[..length]).unwrap());
        assert_contains(&message, &[part, "cut short"]);
    }
    let message = weights_error(|file| fs::write(file, [&whole[..], &[0]].concat()).unwrap());
    assert_contains(&message, &[&total]);
}

#[test]
fn weights_that_are_another_format() {
    let message = weights_error(|file| fs::write(file, b"PK\x03\x04 pickled tensors").unwrap());
    assert_contains(&message, &["is not safetensors"]);
    let message = weights_error(|file| fs::write(file, [0xff; 64]).unwrap());
    assert_contains(&message, &["declares 18446744073709551623"]);
    let message = weights_error(|file| write_raw(file, b"\xff\xff\xff\xff", 0));
    assert_contains(&message, &["no valid safetensors header"]);
    assert_contains(&header_error("null", 0), &["no valid safetensors header"]);
}

#[test]
fn headers_that_lie() {
    let tensor = |dtype: &str, shape: Value, offsets: [u64; 2]| json!({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}});
    let invalid = ["no valid safetensors header", "fetch the file again"];
    // More or fewer bytes than the shape holds, a gap, an end before its begin.
    assert_contains(
        &header_error(tensor("F32", json!([3]), [0, 8]), 8),
        &invalid,
    );
    assert_contains(
        &header_error(tensor("F32", json!([2]), [8, 16]), 16),
        &invalid,
    );
    assert_contains(
        &header_error(tensor("F32", json!([2]), [8, 0]), 8),
        &invalid,
    );
    // Products beyond 64 bits, negative sizes, unknown types.
    let huge = json!([1u64 << 40, 1u64 << 40]);
    assert_contains(&header_error(tensor("F32", huge, [0, 8]), 8), &invalid);
    assert_contains(
        &header_error(tensor("F32", json!([-2]), [0, 8]), 8),
        &invalid,
    );
    assert_contains(
        &header_error(tensor("F33", json!([2]), [0, 8]), 8),
        &invalid,
    );
    // Consistent, but not with the length of the file.
    assert_contains(
        &header_error(tensor("F32", json!([2]), [0, 8]), 4),
        &["cut short"],
    );
    let terabytes = tensor("F32", json!([1u64 << 40]), [0, 1u64 << 42]);
    assert_contains(&header_error(terabytes, 8), &["cut short"]);
}

/// Eight tensors of `2^64 - 64` bytes together, which overflows once the header's length is added.
#[test]
fn a_header_whose_sum_overflows() {
    let part = (1u64 << 61) - 8;
    let tensors: serde_json::Map<String, Value> = (0..8)
        .map(|i| {
            let info =
                json!({"dtype": "U8", "shape": [part], "data_offsets": [i * part, (i + 1) * part]});
            (format!("t{i}"), info)
        })
        .collect();
    assert_contains(&header_error(Value::Object(tensors), 0), &["cut short"]);
}

#[test]
fn experts_that_do_not_fit_the_config() {
    let folder = copy(STACKED[0]);
    set(
        &folder.path().join("config.json"),
        "moe_intermediate_size",
        Some(json!(17)),
    );
    let model = HubModel::open(folder.path()).unwrap();
    assert_contains(
        &model.expert_weights(0).unwrap_err().to_string(),
        &[
            "experts.0.gate_proj.weight",
            "shape [16, 32]",
            "expected [17, 32]",
        ],
    );

    let folder = copy(STACKED[0]);
    set(
        &folder.path().join("config.json"),
        "num_local_experts",
        Some(json!(65536)),
    );
    let model = HubModel::open(folder.path()).unwrap();
    assert_contains(
        &model.expert_weights(0).unwrap_err().to_string(),
        &["no tensor \"model.layers.0.mlp.experts.8.gate_proj.weight\""],
    );
}
