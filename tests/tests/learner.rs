//! Runs of burn-train's `Learner` on ranks: the same adapters, numbers and decisions at every topology,
//! and a base that is neither changed nor recorded.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::backend::Flex;
use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{Sgd, SgdConfig};
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn::train::metric::store::EventStoreClient;
use burn::train::{EarlyStoppingStrategy, Learner, TrainStep};
use moe_lora_adapters::{Adaptable, AdapterBackend, Sharing, TrainedWeight};
use moe_lora_experts::{MoeLayer, TokenCounter};
use moe_lora_parallel::{Mesh, range_of};
use moe_lora_testkit::{
    Ad, GateUpTargets, Matrix, Mocked, assert_close, factors, panic_message, unshard_experts,
};
use moe_lora_tests::moe::{self, Case, HIDDEN, Place, REDUCTION, place};
use moe_lora_train::{Adapted, AdapterMetric, AdapterTraining, Finetune, StepStats};

const STEPS: usize = 3;
const EPOCHS: usize = 2;

/// A layer whose output is to become the target.
#[derive(Module, Debug)]
struct Model<B: Backend> {
    layer: MoeLayer<B>,
}

/// The tokens `[T, H]` of a rank and their targets.
#[derive(Clone, Debug)]
struct Tokens<B: Backend> {
    x: Tensor<B, 2>,
    target: Tensor<B, 2>,
}

impl<B: AdapterBackend> Finetune<B> for Model<B> {
    type Batch = Tokens<B>;

    fn loss(&self, batch: Tokens<B>, mesh: &Mesh<B>) -> Tensor<B, 1> {
        let y = self.layer.forward(batch.x, mesh);
        (y - batch.target).powi_scalar(2).sum()
    }

    fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        self.layer.trained_weights()
    }

    fn counters(&self) -> Vec<&TokenCounter> {
        vec![self.layer.router.counter()]
    }
}

/// The steps of a rank: each has its part of the tokens of all.
#[derive(Clone)]
struct Own {
    dealt: Vec<usize>,
    rank: usize,
}

impl<B: Backend> Batcher<B, usize, Tokens<B>> for Own {
    fn batch(&self, steps: Vec<usize>, device: &B::Device) -> Tokens<B> {
        let [x, target] = [20, 40].map(|seed| {
            let all =
                moe_lora_testkit::noise(seed + steps[0] as u64, self.dealt.iter().sum(), HIDDEN);
            let own = range_of(&self.dealt, self.rank);
            all.pick_rows(own).tensor_on::<B>(device, DType::F32)
        });
        Tokens { x, target }
    }
}

fn loader<B: Backend>(
    own: &Own,
    steps: std::ops::Range<usize>,
) -> Arc<dyn DataLoader<B, Tokens<B>>> {
    let dataset = InMemDataset::new(steps.collect());
    DataLoaderBuilder::new(own.clone())
        .batch_size(1)
        .build(dataset)
}

fn case() -> Case {
    Case {
        shared: moe::shared(true, false),
        ..moe::case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32)
    }
}

fn adapted(case: &Case, mesh: &Mesh<Ad>) -> Adapted<Ad, Model<Ad>> {
    let layer = case.layer(&case.oracle(), mesh, &Default::default());
    Adapted::new(Model { layer }, mesh.clone()).with_max_norm(20.0)
}

/// The statistics of every step, on this rank.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<StepStats>>>);

impl Seen {
    fn metric(&self) -> AdapterMetric {
        let seen = self.0.clone();
        AdapterMetric::new("Seen", move |stats| {
            seen.lock().unwrap().push(stats.clone());
            0.0
        })
    }

    fn all(&self) -> Vec<StepStats> {
        self.0.lock().unwrap().clone()
    }
}

type Optimizer = OptimizerAdaptor<Sgd<Flex>, Adapted<Ad, Model<Ad>>, Ad>;
type Training = AdapterTraining<Ad, Model<Ad>, f64, Optimizer>;

/// With a state, which a resumed run has to find.
fn optimizer() -> Optimizer {
    let momentum = MomentumConfig::new();
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

/// A rank's run of `case` at `place`.
struct Run<'a> {
    case: &'a Case,
    place: &'a Place,
    folder: &'a Path,
}

/// What a rank ends with.
#[derive(Clone, Debug)]
struct Outcome {
    /// By factor and local expert.
    factors: Vec<Vec<Matrix>>,
    /// Whether every other parameter has the bits that it had.
    base_kept: bool,
    train: Vec<StepStats>,
    valid: Vec<StepStats>,
}

/// The values of all parameters but `factors`.
struct Base<'a> {
    factors: &'a [burn::module::ParamId],
    values: Vec<Vec<f32>>,
}

impl<B: Backend> ModuleVisitor<B> for Base<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if !self.factors.contains(&param.id) {
            let values = param.val().into_data().to_vec();
            self.values.push(values.unwrap());
        }
    }
}

fn base<B: AdapterBackend>(model: &Model<B>) -> Vec<Vec<f32>> {
    let weights = model.trained_weights();
    let factors: Vec<_> = weights.iter().map(|trained| trained.weight.id()).collect();
    let mut base = Base {
        factors: &factors,
        values: Vec::new(),
    };
    model.visit(&mut base);
    base.values
}

impl Run<'_> {
    fn go(&self, with: impl Fn(Training) -> Training + Sync) -> Vec<Outcome> {
        self.with(|training, _| with(training))
    }

    fn with(
        &self,
        with: impl Fn(Training, &Adapted<Ad, Model<Ad>>) -> Training + Sync,
    ) -> Vec<Outcome> {
        Mocked.run(self.place.topology, |mesh: &Mesh<Ad>, _| {
            let own = Own {
                dealt: self.place.dealt.clone(),
                rank: mesh.rank(),
            };
            let model = adapted(self.case, mesh);
            let before = base(&model.model);
            let (train, valid) = (Seen::default(), Seen::default());
            let training: Training = model
                .training(
                    self.folder,
                    loader(&own, 0..STEPS),
                    loader(&own, STEPS..STEPS + 1),
                )
                .num_epochs(EPOCHS)
                .metric_train_numeric(train.metric())
                .metric_valid_numeric(valid.metric())
                .metric_valid_numeric(AdapterMetric::loss());
            let training = with(training, &model);
            let learner = Learner::new(model, optimizer(), 1e-3);
            let model = training.launch(learner).model.model;
            let weights = model.trained_weights();
            Outcome {
                factors: weights
                    .iter()
                    .map(|trained| factors(trained.weight))
                    .collect(),
                base_kept: base(&model) == before,
                train: train.all(),
                valid: valid.all(),
            }
        })
    }
}

fn number(value: f64) -> Matrix {
    Matrix::build(1, 1, |_, _| value)
}

#[test]
fn a_run_trains_the_same_adapters_with_the_same_numbers_at_every_topology() {
    let (case, folder) = (case(), tempfile::tempdir().unwrap());
    let run = |place: &Place| {
        let found = Run {
            case: &case,
            place,
            folder: folder.path(),
        }
        .go(|training| training);
        for rank in &found {
            // The same bits on every rank: decisions that are made by them are the same.
            assert_eq!(rank.train, found[0].train, "{place:?}");
            assert_eq!(rank.valid, found[0].valid, "{place:?}");
            assert!(rank.base_kept, "{place:?}");
            assert_eq!(
                (rank.train.len(), rank.valid.len()),
                (STEPS * EPOCHS, EPOCHS)
            );
        }
        let axes = case.experts().axes().into_iter().enumerate();
        let factors = axes.map(|(k, axis)| {
            let parts: Vec<_> = found.iter().map(|rank| rank.factors[k].clone()).collect();
            unshard_experts(&parts, &place.topology, axis)
        });
        (factors.collect::<Vec<_>>(), found[0].clone())
    };
    let (expected, one) = run(&place(1, 1, 1, &[9]));
    assert!(one.train[5].loss < one.train[2].loss && one.valid[1].loss < one.valid[0].loss);
    for place in [
        place(1, 1, 2, &[2, 7]),
        place(2, 2, 1, &[9, 0]),
        place(2, 2, 2, &[3, 0, 4, 2]),
    ] {
        let name = format!("{place:?}");
        let (factors, found) = run(&place);
        for (found, expected) in factors.iter().flatten().zip(expected.iter().flatten()) {
            assert_close(&name, found, expected, DType::F32, REDUCTION);
        }
        let steps = found.train.iter().chain(&found.valid);
        for (found, one) in steps.zip(one.train.iter().chain(&one.valid)) {
            let close = |found: f64, one: f64| {
                assert_close(&name, &number(found), &number(one), DType::F32, REDUCTION);
            };
            assert_eq!(found.loads, one.loads, "{name}");
            close(found.loss, one.loss);
            close(found.adapter_norm(), one.adapter_norm());
            match (found.gradient_norm, one.gradient_norm) {
                (Some(found), Some(one)) => close(found, one),
                pair => assert_eq!(pair, (None, None)),
            }
        }
    }
}

fn recorded(training: Training) -> Training {
    training.with_file_checkpointer(NamedMpkFileRecorder::<FullPrecisionSettings>::new())
}

#[test]
fn a_resumed_run_has_the_bits_of_an_unbroken_one_and_its_record_no_base() {
    let (case, place) = (case(), place(1, 2, 2, &[3, 0, 4, 2]));
    let go = |folder: &Path, with: &(dyn Fn(Training) -> Training + Sync)| {
        Run {
            case: &case,
            place: &place,
            folder,
        }
        .go(with)
    };
    let [whole, parts] = [(), ()].map(|_| tempfile::tempdir().unwrap());
    let unbroken = go(whole.path(), &|training| training);
    go(parts.path(), &|training| recorded(training).num_epochs(1));
    let resumed = go(parts.path(), &|training| recorded(training).checkpoint(1));
    for (rank, (resumed, unbroken)) in resumed.iter().zip(&unbroken).enumerate() {
        assert_eq!(resumed.train, unbroken.train[STEPS..]);
        assert_eq!(resumed.factors, unbroken.factors);
        let values = |of: &[Vec<Matrix>]| -> usize {
            let matrices = of.iter().flatten();
            matrices.map(|factor| factor.values.len()).sum()
        };
        let file = format!("rank-{rank}/checkpoint/model-1.mpk");
        let bytes = parts.path().join(file).metadata().unwrap().len() as usize;
        let (factors, names) = (4 * values(&resumed.factors), 1500);
        assert!(
            (factors..factors + names).contains(&bytes),
            "{bytes} of {factors}"
        );
    }
}

/// Stops after an epoch that depends on the rank.
#[derive(Clone)]
struct StopAfter(usize);

impl StopAfter {
    fn of(rank: usize) -> Self {
        Self([2, 1, 4, 1][rank])
    }
}

impl EarlyStoppingStrategy for StopAfter {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        epoch >= self.0
    }
}

#[test]
fn ranks_stop_when_the_first_does() {
    let (case, place) = (case(), place(1, 2, 2, &[3, 0, 4, 2]));
    let folder = tempfile::tempdir().unwrap();
    let run = Run {
        case: &case,
        place: &place,
        folder: folder.path(),
    };
    let found = run.with(|training, model| {
        let stop = StopAfter::of(model.mesh().rank());
        training.num_epochs(5).early_stopping(model.agreed(stop))
    });
    assert!(found.iter().all(|rank| rank.train.len() == 2 * STEPS));
    // Each for itself, one waits for another that has stopped.
    let message = panic_message(|| {
        run.with(|training, model| {
            let stop = StopAfter::of(model.mesh().rank());
            training.num_epochs(5).early_stopping(stop)
        })
    });
    assert!(message.contains("has finished"), "{message}");
}

#[test]
fn a_record_of_other_adapters_is_refused_with_both_lists() {
    let place = place(1, 1, 1, &[9]);
    let message = Mocked.run(place.topology, |mesh: &Mesh<Ad>, _| {
        let (fused, plain) = (
            adapted(&case(), mesh),
            adapted(
                &Case {
                    shared: None,
                    ..case()
                },
                mesh,
            ),
        );
        let record = plain.into_record();
        panic_message(|| fused.load_record(record))
    });
    let start = "the record holds [\"moe.experts.gate_up_proj.lora_A\"";
    assert!(message[0].starts_with(start), "{}", message[0]);
    assert!(message[0].contains("moe.shared_expert.down_proj.lora_B"));
}

#[test]
fn a_step_without_finite_gradients_changes_nothing_on_any_rank() {
    let (case, place) = (case(), place(1, 1, 2, &[2, 7]));
    let found = Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let model = adapted(&case, mesh);
        // Of one rank alone.
        let value = if mesh.rank() == 1 { f32::INFINITY } else { 1.0 };
        let x = Tensor::ones([2, HIDDEN], device);
        let target = Tensor::full([2, HIDDEN], value, device);
        let output = TrainStep::step(&model, Tokens { x, target });
        (output.grads.len(), output.item.gradient_norm)
    });
    for (gradients, norm) in found {
        assert!(gradients == 0 && norm.unwrap().is_nan());
    }
}
