//! DoRA, `y = (m / n) * (W x + s B A x) + b` with `n` the row norms of `W + s B A` held constant: output and
//! every gradient, those of the magnitudes included, equal those of one device that scales the rows
//! of the folded weight, on linears of every placement at every topology.

use burn::backend::Flex;
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Adaptable, AdapterError, ColumnLinear, Init, LinearConfig, LoraConfig, RowLinear, Sharing,
};
use moe_lora_experts::WeighAt;
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{CollectiveOp, ExpertTp, Group, GroupName, Tp};
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Matrix, Mocked, Noise, SHARING, assert_close, assert_far,
    central_differences, factors, mock, noise, oracle, panic_message, ranks, scale, shard, unshard,
};
use moe_lora_tests::dense::{
    self, COLUMN_AXES, COLUMN_SEQUENCE_AXES, D_IN, D_OUT, Sum, TOKENS, row_axes, tp,
};
use moe_lora_tests::grouped::{self, COUNTS, KINDS, Kind, etp, groups};
use moe_lora_tests::moe::{self, shared};

const SIZES: [usize; 3] = [1, 2, 4];
const GATE_UP: [GateUpTargets; 2] = [GateUpTargets::Fused, GateUpTargets::Separate];

fn config(dtype: DType) -> LoraConfig {
    LoraConfig::new(dense::RANK, dense::ALPHA)
        .with_dora(true)
        .with_dtype(dtype)
}

// ---- exactness ---------------------------------------------------------------------------------

#[test]
fn dense_linears_equal_the_weight_with_scaled_rows_column_row_and_replicated() {
    for size in SIZES {
        for dtype in [DType::F32, DType::F64] {
            for rslora in [false, true] {
                let case = dense::Case::new(config(dtype).with_rslora(rslora));
                let (mock, device) = (mock(tp(size)), Default::default());
                let found = ranks(&mock, tp(size), |mesh| case.column(&mesh, &device));
                case.check("column", &found, COLUMN_AXES);
                let found = ranks(&mock, tp(size), |mesh| case.column_sequence(&mesh, &device));
                case.check("column of tokens", &found, COLUMN_SEQUENCE_AXES);
                for sum in [Sum::Here, Sum::ByTheCaller, Sum::OverTokens] {
                    let found = ranks(&mock, tp(size), |mesh| case.row(&mesh, &device, sum));
                    case.check(&format!("row {sum:?}"), &found, row_axes(sum));
                }
                let found = ranks(&mock, tp(size), |mesh| case.replicated(&mesh, &device));
                case.check("replicated", &found, [Axis::Whole; 4]);
            }
        }
    }
}

#[test]
fn expert_linears_have_a_magnitude_an_expert_for_every_kind_sharing_and_row_count() {
    for kind in KINDS {
        for sharing in SHARING {
            for dtype in [DType::F32, DType::F64] {
                for counts in COUNTS {
                    let case =
                        grouped::Case::new(kind, config(dtype).with_sharing(sharing), counts);
                    let expected = case.expected();
                    for size in SIZES {
                        let found = case.found::<Ad>(&Mocked, size);
                        grouped::check(&case.name(size), dtype, &found, &expected);
                        let magnitudes = found.factors.iter().skip(2).step_by(3);
                        for of_experts in magnitudes {
                            assert_eq!(of_experts.len(), counts.len());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn layers_equal_the_dense_oracle_at_every_topology_with_shared_experts_and_biases() {
    for place in moe::everywhere() {
        for (sharing, gate_up, dtype, weigh_at, shared, biased) in [
            (
                Sharing::PerExpert,
                GATE_UP[0],
                DType::F32,
                WeighAt::Output,
                None,
                false,
            ),
            (
                Sharing::PerExpert,
                GATE_UP[1],
                DType::F32,
                WeighAt::Hidden,
                shared(true, true),
                false,
            ),
            (
                Sharing::Shared,
                GATE_UP[1],
                DType::F64,
                WeighAt::Output,
                shared(false, false),
                false,
            ),
            (
                Sharing::SharedOuter,
                GATE_UP[0],
                DType::F32,
                WeighAt::Output,
                None,
                true,
            ),
            // Biases of the experts are not scaled.
            (
                Sharing::PerExpert,
                GATE_UP[0],
                DType::F32,
                WeighAt::Output,
                None,
                true,
            ),
        ] {
            let case = moe::case(sharing, gate_up, dtype);
            let case = moe::Case {
                config: case.config.with_dora(true),
                weigh_at,
                shared,
                biased,
                ..case
            };
            case.check::<Ad>(&Mocked, &place);
        }
    }
}

#[test]
fn an_adapter_on_gate_alone_leaves_up_as_it_is_beside_a_plain_one_or_none() {
    let rows = RowGroups::whole(TOKENS);
    for size in [1, 2] {
        for plain_up in [false, true] {
            let half = D_OUT / 2;
            let lora = |seed, magnitude, first_row| oracle::Lora {
                a: noise(seed, dense::RANK, D_IN),
                b: noise(seed + 1, half, dense::RANK),
                scale: scale(&config(DType::F64)),
                silu: false,
                first_row,
                magnitude,
                start: None,
            };
            let mut loras = vec![lora(20, Some(Noise::new(30).lengths(half)), 0)];
            loras.extend(plain_up.then(|| lora(40, None, half)));
            let linear = oracle::Linear::new(noise(5, D_OUT, D_IN), loras);
            let found = ranks(&mock(tp(size)), tp(size), |mesh| {
                let (group, device) = (mesh.tp(), Default::default());
                let weight = |_, row, column| linear.weight().at(row, column) as f32;
                let mut fc: ColumnLinear<Ad, Tp> = LinearConfig::new("fc", D_IN, D_OUT)
                    .with_fragments(["gate", "up"])
                    .with_dtype(DType::F64)
                    .init(group, weight, &device)
                    .unwrap();
                // Up first: the order of the adapters is not that of the columns.
                for (k, path) in [(1, "up"), (0, "gate")] {
                    let Some(of) = linear.loras().get(k) else {
                        continue;
                    };
                    let config = config(DType::F64).with_dora(k == 0);
                    let lora = fc.adapt(path, &config, &device).unwrap();
                    lora.load(&of.a.to_f32(), &of.b.to_f32(), &device).unwrap();
                    match &of.magnitude {
                        Some(m) => lora.load_magnitude(&m.to_f32(), &device).unwrap(),
                        None => assert_eq!(
                            lora.load_magnitude(&[], &device),
                            Err(AdapterError::NoMagnitude { path: "up".into() })
                        ),
                    }
                }
                let x = group.replicated(noise(1, TOKENS, D_IN).tensor(DType::F64));
                let y = fc.forward(x.copy_to(), &rows).into_tensor();
                Matrix::read(y).transposed()
            });
            let y = unshard(&found, Axis::Rows(2)).transposed();
            let expected = linear.forward(&noise(1, TOKENS, D_IN));
            assert_close("y", &y, &expected, DType::F64, D_IN + dense::RANK);
        }
    }
}

// ---- wrong algebra -----------------------------------------------------------------------------

/// The row norms of a matrix, `[rows, 1]`.
fn norms(weight: &Matrix) -> Matrix {
    Matrix::build(weight.rows, 1, |row, _| {
        let row = weight.pick_rows([row]);
        row.dot(&row).sqrt()
    })
}

#[test]
fn norms_of_a_part_a_factor_twice_and_gradients_through_the_norm_or_of_one_rank_are_seen() {
    let case = dense::Case::new(config(DType::F64));
    let lora = &case.linear.loras()[0];
    let m = lora.magnitude.as_ref().unwrap();
    let bias = case.linear.bias().unwrap();
    let delta = lora.b.times(&lora.a).scaled(lora.scale);
    let sum = case.linear.weight().plus(&delta);
    let factor = |norms: &Matrix| m.zip(norms, |m, n| m / n);
    let right = factor(&norms(&sum));
    let with_bias = |y: Matrix| Matrix::build(y.rows, y.columns, |i, j| y.at(i, j) + bias.at(0, j));

    // What the comparisons below compare with is the library's own output.
    let found = ranks(&mock(tp(2)), tp(2), |mesh| {
        case.row(&mesh, &Default::default(), Sum::ByTheCaller)
    });
    let y = &found[0].y;
    let exact = with_bias(case.x.times(&sum.stretched(&right).transposed()));
    assert_close("y", y, &exact, DType::F64, D_IN);

    // A row-parallel base: each rank divides its term by the norms of its own columns.
    let term = |rank: usize| {
        let own = shard(&sum, Axis::Columns, rank, 2);
        let x = shard(&case.x, Axis::Columns, rank, 2);
        x.times(&own.stretched(&factor(&norms(&own))).transposed())
    };
    assert_far("local norms", &with_bias(term(0).plus(&term(1))), y);

    // A column-parallel base: norms with the rank's own rows of A alone.
    let (a, b) = (lora.a.pick_rows(0..2), lora.b.columns(0..2));
    let own = case.linear.weight().plus(&b.times(&a).scaled(lora.scale));
    let wrong = sum.stretched(&factor(&norms(&own)));
    assert_far(
        "own rows of A",
        &with_bias(case.x.times(&wrong.transposed())),
        y,
    );

    // Without the cross term, and without the delta.
    let (w, d) = (norms(case.linear.weight()), norms(&delta));
    let apart = w.zip(&d, |w, d| (w * w + d * d).sqrt());
    for (name, norms) in [("no cross term", &apart), ("norms of W", &w)] {
        let wrong = sum.stretched(&factor(norms));
        assert_far(name, &with_bias(case.x.times(&wrong.transposed())), y);
    }

    // On the terms and on their sum.
    let twice = sum.stretched(&right).stretched(&right);
    assert_far("twice", &with_bias(case.x.times(&twice.transposed())), y);
    // On the bias too.
    let scaled_bias = Matrix::build(y.rows, y.columns, |i, j| {
        y.at(i, j) + (right.at(j, 0) - 1.0) * bias.at(0, j)
    });
    assert_far("scaled bias", &scaled_bias, y);

    // Through the norm.
    let db = unshard(&dense::parts(&found, |f| &f.factors[1]), Axis::Rows(1));
    let free = |b: &Matrix| {
        let lora = oracle::Lora {
            b: b.clone(),
            ..lora.clone()
        };
        let linear = oracle::Linear::new(case.linear.weight().clone(), vec![lora]);
        linear.forward(&case.x).dot(&case.g)
    };
    assert_far("through the norm", &central_differences(&lora.b, free), &db);

    // The gradient of the magnitudes from the rank's own term.
    let dm = unshard(&dense::parts(&found, |f| &f.factors[2]), Axis::Rows(1));
    let own = shard(&sum, Axis::Columns, 0, 2);
    let own = shard(&case.x, Axis::Columns, 0, 2).times(&own.transposed());
    let own = Matrix::build(D_OUT, 1, |row, _| {
        let of_row = |y: &Matrix| y.columns(row..row + 1);
        of_row(&own).dot(&of_row(&case.g)) * right.at(row, 0) / m.at(row, 0)
    });
    assert_far("own term of dm", &own, &dm);
}

#[test]
fn a_row_cut_in_two_has_the_norm_of_the_whole_and_a_fresh_adapter_the_output_of_its_base() {
    // W + s B A = [3, 0 | 0, 4]: 5 on both ranks, not 3 and 4.
    for (w, b) in [([3.0, 0.0, 0.0, 4.0], 0.0), ([3.0, 0.0, 0.0, 0.0], 4.0)] {
        let found = ranks(&mock(etp(2)), etp(2), |mesh| {
            let (group, device) = (mesh.expert_tp(), Default::default());
            let mut fc: RowLinear<Ad, ExpertTp> = LinearConfig::new("down", 4, 2)
                .init(group, |_, _, column| w[column], &device)
                .unwrap();
            let x = Matrix::build(1, 4, |_, j| (j + 1) as f64);
            let x = shard(&x, Axis::Columns, group.rank(), 2).tensor(DType::F32);
            let term = |fc: &RowLinear<Ad, ExpertTp>| {
                let y = fc.forward_suppressed(group.shard(x.clone()), &RowGroups::whole(1));
                Matrix::read(y.into_term())
            };
            let base = term(&fc);
            let config = LoraConfig::new(2, 2.0).with_dora(true);
            let lora = fc.adapt("down", &config, &device).unwrap();
            let (a, b) = ([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], [b, 0.0, b, 0.0]);
            lora.load(&a, &b, &device).unwrap();
            fc.start_magnitudes(group);
            let norms = fc.adapters[0].magnitude.as_ref().unwrap();
            (factors(&norms.weight).remove(0), base, term(&fc), b[0])
        });
        for (norm, base, adapted, b) in found {
            // Two rows of the weight, one a rank.
            assert_eq!(norm.values, [5.0]);
            assert!(b != 0.0 || base == adapted);
        }
    }
}

// ---- start -------------------------------------------------------------------------------------

#[test]
fn a_fresh_adapter_changes_no_bit_of_a_layer_at_any_topology_and_precision() {
    for place in moe::everywhere() {
        for dtype in [DType::F32, DType::BF16] {
            let case = moe::Case {
                shared: shared(true, true),
                ..moe::case(Sharing::PerExpert, GATE_UP[0], dtype)
            };
            let mut oracle = case.oracle();
            // A row of zeros has no direction: its output is 0, not 0 / 0.
            for mlp in &mut oracle.experts {
                let mut weight = mlp.down.weight().clone();
                weight.values[..moe::INTERMEDIATE].fill(0.0);
                mlp.down = oracle::Linear::new(weight, mlp.down.loras().to_vec());
            }
            ranks(&mock(place.topology), place.topology, |mesh| {
                let device = Default::default();
                let bare = moe::Case {
                    adapted: false,
                    ..case
                };
                let mut layer = bare.layer(&oracle, &mesh, &device);
                let x = noise(mesh.rank() as u64, place.dealt[mesh.rank()], moe::HIDDEN);
                let x = x.tensor::<Ad>(dtype);
                let bits = |y: Tensor<Ad, 2>| y.into_data();
                let base = bits(layer.forward(x.clone(), &mesh));
                let config = config(dtype).with_seed(3);
                let targets = GATE_UP[1].targets();
                layer.add_adapters(&targets, &config, &device).unwrap();
                layer.start_magnitudes(&mesh);
                assert_eq!(bits(layer.forward(x, &mesh)), base, "{dtype:?}");
                // A, B and the magnitude of gate, up and down, of experts and of shared experts.
                let weights = layer.trained_weights();
                assert_eq!(weights.len(), 18);
                let magnitudes = weights.iter().filter(|weight| weight.is_vector);
                for weight in magnitudes {
                    assert!(weight.path.ends_with(".lora_magnitude_vector"));
                    assert_eq!(weight.weight.dtype(), DType::F32);
                }
            });
        }
    }
}

#[test]
fn an_adapter_that_starts_with_a_delta_starts_as_the_plain_one_and_only_once() {
    let group = Group::<Flex, Tp>::solo();
    let device = Default::default();
    let linear = |dora| {
        let mut fc: RowLinear<Flex, Tp> = LinearConfig::new("fc", D_IN, D_OUT)
            .init(
                &group,
                |_, row, column| noise(5, D_OUT, D_IN).at(row, column) as f32,
                &device,
            )
            .unwrap();
        let config = config(DType::F32).with_init_b(Init::Xavier).with_dora(dora);
        fc.adapt("fc", &config, &device).unwrap();
        fc.start_magnitudes(&group);
        fc
    };
    let x = noise(1, TOKENS, D_IN);
    let y = |fc: &RowLinear<Flex, Tp>| {
        let x = group.shard(x.tensor(DType::F32));
        fc.forward(x, &RowGroups::whole(TOKENS))
            .into_tensor()
            .into_data()
    };
    let mut dora = linear(true);
    assert_eq!(y(&dora), y(&linear(false)));
    dora.adapters[0]
        .load_magnitude(&[2.0; D_OUT], &device)
        .unwrap();
    dora.start_magnitudes(&group);
    let magnitude = dora.adapters[0].magnitude.as_ref().unwrap();
    assert_eq!(factors(&magnitude.weight)[0].values, [2.0; D_OUT]);
    let error = dora.adapters[0]
        .load_magnitude(&[2.0], &device)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "fc: 1 values do not fill shape [1, 12, 1] (pass the full, unsharded tensor)"
    );
}

#[test]
fn a_pass_before_the_magnitudes_are_there_says_what_to_call() {
    let (group, device) = (Group::<Flex, Tp>::solo(), Default::default());
    let mut fc: RowLinear<Flex, Tp> = LinearConfig::new("fc", 2, 2)
        .init(&group, |_, _, _| 1.0, &device)
        .unwrap();
    fc.adapt("fc", &LoraConfig::new(1, 1.0).with_dora(true), &device)
        .unwrap();
    let x = group.shard(Tensor::ones([1, 2], &device));
    let message = panic_message(|| fc.forward(x, &RowGroups::whole(1)));
    assert_eq!(
        message,
        "fc: the magnitudes of DoRA are not there yet (call start_magnitudes after adapt, or load them)"
    );
}

// ---- collectives -------------------------------------------------------------------------------

#[test]
fn collectives_carry_low_rank_values_and_vectors_and_no_weight() {
    use CollectiveOp::{AllGather, AllReduce, ReduceScatter};
    let calls = |kind, size, counts: &[usize]| {
        let case = grouped::Case::new(kind, config(DType::F32), counts);
        let world = mock(etp(size));
        ranks(&world, etp(size), |mesh| {
            case.rank(&mesh, &Default::default())
        });
        let of_rank = |rank| {
            let calls = world.calls(rank).into_iter().map(|call| {
                assert_eq!(call.group, GroupName::ExpertTp);
                (call.op, call.shape)
            });
            calls.collect::<Vec<_>>()
        };
        of_rank(0)
    };
    let (r, rows, experts) = (grouped::RANK, 8, 3);
    let (d_in, d_out) = (grouped::D_IN, grouped::D_OUT);
    for kind in KINDS {
        assert!(calls(kind, 1, &[5, 0, 3]).is_empty());
    }
    // The test's own copy_to and reduce_from frame the adapter's.
    assert_eq!(
        calls(Kind::Column, 2, &[5, 0, 3]),
        [
            (AllGather, vec![rows, r / 2]),
            (AllGather, vec![experts, r / 2, d_in]),
            (ReduceScatter, vec![rows, r]),
            (AllReduce, vec![rows, d_in]),
        ]
    );
    let row = [
        (AllReduce, vec![rows, r]),
        (ReduceScatter, vec![experts, d_out, r + 1]),
        (AllReduce, vec![experts, r, r]),
        (AllGather, vec![experts, d_out / 2]),
        (AllReduce, vec![rows, d_out]),
        (ReduceScatter, vec![experts, d_out]),
        (AllReduce, vec![rows, r]),
    ];
    let found = calls(Kind::Row, 2, &[5, 0, 3]);
    // burn runs the two branches of the backward pass in an order of its own.
    assert_eq!(found[..5], row[..5]);
    assert!(row[5..].iter().all(|call| found[5..].contains(call)) && found.len() == row.len());
    // A rank without tokens issues them too.
    let without = calls(Kind::Row, 2, &[0, 0, 0]);
    let ops = |calls: &[(CollectiveOp, Vec<usize>)]| calls.iter().map(|c| c.0).collect::<Vec<_>>();
    assert_eq!(ops(&without), ops(&found));
}

// ---- merge -------------------------------------------------------------------------------------

/// Merged full weights of a case by expert, and what merge leaves of the linear after unmerge.
fn merged(case: &grouped::Case, size: usize) -> Vec<Matrix> {
    let rows = groups(&case.counts);
    let found = ranks(&mock(etp(size)), etp(size), |mesh| {
        let (group, ep, device) = (mesh.expert_tp(), mesh.ep(), Default::default());
        macro_rules! merged {
            ($linear:expr, $forward:expr) => {{
                let mut linear = $linear;
                let adapted = $forward(&linear);
                let original = linear.merge(group).unwrap();
                assert!(linear.adapters.is_empty());
                let full = linear.weight.gather_all(group, ep);
                let error = ($forward(&linear) - adapted.clone()).abs().max();
                assert!(error.into_scalar() < 1e-4);
                linear.unmerge(original);
                assert_eq!($forward(&linear).into_data(), adapted.into_data());
                full
            }};
        }
        let full = match case.kind {
            Kind::Row => merged!(case.row(&mesh, &device), |linear: &RowLinear<Ad, _>| {
                let x = shard(&case.x, Axis::Columns, group.rank(), size).tensor(DType::F32);
                linear
                    .forward_suppressed(group.shard(x), &rows)
                    .reduce_from()
                    .into_tensor()
            }),
            _ => merged!(case.column(&mesh, &device), |linear: &ColumnLinear<
                Ad,
                _,
            >| {
                let x = group.fanout(case.x.tensor(DType::F32));
                linear.forward(x, &rows).into_tensor()
            }),
        };
        let [experts, rows, columns] = full.dims();
        Matrix::read(full.reshape([experts * rows, columns]))
    });
    let full = unshard(&found, Axis::Whole);
    let rows = full.rows / case.experts.len();
    (0..case.experts.len())
        .map(|e| full.pick_rows(e * rows..(e + 1) * rows))
        .collect()
}

#[test]
fn merged_weights_have_rows_of_the_trained_lengths_and_the_same_bits_at_every_etp() {
    for kind in KINDS {
        let case = grouped::Case::new(kind, config(DType::F32), &[5, 0, 3]);
        let one = merged(&case, 1);
        for (merged, expert) in one.iter().zip(&case.experts) {
            assert_close("merged", merged, expert.folded(), DType::F32, D_IN);
            let plain = expert.loras().iter().map(|lora| oracle::Lora {
                magnitude: None,
                ..lora.clone()
            });
            let plain = oracle::Linear::new(expert.weight().clone(), plain.collect());
            assert_far("merged without the lengths", plain.folded(), merged);
        }
        for size in [2, 4] {
            assert_eq!(merged(&case, size), one, "{kind:?} etp={size}");
        }
    }
}
