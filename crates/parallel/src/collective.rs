//! The transport of one group: raw communication, invisible to autograd.

use std::fmt::{self, Debug};
use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;

use crate::{CollectiveError, GroupName};

/// What a rank asked of its group; named in errors and in recorded calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum CollectiveOp {
    /// [`Collective::all_reduce`].
    AllReduce,
    /// [`Collective::all_gather`].
    AllGather,
    /// [`Collective::reduce_scatter`].
    ReduceScatter,
    /// [`Collective::all_to_all`].
    AllToAll,
    /// [`Collective::broadcast`].
    Broadcast,
    /// [`Collective::barrier`].
    Barrier,
    /// [`Collective::exchange_sizes`].
    ExchangeSizes,
}

impl CollectiveOp {
    /// Every operation.
    pub const ALL: [CollectiveOp; 7] = [
        CollectiveOp::AllReduce,
        CollectiveOp::AllGather,
        CollectiveOp::ReduceScatter,
        CollectiveOp::AllToAll,
        CollectiveOp::Broadcast,
        CollectiveOp::Barrier,
        CollectiveOp::ExchangeSizes,
    ];
}

impl fmt::Display for CollectiveOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::ExchangeSizes => "exchange_sizes",
        })
    }
}

/// Communication between the ranks of one group, seen from one of them.
///
/// Every member issues the same calls in the same order. Sums are the only reduction, with the same
/// bits on every rank; their order is the transport's. `sizes[k]` is always the extent that rank `k`
/// of the group holds along `dim`; ranks may hold different extents, zero included. Nothing here is
/// tracked by autograd: the region operations of [`crate::region`] pair each call with its backward.
///
/// # Errors
///
/// Every method returns a [`CollectiveError`] when ranks disagree on operation, shape or dtype,
/// when sizes do not sum to the tensor's extent, or when a member does not come.
pub trait Collective<B: Backend>: Debug + Send + Sync {
    /// Position of this rank within the group, `0..size`.
    fn rank(&self) -> usize;

    /// Number of ranks in the group.
    fn size(&self) -> usize;

    /// Which group this is.
    fn name(&self) -> GroupName;

    /// Sum of every rank's tensor, the same on all ranks. `[..] -> [..]`.
    fn all_reduce(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError>;

    /// Concatenation along `dim` in rank order. `sizes[rank] -> sum(sizes)` along `dim`.
    fn all_gather(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError>;

    /// The rank's slice along `dim` of the sum. `sum(sizes) -> sizes[rank]` along `dim`.
    fn reduce_scatter(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError>;

    /// Sends `send[k]` rows (dimension 0) to rank `k`, receives `recv[k]` rows from it, in rank
    /// order. `[sum(send), ..] -> [sum(recv), ..]`.
    fn all_to_all(
        &self,
        x: FloatTensor<B>,
        send: &[usize],
        recv: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError>;

    /// The tensor of rank `root`, on all ranks; every rank passes one of the same shape.
    fn broadcast(&self, x: FloatTensor<B>, root: usize) -> Result<FloatTensor<B>, CollectiveError>;

    /// Returns once every rank of the group has called it.
    fn barrier(&self) -> Result<(), CollectiveError>;

    /// All-gather of host integers, row `k` from rank `k`; every rank passes a row of the same
    /// length. Carries the token counts that size the uneven collectives.
    fn exchange_sizes(&self, sizes: &[usize]) -> Result<Vec<Vec<usize>>, CollectiveError>;
}

/// The range that rank `rank` holds when `sizes` are laid end to end.
pub fn range_of(sizes: &[usize], rank: usize) -> Range<usize> {
    let start = sizes[..rank].iter().sum();
    start..start + sizes[rank]
}

/// A group of one rank: every call returns its input.
#[derive(Clone, Copy, Debug)]
pub struct Solo(GroupName);

impl Solo {
    /// The group `name` with this rank as its only member.
    pub fn new(name: GroupName) -> Self {
        Self(name)
    }
}

impl<B: Backend> Collective<B> for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn name(&self) -> GroupName {
        self.0
    }

    fn all_reduce(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError> {
        Ok(x)
    }

    fn all_gather(
        &self,
        x: FloatTensor<B>,
        _dim: usize,
        _sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        Ok(x)
    }

    fn reduce_scatter(
        &self,
        x: FloatTensor<B>,
        _dim: usize,
        _sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        Ok(x)
    }

    fn all_to_all(
        &self,
        x: FloatTensor<B>,
        _send: &[usize],
        _recv: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        Ok(x)
    }

    fn broadcast(
        &self,
        x: FloatTensor<B>,
        _root: usize,
    ) -> Result<FloatTensor<B>, CollectiveError> {
        Ok(x)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        Ok(())
    }

    fn exchange_sizes(&self, sizes: &[usize]) -> Result<Vec<Vec<usize>>, CollectiveError> {
        Ok(vec![sizes.to_vec()])
    }
}
