//! What any transport has to do.

use std::sync::Arc;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{DType, Tensor, TensorPrimitive};
use moe_lora_parallel::{Collective, CollectiveError, GroupName, Transport, range_of};

use crate::Matrix;

type Group<B> = Arc<dyn Collective<B>>;

/// Values of one rank's matrix, on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// Rows and columns.
    pub shape: [usize; 2],
    /// Row by row.
    pub values: Vec<f64>,
}

impl Host {
    /// Small integers, different on every rank: every order of summation is exact.
    pub fn of_rank(rank: usize, shape: [usize; 2]) -> Self {
        let value = |i| (100 * (rank + 1) + i) as f64;
        Self {
            shape,
            values: (0..shape[0] * shape[1]).map(value).collect(),
        }
    }

    fn build(shape: [usize; 2], at: impl Fn(usize, usize) -> f64) -> Self {
        let [rows, columns] = shape;
        let values = (0..rows * columns).map(|i| at(i / columns, i % columns));
        Self {
            shape,
            values: values.collect(),
        }
    }

    fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.shape[1] + column]
    }

    fn sum(parts: &[Self]) -> Self {
        Self::build(parts[0].shape, |i, j| {
            parts.iter().map(|part| part.at(i, j)).sum()
        })
    }

    fn narrow(&self, dim: usize, range: std::ops::Range<usize>) -> Self {
        let mut shape = self.shape;
        shape[dim] = range.len();
        Self::build(shape, |i, j| match dim {
            0 => self.at(range.start + i, j),
            _ => self.at(i, range.start + j),
        })
    }

    fn cat(parts: &[Self], dim: usize) -> Self {
        let mut shape = parts[0].shape;
        shape[dim] = parts.iter().map(|part| part.shape[dim]).sum();
        let owner = |mut at: usize| {
            for part in parts {
                if at < part.shape[dim] {
                    return (part, at);
                }
                at -= part.shape[dim];
            }
            unreachable!("{at} is past the last part")
        };
        Self::build(shape, |i, j| match dim {
            0 => owner(i).0.at(owner(i).1, j),
            _ => owner(j).0.at(i, owner(j).1),
        })
    }

    /// The values as a tensor.
    pub fn tensor<B: Backend>(&self, device: &B::Device, dtype: DType) -> FloatTensor<B> {
        let [rows, columns] = self.shape;
        let matrix = Matrix {
            rows,
            columns,
            values: self.values.clone(),
        };
        matrix
            .tensor_on::<B>(device, dtype)
            .into_primitive()
            .tensor()
    }

    /// The values of a tensor.
    ///
    /// # Panics
    ///
    /// When its dtype is another.
    pub fn read<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> Self {
        let tensor = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(tensor));
        assert_eq!(tensor.dtype(), dtype);
        let Matrix {
            rows,
            columns,
            values,
        } = Matrix::read(tensor);
        let shape = [rows, columns];
        Self { shape, values }
    }
}

/// What one rank does: its transport and its device.
pub type Body<'a, B> =
    &'a (dyn Fn(&dyn Transport<B>, &<B as burn::tensor::backend::BackendTypes>::Device) + Sync);

/// Runs the suite on 1 to `most` ranks: `run(n, body)` calls `body` on `n` ranks at once and fails
/// when one of them does. Values and sums are exact in f16,
/// and on two ranks in bf16.
///
/// # Panics
///
/// When the transport does something else.
pub fn conformance<B: Backend>(most: usize, dtypes: &[DType], run: impl Fn(usize, Body<'_, B>)) {
    for ranks in 1..=most {
        for dtype in dtypes {
            run(ranks, &|transport, device| {
                let group = transport.open(GroupName::Tp, (0..ranks).collect());
                values(&group, device, *dtype);
            });
        }
    }
    for ranks in 2..=most {
        run(ranks, &|transport, device| {
            let group = transport.open(GroupName::Tp, (0..ranks).collect());
            sizes_are_checked(&group, device, dtypes[0]);
        });
        for fault in 0..FAULTS {
            run(ranks, &|transport, device| {
                let group = transport.open(GroupName::Tp, (0..ranks).collect());
                let error = disagree(&group, device, dtypes, fault).unwrap_err();
                assert!(
                    matches!(error, CollectiveError::Mismatch { .. }),
                    "fault {fault}: {error}"
                );
            });
        }
    }
}

/// Extents by rank, empty ones included.
fn splits(ranks: usize) -> Vec<Vec<usize>> {
    let uneven = (0..ranks).map(|k| [2, 0, 3, 1][k]).collect();
    let one_holds_all = (0..ranks)
        .map(|k| if k + 1 == ranks { 4 } else { 0 })
        .collect();
    vec![vec![2; ranks], uneven, one_holds_all, vec![0; ranks]]
}

fn values<B: Backend>(group: &Group<B>, device: &B::Device, dtype: DType) {
    let (size, me) = (group.size(), group.rank());
    let up = |host: &Host| host.tensor::<B>(device, dtype);
    let down = |tensor| Host::read::<B>(tensor, dtype);

    for shape in [[2, 3], [1, 1], [0, 3], [3, 0]] {
        let all: Vec<_> = (0..size).map(|k| Host::of_rank(k, shape)).collect();
        let sum = group.all_reduce(up(&all[me])).unwrap();
        assert_eq!(down(sum), Host::sum(&all), "all_reduce {shape:?}");
        for (root, sent) in all.iter().enumerate() {
            let got = group.broadcast(up(&all[me]), root).unwrap();
            assert_eq!(&down(got), sent, "broadcast {shape:?} root={root}");
        }
    }
    for sizes in splits(size) {
        for dim in [0, 1] {
            let shape = |extent| if dim == 0 { [extent, 3] } else { [3, extent] };
            let all: Vec<_> = (0..size)
                .map(|k| Host::of_rank(k, shape(sizes[k])))
                .collect();
            let got = group.all_gather(up(&all[me]), dim, &sizes).unwrap();
            assert_eq!(
                down(got),
                Host::cat(&all, dim),
                "all_gather dim={dim} {sizes:?}"
            );

            let whole = shape(sizes.iter().sum());
            let all: Vec<_> = (0..size).map(|k| Host::of_rank(k, whole)).collect();
            let got = group.reduce_scatter(up(&all[me]), dim, &sizes).unwrap();
            let expected = Host::sum(&all).narrow(dim, range_of(&sizes, me));
            assert_eq!(down(got), expected, "reduce_scatter dim={dim} {sizes:?}");
        }
    }
    // Rank i sends m[i][j] rows to rank j; the last matrices leave ranks, then all, with nothing.
    let matrices: [fn(usize, usize) -> usize; 4] = [
        |_, _| 1,
        |i, j| (2 * i + j) % 3,
        |i, j| if i == 0 && j > 0 { 2 } else { 0 },
        |_, _| 0,
    ];
    for m in matrices {
        let sends: Vec<Vec<_>> = (0..size)
            .map(|i| (0..size).map(|j| m(i, j)).collect())
            .collect();
        let recv: Vec<_> = (0..size).map(|i| m(i, me)).collect();
        let all = sends.iter().enumerate();
        let all: Vec<_> = all
            .map(|(k, send)| Host::of_rank(k, [send.iter().sum(), 2]))
            .collect();
        let got = group.all_to_all(up(&all[me]), &sends[me], &recv).unwrap();
        let parts = all.iter().zip(&sends);
        let parts: Vec<_> = parts
            .map(|(x, send)| x.narrow(0, range_of(send, me)))
            .collect();
        assert_eq!(down(got), Host::cat(&parts, 0), "all_to_all {sends:?}");
    }
    group.barrier().unwrap();
    let rows = group.exchange_sizes(&[me, 10 * me]).unwrap();
    assert_eq!(rows, (0..size).map(|k| vec![k, 10 * k]).collect::<Vec<_>>());
    assert_eq!(
        group.exchange_sizes(&[]).unwrap(),
        vec![Vec::<usize>::new(); size]
    );
}

/// Sizes that no rank can work with are found by each rank on its own, before it communicates.
fn sizes_are_checked<B: Backend>(group: &Group<B>, device: &B::Device, dtype: DType) {
    let (size, me) = (group.size(), group.rank());
    let x = || Host::of_rank(me, [2 * size, 3]).tensor::<B>(device, dtype);
    let whole = vec![2; size];
    let mut short = whole.clone();
    short.pop();
    let mut much = whole.clone();
    much[me] += 1;
    for result in [
        group.all_gather(x(), 0, &whole),
        group.all_gather(x(), 2, &whole),
        group.all_gather(x(), 0, &short),
        group.reduce_scatter(x(), 0, &much),
        group.reduce_scatter(x(), 0, &short),
        group.reduce_scatter(x(), 2, &whole),
        group.all_to_all(x(), &much, &whole),
        group.all_to_all(x(), &short, &whole),
        group.all_to_all(x(), &whole, &short),
        group.broadcast(x(), size),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, CollectiveError::Sizes { .. }), "{error}");
    }
}

const FAULTS: usize = 10;

/// The last rank disagrees with the others in one point.
fn disagree<B: Backend>(
    group: &Group<B>,
    device: &B::Device,
    dtypes: &[DType],
    fault: usize,
) -> Result<FloatTensor<B>, CollectiveError> {
    let (size, me) = (group.size(), group.rank());
    let odd = me + 1 == size;
    let new = |shape, dtype| Host::of_rank(me, shape).tensor::<B>(device, dtype);
    let x = || new([2 * size, 2 * size], dtypes[0]);
    let even = vec![2; size];
    match fault {
        // The operation.
        0 if odd => group.broadcast(x(), 0),
        0 => group.all_reduce(x()),
        // The same operations in another order: found at the first.
        1 if odd => group.barrier().and_then(|()| group.all_reduce(x())),
        1 => group
            .all_reduce(x())
            .and_then(|y| group.barrier().map(|()| y)),
        // The shape.
        2 => group.all_reduce(new([2, if odd { 3 } else { 2 }], dtypes[0])),
        // As many elements, in another shape.
        3 => group.all_reduce(new(if odd { [2, 3] } else { [3, 2] }, dtypes[0])),
        // The dtype.
        4 => group.all_reduce(new([2, 2], dtypes[odd as usize])),
        // The dimension, with sizes that fit both.
        5 => group.reduce_scatter(x(), odd as usize, &even),
        // Sizes, each right by itself.
        6 => {
            let mut sizes = even;
            if odd {
                sizes[0] = 3;
                sizes[me] = 1;
            }
            group.reduce_scatter(x(), 0, &sizes)
        }
        // An extent other than that of `dim`.
        7 => group.all_gather(new([2, 3 + odd as usize], dtypes[0]), 0, &even),
        // The root.
        8 => group.broadcast(x(), odd as usize),
        // What the last rank expects is not what the others send.
        _ => {
            let recv = vec![if odd { 1 } else { 2 }; size];
            group.all_to_all(x(), &even, &recv)
        }
    }
}
