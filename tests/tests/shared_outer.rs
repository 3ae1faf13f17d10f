//! Shared outer adapters of experts, `A` of fc1 and `B` of fc2 one matrix for all: training and merging
//! are those of one device at every topology. Outputs and gradients are compared with the oracle's where
//! those of the other kinds are.

use burn::backend::Flex;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{Adaptable, Dropout, Sharing, TokenIds, Weight, sync_gradients};
use moe_lora_experts::MoeLayer;
use moe_lora_parallel::{Mesh, range_of};
use moe_lora_testkit::{
    Ad, GateUpTargets, Matrix, Mocked, Ranks, assert_close, assert_far, factors, mock, ranks,
    unshard_experts,
};
use moe_lora_tests::moe::{self, Case, Place, REDUCTION, place};

/// Every EP and ETP over up to four ranks, replicas of the experts, and a larger dense group.
fn grid() -> Vec<Place> {
    vec![
        place(1, 1, 1, &[9]),
        place(1, 2, 1, &[9, 0]),
        place(1, 1, 2, &[2, 7]),
        place(1, 1, 1, &[5, 4]),
        place(1, 2, 2, &[3, 0, 4, 2]),
        place(1, 2, 1, &[3, 0, 4, 2]),
        place(1, 1, 4, &[0, 5, 1, 3]),
        place(1, 4, 1, &[4, 1, 4, 0]),
        place(1, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]),
        place(4, 2, 2, &[3, 0, 4, 2]),
    ]
}

fn case(gate_up: GateUpTargets, dtype: DType) -> Case {
    moe::case(Sharing::SharedOuter, gate_up, dtype)
}

// ---- training ----------------------------------------------------------------------------------

/// What is done to a rank's gradients before the optimizer.
type Sync = fn(&MoeLayer<Ad>, GradientsParams, &Mesh<Ad>) -> GradientsParams;

fn right(layer: &MoeLayer<Ad>, grads: GradientsParams, mesh: &Mesh<Ad>) -> GradientsParams {
    sync_gradients(&layer.trained_weights(), grads, mesh)
}

/// The factors after three steps, full, by factor and expert; a shared one as often as there are ranks
/// of its experts.
fn three_steps(case: &Case, place: &Place, sync: Sync) -> Vec<Vec<Matrix>> {
    let (x, g) = moe::data(place.dealt.iter().sum());
    let moe = case.oracle();
    let found = Ranks::<Ad>::run(&Mocked, place.topology, |mesh, device| {
        let mut layer = case.layer(&moe, mesh, device);
        let mut sgd = SgdConfig::new().init();
        let own = range_of(&place.dealt, mesh.rank());
        let ids = own.start as u64..own.end as u64;
        let (x, g) = (x.pick_rows(own.clone()), g.pick_rows(own));
        for step in 0..3 {
            let x: Tensor<Ad, 2> = x.tensor(case.config.dtype);
            let y = layer.forward_tokens(x, &TokenIds::new(step, ids.clone()), mesh);
            let loss = (y * g.tensor(case.config.dtype)).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &layer);
            let grads = sync(&layer, grads, mesh);
            layer = sgd.step(1e-3, layer, grads);
            // burn takes the lock of every graph at the end of a backward pass.
            assert!(mesh.all(true));
        }
        let weights = layer.trained_weights().into_iter();
        weights.map(|w| factors(w.weight)).collect::<Vec<_>>()
    });
    let axes = case.experts().axes().into_iter().enumerate();
    axes.map(|(k, axis)| {
        let parts: Vec<_> = found.iter().map(|found| found[k].clone()).collect();
        unshard_experts(&parts, &place.topology, axis)
    })
    .collect()
}

#[test]
fn three_steps_end_with_the_same_factors_and_equal_copies_at_every_topology() {
    for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
        for dropout in [Dropout::before_a(0.4), Dropout::after_b(0.4)] {
            let case = case(gate_up, DType::F32);
            let case = Case {
                config: case.config.with_dropout(dropout),
                ..case
            };
            let shared = case.experts().shared();
            let grid = grid();
            let one = three_steps(&case, &grid[0], right);
            for place in &grid[1..] {
                let mut found = three_steps(&case, place, right);
                for ((found, one), shared) in found.iter_mut().zip(&one).zip(&shared) {
                    if *shared {
                        assert_eq!(found.len(), place.topology.ep());
                        assert!(found.iter().all(|copy| *copy == found[0]), "{place:?}");
                        found.truncate(1);
                    }
                    let (found, one) = (Matrix::stack(found), Matrix::stack(one));
                    assert_close("factor", &found, &one, DType::F32, REDUCTION);
                }
            }
        }
    }
}

/// The gradients of the shared factors times `factor`, over their synchronised ones.
fn scaled(
    layer: &MoeLayer<Ad>,
    grads: GradientsParams,
    mesh: &Mesh<Ad>,
    factor: f64,
) -> GradientsParams {
    let weights = layer.trained_weights();
    let mut grads = sync_gradients(&weights, grads, mesh);
    for trained in weights.iter().filter(|trained| trained.shared_by_experts) {
        let Weight::One(param) = trained.weight else {
            panic!("a shared factor is one matrix")
        };
        let grad: Tensor<Flex, 2> = grads.remove(param.id).unwrap();
        grads.register(param.id, grad.mul_scalar(factor));
    }
    grads
}

#[test]
fn a_mean_over_ep_a_second_sum_over_etp_and_no_sum_at_all_train_other_factors() {
    let case = case(GateUpTargets::Fused, DType::F64);
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    let one = three_steps(&case, &grid()[0], right);
    let wrong: [(&str, Sync); 3] = [
        ("mean over EP", |layer, grads, mesh| {
            scaled(layer, grads, mesh, 1.0 / mesh.ep().size() as f64)
        }),
        ("sum over ETP", |layer, grads, mesh| {
            scaled(layer, grads, mesh, mesh.expert_tp().size() as f64)
        }),
        ("none", |_, grads, _| grads),
    ];
    for (name, sync) in wrong {
        let found = three_steps(&case, &place, sync);
        for (k, shared) in case.experts().shared().into_iter().enumerate() {
            if shared {
                assert_far(name, &found[k][0], &one[k][0]);
            }
        }
    }
    // Without a sum the copies of a factor part.
    let apart = three_steps(&case, &place, |_, grads, _| grads);
    assert_far("copies", &apart[0][1], &apart[0][0]);
}

#[test]
fn the_mean_over_tokens_divides_the_shared_factor_by_the_tokens_of_all_ranks_too() {
    // EP = 4 and two replicas: each rank's local mean over its one token, divided by 8 ranks.
    let case = case(GateUpTargets::Fused, DType::F64);
    let moe = case.oracle();
    let place = place(1, 4, 1, &[1; 8]);
    let topology = place.topology;
    assert_eq!((topology.ep(), topology.expert_dp()), (4, 2));
    let synced = case.found::<Ad>(&Mocked, &moe, &place);
    let found = case.join(&synced, &topology);
    let expected = case.expected(&moe, 8);
    for k in 0..4 {
        let mean = |sum: &Matrix| sum.scaled(1.0 / 8.0);
        let found = found.experts[k][0].scaled(topology.expert_mean_factor());
        let expected = mean(&expected.experts[k][0]);
        assert_close("mean", &found, &expected, DType::F64, REDUCTION);
        // Negative control: expert-DP alone as the divisor.
        assert_far("expert-DP", &found.scaled(4.0), &expected);
    }
}

// ---- merge -------------------------------------------------------------------------------------

/// The merged full weights of fc1 and fc2, after checks that merging changes no output and unmerging
/// no bit.
fn merged(case: &Case, place: &Place) -> Vec<Vec<u64>> {
    let moe = case.oracle();
    let found = ranks(&mock(place.topology), place.topology, |mesh| {
        let mut layer = case.layer(&moe, &mesh, &Default::default());
        let own = range_of(&place.dealt, mesh.rank());
        let x = moe::data(9).0.pick_rows(own);
        let output = |layer: &MoeLayer<Ad>| {
            Matrix::read(layer.forward(x.tensor::<Ad>(case.config.dtype), &mesh))
        };
        let before = output(&layer);
        let original = layer.merge(&mesh).unwrap();
        assert_close("merged", &output(&layer), &before, DType::F32, REDUCTION);
        let (group, ep) = (mesh.expert_tp(), mesh.ep());
        let bits = |full: Tensor<Ad, 3>| -> Vec<u64> {
            let values = full.into_data();
            values.iter::<f64>().map(f64::to_bits).collect()
        };
        let experts = &layer.experts;
        let weights = [
            bits(experts.gate_up.weight.gather_all(group, ep)),
            bits(experts.down.weight.gather_all(group, ep)),
        ];
        layer.unmerge(original);
        assert_eq!(output(&layer), before);
        weights.to_vec()
    });
    found.into_iter().next().unwrap()
}

#[test]
fn merged_weights_fold_the_shared_factor_into_each_expert_with_the_same_bits_at_every_topology() {
    for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
        for dora in [false, true] {
            let case = case(gate_up, DType::F32);
            let case = Case {
                config: case.config.with_dora(dora),
                ..case
            };
            let one = merged(&case, &grid()[0]);
            for place in &grid()[1..] {
                assert_eq!(
                    merged(&case, place),
                    one,
                    "{gate_up:?} dora={dora} {place:?}"
                );
            }
            let folded = case.oracle().experts;
            let fc2: Vec<f64> = one[1].iter().map(|bits| f64::from_bits(*bits)).collect();
            for (expert, found) in folded
                .iter()
                .zip(fc2.chunks(moe::HIDDEN * moe::INTERMEDIATE))
            {
                let found = Matrix {
                    rows: moe::HIDDEN,
                    columns: moe::INTERMEDIATE,
                    values: found.to_vec(),
                };
                assert_close("fc2", &found, expert.down.folded(), DType::F32, REDUCTION);
            }
        }
    }
}
