//! One test for each way in which the files of a checkpoint can be wrong: an error that names file
//! and tensor.

mod folders;

use folders::{
    GATE_UP_B, TIME, assert_loads, assert_names, change, edited, entry, full, layouts, open_error,
    overwrite, save, saved,
};
use moe_lora_checkpoint::{
    Axis, BLOCK_BYTES, Checkpoint, CheckpointError, Dtype, GroupSizes, TensorLayout,
};
use serde_json::json;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

const FILE: &str = "g1-ep1-etp0-dp0.safetensors";

fn file(folder: &TempDir) -> PathBuf {
    folder.path().join(FILE)
}

#[test]
fn a_truncated_file() {
    for kept in [0, 7, 100] {
        let folder = saved();
        change(&file(&folder), |bytes| bytes.truncate(kept));
        assert_names(
            open_error(folder.path()),
            &[FILE, "tensor \"", "bytes, its header declares"],
        );
    }
    let folder = saved();
    change(&file(&folder), |bytes| _ = bytes.pop());
    assert_names(
        open_error(folder.path()),
        &[FILE, "tensor \"", "bytes, its header declares"],
    );
}

#[test]
fn a_bit_flip_in_the_data_is_found_by_those_who_read_the_block() {
    let folder = saved();
    change(&file(&folder), |bytes| *bytes.last_mut().unwrap() ^= 4);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mut damaged = Vec::new();
    for layout in layouts() {
        match checkpoint.full(&layout.key) {
            Ok(tensor) => assert_eq!(tensor.bytes, full(&layout, 5)),
            Err(error) => {
                assert!(matches!(error, CheckpointError::Checksum { .. }), "{error}");
                assert_names(error, &[FILE, &layout.key, "is damaged in bytes 0.."]);
                damaged.push(layout);
            }
        }
    }
    let [layout] = &damaged[..] else {
        panic!("one tensor is damaged")
    };
    let mine = layout
        .shard(&GroupSizes::new(2, 2).place(0).unwrap())
        .unwrap();
    checkpoint.read(&mine).unwrap();
    let other = layout
        .shard(&GroupSizes::new(2, 2).place(2).unwrap())
        .unwrap();
    checkpoint.read(&other).unwrap_err();
}

#[test]
fn damage_in_a_block_is_met_by_the_ranks_that_need_it() {
    let folder = TempDir::new().unwrap();
    let rows = TensorLayout::new("w", Dtype::U8, [4, BLOCK_BYTES]).with_axis(0, Axis::Ep);
    save(
        folder.path(),
        GroupSizes::new(1, 1),
        std::slice::from_ref(&rows),
        5,
    );
    let file = folder.path().join("g1-ep0-etp0-dp0.safetensors");
    change(&file, |bytes| {
        let row = bytes.len() - 2 * BLOCK_BYTES;
        bytes[row] ^= 1;
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    for place in GroupSizes::new(4, 1).places().unwrap() {
        let found = checkpoint.read(&rows.shard(&place).unwrap());
        assert_eq!(found.is_err(), place.ep() == 2, "{place}");
    }
    let message = checkpoint.full("w").unwrap_err();
    assert_names(
        message,
        &["tensor \"w\" is damaged in bytes 32768..49152 of its shard"],
    );
}

#[test]
fn a_flip_of_any_bit_of_a_header_gives_an_error_or_the_saved_bytes() {
    let folder = TempDir::new().unwrap();
    let layouts = &layouts()[1..4];
    save(folder.path(), GroupSizes::new(1, 1), layouts, 5);
    let file = folder.path().join("g1-ep0-etp0-dp0.safetensors");
    let good = fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(*good.first_chunk().unwrap()) as usize;
    let mut refused = 0;
    for bit in 0..header * 8 {
        let mut bad = good.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        overwrite(&file, &bad);
        match Checkpoint::open(folder.path()) {
            Err(_) => refused += 1,
            // A blank became another, or offsets moved to bytes of other checksums.
            Ok(checkpoint) => {
                for layout in layouts {
                    if let Ok(tensor) = checkpoint.full(&layout.key) {
                        assert_eq!(tensor.bytes, full(layout, 5));
                    }
                }
            }
        }
    }
    assert!(refused > header * 7, "{refused} of {} flips", header * 8);
}

#[test]
fn tensors_that_changed_places_in_a_file() {
    let folder = saved();
    change(&file(&folder), |bytes| {
        let moment = "mlp.experts.gate_up_proj.lora_B.adamw.moment_1";
        let text = String::from_utf8_lossy(&bytes[8..]);
        let (_, data) = bytes.split_at(8 + text.find("}}").unwrap() + 2);
        let end = bytes.len() - data.len();
        let header = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let swapped = header
            .replace(&format!("{moment:?}"), "\"x\"")
            .replace(&format!("{GATE_UP_B:?}"), &format!("{moment:?}"))
            .replace("\"x\"", &format!("{GATE_UP_B:?}"));
        assert_eq!(swapped.len(), end);
        bytes[..end].copy_from_slice(swapped.as_bytes());
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = checkpoint.full(GATE_UP_B).unwrap_err();
    assert_names(error, &[FILE, GATE_UP_B, "is damaged"]);
}

#[test]
fn a_missing_file() {
    let folder = saved();
    fs::remove_file(file(&folder)).unwrap();
    assert_names(
        open_error(folder.path()),
        &[FILE, "tensor \"", "cannot open"],
    );
}

#[test]
fn a_folder_in_the_place_of_a_file() {
    let folder = saved();
    fs::remove_file(file(&folder)).unwrap();
    fs::create_dir(file(&folder)).unwrap();
    assert_names(open_error(folder.path()), &[FILE, "not a regular file"]);
}

#[test]
fn another_dtype_of_the_same_size() {
    let message = edited(|contents| entry(contents, GATE_UP_B)["layout"]["dtype"] = json!("I32"));
    let expected = "is F32 [2, 8, 4], the manifest says I32 [2, 8, 4]";
    assert_names(
        message,
        &["g1-ep0-etp0-dp0.safetensors", GATE_UP_B, expected],
    );
}

#[test]
fn another_shape_of_the_same_size() {
    let message = edited(|contents| {
        let entry = entry(contents, GATE_UP_B);
        entry["layout"]["shape"] = json!([4, 8, 8]);
        for shard in entry["shards"].as_array_mut().unwrap() {
            shard["shape"] = json!([2, 4, 8]);
            let row = shard["offset"][1].as_u64().unwrap() / 2;
            shard["offset"][1] = row.into();
        }
    });
    let expected = "is F32 [2, 8, 4], the manifest says F32 [2, 4, 8]";
    assert_names(
        message,
        &["g1-ep0-etp0-dp0.safetensors", GATE_UP_B, expected],
    );
}

#[test]
fn a_tensor_in_a_file_that_the_manifest_does_not_know() {
    let message = edited(|contents| {
        let tensors = contents["tensors"].as_array_mut().unwrap();
        tensors.retain(|entry| entry["layout"]["key"] != GATE_UP_B);
    });
    assert_names(
        message,
        &[".safetensors", GATE_UP_B, "is not in the manifest"],
    );
}

#[test]
fn hostile_sizes_in_a_file() {
    for length in [u64::MAX, 1 << 62, u64::MAX - 7] {
        let folder = saved();
        change(&file(&folder), |bytes| {
            bytes[..8].copy_from_slice(&length.to_le_bytes())
        });
        assert_names(open_error(folder.path()), &[FILE, "its header declares"]);
    }
    for (shape, end) in [
        ("[4611686018427387904,4]", 0),
        ("[1152921504606846976]", 1u64 << 62),
    ] {
        let folder = saved();
        let header =
            format!(r#"{{"x":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}"#);
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        fs::write(file(&folder), bytes).unwrap();
        assert_names(open_error(folder.path()), &[FILE, "tensor \""]);
    }
}

#[cfg(unix)]
#[test]
fn a_link_is_followed_when_read_and_replaced_when_written() {
    let folder = saved();
    let elsewhere = TempDir::new().unwrap();
    let target = elsewhere.path().join("moved");
    fs::rename(file(&folder), &target).unwrap();
    std::os::unix::fs::symlink(&target, file(&folder)).unwrap();
    assert_loads(folder.path(), GroupSizes::new(1, 4), &layouts(), 5);

    let kept = fs::read(&target).unwrap();
    for name in ["g2-ep0-etp0-dp0.safetensors.tmp", "manifest.json.tmp"] {
        std::os::unix::fs::symlink(&target, folder.path().join(name)).unwrap();
    }
    save(folder.path(), GroupSizes::new(1, 1), &layouts(), 6);
    assert_eq!(fs::read(&target).unwrap(), kept);
    assert_loads(folder.path(), GroupSizes::new(1, 1), &layouts(), 6);
}

#[test]
fn an_unknown_tensor_is_told_a_near_name() {
    let folder = saved();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = checkpoint
        .full("mlp.experts.gate_up_proj.lora_b")
        .unwrap_err();
    assert_names(error, &["did you mean", GATE_UP_B]);
    assert!(checkpoint.full(TIME).unwrap().shape.is_empty());
}
