//! Moves between parallel states: the table, and the autograd pair behind each of its rows.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Slice, Tensor, TensorMetadata, TensorPrimitive};
use burn_autodiff::NodeId;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::retro_forward::RetroForward;
use burn_autodiff::checkpoint::state::BackwardStates;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, binary, unary};

use crate::group::or_raise;
use crate::{Collective, Group, GroupKind, range_of};

/// What the ranks of one group hold of a value and of its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateName {
    /// The same full value; the same full gradient.
    Replicated,
    /// The same full value; each rank holds its own term of the gradient.
    Fanout,
    /// Each rank holds its own term of the value; the same full gradient.
    Partial,
    /// Each rank holds its slice of value and gradient.
    Sharded,
}

/// What happens to a tensor on its way from one state to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Movement {
    /// The tensor as it is.
    Identity,
    /// Sum over the ranks.
    AllReduce,
    /// Concatenation of the ranks' slices.
    AllGather,
    /// The rank's slice of the sum over the ranks.
    ReduceScatter,
    /// The rank's slice, without communication.
    Slice,
    /// The slice at its offset in zeros, without communication.
    Embed,
    /// Rows to and from every rank; its transpose is the same with the counts exchanged.
    AllToAll,
    /// A row of zeros in place of no rows; its transpose is [`Unpad`](Self::Unpad).
    Pad,
    /// No rows in place of that row.
    Unpad,
}

/// One row of [`TABLE`]: an operation between states with both of its directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The operation's name, which is also its method's.
    pub name: &'static str,
    /// State of the input.
    pub from: StateName,
    /// State of the output.
    pub to: StateName,
    /// What the forward pass does to the value.
    pub forward: Movement,
    /// What the backward pass does to the cotangent.
    pub backward: Movement,
}

use Movement::{AllGather, AllReduce, Embed, Identity, ReduceScatter, Slice as Cut};
use StateName::{Fanout, Partial, Replicated, Sharded};

/// Replicated -> Fanout. Forward: none. Backward: all-reduce.
pub const COPY_TO: Transition = row("copy_to", Replicated, Fanout, Identity, AllReduce);
/// Partial -> Replicated. Forward: all-reduce. Backward: none.
pub const REDUCE_FROM: Transition = row("reduce_from", Partial, Replicated, AllReduce, Identity);
/// Partial -> Fanout. Forward: all-reduce. Backward: all-reduce.
pub const REDUCE_FANOUT: Transition = row("reduce_fanout", Partial, Fanout, AllReduce, AllReduce);
/// Sharded -> Replicated. Forward: all-gather. Backward: slice.
pub const GATHER_FROM: Transition = row("gather_from", Sharded, Replicated, AllGather, Cut);
/// Sharded -> Fanout. Forward: all-gather. Backward: reduce-scatter.
pub const GATHER_FANOUT: Transition =
    row("gather_fanout", Sharded, Fanout, AllGather, ReduceScatter);
/// Replicated -> Sharded. Forward: slice. Backward: all-gather.
pub const SCATTER_TO: Transition = row("scatter_to", Replicated, Sharded, Cut, AllGather);
/// Fanout -> Sharded. Forward: slice. Backward: embed in zeros, no communication.
pub const SLICE_FANOUT: Transition = row("slice_fanout", Fanout, Sharded, Cut, Embed);
/// Sharded -> Partial. Forward: embed in zeros, no communication. Backward: slice.
pub const EMBED: Transition = row("embed", Sharded, Partial, Embed, Cut);
/// Partial -> Sharded. Forward: reduce-scatter. Backward: all-gather.
pub const REDUCE_SCATTER: Transition =
    row("reduce_scatter", Partial, Sharded, ReduceScatter, AllGather);

/// Every operation between states. The typed methods of [`crate::state`] run these rows, and the
/// tests walk them.
pub const TABLE: [Transition; 9] = [
    COPY_TO,
    REDUCE_FROM,
    REDUCE_FANOUT,
    GATHER_FROM,
    GATHER_FANOUT,
    SCATTER_TO,
    SLICE_FANOUT,
    EMBED,
    REDUCE_SCATTER,
];

const fn row(
    name: &'static str,
    from: StateName,
    to: StateName,
    forward: Movement,
    backward: Movement,
) -> Transition {
    Transition {
        name,
        from,
        to,
        forward,
        backward,
    }
}

/// A [`Movement`] with its operands, ready to run on a backend without autodiff.
#[derive(Clone)]
pub struct Step<B: Backend> {
    movement: Movement,
    dim: usize,
    sizes: Arc<[usize]>,
    recv: Arc<[usize]>,
    collective: Arc<dyn Collective<B>>,
}

impl<B: Backend> fmt::Debug for Step<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} on {}", self.movement, self.collective.name())
    }
}

impl<B: Backend> Step<B> {
    /// Does it.
    pub(crate) fn run(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let collective = &self.collective;
        match self.movement {
            Movement::Identity => x,
            Movement::AllReduce => or_raise(collective.all_reduce(x)),
            Movement::AllGather => or_raise(collective.all_gather(x, self.dim, &self.sizes)),
            Movement::ReduceScatter => {
                or_raise(collective.reduce_scatter(x, self.dim, &self.sizes))
            }
            Movement::Slice => B::float_slice(x.clone(), &self.place(&x)),
            Movement::Embed => {
                let mut shape = x.shape();
                shape[self.dim] = self.sizes.iter().sum();
                let place = self.place_in(shape.num_dims());
                let zeros = B::float_zeros(shape, &B::float_device(&x), x.dtype().into());
                if x.shape().num_elements() == 0 {
                    return zeros;
                }
                B::float_slice_assign(zeros, &place, x)
            }
            Movement::AllToAll => or_raise(collective.all_to_all(x, &self.sizes, &self.recv)),
            Movement::Pad => {
                let (mut shape, device) = (x.shape(), B::float_device(&x));
                shape[0] = 1;
                B::float_zeros(shape, &device, x.dtype().into())
            }
            Movement::Unpad => {
                let (mut shape, device) = (x.shape(), B::float_device(&x));
                shape[0] = 0;
                B::float_empty(shape, &device, x.dtype().into())
            }
        }
    }

    fn place(&self, x: &FloatTensor<B>) -> Vec<Slice> {
        self.place_in(x.shape().num_dims())
    }

    /// This rank's slice along `dim`, everything along the other dimensions.
    fn place_in(&self, dims: usize) -> Vec<Slice> {
        let mut slices = vec![Slice::full(); dims];
        slices[self.dim] = range_of(&self.sizes, self.collective.rank()).into();
        slices
    }
}

/// A burn backend that communicates: the region operations, differentiable on autodiff backends.
///
/// Implemented for the backends without autodiff that the crate's features name, and for
/// `Autodiff` over any of them with the backward passes of [`TABLE`].
pub trait ParallelBackend: Backend {
    /// The backend that transports see: this one without autodiff.
    type Base: Backend;

    /// Runs `forward` on the value; under autodiff the cotangent runs `backward`.
    fn step(
        x: FloatTensor<Self>,
        forward: &Step<Self::Base>,
        backward: &Step<Self::Base>,
    ) -> FloatTensor<Self>;

    /// As [`step`](Self::step), but under autodiff the result is not kept: where a backward pass needs
    /// it, it runs `forward` again. On all ranks alike, as they have the same graph.
    fn step_again(
        x: FloatTensor<Self>,
        forward: &Step<Self::Base>,
        backward: &Step<Self::Base>,
    ) -> FloatTensor<Self> {
        Self::step(x, forward, backward)
    }

    /// `base` with `shard` added to its columns `columns`, written in place where the backend
    /// allows. Backward: the cotangent for `base`, its columns for `shard`.
    fn add_columns(
        base: FloatTensor<Self>,
        shard: FloatTensor<Self>,
        columns: Range<usize>,
    ) -> FloatTensor<Self> {
        if shard.shape().num_elements() == 0 {
            return base;
        }
        let place = [Slice::full(), columns.into()];
        let sum = Self::float_add(Self::float_slice(base.clone(), &place), shard);
        Self::float_slice_assign(base, &place, sum)
    }
}

#[derive(Debug)]
struct StepBackward;

impl<B: ParallelBackend> Backward<B, 1> for StepBackward {
    type State = [Step<B::Base>; 2];

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [forward, backward] = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::step(grad, &backward, &forward)
        });
    }
}

/// Runs the steps of a node once more in the backward pass.
#[derive(Debug)]
struct Again<B: ParallelBackend> {
    input: NodeId,
    steps: [Step<B::Base>; 2],
}

impl<B: ParallelBackend> RetroForward for Again<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let x = states.get_state::<FloatTensor<B>>(&self.input);
        let [forward, backward] = &self.steps;
        states.save(out_node, B::step(x, forward, backward));
    }
}

#[derive(Debug)]
struct AddColumnsBackward;

impl<B: ParallelBackend> Backward<B, 2> for AddColumnsBackward {
    type State = Range<usize>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let place = [Slice::full(), ops.state.into()];
        binary::<B, _, _>(
            ops.parents,
            ops.node,
            grads,
            |grad| grad,
            |grad| B::float_slice(grad, &place),
        );
    }
}

impl<B: ParallelBackend, C: CheckpointStrategy> ParallelBackend for Autodiff<B, C> {
    type Base = B::Base;

    fn step(
        x: FloatTensor<Self>,
        forward: &Step<Self::Base>,
        backward: &Step<Self::Base>,
    ) -> FloatTensor<Self> {
        // Compute bound: a checkpoint strategy moves no collective. That is for the caller to ask.
        let prepared = StepBackward
            .prepare::<C>([x.node.clone()])
            .compute_bound()
            .stateful();
        let y = B::step(x.primitive, forward, backward);
        match prepared {
            OpsKind::Tracked(prep) => prep.finish([forward.clone(), backward.clone()], y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn step_again(
        x: FloatTensor<Self>,
        forward: &Step<Self::Base>,
        backward: &Step<Self::Base>,
    ) -> FloatTensor<Self> {
        let steps = [forward.clone(), backward.clone()];
        let again = Again::<B> {
            input: x.node.id,
            steps: steps.clone(),
        };
        // Whatever the strategy of the graph: the balanced one does as operations ask.
        let prepared = StepBackward
            .prepare::<BalancedCheckpointing>([x.node.clone()])
            .memory_bound()
            .retro_forward(again)
            .parents([&x])
            .stateful();
        let y = B::step(x.primitive, forward, backward);
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(steps, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn add_columns(
        base: FloatTensor<Self>,
        shard: FloatTensor<Self>,
        columns: Range<usize>,
    ) -> FloatTensor<Self> {
        let prepared = AddColumnsBackward
            .prepare::<C>([base.node.clone(), shard.node.clone()])
            .compute_bound()
            .stateful();
        let y = B::add_columns(base.primitive, shard.primitive, columns.clone());
        match prepared {
            OpsKind::Tracked(prep) => prep.finish(columns, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

fn primitive<B: Backend, const D: usize>(x: Tensor<B, D>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}

fn tensor<B: Backend, const D: usize>(x: FloatTensor<B>) -> Tensor<B, D> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// Runs one row of the table on a rank's tensor. In a group of one, nothing happens.
///
/// `sizes[k]` is the extent of rank `k`'s slice along `dim`; rows without a sharded side ignore
/// both.
///
/// # Panics
///
/// When the sizes do not fit the tensor or the group, or when the transport fails.
pub fn apply<B: ParallelBackend, G: GroupKind, const D: usize>(
    x: Tensor<B, D>,
    transition: Transition,
    group: &Group<B, G>,
    dim: usize,
    sizes: &Arc<[usize]>,
) -> Tensor<B, D> {
    run(x, transition, group, dim, sizes, B::step)
}

/// As [`apply`], but the result is not kept for the backward pass, which runs the row's forward movement
/// again where it needs it. Of an untracked `x` it is kept.
///
/// # Panics
///
/// As [`apply`].
pub fn apply_again<B: ParallelBackend, G: GroupKind, const D: usize>(
    x: Tensor<B, D>,
    transition: Transition,
    group: &Group<B, G>,
    dim: usize,
    sizes: &Arc<[usize]>,
) -> Tensor<B, D> {
    run(x, transition, group, dim, sizes, B::step_again)
}

fn run<B: ParallelBackend, G: GroupKind, const D: usize>(
    x: Tensor<B, D>,
    transition: Transition,
    group: &Group<B, G>,
    dim: usize,
    sizes: &Arc<[usize]>,
    steps: impl FnOnce(FloatTensor<B>, &Step<B::Base>, &Step<B::Base>) -> FloatTensor<B>,
) -> Tensor<B, D> {
    if group.size() == 1 {
        return x;
    }
    if transition.from == Sharded || transition.to == Sharded {
        let extent = x.dims()[dim];
        let expected = if transition.from == Sharded {
            sizes.get(group.rank()).copied()
        } else {
            Some(sizes.iter().sum())
        };
        assert!(
            sizes.len() == group.size() && expected == Some(extent),
            "{} over {group:?}: shard sizes {sizes:?} do not fit extent {extent} of dimension {dim}",
            transition.name,
        );
    }
    let step = |movement| Step {
        movement,
        dim,
        sizes: sizes.clone(),
        recv: sizes.clone(),
        collective: group.collective().clone(),
    };
    tensor(steps(
        primitive(x),
        &step(transition.forward),
        &step(transition.backward),
    ))
}

/// Sends `send[k]` rows to rank `k` of the group and receives `recv[k]` rows from it.
///
/// Its backward is the same exchange with the counts swapped. In a group of one, nothing happens.
///
/// # Shapes
///
/// `[sum(send), n] -> [sum(recv), n]`
///
/// # Panics
///
/// When the counts do not fit the tensor or the group, or when the transport fails.
pub fn all_to_all<B: ParallelBackend, G: GroupKind>(
    x: Tensor<B, 2>,
    group: &Group<B, G>,
    send: &[usize],
    recv: &[usize],
) -> Tensor<B, 2> {
    assert!(
        send.len() == group.size()
            && recv.len() == group.size()
            && send.iter().sum::<usize>() == x.dims()[0],
        "all_to_all over {group:?}: send counts {send:?} and receive counts {recv:?} do not fit {} rows",
        x.dims()[0],
    );
    if group.size() == 1 {
        return x;
    }
    let step = |sizes: &[usize], recv: &[usize]| Step {
        movement: Movement::AllToAll,
        dim: 0,
        sizes: sizes.into(),
        recv: recv.into(),
        collective: group.collective().clone(),
    };
    tensor(B::step(primitive(x), &step(send, recv), &step(recv, send)))
}

/// `[0, n]` as one row of zeros, `[1, n]`. Backward: [`unpad`].
///
/// CubeCL cannot launch kernels on tensors without elements. What follows works on the row, which
/// adds nothing to any gradient as long as [`unpad`] ends its way.
///
/// # Panics
///
/// When there are rows.
pub fn pad<B: ParallelBackend, G: GroupKind>(x: Tensor<B, 2>, group: &Group<B, G>) -> Tensor<B, 2> {
    assert_eq!(x.dims()[0], 0, "a row stands for no rows");
    stand_in(x, group, [Movement::Pad, Movement::Unpad])
}

/// The row that stands for none as `[0, n]`, whatever it holds. Backward: [`pad`].
///
/// # Panics
///
/// When there is not one row.
pub fn unpad<B: ParallelBackend, G: GroupKind>(
    x: Tensor<B, 2>,
    group: &Group<B, G>,
) -> Tensor<B, 2> {
    assert_eq!(x.dims()[0], 1, "one row stands for none");
    stand_in(x, group, [Movement::Unpad, Movement::Pad])
}

fn stand_in<B: ParallelBackend, G: GroupKind>(
    x: Tensor<B, 2>,
    group: &Group<B, G>,
    movements: [Movement; 2],
) -> Tensor<B, 2> {
    let [forward, backward] = movements.map(|movement| Step {
        movement,
        dim: 0,
        sizes: [].into(),
        recv: [].into(),
        collective: group.collective().clone(),
    });
    tensor(B::step(primitive(x), &forward, &backward))
}

/// `base` with `shard` added to its columns `columns`, in place where the buffer allows.
pub fn add_into_columns<B: ParallelBackend>(
    base: Tensor<B, 2>,
    shard: Tensor<B, 2>,
    columns: Range<usize>,
) -> Tensor<B, 2> {
    tensor(B::add_columns(primitive(base), primitive(shard), columns))
}

/// Columns of `x`, a view where the backend has them.
///
/// `Tensor::narrow` answers a tensor without rows with a new one, f32 whatever `x` is and outside
/// of the graph: a rank without tokens would have no gradients and would miss the collectives of
/// the backward pass.
pub fn columns<B: Backend>(x: Tensor<B, 2>, columns: Range<usize>) -> Tensor<B, 2> {
    let place = [Slice::full(), columns.into()];
    tensor(B::float_slice(primitive(x), &place))
}
