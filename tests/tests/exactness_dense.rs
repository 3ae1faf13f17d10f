//! Dense linears, the SwiGLU MLP and shared experts over the dense tensor parallel group: output
//! and every gradient equal those of one device with the adapter folded into the weight.
//!
//! There is one loss, `<y, G>`. Where `y` is replicated every rank runs backward on its own copy
//! of it, where `y` is sharded on its own slice.

use burn::module::Param;
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Activation, ColumnLinear, Linear, LinearConfig, Lora, LoraConfig, Placement, ReplicatedLinear,
    RowLinear, TrainedWeight,
};
use moe_lora_experts::{GateUpTargets, MlpConfig, SharedExperts};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{
    CollectiveOp, GroupKind, GroupName, Mesh, MockWorld, Partial, Topology, TopologyConfig, Tp,
    range_of,
};
use moe_lora_testkit::{
    Ad, Axis, Matrix, MlpCase, MlpValues, assert_close, assert_far, gradient, mock, noise, oracle,
    ranks, relative_error, scale, shard, unshard,
};

const TOKENS: usize = 6;
const D_IN: usize = 8;
const D_OUT: usize = 12;
const RANK: usize = 4;
/// No power of two, so that the scale rounds.
const ALPHA: f64 = 5.3;

fn tp(size: usize) -> Topology {
    TopologyConfig::new(size).with_tp(size).init().unwrap()
}

/// Tokens of each rank where they are sharded: unequal, and none on one of four.
fn sizes(ranks: usize) -> Vec<usize> {
    match ranks {
        1 => vec![TOKENS],
        2 => vec![4, 2],
        _ => vec![3, 0, 2, 1],
    }
}

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

// ---- linears -----------------------------------------------------------------------------------

/// A linear with a bias and an adapter, its input and the cotangent of its output, and what one device makes
/// of them.
struct Case {
    x: Matrix,
    g: Matrix,
    linear: oracle::Linear,
    y: Matrix,
    grads: oracle::LinearGrads,
    config: LoraConfig,
}

/// What one rank made of them: output, input gradient, gradients of `A` and `B`.
struct Found {
    y: Matrix,
    dx: Matrix,
    factors: [Matrix; 2],
}

impl Case {
    fn new(config: LoraConfig) -> Self {
        let (x, g) = (noise(1, TOKENS, D_IN), noise(2, TOKENS, D_OUT));
        let adapter = oracle::Lora {
            a: noise(3, RANK, D_IN),
            b: noise(4, D_OUT, RANK),
            scale: scale(&config),
            silu: config.activation == Activation::Silu,
            first_row: 0,
        };
        let linear =
            oracle::Linear::new(noise(5, D_OUT, D_IN), vec![adapter]).with_bias(noise(6, 1, D_OUT));
        Self {
            y: linear.forward(&x),
            grads: linear.backward(&x, &g),
            x,
            g,
            linear,
            config,
        }
    }

    /// The linear without its adapter.
    fn base<P: Placement>(&self, mesh: &Mesh<Ad>) -> Linear<Ad, Tp, P> {
        let device = Default::default();
        let weight = |_, row, column| self.linear.weight().at(row, column) as f32;
        let bias = |_, row| self.linear.bias().unwrap().at(0, row) as f32;
        LinearConfig::new("fc", D_IN, D_OUT)
            .with_dtype(self.config.dtype)
            .init(mesh.tp(), weight, &device)
            .and_then(|linear| linear.with_bias(bias, &device))
            .unwrap()
    }

    fn load<G: GroupKind, P: Placement>(&self, lora: &mut Lora<Ad, G, P>) {
        let oracle::Lora { a, b, .. } = &self.linear.loras()[0];
        lora.load(&a.to_f32(), &b.to_f32(), &Default::default())
            .unwrap();
    }

    /// Backward of `<y, g>` with this rank's `g`.
    fn finish(
        &self,
        x: &Tensor<Ad, 2>,
        y: Tensor<Ad, 2>,
        g: &Matrix,
        factors: [TrainedWeight<'_, Ad>; 2],
    ) -> Found {
        let grads = (y.clone() * g.tensor(self.config.dtype)).sum().backward();
        Found {
            y: Matrix::read(y),
            dx: Matrix::read(x.grad(&grads).unwrap()),
            factors: factors.map(|factor| gradient(factor.weight, &grads).remove(0)),
        }
    }

    fn column(&self, mesh: &Mesh<Ad>) -> Found {
        let (group, device) = (mesh.tp(), Default::default());
        let mut linear: ColumnLinear<Ad, Tp> = self.base(mesh);
        self.load(linear.adapt("fc", &self.config, &device).unwrap());
        let x = self.x.tensor(self.config.dtype).require_grad();
        let input = group.replicated(x.clone()).copy_to();
        let y = linear.forward(input, &RowGroups::whole(TOKENS));
        let g = shard(&self.g, Axis::Columns, group.rank(), group.size());
        let factors = linear.adapters[0].trained_weights();
        self.finish(&x, y.into_tensor(), &g, factors)
    }

    fn row(&self, mesh: &Mesh<Ad>, sum: Sum) -> Found {
        let (group, device) = (mesh.tp(), Default::default());
        let mut linear: RowLinear<Ad, Tp> = self.base(mesh);
        self.load(linear.adapt("fc", &self.config, &device).unwrap());
        let x = shard(&self.x, Axis::Columns, group.rank(), group.size());
        let x = x.tensor(self.config.dtype).require_grad();
        let (input, rows) = (group.shard(x.clone()), RowGroups::whole(TOKENS));
        let sizes = sizes(group.size());
        let (y, g) = match sum {
            Sum::Here => (linear.forward(input, &rows).into_tensor(), self.g.clone()),
            Sum::ByTheCaller => {
                let term = linear.forward_suppressed(input, &rows);
                (term.reduce_from().into_tensor(), self.g.clone())
            }
            Sum::OverTokens => {
                let y = linear.forward_sequence(input, &rows, &sizes);
                let g = self.g.pick_rows(range_of(&sizes, group.rank()));
                (y.into_tensor(), g)
            }
        };
        let factors = linear.adapters[0].trained_weights();
        self.finish(&x, y, &g, factors)
    }

    fn replicated(&self, mesh: &Mesh<Ad>) -> Found {
        let (group, device) = (mesh.tp(), Default::default());
        let mut linear: ReplicatedLinear<Ad, Tp> = self.base(mesh);
        self.load(linear.adapt("fc", &self.config, &device).unwrap());
        let x = self.x.tensor(self.config.dtype).require_grad();
        let y = linear.forward(group.replicated(x.clone()), &RowGroups::whole(TOKENS));
        let factors = linear.adapters[0].trained_weights();
        self.finish(&x, y.into_tensor(), &self.g, factors)
    }

    /// Compares what the ranks found, brought together along the given axes.
    fn check(&self, name: &str, found: &[Found], axes: [Axis; 4]) {
        let [y, dx, da, db] = axes;
        let [expected_a, expected_b] = &self.grads.factors[0];
        for (what, parts, axis, expected, reduction) in [
            ("y", parts(found, |f| &f.y), y, &self.y, D_IN + RANK),
            (
                "dx",
                parts(found, |f| &f.dx),
                dx,
                &self.grads.dx,
                D_OUT + RANK,
            ),
            (
                "dA",
                parts(found, |f| &f.factors[0]),
                da,
                expected_a,
                TOKENS + D_OUT,
            ),
            (
                "dB",
                parts(found, |f| &f.factors[1]),
                db,
                expected_b,
                TOKENS + D_IN,
            ),
        ] {
            let name = format!(
                "{name} tp={} {:?} rslora={}: {what}",
                found.len(),
                self.config.activation,
                self.config.rslora
            );
            let joined = unshard(&parts, axis);
            assert_close(&name, &joined, expected, self.config.dtype, reduction);
        }
    }
}

fn parts(found: &[Found], of: impl Fn(&Found) -> &Matrix) -> Vec<Matrix> {
    found.iter().map(|found| of(found).clone()).collect()
}

/// How a row-parallel linear's terms come together.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sum {
    Here,
    ByTheCaller,
    OverTokens,
}

const COLUMN_AXES: [Axis; 4] = [Axis::Columns, Axis::Whole, Axis::Rows(1), Axis::Rows(1)];

fn row_axes(sum: Sum) -> [Axis; 4] {
    let y = match sum {
        Sum::OverTokens => Axis::Tokens,
        _ => Axis::Whole,
    };
    [y, Axis::Columns, Axis::Columns, Axis::Rows(1)]
}

#[test]
fn column_parallel_linear_equals_the_folded_weight() {
    for (size, config) in grid() {
        let case = Case::new(config);
        let found = ranks(&mock(tp(size)), tp(size), |mesh| case.column(&mesh));
        case.check("column", &found, COLUMN_AXES);
    }
}

#[test]
fn row_parallel_linear_equals_the_folded_weight_summed_suppressed_and_sequence_parallel() {
    for (size, config) in grid() {
        let case = Case::new(config);
        for sum in [Sum::Here, Sum::ByTheCaller, Sum::OverTokens] {
            let found = ranks(&mock(tp(size)), tp(size), |mesh| case.row(&mesh, sum));
            case.check(&format!("row {sum:?}"), &found, row_axes(sum));
        }
    }
}

#[test]
fn replicated_linear_equals_the_folded_weight_on_every_rank() {
    for (size, config) in grid() {
        let case = Case::new(config);
        let found = ranks(&mock(tp(size)), tp(size), |mesh| case.replicated(&mesh));
        case.check("replicated", &found, [Axis::Whole; 4]);
    }
}

#[test]
fn exchanged_shards_a_doubled_scale_and_a_missing_sum_are_seen() {
    let config = LoraConfig::new(RANK, ALPHA).with_dtype(DType::F64);
    let case = Case::new(config);
    let mut found = ranks(&mock(tp(2)), tp(2), |mesh| case.column(&mesh));
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
        let mut linear: RowLinear<Ad, Tp> = case.base(&mesh);
        case.load(linear.adapt("fc", &case.config, &device).unwrap());
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
            None => case.column(&mesh),
            Some(sum) => case.row(&mesh, sum),
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
        (AllReduce, wide_in),
    ];
    assert_eq!(calls(2, None), column);
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

const HIDDEN: usize = 8;
const INTERMEDIATE: usize = 12;
/// Additions behind a result of the whole MLP.
const MLP_REDUCTION: usize = HIDDEN + INTERMEDIATE + 2 * RANK + TOKENS;

/// How the shared experts' sum is placed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Ordinary,
    Overlapped,
    SequenceParallel,
}

const WAYS: [Way; 3] = [Way::Ordinary, Way::Overlapped, Way::SequenceParallel];

/// Output, input gradient and gradients of all factors of the shared experts on one rank.
fn shared_rank(
    case: &MlpCase,
    mlp: &oracle::Mlp,
    gate: Option<&Matrix>,
    mesh: &Mesh<Ad>,
    way: Way,
) -> Vec<Matrix> {
    let (group, device, dtype) = (mesh.tp(), Default::default(), case.config.dtype);
    let mlp = std::slice::from_ref(mlp);
    let mut shared = SharedExperts {
        mlp: MlpConfig::new("shared", HIDDEN, INTERMEDIATE)
            .with_dtype(dtype)
            .init(MlpValues::of(mlp).weights(), group, &device)
            .unwrap(),
        gate: gate.map(|gate| Param::from_tensor(gate.tensor(dtype)).set_require_grad(false)),
    };
    case.adapt(&mut shared.mlp, mlp);
    let (x, g) = data();
    let sizes = sizes(group.size());
    let own = match way {
        Way::SequenceParallel => range_of(&sizes, group.rank()),
        _ => 0..TOKENS,
    };
    let (x, g) = (x.pick_rows(own.clone()), g.pick_rows(own));
    let x: Tensor<Ad, 2> = x.tensor(dtype).require_grad();
    let y = match way {
        Way::Ordinary => shared.forward(group.replicated(x.clone())).into_tensor(),
        Way::Overlapped => {
            let term = shared.forward_overlapped(group.replicated(x.clone()).copy_to());
            term.reduce_from().into_tensor()
        }
        Way::SequenceParallel => {
            let x = group.shard_tokens(x.clone(), &sizes);
            shared.forward_sequence(x).into_tensor()
        }
    };
    let grads = (y.clone() * g.tensor(dtype)).sum().backward();
    let weights = shared.mlp.trained_weights();
    let mut results = vec![Matrix::read(y), Matrix::read(x.grad(&grads).unwrap())];
    results.extend(weights.iter().map(|w| gradient(w.weight, &grads).remove(0)));
    results
}

fn data() -> (Matrix, Matrix) {
    (noise(7, TOKENS, HIDDEN), noise(8, TOKENS, HIDDEN))
}

/// The results of all ranks brought together: output, input gradient, gradients of all factors.
fn shared_results(
    case: &MlpCase,
    mlp: &oracle::Mlp,
    gate: Option<&Matrix>,
    size: usize,
    way: Way,
) -> Vec<Matrix> {
    let found = ranks(&mock(tp(size)), tp(size), |mesh| {
        shared_rank(case, mlp, gate, &mesh, way)
    });
    let tokens = match way {
        Way::SequenceParallel => Axis::Tokens,
        _ => Axis::Whole,
    };
    let axes = [vec![tokens; 2], case.axes()].concat();
    axes.into_iter()
        .enumerate()
        .map(|(k, axis)| {
            let parts: Vec<Matrix> = found.iter().map(|found| found[k].clone()).collect();
            unshard(&parts, axis)
        })
        .collect()
}

/// The same of one device.
fn shared_oracle(mlp: &oracle::Mlp, gate: Option<&Matrix>) -> Vec<Matrix> {
    let (x, g) = data();
    // A layer without experts of its own.
    let router = Matrix::zeros(0, HIDDEN);
    let layer = oracle::Moe {
        shared: Some(oracle::Shared {
            mlp: mlp.clone(),
            gate: gate.cloned(),
        }),
        ..oracle::Moe::new(router, oracle::Score::Softmax, 0, Vec::new())
    };
    let grads = layer.backward(&x, &g);
    let mut expected = vec![layer.forward(&x), grads.dx];
    expected.extend(grads.shared.into_iter().flatten());
    expected
}

fn mlp_case(gate_up: GateUpTargets, config: LoraConfig) -> MlpCase {
    MlpCase::new([HIDDEN, INTERMEDIATE, 1], gate_up, config)
}

#[test]
fn shared_experts_equal_the_folded_weights_gated_or_not_ordinary_overlapped_and_sequence_parallel()
{
    for (size, config) in grid() {
        for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
            let case = mlp_case(gate_up, config);
            let mlp = case.oracle(9).remove(0);
            for gate in [None, Some(noise(10, 1, HIDDEN))] {
                let gate = gate.as_ref();
                let expected = shared_oracle(&mlp, gate);
                // Output, input gradient and gradients of the factors by way of summing.
                let found = WAYS.map(|way| shared_results(&case, &mlp, gate, size, way));
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
fn overlap_and_sequence_parallelism_change_no_result_of_a_shared_expert_at_tp_2() {
    let case = mlp_case(GateUpTargets::Fused, LoraConfig::new(RANK, ALPHA));
    let mlp = case.oracle(9).remove(0);
    let [ordinary, overlapped, sequence] =
        WAYS.map(|way| shared_results(&case, &mlp, None, 2, way));
    for (k, ordinary) in ordinary.iter().enumerate() {
        for other in [&overlapped[k], &sequence[k]] {
            let error = relative_error(other, ordinary);
            assert!(error <= 1e-6, "result {k} differs by {error:.1e}");
        }
    }

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
            let mut linear: RowLinear<Ad, Tp> = case.base(&mesh);
            case.load(linear.adapt("fc", &case.config, &device).unwrap());
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
