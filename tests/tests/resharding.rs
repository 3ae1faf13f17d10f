//! Adapters and optimizer state saved at one topology and loaded at another.

use std::path::Path;

use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamW, AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{DType, Tensor, TensorData};
use moe_lora_adapters::{
    Activation, Adaptable, Init, LoraConfig, ResumeError, Sharing, Targets, Weight, load_adapters,
    load_checkpoint, save_checkpoint, stored_adapters, sync_gradients,
};
use moe_lora_checkpoint::{
    AdapterActivation, AdapterEntry, AdapterSharing, Axis, Checkpoint, CheckpointError, Dtype,
    GroupSizes, LoadReport, Save, Strictness, TensorLayout,
};
use moe_lora_experts::{MlpWeights, MoeConfig, MoeLayer, MoeWeights, SharedConfig};
use moe_lora_parallel::{Mesh, Topology, TopologyConfig};
use moe_lora_testkit::{Ad, GateUpTargets, mock, noise, ranks, saved_tensors};

const HIDDEN: usize = 8;
const F: usize = 12;
const EXPERTS: usize = 4;

fn topology(world: usize, tp: usize, ep: usize, etp: usize) -> Topology {
    let config = TopologyConfig::new(world);
    config.with_tp(tp).with_ep(ep).with_etp(etp).init().unwrap()
}

/// The same values for gate, up and down.
fn mlp(values: &[f32]) -> MlpWeights<'_> {
    MlpWeights {
        gate: values,
        up: values,
        down: values,
        biases: None,
    }
}

/// What the cases differ in.
#[derive(Clone, Copy, Debug)]
struct Case {
    targets: GateUpTargets,
    sharing: Sharing,
    dtype: DType,
    dora: bool,
}

const CASES: [Case; 8] = [
    Case {
        targets: GateUpTargets::Fused,
        sharing: Sharing::PerExpert,
        dtype: DType::F32,
        dora: false,
    },
    Case {
        targets: GateUpTargets::Separate,
        sharing: Sharing::PerExpert,
        dtype: DType::F32,
        dora: false,
    },
    Case {
        targets: GateUpTargets::Fused,
        sharing: Sharing::Shared,
        dtype: DType::F32,
        dora: false,
    },
    Case {
        targets: GateUpTargets::Fused,
        sharing: Sharing::PerExpert,
        dtype: DType::BF16,
        dora: false,
    },
    Case {
        targets: GateUpTargets::Separate,
        sharing: Sharing::PerExpert,
        dtype: DType::BF16,
        dora: true,
    },
    Case {
        targets: GateUpTargets::Fused,
        sharing: Sharing::Shared,
        dtype: DType::F32,
        dora: true,
    },
    Case {
        targets: GateUpTargets::Fused,
        sharing: Sharing::SharedOuter,
        dtype: DType::F32,
        dora: false,
    },
    Case {
        targets: GateUpTargets::Separate,
        sharing: Sharing::SharedOuter,
        dtype: DType::F32,
        dora: true,
    },
];

type Adam = OptimizerAdaptor<AdamW, MoeLayer<Ad>, Ad>;

impl Case {
    fn config(&self) -> LoraConfig {
        LoraConfig::new(4, 8.0)
            .with_init_b(Init::Kaiming)
            .with_sharing(self.sharing)
            .with_dtype(self.dtype)
            .with_dora(self.dora)
    }

    /// A layer with shared experts, with adapters on all of its linears that start from `seed`.
    fn layer(&self, seed: u64, mesh: &Mesh<Ad>) -> MoeLayer<Ad> {
        let device = Default::default();
        let values = |n: usize| noise(n as u64, 1, n).to_f32();
        let (router, wide) = (values(EXPERTS * HIDDEN), values(EXPERTS * F * HIDDEN));
        let narrow = values(F * HIDDEN);
        let weights = MoeWeights {
            router: &router,
            router_bias: None,
            correction_bias: None,
            experts: mlp(&wide),
            shared: Some((mlp(&narrow), None)),
        };
        let mut layer = MoeConfig::new("mlp", HIDDEN, F, EXPERTS, 2)
            .with_dtype(self.dtype)
            .with_shared(Some(SharedConfig {
                intermediate: F,
                gated: false,
                overlap: false,
            }))
            .init(weights, mesh, &device)
            .unwrap();
        let config = self.config().with_seed(seed);
        layer
            .add_adapters(&self.targets.targets(), &config, &device)
            .unwrap();
        layer.start_magnitudes(mesh);
        layer
    }

    /// A layer and its optimizer after one step.
    fn trained(&self, mesh: &Mesh<Ad>) -> (MoeLayer<Ad>, Adam) {
        let layer = self.layer(1, mesh);
        let mut adam = AdamWConfig::new().init();
        let x = noise(7 + mesh.rank() as u64, 5, HIDDEN).to_f32();
        let x = TensorData::new(x, [5, HIDDEN]);
        let x = Tensor::<Ad, 2>::from_data(x, (&Default::default(), self.dtype));
        let loss = layer.forward(x, mesh).powi_scalar(2).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        let grads = sync_gradients(&layer.trained_weights(), grads, mesh);
        (adam.step(0.1, layer, grads), adam)
    }

    /// Trains at a topology and saves after 3 steps, as the step counter says.
    fn save(&self, topology: Topology, folder: &Path) {
        ranks(&mock(topology), topology, |mesh| {
            let (layer, adam) = self.trained(&mesh);
            save_checkpoint(folder, 3, &layer.trained_weights(), &adam, &mesh).unwrap();
        });
    }

    /// Loads into other values at a topology and saves what was loaded.
    fn move_to(&self, topology: Topology, from: &Path, to: &Path) -> Vec<LoadReport> {
        let checkpoint = Checkpoint::open(from).unwrap();
        ranks(&mock(topology), topology, |mesh| {
            let layer = self.layer(2, &mesh);
            let mut adam = AdamWConfig::new().init();
            let (layer, report) = load_checkpoint(
                &checkpoint,
                layer,
                MoeLayer::trained_weights,
                &mut adam,
                &mesh,
                Strictness::Exact,
            )
            .unwrap();
            save_checkpoint(to, 3, &layer.trained_weights(), &adam, &mesh).unwrap();
            report
        })
    }
}

#[test]
fn what_was_saved_at_2_2_is_the_same_to_the_bit_at_every_topology() {
    for case in CASES {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        case.save(topology(4, 2, 2, 2), &at("saved"));
        let saved = saved_tensors(&at("saved"));
        // Fc1, fc2 and the shared expert's two: A, B and any magnitude, two moments and a time of
        // each.
        let linears = match case.targets {
            GateUpTargets::Fused => 4,
            GateUpTargets::Separate => 6,
        };
        let factors = if case.dora { 3 } else { 2 };
        assert_eq!(saved.len(), linears * factors * 4, "{case:?}");
        if case.dora {
            let checkpoint = Checkpoint::open(&at("saved")).unwrap();
            let key = "mlp.experts.down_proj.lora_magnitude_vector";
            let entry = checkpoint.manifest().tensor(key).unwrap();
            // Each rank of the row-parallel linear holds its own rows.
            let layout = TensorLayout::new(key, Dtype::F32, [EXPERTS, HIDDEN]);
            let layout = layout.with_axis(0, Axis::Ep).with_axis(1, Axis::ExpertTp);
            assert_eq!((&entry.layout, entry.shards.len()), (&layout, 4));
        }
        for (world, tp, ep, etp) in [
            (1, 1, 1, 1),
            (4, 1, 4, 1),
            (4, 4, 1, 4),
            (2, 2, 2, 1),
            (4, 2, 2, 2),
            (8, 2, 2, 2),
        ] {
            let to = at("moved");
            let reports = case.move_to(topology(world, tp, ep, etp), &at("saved"), &to);
            assert!(
                saved_tensors(&to) == saved,
                "{case:?} ep={ep} etp={etp} tp={tp}"
            );
            for report in reports {
                assert_eq!(report.applied.len(), saved.len());
                let same = (tp, ep, etp) == (2, 2, 2);
                assert_eq!(report.resharded.is_empty(), same, "{report}");
            }
        }
    }
}

#[test]
fn a_fused_factor_keeps_gate_and_up_in_halves_of_their_own() {
    // Each rank holds rows of gate and rows of up; the file has all of gate before all of up.
    let folder = tempfile::tempdir().unwrap();
    let etp = topology(2, 1, 1, 2);
    let parts = ranks(&mock(etp), etp, |mesh| {
        let (layer, adam) = CASES[0].trained(&mesh);
        save_checkpoint(folder.path(), 1, &layer.trained_weights(), &adam, &mesh).unwrap();
        let Weight::PerExpert(b) = &layer.experts.gate_up.adapters[0].b.weight else {
            panic!("an adapter an expert");
        };
        b.val().into_data().to_vec::<f32>().unwrap()
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let whole = checkpoint.full("mlp.experts.gate_up_proj.lora_B").unwrap();
    assert_eq!(whole.shape, [EXPERTS, 2 * F, 4]);
    let whole: Vec<f32> = whole
        .bytes
        .chunks_exact(4)
        .map(|word| f32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    let row = |values: &[f32], rows: usize, expert: usize, row: usize| {
        values[(expert * rows + row) * 4..][..4].to_vec()
    };
    let half = F / 2;
    let (mut right, mut halved) = (true, true);
    for expert in 0..EXPERTS {
        for (rank, part) in parts.iter().enumerate() {
            for local in 0..F {
                let (fragment, inside) = (local / half, local % half);
                let found = row(part, F, expert, local);
                let global = fragment * F + rank * half + inside;
                right &= found == row(&whole, 2 * F, expert, global);
                // Negative control: the ranks' rows one after the other.
                halved &= found == row(&whole, 2 * F, expert, rank * F + local);
            }
        }
    }
    assert!(right && !halved);
}

#[test]
fn replicas_beyond_those_that_saved_get_the_same_values() {
    let folder = tempfile::tempdir().unwrap();
    let case = CASES[0];
    case.save(topology(4, 1, 1, 1), folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let saved = checkpoint.full("mlp.experts.down_proj.lora_A").unwrap();
    let saved = saved.bytes.chunks_exact(4);
    let saved: Vec<f32> = saved
        .map(|word| f32::from_le_bytes(word.try_into().unwrap()))
        .collect();
    let eight = topology(8, 1, 1, 1);
    let values = ranks(&mock(eight), eight, |mesh| {
        let (layer, _) = load_adapters(
            &checkpoint,
            case.layer(2, &mesh),
            MoeLayer::trained_weights,
            &mesh,
            Strictness::Exact,
        )
        .unwrap();
        let Weight::PerExpert(a) = &layer.experts.down.adapters[0].a.weight else {
            panic!("an adapter an expert");
        };
        a.val().into_data().to_vec::<f32>().unwrap()
    });
    assert_eq!(values.len(), 8);
    assert!(values.iter().all(|rank| *rank == saved));
}

#[test]
fn an_optimizer_s_state_is_no_leftover_of_adapters_and_another_adapter_is_one() {
    let folder = tempfile::tempdir().unwrap();
    let case = CASES[0];
    case.save(topology(1, 1, 1, 1), folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mesh = Mesh::<Ad>::solo();
    let load = |layer| {
        let weights = MoeLayer::trained_weights;
        load_adapters(&checkpoint, layer, weights, &mesh, Strictness::Exact)
    };
    let (_, report) = load(case.layer(2, &mesh)).unwrap();
    assert_eq!((report.applied.len(), report.unexpected.len()), (8, 0));

    let mut layer = case.layer(2, &mesh);
    layer.merge(&mesh).unwrap();
    let fc1 = Targets::new(["gate_up_proj"]);
    layer
        .add_adapters(&fc1, &case.config(), &Default::default())
        .unwrap();
    let Err(ResumeError::Checkpoint(CheckpointError::Refused { report })) = load(layer) else {
        panic!("the adapters of down_proj are left over")
    };
    let factor = "mlp.experts.down_proj.lora_A".to_string();
    assert!(report.unexpected.contains(&factor), "{report}");
}

#[test]
fn replicas_that_differ_are_not_saved_and_every_rank_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let case = CASES[0];
    case.save(topology(2, 1, 1, 1), folder.path());
    let before = saved_tensors(folder.path());
    let two = topology(2, 1, 1, 1);
    let messages = ranks(&mock(two), two, |mesh| {
        // Start values that depend on the rank.
        let layer = case.layer(mesh.rank() as u64, &mesh);
        let adam: Adam = AdamWConfig::new().init();
        let saved = save_checkpoint(folder.path(), 4, &layer.trained_weights(), &adam, &mesh);
        saved.unwrap_err()
    });
    assert!(
        matches!(&messages[0], ResumeError::Checkpoint(CheckpointError::UnequalReplicas { key, .. })
            if key.contains("lora_A")),
        "{}",
        messages[0]
    );
    assert!(matches!(messages[1], ResumeError::OtherRank { rank: 1 }));
    assert!(saved_tensors(folder.path()) == before);
}

#[test]
fn settings_and_targets_that_differ_are_refused_and_nothing_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let case = CASES[0];
    case.save(topology(1, 1, 1, 1), folder.path());
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mesh = Mesh::<Ad>::solo();
    let load = |config: LoraConfig, targets: &[&str]| {
        let device = Default::default();
        let mut layer = case.layer(2, &mesh);
        layer.merge(&mesh).unwrap();
        let targets = Targets::new(targets.iter().copied());
        layer.add_adapters(&targets, &config, &device).unwrap();
        let outcome = load_adapters(
            &checkpoint,
            layer,
            MoeLayer::trained_weights,
            &mesh,
            Strictness::AllowUnexpected,
        );
        outcome.map(|_| ()).map_err(|error| error.to_string())
    };
    let all = ["gate_up_proj", "down_proj"];
    let same = case.config();
    assert_eq!(load(same, &all), Ok(()));
    for (config, part) in [
        (LoraConfig::new(4, 16.0), "alpha=8, the module alpha=16"),
        (LoraConfig::new(2, 8.0), "rank=4, the module rank=2"),
        (
            LoraConfig::new(2, 4.0).with_dora(true),
            "rank=4, alpha=8, dora=false, the module rank=2, alpha=4, dora=true",
        ),
        (
            same.with_rslora(true),
            "rslora=false, the module rslora=true",
        ),
        (
            same.with_activation(Activation::Silu),
            "activation=Identity, the module activation=Silu",
        ),
        (
            same.with_sharing(Sharing::Shared),
            "sharing=PerExpert, the module sharing=Shared",
        ),
        (
            same.with_sharing(Sharing::SharedOuter),
            "sharing=PerExpert, the module sharing=SharedOuter",
        ),
        (same.with_dora(true), "dora=false, the module dora=true"),
        (
            LoraConfig::new(4, 8.0).with_pissa(true),
            "pissa=false, the module pissa=true",
        ),
    ] {
        let message = load(config, &all).unwrap_err();
        let whole = format!("the checkpoint has {part} (build the adapter from");
        assert!(message.contains(&whole), "{message}");
    }
    let one = load(same, &["gate_up_proj"]);
    assert_eq!(one, Ok(()), "others are left out when that is allowed");
}

#[test]
fn stored_settings_build_the_adapters_again() {
    let configs = [
        LoraConfig::new(4, 8.0).with_rslora(true),
        LoraConfig::new(2, 3.0).with_activation(Activation::Silu),
        LoraConfig::new(8, 3.0).with_activation(Activation::Gelu),
        LoraConfig::new(4, 1.5).with_activation(Activation::Relu),
        LoraConfig::new(4, 8.0).with_sharing(Sharing::Shared),
        LoraConfig::new(4, 8.0).with_sharing(Sharing::SharedOuter),
        LoraConfig::new(4, 8.0).with_dora(true),
    ];
    let mesh = Mesh::<Ad>::solo();
    for config in configs {
        let folder = tempfile::tempdir().unwrap();
        let mut layer = CASES[0].layer(1, &mesh);
        layer.merge(&mesh).unwrap();
        let targets = GateUpTargets::Fused.targets();
        layer
            .add_adapters(&targets, &config, &Default::default())
            .unwrap();
        layer.start_magnitudes(&mesh);
        let adam: Adam = AdamWConfig::new().init();
        save_checkpoint(folder.path(), 0, &layer.trained_weights(), &adam, &mesh).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let stored = stored_adapters(&checkpoint).unwrap();
        assert_eq!(stored.len(), layer.linears().len());
        assert!(
            stored.values().all(|stored| *stored == config),
            "{stored:?}"
        );
    }
}

#[test]
fn settings_that_are_not_those_of_the_factors_are_refused_before_anything_is_built() {
    let folder = tempfile::tempdir().unwrap();
    let layout = |name: &str, shape: [usize; 2]| TensorLayout::new(name, Dtype::U8, shape);
    let layouts = [layout("x.lora_A", [2, 3]), layout("x.lora_B", [5, 2])];
    for (rank, alpha) in [
        (1_000_000_000, 1.0),
        (usize::MAX, 1.0),
        (2, f64::MAX),
        (2, 1.0),
    ] {
        let place = GroupSizes::new(1, 1).place(0).unwrap();
        let save = Save::begin(folder.path(), place, 0).unwrap();
        save.write(&layouts, |shard| Ok(vec![0; shard.byte_len()].into()))
            .unwrap();
        let entry = AdapterEntry {
            rank,
            alpha,
            rslora: false,
            activation: AdapterActivation::Identity,
            sharing: AdapterSharing::Shared,
            dora: false,
            pissa: false,
        };
        save.commit([("x".to_owned(), entry)].into()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let stored = stored_adapters(&checkpoint);
        assert_eq!(stored.is_ok(), rank == 2, "{rank}");
        if let Err(error) = stored {
            let expected = format!(
                "x: the checkpoint says rank={rank}, alpha=1 and has A of rank 2 and B of rank 2 (save it again)"
            );
            assert_eq!(error.to_string(), expected);
        }
    }
}

#[test]
fn a_checkpoint_places_ranks_as_the_topology_does() {
    for (world, tp, ep, etp) in [(1, 1, 1, 1), (8, 2, 2, 2), (8, 4, 2, 1), (12, 3, 2, 2)] {
        let topology = topology(world, tp, ep, etp);
        let sizes = GroupSizes::new(ep, etp).with_tp(tp).with_world(world);
        for rank in 0..world {
            let (at, place) = (
                topology.coordinates(rank).unwrap(),
                sizes.place(rank).unwrap(),
            );
            assert_eq!(
                [at.tp, at.dp, at.etp, at.ep, at.expert_dp],
                [
                    place.tp(),
                    place.dp(),
                    place.etp(),
                    place.ep(),
                    place.expert_dp()
                ],
                "rank {rank} of {sizes:?}"
            );
        }
    }
}
