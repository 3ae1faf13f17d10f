//! Three steps of SGD from one seed, dropout on: the parameters that they end with are the same at every
//! topology.

use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Activation, Adaptable, Dropout, Init, LoraConfig, Sharing, Slot, TokenIds, sync_gradients,
};
use moe_lora_experts::MoeLayer;
use moe_lora_parallel::{Mesh, range_of};
use moe_lora_testkit::{Ad, GateUpTargets, Matrix, Mocked, assert_close, assert_far, factors};
use moe_lora_tests::moe::{self, Case, Found, Outcome, Place, REDUCTION};
use moe_lora_tests::variants::Base;

const STEPS: usize = 3;
const RATE: f64 = 0.05;

/// A layer with shared experts, whose adapters start from a seed; `B` too, so that `A` moves from the first
/// step on.
fn case(gate_up: GateUpTargets, change: impl Fn(LoraConfig) -> LoraConfig) -> Case {
    let case = moe::case(Sharing::PerExpert, gate_up, DType::F32);
    Case {
        config: change(case.config.with_init_b(Init::Xavier).with_seed(5)),
        shared: moe::shared(true, gate_up == GateUpTargets::Fused),
        adapted: false,
        ..case
    }
}

fn before_a(config: LoraConfig) -> LoraConfig {
    config.with_dropout(Dropout::before_a(0.4))
}

fn after_b(config: LoraConfig) -> LoraConfig {
    config.with_dropout(Dropout::after_b(0.4))
}

/// A rank's part of the layer with its adapters, named where there are names.
fn layer(case: &Case, adapters: &[(&str, usize)], mesh: &Mesh<Ad>) -> MoeLayer<Ad> {
    let device = Default::default();
    let mut layer = case.layer(&case.oracle(), mesh, &device);
    let mut targets = case.gate_up.targets();
    if case.rank_per_expert {
        targets = targets.with_rank_per_expert(moe::TOP_K);
    }
    if adapters.is_empty() {
        layer.add_adapters(&targets, &case.config, &device).unwrap();
    }
    for (name, rank) in adapters {
        let config = LoraConfig {
            rank: *rank,
            ..case.config
        };
        layer
            .add_named_adapters(name, &targets, &config, &device)
            .unwrap();
    }
    layer.start_magnitudes(mesh);
    layer.start_pissa(mesh).unwrap();
    layer
}

/// The full factors after so many steps, of each named adapter or of the one without a name. Of the
/// named ones, tokens take turns; every third has none.
fn trained(case: &Case, adapters: &[(&str, usize)], place: &Place, steps: usize) -> Vec<Outcome> {
    let (x, g) = moe::data(place.dealt.iter().sum());
    let found = Mocked.run(place.topology, |mesh: &Mesh<Ad>, _| {
        let mut layer = layer(case, adapters, mesh);
        let mut sgd = SgdConfig::new().init();
        let own = range_of(&place.dealt, mesh.rank());
        let slot = |token: usize| match adapters.get(token % (adapters.len() + 1)) {
            Some((name, _)) => layer.slot(name).unwrap(),
            None => Slot::BASE,
        };
        let slots: Vec<Slot> = own.clone().map(slot).collect();
        let (x, g) = (x.pick_rows(own.clone()), g.pick_rows(own.clone()));
        for step in 0..steps {
            let ids = own.start as u64..own.end as u64;
            let mut tokens = TokenIds::new(step as u64, ids);
            if !adapters.is_empty() {
                tokens = tokens.with_slots(slots.clone());
            }
            let x: Tensor<Ad, 2> = x.tensor(DType::F32);
            let y = layer.forward_tokens(x, &tokens, mesh);
            let loss = (y * g.tensor(DType::F32)).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &layer);
            let grads = sync_gradients(&layer.trained_weights(), grads, mesh);
            layer = sgd.step(RATE, layer, grads);
            // burn takes the lock of every graph at the end of a backward pass.
            assert!(mesh.all(true));
        }
        let weights = layer.trained_weights();
        let of = |name: Option<&str>| Found {
            y: Matrix::zeros(0, moe::HIDDEN),
            dx: Matrix::zeros(0, moe::HIDDEN),
            own: Vec::new(),
            synced: (weights.iter())
                .filter(|weight| weight.adapter == name)
                .map(|weight| factors(weight.weight))
                .collect(),
        };
        match adapters {
            [] => vec![of(None)],
            _ => adapters.iter().map(|(name, _)| of(Some(name))).collect(),
        }
    });
    let adapters = 0..found[0].len();
    let joined = adapters.map(|k| {
        let found: Vec<Found> = found.iter().map(|found| found[k].clone()).collect();
        case.join(&found, &place.topology)
    });
    joined.collect()
}

/// The factors of experts and of shared experts, each by its name in messages.
fn all(outcomes: &[Outcome]) -> Vec<(String, Matrix)> {
    let mut all = Vec::new();
    for (k, outcome) in outcomes.iter().enumerate() {
        for (f, factor) in outcome.experts.iter().enumerate() {
            all.push((
                format!("adapter {k}, factor {f} of the experts"),
                Matrix::stack(factor),
            ));
        }
        for (f, factor) in outcome.shared.iter().enumerate() {
            all.push((
                format!("adapter {k}, factor {f} of the shared experts"),
                factor.clone(),
            ));
        }
    }
    all
}

fn check(case: &Case, adapters: &[(&str, usize)]) {
    let places = Base::Layer.topologies();
    let one = all(&trained(case, adapters, &places[0], STEPS));
    let start = all(&trained(case, adapters, &places[0], 0));
    for ((name, found), (_, start)) in one.iter().zip(&start) {
        assert_far(&format!("{name} at its start"), start, found);
    }
    for place in &places[1..] {
        let found = all(&trained(case, adapters, place, STEPS));
        assert_eq!(found.len(), one.len());
        for ((name, found), (_, expected)) in found.iter().zip(&one) {
            let name = format!("{:?} {:?}: {name}", case.config, place.topology);
            assert_close(&name, found, expected, DType::F32, REDUCTION);
        }
    }
}

const GATE_UP: [GateUpTargets; 2] = [GateUpTargets::Fused, GateUpTargets::Separate];

#[test]
fn plain_adapters_that_drop_end_the_same_at_every_topology() {
    for gate_up in GATE_UP {
        for drop in [before_a, after_b] {
            check(&case(gate_up, drop), &[]);
        }
    }
}

#[test]
fn adapters_with_dora_and_dropout_end_the_same_at_every_topology() {
    for (gate_up, drop) in GATE_UP.into_iter().zip([before_a, after_b]) {
        check(&case(gate_up, |config| drop(config.with_dora(true))), &[]);
    }
}

#[test]
fn adapters_with_a_function_between_their_factors_end_the_same_at_every_topology() {
    let silu = |config: LoraConfig| before_a(config.with_activation(Activation::Silu));
    check(&case(GateUpTargets::Fused, silu), &[]);
}

#[test]
fn adapters_whose_rank_is_divided_by_the_experts_of_a_token_end_the_same_at_every_topology() {
    let wide = |config: LoraConfig| LoraConfig {
        rank: moe::RANK * moe::TOP_K,
        ..before_a(config)
    };
    let case = Case {
        rank_per_expert: true,
        ..case(GateUpTargets::Separate, wide)
    };
    check(&case, &[]);
}

#[test]
fn adapters_that_start_as_the_principal_part_end_the_same_at_every_topology() {
    // PiSSA refuses dropout and starts of its own.
    let pissa = |config: LoraConfig| config.with_init_b(Init::Zero).with_pissa(true);
    check(&case(GateUpTargets::Fused, pissa), &[]);
}

#[test]
fn adapters_that_experts_share_end_the_same_at_every_topology() {
    for (gate_up, sharing) in GATE_UP
        .into_iter()
        .zip([Sharing::Shared, Sharing::SharedOuter])
    {
        check(
            &case(gate_up, |config| after_b(config.with_sharing(sharing))),
            &[],
        );
    }
}

#[test]
fn named_adapters_end_the_same_at_every_topology_with_tokens_of_each_and_of_none() {
    for (gate_up, drop) in GATE_UP.into_iter().zip([before_a, after_b]) {
        check(&case(gate_up, drop), &[("fr", 8), ("de", 4)]);
    }
    let dora = |config: LoraConfig| before_a(config.with_dora(true));
    check(&case(GateUpTargets::Fused, dora), &[("fr", 8), ("de", 4)]);
}

#[test]
fn without_dropout_the_steps_end_elsewhere() {
    let place = &Base::Layer.topologies()[0];
    let ends = |drop: fn(LoraConfig) -> LoraConfig| {
        all(&trained(
            &case(GateUpTargets::Fused, drop),
            &[],
            place,
            STEPS,
        ))
    };
    let none = ends(|config| config);
    for drop in [before_a, after_b] {
        assert_far("no dropout", &none[0].1, &ends(drop)[0].1);
        assert_far("no dropout", &none[1].1, &ends(drop)[1].1);
    }
}
