//! PiSSA: factors and residual base are those of the full weight, with the same bits at every topology;
//! the output starts as the base's, and every gradient is that of one device.

use burn::module::Param;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::quantization::{
    QuantLevel, QuantMode, QuantParam, QuantScheme, QuantStore, QuantValue,
};
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Adaptable, AdapterError, Column, Linear, LinearConfig, Lora, LoraConfig, PlacedWeight,
    Placement, ResumeError, Row, RowLinear, Sharing, Weight, load_adapters, save_checkpoint,
    stored_adapters, sync_gradients,
};
use moe_lora_checkpoint::{Checkpoint, Strictness};
use moe_lora_experts::MoeLayer;
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Group, GroupKind, Mesh, Tp};
use moe_lora_testkit::{
    Ad, GateUpTargets, Matrix, assert_close, assert_far, mock, noise, oracle, panic_message, ranks,
    scale, synced_gradient,
};
use moe_lora_tests::grouped::{D_IN, D_OUT, KINDS, Kind, RANK, etp};
use moe_lora_tests::moe::{self, Found, Place, REDUCTION, place};

const EXPERTS: usize = 3;

fn config() -> LoraConfig {
    LoraConfig::new(RANK, 5.3).with_pissa(true)
}

/// `[E, m, n]`, one matrix an expert.
fn experts(stacked: Tensor<Ad, 3>) -> Vec<Matrix> {
    let [experts, m, n] = stacked.dims();
    let full = Matrix::read(stacked.reshape([experts * m, n]));
    let expert = |e| full.pick_rows(e * m..(e + 1) * m);
    (0..experts).map(expert).collect()
}

fn weight(expert: usize) -> Matrix {
    noise(1000 + expert as u64, D_OUT, D_IN)
}

fn linear<P: Placement>(
    kind: Kind,
    config: &LoraConfig,
    mesh: &Mesh<Ad>,
) -> Linear<Ad, ExpertTp, P> {
    let (fragments, paths): (&[&str], &[&str]) = match kind {
        Kind::Fused => (&["gate", "up"], &["fc"]),
        Kind::Separate => (&["gate", "up"], &["up", "gate"]),
        Kind::Column | Kind::Row | Kind::Whole => (&[], &["fc"]),
    };
    let weights: Vec<Matrix> = (0..EXPERTS).map(weight).collect();
    let value = |e: usize, row, column| weights[e].at(row, column) as f32;
    let mut linear = LinearConfig::new("fc", D_IN, D_OUT)
        .with_experts(0..EXPERTS)
        .with_fragments(fragments.iter().copied())
        .init(mesh.expert_tp(), value, &Default::default())
        .unwrap();
    for path in paths {
        linear.adapt(path, config, &Default::default()).unwrap();
    }
    linear
}

/// The full factors of an adapter and where they started, by expert.
fn full_factors<G: GroupKind, P: Placement>(
    lora: &Lora<Ad, G, P>,
    group: &Group<Ad, G>,
    mesh: &Mesh<Ad>,
) -> Vec<Vec<Matrix>> {
    fn full<G: GroupKind, P: Placement>(
        weight: &PlacedWeight<Ad, G, P>,
        group: &Group<Ad, G>,
        mesh: &Mesh<Ad>,
    ) -> Vec<Matrix> {
        experts(weight.gather_all(group, mesh.ep()))
    }
    let start = lora.pissa.as_ref().expect("a PiSSA adapter");
    vec![
        full(&lora.a, group, mesh),
        full(&lora.b, group, mesh),
        full(&start.a, group, mesh),
        full(&start.b, group, mesh),
    ]
}

/// Everything that a linear holds: the four factors of each adapter, and the base.
fn full<G: GroupKind, P: Placement>(
    linear: &Linear<Ad, G, P>,
    group: &Group<Ad, G>,
    mesh: &Mesh<Ad>,
) -> Vec<Vec<Matrix>> {
    let adapters = linear.adapters.iter();
    let mut held: Vec<_> = adapters
        .flat_map(|lora| full_factors(lora, group, mesh))
        .collect();
    held.push(experts(linear.weight.gather_all(group, mesh.ep())));
    held
}

/// What a started linear holds.
fn started(kind: Kind, config: &LoraConfig, size: usize) -> Vec<Vec<Matrix>> {
    fn of<P: Placement>(kind: Kind, config: &LoraConfig, mesh: &Mesh<Ad>) -> Vec<Vec<Matrix>> {
        let mut linear: Linear<Ad, ExpertTp, P> = linear(kind, config, mesh);
        linear.start_pissa(mesh.expert_tp()).unwrap();
        let held = full(&linear, mesh.expert_tp(), mesh);
        // Again: nothing happens.
        linear.start_pissa(mesh.expert_tp()).unwrap();
        assert_eq!(full(&linear, mesh.expert_tp(), mesh), held);
        held
    }
    let all = ranks(&mock(etp(size)), etp(size), |mesh| match kind {
        Kind::Row => of::<Row>(kind, config, &mesh),
        _ => of::<Column>(kind, config, &mesh),
    });
    assert!(all.iter().all(|held| *held == all[0]), "ranks differ");
    all.into_iter().next().unwrap()
}

/// A lower bound of the largest singular value, close after so many steps.
fn largest_singular_value(matrix: &Matrix) -> f64 {
    let mut x = noise(5, matrix.columns, 1);
    for _ in 0..500 {
        let y = matrix.transposed().times(&matrix.times(&x));
        x = y.scaled(1.0 / y.dot(&y).sqrt());
    }
    let y = matrix.times(&x);
    y.dot(&y).sqrt()
}

#[test]
fn the_product_has_the_largest_singular_values_and_the_base_the_rest() {
    for rslora in [false, true] {
        let config = config().with_rslora(rslora);
        let s = scale(&config);
        for kind in KINDS {
            let held = started(kind, &config, 1);
            let (adapters, base) = held.split_at(held.len() - 1);
            for (k, factors) in adapters.chunks_exact(4).enumerate() {
                assert_eq!(factors[..2], factors[2..], "it starts where it starts");
                let rows = factors[1][0].rows;
                // Up was adapted before gate.
                let first = if kind == Kind::Separate && k == 0 {
                    rows
                } else {
                    0
                };
                for expert in 0..EXPERTS {
                    let (a, b) = (&factors[0][expert], &factors[1][expert]);
                    let w = weight(expert).pick_rows(first..first + rows);
                    let rest = base[0][expert].pick_rows(first..first + rows);
                    let sum = rest.plus(&b.times(a).scaled(s));
                    assert_close("base and product", &sum, &w, DType::F32, 16);
                    // Singular vectors, each factor with the roots of the values.
                    let values = a.times(&a.transposed());
                    let diagonal = Matrix::build(RANK, RANK, |i, j| match i == j {
                        true => values.at(i, i),
                        false => 0.0,
                    });
                    assert_close("rows of A", &values, &diagonal, DType::F32, 16);
                    let columns = b.transposed().times(b);
                    assert_close("columns of B", &columns, &diagonal, DType::F32, 16);
                    let image = b.times(&diagonal).scaled(s);
                    assert_close(
                        "W V = U S",
                        &w.times(&a.transposed()),
                        &image,
                        DType::F32,
                        16,
                    );
                    for k in 0..RANK {
                        assert!(k == 0 || values.at(k, k) < values.at(k - 1, k - 1));
                        let column = (0..rows).map(|row| b.at(row, k));
                        let largest = column.max_by(|x, y| x.abs().total_cmp(&y.abs()));
                        assert!(largest.unwrap() > 0.0, "the largest element is positive");
                    }
                    let kept = s * values.at(RANK - 1, RANK - 1);
                    let left = largest_singular_value(&rest);
                    assert!(left < kept, "{left} is left, {kept} is kept");
                    assert!(left > 0.1 * kept, "something is left");
                }
            }
        }
    }
}

#[test]
fn factors_and_base_have_the_same_bits_at_every_etp() {
    for kind in KINDS {
        let one = started(kind, &config(), 1);
        for size in [2, 4] {
            assert_eq!(started(kind, &config(), size), one, "{kind:?} etp={size}");
        }
        // Negative control: the decomposition of a rank's own part is another one.
        if kind == Kind::Row {
            let part = weight(0).columns(0..D_IN / 2);
            let whole = one[0][0].columns(0..D_IN / 2);
            let values = |a: &Matrix| a.times(&a.transposed()).at(0, 0);
            let own = largest_singular_value(&part) / scale(&config());
            assert!((own - values(&whole)).abs() > 1e-2);
        }
    }
}

#[test]
fn a_diagonal_weight_splits_into_its_largest_value_and_the_others() {
    let (group, device) = (Group::<Ad, Tp>::solo(), Default::default());
    let value = |_, row, column| match (row, column) {
        (0, 0) => 1.0,
        (1, 1) => -8.0,
        (2, 2) => 2.0,
        _ => 0.0,
    };
    let mut fc: RowLinear<Ad, Tp> = LinearConfig::new("fc", 3, 4)
        .init(&group, value, &device)
        .unwrap();
    let config = LoraConfig::new(1, 2.0).with_pissa(true);
    fc.adapt("fc", &config, &device).unwrap();
    fc.start_pissa(&group).unwrap();
    let read = |w: &Weight<Ad>| Matrix::read(w.stacked().squeeze_dim::<2>(0));
    let lora = &fc.adapters[0];
    // sqrt(8 / s) = 2, B positive.
    assert_close(
        "A",
        &read(&lora.a.weight),
        &Matrix::build(1, 3, |_, j| [0.0, -2.0, 0.0][j]),
        DType::F32,
        4,
    );
    assert_close(
        "B",
        &read(&lora.b.weight),
        &Matrix::build(4, 1, |i, _| [0.0, 2.0, 0.0, 0.0][i]),
        DType::F32,
        4,
    );
    let rest = Matrix::build(4, 3, |i, j| {
        if i == 1 {
            0.0
        } else {
            f64::from(value(0, i, j))
        }
    });
    assert_close("base", &read(&fc.weight.weight), &rest, DType::F32, 4);
}

// ---- layers --------------------------------------------------------------------------------------

/// A layer with shared experts, without adapters at first.
fn case(gate_up: GateUpTargets) -> moe::Case {
    let case = moe::case(Sharing::PerExpert, gate_up, DType::F32);
    moe::Case {
        config: case.config.with_pissa(true),
        shared: moe::shared(true, false),
        adapted: false,
        ..case
    }
}

/// One rank's part of the layer with adapters.
fn layer(case: &moe::Case, mesh: &Mesh<Ad>) -> MoeLayer<Ad> {
    let device = Default::default();
    let mut layer = case.layer(&case.oracle(), mesh, &device);
    let targets = case.gate_up.targets();
    layer.add_adapters(&targets, &case.config, &device).unwrap();
    layer
}

/// What fc1 and fc2 of the experts and of the shared experts hold.
fn held(layer: &MoeLayer<Ad>, mesh: &Mesh<Ad>) -> [Vec<Vec<Matrix>>; 4] {
    let shared = &layer.shared.as_ref().unwrap().mlp;
    [
        full(&layer.experts.gate_up, mesh.expert_tp(), mesh),
        full(&layer.experts.down, mesh.expert_tp(), mesh),
        full(&shared.gate_up, mesh.tp(), mesh),
        full(&shared.down, mesh.tp(), mesh),
    ]
}

/// The oracle of an MLP that holds this; without adapters it has the base alone.
fn mlp(mlp: &oracle::Mlp, [fc1, fc2]: [&[Vec<Matrix>]; 2], expert: usize, s: f64) -> oracle::Mlp {
    let linear = |held: &[Vec<Matrix>]| {
        let (base, adapters) = held.split_last().unwrap();
        let adapters = adapters.chunks_exact(4).scan(0, |row, factors| {
            let b = factors[1][expert].clone();
            let first_row = *row;
            *row += b.rows;
            Some(oracle::Lora {
                a: factors[0][expert].clone(),
                b,
                scale: s,
                silu: false,
                first_row,
                magnitude: None,
                start: None,
            })
        });
        oracle::Linear::new(base[expert].clone(), adapters.collect())
    };
    oracle::Mlp {
        gate_up: linear(fc1),
        down: linear(fc2),
        glu: mlp.glu,
    }
}

fn oracle_of(case: &moe::Case, [fc1, fc2, shared1, shared2]: [&[Vec<Matrix>]; 4]) -> oracle::Moe {
    let (moe, s) = (case.oracle(), scale(&case.config));
    let experts = moe.experts.iter().enumerate();
    let shared = moe.shared.as_ref().unwrap();
    oracle::Moe {
        experts: experts.map(|(e, own)| mlp(own, [fc1, fc2], e, s)).collect(),
        shared: Some(oracle::Shared {
            mlp: mlp(&shared.mlp, [shared1, shared2], 0, s),
            gate: shared.gate.clone(),
        }),
        ..moe
    }
}

#[test]
fn a_started_layer_has_the_output_of_its_base_and_the_gradients_of_one_device_at_every_topology() {
    for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
        let case = case(gate_up);
        let run = |place: &Place| {
            let outcome = ranks(&mock(place.topology), place.topology, |mesh| {
                let mut layer = layer(&case, &mesh);
                layer.start_pissa(&mesh).unwrap();
                let held = held(&layer, &mesh);
                let device = Default::default();
                let (y, dx, grads) = case.pass(&layer, &mesh, &device, &place.dealt, || ());
                let weights = layer.trained_weights();
                let grads = GradientsParams::from_grads(grads, &layer);
                let grads = sync_gradients(&weights, grads, &mesh);
                let synced = weights.iter().map(|w| synced_gradient(w.weight, &grads));
                let synced = synced.collect();
                (
                    held,
                    Found {
                        y,
                        dx,
                        own: Vec::new(),
                        synced,
                    },
                )
            });
            let (held, found): (Vec<_>, Vec<_>) = outcome.into_iter().unzip();
            (held, case.join(&found, &place.topology))
        };
        let (one, _) = run(&moe::everywhere()[0]);
        let one = &one[0];
        let started = oracle_of(&case, one.each_ref().map(Vec::as_slice));
        // The layer without adapters.
        let moe = case.oracle();
        let base = |linear: fn(&oracle::Mlp) -> &oracle::Linear, shared: bool| {
            let mlps = match shared {
                false => &moe.experts[..],
                true => std::slice::from_ref(&moe.shared.as_ref().unwrap().mlp),
            };
            vec![
                mlps.iter()
                    .map(|mlp| linear(mlp).weight().clone())
                    .collect::<Vec<_>>(),
            ]
        };
        let bases = [
            base(|mlp| &mlp.gate_up, false),
            base(|mlp| &mlp.down, false),
            base(|mlp| &mlp.gate_up, true),
            base(|mlp| &mlp.down, true),
        ];
        let plain = oracle_of(&case, bases.each_ref().map(Vec::as_slice));
        for place in moe::everywhere() {
            let (held, found) = run(&place);
            for held in &held {
                assert_eq!(held, one, "{:?}", place.topology);
            }
            let tokens = place.dealt.iter().sum();
            let (x, _) = moe::data(tokens);
            assert_close(
                "the base's output",
                &found.y,
                &plain.forward(&x),
                DType::F32,
                REDUCTION,
            );
            let expected = case.expected(&started, tokens);
            assert_close("y", &found.y, &expected.y, DType::F32, REDUCTION);
            assert_close("dx", &found.dx, &expected.dx, DType::F32, REDUCTION);
            let pairs = found.experts.iter().flatten().chain(&found.shared);
            let expected_pairs = expected.experts.iter().flatten().chain(&expected.shared);
            assert_eq!(pairs.clone().count(), expected_pairs.clone().count());
            for (found, expected) in pairs.zip(expected_pairs) {
                assert_close("factor", found, expected, DType::F32, REDUCTION);
            }
        }
        // Negative control: the factors on the whole base count the principal part twice.
        let mut twice = one.clone();
        for (held, base) in twice.iter_mut().zip(bases) {
            *held.last_mut().unwrap() = base[0].clone();
        }
        let twice = oracle_of(&case, twice.each_ref().map(Vec::as_slice));
        let (x, _) = moe::data(9);
        assert_far(
            "principal part twice",
            &twice.forward(&x),
            &plain.forward(&x),
        );
    }
}

#[test]
fn with_dora_and_in_half_precision_the_output_starts_as_the_base_s_too() {
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    for (dtype, dora) in [
        (DType::F32, true),
        (DType::BF16, false),
        (DType::BF16, true),
        (DType::F16, false),
    ] {
        let case = case(GateUpTargets::Fused);
        let case = moe::Case {
            config: case.config.with_dora(dora).with_dtype(dtype),
            ..case
        };
        ranks(&mock(place.topology), place.topology, |mesh| {
            let device = Default::default();
            let base = case.layer(&case.oracle(), &mesh, &device);
            let mut layer = layer(&case, &mesh);
            layer.start_pissa(&mesh).unwrap();
            layer.start_magnitudes(&mesh);
            let x = noise(3, 5, moe::HIDDEN).scaled(0.25).tensor(dtype);
            let [found, expected] = [&layer, &base].map(|layer| layer.forward(x.clone(), &mesh));
            let (found, expected) = (Matrix::read(found), Matrix::read(expected));
            assert_close("y", &found, &expected, dtype, REDUCTION);
        });
    }
}

// ---- checkpoints and export ----------------------------------------------------------------------

#[test]
fn a_saved_adapter_resumes_at_every_topology_on_the_base_that_it_left() {
    let case = case(GateUpTargets::Separate);
    let folder = tempfile::tempdir().unwrap();
    let place = place(1, 2, 2, &[3, 0, 4, 2]);
    let trained = ranks(&mock(place.topology), place.topology, |mesh| {
        let mut layer = layer(&case, &mesh);
        layer.start_pissa(&mesh).unwrap();
        let device = Default::default();
        let (.., grads) = case.pass(&layer, &mesh, &device, &place.dealt, || ());
        let grads = GradientsParams::from_grads(grads, &layer);
        let grads = sync_gradients(&layer.trained_weights(), grads, &mesh);
        let mut sgd = SgdConfig::new().init();
        let layer: MoeLayer<Ad> = sgd.step(0.05, layer, grads);
        save_checkpoint(folder.path(), 1, &layer.trained_weights(), &sgd, &mesh).unwrap();
        held(&layer, &mesh)
    });
    assert_ne!(
        trained[0][0][0], trained[0][0][2],
        "A has moved from its start"
    );
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let settings = stored_adapters(&checkpoint).unwrap();
    assert!(settings.values().all(|config| config.pissa));
    for place in moe::everywhere() {
        ranks(&mock(place.topology), place.topology, |mesh| {
            let load = |layer| {
                load_adapters(
                    &checkpoint,
                    layer,
                    MoeLayer::trained_weights,
                    &mesh,
                    Strictness::AllowUnexpected,
                )
            };
            let (mut resumed, _) = load(layer(&case, &mesh)).unwrap();
            resumed.start_pissa(&mesh).unwrap();
            assert_eq!(held(&resumed, &mesh), trained[0], "{:?}", place.topology);
            // Started before: the same start, so the same base.
            let mut early = layer(&case, &mesh);
            early.start_pissa(&mesh).unwrap();
            let (early, _) = load(early).unwrap();
            assert_eq!(held(&early, &mesh), trained[0], "{:?}", place.topology);
        });
    }
    // Another base than that of the checkpoint has another start.
    let mesh = Mesh::<Ad>::solo();
    let mut other = layer(&case, &mesh);
    let down = other.experts.down.weight.weight.stacked() * 1.5;
    other.experts.down.weight.weight =
        Weight::PerExpert(Param::from_tensor(down).set_require_grad(false));
    other.start_pissa(&mesh).unwrap();
    let refused = load_adapters(
        &checkpoint,
        other,
        MoeLayer::trained_weights,
        &mesh,
        Strictness::AllowUnexpected,
    );
    let error = refused.expect_err("the base is another");
    assert!(matches!(error, ResumeError::OtherStart { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "moe.experts.down_proj.lora_A.start: the base is without the product that the adapter started from here, not in the checkpoint (load before start_pissa)"
    );
}

#[test]
fn exported_merged_or_as_a_plain_adapter_of_twice_the_rank_it_is_the_trained_weight() {
    use burn_moe_lora::interchange::PeftAdapter;
    let path = "model.layers.0.mlp.experts.down_proj";
    for (rslora, dora) in [(false, false), (true, false), (false, true)] {
        let folder = tempfile::tempdir().unwrap();
        let config = config().with_rslora(rslora).with_dora(dora);
        let merged = ranks(&mock(etp(2)), etp(2), |mesh| {
            let (group, device) = (mesh.expert_tp(), Default::default());
            let value = |e, row, column| weight(e).at(row, column) as f32;
            let mut down: RowLinear<Ad, ExpertTp> = LinearConfig::new(path, D_IN, D_OUT)
                .with_experts(0..EXPERTS)
                .init(group, value, &device)
                .unwrap();
            down.adapt(path, &config, &device).unwrap();
            down.start_pissa(group).unwrap();
            down.start_magnitudes(group);
            // Trained: A is another than it started as.
            let Weight::PerExpert(a) = &down.adapters[0].a.weight else {
                panic!("an adapter an expert")
            };
            let a = Tensor::from_inner(a.val().inner() * 1.25);
            down.adapters[0].a.weight = Weight::PerExpert(Param::from_tensor(a));
            let sgd = SgdConfig::new().init::<Ad, RowLinear<Ad, ExpertTp>>();
            save_checkpoint(folder.path(), 1, &down.trained_weights(), &sgd, &mesh).unwrap();
            down.merge(group).unwrap();
            experts(down.weight.gather_all(group, mesh.ep()))
        });
        let adapter =
            PeftAdapter::from_checkpoint(&Checkpoint::open(folder.path()).unwrap()).unwrap();
        let pair = adapter.layers[&0].down.as_ref().unwrap();
        assert_eq!(pair.rank(), 2 * RANK);
        assert_eq!(adapter.rslora, rslora);
        let s = adapter.scale(pair);
        assert!((s - scale(&config)).abs() < 1e-12, "the scale stays");
        let part = |tensor: &burn_moe_lora::interchange::HostTensor, e: usize| {
            let (rows, columns) = (tensor.shape()[1], tensor.shape()[2]);
            Matrix::build(rows, columns, |i, j| {
                f64::from(tensor.data()[(e * rows + i) * columns + j])
            })
        };
        for (e, merged) in merged[0].iter().enumerate() {
            let product = part(&pair.b, e).times(&part(&pair.a, e)).scaled(s);
            let mut sum = weight(e).plus(&product);
            if let Some(magnitude) = &pair.magnitude {
                let factor = |row: usize| {
                    let norm = sum.pick_rows([row]);
                    f64::from(magnitude.data()[e * D_OUT + row]) / norm.dot(&norm).sqrt()
                };
                sum = Matrix::build(D_OUT, D_IN, |i, j| sum.at(i, j) * factor(i));
            }
            assert_close("merged", merged, &sum, DType::F32, 2 * D_IN);
            assert_far("without the start", &weight(e), merged);
        }
    }
}

// ---- refused -------------------------------------------------------------------------------------

fn solo(value: impl FnMut(usize, usize, usize) -> f32) -> RowLinear<Ad, ExpertTp> {
    LinearConfig::new("fc", 4, 6)
        .with_experts(2..4)
        .init(&Group::solo(), value, &Default::default())
        .unwrap()
}

#[test]
fn what_has_no_principal_part_is_refused_with_the_reason() {
    let device = Default::default();
    let refused = |fc: &mut RowLinear<Ad, ExpertTp>, config: LoraConfig| {
        fc.adapt("fc", &config, &device).unwrap_err().to_string()
    };
    let mut fc = solo(|_, row, column| (row + column) as f32);
    assert_eq!(
        refused(&mut fc, LoraConfig::new(5, 5.0).with_pissa(true)),
        "fc: rank=5 is more than the 4 singular values of a weight [6, 4] (choose a rank of at most 4)"
    );
    let scheme = QuantScheme {
        value: QuantValue::Q8S,
        level: QuantLevel::Tensor,
        mode: QuantMode::Symmetric,
        param: QuantParam::F32,
        store: QuantStore::Native,
    };
    let quantised = fc.weight.weight.stacked().inner().quantize_dynamic(&scheme);
    let quantised = Tensor::from_inner(quantised);
    fc.weight.weight = Weight::PerExpert(Param::from_tensor(quantised).set_require_grad(false));
    let message = refused(&mut fc, LoraConfig::new(2, 4.0).with_pissa(true));
    assert_eq!(
        message,
        "fc: PiSSA leaves the rest of the weight in the base, which a quantised type cannot hold (use a base of \
         floats, or a plain start)"
    );

    let mut endless = solo(|e, row, _| if (e, row) == (3, 1) { f32::NAN } else { 1.0 });
    endless
        .adapt("fc", &LoraConfig::new(2, 4.0).with_pissa(true), &device)
        .unwrap();
    let error = endless.start_pissa(&Group::solo()).unwrap_err();
    assert_eq!(
        error,
        AdapterError::NoSvd {
            path: "fc".into(),
            expert: Some(3)
        }
    );
    assert_eq!(
        error.to_string(),
        "fc: the weight of expert 3 has no singular value decomposition (look for values that are not finite)"
    );
}

#[test]
fn a_weight_that_one_rank_cannot_decompose_is_an_error_on_every_rank() {
    let errors = ranks(&mock(etp(2)), etp(2), |mesh| {
        let value = |e, _, _| if e == 1 { f32::INFINITY } else { 1.0 };
        let mut fc: Linear<Ad, ExpertTp, Column> = LinearConfig::new("fc", 4, 4)
            .with_experts(0..2)
            .init(mesh.expert_tp(), value, &Default::default())
            .unwrap();
        fc.adapt(
            "fc",
            &LoraConfig::new(2, 4.0).with_pissa(true),
            &Default::default(),
        )
        .unwrap();
        fc.start_pissa(mesh.expert_tp()).unwrap_err()
    });
    let expected = AdapterError::NoSvd {
        path: "fc".into(),
        expert: Some(1),
    };
    assert_eq!(errors, [expected.clone(), expected]);
}

#[test]
fn a_pass_before_the_start_says_what_to_call() {
    let mut fc = solo(|_, row, column| (row * column) as f32);
    fc.adapt(
        "fc",
        &LoraConfig::new(2, 4.0).with_pissa(true),
        &Default::default(),
    )
    .unwrap();
    let x = Group::solo().shard(Tensor::ones([2, 4], &Default::default()));
    let message = panic_message(|| fc.forward_suppressed(x, &RowGroups::new(&[1, 1], 2).unwrap()));
    assert_eq!(
        message,
        "fc: the base still has the part that PiSSA's factors start from (call start_pissa after adapt)"
    );
}
