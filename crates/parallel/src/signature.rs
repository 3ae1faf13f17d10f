//! What a rank calls, as far as the other ranks have to agree with it.

use std::fmt;

use burn::tensor::DType;

use crate::CollectiveOp;

/// One rank's call of a collective, without the values. Transports compare them and name them in
/// errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Signature {
    /// What is called.
    pub op: CollectiveOp,
    /// Dtype of the tensor; none for `exchange_sizes` and a barrier.
    pub dtype: Option<DType>,
    /// Shape of the tensor, `[len]` for the integers of `exchange_sizes`, `[]` for a barrier.
    pub shape: Vec<usize>,
    /// Dimension of a gather or a scatter.
    pub dim: Option<usize>,
    /// The rank that a broadcast begins at.
    pub root: Option<usize>,
    /// Extents along `dim`, or the host integers of `exchange_sizes`.
    pub sizes: Vec<usize>,
    /// Rows to each rank of an all-to-all.
    pub send: Vec<usize>,
    /// Rows from each rank of an all-to-all.
    pub recv: Vec<usize>,
    /// Type of the tensor where ranks may run different backends.
    pub primitive: Option<&'static str>,
}

impl Signature {
    /// A call on host integers, or on nothing.
    pub fn host(op: CollectiveOp, shape: Vec<usize>, sizes: Vec<usize>) -> Self {
        Self {
            op,
            dtype: None,
            shape,
            dim: None,
            root: None,
            sizes,
            send: Vec::new(),
            recv: Vec::new(),
            primitive: None,
        }
    }

    /// A call on a tensor.
    pub fn tensor(op: CollectiveOp, dtype: DType, shape: Vec<usize>) -> Self {
        Self {
            dtype: Some(dtype),
            ..Self::host(op, shape, Vec::new())
        }
    }

    /// The dimension of a gather or a scatter, with the extents along it.
    pub fn along(mut self, dim: usize, sizes: &[usize]) -> Self {
        (self.dim, self.sizes) = (Some(dim), sizes.to_vec());
        self
    }

    /// The rows that an all-to-all sends and receives.
    pub fn exchanging(mut self, send: &[usize], recv: &[usize]) -> Self {
        (self.send, self.recv) = (send.to_vec(), recv.to_vec());
        self
    }

    /// The rank that a broadcast begins at.
    pub fn from_root(mut self, root: usize) -> Self {
        self.root = Some(root);
        self
    }

    /// What rank `index` of `size` can find wrong with its own call.
    ///
    /// # Errors
    ///
    /// When sizes do not fit the tensor or the group: what and where.
    pub fn check(&self, index: usize, size: usize) -> Result<(), String> {
        let split = |what: &str, sizes: &[usize], dim: usize, whole: bool| {
            let Some(&extent) = self.shape.get(dim) else {
                return Err(format!("dim={dim} of a tensor of shape {:?}", self.shape));
            };
            if sizes.len() != size {
                return Err(format!("{what}={sizes:?} for {size} ranks"));
            }
            let (has, of) = if whole {
                (sizes.iter().sum(), format!("sum of {what}={sizes:?}"))
            } else {
                (sizes[index], format!("{what}[{index}] of {what}={sizes:?}"))
            };
            if has != extent {
                return Err(format!(
                    "{of} is {has}, the extent of dim={dim} of {:?} is {extent}",
                    self.shape
                ));
            }
            Ok(())
        };
        match (self.op, self.dim, self.root) {
            (CollectiveOp::AllGather, Some(dim), _) => split("sizes", &self.sizes, dim, false),
            (CollectiveOp::ReduceScatter, Some(dim), _) => split("sizes", &self.sizes, dim, true),
            (CollectiveOp::AllToAll, ..) => {
                if self.recv.len() != size {
                    return Err(format!("recv={:?} for {size} ranks", self.recv));
                }
                split("send", &self.send, 0, true)
            }
            (_, _, Some(root)) if root >= size => Err(format!("root={root} of {size} ranks")),
            _ => Ok(()),
        }
    }

    /// Whether these calls, one a rank in group order, are one collective.
    pub fn agree(calls: &[&Self]) -> bool {
        let first = calls[0].common();
        let alike = calls.iter().all(|call| call.common() == first);
        let matrix = || {
            calls.iter().enumerate().all(|(i, from)| {
                let mut to = calls.iter().enumerate();
                to.all(|(j, to)| from.send[j] == to.recv[i])
            })
        };
        alike && (first.op != CollectiveOp::AllToAll || matrix())
    }

    /// What every rank calls, for an error: `members` are world ranks, in group order.
    pub fn list(members: &[usize], calls: &[&Self]) -> String {
        let mut primitives = calls.iter().filter_map(|call| call.primitive);
        let first = primitives.next();
        let backends = primitives.any(|primitive| Some(primitive) != first);
        let calls = members.iter().zip(calls).map(|(rank, call)| {
            let mut text = format!("rank {rank} {call}");
            if let (true, Some(primitive)) = (backends, call.primitive) {
                text += &format!(" in {primitive}");
            }
            text
        });
        calls.collect::<Vec<_>>().join("; ")
    }

    /// The part that is the same on every rank of a correct call.
    fn common(&self) -> Self {
        let mut common = self.clone();
        match self.op {
            CollectiveOp::AllGather => common.shape[self.dim.unwrap_or(0)] = 0,
            CollectiveOp::AllToAll => {
                common.shape[0] = 0;
                common.send.clear();
                common.recv.clear();
            }
            CollectiveOp::ExchangeSizes => common.sizes.clear(),
            _ => {}
        }
        common
    }
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.op, self.shape)?;
        if let Some(dtype) = self.dtype {
            write!(f, " {dtype:?}")?;
        }
        if let Some(dim) = self.dim {
            write!(f, " dim={dim} sizes={:?}", self.sizes)?;
        }
        if let Some(root) = self.root {
            write!(f, " root={root}")?;
        }
        if self.op == CollectiveOp::AllToAll {
            write!(f, " send={:?} recv={:?}", self.send, self.recv)?;
        }
        Ok(())
    }
}
