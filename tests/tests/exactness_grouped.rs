//! Expert linears over the expert tensor parallel group: rows sorted by expert, one weight an
//! expert, one adapter an expert or one for all. Output and every gradient equal those of each
//! expert alone on one device with its adapter folded into its weight.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Activation, Adaptable, LinearConfig, LoraConfig, ReplicatedLinear, RowLinear, Sharing,
};
use moe_lora_kernels::{GroupedBackend, RowGroups, grouped_matmul};
use moe_lora_parallel::{CollectiveOp, ExpertTp, Group, GroupName};
use moe_lora_testkit::{
    Ad, Axis, Matrix, Mocked, SHARING, assert_close, assert_far, central_differences, mock, noise,
    oracle, panic_message, ranks, shard, unshard,
};
use moe_lora_tests::grouped::{
    ALPHA, COUNTS, Case, D_IN, D_OUT, KINDS, Kind, RANK, REDUCTION, check, etp, groups,
};

#[test]
fn expert_linears_equal_the_folded_weights_for_every_kind_sharing_and_row_count() {
    for kind in KINDS {
        for sharing in SHARING {
            for dtype in [DType::F32, DType::F64] {
                let config = LoraConfig::new(RANK, ALPHA)
                    .with_sharing(sharing)
                    .with_dtype(dtype);
                for counts in COUNTS {
                    let case = Case::new(kind, config, counts);
                    let expected = case.expected();
                    for size in [1, 2, 4] {
                        check(
                            &case.name(size),
                            dtype,
                            &case.found::<Ad>(&Mocked, size),
                            &expected,
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_function_between_the_factors_of_experts_is_exact_too() {
    for kind in KINDS {
        for sharing in SHARING {
            let config = LoraConfig::new(RANK, ALPHA)
                .with_sharing(sharing)
                .with_activation(Activation::Silu)
                .with_dtype(DType::F64);
            let case = Case::new(kind, config, &[5, 0, 3]);
            for size in [1, 2, 4] {
                check(
                    &case.name(size),
                    DType::F64,
                    &case.found::<Ad>(&Mocked, size),
                    &case.expected(),
                );
            }
        }
    }
}

#[test]
fn the_wrong_experts_the_wrong_halves_and_a_lost_cross_term_are_seen() {
    let config = LoraConfig::new(RANK, ALPHA).with_dtype(DType::F64);
    let case = Case::new(Kind::Fused, config, &[5, 0, 3]);
    let (found, expected) = (case.found::<Ad>(&Mocked, 2), case.expected());

    // Expert 0's adapter for every expert.
    let rows = groups(&case.counts);
    let x = case.x.pick_rows(rows.range(2));
    let first = oracle::Linear::new(
        case.experts[2].weight().clone(),
        case.experts[0].loras().to_vec(),
    );
    let right = found.y.pick_rows(rows.range(2));
    assert_far("adapter of expert 0", &first.forward(&x), &right);

    // The ranks' [gate, up] slices laid end to end.
    let parts: Vec<_> = (0..2)
        .map(|rank| shard(&case.expected().y.transposed(), Axis::Rows(2), rank, 2))
        .collect();
    assert_far(
        "halves",
        &unshard(&parts, Axis::Rows(1)).transposed(),
        &found.y,
    );

    // The gradient of A from the rank's own slice of the output, under a correct forward.
    let expert = &case.experts[0];
    let (x, g) = (case.x.pick_rows(0..5), case.g.pick_rows(0..5));
    let own = Matrix::build(5, D_OUT, |i, j| {
        let own = j % (D_OUT / 2) < D_OUT / 4;
        if own { g.at(i, j) } else { 0.0 }
    });
    let da = &expert.backward(&x, &own).factors[0][0];
    assert_far("own terms of dA", da, &expected.factors[0][0]);

    // A shared adapter's gradient as the mean over experts, not the sum.
    let case = Case::new(
        Kind::Column,
        config.with_sharing(Sharing::Shared),
        &[5, 0, 3],
    );
    let found = case.found::<Ad>(&Mocked, 2);
    let mean = case.expected().factors[0][0].scaled(1.0 / 3.0);
    assert_far("mean over experts", &mean, &found.factors[0][0]);
}

#[test]
fn padding_has_no_output_and_no_part_in_a_shared_factor_s_gradient() {
    for kind in KINDS {
        for sharing in SHARING {
            for size in [1, 2] {
                let config = LoraConfig::new(RANK, ALPHA).with_sharing(sharing);
                let case = Case::new(kind, config, &[5, 0, 3]);
                // A buffer that was not cleared: any product with it would spread.
                let padding = |columns| Matrix::build(2, columns, |_, _| f64::NAN);
                let padded = Case {
                    x: Matrix::stack(&[case.x.clone(), padding(D_IN)]),
                    g: Matrix::stack(&[case.g.clone(), Matrix::zeros(2, D_OUT)]),
                    ..case.clone()
                };
                let mut found = padded.found::<Ad>(&Mocked, size);
                let name = format!("{} padded", case.name(size));
                for full in [&mut found.y, &mut found.dx] {
                    assert_eq!(full.pick_rows(8..10).magnitude(), 0.0, "{name}");
                    *full = full.pick_rows(0..8);
                }
                check(&name, DType::F32, &found, &case.expected());
            }
        }
    }
}

#[test]
fn the_outer_factor_is_one_matrix_whose_gradient_is_the_sum_over_the_experts() {
    for (kind, outer) in [(Kind::Fused, 0), (Kind::Row, 1)] {
        let config = LoraConfig::new(RANK, ALPHA)
            .with_sharing(Sharing::SharedOuter)
            .with_dtype(DType::F64);
        let case = Case::new(kind, config, &[5, 0, 3]);
        let found = case.found::<Ad>(&Mocked, 2);
        let counts: Vec<usize> = found.factors.iter().map(Vec::len).collect();
        assert_eq!((counts[outer], counts[1 - outer]), (1, 3), "{kind:?}");
        // Negative controls: the mean over the experts, and the sum over both ranks once more.
        let right = &case.expected().factors[outer][0];
        assert_close(
            "sum",
            &found.factors[outer][0],
            right,
            DType::F64,
            REDUCTION,
        );
        for (name, factor) in [("mean over experts", 1.0 / 3.0), ("sum over ETP", 2.0)] {
            assert_far(name, &right.scaled(factor), &found.factors[outer][0]);
        }
    }
}

#[test]
fn a_replicated_base_of_experts_has_no_outer_factor() {
    let (group, device) = (Group::<Flex, ExpertTp>::solo(), Default::default());
    let linear = |experts: bool| -> ReplicatedLinear<Flex, ExpertTp> {
        let config = LinearConfig::new("fc", D_IN, D_OUT);
        let config = match experts {
            true => config.with_experts(0..2),
            false => config,
        };
        config.init(&group, |_, _, _| 0.0, &device).unwrap()
    };
    let config = LoraConfig::new(RANK, ALPHA).with_sharing(Sharing::SharedOuter);
    assert_eq!(
        linear(true)
            .adapt("fc", &config, &device)
            .unwrap_err()
            .to_string(),
        "fc: a replicated base has no hidden side whose factor the experts could share (choose Sharing::Shared or Sharing::PerExpert)"
    );
    // Without experts there is nothing to share.
    assert!(linear(false).adapt("fc", &config, &device).is_ok());
}

#[test]
fn grouped_outputs_stay_in_the_graph_and_both_experts_of_a_rank_train() {
    for kind in KINDS {
        for size in [1, 2, 4] {
            let case = Case::new(kind, LoraConfig::new(RANK, ALPHA), &[3, 2]);
            for (k, factor) in case.found::<Ad>(&Mocked, size).factors.iter().enumerate() {
                assert_eq!(factor.len(), 2);
                for (e, grad) in factor.iter().enumerate() {
                    let name = format!("{kind:?} etp={size} factor {k} of expert {e}");
                    assert!(grad.magnitude() > 0.1, "{name} is {grad:?}");
                }
            }
        }
    }
}

#[test]
fn an_expert_without_tokens_has_a_gradient_of_exact_zeros() {
    for kind in KINDS {
        for size in [1, 2, 4] {
            let case = Case::new(kind, LoraConfig::new(RANK, ALPHA), &[4, 0, 2]);
            for factor in case.found::<Ad>(&Mocked, size).factors {
                assert_eq!(factor[1], Matrix::zeros(factor[1].rows, factor[1].columns));
                assert!(factor[0].magnitude() > 0.1 && factor[2].magnitude() > 0.1);
            }
        }
    }
}

#[test]
fn no_tokens_at_all_give_an_empty_output_zero_gradients_and_the_same_collectives() {
    for kind in KINDS {
        for size in [1, 2, 4] {
            let calls = |counts: &[usize]| {
                let case = Case::new(kind, LoraConfig::new(RANK, ALPHA), counts);
                let world = mock(etp(size));
                let found = case.join(&ranks(&world, etp(size), |mesh| {
                    case.rank(&mesh, &Default::default())
                }));
                let calls = |rank| -> Vec<(GroupName, CollectiveOp)> {
                    let calls = world.calls(rank).into_iter();
                    calls.map(|call| (call.group, call.op)).collect()
                };
                assert!((0..size).all(|rank| calls(rank) == calls(0)));
                (found, calls(0))
            };
            let (found, without) = calls(&[0, 0, 0]);
            assert_eq!((found.y.rows, found.y.columns), (0, D_OUT));
            assert_eq!((found.dx.rows, found.dx.columns), (0, D_IN));
            for grad in found.factors.concat() {
                assert_eq!(grad, Matrix::zeros(grad.rows, grad.columns));
            }
            let (_, with) = calls(&[4, 0, 2]);
            assert_eq!(without, with, "{kind:?} etp={size}");
        }
    }
}

#[test]
fn collectives_are_those_of_the_table_on_the_expert_group_and_none_alone() {
    use CollectiveOp::{AllGather, AllReduce, ReduceScatter};
    for size in [1, 2, 4] {
        let calls = |kind, counts: &[usize]| {
            let case = Case::new(kind, LoraConfig::new(RANK, ALPHA), counts);
            let world = mock(etp(size));
            ranks(&world, etp(size), |mesh| {
                case.rank(&mesh, &Default::default())
            });
            let calls = world.calls(0).into_iter().map(|call| {
                assert_eq!(
                    (call.group, call.members.len()),
                    (GroupName::ExpertTp, size)
                );
                (call.op, call.shape)
            });
            calls.collect::<Vec<_>>()
        };
        let rows = 8;
        let wide = [(AllReduce, vec![rows, D_IN])];
        let column = [
            (AllGather, vec![rows, RANK / size]),
            (ReduceScatter, vec![rows, RANK]),
        ];
        // The test's own copy_to and reduce_from frame the adapter's.
        let row = [
            (AllReduce, vec![rows, RANK]),
            (AllReduce, vec![rows, D_OUT]),
            (AllReduce, vec![rows, RANK]),
        ];
        if size == 1 {
            assert!(calls(Kind::Fused, &[5, 0, 3]).is_empty());
            assert!(calls(Kind::Row, &[5, 0, 3]).is_empty());
        } else {
            assert_eq!(
                calls(Kind::Fused, &[5, 0, 3]),
                [&column[..], &wide].concat()
            );
            assert_eq!(calls(Kind::Row, &[5, 0, 3]), row);
        }
    }
}

#[test]
fn rows_that_no_number_of_ranks_divides_give_the_same_at_every_etp() {
    for kind in KINDS {
        for counts in [&[5usize, 0, 3][..], &[1, 6, 0, 1]] {
            let config = LoraConfig::new(RANK, ALPHA).with_dtype(DType::F64);
            let case = Case::new(kind, config, counts);
            let alone = case.found::<Ad>(&Mocked, 1);
            for size in [2, 4] {
                check(
                    &case.name(size),
                    DType::F64,
                    &case.found::<Ad>(&Mocked, size),
                    &alone,
                );
            }
        }
    }
}

#[test]
fn each_expert_uses_its_own_slice() {
    // Two experts alike but for B, ten times as large on the second; zero base.
    for size in [1, 2, 4] {
        let topology = etp(size);
        let (a, b) = (noise(1, RANK, D_IN), noise(2, D_OUT, RANK));
        let found = ranks(&mock(topology), topology, |mesh| {
            let (group, device) = (mesh.expert_tp(), Default::default());
            let mut linear: RowLinear<Ad, ExpertTp> = LinearConfig::new("fc", D_IN, D_OUT)
                .with_experts(0..2)
                .with_dtype(DType::F64)
                .init(group, |_, _, _| 0.0, &device)
                .unwrap();
            let config = LoraConfig::new(RANK, 4.0).with_dtype(DType::F64);
            let lora = linear.adapt("fc", &config, &device).unwrap();
            let b = Matrix::stack(&[b.clone(), b.scaled(10.0)]).to_f32();
            let a = Matrix::stack(&[a.clone(), a.clone()]).to_f32();
            lora.load(&a, &b, &device).unwrap();
            let x = noise(3, 3, D_IN);
            let x = Matrix::stack(&[x.clone(), x]);
            let x = shard(&x, Axis::Columns, group.rank(), group.size()).tensor(DType::F64);
            let y = linear.forward_suppressed(group.shard(x), &groups(&[3, 3]));
            Matrix::read(y.reduce_from().into_tensor())
        });
        let y = unshard(&found, Axis::Whole);
        let (first, second) = (y.pick_rows(0..3), y.pick_rows(3..6));
        assert!(first.magnitude() > 0.1);
        assert_close("x10", &second, &first.scaled(10.0), DType::F64, REDUCTION);
        assert_far("the same slice for both", &first, &second);
    }
}

// ---- the grouped product alone -----------------------------------------------------------------

const LOSS: [u64; 2] = [21, 22];

fn stacked<B: GroupedBackend>(experts: &[Matrix], dtype: DType) -> Tensor<B, 3> {
    let [rows, columns] = [experts[0].rows, experts[0].columns];
    let stack = Matrix::stack(experts).tensor::<B>(dtype);
    stack.reshape([experts.len(), rows, columns])
}

fn unstacked<B: GroupedBackend>(tensor: Tensor<B, 3>) -> Matrix {
    let [experts, rows, columns] = tensor.dims();
    Matrix::read(tensor.reshape([experts * rows, columns]))
}

#[test]
fn grouped_matmul_and_its_gradients_are_those_of_loops_and_of_central_differences() {
    for counts in COUNTS {
        for dtype in [DType::F32, DType::F64] {
            let groups = groups(counts);
            let (rows, experts) = (groups.rows(), groups.experts());
            let (x, g) = (noise(LOSS[0], rows, 3), noise(LOSS[1], rows, 5));
            let w: Vec<_> = (0..experts).map(|e| noise(30 + e as u64, 5, 3)).collect();

            let tensor = x.tensor::<Ad>(dtype).require_grad();
            let weight = stacked::<Ad>(&w, dtype).require_grad();
            let y = grouped_matmul(tensor.clone(), weight.clone(), &groups);
            let grads = (y.clone() * g.tensor(dtype)).sum().backward();

            let of = |e: usize| (x.pick_rows(groups.range(e)), g.pick_rows(groups.range(e)));
            let each = |f: &dyn Fn(usize) -> Matrix| {
                Matrix::stack(&(0..experts).map(f).collect::<Vec<_>>())
            };
            let close = |what: &str, found: Matrix, expected: Matrix| {
                let name = format!("grouped_matmul {counts:?}: {what}");
                assert_close(&name, &found, &expected, dtype, 8);
            };
            close(
                "y",
                Matrix::read(y),
                each(&|e| of(e).0.times(&w[e].transposed())),
            );
            let dx = Matrix::read(tensor.grad(&grads).unwrap());
            close("dx", dx.clone(), each(&|e| of(e).1.times(&w[e])));
            let dw = unstacked(weight.grad(&grads).unwrap());
            close(
                "dw",
                dw.clone(),
                each(&|e| of(e).1.transposed().times(&of(e).0)),
            );

            if dtype == DType::F64 {
                let loss = |x: &Matrix, w: Tensor<Flex, 3>| {
                    let y = grouped_matmul(x.tensor::<Flex>(dtype), w, &groups);
                    Matrix::read(y).dot(&g)
                };
                let by_x = central_differences(&x, |x| loss(x, stacked(&w, dtype)));
                let by_w = central_differences(&Matrix::stack(&w), |w| {
                    loss(&x, w.tensor::<Flex>(dtype).reshape([experts, 5, 3]))
                });
                for (found, expected) in [(dx, by_x), (dw, by_w)] {
                    let error = found.zip(&expected, |a, b| a - b).magnitude();
                    assert!(error < 1e-8, "{counts:?}: {error:.1e}");
                }
            }
        }
    }
}

#[test]
fn the_backward_of_grouped_matmul_is_differentiable_itself() {
    type Twice = Autodiff<Autodiff<Flex>>;
    let (groups, dtype) = (groups(&[2, 0, 3]), DType::F64);
    let (x, g, u) = (noise(1, 5, 3), noise(2, 5, 4), noise(3, 5, 3));
    let w: Vec<_> = (0..3).map(|e| noise(10 + e, 4, 3)).collect();
    let v: Vec<_> = (0..3).map(|e| noise(20 + e, 4, 3)).collect();

    let x_once = x.tensor::<Ad>(dtype).require_grad();
    let w_once = stacked::<Ad>(&w, dtype).require_grad();
    let x_twice = Tensor::<Twice, 2>::from_inner(x_once.clone()).require_grad();
    let w_twice = Tensor::<Twice, 3>::from_inner(w_once.clone()).require_grad();
    let y = grouped_matmul(x_twice.clone(), w_twice.clone(), &groups);
    let grads = (y * g.tensor(dtype)).sum().backward();
    let dx: Tensor<Ad, 2> = x_twice.grad(&grads).unwrap();
    let dw: Tensor<Ad, 3> = w_twice.grad(&grads).unwrap();
    // <dx, u> + <dw, v> with dx_e = g_e w_e and dw_e = g_e^T x_e.
    let second = (dx * u.tensor(dtype)).sum() + (dw * stacked(&v, dtype)).sum();
    let grads = second.backward();

    let part = |full: &Matrix, e: usize| full.pick_rows(groups.range(e));
    let by_w: Vec<_> = (0..3)
        .map(|e| part(&g, e).transposed().times(&part(&u, e)))
        .collect();
    let by_x: Vec<_> = (0..3).map(|e| part(&g, e).times(&v[e])).collect();
    let found = Matrix::read(x_once.grad(&grads).unwrap());
    assert_close("by x", &found, &Matrix::stack(&by_x), dtype, 8);
    let found = unstacked(w_once.grad(&grads).unwrap());
    assert_close("by w", &found, &Matrix::stack(&by_w), dtype, 8);
}

#[test]
fn a_transposed_weight_gradient_is_seen() {
    let (x, g) = (noise(1, 4, 5), noise(2, 4, 5));
    let right = g.transposed().times(&x);
    assert_far("x^T g for g^T x", &x.transposed().times(&g), &right);
}

// ---- row counts that do not fit ----------------------------------------------------------------

#[test]
fn a_buffer_with_more_rows_than_counts_is_refused_with_both_numbers() {
    let error = RowGroups::new(&[3, 2], 8).unwrap_err().to_string();
    assert_eq!(
        error,
        "expert row counts [3, 2] sum to 5, the activation has 8 rows (rows at the end that belong to no expert are given with `RowGroups::padded`)"
    );
    for (counts, rows) in [
        (&[3, 2][..], 4),
        (&[], 1),
        (&[0, 0], 1),
        (&[usize::MAX, 2], 1),
    ] {
        let error = RowGroups::new(counts, rows).unwrap_err().to_string();
        assert!(error.contains(&format!("has {rows} rows")), "{error}");
    }
    assert_eq!(RowGroups::new(&[], 0).unwrap().experts(), 0);
}

#[test]
fn padding_rows_of_nan_are_refused_by_the_product_and_do_not_matter_once_sliced_off() {
    let groups = groups(&[3, 2]);
    let x = Matrix::build(8, 3, |i, j| if i < 5 { (i + j) as f64 } else { f64::NAN });
    let w: Vec<_> = (0..2).map(|e| noise(e, 4, 3)).collect();
    let message = panic_message(|| {
        grouped_matmul(x.tensor::<Ad>(DType::F32), stacked(&w, DType::F32), &groups)
    });
    assert_eq!(
        message,
        "grouped_matmul: x [8, 3] and w [2, 4, 3] do not fit 5 rows over 2 experts"
    );

    let tensor = x.tensor::<Ad>(DType::F32).require_grad();
    let y = grouped_matmul(
        tensor.clone().narrow(0, 0, 5),
        stacked(&w, DType::F32),
        &groups,
    );
    let grads = y.clone().sum().backward();
    let expected = Matrix::stack(&[
        x.pick_rows(0..3).times(&w[0].transposed()),
        x.pick_rows(3..5).times(&w[1].transposed()),
    ]);
    assert_close("sliced", &Matrix::read(y), &expected, DType::F32, 3);
    let dx = Matrix::read(tensor.grad(&grads).unwrap());
    assert_eq!(dx.pick_rows(5..8), Matrix::zeros(3, 3));
    assert!(dx.magnitude().is_finite());
}

#[test]
fn a_product_of_other_experts_or_columns_names_both_sides() {
    let w: Vec<_> = (0..2).map(|e| noise(e, 4, 3)).collect();
    let product = |columns, counts: &[usize]| {
        let x = Matrix::zeros(5, columns).tensor::<Ad>(DType::F32);
        panic_message(|| grouped_matmul(x, stacked(&w, DType::F32), &groups(counts)))
    };
    assert_eq!(
        product(3, &[3, 1, 1]),
        "grouped_matmul: x [5, 3] and w [2, 4, 3] do not fit 5 rows over 3 experts"
    );
    assert_eq!(
        product(4, &[3, 2]),
        "grouped_matmul: x [5, 4] and w [2, 4, 3] do not fit 5 rows over 2 experts"
    );
}

#[test]
fn gate_and_up_of_the_mlp_name_their_targets() {
    // The kinds above are the MLP's own: one target for both, or one each.
    let topology = etp(1);
    let targets = ranks(&mock(topology), topology, |mesh| {
        let weights = moe_lora_experts::MlpWeights {
            gate: &[0.0; 4],
            up: &[0.0; 4],
            down: &[0.0; 4],
            biases: None,
        };
        let mlp = moe_lora_experts::MlpConfig::new("mlp", 2, 2)
            .init(weights, mesh.expert_tp(), &Default::default())
            .unwrap();
        let linears = mlp.linears().into_iter();
        let targets = linears.flat_map(|linear| linear.targets());
        targets.map(String::from).collect::<Vec<_>>()
    });
    let names = ["gate_up_proj", "gate_proj", "up_proj", "down_proj"];
    assert_eq!(targets[0], names.map(|name| format!("mlp.{name}")));
}
