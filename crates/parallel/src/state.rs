//! The four parallel states as types.
//!
//! A state says what the ranks of one group hold of a value *and* of its gradient. Each type
//! carries its rank's tensor, the backend and the group, so only equal states over the same group
//! add, and moving between states takes one of the operations of [`TABLE`](crate::TABLE).
//!
//! | state | value on the ranks | cotangent on the ranks |
//! |---|---|---|
//! | [`Replicated`] | the same full value | the same full gradient |
//! | [`Fanout`] | the same full value | each rank its own term |
//! | [`Partial`] | each rank its own term | the same full gradient |
//! | [`Sharded`] | each rank its slice | each rank its slice |
//!
//! All values are `[T, n]`: tokens by features.

use std::marker::PhantomData;
use std::ops::{Add, Mul, Range};
use std::sync::Arc;

use burn::tensor::Tensor;

use crate::region::{
    COPY_TO, EMBED, GATHER_FANOUT, GATHER_FROM, REDUCE_FANOUT, REDUCE_FROM, REDUCE_SCATTER,
    SCATTER_TO, SLICE_FANOUT, add_into_columns, apply, apply_again,
};
use crate::{Group, GroupKind, ParallelBackend, Transition, range_of};

/// An axis of a value along which ranks hold slices: [`Tokens`] or [`Features`].
pub trait Axis: Clone + Copy + std::fmt::Debug + Send + Sync + 'static {
    /// Its dimension in `[T, n]`.
    const DIM: usize;
}

/// The rows; ranks may hold different numbers of them.
#[derive(Clone, Copy, Debug)]
pub struct Tokens;
/// The columns.
#[derive(Clone, Copy, Debug)]
pub struct Features;

impl Axis for Tokens {
    const DIM: usize = 0;
}
impl Axis for Features {
    const DIM: usize = 1;
}

/// The same full value on every rank, and the same full gradient.
#[derive(Clone, Debug)]
pub struct Replicated<B: ParallelBackend, G: GroupKind> {
    tensor: Tensor<B, 2>,
    group: Group<B, G>,
}

/// The same full value on every rank; each holds its own term of the gradient.
///
/// What enters per-rank work: every rank uses the whole value for its part of the result.
#[derive(Clone, Debug)]
pub struct Fanout<B: ParallelBackend, G: GroupKind> {
    tensor: Tensor<B, 2>,
    group: Group<B, G>,
}

/// Each rank holds its own term of the value; the sum over the ranks is the value.
#[derive(Clone, Debug)]
pub struct Partial<B: ParallelBackend, G: GroupKind> {
    term: Term<B>,
    group: Group<B, G>,
}

/// Each rank holds its slice of value and gradient along the axis `A`.
#[derive(Clone, Debug)]
pub struct Sharded<B: ParallelBackend, G: GroupKind, A: Axis = Features> {
    tensor: Tensor<B, 2>,
    sizes: Arc<[usize]>,
    group: Group<B, G>,
    axis: PhantomData<A>,
}

/// A rank's term. An embedded shard stays a shard until somebody needs the zeros around it, so
/// that adding it to a base writes the base's own columns and allocates nothing of full width.
#[derive(Clone, Debug)]
enum Term<B: ParallelBackend> {
    Whole(Tensor<B, 2>),
    Embedded(Tensor<B, 2>, Arc<[usize]>),
}

/// Declares what this rank's tensor is: the only way into the states. The caller answers for it.
impl<B: ParallelBackend, G: GroupKind> Group<B, G> {
    /// A value that is the same on every rank and whose consumers are too.
    pub fn replicated(&self, tensor: Tensor<B, 2>) -> Replicated<B, G> {
        Replicated {
            tensor,
            group: self.clone(),
        }
    }

    /// A value that is the same on every rank and used for a different part of the result on each;
    /// the caller sums its gradient.
    pub fn fanout(&self, tensor: Tensor<B, 2>) -> Fanout<B, G> {
        Fanout {
            tensor,
            group: self.clone(),
        }
    }

    /// This rank's term of a value that is the sum over the ranks.
    pub fn partial(&self, tensor: Tensor<B, 2>) -> Partial<B, G> {
        Partial {
            term: Term::Whole(tensor),
            group: self.clone(),
        }
    }

    /// This rank's columns of a value whose ranks hold equally many.
    pub fn shard(&self, tensor: Tensor<B, 2>) -> Sharded<B, G> {
        let sizes = vec![tensor.dims()[1]; self.size()];
        self.shard_uneven(tensor, &sizes)
    }

    /// This rank's rows of a value whose rank `k` holds `sizes[k]` of them.
    ///
    /// # Panics
    ///
    /// When the sizes do not fit the tensor or the group.
    pub fn shard_tokens(&self, tensor: Tensor<B, 2>, sizes: &[usize]) -> Sharded<B, G, Tokens> {
        self.shard_uneven(tensor, sizes)
    }

    fn shard_uneven<A: Axis>(&self, tensor: Tensor<B, 2>, sizes: &[usize]) -> Sharded<B, G, A> {
        let extent = tensor.dims()[A::DIM];
        assert!(
            sizes.len() == self.size() && sizes[self.rank()] == extent,
            "shard sizes {sizes:?} do not fit extent {extent} on {self:?}"
        );
        Sharded {
            tensor,
            sizes: sizes.into(),
            group: self.clone(),
            axis: PhantomData,
        }
    }
}

impl<B: ParallelBackend, G: GroupKind> Replicated<B, G> {
    /// Replicated -> [`Fanout`]. Forward: none. Backward: all-reduce.
    pub fn copy_to(self) -> Fanout<B, G> {
        let Self { tensor, group } = self;
        group.fanout(whole(tensor, COPY_TO, &group))
    }

    /// Replicated -> [`Sharded`]. Forward: slice. Backward: all-gather.
    ///
    /// # Panics
    ///
    /// When `sizes` has not one entry a rank or does not sum to the axis' extent.
    pub fn scatter_to<A: Axis>(self, sizes: &[usize]) -> Sharded<B, G, A> {
        let tensor = apply(self.tensor, SCATTER_TO, &self.group, A::DIM, &sizes.into());
        self.group.shard_uneven(tensor, sizes)
    }

    /// Applies the same function on every rank.
    pub fn map(self, f: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>) -> Self {
        self.group.replicated(f(self.tensor))
    }

    /// This rank's tensor.
    pub fn into_tensor(self) -> Tensor<B, 2> {
        self.tensor
    }

    /// The group.
    pub fn group(&self) -> &Group<B, G> {
        &self.group
    }

    /// The local tensor.
    pub fn tensor(&self) -> &Tensor<B, 2> {
        &self.tensor
    }
}

impl<B: ParallelBackend, G: GroupKind> Fanout<B, G> {
    /// Fanout -> [`Sharded`]. Forward: slice. Backward: embed in zeros, no communication.
    ///
    /// # Panics
    ///
    /// When `sizes` has not one entry a rank or does not sum to the axis' extent.
    pub fn slice_fanout<A: Axis>(self, sizes: &[usize]) -> Sharded<B, G, A> {
        let tensor = apply(
            self.tensor,
            SLICE_FANOUT,
            &self.group,
            A::DIM,
            &sizes.into(),
        );
        self.group.shard_uneven(tensor, sizes)
    }

    /// Applies the same function on every rank.
    pub fn map(self, f: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>) -> Self {
        self.group.fanout(f(self.tensor))
    }

    /// This rank's tensor.
    pub fn into_tensor(self) -> Tensor<B, 2> {
        self.tensor
    }

    /// The group.
    pub fn group(&self) -> &Group<B, G> {
        &self.group
    }

    /// This rank's tensor, for work that gives each rank its own part of the result.
    pub fn tensor(&self) -> &Tensor<B, 2> {
        &self.tensor
    }
}

impl<B: ParallelBackend, G: GroupKind> Partial<B, G> {
    /// Adds a shard of `width` columns a rank to the rank's own columns, with `add` doing both the
    /// embedding and the addition: what `self + shard.embed()` is, without the shard being written
    /// down first.
    ///
    /// # Panics
    ///
    /// When the ranks' columns are more than this value has.
    pub fn add_embedded(
        self,
        width: usize,
        add: impl FnOnce(Tensor<B, 2>, Range<usize>) -> Tensor<B, 2>,
    ) -> Self {
        let group = self.group.clone();
        let base = self.into_term();
        assert_eq!(
            width * group.size(),
            base.dims()[1],
            "shards of {width} columns over {group:?} do not fill the base"
        );
        let first = width * group.rank();
        group.partial(add(base, first..first + width))
    }

    /// Partial -> [`Replicated`]. Forward: all-reduce. Backward: none.
    pub fn reduce_from(self) -> Replicated<B, G> {
        let group = self.group.clone();
        group.replicated(whole(self.into_term(), REDUCE_FROM, &group))
    }

    /// Partial -> [`Fanout`]. Forward: all-reduce. Backward: all-reduce.
    pub fn reduce_fanout(self) -> Fanout<B, G> {
        let group = self.group.clone();
        group.fanout(whole(self.into_term(), REDUCE_FANOUT, &group))
    }

    /// Partial -> [`Sharded`]. Forward: reduce-scatter. Backward: all-gather.
    ///
    /// # Panics
    ///
    /// When `sizes` has not one entry a rank or does not sum to the axis' extent.
    pub fn reduce_scatter<A: Axis>(self, sizes: &[usize]) -> Sharded<B, G, A> {
        let group = self.group.clone();
        let tensor = self.into_term();
        let tensor = apply(tensor, REDUCE_SCATTER, &group, A::DIM, &sizes.into());
        group.shard_uneven(tensor, sizes)
    }

    /// Applies a *linear* function to every rank's term: the sum of the results is the result of
    /// the sum. A bias or an activation here would be counted once a rank.
    pub fn map_linear(self, f: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>) -> Self {
        let group = self.group.clone();
        group.partial(f(self.into_term()))
    }

    /// Does not compile: no rank has the value.
    #[doc(hidden)]
    pub fn into_tensor(self) -> Tensor<B, 2>
    where
        Self: IsValue,
    {
        self.into_term()
    }

    /// This rank's own term, with its zeros: what nobody but the sum over the ranks may read.
    pub fn into_term(self) -> Tensor<B, 2> {
        match self.term {
            Term::Whole(tensor) => tensor,
            Term::Embedded(tensor, sizes) => apply(tensor, EMBED, &self.group, 1, &sizes),
        }
    }
}

impl<B: ParallelBackend, G: GroupKind> Sharded<B, G, Tokens> {
    /// As [`gather_fanout`](Self::gather_fanout), but of the gathered rows none are kept for the
    /// backward pass: where it needs them, it gathers them again. An all-gather more, `P` times less
    /// memory. Rows without a gradient are kept.
    pub fn gather_fanout_again(self) -> Fanout<B, G> {
        let tensor = apply_again(self.tensor, GATHER_FANOUT, &self.group, 0, &self.sizes);
        self.group.fanout(tensor)
    }
}

impl<B: ParallelBackend, G: GroupKind, A: Axis> Sharded<B, G, A> {
    /// Sharded -> [`Replicated`]. Forward: all-gather. Backward: slice.
    pub fn gather_from(self) -> Replicated<B, G> {
        let tensor = apply(self.tensor, GATHER_FROM, &self.group, A::DIM, &self.sizes);
        self.group.replicated(tensor)
    }

    /// Sharded -> [`Fanout`]. Forward: all-gather. Backward: reduce-scatter.
    pub fn gather_fanout(self) -> Fanout<B, G> {
        let tensor = apply(self.tensor, GATHER_FANOUT, &self.group, A::DIM, &self.sizes);
        self.group.fanout(tensor)
    }

    /// Applies a function that works on each element (or along the other axis) alone.
    ///
    /// # Panics
    ///
    /// When the extent along the sharded axis changes.
    pub fn map(self, f: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>) -> Self {
        self.group.shard_uneven(f(self.tensor), &self.sizes)
    }

    /// This rank's slice.
    pub fn into_tensor(self) -> Tensor<B, 2> {
        self.tensor
    }

    /// This rank's slice.
    pub fn tensor(&self) -> &Tensor<B, 2> {
        &self.tensor
    }

    /// The group.
    pub fn group(&self) -> &Group<B, G> {
        &self.group
    }

    /// Each rank's extent along the axis.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes
    }
}

impl<B: ParallelBackend, G: GroupKind> Sharded<B, G, Features> {
    /// Sharded -> [`Partial`]. Forward: the shard at its offset in zeros, no communication.
    /// Backward: slice.
    ///
    /// The zeros are not written down: adding the result to a base writes the base's own columns.
    pub fn embed(self) -> Partial<B, G> {
        let term = if self.group.size() == 1 {
            Term::Whole(self.tensor)
        } else {
            Term::Embedded(self.tensor, self.sizes)
        };
        Partial {
            term,
            group: self.group,
        }
    }
}

fn whole<B: ParallelBackend, G: GroupKind>(
    tensor: Tensor<B, 2>,
    transition: Transition,
    group: &Group<B, G>,
) -> Tensor<B, 2> {
    apply(tensor, transition, group, 0, &Arc::from([]))
}

mod sealed {
    pub trait Sealed {}
}
impl<B: ParallelBackend, G: GroupKind> sealed::Sealed for Replicated<B, G> {}
impl<B: ParallelBackend, G: GroupKind> sealed::Sealed for Fanout<B, G> {}
impl<B: ParallelBackend, G: GroupKind> sealed::Sealed for Partial<B, G> {}
impl<B: ParallelBackend, G: GroupKind, A: Axis> sealed::Sealed for Sharded<B, G, A> {}

/// A state of which each rank can read the value, or its slice.
#[diagnostic::on_unimplemented(
    message = "`{Self}` has no value to read: each rank holds its own term of a sum",
    label = "sum the terms with `.reduce_from()` or `.reduce_scatter(..)` first",
    note = "`.into_term()` is this rank's own term, for what sums over the ranks later"
)]
pub trait IsValue: sealed::Sealed {}

impl<B: ParallelBackend, G: GroupKind> IsValue for Replicated<B, G> {}
impl<B: ParallelBackend, G: GroupKind> IsValue for Fanout<B, G> {}
impl<B: ParallelBackend, G: GroupKind, A: Axis> IsValue for Sharded<B, G, A> {}

/// A [`Replicated`] value over the group `G`. A bound rather than the type itself, so that the
/// compiler names the operation that is missing.
#[diagnostic::on_unimplemented(
    message = "`Replicated` over `{G}` is needed here, this is `{Self}`",
    label = "a `Partial` needs `.reduce_from()` here, a `Sharded` `.gather_from()`",
    note = "a value over another group cannot enter: take the group from `mesh.expert_tp()` for experts, from `mesh.tp()` for dense layers"
)]
pub trait IsReplicated<B: ParallelBackend, G: GroupKind>: sealed::Sealed {
    /// The value.
    fn into_replicated(self) -> Replicated<B, G>;
}

impl<B: ParallelBackend, G: GroupKind> IsReplicated<B, G> for Replicated<B, G> {
    fn into_replicated(self) -> Replicated<B, G> {
        self
    }
}

/// A [`Fanout`] value over the group `G`, as per-rank work needs it.
#[diagnostic::on_unimplemented(
    message = "`Fanout` over `{G}` is needed here, this is `{Self}`",
    label = "a `Partial` needs `.reduce_fanout()` here, a `Sharded` `.gather_fanout()`, a `Replicated` `.copy_to()`",
    note = "each rank uses this for its own part of the result, so its gradient has a term on every rank; in place of `.reduce_from()` or `.gather_from()`, call `.reduce_fanout()` or `.gather_fanout()`",
    note = "a value over another group cannot enter: take the group from `mesh.expert_tp()` for experts, from `mesh.tp()` for dense layers"
)]
pub trait IsFanout<B: ParallelBackend, G: GroupKind>: sealed::Sealed {
    /// The value.
    fn into_fanout(self) -> Fanout<B, G>;
}

impl<B: ParallelBackend, G: GroupKind> IsFanout<B, G> for Fanout<B, G> {
    fn into_fanout(self) -> Fanout<B, G> {
        self
    }
}

/// A [`Partial`] value over the group `G`: what joins a base whose sum comes later.
#[diagnostic::on_unimplemented(
    message = "`Partial` over `{G}` is needed here, this is `{Self}`",
    label = "counted once a rank when the terms are summed: keep it `Sharded` and call `.embed()`",
    note = "in place of `.gather_from()`, `.embed()` lets each rank's slice join the base's own term",
    note = "a value over another group cannot enter: take the group from `mesh.expert_tp()` for experts, from `mesh.tp()` for dense layers"
)]
pub trait IsPartial<B: ParallelBackend, G: GroupKind>: sealed::Sealed {
    /// The value.
    fn into_partial(self) -> Partial<B, G>;
}

impl<B: ParallelBackend, G: GroupKind> IsPartial<B, G> for Partial<B, G> {
    fn into_partial(self) -> Partial<B, G> {
        self
    }
}

/// A [`Sharded`] value over the group `G` and the axis `A`.
#[diagnostic::on_unimplemented(
    message = "`Sharded` along `{A}` over `{G}` is needed here, this is `{Self}`",
    label = "a `Fanout` needs `.slice_fanout()` here, a `Replicated` `.scatter_to()`, a `Partial` `.reduce_scatter()`",
    note = "a value over another group cannot enter: take the group from `mesh.expert_tp()` for experts, from `mesh.tp()` for dense layers"
)]
pub trait IsSharded<B: ParallelBackend, G: GroupKind, A: Axis>: sealed::Sealed {
    /// The value.
    fn into_sharded(self) -> Sharded<B, G, A>;
}

impl<B: ParallelBackend, G: GroupKind, A: Axis> IsSharded<B, G, A> for Sharded<B, G, A> {
    fn into_sharded(self) -> Sharded<B, G, A> {
        self
    }
}

impl<B: ParallelBackend, G: GroupKind, R: IsReplicated<B, G>> Add<R> for Replicated<B, G> {
    type Output = Self;

    fn add(self, other: R) -> Self {
        let other = other.into_replicated().tensor;
        self.map(|tensor| tensor + other)
    }
}

impl<B: ParallelBackend, G: GroupKind, R: IsFanout<B, G>> Add<R> for Fanout<B, G> {
    type Output = Self;

    fn add(self, other: R) -> Self {
        let other = other.into_fanout().tensor;
        self.map(|tensor| tensor + other)
    }
}

impl<B: ParallelBackend, G: GroupKind, A: Axis, R: IsSharded<B, G, A>> Add<R> for Sharded<B, G, A> {
    type Output = Self;

    fn add(self, other: R) -> Self {
        let other = other.into_sharded().tensor;
        self.map(|tensor| tensor + other)
    }
}

impl<B: ParallelBackend, G: GroupKind, R: IsPartial<B, G>> Add<R> for Partial<B, G> {
    type Output = Self;

    fn add(self, other: R) -> Self {
        let group = self.group;
        let term =
            match (self.term, other.into_partial().term) {
                (Term::Whole(a), Term::Whole(b)) => Term::Whole(a + b),
                (Term::Embedded(a, sizes), Term::Embedded(b, _)) => Term::Embedded(a + b, sizes),
                (Term::Whole(base), Term::Embedded(shard, sizes))
                | (Term::Embedded(shard, sizes), Term::Whole(base)) => Term::Whole(
                    add_into_columns(base, shard, range_of(&sizes, group.rank())),
                ),
            };
        Self { term, group }
    }
}

/// Multiplies by a factor that every rank holds. Each rank's product gives one term of the
/// factor's gradient, which is why the factor is a [`Fanout`].
impl<B: ParallelBackend, G: GroupKind> Mul<Fanout<B, G>> for Partial<B, G> {
    type Output = Self;

    fn mul(self, factor: Fanout<B, G>) -> Self {
        self.map_linear(|term| term * factor.into_tensor())
    }
}
