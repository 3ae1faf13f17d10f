//! One test for each way in which a checkpoint can be wrong: an error that names file and tensor.

mod folders;

use folders::{GATE_UP_B, TIME, adapters, assert_loads, full, layouts, save, written};
use moe_lora_checkpoint::{
    Axis, BLOCK_BYTES, Checkpoint, CheckpointError, Dtype, GroupSizes, Manifest, Save,
    ShardedTensor, TensorLayout,
};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use tempfile::TempDir;

const FILE: &str = "g1-ep1-etp0-dp0.safetensors";

/// A copy of one checkpoint, which is saved once: a save waits for the disk.
fn saved() -> TempDir {
    static SAVED: LazyLock<Vec<(OsString, Vec<u8>)>> = LazyLock::new(|| {
        let folder = TempDir::new().unwrap();
        save(folder.path(), GroupSizes::new(2, 2), &layouts(), 5);
        let entries = fs::read_dir(folder.path()).unwrap().map(Result::unwrap);
        let files = entries.map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap()));
        files.collect()
    });
    let folder = TempDir::new().unwrap();
    for (name, bytes) in SAVED.iter() {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn file(folder: &TempDir) -> PathBuf {
    folder.path().join(FILE)
}

fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Puts as many bytes in their place. Cutting the file first would make some file systems wait for
/// the disk.
fn overwrite(path: &Path, bytes: &[u8]) {
    let mut file = fs::File::options().write(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
}

/// Changes the contents of a manifest or part and signs them again.
fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut document: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut document["contents"]);
    let contents = document["contents"].to_string();
    document["crc32"] = format!("{:08x}", crc32fast::hash(contents.as_bytes())).into();
    fs::write(path, document.to_string()).unwrap();
}

/// The error of opening a checkpoint whose manifest was changed and signed again.
fn edited(change: impl FnOnce(&mut Value)) -> String {
    let folder = saved();
    edit(&Manifest::path(folder.path()), change);
    open_error(folder.path()).to_string()
}

fn open_error(folder: &Path) -> CheckpointError {
    Checkpoint::open(folder).unwrap_err()
}

#[track_caller]
fn assert_names(error: impl ToString, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

fn entry<'a>(contents: &'a mut Value, key: &str) -> &'a mut Value {
    let tensors = contents["tensors"].as_array_mut().unwrap();
    tensors
        .iter_mut()
        .find(|entry| entry["layout"]["key"] == key)
        .unwrap()
}

fn bytes_of(shard: &ShardedTensor, step: u64) -> Vec<u8> {
    let layouts = layouts();
    let layout = layouts.iter().find(|layout| layout.key == shard.key);
    folders::cut(shard, &full(layout.unwrap(), step))
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
fn a_part_that_is_missing_at_commit() {
    let folder = saved();
    let mut saves = written(folder.path(), GroupSizes::new(1, 2), &layouts(), 6);
    fs::remove_file(folder.path().join("g2-ep0-etp1-dp0.part.json")).unwrap();
    let error = saves.remove(0).commit(adapters()).unwrap_err();
    assert_names(
        error,
        &[
            "the part of ep0-etp1-dp0 is missing",
            "g2-ep0-etp1-dp0.part.json",
        ],
    );
    assert_loads(folder.path(), GroupSizes::new(1, 1), &layouts(), 5);
}

#[test]
fn a_part_of_an_unfinished_save_does_not_stand_in_for_one_of_this_save() {
    let folder = saved();
    let sizes = GroupSizes::new(1, 2);
    written(folder.path(), sizes, &layouts(), 6);
    // The same step again after a restart; the second rank begins and fails.
    let saves: Vec<_> = sizes
        .places()
        .unwrap()
        .map(|place| Save::begin(folder.path(), place, 6).unwrap())
        .collect();
    saves[0].write(&[], |_| unreachable!("no shards")).unwrap();
    let error = saves
        .into_iter()
        .next()
        .unwrap()
        .commit(adapters())
        .unwrap_err();
    assert!(
        matches!(error, CheckpointError::MissingPart { .. }),
        "{error}"
    );
}

#[test]
fn ranks_that_saved_different_steps() {
    let folder = TempDir::new().unwrap();
    let sizes = GroupSizes::new(1, 2);
    let [first, second] = [0, 1].map(|rank| {
        let place = sizes.place(rank).unwrap();
        Save::begin(folder.path(), place, 6 + rank as u64).unwrap()
    });
    let layouts = [TensorLayout::new("w", Dtype::U8, [1])];
    for save in [&first, &second] {
        save.write(&layouts, |_| Ok(vec![1].into())).unwrap();
    }
    let error = first.commit(adapters()).unwrap_err();
    assert_names(error, &["ep0-etp1-dp0 saved step 7, the committing rank 6"]);
}

#[test]
fn ranks_that_describe_a_tensor_differently() {
    let folder = TempDir::new().unwrap();
    let saves = written(folder.path(), GroupSizes::new(1, 2), &layouts(), 6);
    let layout = TensorLayout::new("w", Dtype::U8, [2, 2]);
    for (axis, save) in saves.iter().enumerate() {
        let layout = layout.clone().with_axis(axis, Axis::ExpertTp);
        save.write(&[layout], |_| Ok(vec![1, 2].into())).unwrap();
    }
    let error = saves
        .into_iter()
        .next()
        .unwrap()
        .commit(adapters())
        .unwrap_err();
    assert_names(
        error,
        &["tensor \"w\"", "ep0-etp0-dp0 and another on ep0-etp1-dp0"],
    );
}

#[test]
fn a_rank_that_left_a_tensor_out() {
    let folder = TempDir::new().unwrap();
    let saves = written(folder.path(), GroupSizes::new(2, 1), &layouts(), 6);
    let fewer: Vec<_> = layouts()
        .into_iter()
        .filter(|layout| layout.key != GATE_UP_B)
        .collect();
    saves[1]
        .write(&fewer, |shard| Ok(bytes_of(shard, 6).into()))
        .unwrap();
    let error = saves
        .into_iter()
        .next()
        .unwrap()
        .commit(adapters())
        .unwrap_err();
    assert_names(error, &[GATE_UP_B, "hold 128 of 256 elements"]);
    assert_names(open_error(folder.path()), &["cannot open", "manifest.json"]);
}

#[test]
fn replicas_that_differ_in_a_bit() {
    let folder = saved();
    let sizes = GroupSizes::new(1, 2).with_world(4);
    let saves = written(folder.path(), sizes, &layouts(), 6);
    let flipped = |shard: &ShardedTensor| {
        let mut bytes = bytes_of(shard, 6);
        if shard.key == GATE_UP_B {
            *bytes.last_mut().unwrap() ^= 1;
        }
        Ok(bytes.into())
    };
    saves[3].write(&layouts(), flipped).unwrap();
    let error = saves
        .into_iter()
        .next()
        .unwrap()
        .commit(adapters())
        .unwrap_err();
    assert!(
        matches!(error, CheckpointError::UnequalReplicas { .. }),
        "{error}"
    );
    let places = "on ep0-etp1-dp0 and ep0-etp1-dp1, first in bytes 0..512 of the shard";
    assert_names(error, &[GATE_UP_B, places]);
    assert_loads(folder.path(), GroupSizes::new(1, 1), &layouts(), 5);
}

#[test]
fn an_alpha_that_is_no_number() {
    let folder = TempDir::new().unwrap();
    let mut saves = written(folder.path(), GroupSizes::new(1, 1), &layouts(), 6);
    let mut adapters = adapters();
    adapters
        .values_mut()
        .for_each(|adapter| adapter.alpha = f64::NAN);
    let error = saves.remove(0).commit(adapters).unwrap_err();
    assert_names(
        error,
        &[
            "manifest.json",
            "\"mlp.experts.gate_up_proj\" has alpha=NaN",
        ],
    );
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
