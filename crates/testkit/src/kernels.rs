//! One suite for the grouped products of every backend: values and gradients against `f64` matmuls
//! of each expert on the CPU.

use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use moe_lora_kernels::{
    Activation, Between, Compute, GroupedBackend, Layout, RowGroups, Strategy, expand, expand_into,
    shrink,
};

use crate::{Matrix, noise, relative_error};

/// Rows by expert, then padding rows.
const COUNTS: [(&[usize], usize); 7] = [
    (&[5, 0, 3], 0),
    (&[0, 0, 4], 0),
    (&[100, 1, 0, 33, 64], 0),
    (&[70], 0),
    (&[40, 7], 45),
    (&[1], 0),
    (&[31, 32, 33, 0], 3),
];

/// `d_in`, `d_out` and rank: multiples of 16, of 8, of nothing, and the smallest and largest ranks.
const EXTENTS: [[usize; 3]; 10] = [
    [64, 48, 16],
    [40, 24, 8],
    [33, 7, 3],
    [168, 136, 32],
    [50, 300, 24],
    [9, 5, 1],
    [130, 72, 100],
    [300, 264, 256],
    [512, 640, 64],
    [256, 384, 128],
];

/// One product and what stands around it.
struct Case<'a> {
    counts: &'a [usize],
    padding: usize,
    extents: [usize; 3],
    activation: Activation,
    layout: Layout,
    /// Columns beside those of `z` in its buffer, as where a backend pads rows.
    gap: usize,
}

impl Case<'_> {
    fn rows(&self) -> RowGroups {
        RowGroups::padded(self.counts, self.all_rows()).expect("the rows were counted")
    }

    fn all_rows(&self) -> usize {
        self.counts.iter().sum::<usize>() + self.padding
    }

    fn between(&self) -> Between {
        Between {
            activation: self.activation,
            scale: 0.7,
        }
    }

    /// Output, delta alone, and gradients of `x`, `a`, `b` and the base.
    ///
    /// The base has three columns more on each side, and so have the rows of `x`.
    fn run<B>(
        &self,
        compute: Compute,
        dtype: DType,
        device: &B::Device,
    ) -> Vec<(&'static str, Matrix)>
    where
        B: AutodiffBackend + GroupedBackend,
    {
        let [d_in, d_out, rank] = self.extents;
        let (t, e) = (self.all_rows(), self.counts.len());
        let value = |seed, rows, columns| {
            // In what every type under test holds, so that all start from the same numbers.
            let values = noise(seed, rows, columns).values;
            let data = TensorData::new(values, [rows, columns]).convert_dtype(DType::BF16);
            Tensor::<B, 2>::from_data(data, (device, dtype))
        };
        let wide = value(1, t, d_in + 6).require_grad();
        let x = wide.clone().slice([0..t, 3..d_in + 3]);
        let a = value(2, e * rank, d_in).require_grad();
        let b = value(3, e * d_out, rank).require_grad();
        let base = value(4, t, d_out + 6).require_grad();
        let rows = self.rows();
        let z = shrink(
            x,
            a.clone().reshape([e, rank, d_in]),
            &rows,
            self.layout,
            compute,
        );
        let z = match self.gap {
            0 => z,
            gap => Tensor::cat(vec![z, value(7, t, gap)], 1).slice([0..t, 0..rank]),
        };
        let stacked = b.clone().reshape([e, d_out, rank]);
        let delta = expand(z.clone(), stacked.clone(), self.between(), &rows, compute);
        // A copy, so that there is a buffer to write into.
        let y = expand_into(
            base.clone() * 1.0,
            3..d_out + 3,
            z,
            stacked,
            self.between(),
            &rows,
            compute,
        );
        let loss =
            (y.clone() * value(5, t, d_out + 6)).sum() + (delta.clone() * value(6, t, d_out)).sum();
        let grads = loss.backward();
        let gradient = |of: &Tensor<B, 2>| of.grad(&grads).expect("every input is tracked");
        vec![
            ("y", matrix(y.inner())),
            ("delta", matrix(delta.inner())),
            ("dx", matrix(gradient(&wide))),
            ("da", matrix(gradient(&a))),
            ("db", matrix(gradient(&b))),
            ("dbase", matrix(gradient(&base))),
        ]
    }
}

fn matrix<B: Backend>(x: Tensor<B, 2>) -> Matrix {
    let [rows, columns] = x.dims();
    let data = x.into_data().convert::<f64>();
    Matrix {
        rows,
        columns,
        values: data.to_vec().expect("the data was converted"),
    }
}

/// Runs `cases`, by number, on the grouped kernels of `B`: ten in a row have all extents and all row
/// counts, seventy every combination. The error, relative to the largest magnitude, is at most `limit`.
///
/// # Panics
///
/// When a result is off, or when the backend has no such kernels.
pub fn kernels<B>(device: &B::Device, dtype: DType, tf32: bool, limit: f64, cases: Range<usize>)
where
    B: Backend + GroupedBackend,
{
    let compute = Compute {
        strategy: Strategy::Grouped,
        tf32,
    };
    let reference = Compute {
        strategy: Strategy::PerExpert,
        tf32: false,
    };
    for index in cases {
        // The numbers of both have no common divisor: in so many steps every pair comes once.
        let (counts, padding) = &COUNTS[index % COUNTS.len()];
        let extents = EXTENTS[index % EXTENTS.len()];
        B::grouped_kernels(device, dtype, extents[2]).expect("the backend has the kernels");
        let case = Case {
            counts,
            padding: *padding,
            extents,
            activation: [
                Activation::Identity,
                Activation::Silu,
                Activation::Gelu,
                Activation::Relu,
            ][index % 4],
            layout: [Layout::ByToken, Layout::ByFeature][(index / 4) % 2],
            // A multiple of what backends align slices to: smaller ones are copied.
            gap: [0, 0, 512][index % 3],
        };
        let expected = case.run::<Autodiff<Flex>>(reference, DType::F64, &Default::default());
        let found = case.run::<Autodiff<B>>(compute, dtype, device);
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            let error = relative_error(found, expected);
            assert!(
                error <= limit,
                "{name} of {counts:?} + {padding}, {extents:?}, {:?}, {:?}, gap {} in {dtype:?}: error {error:.2e} is more than {limit:.0e}",
                case.activation,
                case.layout,
                case.gap,
            );
        }
    }
}
