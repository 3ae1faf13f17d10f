//! Checkpoint folders of known contents.
#![allow(dead_code, reason = "each test binary uses a part")]

use moe_lora_checkpoint::{
    AdapterActivation, AdapterEntry, Axis, Checkpoint, Dtype, GroupSizes, Manifest, Save,
    ShardedTensor, Strictness, TensorLayout,
};
use std::collections::BTreeMap;
use std::path::Path;

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
        shared: false,
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
