//! One rank's end of a mock group: what it posts, and what it makes of everybody's posts.

use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, Slice, TensorMetadata};

use super::rendezvous::{Post, Rendezvous, Seat};
use super::{Call, Log};
use crate::{Collective, CollectiveError, CollectiveOp, GroupName, Signature, range_of};

/// One rank's end of a group.
pub(super) struct MockGroup {
    pub seat: Seat,
    pub board: Arc<Rendezvous>,
    pub log: Arc<Log>,
}

impl Debug for MockGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seat {
            name,
            members,
            index,
            ..
        } = &self.seat;
        write!(f, "Mock {name}[{index}/{}]", members.len())
    }
}

impl MockGroup {
    /// Records the call, checks it, meets the other ranks.
    fn call(
        &self,
        signature: Signature,
        payload: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Vec<Arc<Post>>, CollectiveError> {
        self.log.lock()[self.seat.rank()].push(Call {
            group: self.seat.name,
            members: self.seat.members.clone(),
            op: signature.op,
            shape: signature.shape.clone(),
            dtype: signature.dtype,
        });
        signature
            .check(self.seat.index, self.seat.members.len())
            .map_err(|sizes| self.board.refuse(&self.seat, signature.op, sizes))?;
        self.board.meet(&self.seat, Post { signature, payload })
    }

    fn of<B: Backend>(op: CollectiveOp, x: &FloatTensor<B>) -> Signature {
        Signature {
            primitive: Some(std::any::type_name::<FloatTensor<B>>()),
            ..Signature::tensor(op, x.dtype(), x.shape().to_vec())
        }
    }

    /// What `make` makes of everybody's tensors.
    ///
    /// On a GPU a call returns before its work is done, and a buffer that is dropped is used again. So
    /// a tensor is posted when it is complete, and the posts are held until what is made of them is:
    /// without it one of some 1100 comparisons failed on a GPU. Nothing waits on the CPU.
    ///
    /// What is posted is a copy: burn-fusion 0.21 counts the owners of a tensor as if one thread alone
    /// could let go of it, and posts are let go of by several.
    fn meet<B: Backend>(
        &self,
        x: &FloatTensor<B>,
        signature: Signature,
        make: impl FnOnce(&[Arc<Post>]) -> FloatTensor<B>,
    ) -> Result<FloatTensor<B>, CollectiveError> {
        let op = signature.op;
        let settle = || {
            let settled = B::sync(&B::float_device(x));
            settled.map_err(|error| CollectiveError::Transport {
                op,
                group: self.seat.name,
                rank: self.seat.rank(),
                reason: error.to_string(),
            })
        };
        let copy = own::<B>(x.clone());
        settle()?;
        let posts = self.call(signature, Some(Box::new(copy)))?;
        let made = make(&posts);
        settle()?;
        Ok(made)
    }
}

impl<B: Backend> Collective<B> for MockGroup {
    fn rank(&self) -> usize {
        self.seat.index
    }

    fn size(&self) -> usize {
        self.seat.members.len()
    }

    fn name(&self) -> GroupName {
        self.seat.name
    }

    fn all_reduce(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError> {
        let signature = Self::of::<B>(CollectiveOp::AllReduce, &x);
        self.meet::<B>(&x, signature, |posts| {
            sum::<B>(posts.iter().map(|post| payload::<B>(post, &x)).collect())
        })
    }

    fn all_gather(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        let signature = Self::of::<B>(CollectiveOp::AllGather, &x).along(dim, sizes);
        self.meet::<B>(&x, signature, |posts| {
            let parts = posts.iter().map(|post| payload::<B>(post, &x)).collect();
            concat::<B>(parts, dim)
        })
    }

    fn reduce_scatter(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        let signature = Self::of::<B>(CollectiveOp::ReduceScatter, &x).along(dim, sizes);
        self.meet::<B>(&x, signature, |posts| {
            let mine = range_of(sizes, self.seat.index);
            let part = |post: &Arc<Post>| narrow::<B>(payload::<B>(post, &x), dim, mine.clone());
            sum::<B>(posts.iter().map(part).collect())
        })
    }

    fn all_to_all(
        &self,
        x: FloatTensor<B>,
        send: &[usize],
        recv: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        let signature = Self::of::<B>(CollectiveOp::AllToAll, &x).exchanging(send, recv);
        let part = |post: &Arc<Post>| {
            let mine = range_of(&post.signature.send, self.seat.index);
            narrow::<B>(payload::<B>(post, &x), 0, mine)
        };
        self.meet::<B>(&x, signature, |posts| {
            concat::<B>(posts.iter().map(part).collect(), 0)
        })
    }

    fn broadcast(&self, x: FloatTensor<B>, root: usize) -> Result<FloatTensor<B>, CollectiveError> {
        let signature = Self::of::<B>(CollectiveOp::Broadcast, &x).from_root(root);
        self.meet::<B>(&x, signature, |posts| {
            own::<B>(payload::<B>(&posts[root], &x))
        })
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        let signature = Signature::host(CollectiveOp::Barrier, Vec::new(), Vec::new());
        self.call(signature, None).map(drop)
    }

    fn exchange_sizes(&self, sizes: &[usize]) -> Result<Vec<Vec<usize>>, CollectiveError> {
        let op = CollectiveOp::ExchangeSizes;
        let posts = self.call(Signature::host(op, vec![sizes.len()], sizes.to_vec()), None)?;
        let rows = posts.iter().map(|post| post.signature.sizes.clone());
        Ok(rows.collect())
    }
}

/// The posted tensor, on the device of the reader's own tensor `x`.
fn payload<B: Backend>(post: &Post, x: &FloatTensor<B>) -> FloatTensor<B> {
    let tensor: &FloatTensor<B> = post
        .payload
        .as_ref()
        .and_then(|payload| payload.downcast_ref())
        .expect("signatures were compared, so every rank posted a tensor of this backend");
    let device = B::float_device(x);
    if B::float_device(tensor) == device {
        tensor.clone()
    } else {
        B::float_to_device(tensor.clone(), &device)
    }
}

/// `((t0 + t1) + t2) + ..`
fn sum<B: Backend>(terms: Vec<FloatTensor<B>>) -> FloatTensor<B> {
    let add = |a: FloatTensor<B>, b| {
        if a.shape().num_elements() == 0 {
            return a;
        }
        B::float_add(a, b)
    };
    let sum = terms.into_iter().reduce(add);
    sum.expect("a group has at least one rank")
}

/// Parts along `dim`; those of extent zero are left out, as backends need not accept them.
fn concat<B: Backend>(parts: Vec<FloatTensor<B>>, dim: usize) -> FloatTensor<B> {
    let full = parts.iter().filter(|part| part.shape()[dim] != 0);
    let mut full: Vec<_> = full.cloned().collect();
    match full.len() {
        0 => parts.into_iter().next(),
        1 => full.pop().map(own::<B>),
        _ => Some(B::float_cat(full, dim)),
    }
    .expect("a group has at least one rank")
}

/// A buffer of the reader's own, where the backend does not share one between threads for good.
fn own<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    if x.shape().num_elements() == 0 {
        return x;
    }
    B::float_mul_scalar(x, 1.0f32.into())
}

/// The slice `range` along `dim`. No backend is asked for an empty slice.
fn narrow<B: Backend>(x: FloatTensor<B>, dim: usize, range: Range<usize>) -> FloatTensor<B> {
    let mut shape = x.shape().to_vec();
    if range.is_empty() {
        shape[dim] = 0;
        let (device, dtype) = (B::float_device(&x), x.dtype().into());
        return B::float_empty(Shape::from(shape), &device, dtype);
    }
    let mut slices: Vec<Slice> = shape.into_iter().map(|n| Slice::from(0..n)).collect();
    slices[dim] = Slice::from(range);
    B::float_slice(x, &slices)
}
