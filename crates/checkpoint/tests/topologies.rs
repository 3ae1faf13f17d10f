//! What is saved at one topology loads at every other.

mod folders;

use folders::{GATE_UP_B, TIME, adapters, assert_loads, cut, full, layouts, save};
use moe_lora_checkpoint::{
    Axis, BLOCK_BYTES, Checkpoint, CheckpointError, Dtype, GroupSizes, Manifest, Save,
    ShardedTensor, Strictness, TensorLayout, reshard,
};
use proptest::prelude::*;
use std::fs;
use tempfile::TempDir;

const SIZES: [(usize, usize); 6] = [(1, 1), (2, 2), (4, 1), (1, 4), (2, 1), (1, 2)];

#[test]
fn two_by_two_loads_at_every_other_topology_to_the_bit() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), GroupSizes::new(2, 2), &layouts(), 15);
    for (ep, etp) in SIZES {
        assert_loads(folder.path(), GroupSizes::new(ep, etp), &layouts(), 15);
    }
}

#[test]
fn replicas_and_dense_ranks_change_with_the_topology() {
    let folder = TempDir::new().unwrap();
    let two = GroupSizes::new(2, 1).with_world(4).with_tp(2);
    let four = GroupSizes::new(1, 2).with_world(8).with_tp(4);
    save(folder.path(), two, &layouts(), 1);
    assert_loads(folder.path(), four, &layouts(), 1);
    save(folder.path(), four, &layouts(), 2);
    assert_loads(folder.path(), two, &layouts(), 2);
}

#[test]
fn gate_up_cut_as_one_axis_would_mix_gate_with_up() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), GroupSizes::new(1, 2), &layouts(), 1);
    let layout = layouts()
        .into_iter()
        .find(|layout| layout.key == GATE_UP_B)
        .unwrap();
    let rank = GroupSizes::new(1, 2).place(1).unwrap();
    let right = cut(&layout.shard(&rank).unwrap(), &full(&layout, 1));
    let wrong = layout.with_fragments(1, 1).shard(&rank).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let plain = checkpoint.read(&wrong).unwrap();
    assert_eq!(plain.len(), right.len());
    assert_ne!(plain, right);
}

#[test]
fn a_reshard_is_what_the_ranks_would_have_saved() {
    let [from, by_ranks, anew] = [(); 3].map(|()| TempDir::new().unwrap());
    save(from.path(), GroupSizes::new(2, 2), &layouts(), 7);
    for (ep, etp) in SIZES {
        let sizes = GroupSizes::new(ep, etp);
        let expected = save(by_ranks.path(), sizes, &layouts(), 7);
        let source = Checkpoint::open(from.path()).unwrap();
        let mut last = None;
        let found = reshard(&source, anew.path(), sizes, |progress| {
            last = Some(progress)
        })
        .unwrap();
        assert_eq!(found, expected);
        let last = last.unwrap();
        assert_eq!(last.done, last.total);
        for name in found.files() {
            let [found, expected] =
                [&anew, &by_ranks].map(|f| fs::read(f.path().join(name)).unwrap());
            assert_eq!(found, expected, "{name}");
        }
    }
}

#[test]
fn a_reshard_in_place_replaces_its_source() {
    let folder = TempDir::new().unwrap();
    save(folder.path(), GroupSizes::new(2, 2), &layouts(), 7);
    let source = Checkpoint::open(folder.path()).unwrap();
    reshard(&source, folder.path(), GroupSizes::new(1, 4), |_| ()).unwrap();
    assert_loads(folder.path(), GroupSizes::new(4, 1), &layouts(), 7);
    // The files that were replaced stay readable to those who opened them before.
    assert_eq!(source.full(TIME).unwrap().bytes.len(), 8);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1 + 4);
}

#[test]
fn a_reshard_to_sizes_that_do_not_fit_writes_nothing() {
    let [from, anew] = [(); 2].map(|()| TempDir::new().unwrap());
    save(from.path(), GroupSizes::new(2, 2), &layouts(), 7);
    let source = Checkpoint::open(from.path()).unwrap();
    let error = reshard(&source, anew.path(), GroupSizes::new(3, 1), |_| ()).unwrap_err();
    assert!(
        matches!(error, CheckpointError::Indivisible { size: 3, .. }),
        "{error}"
    );
    assert_eq!(fs::read_dir(anew.path()).unwrap().count(), 0);
}

#[test]
fn adapters_and_step_come_back_as_saved() {
    let folder = TempDir::new().unwrap();
    for step in [15, 30] {
        let written = save(folder.path(), GroupSizes::new(1, 2), &layouts(), step);
        assert_eq!(Manifest::read(folder.path()).unwrap(), written);
    }
    let manifest = Manifest::read(folder.path()).unwrap();
    assert_eq!((manifest.generation, manifest.step), (2, 30));
    assert_eq!(manifest.adapters, adapters());
}

#[test]
fn a_load_reports_what_it_did() {
    let folder = TempDir::new().unwrap();
    let sizes = GroupSizes::new(1, 2);
    save(folder.path(), sizes, &layouts()[..4], 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let place = sizes.place(0).unwrap();
    let mut wanted: Vec<_> = layouts()[..4]
        .iter()
        .map(|l| l.shard(&place).unwrap())
        .collect();
    let (_, report) = checkpoint.load(&wanted, Strictness::Exact).unwrap();
    assert_eq!(report.to_string(), "applied 4");

    wanted[0] = wanted[0].clone();
    wanted[0].key = "mlp.experts.gate_up_proj.lora_a".into();
    let message = |wanted: &[ShardedTensor], strictness| {
        checkpoint.load(wanted, strictness).unwrap_err().to_string()
    };
    insta::assert_snapshot!(message(&wanted, Strictness::AllowMissing), @r#"
    nothing was loaded: applied 3
    missing 1: "mlp.experts.gate_up_proj.lora_a" (did you mean "mlp.experts.gate_up_proj.lora_A"?)
    unexpected 1: "mlp.experts.gate_up_proj.lora_A" (choose another checkpoint or strictness)
    "#);
    let (loaded, report) = checkpoint.load(&wanted, Strictness::AllowBoth).unwrap();
    assert_eq!((loaded.len(), report.missing.len()), (3, 1));

    let other = ShardedTensor::whole(TIME, Dtype::I32, [1]);
    insta::assert_snapshot!(message(&[other], Strictness::AllowBoth), @r#"
    nothing was loaded: applied 0
    unexpected 3: "mlp.experts.gate_up_proj.lora_A", "mlp.experts.gate_up_proj.lora_B", "mlp.experts.gate_up_proj.lora_B.adamw.moment_1"
    mismatched 1: "mlp.experts.gate_up_proj.lora_B.adamw.time" has I64 [], expected I32 [1] (choose another checkpoint or strictness)
    "#);
}

#[test]
fn rows_of_other_fragments_count_as_resharded() {
    let folder = TempDir::new().unwrap();
    let sizes = GroupSizes::new(1, 2);
    let layout = layouts().remove(1);
    save(folder.path(), sizes, std::slice::from_ref(&layout), 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let resharded = |layout: &TensorLayout| {
        let wanted = layout.shard(&sizes.place(0).unwrap()).unwrap();
        let (_, report) = checkpoint.load(&[wanted], Strictness::Exact).unwrap();
        report.resharded
    };
    assert!(resharded(&layout).is_empty());
    // As many rows, of which the gate's second half comes from the other rank.
    assert_eq!(resharded(&layout.with_fragments(1, 1)), [GATE_UP_B]);
}

#[test]
fn another_dtype_of_the_same_shape_is_a_mismatch() {
    let folder = TempDir::new().unwrap();
    let layout = TensorLayout::new("w", Dtype::F32, [2, 3]);
    save(folder.path(), GroupSizes::new(1, 1), &[layout], 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let other = ShardedTensor::whole("w", Dtype::I32, [2, 3]);
    let error = checkpoint
        .load(&[other], Strictness::AllowBoth)
        .unwrap_err();
    let CheckpointError::Refused { report } = error else {
        panic!("{error}")
    };
    assert_eq!(
        report.to_string(),
        "applied 0\nmismatched 1: \"w\" has F32 [2, 3], expected I32 [2, 3]"
    );
}

#[test]
fn a_tensor_wanted_twice_is_refused() {
    let folder = TempDir::new().unwrap();
    let layout = TensorLayout::new("w", Dtype::F32, [2]);
    let wanted = layout.whole();
    save(folder.path(), GroupSizes::new(1, 1), &[layout], 1);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let error = checkpoint.load(&[wanted.clone(), wanted], Strictness::AllowBoth);
    let error = error.unwrap_err();
    assert!(
        matches!(&error, CheckpointError::DuplicateKey { key } if key == "w"),
        "{error}"
    );
}

#[test]
fn a_tensor_of_many_blocks_is_read_in_parts() {
    // Rows of 24 KiB, so that blocks and rows meet nowhere but at the ends.
    let layout = TensorLayout::new("w", Dtype::F32, [32, 6 << 10])
        .with_axis(0, Axis::Ep)
        .with_axis(1, Axis::ExpertTp)
        .with_fragments(1, 3);
    assert!(layout.whole().byte_len() > 2 * BLOCK_BYTES);
    let folder = TempDir::new().unwrap();
    let layouts = [layout];
    save(folder.path(), GroupSizes::new(1, 2), &layouts, 3);
    for (ep, etp) in [(1, 1), (1, 4), (4, 1), (2, 2), (32, 1)] {
        assert_loads(folder.path(), GroupSizes::new(ep, etp), &layouts, 3);
    }
}

fn sizes() -> impl Strategy<Value = GroupSizes> {
    let size = || prop::sample::select(vec![1, 2, 4]);
    (size(), size(), size()).prop_map(|(ep, etp, tp)| {
        GroupSizes::new(ep, etp)
            .with_tp(tp)
            .with_world(ep * etp * tp)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn any_topology_loads_what_any_other_saved(from in sizes(), to in sizes(), step in 0..9u64) {
        let folder = TempDir::new().unwrap();
        save(folder.path(), from, &layouts(), step);
        assert_loads(folder.path(), to, &layouts(), step);
    }
}

#[test]
fn bytes_that_do_not_fill_the_shard_are_refused() {
    let folder = TempDir::new().unwrap();
    let place = GroupSizes::new(1, 1).place(0).unwrap();
    let save = Save::begin(folder.path(), place, 0).unwrap();
    let layout = TensorLayout::new("w", Dtype::F32, [2]);
    let message = |layouts: &[TensorLayout]| {
        save.write(layouts, |_| Ok(vec![0; 7].into()))
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        message(std::slice::from_ref(&layout)),
        "tensor \"w\" came with 7 bytes, its local shape takes 8 (hand over the rank's own part)"
    );
    assert!(message(&[layout.clone(), layout]).contains("appears twice"));
}
