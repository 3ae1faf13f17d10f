//! What is done with adapters by name: enable, disable, add, remove, combine, merge and save.

use burn::module::AutodiffModule;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Activation, Adaptable, ColumnLinear, Dropout, Init, LinearConfig, LoraConfig, Sharing, Slot,
    Targets, TokenIds, TrainedWeight, load_adapters, load_checkpoint, save_checkpoint,
    stored_adapters, sync_gradients,
};
use moe_lora_checkpoint::{Checkpoint, Strictness};
use moe_lora_experts::MoeLayer;
use moe_lora_parallel::{ExpertTp, Group, Mesh, range_of};
use moe_lora_testkit::{
    Ad, GateUpTargets, Matrix, Mocked, assert_close, assert_far, factors, mock, oracle,
    panic_message, ranks,
};
use moe_lora_tests::moe::{self, Place, data, place, shared};
use moe_lora_tests::multi::{Adapter, Case, case};

fn layer() -> Case {
    let layer = moe::case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32);
    case(moe::Case {
        shared: shared(true, true),
        ..layer
    })
}

fn places() -> [Place; 4] {
    [
        place(1, 1, 1, &[9]),
        place(1, 2, 2, &[3, 0, 4, 2]),
        place(2, 1, 4, &[3, 0, 4, 2]),
        place(4, 4, 1, &[3, 0, 4, 2]),
    ]
}

/// A rank's own tokens, all of them of these slots in turn.
fn tokens(own: std::ops::Range<usize>, slots: &[Slot]) -> TokenIds {
    let of_token = own.clone().map(|token| slots[token % slots.len()]);
    TokenIds::new(0, own.map(|token| token as u64)).with_slots(of_token)
}

/// The output for a rank's own tokens.
fn output(layer: &MoeLayer<Ad>, slots: &[Slot], mesh: &Mesh<Ad>, dealt: &[usize]) -> Matrix {
    let own = range_of(dealt, mesh.rank());
    let x = data(dealt.iter().sum()).0.pick_rows(own.clone());
    Matrix::read(layer.forward_tokens(x.tensor(DType::F32), &tokens(own, slots), mesh))
}

// ---- enabled and disabled ----------------------------------------------------------------------

#[test]
fn tokens_of_disabled_and_removed_adapters_get_the_base_to_the_bit_and_others_their_own() {
    for place in places() {
        let case = layer();
        Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
            let mut layer = case.on_rank(mesh, device);
            let [fr, de] = ["fr", "de"].map(|name| layer.slot(name).unwrap());
            let run =
                |layer: &MoeLayer<Ad>, slots: &[Slot]| output(layer, slots, mesh, &place.dealt);
            let base = run(&layer, &[Slot::BASE]);
            let both = run(&layer, &[fr, de]);
            let plain = moe::Case {
                adapted: false,
                ..case.layer
            };
            let plain = plain.layer(&case.oracle(None), mesh, device);
            let own = range_of(&place.dealt, mesh.rank());
            let x = data(9).0.pick_rows(own.clone()).tensor(DType::F32);
            assert_eq!(Matrix::read(plain.forward(x, mesh)), base);
            assert!(own.is_empty() || both != base);

            layer.set_enabled("fr", false).unwrap();
            let de_alone = run(&layer, &[Slot::BASE, de]);
            assert_eq!(run(&layer, &[fr, de]), de_alone);
            assert_eq!(run(&layer, &[fr]), base);
            let weights = layer.trained_weights();
            assert!(weights.iter().all(|weight| weight.adapter != Some("fr")));
            assert!(weights.iter().any(|weight| weight.adapter == Some("de")));

            layer.set_enabled("fr", true).unwrap();
            assert_eq!(run(&layer, &[fr, de]), both);
            layer.remove("fr").unwrap();
            assert_eq!(run(&layer, &[fr, de]), de_alone);
            layer.set_enabled("de", false).unwrap();
            layer.set_enabled("idle", false).unwrap();
            assert_eq!(run(&layer, &[fr, de]), base);
        });
    }
}

#[test]
fn a_disabled_adapter_keeps_its_values_while_others_train() {
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let mut layer = layer().on_rank(mesh, device);
        layer.set_enabled("fr", false).unwrap();
        let values = |layer: &MoeLayer<Ad>, name: &str| {
            let lora = &layer.experts.down.named[0].get(name).unwrap().lora;
            [factors(&lora.a.weight), factors(&lora.b.weight)]
        };
        let before = ["fr", "de"].map(|name| values(&layer, name));
        let [fr, de] = ["fr", "de"].map(|name| layer.slot(name).unwrap());
        let own = range_of(&place.dealt, mesh.rank());
        let x: Tensor<Ad, 2> = data(9).0.pick_rows(own.clone()).tensor(DType::F32);
        let y = layer.forward_tokens(x, &tokens(own, &[fr, de]), mesh);
        let grads = GradientsParams::from_grads(y.powi_scalar(2).sum().backward(), &layer);
        let grads = sync_gradients(&layer.trained_weights(), grads, mesh);
        // Weight decay moves whatever has a gradient, one of zeros too.
        let mut optimizer = AdamWConfig::new().with_weight_decay(0.1).init();
        let layer = optimizer.step(0.1, layer, grads);
        assert_eq!(values(&layer, "fr"), before[0]);
        assert_ne!(values(&layer, "de"), before[1]);
    });
}

#[test]
fn an_adapter_is_added_under_the_name_of_a_removed_one_and_starts_anew() {
    let mesh = Mesh::<Ad>::solo();
    let mut layer = layer().on_rank(&mesh, &Default::default());
    let fr = layer.slot("fr").unwrap();
    layer.remove("fr").unwrap();
    let targets = GateUpTargets::Fused.targets();
    let config = LoraConfig::new(2, 4.0).with_init_b(Init::Kaiming);
    layer
        .add_named_adapters("fr", &targets, &config, &Default::default())
        .unwrap();
    assert_eq!(layer.slot("fr").unwrap(), fr);
    assert_eq!(layer.adapter_names(), ["de", "fr", "idle"]);
    assert_ne!(
        output(&layer, &[fr], &mesh, &[9]),
        output(&layer, &[Slot::BASE], &mesh, &[9])
    );
}

#[test]
fn an_adapter_of_one_linear_leaves_the_others_as_they_are() {
    let mesh = Mesh::<Ad>::solo();
    let mut layer = layer().on_rank(&mesh, &Default::default());
    let down = Targets::new(["down_proj"]);
    let config = LoraConfig::new(2, 4.0).with_init_b(Init::Kaiming);
    layer
        .add_named_adapters("down", &down, &config, &Default::default())
        .unwrap();
    let slot = layer.slot("down").unwrap();
    assert!(layer.experts.gate_up.slot("down").is_err());
    let x: Tensor<Ad, 2> = data(9).0.tensor(DType::F32);
    let rows = moe_lora_kernels::RowGroups::new(&[9, 0, 0, 0], 9).unwrap();
    let hidden = |slot| {
        let rows = rows.clone().with_tokens(tokens(0..9, &[slot]));
        let x = mesh.expert_tp().replicated(x.clone()).copy_to();
        Matrix::read(layer.experts.hidden(x, &rows).into_tensor())
    };
    assert_eq!(hidden(slot), hidden(Slot::BASE));
    assert_ne!(
        output(&layer, &[slot], &mesh, &[9]),
        output(&layer, &[Slot::BASE], &mesh, &[9])
    );
}

// ---- weighted sums -----------------------------------------------------------------------------

const WEIGHTS: [(&str, f64); 2] = [("fr", 0.75), ("de", -0.5)];

/// One device with the weighted sum of both adapters folded in.
fn sum(case: &Case) -> oracle::Moe {
    let of = [case.oracle(Some(0)), case.oracle(Some(2))];
    let both = |linears: [&oracle::Linear; 2]| {
        let loras = linears
            .iter()
            .zip(WEIGHTS)
            .flat_map(|(linear, (_, weight))| {
                linear.loras().iter().map(move |lora| oracle::Lora {
                    scale: weight * lora.scale,
                    ..lora.clone()
                })
            });
        oracle::Linear::new(linears[0].weight().clone(), loras.collect())
    };
    let mlp = |mlps: [&oracle::Mlp; 2]| oracle::Mlp {
        gate_up: both(mlps.map(|mlp| &mlp.gate_up)),
        down: both(mlps.map(|mlp| &mlp.down)),
        glu: mlps[0].glu,
    };
    let [fr, de] = &of;
    oracle::Moe {
        experts: (fr.experts.iter().zip(&de.experts))
            .map(|(fr, de)| mlp([fr, de]))
            .collect(),
        shared: fr.shared.as_ref().map(|shared| oracle::Shared {
            mlp: mlp([&shared.mlp, &de.shared.as_ref().unwrap().mlp]),
            gate: shared.gate.clone(),
        }),
        ..fr.clone()
    }
}

#[test]
fn a_combination_is_the_weighted_sum_and_has_the_same_factors_at_every_topology() {
    let (case, x) = (layer(), data(9).0);
    let expected = sum(&case).forward(&x);
    let mut full = Vec::new();
    for place in places() {
        let found = Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
            let mut layer = case.on_rank(mesh, device);
            layer.combine("mix", &WEIGHTS).unwrap();
            let mix = layer.slot("mix").unwrap();
            let (down, fc1) = (
                &layer.experts.down.named[0],
                &layer.experts.gate_up.named[0],
            );
            let (down, fc1) = (down.get("mix").unwrap(), fc1.get("mix").unwrap());
            assert_eq!(
                (down.lora.config().rank, down.lora.config().scale()),
                (12, 1.0)
            );
            let (group, ep) = (mesh.expert_tp(), mesh.ep());
            let full = [
                fc1.lora.a.gather_all(group, ep),
                fc1.lora.b.gather_all(group, ep),
                down.lora.a.gather_all(group, ep),
                down.lora.b.gather_all(group, ep),
            ];
            (
                output(&layer, &[mix], mesh, &place.dealt),
                full.map(|factor| factor.into_data().to_vec::<f32>().unwrap()),
            )
        });
        let y = Matrix::stack(&found.iter().map(|(y, _)| y.clone()).collect::<Vec<_>>());
        assert_close("mix", &y, &expected, DType::F32, moe::REDUCTION);
        full.extend(found.into_iter().map(|(_, full)| full));
    }
    assert!(full.iter().all(|factors| *factors == full[0]));
    // Weighted sums of the factors instead have terms of one's B with the other's A.
    for k in [0, 2] {
        assert_far("one alone", &case.oracle(Some(k)).forward(&x), &expected);
    }
}

#[test]
fn a_combination_trains_by_itself_beside_its_sources() {
    let mesh = Mesh::<Ad>::solo();
    let mut layer = layer().on_rank(&mesh, &Default::default());
    layer.combine("mix", &WEIGHTS).unwrap();
    let mix = layer.slot("mix").unwrap();
    let x: Tensor<Ad, 2> = data(9).0.tensor(DType::F32);
    let y = layer.forward_tokens(x, &tokens(0..9, &[mix]), &mesh);
    let grads = y.powi_scalar(2).sum().backward();
    for weight in layer.trained_weights() {
        let grads = moe_lora_testkit::gradient(weight.weight, &grads);
        let moved = grads.iter().any(|grad| grad.magnitude() > 0.0);
        assert_eq!(moved, weight.adapter == Some("mix"), "{}", weight.path);
    }
}

// ---- refusals ----------------------------------------------------------------------------------

fn linear() -> ColumnLinear<Ad, ExpertTp> {
    let device = Default::default();
    let mut linear: ColumnLinear<Ad, ExpertTp> = LinearConfig::new("fc", 4, 8)
        .with_fragments(["gate", "up"])
        .init(&Group::solo(), |_, _, _| 0.5, &device)
        .unwrap();
    let config = LoraConfig::new(2, 4.0);
    linear.adapt_named("fc", "fr", &config, &device).unwrap();
    linear
}

#[test]
fn what_does_not_fit_is_refused_with_the_reason() {
    let device = Default::default();
    let mut fc = linear();
    let plain = LoraConfig::new(2, 4.0);
    let mut refused = |path: &str, name: &str, config: LoraConfig| {
        let error = fc.adapt_named(path, name, &config, &device);
        error.unwrap_err().to_string()
    };
    assert_eq!(
        refused("fc", "fr", plain),
        r#"fc: adapter "fr" is "fr" already (choose another name, or remove that one)"#
    );
    assert_eq!(
        refused("fc", "a.b", plain),
        r#"adapter name "a.b" is not one of letters, digits, "_" and "-" (choose one such as "customer-7")"#
    );
    assert_eq!(
        refused("gate", "fr", plain),
        "gate: fc already has an adapter (merge it or leave one of the two out)"
    );
    assert_eq!(
        refused("fc", "de", plain.with_activation(Activation::Silu)),
        r#"adapter "de" has activation Silu, "fr" has Identity (the adapters of one linear run in one product: give them the same activation)"#
    );
    for (config, what) in [
        (
            plain.with_dropout(Dropout::before_a(0.5)),
            "dropout 0.5 before A, \"fr\" has none",
        ),
        (plain.with_dtype(DType::F64), "dtype F64, \"fr\" has F32"),
        (plain.with_tf32(true), "tf32 true, \"fr\" has false"),
    ] {
        let message = refused("fc", "de", config);
        let whole = format!("adapter \"de\" has {what} (the adapters of one linear");
        assert!(message.starts_with(&whole), "{message}");
    }
    assert!(fc.adapt("fc", &plain, &device).is_err());
    assert!(fc.adapt("gate", &plain, &device).is_err());
    assert_eq!(fc.adapter_names(), ["fr"]);

    let combine = |name: &str, sources: &[(&str, f64)]| {
        let error = linear().combine(name, sources).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        combine("mix", &[("frr", 1.0)]),
        r#"no adapter is named "frr", did you mean "fr"? (known: fr)"#
    );
    assert_eq!(
        combine("mix", &[("fr", f64::NAN)]),
        r#"combination "mix" has weights [NaN] (give each adapter of the sum a finite weight, and at least one)"#
    );
    assert!(combine("mix", &[]).contains("weights []"));
    let mut dora = linear();
    dora.adapt_named("fc", "de", &plain.with_dora(true), &device)
        .unwrap();
    assert_eq!(
        dora.combine("mix", &[("fr", 1.0), ("de", 1.0)])
            .unwrap_err()
            .to_string(),
        r#"fc: the lengths of rows that "de" has with DoRA are those of W + s B A, not of a sum with others (combine adapters without DoRA)"#
    );
    assert_eq!(dora.adapter_names(), ["de", "fr"]);
    assert!(combine("fr", &[("fr", 1.0)]).contains("already"));
    assert!(fc.slot("de").is_err() && fc.remove("de").is_err());
    assert!(fc.set_enabled("de", true).is_err());
    assert_eq!(
        fc.merge(&Group::solo()).unwrap_err().to_string(),
        r#"fc: adapters ["fr"] serve different tokens, so no one weight has them all (merge one of them with merge_named)"#
    );
}

#[test]
fn a_rank_that_the_group_does_not_divide_is_refused_beside_ranks_that_it_does() {
    let place = place(1, 1, 4, &[1, 1, 1, 1]);
    Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let mut layer = layer().on_rank(mesh, device);
        let (targets, config) = (GateUpTargets::Fused.targets(), LoraConfig::new(6, 4.0));
        let error = layer.add_named_adapters("six", &targets, &config, device);
        assert_eq!(
            error.unwrap_err().to_string(),
            "moe.experts.gate_up_proj.six: lora rank=6 is not divisible by etp_size=4 (choose a multiple of 4 as rank)"
        );
    });
}

#[test]
fn named_adapters_without_slots_are_refused_in_forward() {
    let mesh = Mesh::<Ad>::solo();
    let layer = layer().on_rank(&mesh, &Default::default());
    let message =
        panic_message(|| layer.forward(Tensor::ones([2, moe::HIDDEN], &Default::default()), &mesh));
    assert!(
        message.contains("named adapters have no slots of the tokens"),
        "{message}"
    );
}

// ---- merging and saving ------------------------------------------------------------------------

#[test]
fn a_layer_merged_with_one_of_its_adapters_is_that_adapter_for_every_token() {
    let (case, x) = (layer(), data(9).0);
    for place in places() {
        let found = Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
            let mut layer = case.on_rank(mesh, device);
            let slots = [layer.slot("fr").unwrap(), layer.slot("de").unwrap()];
            let before = output(&layer, &slots, mesh, &place.dealt);
            assert!(layer.merge(mesh).is_err());
            let original = layer.merge_named("de", mesh).unwrap();
            assert!(layer.adapter_names().is_empty() && layer.trained_weights().is_empty());
            let merged = output(&layer, &[Slot::BASE], mesh, &place.dealt);
            layer.unmerge(original);
            assert_eq!(output(&layer, &slots, mesh, &place.dealt), before);
            merged
        });
        let expected = case.oracle(Some(2)).forward(&x);
        let y = Matrix::stack(&found);
        assert_close("merged", &y, &expected, DType::F32, moe::REDUCTION);
    }
}

#[test]
fn named_adapters_are_saved_under_their_names_and_load_at_another_topology() {
    let folder = tempfile::tempdir().unwrap();
    let case = layer();
    let from = place(1, 2, 2, &[3, 0, 4, 2]);
    let expected = ranks(&mock(from.topology), from.topology, |mesh| {
        let layer = case.on_rank(&mesh, &Default::default());
        let optimizer = AdamWConfig::new().init::<Ad, MoeLayer<Ad>>();
        let weights = layer.trained_weights();
        save_checkpoint(folder.path(), 0, &weights, &optimizer, &mesh).unwrap();
        let slots = ["fr", "idle", "de"].map(|name| layer.slot(name).unwrap());
        output(&layer, &slots, &mesh, &from.dealt)
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let stored = &checkpoint.manifest().adapters;
    assert_eq!(stored["moe.experts.down_proj.fr"].rank, 8);
    assert_eq!(stored["moe.shared_expert.gate_up_proj.de"].rank, 4);
    for to in places() {
        let found = ranks(&mock(to.topology), to.topology, |mesh| {
            let device = Default::default();
            let mut layer = case.on_rank(&mesh, &device);
            let targets = GateUpTargets::Fused.targets();
            for Adapter { name, config, .. } in &case.adapters {
                layer.remove(name).unwrap();
                layer
                    .add_named_adapters(name, &targets, config, &device)
                    .unwrap();
            }
            let mut optimizer = AdamWConfig::new().init::<Ad, MoeLayer<Ad>>();
            let weights = MoeLayer::trained_weights;
            let strict = Strictness::Exact;
            let loaded =
                load_checkpoint(&checkpoint, layer, weights, &mut optimizer, &mesh, strict);
            let (layer, _) = loaded.unwrap();
            let slots = ["fr", "idle", "de"].map(|name| layer.slot(name).unwrap());
            output(&layer, &slots, &mesh, &to.dealt)
        });
        let [found, expected] = [&found, &expected].map(|parts| Matrix::stack(parts));
        assert_close("loaded", &found, &expected, DType::F32, moe::REDUCTION);
    }
}

#[test]
fn one_of_several_adapters_is_saved_as_a_plain_one_and_loaded_under_another_name() {
    let folder = tempfile::tempdir().unwrap();
    let case = layer();
    let from = place(1, 2, 2, &[3, 0, 4, 2]);
    ranks(&mock(from.topology), from.topology, |mesh| {
        let layer = case.on_rank(&mesh, &Default::default());
        let optimizer = AdamWConfig::new().init::<Ad, MoeLayer<Ad>>();
        let mut weights = layer.trained_weights();
        weights.retain(|weight| weight.adapter == Some("de"));
        let weights: Vec<_> = weights.into_iter().map(TrainedWeight::unnamed).collect();
        save_checkpoint(folder.path(), 0, &weights, &optimizer, &mesh).unwrap();
        assert_eq!(weights[0].path, "moe.experts.gate_up_proj.lora_A");
        assert_eq!(weights[7].path, "moe.shared_expert.down_proj.lora_B");
    });
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let config = stored_adapters(&checkpoint).unwrap()["moe.experts.down_proj"];
    let expected = case.oracle(Some(2)).forward(&data(9).0);
    for to in places() {
        let found = ranks(&mock(to.topology), to.topology, |mesh| {
            let device = Default::default();
            let mut layer = case.on_rank(&mesh, &device);
            let targets = GateUpTargets::Fused.targets();
            layer
                .add_named_adapters("new", &targets, &config, &device)
                .unwrap();
            let loaded = load_adapters(&checkpoint, layer, new_weights, &mesh, Strictness::Exact);
            let (layer, _) = loaded.unwrap();
            let new = layer.slot("new").unwrap();
            output(&layer, &[new], &mesh, &to.dealt)
        });
        let y = Matrix::stack(&found);
        assert_close("loaded", &y, &expected, DType::F32, moe::REDUCTION);
    }
}

fn new_weights(layer: &MoeLayer<Ad>) -> Vec<TrainedWeight<'_, Ad>> {
    let mut weights = layer.trained_weights();
    weights.retain(|weight| weight.adapter == Some("new"));
    weights.into_iter().map(TrainedWeight::unnamed).collect()
}

#[test]
fn the_module_for_evaluation_has_the_adapters_too() {
    let mesh = Mesh::<Ad>::solo();
    let layer = layer().on_rank(&mesh, &Default::default());
    let names = layer.adapter_names();
    assert_eq!(layer.valid().adapter_names(), names);
}
