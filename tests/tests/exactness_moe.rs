//! The MoE layer at every topology: output, input gradient and the gradients of every adapter equal
//! those of one device that walks token by token through experts with folded weights.
//!
//! Every rank brings its own tokens, unequal numbers of them and none on one rank. The loss is the
//! sum of the ranks' local losses `<y, G>`.

use std::collections::BTreeMap;

use burn::tensor::DType;
use moe_lora_adapters::{Adaptable, LoraConfig, Sharing, Targets};
use moe_lora_experts::{MoeConfig, MoeWeights, RouterScore, SharedConfig, WeighAt};
use moe_lora_parallel::{Call, CollectiveOp, GroupName, Mesh, MockWorld, range_of};
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Matrix, MlpValues, Mocked, assert_close, assert_far, mock, noise,
    oracle, ranks, unshard, unshard_experts,
};
use moe_lora_tests::moe::{
    Case, EXPERTS, HIDDEN, INTERMEDIATE, Place, RANK, REDUCTION, TOP_K, case, data, dense, grid,
    place, replicated, shared,
};

const PER_EXPERT: Sharing = Sharing::PerExpert;

const KINDS: [(Sharing, GateUpTargets); 6] = [
    (Sharing::PerExpert, GateUpTargets::Fused),
    (Sharing::PerExpert, GateUpTargets::Separate),
    (Sharing::SharedOuter, GateUpTargets::Fused),
    (Sharing::SharedOuter, GateUpTargets::Separate),
    (Sharing::Shared, GateUpTargets::Fused),
    (Sharing::Shared, GateUpTargets::Separate),
];
const SCORES: [oracle::Score; 3] = [
    oracle::Score::Softmax,
    oracle::Score::Renormalized,
    oracle::Score::TopKFirst,
];
const WEIGH_AT: [WeighAt; 2] = [WeighAt::Output, WeighAt::Hidden];

fn shared_kinds() -> [Option<SharedConfig>; 5] {
    [
        None,
        shared(false, false),
        shared(false, true),
        shared(true, false),
        shared(true, true),
    ]
}

// ---- exactness ---------------------------------------------------------------------------------

#[test]
fn every_adapter_kind_equals_the_dense_oracle_at_every_topology() {
    for place in grid().into_iter().chain(replicated()) {
        for (sharing, gate_up) in KINDS {
            for dtype in [DType::F32, DType::F64] {
                for weigh_at in WEIGH_AT {
                    let case = case(sharing, gate_up, dtype);
                    Case { weigh_at, ..case }.check::<Ad>(&Mocked, &place);
                }
            }
        }
    }
}

#[test]
fn every_router_score_is_exact_through_the_router_too() {
    for place in grid() {
        for score in SCORES {
            for weigh_at in WEIGH_AT {
                let case = case(PER_EXPERT, GateUpTargets::Fused, DType::F64);
                Case {
                    score,
                    weigh_at,
                    ..case
                }
                .check::<Ad>(&Mocked, &place);
            }
        }
    }
}

#[test]
fn shared_experts_are_exact_gated_or_not_and_overlapped_or_not() {
    for place in grid() {
        for shared in shared_kinds() {
            let case = case(PER_EXPERT, GateUpTargets::Separate, DType::F64);
            Case { shared, ..case }.check::<Ad>(&Mocked, &place);
        }
    }
}

#[test]
fn shared_experts_are_exact_over_a_dense_group_of_another_size_than_the_experts_own() {
    for place in dense() {
        for shared in shared_kinds() {
            for (sharing, dtype) in [(PER_EXPERT, DType::F64), (Sharing::Shared, DType::F32)] {
                let case = case(sharing, GateUpTargets::Fused, dtype);
                Case { shared, ..case }.check::<Ad>(&Mocked, &place);
            }
        }
    }
}

#[test]
fn ep_2_with_etp_2_and_tokens_routed_across_equals_one_device() {
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    let case = case(PER_EXPERT, GateUpTargets::Fused, DType::F32);
    // Both ranks of experts hold some that the other one's tokens chose.
    let moe = case.oracle();
    let (x, _) = data(9);
    let crossing = |tokens: std::ops::Range<usize>, experts: std::ops::Range<usize>| {
        let chosen = tokens.flat_map(|t| moe.route(&x.pick_rows([t])));
        chosen.filter(|(e, _)| experts.contains(e)).count()
    };
    assert!(crossing(0..3, 2..4) > 0 && crossing(3..9, 0..2) > 0);
    for (sharing, gate_up) in KINDS {
        for score in SCORES {
            for weigh_at in WEIGH_AT {
                for shared in [None, shared(true, true)] {
                    let case = Case {
                        gate_up,
                        config: case.config.with_sharing(sharing),
                        score,
                        weigh_at,
                        shared,
                        ..case
                    };
                    case.check::<Ad>(&Mocked, &place);
                }
            }
        }
    }
}

#[test]
fn gradients_of_experts_are_whole_before_synchronisation_where_experts_have_no_replicas() {
    for place in grid() {
        let case = case(PER_EXPERT, GateUpTargets::Fused, DType::F32);
        for found in case.found::<Ad>(&Mocked, &case.oracle(), &place) {
            assert_eq!(found.own, found.synced);
        }
    }
    // With replicas each holds a term alone.
    for place in replicated() {
        let case = case(PER_EXPERT, GateUpTargets::Fused, DType::F64);
        let found = case.found::<Ad>(&Mocked, &case.oracle(), &place);
        let (own, synced) = (
            Matrix::stack(&found[0].own[0]),
            Matrix::stack(&found[0].synced[0]),
        );
        assert_far("own term of dA", &own, &synced);
    }
}

#[test]
fn no_tokens_anywhere_and_one_token_alone_are_exact() {
    for Place { topology, dealt } in grid() {
        for tokens in [0, 1] {
            let mut alone = vec![0; dealt.len()];
            *alone.last_mut().unwrap() = tokens;
            let place = Place {
                topology,
                dealt: alone,
            };
            for (sharing, gate_up) in KINDS {
                case(sharing, gate_up, DType::F64).check::<Ad>(&Mocked, &place);
            }
            let case = case(PER_EXPERT, GateUpTargets::Fused, DType::F64);
            Case {
                shared: shared(true, true),
                weigh_at: WeighAt::Hidden,
                ..case
            }
            .check::<Ad>(&Mocked, &place);
        }
    }
}

#[test]
fn wrong_weights_a_frozen_router_path_and_exchanged_experts_are_seen() {
    let case = case(PER_EXPERT, GateUpTargets::Fused, DType::F64);
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    let moe = case.oracle();
    let found = case.found::<Ad>(&Mocked, &moe, &place);
    let outcome = case.join(&found, &place.topology);

    let other = |score| oracle::Moe {
        score,
        ..moe.clone()
    };
    let (x, g) = data(9);
    assert_far(
        "not renormalised",
        &other(oracle::Score::Softmax).forward(&x),
        &outcome.y,
    );

    // dX through the experts alone, as if the routing weights were constants.
    let mut dx = Matrix::zeros(9, HIDDEN);
    for token in 0..9 {
        let (x, g) = (x.pick_rows([token]), g.pick_rows([token]));
        for (expert, weight) in moe.route(&x) {
            dx.add_to_rows(
                token,
                &moe.experts[expert].backward(&x, &g.scaled(weight)).dx,
            );
        }
    }
    assert_far("no gradient through the router", &dx, &outcome.dx);

    // The experts of the two expert parallel ranks exchanged.
    let mut exchanged = moe.clone();
    exchanged.experts.rotate_left(2);
    assert_far("experts exchanged", &exchanged.forward(&x), &outcome.y);

    // A down delta counted once a rank of ETP = 2.
    let mut doubled = moe.clone();
    for mlp in &mut doubled.experts {
        let mut lora = mlp.down.loras()[0].clone();
        lora.scale *= 2.0;
        mlp.down = oracle::Linear::new(mlp.down.weight().clone(), vec![lora]);
    }
    assert_far("delta twice", &doubled.forward(&x), &outcome.y);

    // Terms of ETP ranks exchanged within a factor.
    let swapped: Vec<Vec<Matrix>> = [1, 0, 3, 2].map(|r| found[r].synced[1].clone()).into();
    let db = unshard_experts(&swapped, &place.topology, Axis::Rows(2));
    assert_far(
        "shards of dB exchanged",
        &Matrix::stack(&db),
        &Matrix::stack(&outcome.experts[1]),
    );
}

// ---- families ----------------------------------------------------------------------------------

/// GPT-OSS: biases everywhere, clamped SwiGLU, top-k before softmax. The limit is low enough to
/// clamp values of this case on both sides.
fn gpt_oss(gate_up: GateUpTargets, dtype: DType) -> Case {
    Case {
        score: oracle::Score::TopKFirst,
        glu: oracle::Glu::Clamped {
            alpha: 1.702,
            limit: 2.0,
        },
        biased: true,
        ..case(PER_EXPERT, gate_up, dtype)
    }
}

/// DeepSeek-V3: sigmoid scores, one group of two, a corrected choice, scaled weights, an ungated
/// shared expert.
fn deepseek(gate_up: GateUpTargets, dtype: DType, renormalize: bool) -> Case {
    Case {
        score: oracle::Score::Sigmoid {
            groups: 2,
            best: 1,
            renormalize,
            scale: 2.5,
        },
        corrected: true,
        shared: shared(false, true),
        ..case(PER_EXPERT, gate_up, dtype)
    }
}

/// The experts that each of the tokens of the grid chooses.
fn choices(moe: &oracle::Moe) -> Vec<Vec<usize>> {
    let (x, _) = data(9);
    let chosen = |t| moe.route(&x.pick_rows([t])).into_iter().map(|(e, _)| e);
    (0..9).map(|t| chosen(t).collect()).collect()
}

#[test]
fn gpt_oss_blocks_equal_the_dense_oracle_at_every_topology() {
    let case = gpt_oss(GateUpTargets::Fused, DType::F32);
    // The case clamps gates above, and up projections above and below.
    let oracle::Glu::Clamped { limit, .. } = case.glu else {
        panic!("the family clamps")
    };
    let (moe, (x, _)) = (case.oracle(), data(9));
    let halves = moe.experts.iter().map(|mlp| mlp.halves(&x));
    let (gates, ups): (Vec<_>, Vec<_>) = halves.map(|[gate, up]| (gate, up)).unzip();
    let beyond = |parts: &[Matrix], of: fn(f64, f64) -> bool| {
        let values = parts.iter().flat_map(|part| &part.values);
        values.filter(|value| of(**value, limit)).count()
    };
    assert!(beyond(&gates, |v, limit| v > limit) > 9);
    assert!(beyond(&gates, |v, limit| v < -limit) > 9);
    assert!(beyond(&ups, |v, limit| v > limit) > 9);
    assert!(beyond(&ups, |v, limit| v < -limit) > 9);

    for place in grid().into_iter().chain(replicated()) {
        for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
            for dtype in [DType::F32, DType::F64] {
                gpt_oss(gate_up, dtype).check::<Ad>(&Mocked, &place);
            }
        }
    }
}

#[test]
fn deepseek_blocks_equal_the_dense_oracle_at_every_topology() {
    let moe = deepseek(GateUpTargets::Fused, DType::F32, true).oracle();
    let uncorrected = oracle::Moe {
        correction_bias: None,
        ..moe.clone()
    };
    assert_ne!(choices(&moe), choices(&uncorrected));
    let unlimited = oracle::Moe {
        score: oracle::Score::Sigmoid {
            groups: 1,
            best: 1,
            renormalize: true,
            scale: 2.5,
        },
        ..moe.clone()
    };
    assert_ne!(choices(&moe), choices(&unlimited));

    for place in grid().into_iter().chain(replicated()).chain(dense()) {
        for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
            for (dtype, renormalize) in [(DType::F32, true), (DType::F64, false)] {
                deepseek(gate_up, dtype, renormalize).check::<Ad>(&Mocked, &place);
            }
        }
    }
}

#[test]
fn an_expert_without_tokens_is_exact_in_either_family() {
    for base in [
        gpt_oss(GateUpTargets::Fused, DType::F64),
        deepseek(GateUpTargets::Fused, DType::F64, true),
    ] {
        // A bias that no token's scores outweigh takes every token away from the last expert.
        let mut moe = base.oracle();
        let bias = moe.router_bias.as_mut().or(moe.correction_bias.as_mut());
        bias.unwrap().values[EXPERTS - 1] = -64.0;
        assert!(choices(&moe).concat().iter().all(|e| *e != EXPERTS - 1));
        for place in grid() {
            let found = base.join(&base.found::<Ad>(&Mocked, &moe, &place), &place.topology);
            let expected = base.expected(&moe, 9);
            let close = |what: &str, found: &Matrix, expected: &Matrix| {
                let name = format!("{:?}: {what}", place.topology);
                assert_close(&name, found, expected, DType::F64, REDUCTION);
            };
            close("y", &found.y, &expected.y);
            close("dx", &found.dx, &expected.dx);
            for (found, expected) in found.experts.iter().zip(&expected.experts) {
                close("factors", &Matrix::stack(found), &Matrix::stack(expected));
                assert_eq!(found[EXPERTS - 1].magnitude(), 0.0);
            }
        }
    }
}

#[test]
fn a_bias_counted_on_every_rank_or_dropped_and_a_missing_clamp_are_seen() {
    let case = gpt_oss(GateUpTargets::Fused, DType::F64);
    let place = place(1, 1, 2, &[2, 7]);
    let moe = case.oracle();
    let outcome = case.join(&case.found::<Ad>(&Mocked, &moe, &place), &place.topology);
    let (x, g) = data(9);

    let with_down_bias = |times: f64| {
        let mut moe = moe.clone();
        for mlp in &mut moe.experts {
            let bias = mlp.down.bias().unwrap().scaled(times);
            mlp.down = mlp.down.clone().with_bias(bias);
        }
        moe.forward(&x)
    };
    assert_far("bias once a rank", &with_down_bias(2.0), &outcome.y);
    assert_far("no bias", &with_down_bias(0.0), &outcome.y);
    assert_far("bias over the ranks", &with_down_bias(0.5), &outcome.y);

    let mut swiglu = moe.clone();
    let mut unclamped = moe.clone();
    for (swiglu, unclamped) in swiglu.experts.iter_mut().zip(&mut unclamped.experts) {
        // A limit that nothing reaches, and up projections that are not moved by one.
        unclamped.glu = oracle::Glu::Clamped {
            alpha: 1.702,
            limit: 1e9,
        };
        swiglu.glu = oracle::Glu::Silu;
    }
    assert_far("no clamp", &unclamped.forward(&x), &outcome.y);
    assert_far(
        "dx without a clamp",
        &unclamped.backward(&x, &g).dx,
        &outcome.dx,
    );
    assert_far("plain SwiGLU", &swiglu.forward(&x), &outcome.y);

    let no_router_bias = oracle::Moe {
        router_bias: None,
        ..moe.clone()
    };
    assert_far("no router bias", &no_router_bias.forward(&x), &outcome.y);
}

#[test]
fn a_correction_that_leaks_into_the_weights_or_is_missing_is_seen() {
    let case = deepseek(GateUpTargets::Fused, DType::F64, true);
    let place = place(1, 2, 1, &[9, 0]);
    let moe = case.oracle();
    let outcome = case.join(&case.found::<Ad>(&Mocked, &moe, &place), &place.topology);
    let (x, _) = data(9);
    let uncorrected = oracle::Moe {
        correction_bias: None,
        ..moe.clone()
    };
    assert_far("no correction", &uncorrected.forward(&x), &outcome.y);

    // The right experts with corrected scores as their weights.
    let mut leaking = Matrix::zeros(9, HIDDEN);
    let correction = moe.correction_bias.clone().unwrap();
    for token in 0..9 {
        let x = x.pick_rows([token]);
        let chosen = moe.route(&x);
        let score = |e: usize| {
            let logit = x.times(&moe.router.transposed()).at(0, e);
            1.0 / (1.0 + (-logit).exp()) + correction.at(0, e)
        };
        let sum: f64 = chosen.iter().map(|(e, _)| score(*e)).sum();
        for (e, _) in chosen {
            let y = moe.experts[e].forward(&x);
            leaking.add_to_rows(token, &y.scaled(2.5 * score(e) / sum));
        }
        leaking.add_to_rows(token, &moe.shared.as_ref().unwrap().mlp.forward(&x));
    }
    assert_far("correction in the weights", &leaking, &outcome.y);
}

#[test]
fn routing_weights_before_a_biased_down_projection_are_refused() {
    let case = gpt_oss(GateUpTargets::Fused, DType::F32);
    let values = MlpValues::of(&case.oracle().experts);
    let weights = MoeWeights {
        router: &noise(1, EXPERTS, HIDDEN).to_f32(),
        experts: values.weights(),
        ..Default::default()
    };
    let config = MoeConfig::new("moe", HIDDEN, INTERMEDIATE, EXPERTS, TOP_K);
    let (mesh, device) = (Mesh::<Ad>::solo(), Default::default());
    let hidden = config.clone().with_weigh_at(WeighAt::Hidden);
    assert_eq!(
        hidden
            .init(weights, &mesh, &device)
            .unwrap_err()
            .to_string(),
        "moe: routing weights multiplied in before the down projection do not weigh its bias (choose WeighAt::Output)"
    );
    let mut short = weights;
    short.experts.biases.as_mut().unwrap().down = &[0.0];
    assert_eq!(
        config.init(short, &mesh, &device).unwrap_err().to_string(),
        "moe.experts.down_proj.bias: 1 values do not fill shape [4, 8] (pass the full, unsharded tensor)"
    );
}

// ---- cases from reports ------------------------------------------------------------------------

#[test]
fn the_down_delta_joins_the_row_of_its_own_token() {
    // Tokens choose experts 1, 0, 1; the adapter is on the down projection alone.
    const H: usize = 4;
    let router = Matrix::build(2, H, |e, j| f64::from(u8::from(e == j)) * 4.0);
    let mut x = noise(1, 3, H);
    for (token, expert) in [1, 0, 1].into_iter().enumerate() {
        x.values[token * H + expert] = 1.0;
        x.values[token * H + 1 - expert] = -1.0;
    }
    let expert = |seed: u64, adapted: bool| {
        let lora = oracle::Lora {
            a: noise(seed + 1, 2, H),
            b: noise(seed + 2, H, 2),
            scale: 2.0,
            silu: false,
            first_row: 0,
            magnitude: None,
            start: None,
        };
        let loras = if adapted { vec![lora] } else { Vec::new() };
        oracle::Mlp {
            gate_up: oracle::Linear::new(noise(seed + 3, 2 * H, H), Vec::new()),
            down: oracle::Linear::new(noise(seed + 4, H, H), loras),
            glu: oracle::Glu::Silu,
        }
    };
    let moe = |adapted| {
        let experts = vec![expert(10, adapted), expert(20, adapted)];
        oracle::Moe::new(router.clone(), oracle::Score::TopKFirst, 1, experts)
    };
    let (adapted, base) = (moe(true), moe(false));
    let chosen: Vec<usize> = (0..3)
        .map(|t| adapted.route(&x.pick_rows([t]))[0].0)
        .collect();
    assert_eq!(chosen, [1, 0, 1]);
    let expected = adapted.forward(&x);

    for (ep, etp) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let dealt = match ep * etp {
            1 => vec![3],
            2 => vec![1, 2],
            _ => vec![1, 0, 0, 2],
        };
        let place = place(1, ep, etp, &dealt);
        let found = ranks(&mock(place.topology), place.topology, |mesh| {
            let (router, device) = (router.to_f32(), Default::default());
            let values = MlpValues::of(&adapted.experts);
            let weights = MoeWeights {
                router: &router,
                experts: values.weights(),
                ..Default::default()
            };
            let mut layer = MoeConfig::new("moe", H, H, 2, 1)
                .with_score(RouterScore::TopKThenSoftmax)
                .with_dtype(DType::F64)
                .init(weights, &mesh, &device)
                .unwrap();
            let config = LoraConfig::new(2, 4.0).with_dtype(DType::F64);
            let down = Targets::new(["down_proj"]);
            layer.add_adapters(&down, &config, &device).unwrap();
            assert!(layer.experts.gate_up.adapters.is_empty());
            let of = |of: fn(&oracle::Lora) -> &Matrix| -> Vec<f32> {
                let experts = adapted.experts.iter();
                experts
                    .flat_map(|e| of(&e.down.loras()[0]).to_f32())
                    .collect()
            };
            let lora = &mut layer.experts.down.adapters[0];
            lora.load(&of(|l| &l.a), &of(|l| &l.b), &device).unwrap();
            let own = range_of(&dealt, mesh.rank());
            Matrix::read(layer.forward(x.pick_rows(own).tensor(DType::F64), &mesh))
        });
        let y = unshard(&found, Axis::Tokens);
        let name = format!("[e1, e0, e1] at ep={ep} etp={etp}");
        assert_close(&name, &y, &expected, DType::F64, 20);

        // Negative control: deltas left in the order of experts, under a base in that of tokens.
        let base = base.forward(&x);
        let delta = expected.zip(&base, |y, base| y - base).pick_rows([1, 0, 2]);
        assert_far("deltas in expert order", &base.plus(&delta), &y);
    }
}

#[test]
fn a_zero_adapter_is_bit_identical_to_the_layer_without_one() {
    for place in grid() {
        for dtype in [DType::F32, DType::BF16] {
            for weigh_at in WEIGH_AT {
                for (sharing, gate_up) in KINDS {
                    let case = Case {
                        weigh_at,
                        shared: shared(true, false),
                        adapted: false,
                        ..case(sharing, gate_up, dtype)
                    };
                    let moe = case.oracle();
                    let pass = |adapted: bool| {
                        let topology = place.topology;
                        ranks(&mock(topology), topology, |mesh| {
                            let mut layer = case.layer(&moe, &mesh, &Default::default());
                            if adapted {
                                // A starts Kaiming, B at zero.
                                let targets = gate_up.targets();
                                let device = Default::default();
                                layer.add_adapters(&targets, &case.config, &device).unwrap();
                                assert!(!layer.trained_weights().is_empty());
                            }
                            let (y, dx, _) =
                                case.pass(&layer, &mesh, &Default::default(), &place.dealt, || ());
                            (y, dx)
                        })
                    };
                    let name = format!("{:?} {dtype:?} {weigh_at:?}", place.topology);
                    assert!(pass(true) == pass(false), "{name}");
                }
            }
        }
    }
}

#[test]
fn ep_without_etp_suppresses_the_sum_and_adapters_add_no_collectives_there() {
    let place = place(1, 2, 1, &[4, 3]);
    for (sharing, gate_up) in KINDS {
        for weigh_at in WEIGH_AT {
            let case = Case {
                weigh_at,
                ..case(sharing, gate_up, DType::F64)
            };
            case.check::<Ad>(&Mocked, &place);
            let bare = Case {
                adapted: false,
                ..case
            };
            let (with, without) = (calls(&case, &place), calls(&bare, &place));
            assert_eq!(with, without);
            assert!(
                with.iter().flat_map(Passes::both).all(|call| {
                    call.group == GroupName::Ep && call.op != CollectiveOp::AllReduce
                })
            );
        }
    }
}

// ---- collectives -------------------------------------------------------------------------------

/// What one rank called, in its forward and in its backward pass.
#[derive(Debug, PartialEq)]
struct Passes {
    forward: Vec<Call>,
    backward: Vec<Call>,
}

impl Passes {
    fn both(&self) -> impl Iterator<Item = &Call> {
        self.forward.iter().chain(&self.backward)
    }

    fn names(&self) -> [Vec<(GroupName, CollectiveOp)>; 2] {
        let names = |calls: &[Call]| calls.iter().map(|call| (call.group, call.op)).collect();
        [names(&self.forward), names(&self.backward)]
    }
}

fn calls(case: &Case, place: &Place) -> Vec<Passes> {
    let moe = case.oracle();
    let world: MockWorld = mock(place.topology);
    let middles = ranks(&world, place.topology, |mesh| {
        let layer = case.layer(&moe, &mesh, &Default::default());
        let mut middle = 0;
        case.pass(&layer, &mesh, &Default::default(), &place.dealt, || {
            middle = world.calls(mesh.rank()).len();
        });
        middle
    });
    middles
        .into_iter()
        .enumerate()
        .map(|(rank, middle)| {
            let mut forward = world.calls(rank);
            let backward = forward.split_off(middle);
            Passes { forward, backward }
        })
        .collect()
}

#[test]
fn one_rank_communicates_nothing() {
    for shared in shared_kinds() {
        let case = Case {
            shared,
            ..case(PER_EXPERT, GateUpTargets::Separate, DType::F32)
        };
        let calls = calls(&case, &place(1, 1, 1, &[9]));
        assert_eq!(calls[0].both().count(), 0);
    }
}

#[test]
fn ranks_without_tokens_issue_the_calls_of_the_rest_forward_and_backward() {
    let places = grid().into_iter().chain(replicated()).chain(dense());
    for Place { topology, dealt } in places {
        let mut reference = BTreeMap::new();
        for tokens in [dealt.clone(), vec![0; dealt.len()], {
            let mut one = vec![0; dealt.len()];
            one[0] = 1;
            one
        }] {
            let place = Place {
                topology,
                dealt: tokens,
            };
            for (k, shared) in [None, shared(true, false), shared(false, true)]
                .into_iter()
                .enumerate()
            {
                for weigh_at in WEIGH_AT {
                    let case = Case {
                        shared,
                        weigh_at,
                        ..case(PER_EXPERT, GateUpTargets::Fused, DType::F32)
                    };
                    let calls = calls(&case, &place);
                    let names = calls[0].names();
                    for (rank, calls) in calls.iter().enumerate() {
                        assert_eq!(calls.names(), names, "rank {rank} of {place:?} {case:?}");
                        for call in calls.both() {
                            let members = topology.members(call.group, rank).unwrap();
                            assert_eq!(call.members, members, "{call:?}");
                        }
                    }
                    // And the same for every number of tokens.
                    let key = (k, weigh_at == WeighAt::Hidden);
                    assert_eq!(
                        *reference.entry(key).or_insert_with(|| names.clone()),
                        names
                    );
                }
            }
        }
    }
}

#[test]
fn the_layer_issues_the_dispatcher_s_collectives_and_adapters_those_of_r_columns() {
    use CollectiveOp::{AllGather, AllReduce, AllToAll, ExchangeSizes, ReduceScatter};
    use GroupName::{Ep, ExpertTp};
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    let base = case(PER_EXPERT, GateUpTargets::Fused, DType::F32);
    let bare = calls(
        &Case {
            adapted: false,
            ..base
        },
        &place,
    );
    let [forward, backward] = bare[0].names();
    let dispatch = [
        (Ep, ExchangeSizes),
        (ExpertTp, ExchangeSizes),
        (Ep, AllToAll),
    ];
    assert_eq!(
        forward,
        [
            &dispatch[..],
            &[
                (ExpertTp, AllGather),
                (ExpertTp, ReduceScatter),
                (Ep, AllToAll)
            ],
        ]
        .concat()
    );
    assert_eq!(
        backward,
        [
            (Ep, AllToAll),
            (ExpertTp, AllGather),
            (ExpertTp, ReduceScatter),
            (Ep, AllToAll),
        ]
    );

    for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
        let adapters = match gate_up {
            GateUpTargets::Fused => 1,
            GateUpTargets::Separate => 2,
        };
        let with = calls(&Case { gate_up, ..base }, &place);
        for passes in &with {
            let [forward, backward] = passes.names();
            let gather = vec![(ExpertTp, AllGather); 1 + adapters];
            assert_eq!(
                forward,
                [
                    &dispatch[..],
                    &gather,
                    &[
                        (ExpertTp, AllReduce),
                        (ExpertTp, ReduceScatter),
                        (Ep, AllToAll),
                    ],
                ]
                .concat()
            );
            let mut sorted = backward.clone();
            sorted.sort();
            let mut expected = [
                vec![
                    (Ep, AllToAll),
                    (Ep, AllToAll),
                    (ExpertTp, AllGather),
                    (ExpertTp, AllReduce),
                ],
                vec![(ExpertTp, ReduceScatter); 1 + adapters],
            ]
            .concat();
            expected.sort();
            assert_eq!(sorted, expected);

            // The adapters' own: [T, r / P] to gather, [T, r] to sum, [T, r] to scatter.
            let columns = |calls: &[Call], op| -> Vec<usize> {
                let calls = calls.iter().filter(|c| c.op == op && c.group == ExpertTp);
                let mut columns: Vec<_> = calls.map(|call| call.shape[1]).collect();
                columns.sort();
                columns
            };
            let narrow = |column: usize| [vec![column; adapters], vec![HIDDEN]].concat();
            assert_eq!(columns(&passes.forward, AllGather), narrow(RANK / 2));
            assert_eq!(columns(&passes.forward, AllReduce), [RANK]);
            assert_eq!(columns(&passes.backward, AllReduce), [RANK]);
            assert_eq!(columns(&passes.backward, ReduceScatter), narrow(RANK));
        }
    }
}

#[test]
fn overlapped_shared_experts_frame_the_dispatcher_s_collectives() {
    let place = place(2, 2, 2, &[3, 0, 4, 2]);
    let order = |overlap| {
        let case = Case {
            shared: shared(true, overlap),
            ..case(PER_EXPERT, GateUpTargets::Fused, DType::F32)
        };
        let calls = calls(&case, &place);
        let at = |of: &dyn Fn(&Call) -> bool| calls[0].forward.iter().position(of).unwrap();
        let gather = at(&|c| c.group == GroupName::Tp && c.op == CollectiveOp::AllGather);
        let scatter = at(&|c| c.group == GroupName::Tp && c.op == CollectiveOp::ReduceScatter);
        let last = calls[0]
            .forward
            .iter()
            .rposition(|c| c.group == GroupName::Ep);
        let first = at(&|c| c.group == GroupName::Ep);
        (gather < first, scatter > last.unwrap())
    };
    assert_eq!(order(true), (true, true));
    assert_eq!(order(false), (false, true));
}

#[test]
fn expert_adapters_communicate_over_the_expert_group_where_the_dense_one_is_larger() {
    let place = place(4, 2, 2, &[3, 0, 4, 2]);
    let case = case(PER_EXPERT, GateUpTargets::Fused, DType::F32);
    for passes in calls(&case, &place) {
        for call in passes.both() {
            assert_ne!(call.group, GroupName::Tp);
            assert_eq!(call.members.len(), 2);
        }
    }
}
