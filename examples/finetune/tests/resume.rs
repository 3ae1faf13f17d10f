//! Training that stops half-way and goes on from a checkpoint, at the same topology and at others.

mod files;

use std::path::Path;

use burn::backend::Flex;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamConfig, AdamWConfig, SgdConfig};
use burn_moe_lora::adapters::{Adaptable, Dropout, LoraConfig, ResumableOptimizer, load_adapters};
use burn_moe_lora::checkpoint::{Checkpoint, Strictness};
use burn_moe_lora::interchange::HubModel;
use burn_moe_lora::parallel::{Mesh, MockWorld, TopologyConfig};
use files::asset;
use finetune::adapter::AdapterPlan;
use finetune::moe::MoeBlocks;
use finetune::rank_model::RankModel;
use finetune::ranks::CpuBackend;
use finetune::text::{Batch, TextDataset};
use finetune::trainer::Trainer;
use moe_lora_testkit::{GateUpTargets, saved_tensors};

type B = CpuBackend;

const STEPS: usize = 30;
const HALF: usize = 15;
const BATCH: usize = 4;

/// `(world, EP, ETP)`.
type Sizes = (usize, usize, usize);

const SAVED_AT: Sizes = (4, 2, 2);

struct Run {
    hub: HubModel,
    batches: Vec<Batch>,
    /// With dropout, LoRA+ and clipping.
    all: bool,
}

impl Run {
    fn new() -> Self {
        let hub = HubModel::open(&asset("qwen3-moe-constitution")).unwrap();
        let text = asset("text/us-declaration.txt");
        let text = TextDataset::open(&text, hub.config().vocab_size, 32, 3).unwrap();
        let batches = (0..STEPS).map(|step| text.train_batch(step, BATCH));
        Self {
            batches: batches.collect(),
            hub,
            all: false,
        }
    }

    /// Losses of the steps from `from` to `to`, started from the checkpoint in `resume` if there is one, saved to `save`.
    fn losses<O: ResumableOptimizer<Flex>>(
        &self,
        (world, ep, etp): Sizes,
        optimizer: &(impl Fn() -> OptimizerAdaptor<O, MoeBlocks<B>, B> + Sync),
        resume: Option<&Path>,
        to: usize,
        save: &Path,
    ) -> Vec<f64> {
        let topology = TopologyConfig::new(world).with_ep(ep).with_etp(etp);
        let topology = topology.init().unwrap();
        let checkpoint = resume.map(|folder| Checkpoint::open(folder).unwrap());
        let runs = MockWorld::new(world).run(|rank| {
            let device = Default::default();
            let mesh = Mesh::<B>::new(topology, &rank).unwrap();
            let (mut plan, from) = match &checkpoint {
                None => (new_adapters(), 0),
                Some(checkpoint) => (
                    AdapterPlan::stored(checkpoint).unwrap(),
                    checkpoint.manifest().step as usize,
                ),
            };
            if self.all {
                plan = plan.with_dropout(Dropout::before_a(0.2), 11);
            }
            let model = RankModel::load(&self.hub, Some(&plan), mesh, &device).unwrap();
            let mut trainer = Trainer::new(model, optimizer(), 5e-3, device);
            if self.all {
                trainer = trainer.with_lora_plus(4.0).unwrap().with_max_norm(0.05);
            }
            if let Some(checkpoint) = &checkpoint {
                let report = trainer.resume(checkpoint).unwrap();
                assert_eq!(report.missing.len() + report.unexpected.len(), 0);
                assert_eq!(report.resharded.is_empty(), SAVED_AT == (world, ep, etp));
            }
            let losses = self.batches[from..to].iter();
            let losses: Vec<f64> = losses
                .map(|batch| trainer.step(batch).unwrap().loss)
                .collect();
            trainer.save(save).unwrap();
            losses
        });
        runs.unwrap().swap_remove(0)
    }
}

fn new_adapters() -> AdapterPlan {
    AdapterPlan::New {
        config: LoraConfig::new(4, 8.0).with_seed(11),
        targets: GateUpTargets::Fused.targets(),
    }
}

fn resumed_run_has_the_bits_of_an_unbroken_one<O: ResumableOptimizer<Flex>>(
    run: &Run,
    optimizer: impl Fn() -> OptimizerAdaptor<O, MoeBlocks<B>, B> + Sync,
    others: &[Sizes],
) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let unbroken = run.losses(SAVED_AT, &optimizer, None, STEPS, &at("whole"));
    let first = run.losses(SAVED_AT, &optimizer, None, HALF, &at("half"));
    assert_eq!(first, unbroken[..HALF]);

    let half = Some(&*at("half"));
    let second = run.losses(SAVED_AT, &optimizer, half, STEPS, &at("second"));
    assert_eq!(second, unbroken[HALF..]);
    assert!(saved_tensors(&at("second")) == saved_tensors(&at("whole")));
    // Negative control: half a run is not a whole one.
    assert!(saved_tensors(&at("half")) != saved_tensors(&at("whole")));

    for &sizes in others {
        let other = run.losses(sizes, &optimizer, half, STEPS, &at("other"));
        for (step, (found, expected)) in other.iter().zip(&unbroken[HALF..]).enumerate() {
            let error = (found - expected).abs() / expected;
            assert!(error <= 1e-5, "{sizes:?} step {step}: {found} {expected}");
        }
    }
}

#[test]
fn adamw_resumes_to_the_bit_and_at_every_other_topology_to_rounding() {
    let others = [(1, 1, 1), (4, 4, 1), (4, 1, 4), (2, 2, 1), (4, 1, 2)];
    resumed_run_has_the_bits_of_an_unbroken_one(&Run::new(), || AdamWConfig::new().init(), &others);
}

#[test]
fn dropout_lora_plus_and_clipping_resume_to_the_bit_and_at_every_other_topology_to_rounding() {
    let run = Run {
        all: true,
        ..Run::new()
    };
    let others = [(1, 1, 1), (4, 4, 1), (4, 1, 4), (2, 2, 1), (4, 1, 2)];
    resumed_run_has_the_bits_of_an_unbroken_one(&run, || AdamWConfig::new().init(), &others);
    // Together they do something; each alone is tested by its flag.
    let folder = tempfile::tempdir().unwrap();
    let adamw = || AdamWConfig::new().init();
    let plain = Run::new().losses(SAVED_AT, &adamw, None, 3, &folder.path().join("plain"));
    let all = run.losses(SAVED_AT, &adamw, None, 3, &folder.path().join("all"));
    assert_eq!(plain[0], all[0], "B starts at zero");
    assert!(
        plain[1..]
            .iter()
            .zip(&all[1..])
            .all(|(plain, all)| plain != all)
    );
}

#[test]
fn adamw_with_amsgrad_resumes_to_the_bit() {
    let adamw = || AdamWConfig::new().with_amsgrad(true).init();
    resumed_run_has_the_bits_of_an_unbroken_one(&Run::new(), adamw, &[]);
}

#[test]
fn sgd_with_momentum_resumes_to_the_bit() {
    let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    resumed_run_has_the_bits_of_an_unbroken_one(&Run::new(), || sgd().init(), &[(2, 1, 2)]);
}

#[test]
fn moments_that_are_not_restored_show_in_the_losses() {
    // What a checkpoint of the factors alone would give.
    let run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let adamw = || AdamWConfig::new().init();
    let unbroken = run.losses(SAVED_AT, &adamw, None, HALF + 3, &at("whole"));
    run.losses(SAVED_AT, &adamw, None, HALF, &at("half"));
    let checkpoint = Checkpoint::open(&at("half")).unwrap();
    let (_, ep, etp) = SAVED_AT;
    let topology = TopologyConfig::new(4).with_ep(ep).with_etp(etp);
    let topology = topology.init().unwrap();
    let losses = MockWorld::new(4).run(|rank| {
        let device = Default::default();
        let mesh = Mesh::<B>::new(topology, &rank).unwrap();
        let plan = AdapterPlan::stored(&checkpoint).unwrap();
        let mut model = RankModel::load(&run.hub, Some(&plan), mesh, &device).unwrap();
        let (blocks, report) = load_adapters(
            &checkpoint,
            model.blocks,
            MoeBlocks::trained_weights,
            &model.mesh,
            Strictness::Exact,
        )
        .unwrap();
        let stored = checkpoint.manifest().tensors.iter();
        let moments = stored.filter(|entry| entry.layout.key.ends_with(".moment_1"));
        assert_eq!(moments.count(), report.applied.len());
        model.blocks = blocks;
        let mut fresh = Trainer::new(model, adamw(), 5e-3, device);
        let losses = run.batches[HALF..HALF + 3].iter();
        losses
            .map(|batch| fresh.step(batch).unwrap().loss)
            .collect::<Vec<f64>>()
    });
    let losses = &losses.unwrap()[0];
    assert_eq!(losses[0], unbroken[HALF], "the factors were restored");
    let error = (losses[2] - unbroken[HALF + 2]).abs() / unbroken[HALF + 2];
    assert!(error > 1e-4, "{losses:?} {:?}", &unbroken[HALF..]);
}

#[test]
fn state_of_another_optimizer_is_refused_on_every_rank() {
    let run = Run::new();
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("saved");
    run.losses(SAVED_AT, &|| SgdConfig::new().init(), None, 1, &saved);
    let checkpoint = Checkpoint::open(&saved).unwrap();
    let topology = TopologyConfig::new(2).with_etp(2).init().unwrap();
    let messages = MockWorld::new(2).run(|rank| {
        let device = Default::default();
        let mesh = Mesh::<B>::new(topology, &rank).unwrap();
        let plan = AdapterPlan::stored(&checkpoint).unwrap();
        let model = RankModel::load(&run.hub, Some(&plan), mesh, &device).unwrap();
        let mut trainer = Trainer::new(model, AdamConfig::new().init(), 5e-3, device);
        trainer.resume(&checkpoint).unwrap_err().to_string()
    });
    for message in messages.unwrap() {
        assert!(
            message.contains("the state of sgd, not of adam "),
            "{message}"
        );
    }
}
