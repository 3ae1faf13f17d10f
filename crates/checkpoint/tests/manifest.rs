//! The text of a manifest, and one test for each way in which it can be wrong.

mod folders;

use folders::{
    GATE_UP_B, assert_names, edited, entry, layouts, open_error, overwrite, save, saved,
};
use moe_lora_checkpoint::{CheckpointError, GroupSizes, Manifest};
use serde_json::{Value, json};
use std::fs;
use tempfile::TempDir;

#[test]
fn a_manifest_reads_as_this() {
    let folder = TempDir::new().unwrap();
    save(
        folder.path(),
        GroupSizes::new(1, 2),
        &[layouts().remove(1), layouts().remove(3)],
        15,
    );
    insta::assert_snapshot!(fs::read_to_string(Manifest::path(folder.path())).unwrap(), @r#"
    {
      "format": "moe-lora-checkpoint",
      "version": 1,
      "crc32": "19bff78f",
      "contents": {
        "generation": 1,
        "step": 15,
        "topology": {
          "world": 2,
          "tp": 1,
          "ep": 1,
          "etp": 2
        },
        "adapters": {
          "mlp.experts.gate_up_proj": {
            "rank": 4,
            "alpha": 0.1,
            "rslora": true,
            "activation": "identity",
            "sharing": "per_expert",
            "dora": false
          }
        },
        "tensors": [{
          "layout": {
            "key": "mlp.experts.gate_up_proj.lora_B",
            "dtype": "F32",
            "shape": [4, 16, 4],
            "fragments": [1, 2, 1],
            "axes": ["ep", "expert_tp", null]
          },
          "shards": [{
            "file": "g1-ep0-etp0-dp0.safetensors",
            "offset": [0, 0, 0],
            "shape": [4, 8, 4],
            "crc32": "f37dc38c"
          }, {
            "file": "g1-ep0-etp1-dp0.safetensors",
            "offset": [0, 4, 0],
            "shape": [4, 8, 4],
            "crc32": "0f44b86c"
          }]
        }, {
          "layout": {
            "key": "mlp.experts.gate_up_proj.lora_B.adamw.time",
            "dtype": "I64",
            "shape": [],
            "fragments": [],
            "axes": []
          },
          "shards": [{
            "file": "g1-ep0-etp0-dp0.safetensors",
            "offset": [],
            "shape": [],
            "crc32": "1b8a3df1"
          }]
        }]
      }
    }
    "#);
}

#[test]
fn a_flip_of_any_bit_of_the_manifest_is_refused() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), GroupSizes::new(1, 1), &layouts()[3..4], 5);
    let path = Manifest::path(folder.path());
    let good = fs::read(&path).unwrap();
    let spaces_and_breaks = |byte: u8| byte.is_ascii_whitespace();
    for bit in 0..good.len() * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        overwrite(&path, &bad);
        // Blanks around the contents mean nothing.
        let blank = spaces_and_breaks(good[bit / 8]) && spaces_and_breaks(bad[bit / 8]);
        assert!(blank || Manifest::read(folder.path()).is_err(), "bit {bit}");
    }
}

#[test]
fn a_shard_left_out_of_the_manifest() {
    let message = edited(|contents| {
        let shards = entry(contents, GATE_UP_B)["shards"].as_array_mut().unwrap();
        shards.remove(1);
    });
    assert_names(
        message,
        &["manifest.json", GATE_UP_B, "hold 192 of 256 elements"],
    );
}

#[test]
fn two_shards_of_one_box() {
    let message = edited(|contents| {
        let shards = entry(contents, GATE_UP_B)["shards"].as_array_mut().unwrap();
        shards[1]["offset"] = shards[0]["offset"].clone();
    });
    let files = "g1-ep0-etp0-dp0.safetensors and g1-ep0-etp1-dp0.safetensors";
    assert_names(
        message,
        &["manifest.json", GATE_UP_B, files, "hold the same elements"],
    );

    let message = edited(|contents| {
        let shards = entry(contents, GATE_UP_B)["shards"].as_array_mut().unwrap();
        let again = shards[0].clone();
        shards.push(again);
    });
    assert_names(
        message,
        &["manifest.json", GATE_UP_B, "a file for each shard"],
    );
}

#[test]
fn a_tensor_listed_twice() {
    let message = edited(|contents| {
        let tensors = contents["tensors"].as_array_mut().unwrap();
        let again = tensors[0].clone();
        tensors.insert(0, again);
    });
    assert_names(
        message,
        &["manifest.json", "attention.q_proj.lora_B", "appears twice"],
    );
}

#[test]
fn hostile_sizes_in_the_manifest() {
    let huge = 1u64 << 62;
    for (field, value, part) in [
        ("shape", json!([huge, 16, 4]), "fits in memory"),
        ("shape", json!([0, huge, huge]), "fits in memory"),
        ("shape", json!([huge / 64, 16, 4]), "fits in memory"),
        (
            "shape",
            json!([1, 1, 1, 1, 1, 1, 1, 1, 1]),
            "at most 8 axes",
        ),
        (
            "fragments",
            json!([1, u64::MAX, 1]),
            "fragments=[1, 18446744073709551615, 1]",
        ),
        ("fragments", json!([1, 0, 1]), "fragments=[1, 0, 1]"),
        ("axes", json!([null]), "axes=[None]"),
        ("dtype", json!("F4"), "dtype=F4"),
    ] {
        let message = edited(|contents| entry(contents, GATE_UP_B)["layout"][field] = value);
        assert_names(message, &["manifest.json", GATE_UP_B, part]);
    }
    for (field, value, part) in [
        (
            "offset",
            json!([0, u64::MAX, 0]),
            "offset=[0, 18446744073709551615, 0]",
        ),
        ("offset", json!([0]), "expected 3 axes"),
        (
            "shape",
            json!([u64::MAX, 8, 4]),
            "expected offset + 18446744073709551615",
        ),
        (
            "crc32",
            json!("00000000 00000000"),
            "2 checksums, expected 1 checksums",
        ),
    ] {
        let message = edited(|contents| entry(contents, GATE_UP_B)["shards"][0][field] = value);
        assert_names(message, &["manifest.json", GATE_UP_B, part]);
    }
    assert_names(
        edited(|contents| contents["topology"]["ep"] = json!(u64::MAX)),
        &["manifest.json", "ep_size=18446744073709551615"],
    );
    assert_names(
        edited(|contents| contents["topology"]["ep"] = json!(0)),
        &["manifest.json", "ep_size=0"],
    );
}

/// A manifest may claim more than the files hold; nothing of that size is allocated.
#[test]
fn a_manifest_larger_than_its_files() {
    let message = edited(|contents| {
        let entry = entry(contents, "mlp.experts.down_proj.lora_A");
        entry["layout"]["shape"] = json!([1u64 << 40, 8]);
        for shard in entry["shards"].as_array_mut().unwrap() {
            shard["shape"] = json!([1u64 << 40, 4]);
        }
    });
    assert_names(
        message,
        &[
            "manifest.json",
            "down_proj.lora_A",
            "checksums, expected 536870912",
        ],
    );
}

#[test]
fn names_that_leave_the_folder() {
    for name in [
        "../g1-ep0-etp0-dp0.safetensors",
        "/etc/passwd",
        "/tmp/x.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "C:x.safetensors",
        "..",
        ".safetensors",
        "",
        "x.bin",
        "x\u{0}.safetensors",
    ] {
        let message =
            edited(|contents| entry(contents, GATE_UP_B)["shards"][0]["file"] = json!(name));
        let quoted = format!("{name:?}");
        assert_names(
            message,
            &["manifest.json", GATE_UP_B, &quoted, "not a plain"],
        );
    }
}

#[test]
fn another_format_or_version() {
    let set = |field: &str, value: Value| {
        let folder = saved();
        let path = Manifest::path(folder.path());
        let mut document: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        document[field] = value;
        fs::write(&path, document.to_string()).unwrap();
        open_error(folder.path())
    };
    let version = set("version", json!(2));
    assert!(matches!(
        version,
        CheckpointError::Version { version: 2, .. }
    ));
    assert_names(
        version,
        &["manifest.json has version 2, supported is 1 (read it with a later"],
    );
    assert_names(set("format", json!("torch")), &["has format \"torch\""]);
    assert_names(
        set("more", json!(1)),
        &["manifest.json", "unknown field `more`"],
    );
    assert_names(
        set("contents", json!({})),
        &["manifest.json has contents of crc32"],
    );
}

#[test]
fn an_unknown_field() {
    for pointer in [
        "",
        "/topology",
        "/tensors/0",
        "/tensors/0/layout",
        "/tensors/0/shards/0",
    ] {
        let message = edited(|contents| contents.pointer_mut(pointer).unwrap()["new"] = json!(1));
        assert_names(message, &["manifest.json", "unknown field `new`"]);
    }
}

#[test]
fn no_manifest() {
    let folder = TempDir::new().unwrap();
    assert_names(open_error(folder.path()), &["cannot open", "manifest.json"]);
}

#[test]
fn tensors_out_of_order() {
    let message = edited(|contents| contents["tensors"].as_array_mut().unwrap().swap(0, 1));
    let key = "attention.q_proj.lora_B";
    assert_names(message, &["manifest.json", key, "keys in rising order"]);
}

/// The shards claim one file and one box; comparing them would say so, pair by pair.
#[test]
fn more_shards_than_any_world_has_are_refused_before_they_are_compared() {
    let with = |count: usize| {
        edited(|contents| {
            let shards = entry(contents, GATE_UP_B)["shards"].as_array_mut().unwrap();
            *shards = vec![shards[0].clone(); count];
        })
    };
    let refused = "shards=4097, expected at most 4096";
    assert_names(with(4097), &["manifest.json", GATE_UP_B, refused]);
    assert_names(with(4096), &[GATE_UP_B, "a file for each shard"]);
}
