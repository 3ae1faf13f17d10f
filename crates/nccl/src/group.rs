//! One rank's end of a group.

use std::fmt::{self, Debug};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::ops::FloatTensor;
use burn::tensor::{Shape, TensorMetadata};
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;
use moe_lora_parallel::{
    Collective, CollectiveError, CollectiveOp, GroupName, Signature, range_of,
};

use crate::backend::CudaBackend;
use crate::board::Place;
use crate::communicator::{Communicator, Issue};
use crate::device::address;
use crate::frame::{decode_signature, encode_signature};
use crate::world::{Owner, World};

type Buffer = CubeTensor<CudaRuntime>;

/// Operations on tensors are queued for the GPU as launches are: the host waits for nothing. `barrier`
/// and `exchange_sizes` are about the host and go over the ranks' connections, without a GPU: the token
/// counts are on the host already, and a transfer through NCCL would wait for all work before it.
pub(crate) struct NcclGroup {
    owner: Arc<Owner>,
    name: GroupName,
    /// World ranks, in group order.
    members: Vec<usize>,
    index: usize,
    meetings: AtomicU64,
    /// Connected at the first call. By an id of its own and not by `ncclCommSplit`, which is a
    /// collective over all ranks of the world, those of other groups included: here the members
    /// need nobody else, a group that is never used costs nothing, and a failure has a call to
    /// return from.
    communicator: Mutex<Option<Arc<Communicator>>>,
}

impl Debug for NcclGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, index, size) = (self.name, self.index, self.members.len());
        write!(f, "Nccl {name}[{index}/{size}]")
    }
}

impl NcclGroup {
    pub fn new(owner: Arc<Owner>, name: GroupName, members: Vec<usize>, index: usize) -> Self {
        Self {
            owner,
            name,
            members,
            index,
            meetings: AtomicU64::new(0),
            communicator: Mutex::default(),
        }
    }

    fn world(&self) -> &Arc<World> {
        &self.owner.world
    }

    fn broken(&self, op: CollectiveOp, reason: String) -> CollectiveError {
        let rank = self.world().rank;
        let group = self.name;
        CollectiveError::Transport {
            op,
            group,
            rank,
            reason,
        }
    }

    /// Exchanges bytes with the other members, on the host.
    fn meet(&self, op: CollectiveOp, payload: Vec<u8>) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let world = self.world();
        let place = Place {
            name: self.name,
            members: self.members.clone(),
            sequence: self.meetings.fetch_add(1, Ordering::Relaxed),
        };
        world
            .host
            .meet(&place, world.rank, payload, world.timeout)
            .map_err(|absence| world.absence(op, self.name, absence))
    }

    /// Checks this rank's own call, and what has failed before it.
    fn check(&self, signature: &Signature) -> Result<(), CollectiveError> {
        let (world, op, group) = (self.world(), signature.op, self.name);
        if let Err(sizes) = signature.check(self.index, self.members.len()) {
            world.fail(format!("refused its own call: {op}, {sizes}"));
            let rank = world.rank;
            return Err(CollectiveError::Sizes {
                op,
                group,
                rank,
                sizes,
            });
        }
        world.check(op, group)
    }

    /// Compares this rank's call with the others': all of them, in group order.
    fn compare(&self, signature: &Signature) -> Result<Vec<Signature>, CollectiveError> {
        let op = signature.op;
        let posts = self.meet(op, encode_signature(signature))?;
        let calls = posts.iter().map(|post| decode_signature(post));
        let calls: Vec<_> = calls
            .collect::<Result<_, _>>()
            .map_err(|error| self.broken(op, format!("a call cannot be read: {error}")))?;
        let all: Vec<_> = calls.iter().collect();
        if !Signature::agree(&all) {
            return Err(CollectiveError::Mismatch {
                op,
                group: self.name,
                rank: self.world().rank,
                calls: Signature::list(&self.members, &all),
            });
        }
        Ok(calls)
    }

    /// Before a call on a tensor: the communicator.
    fn begin(
        &self,
        x: &Buffer,
        signature: &Signature,
    ) -> Result<Arc<Communicator>, CollectiveError> {
        self.check(signature)?;
        let (op, device) = (signature.op, self.world().device.index);
        if x.device.index != device {
            let reason = format!("the tensor is on {:?}, the rank on gpu {device}", x.device);
            return Err(self.broken(op, reason));
        }
        if self.world().checks {
            self.compare(signature)?;
        }
        self.connect(op)
    }

    fn connect(&self, op: CollectiveOp) -> Result<Arc<Communicator>, CollectiveError> {
        let slot = &mut *self
            .communicator
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(communicator) = slot {
            return Ok(communicator.clone());
        }
        let world = self.world();
        let fail = |reason: String| {
            world.fail(reason.clone());
            self.broken(op, reason)
        };
        // Connecting allocates on the GPU, which may wait there for calls that other ranks have not
        // been given yet.
        world.flush();
        world.check(op, self.name)?;
        let id = match self.index {
            0 => Communicator::id().map_err(fail)?,
            _ => Vec::new(),
        };
        let ids = self.meet(op, id)?;
        let place = (self.index, self.members.len());
        let gone = || world.check(op, self.name).is_err();
        let connected = Communicator::connect(&world.device, &ids[0], place, world.timeout, gone);
        world.check(op, self.name)?;
        let communicator = Arc::new(connected.map_err(fail)?);
        world.watch(communicator.clone());
        Ok(slot.insert(communicator).clone())
    }

    /// Queues the NCCL calls of one collective, from a buffer to a buffer. Both stay until then.
    fn submit(
        &self,
        op: CollectiveOp,
        communicator: Arc<Communicator>,
        [from, to]: [&Buffer; 2],
        calls: impl FnOnce(&Issue<'_>, u64, u64) -> Result<(), String> + Send + 'static,
    ) {
        let dtype = from.dtype;
        let [from, to] = [from, to].map(|x| x.handle.clone().binding());
        self.world().submit(op, self.name, move |server, device| {
            let (from, to) = (address(server, from)?, address(server, to)?);
            device.in_order(|stream| calls(&communicator.on(stream, dtype)?, from, to))
        });
    }

    fn all_reduce(&self, x: Buffer) -> Result<Buffer, CollectiveError> {
        let op = CollectiveOp::AllReduce;
        let communicator = self.begin(&x, &signature(op, &x))?;
        let count = x.meta.num_elements();
        if count == 0 {
            return Ok(x);
        }
        let x = contiguous(x);
        let new = unless_free(&x);
        let sum = new.as_ref().unwrap_or(&x);
        self.submit(op, communicator, [&x, sum], move |nccl, from, to| {
            nccl.all_reduce(from, to, count)
        });
        Ok(new.unwrap_or(x))
    }

    fn all_gather(
        &self,
        x: Buffer,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Buffer, CollectiveError> {
        let op = CollectiveOp::AllGather;
        let communicator = self.begin(&x, &signature(op, &x).along(dim, sizes))?;
        let x = contiguous(to_front(x, dim));
        let whole = with_rows(&x, sizes.iter().sum());
        if whole.meta.num_elements() == 0 {
            return Ok(to_front(whole, dim));
        }
        let row = row_elements(&x);
        let even = sizes.iter().all(|size| *size == sizes[0]);
        let bytes = row * x.elem_size();
        let (sizes, own) = (sizes.to_vec(), sizes[self.index]);
        // A rank without rows has no buffer to send from.
        let source = if own == 0 { &whole } else { &x };
        self.submit(op, communicator, [source, &whole], move |nccl, from, to| {
            if even {
                return nccl.all_gather(from, to, sizes[0] * row);
            }
            nccl.together(|nccl| {
                for (k, size) in sizes.iter().enumerate() {
                    if own > 0 {
                        nccl.send(from, own * row, k)?;
                    }
                    if *size > 0 {
                        let place = to + (range_of(&sizes, k).start * bytes) as u64;
                        nccl.recv(place, size * row, k)?;
                    }
                }
                Ok(())
            })
        });
        Ok(to_front(whole, dim))
    }

    fn reduce_scatter(
        &self,
        x: Buffer,
        dim: usize,
        sizes: &[usize],
    ) -> Result<Buffer, CollectiveError> {
        let op = CollectiveOp::ReduceScatter;
        let communicator = self.begin(&x, &signature(op, &x).along(dim, sizes))?;
        let x = contiguous(to_front(x, dim));
        let part = with_rows(&x, sizes[self.index]);
        if x.meta.num_elements() == 0 {
            return Ok(to_front(part, dim));
        }
        let row = row_elements(&x);
        let even = sizes.iter().all(|size| *size == sizes[0]);
        let bytes = row * x.elem_size();
        let sizes = sizes.to_vec();
        // A rank without rows takes part in the sums of the others.
        let target = if sizes[self.index] == 0 { &x } else { &part };
        self.submit(op, communicator, [&x, target], move |nccl, from, to| {
            if even {
                return nccl.reduce_scatter(from, to, sizes[0] * row);
            }
            nccl.together(|nccl| {
                for (k, size) in sizes.iter().enumerate().filter(|(_, size)| **size > 0) {
                    let place = from + (range_of(&sizes, k).start * bytes) as u64;
                    nccl.reduce(place, to, size * row, k)?;
                }
                Ok(())
            })
        });
        Ok(to_front(part, dim))
    }

    fn all_to_all(
        &self,
        x: Buffer,
        send: &[usize],
        recv: &[usize],
    ) -> Result<Buffer, CollectiveError> {
        let op = CollectiveOp::AllToAll;
        let communicator = self.begin(&x, &signature(op, &x).exchanging(send, recv))?;
        let x = contiguous(x);
        let y = with_rows(&x, recv.iter().sum());
        let row = row_elements(&x);
        let bytes = row * x.elem_size();
        // Both sides of a pair know that nothing passes between them, and issue nothing for it.
        let (sends, receives) = (x.meta.num_elements() > 0, y.meta.num_elements() > 0);
        let [from, to] = match (sends, receives) {
            (false, false) => return Ok(y),
            (true, true) => [&x, &y],
            (true, false) => [&x, &x],
            (false, true) => [&y, &y],
        };
        let (send, recv) = (send.to_vec(), recv.to_vec());
        self.submit(op, communicator, [from, to], move |nccl, from, to| {
            nccl.together(|nccl| {
                for k in 0..send.len() {
                    if send[k] > 0 && row > 0 {
                        let place = from + (range_of(&send, k).start * bytes) as u64;
                        nccl.send(place, send[k] * row, k)?;
                    }
                    if recv[k] > 0 && row > 0 {
                        let place = to + (range_of(&recv, k).start * bytes) as u64;
                        nccl.recv(place, recv[k] * row, k)?;
                    }
                }
                Ok(())
            })
        });
        Ok(y)
    }

    fn broadcast(&self, x: Buffer, root: usize) -> Result<Buffer, CollectiveError> {
        let op = CollectiveOp::Broadcast;
        let communicator = self.begin(&x, &signature(op, &x).from_root(root))?;
        let count = x.meta.num_elements();
        if count == 0 {
            return Ok(x);
        }
        let x = contiguous(x);
        // At the root NCCL reads the buffer alone.
        let new = unless_free(&x).filter(|_| self.index != root);
        let y = new.as_ref().unwrap_or(&x);
        self.submit(op, communicator, [&x, y], move |nccl, from, to| {
            nccl.broadcast(from, to, count, root)
        });
        Ok(new.unwrap_or(x))
    }

    /// A call that is about the host alone: everybody's, in group order.
    fn host_call(
        &self,
        op: CollectiveOp,
        shape: Vec<usize>,
        sizes: &[usize],
    ) -> Result<Vec<Signature>, CollectiveError> {
        let signature = Signature::host(op, shape, sizes.to_vec());
        self.check(&signature)?;
        self.compare(&signature)
    }
}

impl<B: CudaBackend> Collective<B> for NcclGroup {
    fn rank(&self) -> usize {
        self.index
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn name(&self) -> GroupName {
        self.name
    }

    fn all_reduce(&self, x: FloatTensor<B>) -> Result<FloatTensor<B>, CollectiveError> {
        self.all_reduce(B::resolve(x)).map(B::register)
    }

    fn all_gather(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        self.all_gather(B::resolve(x), dim, sizes).map(B::register)
    }

    fn reduce_scatter(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        sizes: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        self.reduce_scatter(B::resolve(x), dim, sizes)
            .map(B::register)
    }

    fn all_to_all(
        &self,
        x: FloatTensor<B>,
        send: &[usize],
        recv: &[usize],
    ) -> Result<FloatTensor<B>, CollectiveError> {
        self.all_to_all(B::resolve(x), send, recv).map(B::register)
    }

    fn broadcast(&self, x: FloatTensor<B>, root: usize) -> Result<FloatTensor<B>, CollectiveError> {
        self.broadcast(B::resolve(x), root).map(B::register)
    }

    fn barrier(&self) -> Result<(), CollectiveError> {
        self.host_call(CollectiveOp::Barrier, Vec::new(), &[])
            .map(drop)
    }

    fn exchange_sizes(&self, sizes: &[usize]) -> Result<Vec<Vec<usize>>, CollectiveError> {
        let op = CollectiveOp::ExchangeSizes;
        let calls = self.host_call(op, vec![sizes.len()], sizes)?;
        Ok(calls.into_iter().map(|call| call.sizes).collect())
    }
}

fn signature(op: CollectiveOp, x: &Buffer) -> Signature {
    Signature::tensor(op, x.dtype, x.shape().to_vec())
}

/// A new buffer for the result, unless nobody else reads this one and it can hold it.
fn unless_free(x: &Buffer) -> Option<Buffer> {
    (!x.handle.can_mut()).then(|| with_shape(x, x.shape()))
}

/// Rows one after the other. A tensor that lies so, or has no elements, is left alone: there is
/// nothing to launch.
fn contiguous(x: Buffer) -> Buffer {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    let mut step = 1;
    // CubeCL would copy a transposed `[tokens, 1]`, for the stride of a dimension of one element.
    let in_rows = shape
        .iter()
        .zip(strides.iter())
        .rev()
        .all(|(extent, stride)| {
            let next = *extent == 1 || *stride == step;
            step *= extent;
            next
        });
    if in_rows || x.meta.num_elements() == 0 {
        return x;
    }
    into_contiguous(x)
}

fn with_shape(x: &Buffer, shape: Shape) -> Buffer {
    empty_device_contiguous_dtype(x.client.clone(), x.device.clone(), shape, x.dtype)
}

fn with_rows(x: &Buffer, rows: usize) -> Buffer {
    let mut shape = x.shape();
    shape[0] = rows;
    with_shape(x, shape)
}

fn row_elements(x: &Buffer) -> usize {
    x.shape()[1..].iter().product()
}

/// A view with dimensions 0 and `dim` exchanged; its own inverse.
fn to_front(x: Buffer, dim: usize) -> Buffer {
    if dim == 0 {
        return x;
    }
    let mut axes: Vec<_> = (0..x.shape().num_dims()).collect();
    axes.swap(0, dim);
    permute(x, &axes)
}
