//! Several named adapters in one layer: at every topology output and all gradients equal those of one
//! device that gives each token the adapter of its slot.

use burn::tensor::DType;
use moe_lora_adapters::{
    Adaptable, Dropout, LinearConfig, LoraConfig, ReplicatedLinear, Sharing, TokenIds,
};
use moe_lora_experts::{SlotOrder, WeighAt};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{Call, CollectiveOp, Group, Mesh, MockWorld, Tp, range_of};
use moe_lora_testkit::{Ad, GateUpTargets, Matrix, Mocked, assert_far, mock, ranks};
use moe_lora_tests::moe::{self, Place, place, shared};
use moe_lora_tests::multi::{Case, Results, case};

fn layer(sharing: Sharing, gate_up: GateUpTargets) -> Case {
    case(moe::case(sharing, gate_up, DType::F32))
}

#[test]
fn each_token_gets_the_adapter_of_its_slot_at_every_topology() {
    for place in moe::everywhere() {
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
    for place in moe::everywhere() {
        let mut case = layer(Sharing::PerExpert, GateUpTargets::Fused);
        case.adapters[0].config.sharing = Sharing::Shared;
        case.check::<Ad>(&Mocked, &place);
    }
}

#[test]
fn adapters_of_gate_and_up_together_serve_beside_those_of_one_each() {
    for place in moe::everywhere() {
        let mut case = layer(Sharing::PerExpert, GateUpTargets::Fused);
        case.adapters[2].gate_up = GateUpTargets::Separate;
        case.layer.shared = shared(true, true);
        case.check::<Ad>(&Mocked, &place);
    }
}

#[test]
fn tokens_of_adapters_with_dora_have_their_own_lengths_of_rows_and_others_none() {
    for place in moe::everywhere() {
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
    for place in moe::everywhere() {
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
