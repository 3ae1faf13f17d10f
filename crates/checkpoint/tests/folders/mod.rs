//! Checkpoint folders of known contents.
#![allow(dead_code, reason = "each test binary uses a part")]

use moe_lora_checkpoint::{
    AdapterActivation, AdapterEntry, AdapterSharing, Axis, Checkpoint, CheckpointError, Dtype,
    GroupSizes, Manifest, Save, ShardedTensor, Strictness, TensorLayout,
};
use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::LazyLock;
use tempfile::TempDir;

pub const GATE_UP_B: &str = "mlp.experts.gate_up_proj.lora_B";
pub const TIME: &str = "mlp.experts.gate_up_proj.lora_B.adamw.time";

/// Adapters of 4 experts, hidden size 8, intermediate size 8, rank 4; the fused one, the down
/// projection with a shared A, an optimizer moment, a step counter and a dense weight.
pub fn layouts() -> Vec<TensorLayout> {
    let experts = |key: &str, shape: [usize; 3], axis: usize| {
        TensorLayout::new(key, Dtype::F32, shape)
            .with_axis(0, Axis::Ep)
            .with_axis(axis, Axis::ExpertTp)
    };
    vec![
        experts("mlp.experts.gate_up_proj.lora_A", [4, 4, 8], 1),
        experts(GATE_UP_B, [4, 16, 4], 1).with_fragments(1, 2),
        experts(
            "mlp.experts.gate_up_proj.lora_B.adamw.moment_1",
            [4, 16, 4],
            1,
        )
        .with_fragments(1, 2),
        TensorLayout::new(TIME, Dtype::I64, []),
        TensorLayout::new("mlp.experts.down_proj.lora_A", Dtype::BF16, [4, 8])
            .with_axis(1, Axis::ExpertTp),
        experts("mlp.experts.down_proj.lora_B", [4, 8, 4], 1),
        TensorLayout::new("attention.q_proj.lora_B", Dtype::F16, [8, 4]).with_axis(0, Axis::Tp),
        TensorLayout::new("empty", Dtype::F32, [0, 4]),
    ]
}

/// Bytes of a whole tensor that no other tensor or step has.
pub fn full(layout: &TensorLayout, step: u64) -> Vec<u8> {
    let mut state = step + 1;
    let seed = layout.key.bytes();
    seed.for_each(|byte| state = state.wrapping_mul(31) + u64::from(byte));
    let next = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 40) as u8
    };
    (0..layout.whole().byte_len()).map(next).collect()
}

/// The shard's bytes of a whole tensor, without the crate's plan: every element is asked for.
pub fn cut(shard: &ShardedTensor, full: &[u8]) -> Vec<u8> {
    let width = shard.dtype.bitsize() / 8;
    let mut picked = vec![0];
    for (axis, extent) in shard.global_shape.iter().enumerate() {
        let fragment = extent / shard.fragments[axis];
        let begin = shard.offset[axis];
        let end = begin + shard.local_shape[axis] / shard.fragments[axis];
        let held = (0..*extent).filter(|index| (begin..end).contains(&(index % fragment)));
        let held = Vec::from_iter(held);
        let next = |base: usize| held.iter().map(move |index| base * extent + index);
        picked = picked.into_iter().flat_map(next).collect();
    }
    let element = |index: usize| &full[index * width..(index + 1) * width];
    picked.into_iter().flat_map(element).copied().collect()
}

pub fn adapters() -> BTreeMap<String, AdapterEntry> {
    let adapter = AdapterEntry {
        rank: 4,
        alpha: 0.1,
        rslora: true,
        activation: AdapterActivation::Identity,
        sharing: AdapterSharing::PerExpert,
        dora: false,
        pissa: false,
    };
    BTreeMap::from([("mlp.experts.gate_up_proj".to_owned(), adapter)])
}

/// Every rank's side of a save, none committed.
pub fn written(folder: &Path, sizes: GroupSizes, layouts: &[TensorLayout], step: u64) -> Vec<Save> {
    let wrote = sizes.places().unwrap().map(|place| {
        let save = Save::begin(folder, place, step).unwrap();
        let bytes = |shard: &ShardedTensor| {
            let layout = layouts
                .iter()
                .find(|layout| layout.key == shard.key)
                .unwrap();
            Ok(cut(shard, &full(layout, step)).into())
        };
        save.write(layouts, bytes).unwrap();
        save
    });
    wrote.collect()
}

pub fn save(folder: &Path, sizes: GroupSizes, layouts: &[TensorLayout], step: u64) -> Manifest {
    let mut saves = written(folder, sizes, layouts, step);
    saves.swap_remove(0).commit(adapters()).unwrap()
}

/// Checks that every rank of `sizes` loads its part of what `step` saved, and that whole tensors
/// have all their bits.
pub fn assert_loads(folder: &Path, sizes: GroupSizes, layouts: &[TensorLayout], step: u64) {
    let checkpoint = Checkpoint::open(folder).unwrap();
    assert_eq!(checkpoint.manifest().step, step);
    for place in sizes.places().unwrap() {
        let shards = layouts.iter().map(|layout| layout.shard(&place).unwrap());
        let wanted: Vec<_> = shards.collect();
        let (loaded, report) = checkpoint.load(&wanted, Strictness::Exact).unwrap();
        assert_eq!(report.applied.len(), layouts.len());
        for (layout, shard) in layouts.iter().zip(&wanted) {
            let tensor = &loaded[&layout.key];
            assert_eq!(
                (tensor.dtype, &tensor.shape),
                (layout.dtype, &shard.local_shape)
            );
            let expected = cut(shard, &full(layout, step));
            assert_eq!(tensor.bytes, expected, "{shard} at {place} of {sizes:?}");
        }
    }
    for layout in layouts {
        let tensor = checkpoint.full(&layout.key).unwrap();
        assert_eq!(tensor.shape, layout.shape);
        assert_eq!(tensor.bytes, full(layout, step), "{}", layout.key);
    }
}

/// A copy of one checkpoint, which is saved once: a save waits for the disk.
pub fn saved() -> TempDir {
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

pub fn change(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Puts as many bytes in their place. Cutting the file first would make some file systems wait for
/// the disk.
pub fn overwrite(path: &Path, bytes: &[u8]) {
    let mut file = fs::File::options().write(true).open(path).unwrap();
    file.write_all(bytes).unwrap();
}

/// Changes the contents of a manifest or part and signs them again.
pub fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut document: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut document["contents"]);
    let contents = document["contents"].to_string();
    document["crc32"] = format!("{:08x}", crc32fast::hash(contents.as_bytes())).into();
    fs::write(path, document.to_string()).unwrap();
}

/// The error of opening a checkpoint whose manifest was changed and signed again.
pub fn edited(change: impl FnOnce(&mut Value)) -> String {
    let folder = saved();
    edit(&Manifest::path(folder.path()), change);
    open_error(folder.path()).to_string()
}

pub fn open_error(folder: &Path) -> CheckpointError {
    Checkpoint::open(folder).unwrap_err()
}

#[track_caller]
pub fn assert_names(error: impl ToString, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

pub fn entry<'a>(contents: &'a mut Value, key: &str) -> &'a mut Value {
    let tensors = contents["tensors"].as_array_mut().unwrap();
    tensors
        .iter_mut()
        .find(|entry| entry["layout"]["key"] == key)
        .unwrap()
}

pub fn bytes_of(shard: &ShardedTensor, step: u64) -> Vec<u8> {
    let layouts = layouts();
    let layout = layouts.iter().find(|layout| layout.key == shard.key);
    cut(shard, &full(layout.unwrap(), step))
}
