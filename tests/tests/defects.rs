//! The known defects of expert LoRA: the right numbers, and beside them the old algebra, which is
//! shown to miss by the signature it was reported with.

use burn::backend::{Autodiff, Flex};
use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::activation::silu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use moe_lora_adapters::{
    Column, ColumnLinear, Init, Linear, LinearConfig, Lora, LoraConfig, PlacedWeight, Placement,
    ReplicatedLinear, Row, RowLinear, ShardAxis, Weight, Whole,
};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::region::{GATHER_FROM, REDUCE_FROM, apply};
use moe_lora_parallel::{
    Call, CollectiveOp, ExpertTp, Group, GroupKind, GroupName, Mesh, MockWorld, Partial, Sharded,
    Topology, TopologyConfig, Tp, range_of,
};

type Ad = Autodiff<Flex>;
type Matrix = Tensor<Ad, 2>;
type ExpertGroup = Group<Ad, ExpertTp>;
type Grads = <Ad as AutodiffBackend>::Gradients;

// ---- ranks and values --------------------------------------------------------------------------

/// Runs `f` on every rank of a topology, with the rank's groups and a look at its calls so far.
fn on_ranks<T: Send>(
    topology: Topology,
    f: impl Fn(&Mesh<Ad>, &dyn Fn() -> Vec<Call>) -> T + Sync,
) -> Vec<T> {
    let world = MockWorld::new(topology.world_size());
    let ran = world.run(|rank| {
        let mesh = Mesh::new(topology, &rank).unwrap();
        f(&mesh, &|| world.take_calls(rank.rank()))
    });
    ran.unwrap()
}

fn etp(size: usize) -> Topology {
    TopologyConfig::new(size).with_etp(size).init().unwrap()
}

fn tp(size: usize) -> Topology {
    TopologyConfig::new(size).with_tp(size).init().unwrap()
}

fn matrix<const N: usize>(values: [f64; N], columns: usize) -> Matrix {
    let data = TensorData::new(values.to_vec(), [N / columns, columns]);
    Tensor::from_data(data, (&Default::default(), DType::F32))
}

/// In `(-1, 1)`, without a pattern that a wrong order of rows or columns could share.
fn noise(seed: usize, i: usize, j: usize) -> f32 {
    let key = (seed * 1_000_003 + i * 1_009 + j + 1) as u64;
    let bits = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15)).rotate_left(29);
    let bits = bits.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 41;
    bits as f32 / (1u64 << 22) as f32 - 1.0
}

fn noise_of(seed: usize, rows: usize, columns: usize) -> Vec<f32> {
    (0..rows * columns)
        .map(|i| noise(seed, i / columns, i % columns))
        .collect()
}

fn noise_matrix(seed: usize, rows: usize, columns: usize) -> Matrix {
    let data = TensorData::new(noise_of(seed, rows, columns), [rows, columns]);
    Tensor::from_data(data, (&Default::default(), DType::F64))
}

fn numbers<const D: usize>(tensor: Tensor<impl Backend, D>) -> Vec<f64> {
    tensor.into_data().iter::<f64>().collect()
}

fn columns<B: Backend>(x: Tensor<B, 2>, group: &Group<Ad, impl GroupKind>) -> Tensor<B, 2> {
    let width = x.dims()[1] / group.size();
    x.narrow(1, group.rank() * width, width)
}

/// The largest distance between elements.
fn distance(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    let gaps = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    gaps.fold(0.0, f64::max)
}

fn gradient<G: GroupKind, P: Placement>(
    weight: &PlacedWeight<Ad, G, P>,
    grads: &Grads,
) -> Tensor<Flex, 2> {
    let Weight::One(weight) = &weight.weight else {
        panic!("a weight of experts");
    };
    weight.val().grad(grads).expect("the factor takes part")
}

/// The gradient of the full factor, gathered from the group.
fn full_gradient<G: GroupKind, P: Placement>(
    weight: &PlacedWeight<Ad, G, P>,
    grads: &Grads,
    group: &Group<Ad, G>,
) -> Vec<f64> {
    let local = gradient(weight, grads);
    let dim = match weight.layout().axis {
        ShardAxis::Whole => return numbers(local),
        ShardAxis::Out => 0,
        ShardAxis::In => 1,
    };
    let sizes = vec![local.dims()[dim]; group.size()].into();
    numbers(apply(
        local,
        GATHER_FROM,
        &group.cast::<Flex>(),
        dim,
        &sizes,
    ))
}

fn tokens(rows: usize) -> RowGroups {
    RowGroups::whole(rows)
}

// ---- fc2 under suppressed collectives ----------------------------------------------------------

/// `A [2, 4]`, `B [4, 2]`, scale 1, on a base of zeros.
fn fc2(group: &ExpertGroup) -> RowLinear<Ad, ExpertTp> {
    let device = Default::default();
    let a = [1., 2., 3., 4., 0., 1., 0., 1.];
    let b = [1., 0., 0., 1., 1., 1., 2., -1.];
    let config = LinearConfig::new("fc2", 4, 4);
    let mut linear: RowLinear<_, _> = config.init(group, |_, _, _| 0.0, &device).unwrap();
    let lora = linear.adapt("fc2", &LoraConfig::new(2, 2.0), &device);
    lora.unwrap().load(&a, &b, &device).unwrap();
    linear
}

fn fc2_input(group: &ExpertGroup) -> Matrix {
    columns(matrix([1., 1., 2., 3.], 4), group)
}

#[test]
fn fc2_delta_arrives_as_one_rank_term_each_and_combine_sums_them() {
    let ran = on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let y = fc2(group).forward_suppressed(group.shard(fc2_input(group)), &tokens(1));
        (
            numbers(y.clone().into_term()),
            numbers(y.reduce_from().into_tensor()),
        )
    });
    assert_eq!(ran[0].0, [21., 4., 0., 0.]);
    assert_eq!(ran[1].0, [0., 0., 25., 38.]);
    for (_, combined) in ran {
        assert_eq!(combined, [21., 4., 25., 38.]);
    }
}

#[test]
fn fc2_partial_into_b_and_gathered_on_every_rank_is_twice_the_concatenated_partials() {
    let ran = on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let lora = &fc2(group).adapters[0];
        let partial = lora.a.forward(group.shard(fc2_input(group)), &tokens(1));
        let partial = partial.into_term();
        let delta = lora.b.forward(group.fanout(partial.clone()), &tokens(1));
        let sizes = [2, 2][..].into();
        let gathered = apply(delta.into_tensor(), GATHER_FROM, group, 1, &sizes);
        let combined = apply(gathered, REDUCE_FROM, group, 1, &sizes);
        (numbers(partial), numbers(combined))
    });
    assert_eq!(ran[0].0, [3., 1.]);
    assert_eq!(ran[1].0, [18., 3.]);
    for (_, combined) in ran {
        assert_eq!(combined, [6., 2., 42., 66.]);
    }
}

#[test]
fn fc2_exact_delta_gathered_onto_a_partial_base_is_counted_once_a_rank() {
    let ran = on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let lora = &fc2(group).adapters[0];
        let delta = lora.forward(group.shard(fc2_input(group)), &tokens(1));
        let delta = delta.gather_from().into_tensor();
        numbers(group.partial(delta).reduce_from().into_tensor())
    });
    for combined in ran {
        assert_eq!(combined, [42., 8., 50., 76.]);
    }
}

/// The suppressed fc2 with `z` summed the way `sum` does it, and a leaf that reads `dz`.
fn fc2_gradients(sum: impl Fn(Partial<Ad, ExpertTp>) -> Matrix + Sync) -> Vec<[Vec<f64>; 4]> {
    on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let linear = fc2(group);
        let lora = &linear.adapters[0];
        let x = fc2_input(group).require_grad();
        let dz = matrix([0., 0.], 2).require_grad();
        let z = sum(lora.a.forward(group.shard(x.clone()), &tokens(1))) + dz.clone();
        let delta = lora.b.forward(group.fanout(z), &tokens(1)).embed();
        let y = linear.weight.forward(group.shard(x.clone()), &tokens(1)) + delta;
        let y = y.reduce_from().into_tensor();
        assert_eq!(numbers(y.clone()), [21., 4., 25., 38.]);
        let grads = y.sum().backward();
        [
            numbers(dz.grad(&grads).unwrap()),
            numbers(x.grad(&grads).unwrap()),
            numbers(gradient(&lora.a, &grads)),
            numbers(gradient(&lora.b, &grads)),
        ]
    })
}

#[test]
fn fc2_gradients_hold_the_terms_of_every_rank() {
    let ran = on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let linear = fc2(group);
        let x = fc2_input(group).require_grad();
        let y = linear.forward_suppressed(group.shard(x.clone()), &tokens(1));
        let grads = y.reduce_from().into_tensor().sum().backward();
        let lora = &linear.adapters[0];
        [
            numbers(x.grad(&grads).unwrap()),
            numbers(gradient(&lora.a, &grads)),
            numbers(gradient(&lora.b, &grads)),
        ]
    });
    // dA = [[4, 4, 8, 12], [1, 1, 2, 3]] by columns, rows of dB = z, dX = A^T dz.
    assert_eq!(
        ran[0],
        [vec![4., 9.], vec![4., 4., 1., 1.], vec![21., 4., 21., 4.]]
    );
    assert_eq!(
        ran[1],
        [
            vec![12., 17.],
            vec![8., 12., 2., 3.],
            vec![21., 4., 21., 4.]
        ]
    );
}

#[test]
fn fc2_sum_with_identity_backward_keeps_the_own_part_of_dz_under_a_correct_forward() {
    let right = fc2_gradients(|z| z.reduce_fanout().into_tensor());
    for rank in &right {
        // Read behind the all-reduce, dz is still the rank's own term.
        assert_eq!(rank[3], [21., 4., 21., 4.]);
    }
    assert_eq!(right[0][2], [4., 4., 1., 1.]);
    assert_eq!(right[1][2], [8., 12., 2., 3.]);

    let wrong = fc2_gradients(|z| z.reduce_from().into_tensor());
    assert_eq!(wrong[0][0], [1., 1.]);
    assert_eq!(wrong[1][0], [3., 0.]);
    // dA = dz x^T of that part alone; dB does not notice.
    assert_eq!(wrong[0][2], [1., 1., 1., 1.]);
    assert_eq!(wrong[1][2], [6., 9., 0., 0.]);
    assert_eq!(wrong[0][3], right[0][3]);
}

// ---- fc1 ---------------------------------------------------------------------------------------

/// `A = I`, `B [4, 2]`, scale 1, on a base of zeros.
fn fc1(group: &ExpertGroup) -> ColumnLinear<Ad, ExpertTp> {
    let device = Default::default();
    let (a, b) = ([1., 0., 0., 1.], [1., 2., 3., 4., 5., 6., 7., 8.]);
    let config = LinearConfig::new("fc1", 2, 4);
    let mut linear: ColumnLinear<_, _> = config.init(group, |_, _, _| 0.0, &device).unwrap();
    let lora = linear.adapt("fc1", &LoraConfig::new(2, 2.0), &device);
    lora.unwrap().load(&a, &b, &device).unwrap();
    linear
}

#[test]
fn fc1_gradient_of_a_crosses_ranks() {
    let ran = on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let linear = fc1(group);
        let x = matrix([1., 2.], 2).require_grad();
        let y = linear.forward(group.replicated(x.clone()).copy_to(), &tokens(1));
        let y = y.into_tensor();
        let grads = y.clone().sum().backward();
        let lora = &linear.adapters[0];
        [
            numbers(y),
            numbers(x.grad(&grads).unwrap()),
            full_gradient(&lora.a, &grads, group),
            full_gradient(&lora.b, &grads, group),
        ]
    });
    assert_eq!(ran[0][0], [5., 11.]);
    assert_eq!(ran[1][0], [17., 23.]);
    for [_, dx, da, db] in ran {
        assert_eq!(dx, [16., 20.]);
        assert_eq!(da, [16., 32., 20., 40.]);
        assert_eq!(db, [1., 2.].repeat(4));
    }
}

#[test]
fn fc1_gather_with_sliced_backward_misses_the_cross_terms_under_a_correct_forward() {
    let ran = on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let lora = &fc1(group).adapters[0];
        let z = lora
            .a
            .forward(group.fanout(matrix([1., 2.], 2)), &tokens(1));
        let z = apply(z.into_tensor(), GATHER_FROM, group, 1, &[1, 1][..].into());
        let y = lora.b.forward(group.fanout(z), &tokens(1)).into_tensor();
        let grads = y.clone().sum().backward();
        (numbers(y), full_gradient(&lora.a, &grads, group))
    });
    assert_eq!(ran[0].0, [5., 11.]);
    assert_eq!(ran[1].0, [17., 23.]);
    for (_, da) in ran {
        assert_eq!(da, [4., 8., 14., 28.]);
    }
}

// ---- training ----------------------------------------------------------------------------------

/// The suppressed fc2 with the old sum of `z`: right forward, own-rank backward.
fn with_own_rank_dz(
    linear: &RowLinear<Ad, ExpertTp>,
    x: Sharded<Ad, ExpertTp>,
    rows: &RowGroups,
) -> Partial<Ad, ExpertTp> {
    let lora = &linear.adapters[0];
    let group = x.group().clone();
    let z = lora.a.forward(x.clone(), rows).reduce_from().into_tensor();
    let z = z.mul_scalar(lora.config().scale());
    let delta = lora.b.forward(group.fanout(z), rows).embed();
    linear.weight.forward(x, rows) + delta
}

/// How an fc2 arrives at its rank's term.
type Suppressed =
    fn(&RowLinear<Ad, ExpertTp>, Sharded<Ad, ExpertTp>, &RowGroups) -> Partial<Ad, ExpertTp>;

/// The full factors `[A1, B1, A2, B2]` after each of three steps of SGD.
fn trained(ranks: usize, fc2_forward: Suppressed) -> Vec<[Vec<f64>; 4]> {
    let mut ran = on_ranks(etp(ranks), |mesh, _| {
        let device = Default::default();
        let group = mesh.expert_tp();
        let lora = LoraConfig::new(4, 8.0).with_dtype(DType::F64).with_seed(3);
        let fc1 = LinearConfig::new("fc1", 6, 8).with_dtype(DType::F64);
        let fc2 = LinearConfig::new("fc2", 8, 4).with_dtype(DType::F64);
        let mut fc1: ColumnLinear<Ad, ExpertTp> =
            fc1.init(group, |_, i, j| noise(1, i, j), &device).unwrap();
        let mut fc2: RowLinear<Ad, ExpertTp> =
            fc2.init(group, |_, i, j| noise(2, i, j), &device).unwrap();
        fc1.adapt("fc1", &lora, &device).unwrap();
        fc2.adapt("fc2", &lora, &device).unwrap();
        let rows = tokens(5);
        let steps = (0..3).map(|step| {
            let x = group.fanout(noise_matrix(10 + step, 5, 6));
            let h = fc1.forward(x, &rows).map(silu);
            let y = fc2_forward(&fc2, h, &rows).reduce_from().into_tensor();
            let loss = (y - noise_matrix(20 + step, 5, 4)).powi_scalar(2).mean();
            let mut grads = loss.backward();
            let first = GradientsParams::from_module(&mut grads, &fc1);
            let second = GradientsParams::from_module(&mut grads, &fc2);
            fc1 = sgd(fc1.clone(), first);
            fc2 = sgd(fc2.clone(), second);
            let ([one], [two]) = (&fc1.adapters[..], &fc2.adapters[..]) else {
                panic!("one adapter each");
            };
            [
                numbers(one.a.gather(group)),
                numbers(one.b.gather(group)),
                numbers(two.a.gather(group)),
                numbers(two.b.gather(group)),
            ]
        });
        steps.collect::<Vec<_>>()
    });
    let first = ran.remove(0);
    assert!(ran.iter().all(|rank| *rank == first));
    first
}

fn sgd<M: AutodiffModule<Ad>>(module: M, grads: GradientsParams) -> M {
    SgdConfig::new().init().step(0.5, module, grads)
}

#[test]
fn three_sgd_steps_end_at_the_same_parameters_at_every_etp() {
    let solo = trained(1, RowLinear::forward_suppressed);
    // B starts at zero, so the A factors move from the second step on.
    assert!(distance(&solo[0][2], &solo[2][2]) > 1e-3);
    for ranks in [2, 4] {
        let split = trained(ranks, RowLinear::forward_suppressed);
        for (step, (solo, split)) in solo.iter().zip(&split).enumerate() {
            for (solo, split) in solo.iter().zip(split) {
                let gap = distance(solo, split);
                assert!(gap < 1e-13, "{gap:e} after step {step} at ETP={ranks}");
            }
        }
    }
}

#[test]
fn a_fault_in_the_gradient_of_a_shows_from_the_second_step_only() {
    let solo = trained(1, RowLinear::forward_suppressed);
    let wrong = trained(2, with_own_rank_dz);
    for (solo, wrong) in solo[0].iter().zip(&wrong[0]) {
        assert!(distance(solo, wrong) < 1e-13);
    }
    assert!(distance(&solo[2][2], &wrong[2][2]) > 1e-3);
    // At ETP = 1 the old algebra is right, which is why it was not seen there.
    let wrong = trained(1, with_own_rank_dz);
    assert!(distance(&solo[2][2], &wrong[2][2]) < 1e-13);
}

// ---- shared expert, its sums overlapped or not -------------------------------------------------

#[derive(Clone, Copy, Debug, PartialEq)]
enum Sums {
    /// The row-parallel linear sums.
    Inside,
    /// Its caller does, later.
    Outside,
    /// Over tokens: gathered before fc1, reduce-scattered after fc2.
    Sequence,
    /// The old fault: a gathered delta on a term that its caller sums.
    Doubled,
}

/// Output, dX, and the gradients of the full `[A1, B1, A2, B2]`.
type Mlp = [Vec<f64>; 6];

const TOKENS: usize = 3;

fn mlp_config(rank: usize) -> LoraConfig {
    let config = LoraConfig::new(rank, 3.0).with_dtype(DType::F64);
    config.with_init_b(Init::Normal { std: 0.5 })
}

fn mlp_linears(group: &Group<Ad, Tp>, rank: usize) -> (ColumnLinear<Ad, Tp>, RowLinear<Ad, Tp>) {
    let device = Default::default();
    let fc1 = LinearConfig::new("fc1", 4, 8).with_dtype(DType::F64);
    let fc2 = LinearConfig::new("fc2", 8, 4).with_dtype(DType::F64);
    let mut fc1: ColumnLinear<_, _> = fc1.init(group, |_, i, j| noise(3, i, j), &device).unwrap();
    let mut fc2: RowLinear<_, _> = fc2.init(group, |_, i, j| noise(4, i, j), &device).unwrap();
    fc1.adapt("fc1", &mlp_config(rank), &device).unwrap();
    fc2.adapt("fc2", &mlp_config(rank), &device).unwrap();
    (fc1, fc2)
}

fn shared_expert(ranks: usize, sums: Sums) -> Vec<Mlp> {
    on_ranks(tp(ranks), |mesh, _| {
        let group = mesh.tp();
        let (fc1, fc2) = mlp_linears(group, 2);
        let rows = tokens(TOKENS);
        let sizes: Vec<_> = (0..ranks)
            .map(|k| (TOKENS + ranks - 1 - k) / ranks)
            .collect();
        let own = match sums {
            Sums::Sequence => range_of(&sizes, group.rank()),
            _ => 0..TOKENS,
        };
        let x = noise_matrix(5, TOKENS, 4)
            .slice([own.clone()])
            .require_grad();
        let entered = match sums {
            Sums::Sequence => group.shard_tokens(x.clone(), &sizes).gather_fanout(),
            _ => group.replicated(x.clone()).copy_to(),
        };
        let h = fc1.forward(entered, &rows).map(silu);
        let y = match sums {
            Sums::Inside => fc2.forward(h, &rows).into_tensor(),
            Sums::Outside => fc2.forward_suppressed(h, &rows).reduce_from().into_tensor(),
            Sums::Sequence => fc2.forward_sequence(h, &rows, &sizes).into_tensor(),
            Sums::Doubled => {
                let delta = fc2.adapters[0].forward(h.clone(), &rows).gather_from();
                let delta = group.partial(delta.into_tensor());
                let y = fc2.weight.forward(h, &rows) + delta;
                y.reduce_from().into_tensor()
            }
        };
        let weights = noise_matrix(6, TOKENS, 4).slice([own]);
        let grads = (y.clone() * weights).sum().backward();
        let whole = |x: Tensor<Flex, 2>| match sums {
            Sums::Sequence => apply(x, GATHER_FROM, &group.cast::<Flex>(), 0, &sizes[..].into()),
            _ => x,
        };
        let (one, two) = (&fc1.adapters[0], &fc2.adapters[0]);
        [
            numbers(whole(y.inner())),
            numbers(whole(x.grad(&grads).unwrap())),
            full_gradient(&one.a, &grads, group),
            full_gradient(&one.b, &grads, group),
            full_gradient(&two.a, &grads, group),
            full_gradient(&two.b, &grads, group),
        ]
    })
}

/// The same from plain tensors: `W + s B A` folded into the weights of one device.
fn folded_mlp() -> Mlp {
    let group = Group::solo();
    let (fc1, fc2) = mlp_linears(&group, 2);
    let folded = |merged: Tensor<Ad, 3>| merged.squeeze_dim::<2>(0).detach().require_grad();
    let w1 = folded(fc1.merged_weight(&group).unwrap());
    let w2 = folded(fc2.merged_weight(&group).unwrap());
    let x = noise_matrix(5, TOKENS, 4).require_grad();
    let y = silu(x.clone().matmul(w1.clone().transpose())).matmul(w2.clone().transpose());
    let grads = (y.clone() * noise_matrix(6, TOKENS, 4)).sum().backward();
    // W = .. + s B A, so dA = s B^T dW and dB = s dW A^T.
    let factors = |w: &Matrix, a: &Weight<Ad>, b: &Weight<Ad>| {
        let dw = w.grad(&grads).unwrap().mul_scalar(mlp_config(2).scale());
        let [a, b] = [a, b].map(|f| f.stacked().squeeze_dim::<2>(0).inner());
        [
            numbers(b.transpose().matmul(dw.clone())),
            numbers(dw.matmul(a.transpose())),
        ]
    };
    let (one, two) = (&fc1.adapters[0], &fc2.adapters[0]);
    let [a1, b1] = factors(&w1, &one.a.weight, &one.b.weight);
    let [a2, b2] = factors(&w2, &two.a.weight, &two.b.weight);
    [numbers(y), numbers(x.grad(&grads).unwrap()), a1, b1, a2, b2]
}

#[test]
fn a_shared_expert_is_exact_with_its_sums_inside_outside_or_over_tokens() {
    let expected = folded_mlp();
    for ranks in [1, 2] {
        for sums in [Sums::Inside, Sums::Outside, Sums::Sequence] {
            for rank in shared_expert(ranks, sums) {
                for (found, expected) in rank.iter().zip(&expected) {
                    let gap = distance(found, expected);
                    assert!(gap < 1e-13, "{gap:e}: {sums:?} at TP={ranks}");
                }
            }
        }
    }
}

#[test]
fn a_gathered_delta_of_a_shared_expert_with_sums_outside_is_doubled() {
    let expected = folded_mlp();
    let base = {
        let group = Group::solo();
        let (fc1, fc2) = mlp_linears(&group, 2);
        let w1 = fc1.merged_weight(&group).unwrap().squeeze_dim::<2>(0);
        let w2 = fc2.weight.weight.stacked().squeeze_dim::<2>(0);
        let x = noise_matrix(5, TOKENS, 4);
        numbers(silu(x.matmul(w1.transpose())).matmul(w2.transpose()))
    };
    for rank in shared_expert(2, Sums::Doubled) {
        let delta = |y: &[f64]| -> Vec<_> { y.iter().zip(&base).map(|(y, b)| y - b).collect() };
        let doubled: Vec<_> = delta(&expected[0]).iter().map(|d| 2.0 * d).collect();
        assert!(distance(&delta(&rank[0]), &doubled) < 1e-13);
        assert!(distance(&rank[0], &expected[0]) > 0.1);
    }
}

// ---- no constant of the topology ---------------------------------------------------------------

/// Bits of the full `A`, `B` and merged weight, as gathered from the ranks.
type Bits = [Vec<u32>; 3];

fn bits(tensor: Tensor<Ad, 3>) -> Vec<u32> {
    let values = tensor.into_data().to_vec::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

fn stored<P: Placement>(
    group: &ExpertGroup,
    config: LinearConfig,
    load: Option<[&[f32]; 2]>,
) -> Bits {
    let device = Default::default();
    let value = |expert, i, j| noise(30 + expert, i, j);
    let mut linear: Linear<Ad, ExpertTp, P> = config.init(group, value, &device).unwrap();
    // A scale that is no power of two, so that the order of products shows in the last bit.
    let lora = LoraConfig::new(4, 5.2).with_init_b(Init::Normal { std: 0.3 });
    let adapter = linear.adapt("linear", &lora, &device).unwrap();
    if let Some([a, b]) = load {
        adapter.load(a, b, &device).unwrap();
    }
    let (a, b) = (bits(adapter.a.gather(group)), bits(adapter.b.gather(group)));
    linear.merge(group).unwrap();
    assert!(linear.adapters.is_empty());
    [a, b, bits(linear.weight.gather(group))]
}

/// On two experts of `[24, 16]`: a fused gate/up, a row-parallel and a replicated linear.
fn stored_on(ranks: usize, load: Option<[&[f32]; 2]>) -> Vec<[Bits; 3]> {
    on_ranks(etp(ranks), |mesh, _| {
        let group = mesh.expert_tp();
        let config = || LinearConfig::new("linear", 16, 24).with_experts(0..2);
        let fused = config().with_fragments(["gate", "up"]);
        [
            stored::<Column>(group, fused, load),
            stored::<Row>(group, config(), load),
            stored::<Whole>(group, config(), load),
        ]
    })
}

#[test]
fn stored_factors_and_merged_weights_have_the_same_bits_at_every_etp() {
    let (a, b) = (noise_of(40, 2 * 4, 16), noise_of(41, 2 * 24, 4));
    for load in [None, Some([&a[..], &b[..]])] {
        let solo = stored_on(1, load).remove(0);
        // However it is sharded, it is one and the same weight.
        assert_eq!(solo[0], solo[1]);
        assert_eq!(solo[0], solo[2]);
        if load.is_some() {
            let as_bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(solo[0][..2], [as_bits(&a), as_bits(&b)]);
        }
        for ranks in [2, 4] {
            for rank in stored_on(ranks, load) {
                assert_eq!(rank, solo, "ETP={ranks}");
            }
        }
    }
}

#[test]
fn merged_weights_are_the_base_plus_scaled_b_a_without_a_factor_of_the_etp() {
    let (a, b) = (noise_of(40, 2 * 4, 16), noise_of(41, 2 * 24, 4));
    let merged = stored_on(4, Some([&a, &b])).remove(0)[1][2].clone();
    let folded = |factor: f64| -> Vec<_> {
        let element = |expert: usize, i: usize, j: usize| {
            let dot = (0..4).map(|k| {
                let (b, a) = (b[(expert * 24 + i) * 4 + k], a[(expert * 4 + k) * 16 + j]);
                f64::from(b) * f64::from(a)
            });
            f64::from(noise(30 + expert, i, j)) + factor * 1.3 * dot.sum::<f64>()
        };
        let rows = (0..2).flat_map(|e| (0..24).map(move |i| (e, i)));
        rows.flat_map(|(e, i)| (0..16).map(move |j| element(e, i, j)))
            .collect()
    };
    let merged: Vec<_> = merged
        .into_iter()
        .map(|v| f64::from(f32::from_bits(v)))
        .collect();
    assert!(distance(&merged, &folded(1.0)) < 1e-6);
    // Negative control: a delta divided by the number of ranks.
    assert!(distance(&merged, &folded(0.25)) > 0.1);
}

// ---- fused gate and up -------------------------------------------------------------------------

#[test]
fn gate_and_up_come_back_in_full_order() {
    // Rows g0, g1, u0, u1 as 10, 11, 20, 21.
    let row = |i: usize| [10., 11., 20., 21.][i];
    let ran = on_ranks(etp(2), |mesh, _| {
        let group = mesh.expert_tp();
        let device = Default::default();
        let config = LinearConfig::new("gate_up", 1, 4).with_fragments(["gate", "up"]);
        let mut linear: ColumnLinear<Ad, ExpertTp> = config
            .init(group, |_, i, _| row(i) as f32, &device)
            .unwrap();
        let lora = LoraConfig::new(2, 2.0);
        let adapter = linear.adapt("gate_up", &lora, &device).unwrap();
        // B rows: the same numbers in hundredths, against A = [1, 0].
        let b = [0.5, 0., 0.25, 0., 0.125, 0., 0.0625, 0.];
        adapter.load(&[1., 0.], &b, &device).unwrap();
        let y = linear
            .forward(group.fanout(matrix([1.], 1)), &tokens(1))
            .into_tensor();
        let halved = {
            let local = linear.weight.weight.stacked().squeeze_dim::<2>(0).detach();
            numbers(apply(local, GATHER_FROM, group, 0, &[2, 2][..].into()))
        };
        let base = numbers(linear.weight.gather(group));
        let b = numbers(linear.adapters[0].b.gather(group));
        linear.merge(group).unwrap();
        (
            numbers(y),
            base,
            b,
            numbers(linear.weight.gather(group)),
            halved,
        )
    });
    // A rank holds matching slices of gate and up, for the activation to multiply.
    assert_eq!(ran[0].0, [10.5, 20.125]);
    assert_eq!(ran[1].0, [11.25, 21.0625]);
    for (_, base, b, merged, halved) in ran {
        assert_eq!(base, [10., 11., 20., 21.]);
        assert_eq!(b, [0.5, 0., 0.25, 0., 0.125, 0., 0.0625, 0.]);
        assert_eq!(merged, [10.5, 11.25, 20.125, 21.0625]);
        // Negative control: the ranks' parts laid end to end and halved. Right shapes, wrong rows.
        let (gate, up) = halved.split_at(2);
        assert_eq!((gate, up), (&[10., 20.][..], &[11., 21.][..]));
    }
}

#[test]
fn an_adapter_on_gate_or_up_alone_reaches_that_half_only() {
    for (fragment, expected) in [
        ("gate", [10.5, 11.25, 20., 21.]),
        ("up", [10., 11., 20.5, 21.25]),
    ] {
        let ran = on_ranks(etp(2), |mesh, _| {
            let group = mesh.expert_tp();
            let device = Default::default();
            let config = LinearConfig::new("gate_up", 1, 4).with_fragments(["gate", "up"]);
            let row = |i: usize| [10., 11., 20., 21.][i];
            let mut linear: ColumnLinear<Ad, ExpertTp> =
                config.init(group, |_, i, _| row(i), &device).unwrap();
            let adapter = linear.adapt(fragment, &LoraConfig::new(2, 2.0), &device);
            let b = [0.5, 0., 0.25, 0.];
            adapter.unwrap().load(&[1., 0.], &b, &device).unwrap();
            let y = linear.forward(group.fanout(matrix([1.], 1)), &tokens(1));
            linear.merge(group).unwrap();
            (
                numbers(y.into_tensor()),
                numbers(linear.weight.gather(group)),
            )
        });
        for (rank, (y, merged)) in ran.into_iter().enumerate() {
            assert_eq!(y, [expected[rank], expected[2 + rank]], "{fragment}");
            assert_eq!(merged, expected, "{fragment}");
        }
    }
}

// ---- groups and calls --------------------------------------------------------------------------

/// An operation and the shape that the rank passed to it.
type Seen = (CollectiveOp, Vec<usize>);

/// Forward and backward calls on the rank's `ExpertTp` group of `members` ranks.
fn seen(calls: Vec<Call>, members: usize) -> Vec<Seen> {
    let calls = calls.into_iter().map(|call| {
        assert_eq!(call.group, GroupName::ExpertTp);
        assert_eq!(call.members.len(), members);
        (call.op, call.shape)
    });
    calls.collect()
}

const D_IN: usize = 8;
const D_OUT: usize = 12;
const RANK: usize = 4;

/// A linear of three experts at `[D_OUT, D_IN]`, with or without an adapter.
fn linear<P: Placement>(group: &ExpertGroup, adapted: bool) -> Linear<Ad, ExpertTp, P> {
    let device = Default::default();
    let config = LinearConfig::new("linear", D_IN, D_OUT).with_experts(0..3);
    let mut linear = config.init(group, noise, &device).unwrap();
    if adapted {
        let lora = LoraConfig::new(RANK, 8.0).with_init_b(Init::Kaiming);
        linear.adapt("linear", &lora, &device).unwrap();
    }
    linear
}

/// The calls of one linear forward and backward. Its factors have gradients, zero for experts
/// without rows.
fn calls_of<P: Placement>(
    mesh: &Mesh<Ad>,
    take: &dyn Fn() -> Vec<Call>,
    adapted: bool,
    counts: &[usize; 3],
    forward: impl Fn(&Linear<Ad, ExpertTp, P>, Matrix, &RowGroups) -> Matrix,
) -> [Vec<Seen>; 2] {
    let group = mesh.expert_tp();
    let rows = RowGroups::new(counts, counts.iter().sum()).unwrap();
    let linear = linear::<P>(group, adapted);
    let width = match P::AXIS {
        ShardAxis::In => D_IN / group.size(),
        _ => D_IN,
    };
    let data = TensorData::new(noise_of(7, rows.rows(), width), [rows.rows(), width]);
    let x = Matrix::from_data(data, &Default::default()).require_grad();
    take();
    let y = forward(&linear, x.clone(), &rows);
    let there = seen(take(), group.size());
    let grads = y.sum().backward();
    let back = seen(take(), group.size());
    assert_eq!(x.grad(&grads).unwrap().dims(), [rows.rows(), width]);
    for Lora { a, b, .. } in &linear.adapters {
        for weight in [&a.weight, &b.weight] {
            let Weight::PerExpert(weight) = weight else {
                panic!("a weight for all rows");
            };
            let grad = weight
                .val()
                .grad(&grads)
                .expect("registered without rows too");
            for (expert, rows) in counts.iter().enumerate() {
                let grad = numbers(grad.clone().narrow(0, expert, 1));
                assert!(grad.iter().all(|g| g.is_finite()));
                assert_eq!(grad.iter().any(|g| *g != 0.0), *rows > 0, "expert {expert}");
            }
        }
    }
    [there, back]
}

/// Calls of every kind of linear, in the order of [`expected_calls`].
fn all_calls(
    mesh: &Mesh<Ad>,
    take: &dyn Fn() -> Vec<Call>,
    adapted: bool,
    counts: &[usize; 3],
) -> Vec<[Vec<Seen>; 2]> {
    let group = mesh.expert_tp();
    let total: usize = counts.iter().sum();
    let mut sizes = vec![0; group.size()];
    sizes[0] = total;
    let sizes = &sizes;
    vec![
        calls_of(
            mesh,
            take,
            adapted,
            counts,
            |linear: &ColumnLinear<_, _>, x, rows| {
                linear.forward(group.fanout(x), rows).into_tensor()
            },
        ),
        calls_of(
            mesh,
            take,
            adapted,
            counts,
            |linear: &RowLinear<_, _>, x, rows| linear.forward(group.shard(x), rows).into_tensor(),
        ),
        calls_of(
            mesh,
            take,
            adapted,
            counts,
            |linear: &RowLinear<_, _>, x, rows| {
                linear.forward_suppressed(group.shard(x), rows).into_term()
            },
        ),
        calls_of(
            mesh,
            take,
            adapted,
            counts,
            |linear: &RowLinear<_, _>, x, rows| {
                let y = linear.forward_sequence(group.shard(x), rows, sizes);
                y.into_tensor()
            },
        ),
        calls_of(
            mesh,
            take,
            adapted,
            counts,
            |linear: &ReplicatedLinear<_, _>, x, rows| {
                linear.forward(group.replicated(x), rows).into_tensor()
            },
        ),
    ]
}

/// `[forward, backward]` of the column-parallel linear, the row-parallel one that sums, is
/// suppressed or is sequence parallel, and the replicated one, for `t` rows at `rank` of `p`.
fn expected_calls(adapted: bool, t: usize, rank: usize, p: usize) -> Vec<[Vec<Seen>; 2]> {
    use CollectiveOp::{AllGather, AllReduce, ReduceScatter};
    if p == 1 {
        return vec![[vec![], vec![]]; 5];
    }
    let adapter = |calls: Vec<Seen>| if adapted { calls } else { Vec::new() };
    let z = (AllReduce, vec![t, RANK]);
    let mut ordinary = vec![(AllReduce, vec![t, D_OUT])];
    ordinary.extend(adapter(vec![z.clone(), (AllGather, vec![t, D_OUT / p])]));
    let mut sequence = adapter(vec![z.clone()]);
    sequence.push((ReduceScatter, vec![t, D_OUT]));
    // The first rank has all tokens of the slices.
    let mut sequence_back = vec![(AllGather, vec![if rank == 0 { t } else { 0 }, D_OUT])];
    sequence_back.extend(adapter(vec![z.clone()]));
    vec![
        [
            adapter(vec![(AllGather, vec![t, RANK / p])]),
            adapter(vec![(ReduceScatter, vec![t, RANK])]),
        ],
        [ordinary, adapter(vec![z.clone()])],
        [adapter(vec![z.clone()]), adapter(vec![z])],
        [sequence, sequence_back],
        [vec![], vec![]],
    ]
}

#[test]
fn linears_issue_the_calls_of_their_placement_and_adapters_add_low_rank_ones() {
    for ranks in [1, 2, 4] {
        for counts in [[4, 1, 2], [4, 0, 2], [0, 0, 0]] {
            for adapted in [true, false] {
                let t: usize = counts.iter().sum();
                let ran = on_ranks(etp(ranks), |mesh, take| {
                    all_calls(mesh, take, adapted, &counts)
                });
                for (rank, calls) in ran.into_iter().enumerate() {
                    let expected = expected_calls(adapted, t, rank, ranks);
                    assert_eq!(calls, expected, "rank {rank} of {ranks}, rows {counts:?}");
                }
            }
        }
    }
}

#[test]
fn ranks_without_tokens_issue_the_same_calls_as_the_rest() {
    let topology = TopologyConfig::new(4)
        .with_ep(2)
        .with_etp(2)
        .init()
        .unwrap();
    let ran = on_ranks(topology, |mesh, take| {
        let counts = [[3, 0, 2], [0, 0, 0]][mesh.coordinates().ep];
        let calls = all_calls(mesh, take, true, &counts);
        let ops = calls.into_iter().flatten().flatten();
        ops.map(|(op, shape)| (op, shape[1])).collect::<Vec<_>>()
    });
    assert_eq!(ran[0].len(), 12);
    for rank in &ran {
        assert_eq!(*rank, ran[0]);
    }
}

#[test]
fn a_dense_linear_without_rows_issues_its_calls_and_has_zero_gradients() {
    let of_rows = |rows: usize| {
        on_ranks(tp(2), move |mesh, take| {
            let group = mesh.tp();
            let (fc1, fc2) = mlp_linears(group, 2);
            let x = noise_matrix(5, rows, 4).require_grad();
            let h = fc1.forward(group.fanout(x.clone()), &tokens(rows));
            let y = fc2.forward_suppressed(h, &tokens(rows)).into_term();
            let there = take();
            let grads = y.sum().backward();
            assert_eq!(x.grad(&grads).unwrap().dims(), [rows, 4]);
            let (one, two) = (&fc1.adapters[0], &fc2.adapters[0]);
            let gradients = [
                gradient(&one.a, &grads),
                gradient(&one.b, &grads),
                gradient(&two.a, &grads),
                gradient(&two.b, &grads),
            ];
            let calls = [there, take()].map(|calls| {
                let calls = calls.into_iter();
                calls
                    .map(|call| (call.op, call.shape[1]))
                    .collect::<Vec<_>>()
            });
            (calls, gradients.map(numbers))
        })
    };
    for ((calls, gradients), (full_calls, full_gradients)) in of_rows(0).into_iter().zip(of_rows(3))
    {
        use CollectiveOp::{AllGather, AllReduce, ReduceScatter};
        assert_eq!(calls, full_calls);
        assert_eq!(calls[0], [(AllGather, 1), (AllReduce, 2)]);
        assert_eq!(calls[1], [(AllReduce, 2), (ReduceScatter, 2)]);
        for (zero, full) in gradients.iter().zip(&full_gradients) {
            assert_eq!(*zero, vec![0.0; full.len()]);
            assert!(full.iter().any(|g| *g != 0.0));
        }
    }
}

#[test]
fn expert_adapters_call_the_expert_group_where_it_differs_from_the_dense_one() {
    let topology = TopologyConfig::new(4)
        .with_tp(4)
        .with_etp(2)
        .init()
        .unwrap();
    let ran = on_ranks(topology, |mesh, take| {
        let device = Default::default();
        let expert = {
            let group = mesh.expert_tp();
            let (fc1, fc2) = (linear(group, true), linear::<Row>(group, true));
            let rows = RowGroups::new(&[1, 2, 0], 3).unwrap();
            let x = Matrix::from_data(TensorData::new(noise_of(8, 3, D_IN), [3, D_IN]), &device);
            let h = ColumnLinear::forward(&fc1, group.fanout(x), &rows);
            let h = group.shard(h.into_tensor().narrow(1, 0, D_IN / 2));
            let y = fc2.forward_suppressed(h, &rows).into_term();
            y.sum().backward();
            take()
        };
        let dense = {
            let group = mesh.tp();
            let (fc1, fc2) = mlp_linears(group, 4);
            let x = group.fanout(noise_matrix(9, 3, 4));
            let h = fc1.forward(x, &tokens(3));
            fc2.forward_suppressed(h, &tokens(3))
                .into_term()
                .sum()
                .backward();
            take()
        };
        (expert, dense)
    });
    for (rank, (expert, dense)) in ran.into_iter().enumerate() {
        assert_eq!((expert.len(), dense.len()), (4, 4));
        let first = rank / 2 * 2;
        for call in expert {
            assert_eq!(call.group, GroupName::ExpertTp);
            assert_eq!(call.members, [first, first + 1]);
        }
        for call in dense {
            assert_eq!(call.group, GroupName::Tp);
            assert_eq!(call.members, [0, 1, 2, 3]);
        }
    }
}

#[test]
fn without_expert_tensor_parallelism_an_adapter_sums_nothing_and_is_exact() {
    let topology = TopologyConfig::new(2).with_ep(2).init().unwrap();
    let ran = on_ranks(topology, |mesh, take| {
        let group = mesh.expert_tp();
        let device = Default::default();
        let ep = mesh.ep().rank();
        let config = LinearConfig::new("fc2", 4, 6).with_experts(ep..ep + 1);
        let config = config.with_dtype(DType::F64);
        let mut linear: RowLinear<Ad, ExpertTp> = config
            .init(group, |e, i, j| noise(50 + e, i, j), &device)
            .unwrap();
        linear.adapt("fc2", &mlp_config(2), &device).unwrap();
        let x = noise_matrix(60 + ep, 3, 4);
        let rows = RowGroups::new(&[3], 3).unwrap();
        let y = linear
            .forward_suppressed(group.shard(x.clone()), &rows)
            .into_term();
        let merged = linear.merged_weight(group).unwrap().squeeze_dim::<2>(0);
        let base = linear.weight.weight.stacked().squeeze_dim::<2>(0);
        let expected = x.clone().matmul(merged.transpose());
        let unadapted = x.matmul(base.transpose());
        y.clone().sum().backward();
        (numbers(y), numbers(expected), numbers(unadapted), take())
    });
    for (y, expected, unadapted, calls) in ran {
        assert!(distance(&y, &expected) < 1e-13);
        assert!(distance(&y, &unadapted) > 0.1);
        assert_eq!(calls, []);
    }
}

// ---- extents -----------------------------------------------------------------------------------

#[test]
fn extents_that_the_group_does_not_divide_are_refused_on_every_rank_alike() {
    fn refused<P: Placement>(d_in: usize, d_out: usize, rank: usize) -> Vec<String> {
        on_ranks(etp(2), |mesh, take| {
            let device = Default::default();
            let config = LinearConfig::new("experts.fc", d_in, d_out);
            let linear: Result<Linear<Ad, ExpertTp, P>, _> =
                config.init(mesh.expert_tp(), |_, _, _| 0.0, &device);
            let error = linear.and_then(|mut linear| {
                let lora = LoraConfig::new(rank, 2.0);
                linear.adapt("experts.fc", &lora, &device).map(|_| ())
            });
            assert_eq!(take(), []);
            error.expect_err("is refused").to_string()
        })
    }
    let at_two = |what: &str, extent: usize| {
        let way_out = match what {
            "lora rank" => "a multiple of 2 as rank".to_owned(),
            _ => format!("a divisor of {extent} as etp_size"),
        };
        let message = format!(
            "experts.fc: {what}={extent} is not divisible by etp_size=2 (choose {way_out})"
        );
        vec![message; 2]
    };
    // The base of a row-parallel linear has no part in it: its adapter's B is sharded on d_out.
    assert_eq!(refused::<Row>(4, 5, 2), at_two("d_out", 5));
    assert_eq!(refused::<Row>(5, 4, 2), at_two("d_in", 5));
    assert_eq!(refused::<Column>(4, 5, 2), at_two("d_out", 5));
    assert_eq!(refused::<Column>(4, 4, 3), at_two("lora rank", 3));
    // A row-parallel A is not sharded on the rank, so it takes any.
    let ran = on_ranks(etp(2), |mesh, _| {
        let device = Default::default();
        let config = LinearConfig::new("fc2", 4, 4);
        let mut linear: RowLinear<Ad, ExpertTp> = config
            .init(mesh.expert_tp(), |_, _, _| 0.0, &device)
            .unwrap();
        linear
            .adapt("fc2", &LoraConfig::new(3, 2.0), &device)
            .is_ok()
    });
    assert_eq!(ran, [true, true]);
}
