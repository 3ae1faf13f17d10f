//! The norm of gradients that lie over ranks, and steps clipped by it, against one device.

use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::{Autodiff, Flex};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{DType, Tensor};
use half::bf16;
use moe_lora_adapters::{
    Adaptable, ClipError, ColumnLinear, LinearConfig, LoraConfig, ReplicatedLinear, RowLinear,
    Sharing, TrainedWeight, Weight, clip_gradients, gradient_norm, sync_gradients,
};
use moe_lora_parallel::{CollectiveOp, ExpertTp, GroupName, Mesh, Topology, TopologyConfig, Tp};
use moe_lora_testkit::{
    Ad, GateUpTargets, Matrix, Mocked, SHARING, TrainingBackend, assert_close, assert_far, factors,
    mock, ranks, synced_gradient,
};
use moe_lora_tests::moe::{self, Case, Found, HIDDEN, Outcome, Place, REDUCTION, place};

const TOKENS: usize = 9;

/// Every EP, ETP, number of replicas and TP over up to eight ranks, and nine tokens.
fn grid() -> Vec<Place> {
    let mut places = Vec::new();
    for experts in [
        (1, 1),
        (1, 2),
        (1, 4),
        (2, 1),
        (2, 2),
        (2, 4),
        (4, 1),
        (4, 2),
    ] {
        for replicas in [1, 2] {
            let (ep, etp) = experts;
            let dealt: &[usize] = match ep * etp * replicas {
                1 => &[9],
                2 => &[2, 7],
                4 => &[3, 0, 4, 2],
                8 => &[2, 1, 0, 1, 3, 0, 1, 1],
                _ => continue,
            };
            let sizes = [1, 2, 4]
                .into_iter()
                .filter(|tp| dealt.len().is_multiple_of(*tp));
            places.extend(sizes.map(|tp| place(tp, ep, etp, dealt)));
        }
    }
    places
}

/// A layer with shared experts, adapters on all of its linears.
fn case(sharing: Sharing, dtype: DType) -> Case {
    Case {
        shared: moe::shared(true, false),
        ..moe::case(sharing, GateUpTargets::Fused, dtype)
    }
}

fn number(value: f64) -> Matrix {
    Matrix::build(1, 1, |_, _| value)
}

/// The norm of all values as one vector.
fn norm_of<'a>(parts: impl IntoIterator<Item = &'a Matrix>) -> f64 {
    let squares: f64 = parts.into_iter().map(|part| part.dot(part)).sum();
    squares.sqrt()
}

fn all(outcome: &Outcome) -> Vec<&Matrix> {
    let experts = outcome.experts.iter().flatten();
    experts.chain(&outcome.shared).collect()
}

// ---- against one device ------------------------------------------------------------------------

/// A clipped step on one rank.
struct Step {
    norm: f64,
    /// Gradients, clipped gradients, factors before and after: local, a factor each.
    parts: [Vec<Vec<Matrix>>; 4],
}

fn read(weights: &[TrainedWeight<'_, Ad>], grads: &GradientsParams) -> Vec<Vec<Matrix>> {
    let grads = weights.iter().map(|w| synced_gradient(w.weight, grads));
    grads.collect()
}

fn values(weights: &[TrainedWeight<'_, Ad>]) -> Vec<Vec<Matrix>> {
    weights.iter().map(|w| factors(w.weight)).collect()
}

/// One step of SGD at learning rate 1 on every rank.
fn steps(case: &Case, place: &Place, max_norm: f64) -> Vec<Step> {
    let moe = case.oracle();
    Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let layer = case.layer(&moe, mesh, device);
        let (_, _, grads) = case.pass(&layer, mesh, device, &place.dealt, || ());
        let grads = GradientsParams::from_grads(grads, &layer);
        let weights = layer.trained_weights();
        let grads = sync_gradients(&weights, grads, mesh);
        let (own, start) = (read(&weights, &grads), values(&weights));
        let (grads, norm) = clip_gradients(&weights, grads, mesh, max_norm).unwrap();
        let clipped = read(&weights, &grads);
        let stepped = SgdConfig::new().init().step(1.0, layer.clone(), grads);
        let end = values(&stepped.trained_weights());
        Step {
            norm,
            parts: [own, clipped, start, end],
        }
    })
}

/// What the ranks hold together of one of the parts.
fn join(case: &Case, place: &Place, steps: &[Step], part: usize) -> Outcome {
    let none = Matrix::zeros(0, HIDDEN);
    let found = steps.iter().map(|step| Found {
        y: none.clone(),
        dx: none.clone(),
        own: Vec::new(),
        synced: step.parts[part].clone(),
    });
    case.join(&found.collect::<Vec<_>>(), &place.topology)
}

#[test]
fn norm_and_clipped_step_are_those_of_one_device_at_every_topology() {
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-6)] {
        for sharing in SHARING {
            let case = case(sharing, dtype);
            let expected = case.expected(&case.oracle(), TOKENS);
            let norm = norm_of(all(&expected));
            for max_norm in [norm / 3.0, norm * 2.0] {
                let factor = (max_norm / (norm + 1e-6)).min(1.0);
                for place in grid() {
                    let steps = steps(&case, &place, max_norm);
                    let name = format!("{dtype:?} {sharing:?} {place:?}");
                    for step in &steps {
                        assert_eq!(step.norm.to_bits(), steps[0].norm.to_bits(), "{name}");
                    }
                    let error = (steps[0].norm / norm - 1.0).abs();
                    assert!(error <= tolerance, "{name}: the norm is off by {error:.1e}");

                    let [own, clipped, start, end] =
                        [0, 1, 2, 3].map(|part| join(&case, &place, &steps, part));
                    if factor == 1.0 {
                        assert_eq!(all(&own), all(&clipped), "{name}: below the bound");
                    }
                    let ends = all(&start).into_iter().zip(all(&end));
                    let found = all(&clipped).into_iter().zip(ends);
                    assert_eq!(found.len(), all(&expected).len());
                    for ((clipped, (start, end)), grad) in found.zip(all(&expected)) {
                        let grad = grad.scaled(factor);
                        assert_close(&name, clipped, &grad, dtype, REDUCTION);
                        let step = start.plus(&grad.scaled(-1.0));
                        assert_close(&name, end, &step, dtype, REDUCTION);
                    }
                }
            }
        }
    }
}

#[test]
fn local_norms_replicas_counted_twice_and_sums_of_norms_are_seen() {
    for sharing in SHARING {
        let case = case(sharing, DType::F64);
        let norm = norm_of(all(&case.expected(&case.oracle(), TOKENS)));
        let place = place(2, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]);
        let steps = steps(&case, &place, f64::INFINITY);
        let local = |step: &Step| norm_of(step.parts[0].iter().flatten());
        let locals: Vec<f64> = steps.iter().map(local).collect();
        let world = locals.iter().map(|norm| norm * norm).sum::<f64>().sqrt();
        // Of the first replica: ranks 0 to 3 hold all shards of the experts.
        let norms: f64 = locals[..4].iter().sum();
        for (name, wrong) in [("local", locals[0]), ("world", world), ("norms", norms)] {
            assert_far(name, &number(wrong), &number(norm));
        }
    }
}

#[test]
fn recompute_changes_no_bit_of_a_norm_above_zero() {
    fn norms<C: CheckpointStrategy>() -> Vec<u64>
    where
        Autodiff<Flex, C>: TrainingBackend,
    {
        let (case, place) = (
            case(Sharing::Shared, DType::F32),
            place(2, 2, 2, &[3, 0, 4, 2]),
        );
        let moe = case.oracle();
        Mocked.run(place.topology, |mesh: &Mesh<Autodiff<Flex, C>>, device| {
            let layer = case.layer(&moe, mesh, device);
            let (_, _, grads) = case.pass(&layer, mesh, device, &place.dealt, || ());
            let grads = GradientsParams::from_grads(grads, &layer);
            let weights = layer.trained_weights();
            let grads = sync_gradients(&weights, grads, mesh);
            let norm = gradient_norm(&weights, &grads, mesh);
            assert!(norm > 0.0);
            norm.to_bits()
        })
    }
    assert_eq!(norms::<BalancedCheckpointing>(), norms::<NoCheckpointing>());
}

// ---- counting ----------------------------------------------------------------------------------

const RANK: usize = 4;
const D: usize = 8;
const EXPERTS: usize = 4;

/// An adapter of each placement and group: sharded or whole, of each expert, shared or dense.
struct Linears {
    column: ColumnLinear<Ad, ExpertTp>,
    row: RowLinear<Ad, ExpertTp>,
    outer: RowLinear<Ad, ExpertTp>,
    whole: ReplicatedLinear<Ad, ExpertTp>,
    dense: RowLinear<Ad, Tp>,
    replicated: ReplicatedLinear<Ad, Tp>,
}

impl Linears {
    fn new(mesh: &Mesh<Ad>, dtype: DType) -> Self {
        let device = Default::default();
        let local = mesh.topology().local_experts(EXPERTS, mesh.ep().rank());
        let local = local.unwrap();
        let config = LoraConfig::new(RANK, 8.0).with_dtype(dtype);
        let (experts, shared) = (config, config.with_sharing(Sharing::Shared));
        let outer = config.with_sharing(Sharing::SharedOuter);
        macro_rules! linear {
            ($path:literal, $group:expr, $config:expr, $linear:expr) => {{
                let mut linear = $linear.init($group, |_, _, _| 0.0, &device).unwrap();
                linear.adapt($path, &$config, &device).unwrap();
                linear
            }};
        }
        let of_experts = |path| LinearConfig::new(path, D, D).with_experts(local.clone());
        Self {
            column: linear!("up", mesh.expert_tp(), experts, of_experts("up")),
            row: linear!("down", mesh.expert_tp(), shared, of_experts("down")),
            outer: linear!("outer", mesh.expert_tp(), outer, of_experts("outer")),
            whole: linear!("gate", mesh.expert_tp(), experts, of_experts("gate")),
            dense: linear!("o", mesh.tp(), config, LinearConfig::new("o", D, D)),
            replicated: linear!("q", mesh.tp(), config, LinearConfig::new("q", D, D)),
        }
    }

    fn trained_weights(&self) -> Vec<TrainedWeight<'_, Ad>> {
        [
            self.column.trained_weights(),
            self.row.trained_weights(),
            self.outer.trained_weights(),
            self.whole.trained_weights(),
            self.dense.trained_weights(),
            self.replicated.trained_weights(),
        ]
        .concat()
    }
}

/// Elements of all full factors.
const ELEMENTS: usize = RANK * D * (5 * EXPERTS + 7);

/// Gives every local element of a factor a gradient of this value.
fn fill(grads: &mut GradientsParams, weight: &TrainedWeight<'_, Ad>, value: f64) {
    match weight.weight {
        Weight::One(param) => {
            let grad: Tensor<Flex, 2> = param.val().inner().full_like(value);
            grads.register(param.id, grad);
        }
        Weight::PerExpert(param) => {
            let grad: Tensor<Flex, 3> = param.val().inner().full_like(value);
            grads.register(param.id, grad);
        }
    }
}

fn filled(weights: &[TrainedWeight<'_, Ad>], value: f64) -> GradientsParams {
    let mut grads = GradientsParams::new();
    for weight in weights {
        fill(&mut grads, weight, value);
    }
    grads
}

fn topology(world: usize, tp: usize, ep: usize, etp: usize) -> Topology {
    let config = TopologyConfig::new(world);
    config.with_tp(tp).with_ep(ep).with_etp(etp).init().unwrap()
}

#[test]
fn every_element_counts_once_and_a_group_is_asked_once() {
    for place in grid() {
        let world = mock(place.topology);
        let norms = ranks(&world, place.topology, |mesh| {
            let linears = Linears::new(&mesh, DType::F64);
            let weights = linears.trained_weights();
            gradient_norm(&weights, &filled(&weights, 1.0), &mesh)
        });
        let expected = vec![(ELEMENTS as f64).sqrt(); norms.len()];
        assert_eq!(norms, expected, "{place:?}");
        for rank in 0..norms.len() {
            let calls = world.calls(rank);
            assert!(calls.iter().all(|call| call.op == CollectiveOp::AllGather));
            let mut groups: Vec<GroupName> = calls.iter().map(|call| call.group).collect();
            assert!(
                groups.len() <= GroupName::ALL.len(),
                "{place:?}: {groups:?}"
            );
            groups.dedup();
            assert_eq!(groups.len(), calls.len(), "{place:?}: {groups:?}");
        }
    }
}

#[test]
fn ranks_whose_replicas_differ_still_agree_on_the_norm() {
    let topology = topology(8, 2, 2, 2);
    let norms = ranks(&mock(topology), topology, |mesh| {
        let linears = Linears::new(&mesh, DType::F32);
        let weights = linears.trained_weights();
        let grads = filled(&weights, 1.0 + 0.1 * mesh.rank() as f64);
        gradient_norm(&weights, &grads, &mesh)
    });
    assert!(
        norms
            .iter()
            .all(|norm| norm.to_bits() == norms[0].to_bits())
    );
}

#[test]
fn a_missing_gradient_counts_as_zeros_and_no_factors_have_norm_zero() {
    let topology = topology(2, 1, 2, 1);
    let norms = ranks(&mock(topology), topology, |mesh| {
        let linears = Linears::new(&mesh, DType::F32);
        let weights = linears.trained_weights();
        let mut grads = GradientsParams::new();
        if mesh.rank() == 1 {
            fill(&mut grads, &weights[0], 3.0);
        }
        let nothing = gradient_norm::<Ad, _>(&[], &grads, &mesh);
        let (clipped, norm) = clip_gradients(&weights, grads, &mesh, 1.0).unwrap();
        assert_eq!(clipped.len(), mesh.rank());
        [nothing, norm]
    });
    let local = RANK * D * EXPERTS / 2;
    assert_eq!(norms, [[0.0, 3.0 * (local as f64).sqrt()]; 2]);
}

// ---- half precision ----------------------------------------------------------------------------

#[test]
fn squares_beyond_half_precision_are_summed_in_a_wider_type() {
    // 300 squared overflows f16, and 1e-4 squared is nothing in it.
    let topology = topology(4, 2, 2, 2);
    for value in [300.0, 1e-4] {
        let norms = ranks(&mock(topology), topology, |mesh| {
            let linears = Linears::new(&mesh, DType::F16);
            let weights = linears.trained_weights();
            gradient_norm(&weights, &filled(&weights, value), &mesh)
        });
        let held = half::f16::from_f64(value).to_f64();
        let error = norms[0] / (held * (ELEMENTS as f64).sqrt()) - 1.0;
        assert!(error.abs() < 1e-6, "{value}: {error:.1e}");
        assert!(!half::f16::from_f64(value * value).is_normal());
    }
}

#[test]
fn a_sum_of_many_squares_loses_none() {
    let (mesh, device) = (Mesh::<Ad>::solo(), Default::default());
    let mut linear: ReplicatedLinear<Ad, Tp> = LinearConfig::new("q", 8, 1 << 16)
        .init(mesh.tp(), |_, _, _| 0.0, &device)
        .unwrap();
    let config = LoraConfig::new(16, 8.0);
    linear.adapt("q", &config, &device).unwrap();
    let weights = linear.trained_weights();
    let norm = gradient_norm(&weights, &filled(&weights, 0.1), &mesh);
    let elements = weights
        .iter()
        .map(|weight| weight.weight.len())
        .sum::<usize>();
    let expected = f64::from(0.1f32) * (elements as f64).sqrt();
    assert!((norm / expected - 1.0).abs() < 1e-9, "{norm} {expected}");
    // Negative control: one after the other in f32.
    let naive: f32 = (0..elements).map(|_| 0.1f32 * 0.1f32).sum();
    assert!((f64::from(naive.sqrt()) / expected - 1.0).abs() > 1e-6);
}

#[test]
fn half_precision_gradients_are_scaled_by_an_unrounded_factor() {
    let mesh = Mesh::<Ad>::solo();
    let linears = Linears::new(&mesh, DType::BF16);
    let weights = &linears.dense.trained_weights()[..1];
    // A whole binade of bf16.
    let values = Matrix::build(RANK, D, |i, j| (128 + 4 * (i * D + j)) as f64);
    let Weight::One(param) = weights[0].weight else {
        panic!("a dense factor is one weight");
    };
    let mut grads = GradientsParams::new();
    grads.register::<Flex, 2>(param.id, values.tensor(DType::BF16));
    let max_norm = norm_of([&values]) * 0.7;
    let (grads, norm) = clip_gradients(weights, grads, &mesh, max_norm).unwrap();
    let factor = max_norm / (norm + 1e-6);
    let rounded = |factor: f64| values.map(|value| bf16::from_f64(value * factor).to_f64());
    let found = synced_gradient(weights[0].weight, &grads).remove(0);
    assert_eq!(found, rounded(factor));
    // Negative control: the factor in bf16.
    assert_ne!(found, rounded(bf16::from_f64(factor).to_f64()));
}

// ---- refusals ----------------------------------------------------------------------------------

#[test]
fn a_norm_that_is_not_finite_is_an_error_on_every_rank() {
    let topology = topology(4, 2, 2, 2);
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        let errors = ranks(&mock(topology), topology, |mesh| {
            let linears = Linears::new(&mesh, DType::F32);
            let weights = linears.trained_weights();
            let mut grads = filled(&weights, 1.0);
            if mesh.rank() == 3 {
                fill(&mut grads, &weights[1], value);
            }
            clip_gradients(&weights, grads, &mesh, 1.0).unwrap_err()
        });
        for error in errors {
            assert!(matches!(error, ClipError::NotFinite { norm } if !norm.is_finite()));
            let norm = if value.is_nan() { "NaN" } else { "inf" };
            let message = format!(
                "the gradients have norm {norm} (leave this step out, or lower the learning rate)"
            );
            assert_eq!(error.to_string(), message);
        }
    }
}

#[test]
fn a_bound_that_is_not_above_zero_is_refused_and_an_infinite_one_scales_nothing() {
    let mesh = Mesh::<Ad>::solo();
    let linears = Linears::new(&mesh, DType::F32);
    let weights = linears.trained_weights();
    let clip = |max_norm| clip_gradients(&weights, filled(&weights, 2.0), &mesh, max_norm);
    for max_norm in [0.0, -1.0, f64::NAN] {
        let message = format!("max_norm={max_norm} is not above zero (choose one such as 1.0)");
        assert_eq!(clip(max_norm).unwrap_err().to_string(), message);
    }
    let (grads, norm) = clip(f64::INFINITY).unwrap();
    assert_eq!(norm, 2.0 * (ELEMENTS as f64).sqrt());
    let held = read(&weights, &grads).concat();
    assert!(
        held.iter()
            .flat_map(|m| &m.values)
            .all(|value| *value == 2.0)
    );
}
