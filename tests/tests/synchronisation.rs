//! Start values and gradient sums: what ranks that hold the same parameters have to agree on.

use burn::backend::Flex;
use burn::optim::GradientsParams;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Adaptable, Init, LinearConfig, LoraConfig, ReplicatedLinear, RowLinear, Sharing, TrainedWeight,
    Weight, sync_gradients,
};
use moe_lora_experts::{MoeConfig, MoeLayer, MoeWeights};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{
    CollectiveOp, ExpertTp, GroupName, Mesh, Topology, TopologyConfig, Tp, range_of,
};
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Matrix, MlpCase, MlpValues, SHARING, assert_close, assert_far,
    factors, mock, noise, oracle, ranks, shared_pair, synced_gradient, unshard_experts,
};

const RANK: usize = 4;
const D: usize = 8;

fn topology(world: usize, tp: usize, ep: usize, etp: usize) -> Topology {
    let config = TopologyConfig::new(world);
    config.with_tp(tp).with_ep(ep).with_etp(etp).init().unwrap()
}

/// An expert linear of four experts with an adapter, as a rank holds it.
fn expert_linear(mesh: &Mesh<Ad>, config: &LoraConfig) -> RowLinear<Ad, ExpertTp> {
    let local = mesh
        .topology()
        .local_experts(4, mesh.ep().rank())
        .expect("the topologies here divide four experts");
    let device = Default::default();
    let mut linear: RowLinear<Ad, ExpertTp> = LinearConfig::new("experts.down_proj", D, D)
        .with_experts(local)
        .init(mesh.expert_tp(), |_, _, _| 0.0, &device)
        .unwrap();
    linear.adapt("experts.down_proj", config, &device).unwrap();
    linear
}

/// Gives every local element of a factor the gradient `value`.
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

/// The one value that a factor's gradient holds after its synchronisation.
fn uniform(weight: &TrainedWeight<'_, Ad>, grads: &GradientsParams) -> f64 {
    let grad = Matrix::stack(&synced_gradient(weight.weight, grads));
    assert!(grad.values.iter().all(|value| *value == grad.values[0]));
    grad.values[0]
}

#[test]
fn expert_gradients_take_the_group_of_the_table() {
    // EP, ETP, TP over four ranks, and the group that sums the gradients of per-expert factors.
    for (ep, etp, tp, expected) in [
        (1, 2, 2, GroupName::Dp),
        (2, 1, 1, GroupName::ExpertDp),
        (1, 1, 2, GroupName::ExpertDp),
        (1, 2, 1, GroupName::ExpertDp),
    ] {
        for sharing in SHARING {
            let topology = topology(4, tp, ep, etp);
            let world = mock(topology);
            let sums = ranks(&world, topology, |mesh| {
                let config = LoraConfig::new(RANK, 8.0).with_sharing(sharing);
                let linear = expert_linear(&mesh, &config);
                let weights = linear.trained_weights();
                let mut grads = GradientsParams::new();
                for weight in &weights {
                    fill(&mut grads, weight, 10f64.powi(mesh.rank() as i32));
                }
                let grads = sync_gradients(&weights, grads, &mesh);
                [uniform(&weights[0], &grads), uniform(&weights[1], &grads)]
            });
            let case = format!("ep={ep} etp={etp} tp={tp} {sharing:?}");
            let shared = shared_pair(&LoraConfig::new(RANK, 8.0).with_sharing(sharing), true);
            for (rank, sums) in sums.iter().enumerate() {
                let mut asked = Vec::new();
                for (sum, shared) in sums.iter().zip(shared) {
                    // The digits of the sum name its terms.
                    let groups: &[GroupName] = match shared {
                        false => &[expected],
                        true => &[GroupName::Ep, expected],
                    };
                    let mut terms = vec![rank];
                    for group in groups {
                        let members = |rank: &usize| topology.members(*group, *rank).unwrap();
                        terms = terms.iter().flat_map(members).collect();
                    }
                    terms.sort_unstable();
                    let digits: f64 = terms.iter().map(|rank| 10f64.powi(*rank as i32)).sum();
                    assert_eq!(*sum, digits, "{case} rank {rank}");
                    let of_ep = if shared { ep } else { 1 };
                    assert_eq!(terms.len(), topology.expert_dp() * of_ep, "{case}");
                    let sizes = |group: &&GroupName| topology.size(**group) > 1;
                    asked.extend(groups.iter().filter(sizes).copied());
                }
                let calls = world.calls(rank);
                assert!(calls.iter().all(|call| call.op == CollectiveOp::AllReduce));
                let called: Vec<GroupName> = calls.iter().map(|call| call.group).collect();
                assert_eq!(called, asked, "{case}");
            }
        }
    }
}

#[test]
fn a_shared_factor_s_gradient_is_the_sum_over_ep_not_the_mean() {
    let topology = topology(2, 1, 2, 1);
    let sums = |sharing| {
        ranks(&mock(topology), topology, |mesh| {
            let config = LoraConfig::new(RANK, 8.0).with_sharing(sharing);
            let linear = expert_linear(&mesh, &config);
            let weights = linear.trained_weights();
            let mut grads = GradientsParams::new();
            for weight in &weights {
                fill(&mut grads, weight, [3.0, 5.0][mesh.rank()]);
            }
            let grads = sync_gradients(&weights, grads, &mesh);
            [uniform(&weights[0], &grads), uniform(&weights[1], &grads)]
        })
    };
    assert_eq!(sums(Sharing::Shared), [[8.0, 8.0], [8.0, 8.0]]);
    // The B of a row-parallel linear alone.
    assert_eq!(sums(Sharing::SharedOuter), [[3.0, 8.0], [5.0, 8.0]]);
    // Negative control: factors of one expert each are not summed over EP.
    assert_eq!(sums(Sharing::PerExpert), [[3.0, 3.0], [5.0, 5.0]]);
}

#[test]
fn a_rank_without_a_gradient_takes_part_with_zeros() {
    let topology = topology(2, 1, 2, 1);
    let sums = ranks(&mock(topology), topology, |mesh| {
        let config = LoraConfig::new(RANK, 8.0).with_sharing(Sharing::Shared);
        let linear = expert_linear(&mesh, &config);
        let weights = linear.trained_weights();
        let mut grads = GradientsParams::new();
        if mesh.rank() == 1 {
            fill(&mut grads, &weights[1], 5.0);
        }
        let grads = sync_gradients(&weights, grads, &mesh);
        [uniform(&weights[0], &grads), uniform(&weights[1], &grads)]
    });
    assert_eq!(sums, [[0.0, 5.0], [0.0, 5.0]]);
}

#[test]
fn gradients_of_dense_linears_are_summed_over_dp_alone() {
    let topology = topology(4, 2, 2, 1);
    let world = mock(topology);
    let sums = ranks(&world, topology, |mesh| {
        let device = Default::default();
        let mut linear: ReplicatedLinear<Ad, Tp> = LinearConfig::new("o_proj", D, D)
            .init(mesh.tp(), |_, _, _| 0.0, &device)
            .unwrap();
        let config = LoraConfig::new(RANK, 8.0);
        linear.adapt("o_proj", &config, &device).unwrap();
        let weights = linear.trained_weights();
        let mut grads = GradientsParams::new();
        for weight in &weights {
            fill(&mut grads, weight, 10f64.powi(mesh.rank() as i32));
        }
        let grads = sync_gradients(&weights, grads, &mesh);
        uniform(&weights[0], &grads)
    });
    assert_eq!(sums, [101.0, 1010.0, 101.0, 1010.0]);
    for rank in 0..4 {
        assert!(
            world
                .calls(rank)
                .iter()
                .all(|call| call.group == GroupName::Dp)
        );
    }
}

// ---- start values ------------------------------------------------------------------------------

/// The full factors of every rank's adapter: `[A, B]`, by expert.
fn start(
    topology: Topology,
    config: LoraConfig,
    seed: impl Fn(usize) -> u64 + Sync,
) -> [Vec<Matrix>; 2] {
    let found = ranks(&mock(topology), topology, |mesh| {
        // burn's own generator is seeded differently on every rank; nothing may depend on it.
        Ad::seed(&Default::default(), 1000 + mesh.rank() as u64);
        let config = config.with_seed(seed(mesh.rank()));
        let linear = expert_linear(&mesh, &config);
        let weights = linear.trained_weights();
        [factors(weights[0].weight), factors(weights[1].weight)]
    });
    [(0, Axis::Columns), (1, Axis::Rows(1))].map(|(k, axis)| {
        let parts: Vec<Vec<Matrix>> = found.iter().map(|f| f[k].clone()).collect();
        unshard_experts(&parts, &topology, axis)
    })
}

fn random(sharing: Sharing) -> LoraConfig {
    LoraConfig::new(RANK, 8.0)
        .with_sharing(sharing)
        .with_init_a(Init::Normal { std: 0.5 })
        .with_init_b(Init::Xavier)
}

#[test]
fn a_shared_factor_starts_equal_on_every_expert_parallel_rank() {
    for (world, ep, etp) in [(1, 1, 1), (2, 2, 1), (4, 4, 1), (4, 2, 2), (4, 2, 1)] {
        let topology = topology(world, 1, ep, etp);
        for sharing in [Sharing::Shared, Sharing::SharedOuter] {
            let shared = shared_pair(&random(sharing), true);
            for (factor, shared) in start(topology, random(sharing), |_| 7).iter().zip(shared) {
                assert!(factor[0].magnitude() > 0.0);
                if !shared {
                    assert_eq!(factor.len(), 4);
                    assert_far("of other experts", &factor[1], &factor[0]);
                    continue;
                }
                assert_eq!(factor.len(), ep);
                let mismatches = factor.iter().flat_map(|other| {
                    let pairs = other.values.iter().zip(&factor[0].values);
                    pairs.filter(|(a, b)| a.to_bits() != b.to_bits())
                });
                assert_eq!(mismatches.count(), 0, "{sharing:?} ep={ep} etp={etp}");
            }
        }
    }
    // Negative control: seeds that differ by rank are seen.
    let [a, _] = start(topology(2, 1, 2, 1), random(Sharing::Shared), |rank| {
        rank as u64
    });
    assert_far("another seed", &a[1], &a[0]);
}

#[test]
fn start_values_of_experts_are_the_same_bits_at_every_ep_and_etp() {
    for init in [Init::Kaiming, Init::Xavier, Init::Normal { std: 0.02 }] {
        for sharing in SHARING {
            let config = random(sharing).with_init_a(init).with_init_b(init);
            let mut alone = start(topology(1, 1, 1, 1), config, |_| 7);
            for (world, ep, etp) in [(2, 2, 1), (4, 4, 1), (2, 1, 2), (4, 1, 4), (4, 2, 2)] {
                let mut found = start(topology(world, 1, ep, etp), config, |_| 7);
                let shared = shared_pair(&config, true);
                for ((found, alone), shared) in found.iter_mut().zip(&mut alone).zip(shared) {
                    if shared {
                        found.truncate(1);
                    }
                    assert_eq!(found, alone, "{init:?} {sharing:?} ep={ep} etp={etp}");
                }
            }
            if sharing == Sharing::PerExpert {
                // Negative control: keyed by the local expert, rank 1 would start as rank 0.
                assert_far("expert 2 as expert 0", &alone[0][2], &alone[0][0]);
            }
        }
    }
}

// ---- a whole step ------------------------------------------------------------------------------

const HIDDEN: usize = 8;
const TOKENS: usize = 8;

/// A layer of four experts whose adapters start from the config's own values.
fn layer(mesh: &Mesh<Ad>, config: &LoraConfig) -> MoeLayer<Ad> {
    let case = MlpCase::new([HIDDEN, D, 4], GateUpTargets::Fused, *config);
    let (experts, router) = (case.oracle(2), noise(1, 4, HIDDEN).to_f32());
    let (values, device) = (MlpValues::of(&experts), Default::default());
    let weights = MoeWeights {
        router: &router,
        experts: values.weights(),
        ..Default::default()
    };
    let mut layer = MoeConfig::new("moe", HIDDEN, D, 4, 2)
        .with_dtype(config.dtype)
        .init(weights, mesh, &device)
        .unwrap();
    let targets = GateUpTargets::Fused.targets();
    layer.add_adapters(&targets, config, &device).unwrap();
    layer
}

/// Each rank's local loss `factor * <y, G>` of its own tokens and the synchronised gradients of
/// the first factor.
fn step(
    topology: Topology,
    config: LoraConfig,
    dealt: &[usize],
    factor: impl Fn(usize) -> f64 + Sync,
) -> (Vec<f64>, Matrix) {
    let (x, g) = (noise(3, TOKENS, HIDDEN), noise(4, TOKENS, HIDDEN));
    let found = ranks(&mock(topology), topology, |mesh| {
        let layer = layer(&mesh, &config);
        let own = range_of(dealt, mesh.rank());
        let x = x.pick_rows(own.clone()).tensor::<Ad>(config.dtype);
        let y = layer.forward(x.require_grad(), &mesh);
        let loss = (y * g.pick_rows(own).tensor(config.dtype)).sum() * factor(mesh.rank());
        let value: f64 = loss.clone().into_data().iter::<f64>().next().unwrap();
        let grads = GradientsParams::from_grads(loss.backward(), &layer);
        let weights = layer.trained_weights();
        let grads = sync_gradients(&weights, grads, &mesh);
        (value, synced_gradient(weights[0].weight, &grads))
    });
    let (losses, grads): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    let full = unshard_experts(&grads, &topology, Axis::Rows(1));
    (losses, Matrix::stack(&full))
}

fn step_config() -> LoraConfig {
    random(Sharing::PerExpert).with_dtype(DType::F64)
}

#[test]
fn parameters_losses_and_gradients_do_not_depend_on_ep() {
    let (losses, grads) = step(topology(1, 1, 1, 1), step_config(), &[TOKENS], |_| 1.0);
    for (ep, dealt) in [(2, vec![5, 3]), (4, vec![3, 0, 4, 1])] {
        let (found, found_grads) = step(topology(ep, 1, ep, 1), step_config(), &dealt, |_| 1.0);
        let loss = |losses: &[f64]| Matrix {
            rows: 1,
            columns: 1,
            values: vec![losses.iter().sum()],
        };
        assert_close("loss", &loss(&found), &loss(&losses), DType::F64, 200);
        assert_close("dA", &found_grads, &grads, DType::F64, 60);
    }
}

#[test]
fn mean_losses_are_scaled_by_the_whole_ep_and_expert_dp_world() {
    // EP = 4 over 8 ranks: 8 local means of one token each.
    let topology = topology(8, 1, 4, 1);
    assert_eq!((topology.ep(), topology.expert_dp()), (4, 2));
    assert_eq!(topology.expert_mean_factor(), 1.0 / 8.0);
    let dealt = [1; 8];
    let (_, summed) = step(topology, step_config(), &dealt, |_| 1.0);
    // The mean over the whole batch, on one device.
    let (_, mean) = step(
        TopologyConfig::new(1).init().unwrap(),
        step_config(),
        &[TOKENS],
        |_| 1.0 / TOKENS as f64,
    );
    let found = summed.scaled(topology.expert_mean_factor());
    assert_close("mean", &found, &mean, DType::F64, 60);
    // Negative control: expert-DP alone as the divisor.
    assert_far("divided by expert-DP", &summed.scaled(1.0 / 2.0), &mean);
}

#[test]
fn a_dense_linear_synchronised_over_dp_has_the_gradient_of_the_whole_batch() {
    let topology = topology(4, 2, 1, 1);
    let (weight, x, g) = (noise(1, D, D), noise(2, 6, D), noise(3, 6, D));
    let adapter = oracle::Lora {
        a: noise(4, RANK, D),
        b: noise(5, D, RANK),
        scale: 2.0,
        silu: false,
        first_row: 0,
        magnitude: None,
        start: None,
    };
    let oracle = oracle::Linear::new(weight.clone(), vec![adapter.clone()]);
    let expected = oracle.backward(&x, &g);
    // Four tokens on the first replica, two on the second.
    let dealt = [4, 2];
    let found = ranks(&mock(topology), topology, |mesh| {
        let device = Default::default();
        let mut linear: ReplicatedLinear<Ad, Tp> = LinearConfig::new("o_proj", D, D)
            .with_dtype(DType::F64)
            .init(
                mesh.tp(),
                |_, row, column| weight.at(row, column) as f32,
                &device,
            )
            .unwrap();
        let config = LoraConfig::new(RANK, 8.0).with_dtype(DType::F64);
        let lora = linear.adapt("o_proj", &config, &device).unwrap();
        let (a, b) = (adapter.a.to_f32(), adapter.b.to_f32());
        lora.load(&a, &b, &device).unwrap();
        let own = range_of(&dealt, mesh.dp().rank());
        let rows = RowGroups::whole(own.len());
        let input = mesh
            .tp()
            .replicated(x.pick_rows(own.clone()).tensor(DType::F64));
        let y = linear.forward(input, &rows).into_tensor();
        let loss = (y * g.pick_rows(own).tensor(DType::F64)).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &linear);
        let weights = linear.trained_weights();
        let own = synced_gradient(weights[0].weight, &grads).remove(0);
        let grads = sync_gradients(&weights, grads, &mesh);
        let synced = weights
            .iter()
            .map(|w| synced_gradient(w.weight, &grads).remove(0));
        (own, synced.collect::<Vec<_>>())
    });
    for (own, synced) in found {
        for (found, expected) in synced.iter().zip(&expected.factors[0]) {
            assert_close("dense", found, expected, DType::F64, 20);
        }
        assert_far("own tokens alone", &own, &expected.factors[0][0]);
    }
}

#[test]
fn inputs_gathered_over_ep_have_the_gradient_terms_of_every_rank() {
    // Each rank reads the rows of both and weighs their sum by 1 or 4.
    let topology = topology(2, 1, 2, 1);
    let gradients = |sliced: bool| {
        ranks(&mock(topology), topology, |mesh| {
            let x: Tensor<Ad, 2> = Tensor::ones([3, 2], &Default::default()).require_grad();
            let own = mesh.ep().shard_tokens(x.clone(), &[3, 3]);
            let all = match sliced {
                true => own.gather_from().into_tensor(),
                false => own.gather_fanout().into_tensor(),
            };
            let grads = (all.sum() * [1.0, 4.0][mesh.rank()]).backward();
            Matrix::read(x.grad(&grads).unwrap()).values
        })
    };
    assert_eq!(gradients(false), [[5.0; 6]; 2]);
    // Negative control: a slice keeps the rank's own term.
    assert_eq!(gradients(true), [[1.0; 6], [4.0; 6]]);
}
