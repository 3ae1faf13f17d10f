//! Dense linears, the SwiGLU MLP and shared experts over the dense tensor parallel group: output
//! and every gradient equal those of one device with the adapter folded into the weight.
//!
//! There is one loss, `<y, G>`. Where `y` is replicated every rank runs backward on its own copy
//! of it, where `y` is sharded on its own slice.

use burn::tensor::DType;
use moe_lora_adapters::{Activation, ColumnLinear, Dropout, LinearConfig, LoraConfig, RowLinear};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{CollectiveOp, GroupName, MockWorld, Partial, Tp, range_of};
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Matrix, Mocked, assert_close, assert_far, mock, noise, oracle, ranks,
    relative_error, scale, shard, unshard,
};
use moe_lora_tests::dense::{
    ALPHA, COLUMN_AXES, COLUMN_SEQUENCE_AXES, Case, D_IN, D_OUT, Found, RANK, Sum, TOKENS, parts,
    row_axes, sizes, tp,
};
use moe_lora_tests::shared_experts::{
    HIDDEN, MLP_REDUCTION, WAYS, data, mlp_case, shared_oracle, shared_results,
};

/// TP, element type and adapter: the plain one, one with a function between its factors, one with
/// another scale.
fn grid() -> Vec<(usize, LoraConfig)> {
    let mut grid = Vec::new();
    for ranks in [1, 2, 4] {
        for dtype in [DType::F32, DType::F64] {
            let config = LoraConfig::new(RANK, ALPHA).with_dtype(dtype);
            grid.push((ranks, config));
            grid.push((ranks, config.with_activation(Activation::Silu)));
            grid.push((ranks, config.with_rslora(true)));
        }
    }
    grid
}

#[test]
fn column_parallel_linear_equals_the_folded_weight_of_whole_and_of_sharded_tokens() {
    for (size, config) in grid() {
        for config in [config, config.with_dropout(Dropout::before_a(0.5))] {
            let case = Case::new(config);
            let found = ranks(&mock(tp(size)), tp(size), |mesh| {
                case.column(&mesh, &Default::default())
            });
            case.check("column", &found, COLUMN_AXES);
            let found = ranks(&mock(tp(size)), tp(size), |mesh| {
                case.column_sequence(&mesh, &Default::default())
            });
            case.check("column of tokens", &found, COLUMN_SEQUENCE_AXES);
        }
    }
}

#[test]
fn a_slice_of_the_gathered_tokens_gradient_is_a_rank_s_own_term_alone() {
    let case = Case::new(LoraConfig::new(RANK, ALPHA).with_dtype(DType::F64));
    // The gather that hands its cotangent on as a slice, in place of the reduce-scatter.
    let found = ranks(&mock(tp(2)), tp(2), |mesh| {
        let (group, device) = (mesh.tp(), Default::default());
        let mut linear: ColumnLinear<Ad, Tp> = case.base(&mesh, &device);
        case.load(linear.adapt("fc", &case.config, &device).unwrap(), &device);
        let x = case.x.pick_rows(range_of(&sizes(2), group.rank()));
        let x = x.tensor::<Ad>(DType::F64).require_grad();
        let gathered = group.shard_tokens(x.clone(), &sizes(2)).gather_from();
        let input = group.fanout(gathered.into_tensor());
        let y = linear.forward(input, &RowGroups::whole(TOKENS));
        let g = shard(&case.g, Axis::Columns, group.rank(), 2);
        let factors = linear.adapters[0].trained_weights();
        case.finish(&x, y.into_tensor(), &g, factors)
    });
    let y = unshard(&parts(&found, |f| &f.y), Axis::Columns);
    assert_close("y", &y, &case.y, DType::F64, D_IN + RANK);
    let dx = unshard(&parts(&found, |f| &f.dx), Axis::Tokens);
    assert_far("dx", &dx, &case.grads.dx);
}

#[test]
fn row_parallel_linear_equals_the_folded_weight_summed_suppressed_and_sequence_parallel() {
    for (size, config) in grid() {
        let case = Case::new(config);
        for sum in [Sum::Here, Sum::ByTheCaller, Sum::OverTokens] {
            let found = ranks(&mock(tp(size)), tp(size), |mesh| {
                case.row(&mesh, &Default::default(), sum)
            });
            case.check(&format!("row {sum:?}"), &found, row_axes(sum));
        }
    }
}

#[test]
fn replicated_linear_equals_the_folded_weight_on_every_rank() {
    for (size, config) in grid() {
        let case = Case::new(config);
        let found = ranks(&mock(tp(size)), tp(size), |mesh| {
            case.replicated(&mesh, &Default::default())
        });
        case.check("replicated", &found, [Axis::Whole; 4]);
    }
}

#[test]
fn exchanged_shards_a_doubled_scale_and_a_missing_sum_are_seen() {
    let config = LoraConfig::new(RANK, ALPHA).with_dtype(DType::F64);
    let case = Case::new(config);
    let mut found = ranks(&mock(tp(2)), tp(2), |mesh| {
        case.column(&mesh, &Default::default())
    });
    found.reverse();
    for (name, of, axis, expected) in [
        ("y", 0, Axis::Columns, &case.y),
        ("dA", 1, Axis::Rows(1), &case.grads.factors[0][0]),
        ("dB", 2, Axis::Rows(1), &case.grads.factors[0][1]),
    ] {
        let parts = parts(&found, |f| match of {
            0 => &f.y,
            1 => &f.factors[0],
            _ => &f.factors[1],
        });
        assert_far(name, &unshard(&parts, axis), expected);
    }

    // The scale applied a second time, or not at all.
    let bias = case.linear.bias().unwrap();
    let base = oracle::Linear::new(case.linear.weight().clone(), Vec::new());
    let base = base.with_bias(bias.clone()).forward(&case.x);
    let delta = case.y.zip(&base, |y, base| y - base);
    assert_far(
        "scale twice",
        &base.plus(&delta.scaled(scale(&config))),
        &case.y,
    );
    assert_far(
        "no scale",
        &base.plus(&delta.scaled(1.0 / scale(&config))),
        &case.y,
    );

    // Without copy_to a rank has only its own term of the input's gradient: the shard's.
    let own = oracle::Linear::new(shard(case.linear.folded(), Axis::Rows(1), 0, 2), Vec::new());
    let own = own.backward(&case.x, &shard(&case.g, Axis::Columns, 0, 2));
    assert_far("own term of dx", &own.dx, &case.grads.dx);

    // The terms of a row-parallel output before their sum.
    let term = shard(&case.x, Axis::Columns, 0, 2)
        .times(&shard(case.linear.folded(), Axis::Columns, 0, 2).transposed());
    assert_far("own term of y", &term, &case.y);
}

#[test]
fn a_whole_bias_in_each_rank_s_term_is_seen_and_a_bias_that_cannot_be_cut_refused() {
    let case = Case::new(LoraConfig::new(RANK, ALPHA).with_dtype(DType::F64));
    let bias = case.linear.bias().unwrap();
    let found = ranks(&mock(tp(2)), tp(2), |mesh| {
        let (group, device) = (mesh.tp(), Default::default());
        let mut linear: RowLinear<Ad, Tp> = case.base(&mesh, &device);
        case.load(linear.adapt("fc", &case.config, &device).unwrap(), &device);
        linear.bias = None;
        let x = shard(&case.x, Axis::Columns, group.rank(), 2).tensor(DType::F64);
        let term = linear.forward_suppressed(group.shard(x), &RowGroups::whole(TOKENS));
        let whole = group.partial(bias.pick_rows([0; TOKENS]).tensor(DType::F64));
        let y = |term: Partial<Ad, Tp>| Matrix::read(term.reduce_from().into_tensor());
        [y(term.clone()), y(term + whole)]
    });
    for y in found.iter().flatten() {
        assert_far("no bias, or one a rank", y, &case.y);
    }

    let messages = ranks(&mock(tp(4)), tp(4), |mesh| {
        let (group, device) = (mesh.tp(), Default::default());
        let linear: RowLinear<Ad, Tp> = LinearConfig::new("fc", 4, 6)
            .init(group, |_, _, _| 0.0, &device)
            .unwrap();
        linear
            .with_bias(|_, _| 0.0, &device)
            .unwrap_err()
            .to_string()
    });
    for message in messages {
        assert_eq!(
            message,
            "fc.bias: d_out=6 is not divisible by tp_size=4 (choose a divisor of 6 as tp_size)"
        );
    }
}

#[test]
fn linears_issue_the_collectives_of_the_table_with_r_columns_and_none_alone() {
    use CollectiveOp::{AllGather, AllReduce, ReduceScatter};
    let case = Case::new(LoraConfig::new(RANK, ALPHA));
    let low_rank = vec![TOKENS, RANK];
    let part = vec![TOKENS, RANK / 2];
    let wide_in = vec![TOKENS, D_IN];
    let wide_out = vec![TOKENS, D_OUT];
    let slice = vec![TOKENS, D_OUT / 2];

    let calls = |size: usize, sum: Option<Sum>| {
        let world = mock(tp(size));
        ranks(&world, tp(size), |mesh| match sum {
            None => case.column(&mesh, &Default::default()),
            Some(sum) => case.row(&mesh, &Default::default(), sum),
        });
        calls_of(&world)
    };
    for sum in [
        None,
        Some(Sum::Here),
        Some(Sum::ByTheCaller),
        Some(Sum::OverTokens),
    ] {
        assert!(calls(1, sum).is_empty(), "{sum:?} over one rank");
    }
    let column = [
        (AllGather, part.clone()),
        (ReduceScatter, low_rank.clone()),
        (AllReduce, wide_in.clone()),
    ];
    assert_eq!(calls(2, None), column);
    // Over tokens, which the gradient of A needs once more.
    let tokens = vec![sizes(2)[0], D_IN];
    let world = mock(tp(2));
    ranks(&world, tp(2), |mesh| {
        case.column_sequence(&mesh, &Default::default())
    });
    let column_sequence = [
        (AllGather, tokens.clone()),
        (AllGather, part.clone()),
        (ReduceScatter, low_rank.clone()),
        (AllGather, tokens),
        (ReduceScatter, wide_in.clone()),
    ];
    assert_eq!(calls_of(&world), column_sequence);
    let here = [
        (AllReduce, wide_out.clone()),
        (AllReduce, low_rank.clone()),
        (AllGather, slice),
        (AllReduce, low_rank.clone()),
    ];
    assert_eq!(calls(2, Some(Sum::Here)), here);
    let suppressed = [
        (AllReduce, low_rank.clone()),
        (AllReduce, wide_out.clone()),
        (AllReduce, low_rank.clone()),
    ];
    assert_eq!(calls(2, Some(Sum::ByTheCaller)), suppressed);
    let sequence = [
        (AllReduce, low_rank.clone()),
        (ReduceScatter, wide_out),
        (AllGather, vec![sizes(2)[0], D_OUT]),
        (AllReduce, low_rank),
    ];
    assert_eq!(calls(2, Some(Sum::OverTokens)), sequence);
}

/// Operations and shapes of rank 0, after a check that the others issued the same operations, all
/// of them on the dense group.
fn calls_of(world: &MockWorld) -> Vec<(CollectiveOp, Vec<usize>)> {
    let operations = |rank| -> Vec<(GroupName, CollectiveOp)> {
        let calls = world.calls(rank).into_iter();
        calls.map(|call| (call.group, call.op)).collect()
    };
    for rank in 0..world.world_size() {
        assert_eq!(operations(rank), operations(0));
    }
    assert!(
        operations(0)
            .iter()
            .all(|(group, _)| *group == GroupName::Tp)
    );
    let calls = world.calls(0).into_iter();
    calls.map(|call| (call.op, call.shape)).collect()
}

// ---- MLP and shared experts --------------------------------------------------------------------

#[test]
fn shared_experts_equal_the_folded_weights_gated_or_not_ordinary_overlapped_and_sequence_parallel()
{
    for (size, config) in grid() {
        for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
            let case = mlp_case(gate_up, config);
            let mlp = case.oracle(9).remove(0);
            for gate in [None, Some(noise(10, 1, HIDDEN))] {
                let gate = gate.as_ref();
                let expected = shared_oracle(&case, &mlp, gate);
                // Output, input gradient and gradients of the factors by way of summing.
                let found =
                    WAYS.map(|way| shared_results::<Ad>(&Mocked, &case, &mlp, gate, size, way));
                for (way, found) in WAYS.iter().zip(&found) {
                    for (k, (found, expected)) in found.iter().zip(&expected).enumerate() {
                        let name = format!(
                            "shared {way:?} tp={size} {gate_up:?} gated={} {:?}: result {k}",
                            gate.is_some(),
                            config.activation
                        );
                        assert_close(&name, found, expected, config.dtype, MLP_REDUCTION);
                    }
                    assert_eq!(found.len(), expected.len());
                }
            }
        }
    }
}

#[test]
fn overlap_and_sequence_parallelism_change_no_result_of_a_shared_expert() {
    let gate = noise(10, 1, HIDDEN);
    for gate_up in [GateUpTargets::Separate, GateUpTargets::Fused] {
        for dora in [false, true] {
            let config = LoraConfig::new(RANK, ALPHA).with_dora(dora);
            let case = mlp_case(gate_up, config);
            let mlp = case.oracle(9).remove(0);
            for (size, gate) in [1, 2, 4]
                .into_iter()
                .flat_map(|p| [(p, None), (p, Some(&gate))])
            {
                let [ordinary, overlapped, sequence] =
                    WAYS.map(|way| shared_results::<Ad>(&Mocked, &case, &mlp, gate, size, way));
                for (k, ordinary) in ordinary.iter().enumerate() {
                    for other in [&overlapped[k], &sequence[k]] {
                        let error = relative_error(other, ordinary);
                        assert!(
                            error <= 1e-6,
                            "tp={size}: result {k} differs by {error:.1e}"
                        );
                    }
                }
            }
        }
    }

    let case = mlp_case(GateUpTargets::Fused, LoraConfig::new(RANK, ALPHA));
    let mlp = case.oracle(9).remove(0);
    let [ordinary, overlapped, _] =
        WAYS.map(|way| shared_results::<Ad>(&Mocked, &case, &mlp, None, 2, way));
    // Negative control: the fault reported for overlap, a delta counted once a rank.
    let delta = |x: &Matrix| {
        let bare = oracle::Linear::new(mlp.down.weight().clone(), Vec::new());
        let hidden = mlp.hidden(x);
        mlp.down
            .forward(&hidden)
            .zip(&bare.forward(&hidden), |y, base| y - base)
    };
    let (x, _) = data();
    assert_far("delta twice", &overlapped[0].plus(&delta(&x)), &ordinary[0]);
}

#[test]
fn a_batch_without_tokens_gives_an_empty_output_and_zero_gradients() {
    for size in [1, 2, 4] {
        let case = Case::new(LoraConfig::new(RANK, ALPHA));
        let found = ranks(&mock(tp(size)), tp(size), |mesh| {
            let (group, device) = (mesh.tp(), Default::default());
            let mut linear: RowLinear<Ad, Tp> = case.base(&mesh, &device);
            case.load(linear.adapt("fc", &case.config, &device).unwrap(), &device);
            let x = Matrix::zeros(0, D_IN / group.size());
            let x = x.tensor(DType::F32).require_grad();
            let sizes = vec![0; group.size()];
            let y = linear.forward_sequence(group.shard(x.clone()), &RowGroups::whole(0), &sizes);
            let factors = linear.adapters[0].trained_weights();
            case.finish(&x, y.into_tensor(), &Matrix::zeros(0, D_OUT), factors)
        });
        for Found { y, dx, factors } in found {
            assert_eq!((y.rows, y.columns), (0, D_OUT));
            assert_eq!((dx.rows, dx.columns), (0, D_IN / size));
            assert_eq!(factors[0], Matrix::zeros(RANK, D_IN / size));
            assert_eq!(factors[1], Matrix::zeros(D_OUT / size, RANK));
        }
    }
}
