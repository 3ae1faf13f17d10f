//! Walks [`TABLE`]: values, adjoints, finite differences, recorded calls and names of its rows.

use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use moe_lora_parallel::region::{EMBED, GATHER_FROM, Movement, REDUCE_FROM, StateName, apply};
use moe_lora_parallel::{
    Call, CollectiveOp, ExpertTp, Fanout, Features, Group, GroupName, Mesh, MockWorld, Partial,
    Replicated, Sharded, TABLE, Tokens, TopologyConfig, Transition, all_to_all, range_of,
};

type Ad = Autodiff<Flex>;
type Matrix = Tensor<Ad, 2>;
type ExpertGroup = Group<Ad, ExpertTp>;

// ---- values on the host ------------------------------------------------------------------------

#[derive(Clone, Debug, PartialEq)]
struct Host {
    shape: [usize; 2],
    values: Vec<f64>,
}

impl Host {
    fn build(shape: [usize; 2], at: impl Fn(usize, usize) -> f64) -> Self {
        let values = (0..shape[0] * shape[1]).map(|i| at(i / shape[1], i % shape[1]));
        Self {
            shape,
            values: values.collect(),
        }
    }

    /// In `[0.5, 1.5)`: all positive, so that in an inner product a missing or doubled term cannot
    /// hide behind a cancellation.
    fn noise(seed: usize, shape: [usize; 2]) -> Self {
        Self::build(shape, |i, j| {
            let key = (seed * 1_000_003 + i * 1_009 + j + 1) as u64;
            let bits = (key.wrapping_mul(0x9E37_79B9_7F4A_7C15)).rotate_left(29);
            let bits = bits.wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 11;
            0.5 + bits as f64 / (1u64 << 53) as f64
        })
    }

    fn at(&self, i: usize, j: usize) -> f64 {
        self.values[i * self.shape[1] + j]
    }

    fn sum(parts: &[Self]) -> Self {
        Self::build(parts[0].shape, |i, j| {
            parts.iter().map(|part| part.at(i, j)).sum()
        })
    }

    fn narrow(&self, dim: usize, range: Range<usize>) -> Self {
        let mut shape = self.shape;
        shape[dim] = range.len();
        Self::build(shape, |i, j| match dim {
            0 => self.at(range.start + i, j),
            _ => self.at(i, range.start + j),
        })
    }

    /// At the offset `range` of zeros of extent `extent`.
    fn embed(&self, dim: usize, range: Range<usize>, extent: usize) -> Self {
        let mut shape = self.shape;
        shape[dim] = extent;
        Self::build(shape, |i, j| {
            let mut at = [i, j];
            if !range.contains(&at[dim]) {
                return 0.0;
            }
            at[dim] -= range.start;
            self.at(at[0], at[1])
        })
    }

    fn cat(parts: &[Self], dim: usize) -> Self {
        let sizes: Vec<_> = parts.iter().map(|part| part.shape[dim]).collect();
        let extent = sizes.iter().sum();
        let parts = parts.iter().enumerate();
        let parts: Vec<_> = parts
            .map(|(k, part)| part.embed(dim, range_of(&sizes, k), extent))
            .collect();
        Self::sum(&parts)
    }

    fn dot(&self, other: &Self) -> f64 {
        assert_eq!(self.shape, other.shape);
        let products = self.values.iter().zip(&other.values);
        products.map(|(a, b)| a * b).sum()
    }

    fn tensor<B: Backend>(&self) -> Tensor<B, 2> {
        let data = TensorData::new(self.values.clone(), self.shape);
        Tensor::from_data(data, (&Default::default(), DType::F64))
    }

    fn read<B: Backend>(tensor: Tensor<B, 2>) -> Self {
        Self {
            shape: tensor.dims(),
            values: tensor.into_data().to_vec().expect("values are f64"),
        }
    }
}

// ---- states ------------------------------------------------------------------------------------

/// How the ranks divide the full value where a state is sharded.
#[derive(Clone, Debug)]
struct Layout {
    dim: usize,
    sizes: Vec<usize>,
}

impl Layout {
    fn ranks(&self) -> usize {
        self.sizes.len()
    }

    fn range(&self, rank: usize) -> Range<usize> {
        range_of(&self.sizes, rank)
    }

    fn extent(&self) -> usize {
        self.sizes.iter().sum()
    }

    fn full(&self) -> [usize; 2] {
        match self.dim {
            0 => [self.extent(), 3],
            _ => [5, self.extent()],
        }
    }

    fn shard(&self, rank: usize) -> [usize; 2] {
        let mut shape = self.full();
        shape[self.dim] = self.sizes[rank];
        shape
    }
}

/// Sizes that ranks can hold: uneven and empty token shards, even and uneven feature shards.
fn layouts(ranks: usize) -> Vec<Layout> {
    [
        (0, [2, 0, 3, 1]),
        (0, [0, 3, 1, 2]),
        (0, [0; 4]),
        (1, [2; 4]),
        (1, [1, 3, 2, 1]),
    ]
    .map(|(dim, sizes)| Layout {
        dim,
        sizes: sizes[..ranks].into(),
    })
    .into()
}

/// What the ranks hold in `state`: of the value, or of the cotangent with the two replicated sides
/// exchanged. Wherever a state lets ranks differ, they do.
fn spread(same: bool, sharded: bool, layout: &Layout, seed: usize) -> Vec<Host> {
    (0..layout.ranks())
        .map(|rank| match (sharded, same) {
            (true, _) => Host::noise(seed + rank, layout.shard(rank)),
            (false, true) => Host::noise(seed, layout.full()),
            (false, false) => Host::noise(seed + rank, layout.full()),
        })
        .collect()
}

fn one_value(state: StateName) -> bool {
    matches!(state, StateName::Replicated | StateName::Fanout)
}

fn one_cotangent(state: StateName) -> bool {
    matches!(state, StateName::Replicated | StateName::Partial)
}

fn value(state: StateName, layout: &Layout, seed: usize) -> Vec<Host> {
    let sharded = state == StateName::Sharded;
    spread(one_value(state), sharded, layout, seed)
}

fn cotangent(state: StateName, layout: &Layout, seed: usize) -> Vec<Host> {
    let sharded = state == StateName::Sharded;
    spread(one_cotangent(state), sharded, layout, seed)
}

/// The one value behind what the ranks hold.
fn logical(state: StateName, same: bool, held: &[Host], layout: &Layout) -> Host {
    match (state, same) {
        (StateName::Sharded, _) => Host::cat(held, layout.dim),
        (_, true) => {
            assert!(held.iter().all(|held_here| *held_here == held[0]));
            held[0].clone()
        }
        (_, false) => Host::sum(held),
    }
}

/// `<value, cotangent>`. Where ranks hold copies of both, they are counted once.
fn pair(state: StateName, values: &[Host], cotangents: &[Host]) -> f64 {
    let ranks = match state {
        StateName::Replicated => 1,
        _ => values.len(),
    };
    let held = values.iter().zip(cotangents).take(ranks);
    held.map(|(v, c)| v.dot(c)).sum()
}

// ---- running on ranks --------------------------------------------------------------------------

/// What every rank of the world ended with.
#[derive(Debug, PartialEq)]
struct Ran {
    value: Vec<Host>,
    gradient: Vec<Host>,
    forward: Vec<Vec<Call>>,
    backward: Vec<Vec<Call>>,
}

/// Runs `f` on `replicas` groups of ranks, whose rank `k` holds `x[k]` and, after it, the cotangent
/// `c[k]`.
fn run_replicas(
    replicas: usize,
    x: &[Host],
    c: &[Host],
    f: impl Fn(&ExpertGroup, Matrix) -> Matrix + Sync,
) -> Ran {
    let ranks = replicas * x.len();
    let topology = TopologyConfig::new(ranks)
        .with_etp(x.len())
        .with_ep(replicas);
    let topology = topology.init().unwrap();
    let world = MockWorld::new(ranks);
    let ran = world.run(|rank| {
        let mesh = Mesh::<Ad>::new(topology, &rank).unwrap();
        let group = mesh.expert_tp();
        let x = x[group.rank()].tensor::<Ad>().require_grad();
        let y = f(group, x.clone());
        let forward = world.calls(rank.rank());
        let c = c[group.rank()].tensor();
        let grads = (y.clone() * c).sum().backward();
        let gradient = x.grad(&grads).expect("x takes part");
        let backward = world.calls(rank.rank()).split_off(forward.len());
        (Host::read(y), Host::read(gradient), forward, backward)
    });
    let mut all = Ran {
        value: Vec::new(),
        gradient: Vec::new(),
        forward: Vec::new(),
        backward: Vec::new(),
    };
    for (value, gradient, forward, backward) in ran.unwrap() {
        all.value.push(value);
        all.gradient.push(gradient);
        all.forward.push(forward);
        all.backward.push(backward);
    }
    all
}

fn run(x: &[Host], c: &[Host], f: impl Fn(&ExpertGroup, Matrix) -> Matrix + Sync) -> Ran {
    run_replicas(1, x, c, f)
}

fn applied(
    row: Transition,
    layout: &Layout,
) -> impl Fn(&ExpertGroup, Matrix) -> Matrix + Sync + use<> {
    let layout = layout.clone();
    move |group, x| apply(x, row, group, layout.dim, &layout.sizes[..].into())
}

/// Every row at every size and layout.
fn walk(ranks: Range<usize>, mut f: impl FnMut(Transition, &Layout)) {
    for ranks in ranks {
        for layout in layouts(ranks) {
            for row in TABLE {
                f(row, &layout);
            }
        }
    }
}

// ---- the table ---------------------------------------------------------------------------------

/// What each row says, by name and for a single process that sees all ranks: the value of `x` and
/// the gradient of `c`.
fn stated(row: Transition, layout: &Layout, x: &[Host], c: &[Host]) -> (Vec<Host>, Vec<Host>) {
    let dim = layout.dim;
    let all = |full: Host| vec![full; layout.ranks()];
    let slice = |full: &Host| -> Vec<_> {
        (0..layout.ranks())
            .map(|k| full.narrow(dim, layout.range(k)))
            .collect()
    };
    let padded = |parts: &[Host]| -> Vec<_> {
        let parts = parts.iter().enumerate();
        parts
            .map(|(k, part)| part.embed(dim, layout.range(k), layout.extent()))
            .collect()
    };
    match row.name {
        "copy_to" => (x.into(), all(Host::sum(c))),
        "reduce_from" => (all(Host::sum(x)), c.into()),
        "reduce_fanout" => (all(Host::sum(x)), all(Host::sum(c))),
        "gather_from" => (all(Host::cat(x, dim)), slice(&c[0])),
        "gather_fanout" => (all(Host::cat(x, dim)), slice(&Host::sum(c))),
        "scatter_to" => (slice(&x[0]), all(Host::cat(c, dim))),
        "slice_fanout" => (slice(&x[0]), padded(c)),
        "embed" => (padded(x), slice(&c[0])),
        "reduce_scatter" => (slice(&Host::sum(x)), all(Host::cat(c, dim))),
        name => panic!("{name} is stated nowhere"),
    }
}

#[test]
fn every_row_does_what_it_says_to_value_and_cotangent() {
    walk(1..5, |row, layout| {
        let x = value(row.from, layout, 10);
        let c = cotangent(row.to, layout, 20);
        let ran = run(&x, &c, applied(row, layout));
        // To the bit: data is moved, or added in rank order.
        let expected = stated(row, layout, &x, &c);
        assert_eq!((ran.value, ran.gradient), expected, "{row:?} {layout:?}");
    });
}

/// `<f(x), c> - <x, f*(c)>` relative to the former, for values and cotangents as the states of the
/// row have them.
fn adjoint_gap(row: Transition, layout: &Layout) -> f64 {
    let x = value(row.from, layout, 30);
    let c = cotangent(row.to, layout, 40);
    let ran = run(&x, &c, applied(row, layout));
    let (there, back) = (
        pair(row.to, &ran.value, &c),
        pair(row.from, &x, &ran.gradient),
    );
    (there - back).abs() / there.abs().max(f64::MIN_POSITIVE)
}

#[test]
fn forward_and_backward_of_every_row_are_adjoint() {
    walk(1..5, |row, layout| {
        let gap = adjoint_gap(row, layout);
        assert!(gap < 1e-12, "{gap:e}: {row:?} {layout:?}");
    });
}

/// The other movement between the same shapes.
fn exchanged(movement: Movement) -> Movement {
    match movement {
        Movement::Identity => Movement::AllReduce,
        Movement::AllReduce => Movement::Identity,
        Movement::AllGather => Movement::Embed,
        Movement::Embed => Movement::AllGather,
        Movement::Slice => Movement::ReduceScatter,
        Movement::ReduceScatter => Movement::Slice,
        Movement::AllToAll | Movement::Pad | Movement::Unpad => panic!("no row has it"),
    }
}

#[test]
fn a_row_with_the_wrong_forward_or_backward_is_not_adjoint() {
    walk(2..5, |row, layout| {
        // Where one rank holds everything, its slice is the whole.
        if layout.sizes.iter().filter(|size| **size > 0).count() < 2 {
            return;
        }
        for wrong in [
            Transition {
                backward: exchanged(row.backward),
                ..row
            },
            Transition {
                forward: exchanged(row.forward),
                ..row
            },
        ] {
            let gap = adjoint_gap(wrong, layout);
            assert!(gap > 0.1, "{gap:e}: {wrong:?} {layout:?}");
        }
    });
}

// ---- finite differences ------------------------------------------------------------------------

/// A rank's part of the loss `sum(w sin(y))`, taken as the state of `y` has it: on a copy of the
/// value where ranks hold copies, on an own part where they do not.
fn local_loss(
    state: StateName,
    group: &ExpertGroup,
    layout: &Layout,
    y: Matrix,
    weights: &[Host],
) -> Tensor<Ad, 1> {
    let y = match state {
        StateName::Partial => applied(REDUCE_FROM, layout)(group, y),
        _ => y,
    };
    (y.sin() * weights[group.rank()].tensor()).sum()
}

/// The one loss, from what every rank has of it.
fn whole_loss(state: StateName, losses: &[f64]) -> f64 {
    match state {
        StateName::Replicated | StateName::Partial => {
            assert!(losses.iter().all(|loss| *loss == losses[0]));
            losses[0]
        }
        StateName::Fanout | StateName::Sharded => losses.iter().sum(),
    }
}

/// The ranks' tensors after a step of `h` on element `(i, j)` of the one value behind them.
fn nudged(
    state: StateName,
    held: &[Host],
    layout: &Layout,
    [i, j]: [usize; 2],
    h: f64,
) -> Vec<Host> {
    let mut held = held.to_vec();
    let ranks = held.len();
    for (rank, held) in held.iter_mut().enumerate() {
        let mut at = [i, j];
        let here = match state {
            StateName::Replicated | StateName::Fanout => true,
            StateName::Partial => rank == (i + j) % ranks,
            StateName::Sharded => {
                let range = layout.range(rank);
                let here = range.contains(&at[layout.dim]);
                at[layout.dim] = at[layout.dim].wrapping_sub(range.start);
                here
            }
        };
        if here {
            let columns = held.shape[1];
            held.values[at[0] * columns + at[1]] += h;
        }
    }
    held
}

/// The largest distance between a gradient through autograd and central differences.
fn difference_gap(row: Transition, layout: &Layout) -> f64 {
    const H: f64 = 1e-5;
    let x = value(row.from, layout, 50);
    let weights = cotangent(row.to, layout, 60);
    let [rows, columns] = layout.full();
    let elements: Vec<_> = (0..rows * columns)
        .map(|i| [i / columns, i % columns])
        .collect();
    let steps: Vec<_> = elements
        .iter()
        .flat_map(|at| [H, -H].map(|h| nudged(row.from, &x, layout, *at, h)))
        .collect();
    let topology = TopologyConfig::new(x.len())
        .with_etp(x.len())
        .init()
        .unwrap();
    let ran = MockWorld::new(x.len()).run(|rank| {
        let mesh = Mesh::<Ad>::new(topology, &rank).unwrap();
        let group = mesh.expert_tp();
        let loss = |x: Matrix| {
            let y = applied(row, layout)(group, x);
            local_loss(row.to, group, layout, y, &weights)
        };
        let me = group.rank();
        let losses: Vec<f64> = steps
            .iter()
            .map(|x| loss(x[me].tensor()).into_data().to_vec::<f64>().unwrap()[0])
            .collect();
        let x = x[me].tensor::<Ad>().require_grad();
        let grads = loss(x.clone()).backward();
        (losses, Host::read(x.grad(&grads).unwrap()))
    });
    let (losses, gradient): (Vec<_>, Vec<_>) = ran.unwrap().into_iter().unzip();
    let gradient = logical(row.from, one_cotangent(row.from), &gradient, layout);
    let whole = |step: usize| {
        let losses: Vec<_> = losses.iter().map(|losses| losses[step]).collect();
        whole_loss(row.to, &losses)
    };
    let gap = elements.iter().enumerate().map(|(e, [i, j])| {
        let slope = (whole(2 * e) - whole(2 * e + 1)) / (2.0 * H);
        (slope - gradient.at(*i, *j)).abs()
    });
    gap.fold(0.0, f64::max)
}

#[test]
fn gradients_are_those_of_finite_differences_of_the_one_loss() {
    walk(1..5, |row, layout| {
        let gap = difference_gap(row, layout);
        assert!(gap < 1e-8, "{gap:e}: {row:?} {layout:?}");
    });
}

#[test]
fn finite_differences_find_a_backward_that_misses_the_other_ranks() {
    let layout = &layouts(3)[3];
    for row in TABLE {
        let wrong = Transition {
            backward: exchanged(row.backward),
            ..row
        };
        // A wrong backward may leave ranks that have to agree with different gradients.
        let found = std::panic::catch_unwind(|| difference_gap(wrong, layout));
        assert!(
            found.is_err() || found.is_ok_and(|gap| gap > 0.01),
            "{row:?}"
        );
    }
}

// ---- calls and names ---------------------------------------------------------------------------

fn recorded(movement: Movement) -> Option<CollectiveOp> {
    match movement {
        Movement::Identity
        | Movement::Slice
        | Movement::Embed
        | Movement::Pad
        | Movement::Unpad => None,
        Movement::AllReduce => Some(CollectiveOp::AllReduce),
        Movement::AllGather => Some(CollectiveOp::AllGather),
        Movement::ReduceScatter => Some(CollectiveOp::ReduceScatter),
        Movement::AllToAll => Some(CollectiveOp::AllToAll),
    }
}

#[test]
fn every_row_issues_the_calls_of_its_movements_on_its_own_group() {
    walk(1..5, |row, layout| {
        let ranks = layout.ranks();
        let x = value(row.from, layout, 70);
        let c = cotangent(row.to, layout, 80);
        // Two groups in one world, so that a call to all ranks is not mistaken for one to a group.
        let ran = run_replicas(2, &x, &c, applied(row, layout));
        for rank in 0..2 * ranks {
            let first = rank / ranks * ranks;
            let expected = |movement, held: &Host| -> Vec<_> {
                let op = recorded(movement).filter(|_| ranks > 1);
                let call = op.map(|op| Call {
                    group: GroupName::ExpertTp,
                    members: (first..first + ranks).collect(),
                    op,
                    shape: held.shape.into(),
                    dtype: Some(DType::F64),
                });
                call.into_iter().collect()
            };
            let forward = expected(row.forward, &x[rank - first]);
            let backward = expected(row.backward, &c[rank - first]);
            assert_eq!(ran.forward[rank], forward, "{row:?} {layout:?} rank {rank}");
            assert_eq!(
                ran.backward[rank], backward,
                "{row:?} {layout:?} rank {rank}"
            );
        }
        assert_eq!(ran.value[..ranks], ran.value[ranks..]);
        assert_eq!(ran.gradient[..ranks], ran.gradient[ranks..]);
    });
}

/// A state's type, with the name that the table has for it.
trait Held {
    const STATE: StateName;
    fn held(self) -> Matrix;
}

macro_rules! held {
    ($($state:ident: $type:ty, $take_out:ident);*) => {$(
        impl Held for $type {
            const STATE: StateName = StateName::$state;
            fn held(self) -> Matrix {
                self.$take_out()
            }
        }
    )*};
}

held!(
    Replicated: Replicated<Ad, ExpertTp>, into_tensor;
    Fanout: Fanout<Ad, ExpertTp>, into_tensor;
    Partial: Partial<Ad, ExpertTp>, into_term;
    Sharded: Sharded<Ad, ExpertTp, Tokens>, into_tensor;
    Sharded: Sharded<Ad, ExpertTp, Features>, into_tensor
);

fn between<F: Held, T: Held>(row: Transition, from: F, method: impl FnOnce(F) -> T) -> Matrix {
    assert_eq!((row.from, row.to), (F::STATE, T::STATE), "{}", row.name);
    method(from).held()
}

/// The method of the row's name.
fn method(row: Transition, layout: &Layout, group: &ExpertGroup, x: Matrix) -> Matrix {
    let sizes = &layout.sizes;
    let (replicated, fanout, partial) = (
        |x| group.replicated(x),
        |x| group.fanout(x),
        |x| group.partial(x),
    );
    let tokens = |x| group.shard_tokens(x, sizes);
    let features = |x| group.shard(x);
    match (row.name, layout.dim) {
        ("copy_to", _) => between(row, replicated(x), |x| x.copy_to()),
        ("reduce_from", _) => between(row, partial(x), |x| x.reduce_from()),
        ("reduce_fanout", _) => between(row, partial(x), |x| x.reduce_fanout()),
        ("gather_from", 0) => between(row, tokens(x), |x| x.gather_from()),
        ("gather_from", _) => between(row, features(x), |x| x.gather_from()),
        ("gather_fanout", 0) => between(row, tokens(x), |x| x.gather_fanout()),
        ("gather_fanout", _) => between(row, features(x), |x| x.gather_fanout()),
        ("scatter_to", 0) => between(row, replicated(x), |x| x.scatter_to::<Tokens>(sizes)),
        ("scatter_to", _) => between(row, replicated(x), |x| x.scatter_to::<Features>(sizes)),
        ("slice_fanout", 0) => between(row, fanout(x), |x| x.slice_fanout::<Tokens>(sizes)),
        ("slice_fanout", _) => between(row, fanout(x), |x| x.slice_fanout::<Features>(sizes)),
        // Rows are not embedded: a base is added to by column.
        ("embed", 0) => applied(row, layout)(group, x),
        ("embed", _) => between(row, features(x), |x| x.embed()),
        ("reduce_scatter", 0) => between(row, partial(x), |x| x.reduce_scatter::<Tokens>(sizes)),
        ("reduce_scatter", _) => between(row, partial(x), |x| x.reduce_scatter::<Features>(sizes)),
        (name, _) => panic!("no state has a method {name}"),
    }
}

#[test]
fn the_methods_of_the_states_are_the_rows_of_their_name() {
    walk(1..5, |row, layout| {
        // Feature shards made by hand are even.
        if layout.dim == 1 && layout.sizes.iter().any(|size| *size != layout.sizes[0]) {
            return;
        }
        let x = value(row.from, layout, 90);
        let c = cotangent(row.to, layout, 100);
        let typed = run(&x, &c, |group, x| method(row, layout, group, x));
        let expected = run(&x, &c, applied(row, layout));
        assert_eq!(typed, expected, "{row:?} {layout:?}");
    });
}

// ---- all_to_all --------------------------------------------------------------------------------

#[test]
fn all_to_all_is_its_own_transpose_at_uneven_counts() {
    let counts: [fn(usize, usize) -> usize; 3] = [
        |_, _| 1,
        |i, j| (2 * i + j) % 3,
        // One rank has everything, the others nothing.
        |i, j| if i == 0 { j + 1 } else { 0 },
    ];
    for ranks in 1..5 {
        for count in counts {
            let send: Vec<Vec<_>> = (0..ranks)
                .map(|i| (0..ranks).map(|j| count(i, j)).collect())
                .collect();
            let recv: Vec<Vec<_>> = (0..ranks)
                .map(|i| (0..ranks).map(|j| count(j, i)).collect())
                .collect();
            let rows = |counts: &[Vec<usize>], seed| -> Vec<_> {
                let counts = counts.iter().enumerate();
                counts
                    .map(|(k, counts)| Host::noise(seed + k, [counts.iter().sum(), 2]))
                    .collect()
            };
            let (x, c) = (rows(&send, 110), rows(&recv, 120));
            let moved = |x: &[Host], send: &[Vec<usize>]| -> Vec<_> {
                let from = |to: usize| {
                    x.iter()
                        .zip(send)
                        .map(move |(x, s)| x.narrow(0, range_of(s, to)))
                };
                (0..ranks)
                    .map(|to| Host::cat(&from(to).collect::<Vec<_>>(), 0))
                    .collect()
            };
            let exchange = |group: &ExpertGroup, x| {
                let me = group.rank();
                all_to_all(x, group, &send[me], &recv[me])
            };
            let ran = run(&x, &c, exchange);
            assert_eq!(ran.value, moved(&x, &send), "{send:?}");
            assert_eq!(ran.gradient, moved(&c, &recv), "{send:?}");
            let (there, back) = (
                pair(StateName::Sharded, &ran.value, &c),
                pair(StateName::Sharded, &x, &ran.gradient),
            );
            assert!((there - back).abs() <= 1e-12 * there, "{send:?}");
            let ops = |calls: &[Vec<Call>]| calls.concat().iter().map(|c| c.op).collect::<Vec<_>>();
            let expected = vec![CollectiveOp::AllToAll; if ranks > 1 { ranks } else { 0 }];
            assert_eq!(ops(&ran.forward), expected);
            assert_eq!(ops(&ran.backward), expected);
            // There and back with the counts exchanged is where it started.
            let back = run(&x, &x, |group, x| {
                let me = group.rank();
                all_to_all(exchange(group, x), group, &recv[me], &send[me])
            });
            assert_eq!((back.value, back.gradient), (x.clone(), x), "{send:?}");
        }
    }
}

// ---- embed into a base -------------------------------------------------------------------------

/// Value, gradient of the base, gradient of the shard, the base read again afterwards, calls.
type Added = (Host, Host, Host, Host, Vec<Call>);

fn add_on_ranks(
    ranks: usize,
    rows: usize,
    f: impl Fn(&ExpertGroup, Matrix, Matrix) -> Matrix + Sync,
) -> Vec<Added> {
    let topology = TopologyConfig::new(ranks).with_etp(ranks).init().unwrap();
    let world = MockWorld::new(ranks);
    let ran = world.run(|rank| {
        let mesh = Mesh::<Ad>::new(topology, &rank).unwrap();
        let me = mesh.expert_tp().rank();
        let leaf = |seed, columns| {
            Host::noise(seed + me, [rows, columns])
                .tensor::<Ad>()
                .require_grad()
        };
        let (base, shard) = (leaf(130, 2 * ranks), leaf(140, 2));
        let y = f(mesh.expert_tp(), base.clone(), shard.clone());
        // Each rank has the same cotangent: the sum of the terms has one gradient.
        let c = Host::noise(150, [rows, 2 * ranks]).tensor();
        let grads = (y.clone() * c).sum().backward();
        (
            Host::read(y),
            Host::read(base.grad(&grads).unwrap()),
            Host::read(shard.grad(&grads).unwrap()),
            Host::read(base),
            world.calls(rank.rank()),
        )
    });
    ran.unwrap()
}

#[test]
fn a_partial_plus_an_embedded_shard_is_the_sum_with_the_zeros_written_down() {
    for (ranks, rows) in [(1, 3), (2, 3), (3, 2), (4, 3), (2, 0)] {
        let plain = add_on_ranks(ranks, rows, |group, base, shard| {
            let zeros = |columns| Host::build([rows, columns], |_, _| 0.0).tensor();
            let (before, after) = (2 * group.rank(), 2 * (ranks - 1 - group.rank()));
            let parts = [(before, None), (2, Some(shard)), (after, None)];
            let parts = parts.into_iter().filter(|(columns, _)| *columns > 0);
            let parts = parts.map(|(columns, part)| part.unwrap_or_else(|| zeros(columns)));
            base + Tensor::cat(parts.collect(), 1)
        });
        for (me, (_, _, _, base, calls)) in plain.iter().enumerate() {
            assert_eq!(*base, Host::noise(130 + me, [rows, 2 * ranks]));
            assert_eq!(calls.len(), 0);
        }
        let base_first = add_on_ranks(ranks, rows, |group, base, shard| {
            (group.partial(base) + group.shard(shard).embed()).into_term()
        });
        assert_eq!(base_first, plain, "{ranks} ranks, {rows} rows");
        let shard_first = add_on_ranks(ranks, rows, |group, base, shard| {
            (group.shard(shard).embed() + group.partial(base)).into_term()
        });
        assert_eq!(shard_first, plain, "{ranks} ranks, {rows} rows");
        let written_down = add_on_ranks(ranks, rows, |group, base, shard| {
            base + group.shard(shard).embed().into_term()
        });
        assert_eq!(written_down, plain, "{ranks} ranks, {rows} rows");
        let two_shards = add_on_ranks(ranks, rows, |group, base, shard| {
            let times = |x: Matrix, factor: f64| group.shard(x * factor).embed();
            (group.partial(base) + (times(shard.clone(), 2.0) + times(shard, -1.0))).into_term()
        });
        assert_eq!(two_shards, plain, "{ranks} ranks, {rows} rows");
    }
}

#[test]
fn embedding_on_every_rank_the_same_offset_misses_the_sum() {
    let terms = |right: bool| {
        let added = add_on_ranks(2, 1, |group, base, shard| {
            let sizes = [2, 2][..].into();
            let own = apply(shard, EMBED, group, 1, &sizes);
            // The old fault: a gathered delta on every rank's term.
            let gathered = |own: Matrix| apply(own, REDUCE_FROM, group, 1, &sizes);
            base * 0.0 + if right { own } else { gathered(own) }
        });
        let terms: Vec<_> = added.into_iter().map(|added| added.0).collect();
        Host::sum(&terms)
    };
    let delta = Host::cat(&[Host::noise(140, [1, 2]), Host::noise(141, [1, 2])], 1);
    assert_eq!(terms(true), delta);
    assert_eq!(terms(false), Host::sum(&[delta.clone(), delta]));
}

// ---- cases -------------------------------------------------------------------------------------

/// 2 and 3 on two ranks, through `f` to `rows` rows `y`, into the losses `weights[k] * sum(y)`.
fn gradients(
    rows: usize,
    weights: [f64; 2],
    f: impl Fn(&ExpertGroup, Matrix) -> Matrix + Sync,
) -> Ran {
    let x = [2.0, 3.0].map(|x| Host::build([1, 1], |_, _| x));
    let c = weights.map(|weight| Host::build([rows, 1], |_, _| weight));
    run(&x, &c, f)
}

fn numbers(hosts: &[Host]) -> Vec<f64> {
    hosts.iter().flat_map(|host| host.values.clone()).collect()
}

#[test]
fn a_sum_that_each_rank_uses_for_its_own_loss_has_the_sum_of_their_gradients() {
    let reduce_fanout = |group: &ExpertGroup, x| group.partial(x).reduce_fanout().into_tensor();
    let ran = gradients(1, [1.0, 4.0], reduce_fanout);
    assert_eq!(numbers(&ran.value), [5.0, 5.0]);
    assert_eq!(numbers(&ran.gradient), [5.0, 5.0]);
    let two_steps = |group: &ExpertGroup, x| group.partial(x).reduce_from().copy_to().into_tensor();
    assert_eq!(gradients(1, [1.0, 4.0], two_steps).gradient, ran.gradient);
    // Negative control: with a replicated sum each rank keeps its own term.
    let reduce_from = |group: &ExpertGroup, x| group.partial(x).reduce_from().into_tensor();
    let missing = gradients(1, [1.0, 4.0], reduce_from);
    assert_eq!(numbers(&missing.gradient), [1.0, 4.0]);
}

#[test]
fn a_sum_with_one_replicated_consumer_is_counted_once() {
    let reduce_from = |group: &ExpertGroup, x| group.partial(x).reduce_from().into_tensor();
    let ran = gradients(1, [1.0, 1.0], reduce_from);
    assert_eq!(numbers(&ran.value), [5.0, 5.0]);
    assert_eq!(numbers(&ran.gradient), [1.0, 1.0]);
    // Negative control: the convention of burn's own all_reduce counts both copies.
    let burn = Transition {
        backward: Movement::AllReduce,
        ..REDUCE_FROM
    };
    let doubled = |group: &ExpertGroup, x| apply(x, burn, group, 0, &[].into());
    let ran = gradients(1, [1.0, 1.0], doubled);
    assert_eq!(numbers(&ran.gradient), [2.0, 2.0]);
}

#[test]
fn inputs_gathered_for_every_rank_get_the_gradients_of_every_rank() {
    let fanout =
        |group: &ExpertGroup, x| group.shard_tokens(x, &[1, 1]).gather_fanout().into_tensor();
    let ran = gradients(2, [1.0, 4.0], fanout);
    assert_eq!(numbers(&ran.value), [2.0, 3.0, 2.0, 3.0]);
    assert_eq!(numbers(&ran.gradient), [5.0, 5.0]);
    assert_eq!(ran.backward[0][0].op, CollectiveOp::ReduceScatter);
    // Negative control: a slice of the own gradient is too small.
    let from = |group: &ExpertGroup, x| group.shard_tokens(x, &[1, 1]).gather_from().into_tensor();
    let sliced = gradients(2, [1.0, 4.0], from);
    assert_eq!(numbers(&sliced.gradient), [1.0, 4.0]);
}

#[test]
fn rows_that_are_not_kept_are_gathered_once_more_where_the_backward_pass_needs_them() {
    let squares = |y: Matrix| y.clone() * y.clone() + y.clone() * y;
    let kept = gradients(2, [1.0, 4.0], |group: &ExpertGroup, x| {
        squares(group.shard_tokens(x, &[1, 1]).gather_fanout().into_tensor())
    });
    let again = gradients(2, [1.0, 4.0], |group: &ExpertGroup, x| {
        let x = group.shard_tokens(x, &[1, 1]);
        squares(x.gather_fanout_again().into_tensor())
    });
    assert_eq!(numbers(&again.value), [8.0, 18.0, 8.0, 18.0]);
    assert_eq!(numbers(&again.gradient), [40.0, 60.0]);
    assert_eq!(numbers(&kept.gradient), [40.0, 60.0]);
    use CollectiveOp::{AllGather, ReduceScatter};
    for (ran, expected) in [
        (kept, &[ReduceScatter][..]),
        // Once for both products.
        (again, &[AllGather, ReduceScatter]),
    ] {
        for calls in &ran.backward {
            let ops: Vec<_> = calls.iter().map(|call| call.op).collect();
            assert_eq!(ops, expected);
        }
    }
}

#[test]
fn sizes_that_do_not_fit_name_the_operation_and_the_group() {
    for (row, sizes) in [
        (GATHER_FROM, vec![2, 1]),
        (GATHER_FROM, vec![1]),
        (EMBED, vec![1, 1, 1]),
    ] {
        let x = [Host::noise(1, [1, 1]), Host::noise(2, [1, 1])];
        let layout = Layout { dim: 0, sizes };
        let c = x.clone();
        let result = std::panic::catch_unwind(|| run(&x, &c, applied(row, &layout)));
        let panic = result.expect_err("the sizes do not fit");
        let message = panic.downcast_ref::<String>().expect("a message");
        assert!(message.contains(row.name), "{message}");
        assert!(message.contains("expert_tp["), "{message}");
    }
}
