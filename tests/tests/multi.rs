//! Several named adapters in one layer: at every topology output and all gradients equal those of one
//! device that gives each token the adapter of its slot.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Adaptable, Column, Dropout, Linear, LinearConfig, LoraConfig, Placement, ReplicatedLinear, Row,
    Sharing, Slot, TokenIds, Whole,
};
use moe_lora_experts::{SlotOrder, WeighAt};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{Call, CollectiveOp, Group, Mesh, MockWorld, Tp, range_of};
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Matrix, Mocked, Ranks, assert_close, assert_far, gradient, mock,
    noise, oracle, ranks, shard, unshard,
};
use moe_lora_tests::dense::{self, COLUMN_AXES, Sum, row_axes, tp};
use moe_lora_tests::moe::{self, Place, place, shared};
use moe_lora_tests::multi::{Case, Results, case};

fn grid() -> Vec<Place> {
    vec![
        place(1, 1, 1, &[9]),
        place(1, 2, 1, &[9, 0]),
        place(1, 1, 2, &[2, 7]),
        place(1, 2, 2, &[3, 0, 4, 2]),
        place(1, 1, 4, &[0, 5, 1, 3]),
        place(1, 4, 1, &[4, 1, 4, 0]),
        // Replicas of the experts, and dense groups of another size than the experts'.
        place(1, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]),
        place(2, 2, 1, &[3, 0, 4, 2]),
        place(2, 1, 4, &[3, 0, 4, 2]),
        place(4, 2, 2, &[3, 0, 4, 2]),
    ]
}

fn layer(sharing: Sharing, gate_up: GateUpTargets) -> Case {
    case(moe::case(sharing, gate_up, DType::F32))
}

#[test]
fn each_token_gets_the_adapter_of_its_slot_at_every_topology() {
    for place in grid() {
        for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
            for (weigh_at, shared) in [
                (WeighAt::Output, None),
                (WeighAt::Hidden, shared(true, false)),
                (WeighAt::Output, shared(false, true)),
            ] {
                let mut case = layer(Sharing::PerExpert, gate_up);
                case.layer.weigh_at = weigh_at;
                case.layer.shared = shared;
                case.check::<Ad>(&Mocked, &place);
            }
        }
    }
}

#[test]
fn adapters_that_experts_share_and_adapters_of_one_expert_each_serve_one_layer() {
    for place in grid() {
        let mut case = layer(Sharing::PerExpert, GateUpTargets::Fused);
        case.adapters[0].config.sharing = Sharing::Shared;
        case.check::<Ad>(&Mocked, &place);
    }
}

#[test]
fn adapters_of_gate_and_up_together_serve_beside_those_of_one_each() {
    for place in grid() {
        let mut case = layer(Sharing::PerExpert, GateUpTargets::Fused);
        case.adapters[2].gate_up = GateUpTargets::Separate;
        case.layer.shared = shared(true, true);
        case.check::<Ad>(&Mocked, &place);
    }
}

#[test]
fn tokens_of_adapters_with_dora_have_their_own_lengths_of_rows_and_others_none() {
    for place in grid() {
        for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
            let mut case = layer(Sharing::PerExpert, gate_up);
            case.layer.shared = shared(true, true);
            for k in [0, 1] {
                case.adapters[k].config.dora = true;
            }
            case.check::<Ad>(&Mocked, &place);
        }
    }
}

#[test]
fn tokens_drop_with_the_mask_that_they_have_without_other_adapters() {
    for place in [place(1, 1, 1, &[9]), place(1, 2, 2, &[3, 0, 4, 2])] {
        for dropout in [Dropout::before_a(0.4), Dropout::after_b(0.4)] {
            let mut case = layer(Sharing::PerExpert, GateUpTargets::Fused);
            let drop = |config: LoraConfig| config.with_dropout(dropout).with_seed(11);
            case.layer.shared = shared(true, true);
            for adapter in &mut case.adapters {
                adapter.config = drop(adapter.config);
            }
            case.check::<Ad>(&Mocked, &place);
        }
    }
}

#[test]
fn an_adapter_without_tokens_has_gradients_of_exact_zeros() {
    for place in grid() {
        let case = layer(Sharing::PerExpert, GateUpTargets::Fused);
        let found = case.found::<Ad>(&Mocked, &place);
        for factor in found.adapters[1].experts.iter().flatten() {
            assert_eq!(*factor, Matrix::zeros(factor.rows, factor.columns));
        }
        let trained = |k: usize| found.adapters[k].experts.iter().flatten();
        assert!(
            [0, 2]
                .iter()
                .all(|k| trained(*k).any(|f| f.magnitude() > 0.1))
        );
    }
}

// ---- dense linears -----------------------------------------------------------------------------

const SLOTS: [Option<usize>; dense::TOKENS] = [Some(1), None, Some(0), Some(1), None, Some(0)];
const DENSE: [(&str, usize, f64); 3] = [("fr", 8, 5.3), ("de", 4, 2.9), ("idle", 12, 7.1)];

/// The linear of each adapter, and of none.
fn dense_oracle(adapter: Option<usize>) -> oracle::Linear {
    let lora = adapter.map(|k| {
        let (_, rank, alpha) = DENSE[k];
        oracle::Lora {
            a: noise(20 + k as u64, rank, dense::D_IN),
            b: noise(30 + k as u64, dense::D_OUT, rank),
            scale: alpha / rank as f64,
            silu: false,
            first_row: 0,
            magnitude: None,
        }
    });
    let weight = noise(5, dense::D_OUT, dense::D_IN);
    oracle::Linear::new(weight, Vec::from_iter(lora)).with_bias(noise(6, 1, dense::D_OUT))
}

/// A rank's part of it.
fn dense_linear<P: Placement>(mesh: &Mesh<Ad>) -> Linear<Ad, Tp, P> {
    let (device, base) = (Default::default(), dense_oracle(None));
    let mut linear: Linear<Ad, Tp, P> = LinearConfig::new("fc", dense::D_IN, dense::D_OUT)
        .init(
            mesh.tp(),
            |_, row, column| base.weight().at(row, column) as f32,
            &device,
        )
        .and_then(|linear| {
            linear.with_bias(|_, row| base.bias().unwrap().at(0, row) as f32, &device)
        })
        .unwrap();
    for (k, (name, rank, alpha)) in DENSE.into_iter().enumerate() {
        let config = LoraConfig::new(rank, alpha);
        let lora = linear.adapt_named("fc", name, &config, &device).unwrap();
        let oracle = dense_oracle(Some(k));
        let oracle::Lora { a, b, .. } = &oracle.loras()[0];
        lora.load(&a.to_f32(), &b.to_f32(), &device).unwrap();
    }
    linear
}

fn dense_order<B: Backend>(adapters: &impl Adaptable<B>) -> SlotOrder {
    let slots =
        SLOTS.map(|adapter| adapter.map_or(Slot::BASE, |k| adapters.slot(DENSE[k].0).unwrap()));
    SlotOrder::of(Some(&TokenIds::new(0, 0..6).with_slots(slots)))
}

/// Output, input gradient and the factors' gradients of each adapter.
type Dense = (Matrix, Matrix, Vec<Vec<Matrix>>);

fn dense_pass<P: Placement>(
    linear: &Linear<Ad, Tp, P>,
    x: &Matrix,
    g: &Matrix,
    run: impl Fn(Tensor<Ad, 2>, &RowGroups) -> Tensor<Ad, 2>,
) -> Dense {
    let order = dense_order(linear);
    let rows = RowGroups::whole(dense::TOKENS).with_tokens(order.tokens().unwrap().clone());
    let x: Tensor<Ad, 2> = x.tensor(DType::F32).require_grad();
    let y = order.restore(run(order.sort(x.clone()), &rows));
    let grads = (y.clone() * g.tensor(DType::F32)).sum().backward();
    let weights = linear.trained_weights();
    let of_adapter = |(name, ..): (&str, usize, f64)| {
        let own = weights.iter().filter(|w| w.adapter == Some(name));
        own.map(|w| gradient(w.weight, &grads).remove(0)).collect()
    };
    let factors = DENSE.map(of_adapter);
    (
        Matrix::read(y),
        Matrix::read(x.grad(&grads).unwrap()),
        factors.into(),
    )
}

fn check_dense(name: &str, found: &[Dense], [y_axis, dx_axis, a_axis, b_axis]: [Axis; 4]) {
    let (x, g) = (
        noise(1, dense::TOKENS, dense::D_IN),
        noise(2, dense::TOKENS, dense::D_OUT),
    );
    let join = |of: &dyn Fn(&Dense) -> Matrix, axis| {
        unshard(&found.iter().map(of).collect::<Vec<_>>(), axis)
    };
    let close = |what: &str, found: &Matrix, expected: &Matrix| {
        let name = format!("{name} tp: {what}");
        assert_close(&name, found, expected, DType::F32, 60);
    };
    let (y, dx) = (
        join(&|f| f.0.clone(), y_axis),
        join(&|f| f.1.clone(), dx_axis),
    );
    for (token, adapter) in SLOTS.into_iter().enumerate() {
        let linear = dense_oracle(adapter);
        let (x, g) = (x.pick_rows([token]), g.pick_rows([token]));
        close("y", &y.pick_rows([token]), &linear.forward(&x));
        close("dx", &dx.pick_rows([token]), &linear.backward(&x, &g).dx);
    }
    for (k, (adapter, ..)) in DENSE.into_iter().enumerate() {
        let own = (0..dense::TOKENS).filter(|token| SLOTS[*token] == Some(k));
        let (x, g) = (x.pick_rows(own.clone()), g.pick_rows(own));
        let expected = &dense_oracle(Some(k)).backward(&x, &g).factors[0];
        for (f, axis) in [a_axis, b_axis].into_iter().enumerate() {
            let found = join(&|found| found.2[k][f].clone(), axis);
            close(&format!("factor {f} of {adapter}"), &found, &expected[f]);
        }
    }
}

#[test]
fn rows_of_dense_linears_get_the_adapter_of_their_slot_in_every_placement() {
    let x = noise(1, dense::TOKENS, dense::D_IN);
    let g = noise(2, dense::TOKENS, dense::D_OUT);
    for size in [1, 2, 4] {
        let found = Mocked.run(tp(size), |mesh: &Mesh<Ad>, _| {
            let (group, linear) = (mesh.tp(), dense_linear::<Column>(mesh));
            let g = shard(&g, Axis::Columns, group.rank(), size);
            dense_pass(&linear, &x, &g, |x, rows| {
                let x = group.replicated(x).copy_to();
                linear.forward(x, rows).into_tensor()
            })
        });
        check_dense("column", &found, COLUMN_AXES);
        for sum in [Sum::Here, Sum::ByTheCaller] {
            let found = Mocked.run(tp(size), |mesh: &Mesh<Ad>, _| {
                let (group, linear) = (mesh.tp(), dense_linear::<Row>(mesh));
                let x = shard(&x, Axis::Columns, group.rank(), size);
                dense_pass(&linear, &x, &g, |x, rows| match sum {
                    Sum::Here => linear.forward(group.shard(x), rows).into_tensor(),
                    _ => {
                        let term = linear.forward_suppressed(group.shard(x), rows);
                        term.reduce_from().into_tensor()
                    }
                })
            });
            check_dense(&format!("row {sum:?}"), &found, row_axes(sum));
        }
        let found = Mocked.run(tp(size), |mesh: &Mesh<Ad>, _| {
            let (group, linear) = (mesh.tp(), dense_linear::<Whole>(mesh));
            dense_pass(&linear, &x, &g, |x, rows| {
                linear.forward(group.replicated(x), rows).into_tensor()
            })
        });
        check_dense("replicated", &found, [Axis::Whole; 4]);
    }
}

#[test]
fn shared_experts_serve_slots_in_every_way_of_summing() {
    for place in [place(2, 2, 1, &[3, 0, 4, 2]), place(4, 2, 2, &[3, 0, 4, 2])] {
        for gated in [false, true] {
            for overlap in [false, true] {
                let mut case = layer(Sharing::PerExpert, GateUpTargets::Separate);
                case.layer.shared = shared(gated, overlap);
                case.check::<Ad>(&Mocked, &place);
            }
        }
    }
}

// ---- wrong algebra -----------------------------------------------------------------------------

/// What the ranks make of the case when something is wrong with each one's tokens.
fn with_tokens(
    case: &Case,
    place: &Place,
    wrong: impl Fn(&TokenIds) -> TokenIds + Sync,
) -> Results {
    let found = Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let layer = case.on_rank(mesh, device);
        let tokens = case.tokens(&layer, range_of(&place.dealt, mesh.rank()));
        case.rank(&layer, &wrong(&tokens), (mesh, device), &place.dealt)
    });
    case.join(&found, place)
}

#[test]
fn slots_that_stay_behind_while_tokens_move_are_seen() {
    let place = place(1, 2, 2, &[3, 1, 4, 2]);
    let case = layer(Sharing::PerExpert, GateUpTargets::Fused);
    let expected = case.expected(10);
    let right = with_tokens(&case, &place, TokenIds::clone);
    case.compare("in place", &right, &place);
    // Each token with the slot of the one before it: as if ids moved one row on from the tokens.
    let found = with_tokens(&case, &place, |tokens| {
        let mut slots = tokens.slots().unwrap().to_vec();
        slots.rotate_right(1);
        tokens.clone().with_slots(slots)
    });
    assert_far("y", &found.y, &expected.y);
    assert_far("dx", &found.dx, &expected.dx);
    let factors = [&found, &expected].map(|results| &results.adapters[0].experts[0][0]);
    assert_far("dA", factors[0], factors[1]);
}

#[test]
fn the_scale_of_another_adapter_is_seen() {
    let place = place(1, 1, 2, &[5, 5]);
    let case = layer(Sharing::PerExpert, GateUpTargets::Fused);
    let mut wrong = case.clone();
    wrong.adapters[0].config.alpha = 8.0 * case.adapters[2].config.scale();
    let (found, expected) = (wrong.found::<Ad>(&Mocked, &place), case.expected(10));
    assert_far("y", &found.y, &expected.y);
    let factors = [&found, &expected].map(|results| &results.adapters[0].experts[0][0]);
    assert_far("dA", factors[0], factors[1]);
}

#[test]
fn scales_of_32_over_24_are_applied_to_bf16_factors_in_f32() {
    let device = Default::default();
    let mut linear: ReplicatedLinear<Ad, Tp> = LinearConfig::new("fc", 24, 1)
        .with_dtype(DType::BF16)
        .init(&Group::solo(), |_, _, _| 0.0, &device)
        .unwrap();
    // Rank 24 with alpha 32, and another scale beside it.
    for (name, alpha) in [("thirds", 32.0), ("whole", 24.0)] {
        let config = LoraConfig::new(24, alpha).with_dtype(DType::BF16);
        let lora = linear.adapt_named("fc", name, &config, &device).unwrap();
        let one = |at: usize| (0..24).map(move |k| if k == at { 1.0 } else { 0.0 });
        let a: Vec<f32> = (0..24).flat_map(one).collect();
        lora.load(&a, &[&[3.0, 95.0][..], &[0.0; 22]].concat(), &device)
            .unwrap();
    }
    let order = SlotOrder::of(Some(
        &TokenIds::new(0, 0..2).with_slots([linear.slot("thirds").unwrap(); 2]),
    ));
    let rows = RowGroups::whole(2).with_tokens(order.tokens().unwrap().clone());
    let x = Matrix::build(2, 24, |i, j| if i == j { 1.0 } else { 0.0 });
    let x = Group::solo().replicated(x.tensor::<Ad>(DType::BF16));
    let y = Matrix::read(linear.forward(x, &rows).into_tensor());
    // 95 * 32 / 24 = 126.67 is 126.5 in bf16.
    assert_eq!(y.values, [4.0, 126.5]);
    // Negative control: with the scale rounded first it is another number.
    let rounded = half::bf16::from_f32(32.0 / 24.0).to_f32();
    assert_eq!(half::bf16::from_f32(95.0 * rounded).to_f32(), 127.0);
}

// ---- collectives -------------------------------------------------------------------------------

#[test]
fn named_adapters_issue_the_collectives_of_one_adapter_of_the_largest_rank() {
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    let case = layer(Sharing::PerExpert, GateUpTargets::Fused);
    let plain = case.with(1);
    assert_eq!(plain.config.rank, 12);
    let world = || mock(place.topology);
    let (several, one) = (world(), world());
    ranks(&several, place.topology, |mesh| {
        let device = Default::default();
        let layer = case.on_rank(&mesh, &device);
        let tokens = case.tokens(&layer, range_of(&place.dealt, mesh.rank()));
        case.rank(&layer, &tokens, (&mesh, &device), &place.dealt)
    });
    ranks(&one, place.topology, |mesh| {
        let device = Default::default();
        let layer = plain.layer(&plain.oracle(), &mesh, &device);
        plain.pass(&layer, &mesh, &device, &place.dealt, || ()).0
    });
    for rank in 0..4 {
        let of = |world: &MockWorld| -> Vec<Call> {
            let calls = world.calls(rank).into_iter();
            let on_host = |call: &Call| call.op == CollectiveOp::ExchangeSizes;
            calls.filter(|call| !on_host(call)).collect()
        };
        assert_eq!(of(&several), of(&one), "rank {rank}");
    }
}
