//! One test for each way in which the ranks of a save can fail or disagree: the checkpoint before it
//! stays.

mod folders;

use folders::{
    GATE_UP_B, adapters, assert_loads, assert_names, bytes_of, edit, layouts, open_error, save,
    saved, written,
};
use moe_lora_checkpoint::{
    Axis, CheckpointError, Dtype, GroupSizes, Manifest, Save, ShardedTensor, TensorLayout,
};
use safetensors::SafeTensors;
use serde_json::json;
use std::fs;
use tempfile::TempDir;

/// What the first rank says when it may not commit what all wrote.
fn refused(mut saves: Vec<Save>) -> CheckpointError {
    saves.swap_remove(0).commit(adapters()).unwrap_err()
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
    let error = refused(saves);
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
    let error = refused(saves);
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
    let error = refused(saves);
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
    let error = refused(saves);
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
fn every_replica_is_compared_with_the_stored_one() {
    let folder = TempDir::new().unwrap();
    let layout = [TensorLayout::new("w", Dtype::U8, [2])];
    for differs in [1, 2] {
        let sizes = GroupSizes::new(1, 1).with_world(3);
        let places = sizes.places().unwrap().enumerate();
        let saves = places.map(|(rank, place)| {
            let save = Save::begin(folder.path(), place, 6).unwrap();
            let last = u8::from(rank == differs);
            save.write(&layout, |_| Ok(vec![7, last].into())).unwrap();
            save
        });
        let saves = Vec::from_iter(saves);
        let error = saves.into_iter().next().unwrap().commit(adapters());
        let second = format!("on ep0-etp0-dp0 and ep0-etp0-dp{differs}");
        assert_names(error.unwrap_err(), &["tensor \"w\"", &second]);
    }
}

#[test]
fn a_part_of_another_topology() {
    let folder = TempDir::new().unwrap();
    let layout = [TensorLayout::new("w", Dtype::U8, [2]).with_axis(0, Axis::ExpertTp)];
    // Both call the second rank ep0-etp1-dp0.
    let (two, four) = (GroupSizes::new(1, 2), GroupSizes::new(1, 2).with_world(4));
    let [first, second] = [(two, 0), (four, 1)].map(|(sizes, rank)| {
        let save = Save::begin(folder.path(), sizes.place(rank).unwrap(), 6).unwrap();
        save.write(&layout, |_| Ok(vec![7].into())).unwrap();
        save
    });
    assert_eq!(first.generation(), second.generation());
    let error = first.commit(adapters()).unwrap_err();
    assert_names(
        &error,
        &["ep0-etp1-dp0 saved topology", "world: 4", "world: 2"],
    );
    let topology = "topology";
    assert!(matches!(error, CheckpointError::Disagreement { what, .. } if what == topology));
}

#[test]
fn a_generation_that_none_can_follow() {
    let folder = saved();
    edit(&Manifest::path(folder.path()), |contents| {
        contents["generation"] = json!(u64::MAX);
    });
    let place = GroupSizes::new(1, 1).place(0).unwrap();
    let error = Save::begin(folder.path(), place, 6).err().unwrap();
    assert!(
        matches!(error, CheckpointError::LastGeneration { .. }),
        "{error}"
    );
    assert_names(error, &["manifest.json", "generation=18446744073709551615"]);
    assert_loads(folder.path(), GroupSizes::new(1, 1), &layouts(), 5);

    edit(&Manifest::path(folder.path()), |contents| {
        contents["generation"] = json!(u64::MAX - 1);
    });
    save(folder.path(), GroupSizes::new(1, 1), &layouts(), 6);
    assert_loads(folder.path(), GroupSizes::new(1, 1), &layouts(), 6);
}

#[test]
fn tensors_of_mixed_widths_begin_at_multiples_of_their_own() {
    let folder = TempDir::new().unwrap();
    // In the order of their keys, and of their widths from below, the wide ones would be misplaced.
    let layouts = [
        TensorLayout::new("a", Dtype::BF16, [3]),
        TensorLayout::new("b", Dtype::I64, [1]),
        TensorLayout::new("c", Dtype::F32, [3]),
        TensorLayout::new("d", Dtype::I64, [2]),
        TensorLayout::new("longer", Dtype::U8, [5]),
    ];
    save(folder.path(), GroupSizes::new(1, 1), &layouts, 5);
    let file = fs::read(folder.path().join("g1-ep0-etp0-dp0.safetensors")).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&file).unwrap();
    for layout in &layouts {
        let info = metadata.info(&layout.key).unwrap();
        let begin = 8 + header + info.data_offsets.0;
        assert!(
            begin.is_multiple_of(layout.dtype.bitsize() / 8),
            "{} at {begin}",
            layout.key
        );
    }
    assert_loads(folder.path(), GroupSizes::new(1, 1), &layouts, 5);
}
