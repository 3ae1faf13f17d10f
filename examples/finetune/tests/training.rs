//! Training: what was recorded of another implementation's run, and that the topology does not show in the losses.

mod files;

use std::collections::BTreeMap;

use burn::backend::Flex;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamWConfig, Sgd, SgdConfig};
use burn_moe_lora::adapters::{
    Adaptable, Dropout, Init, LoraConfig, ResumableOptimizer, Sharing, Targets,
};
use burn_moe_lora::interchange::{
    FactorPair, GateUp, HostTensor, HubModel, InterchangeError, MAX_SHARD_BYTES, ModelWriter,
    PeftAdapter, PeftLayout,
};
use burn_moe_lora::parallel::{Mesh, MockWorld, TopologyConfig};
use files::{asset, read_json, read_tensors};
use finetune::adapter::{AdapterPlan, gather_adapter};
use finetune::moe::MoeBlocks;
use finetune::rank_model::RankModel;
use finetune::ranks::CpuBackend;
use finetune::text::{Batch, TextDataset};
use finetune::trainer::Trainer;
use moe_lora_testkit::GateUpTargets;

type B = CpuBackend;

const MODEL: &str = "qwen3-moe-constitution";

fn model() -> HubModel {
    HubModel::open(&asset(MODEL)).unwrap()
}

fn adapter(hub: &HubModel, name: &str) -> PeftAdapter {
    PeftAdapter::read(&asset(MODEL).join(name), hub.config()).unwrap()
}

/// Trains on `batches` with `(world, ep, etp)` ranks; the losses and the adapter after the last step.
fn train<O: ResumableOptimizer<Flex>>(
    hub: &HubModel,
    plan: &AdapterPlan,
    batches: &[Batch],
    (world, ep, etp): (usize, usize, usize),
    (optimizer, lr): (
        impl Fn() -> OptimizerAdaptor<O, MoeBlocks<B>, B> + Sync,
        f64,
    ),
) -> (Vec<f64>, PeftAdapter) {
    let topology = TopologyConfig::new(world)
        .with_ep(ep)
        .with_etp(etp)
        .init()
        .unwrap();
    let runs = MockWorld::new(world).run(|rank| {
        let device = Default::default();
        let mesh = Mesh::<B>::new(topology, &rank).unwrap();
        let model = RankModel::load(hub, Some(plan), mesh, &device).unwrap();
        let mut trainer = Trainer::new(model, optimizer(), lr, device);
        let losses: Vec<f64> = batches
            .iter()
            .map(|batch| trainer.step(batch).unwrap().loss)
            .collect();
        let RankModel { blocks, mesh, .. } = &trainer.model;
        (losses, gather_adapter(blocks, mesh).unwrap())
    });
    let mut runs = runs.unwrap();
    for (rank, run) in runs.iter().enumerate() {
        assert!(
            *run == runs[0],
            "rank {rank} has another result than rank 0"
        );
    }
    runs.swap_remove(0)
}

/// Batches, losses and learning rate of the recorded run.
fn recorded() -> (Vec<Batch>, Vec<f64>, f64) {
    let tensors = read_tensors(&asset(MODEL).join("reference.safetensors"));
    let (shape, ids) = &tensors["input_ids"];
    let batches = ids
        .chunks_exact(shape[1] * shape[2])
        .map(|ids| Batch::new(ids.iter().map(|id| *id as i32).collect(), shape[2]).unwrap());
    let reference = read_json(&asset(MODEL).join("reference.json"));
    let losses = reference["runs"]["sgd"].as_array().unwrap().iter();
    let losses = losses.map(|loss| loss.as_f64().unwrap());
    (
        batches.collect(),
        losses.collect(),
        reference["sgd"]["lr"].as_f64().unwrap(),
    )
}

/// Every value of an adapter.
fn flat(adapter: &PeftAdapter) -> Vec<f32> {
    let pairs = adapter.layers.values().flat_map(|layer| {
        let Some(GateUp::Fused(gate_up)) = &layer.gate_up else {
            panic!("the recorded adapters share the A of gate and up");
        };
        [gate_up, layer.down.as_ref().unwrap()]
    });
    let values = |pair: &FactorPair| [pair.a.data(), pair.b.data()].concat();
    pairs.flat_map(values).collect()
}

/// `||a - b|| / ||b - c||`, with zeros for `c` if it is not given.
fn distance(a: &PeftAdapter, b: &PeftAdapter, c: Option<&PeftAdapter>) -> f64 {
    let (a, b) = (flat(a), flat(b));
    let c = c.map_or(vec![0.0; b.len()], flat);
    let norm = |x: &[f32], y: &[f32]| {
        let squares = x.iter().zip(y).map(|(x, y)| f64::from(x - y).powi(2));
        squares.sum::<f64>().sqrt()
    };
    norm(&a, &b) / norm(&b, &c)
}

/// Largest relative difference.
fn deviation(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let differences = found
        .iter()
        .zip(expected)
        .map(|(f, e)| (f - e).abs() / e.abs());
    differences.fold(0.0, |a, b| if a.is_nan() || b <= a { a } else { b })
}

fn check_recorded_run(ep: usize, etp: usize) {
    let hub = model();
    let (batches, expected, lr) = recorded();
    let start = adapter(&hub, "adapter_start");
    let end = adapter(&hub, "adapter_sgd");
    let plan = AdapterPlan::given(start.clone());
    let sgd = || SgdConfig::new().init();
    let (losses, trained) = train(&hub, &plan, &batches, (ep * etp, ep, etp), (sgd, lr));
    let [first, all] = [5, 30].map(|count| deviation(&losses[..count], &expected[..count]));
    let off = distance(&trained, &end, None);
    let off_moved = distance(&trained, &end, Some(&start));
    println!(
        "ep={ep} etp={etp}: first five losses {first:.1e}, all {all:.1e}, adapter {off:.1e} of its norm, \
         {off_moved:.1e} of the way it moved"
    );
    assert!(
        first <= 1e-5,
        "one of the first five losses is off by {first:.1e}"
    );
    assert!(all <= 2e-3, "one of the losses is off by {all:.1e}");
    assert!(off < 0.01, "the adapter is off by {off:.1e} of its norm");
    assert!(
        off_moved < 0.01,
        "the adapter is off by {off_moved:.1e} of the way it moved"
    );
}

#[test]
fn recorded_sgd_run_on_one_rank() {
    check_recorded_run(1, 1);
}

#[test]
fn recorded_sgd_run_on_two_by_two_ranks() {
    check_recorded_run(2, 2);
}

#[test]
fn recorded_sgd_run_on_one_by_four_ranks() {
    check_recorded_run(1, 4);
}

#[test]
fn another_learning_rate_or_scale_misses_the_recorded_run() {
    let hub = model();
    let (batches, expected, lr) = recorded();
    let start = adapter(&hub, "adapter_start");
    let end = adapter(&hub, "adapter_sgd");
    assert!(distance(&start, &end, None) > 0.01);

    let sgd = || SgdConfig::new().init();
    let plan = AdapterPlan::given(start.clone());
    let (losses, trained) = train(&hub, &plan, &batches, (4, 2, 2), (sgd, 1.1 * lr));
    assert!(deviation(&losses[..5], &expected[..5]) > 1e-4);
    assert!(deviation(&losses, &expected) > 2e-3);
    assert!(distance(&trained, &end, Some(&start)) > 0.01);

    let mut doubled = start;
    for (_, pair) in doubled.layers.values_mut().flat_map(|l| l.pairs_mut()) {
        pair.alpha *= 2.0;
    }
    let plan = AdapterPlan::given(doubled);
    let (losses, _) = train(&hub, &plan, &batches[..5], (4, 2, 2), (sgd, lr));
    assert!(deviation(&losses, &expected[..5]) > 1e-4);
}

/// The adapter after the first batch, trained on one rank by plain descent.
fn first_step(
    plan: &AdapterPlan,
    lr: f64,
    set: impl Fn(Trainer<B, Sgd<Flex>>) -> Trainer<B, Sgd<Flex>> + Sync,
) -> PeftAdapter {
    let (hub, (batches, ..)) = (model(), recorded());
    let runs = MockWorld::new(1).run(|_| {
        let (device, mesh) = (Default::default(), Mesh::solo());
        let model = RankModel::load(&hub, Some(plan), mesh, &device).unwrap();
        let mut trainer = set(Trainer::new(model, SgdConfig::new().init(), lr, device));
        trainer.step(&batches[0]).unwrap();
        gather_adapter(&trainer.model.blocks, &trainer.model.mesh).unwrap()
    });
    runs.unwrap().swap_remove(0)
}

fn fresh() -> AdapterPlan {
    AdapterPlan::New {
        config: LoraConfig::new(4, 8.0),
        targets: GateUpTargets::Fused.targets(),
    }
}

#[test]
fn b_alone_moves_as_many_times_as_fast_as_it_is_told_to() {
    // B starts at zero, so that A has no gradient yet.
    let fast = first_step(&fresh(), 0.1, |trainer| {
        trainer.with_lora_plus(4.0).unwrap()
    });
    let expected = first_step(&fresh(), 0.4, |trainer| trainer);
    assert!(distance(&fast, &expected, None) < 1e-6);
    let plan = AdapterPlan::given(adapter(&model(), "adapter_sgd"));
    let fast = first_step(&plan, 0.1, |trainer| trainer.with_lora_plus(4.0).unwrap());
    let [slow, all] = [0.1, 0.4].map(|lr| first_step(&plan, lr, |trainer| trainer));
    let factor = |adapter: &PeftAdapter, b: bool| -> Vec<f32> {
        let pairs = adapter.layers.values().flat_map(|layer| layer.pairs());
        let factor = |pair: &FactorPair| if b { pair.b.data() } else { pair.a.data() }.to_vec();
        pairs.flat_map(|(_, pair)| factor(pair)).collect()
    };
    assert_eq!(factor(&fast, false), factor(&slow, false));
    assert_ne!(factor(&fast, false), factor(&all, false));
    assert_eq!(factor(&fast, true), factor(&all, true));
    assert_ne!(factor(&fast, true), factor(&slow, true));
}

#[test]
fn clipped_gradients_are_as_long_as_they_are_told_to_be() {
    let start = first_step(&fresh(), 1e-30, |trainer| trainer);
    for max_norm in [0.01, 0.001] {
        let clipped = first_step(&fresh(), 0.5, |trainer| trainer.with_max_norm(max_norm));
        let moved = flat(&clipped).into_iter().zip(flat(&start));
        let moved: f64 = moved.map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let length = moved.sqrt() / 0.5;
        assert!(
            (length / max_norm - 1.0).abs() < 2e-3,
            "{length} for {max_norm}"
        );
    }
}

#[test]
fn masks_of_a_given_adapter_are_those_of_their_seed_and_step() {
    let hub = model();
    let (batches, _, _) = recorded();
    let start = adapter(&hub, "adapter_sgd");
    let sgd = || SgdConfig::new().init();
    // Nothing is learned, so that the same batch gives another loss by another mask alone.
    let twice = [batches[0].clone(), batches[0].clone()];
    let losses = |seed: u64, sizes| {
        let plan = AdapterPlan::given(start.clone()).with_dropout(Dropout::before_a(0.5), seed);
        train(&hub, &plan, &twice, sizes, (sgd, 1e-30)).0
    };
    let one = losses(1, (4, 2, 2));
    assert!(deviation(&one, &losses(1, (1, 1, 1))) < 1e-5);
    assert!(one[0] != one[1], "{one:?}");
    let two = losses(2, (4, 2, 2));
    assert!(one[0] != two[0] && one[1] != two[1], "{one:?} {two:?}");
}

#[test]
fn scales_of_both_kinds_are_refused_as_no_file_holds_them() {
    let (hub, device) = (model(), Default::default());
    let mesh = Mesh::<B>::solo();
    let mut model = RankModel::load(&hub, None, mesh.clone(), &device).unwrap();
    let plain = LoraConfig::new(4, 8.0);
    for (target, config) in [
        ("experts.gate_up_proj", plain),
        ("experts.down_proj", plain.with_rslora(true)),
    ] {
        let targets = Targets::new([target]);
        model
            .blocks
            .add_adapters(&targets, &config, &device)
            .unwrap();
    }
    let message = gather_adapter(&model.blocks, &mesh)
        .unwrap_err()
        .to_string();
    assert_eq!(
        message,
        "the scale of model.layers.0.mlp.experts.gate_up_proj has alpha / rank, that of others alpha / sqrt(rank), \
         and PEFT files have one kind for all (give all adapters the same)"
    );
}

/// Values that no other element has.
fn ramp(shape: [usize; 3]) -> HostTensor {
    let len = shape.iter().product::<usize>();
    let values = (0..len).map(|i| (i % 251) as f32 / 2510.0 - 0.05).collect();
    HostTensor::new(shape, values).unwrap()
}

#[test]
fn an_adapter_of_mixed_ranks_and_scales_trains_alike_at_every_topology() {
    let hub = model();
    let (batches, _, lr) = recorded();
    let mut mixed = adapter(&hub, "adapter_start");
    let config = hub.config();
    let down = mixed.layers.get_mut(&1).unwrap().down.as_mut().unwrap();
    let a = ramp([config.num_experts, 4, config.moe_intermediate_size]);
    let b = ramp([config.num_experts, config.hidden_size, 4]);
    *down = FactorPair::new(a, b, 2.0).unwrap();
    let plan = AdapterPlan::given(mixed.clone());
    assert_eq!(plan.ranks().len(), 2);

    let sgd = || SgdConfig::new().init();
    let (expected, _) = train(&hub, &plan, &batches[..3], (1, 1, 1), (sgd, lr));
    let (losses, trained) = train(&hub, &plan, &batches[..3], (4, 2, 2), (sgd, lr));
    assert!(deviation(&losses, &expected) < 1e-5);
    let scales = |adapter: &PeftAdapter| -> Vec<(usize, f64)> {
        let pairs = adapter.layers.values().flat_map(|layer| layer.pairs());
        pairs.map(|(_, pair)| (pair.rank(), pair.alpha)).collect()
    };
    assert_eq!(scales(&trained), scales(&mixed));
    assert_ne!(trained, mixed);

    // Negative control: one rank's scale for all.
    let mut one_scale = mixed;
    let down = one_scale.layers.get_mut(&1).unwrap().down.as_mut().unwrap();
    down.alpha = 8.0;
    let plan = AdapterPlan::given(one_scale);
    let (losses, _) = train(&hub, &plan, &batches[..3], (4, 2, 2), (sgd, lr));
    assert!(deviation(&losses, &expected) > 1e-4);
}

/// The adapter with the first expert's factor on the hidden side for all of them.
fn share_outer(adapter: &mut PeftAdapter) {
    for layer in adapter.layers.values_mut() {
        for (name, pair) in layer.pairs_mut() {
            let factor = match name {
                "down" => &mut pair.b,
                _ => &mut pair.a,
            };
            let shape = [&[1], &factor.shape()[1..]].concat();
            *factor = HostTensor::new(shape, factor.outer(0).to_vec()).unwrap();
        }
    }
}

#[test]
fn an_adapter_with_shared_outer_factors_trains_alike_at_every_topology() {
    let hub = model();
    let (batches, _, lr) = recorded();
    let mut given = adapter(&hub, "adapter_sgd");
    share_outer(&mut given);
    let sgd = || SgdConfig::new().init();
    let plan = AdapterPlan::given(given.clone());
    // Without a step the ranks hold what was given, to the bit.
    for place in [(1, 1, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1)] {
        let (_, held) = train(&hub, &plan, &[], place, (sgd, lr));
        assert_eq!(held, given, "{place:?}");
    }
    let (expected, end) = train(&hub, &plan, &batches[..3], (1, 1, 1), (sgd, lr));
    for place in [(2, 1, 2), (4, 2, 2), (4, 4, 1)] {
        let (losses, trained) = train(&hub, &plan, &batches[..3], place, (sgd, lr));
        assert!(deviation(&losses, &expected) < 1e-5, "{place:?}");
        let off = distance(&trained, &end, Some(&given));
        assert!(off < 1e-4, "{place:?}: {off:.1e} of the way it moved");
    }
    // Negative control: a copy an expert trains another adapter.
    let copies = AdapterPlan::given(given.expand(hub.config().num_experts).unwrap());
    let (losses, _) = train(&hub, &copies, &batches[..3], (1, 1, 1), (sgd, lr));
    assert!(deviation(&losses[..1], &expected[..1]) < 1e-6);
    assert!(deviation(&losses, &expected) > 1e-5);
}

#[test]
fn a_new_shared_outer_adapter_is_exported_the_same_at_etp_1_and_2() {
    let hub = model();
    for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
        let AdapterPlan::New { config, targets } = new_plan(gate_up, 3) else {
            panic!("a new plan")
        };
        let plan = AdapterPlan::New {
            config: config
                .with_sharing(Sharing::SharedOuter)
                .with_init_b(Init::Xavier),
            targets,
        };
        let exported = |place| {
            let sgd = || SgdConfig::new().init();
            let (_, adapter) = train(&hub, &plan, &[], place, (sgd, 0.1));
            let folder = tempfile::tempdir().unwrap();
            assert_eq!(adapter.layout(), PeftLayout::SharedOuter);
            adapter
                .write(folder.path(), hub.config(), PeftLayout::SharedOuter, "")
                .unwrap();
            let read = PeftAdapter::read(folder.path(), hub.config()).unwrap();
            assert_eq!(read, adapter);
            std::fs::read(folder.path().join("adapter_model.safetensors")).unwrap()
        };
        let one = exported((1, 1, 1));
        for place in [(2, 1, 2), (2, 2, 1), (4, 2, 2)] {
            assert!(exported(place) == one, "{gate_up:?} {place:?}");
        }
    }
}

#[test]
fn factors_shared_on_the_other_side_are_refused() {
    let hub = model();
    let (etp, device) = (TopologyConfig::new(1).init().unwrap(), Default::default());
    let mut given = adapter(&hub, "adapter_start");
    let down = given.layers.get_mut(&1).unwrap().down.as_mut().unwrap();
    let shape = [1, down.rank(), hub.config().moe_intermediate_size];
    down.a = HostTensor::new(shape, down.a.outer(0).to_vec()).unwrap();
    let plan = AdapterPlan::given(given);
    let messages = MockWorld::new(1).run(|rank| {
        let mesh = Mesh::<B>::new(etp, &rank).unwrap();
        let loaded = RankModel::load(&hub, Some(&plan), mesh, &device);
        loaded.err().map(|error| error.to_string())
    });
    assert_eq!(
        messages.unwrap().swap_remove(0).unwrap(),
        "layer 1 of the adapter shares the factor of down_proj on the side of the intermediate extent alone, which is not \
         trained here (give each expert a copy of it first)"
    );
}

fn new_plan(gate_up: GateUpTargets, seed: u64) -> AdapterPlan {
    AdapterPlan::New {
        config: LoraConfig::new(8, 16.0).with_seed(seed),
        targets: gate_up.targets(),
    }
}

/// Losses of three steps from start values that are keyed by global index.
fn three_losses<O: ResumableOptimizer<Flex>>(
    hub: &HubModel,
    plan: &AdapterPlan,
    topology: (usize, usize, usize),
    optimizer: (
        impl Fn() -> OptimizerAdaptor<O, MoeBlocks<B>, B> + Sync,
        f64,
    ),
) -> Vec<f64> {
    let text = asset("text/us-declaration.txt");
    let text = TextDataset::open(&text, hub.config().vocab_size, 64, 0).unwrap();
    let batches: Vec<Batch> = (0..3).map(|step| text.train_batch(step, 4)).collect();
    train(hub, plan, &batches, topology, optimizer).0
}

#[test]
fn losses_do_not_depend_on_the_topology() {
    let hub = model();
    let sgd = || (|| SgdConfig::new().init(), 0.5);
    let adamw = || (|| AdamWConfig::new().init(), 5e-3);
    for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
        let plan = new_plan(gate_up, 0);
        let alone = [
            three_losses(&hub, &plan, (1, 1, 1), sgd()),
            three_losses(&hub, &plan, (1, 1, 1), adamw()),
        ];
        for topology in [
            (2, 2, 1),
            (4, 4, 1),
            (2, 1, 2),
            (4, 2, 2),
            (4, 1, 4),
            (4, 1, 1),
            (4, 2, 1),
            (4, 1, 2),
        ] {
            let spread = [
                three_losses(&hub, &plan, topology, sgd()),
                three_losses(&hub, &plan, topology, adamw()),
            ];
            let [sgd, adamw] = [0, 1].map(|k| deviation(&spread[k], &alone[k]));
            println!(
                "{gate_up:?} (world, ep, etp) = {topology:?}: sgd {sgd:.1e}, adamw {adamw:.1e}"
            );
            assert!(
                sgd <= 1e-5 && adamw <= 1e-5,
                "{topology:?}: {sgd:.1e}, {adamw:.1e}"
            );
        }
        // From other start values the first loss is the same, as B starts at zero, and the others are not.
        let other = three_losses(&hub, &new_plan(gate_up, 1), (4, 2, 2), sgd());
        assert!(deviation(&other[..1], &alone[0][..1]) <= 1e-5);
        assert!(deviation(&other, &alone[0]) > 1e-4);
    }
}

#[test]
fn ranks_whose_experts_get_no_tokens_keep_step() {
    // Routers of zeros: every score is the same, so all tokens go to experts 0 and 1.
    let source = model();
    let folder = tempfile::tempdir().unwrap();
    let writer = ModelWriter::new(&source, folder.path(), MAX_SHARD_BYTES).unwrap();
    let zeros = |layer| {
        let name = format!("model.layers.{layer}.mlp.gate.weight");
        let shape = source.shape(&name)?;
        let zeros = HostTensor::new(shape, vec![0.0; shape.iter().product()])?;
        Ok::<_, InterchangeError>(BTreeMap::from([(name, zeros)]))
    };
    writer.write(zeros).unwrap();
    let hub = HubModel::open(folder.path()).unwrap();

    let sgd = || (|| SgdConfig::new().init(), 0.5);
    for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
        let plan = new_plan(gate_up, 0);
        let alone = three_losses(&hub, &plan, (1, 1, 1), sgd());
        for topology in [(2, 2, 1), (4, 2, 2), (4, 4, 1)] {
            let off = deviation(&three_losses(&hub, &plan, topology, sgd()), &alone);
            println!("{gate_up:?} (world, ep, etp) = {topology:?}: {off:.1e}");
            assert!(off <= 1e-5, "{topology:?}: {off:.1e}");
        }
    }
}
