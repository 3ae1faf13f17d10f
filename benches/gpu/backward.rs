//! The four products of an adapter's backward pass alone, as `kernels` times the two of the forward
//! pass.

use burn::tensor::Tensor;
use burn_cubecl::cubecl::cuda::CudaDevice;
use burn_moe_lora::kernels::{Expanded, GroupedBackend};

use crate::case::RANK;
use crate::gpu::Gpu;
use crate::kernels::{B, BETWEEN, GROUPED, Place, Shape, measure, random, rows, sets};
use crate::report::Report;

/// Bytes of an element.
const ELEMENT: usize = 2;

/// `dx` and `dA` of a shrink.
pub fn shrink(
    gpu: &Gpu,
    device: &CudaDevice,
    shape: &Shape,
    (tokens, experts): (usize, usize),
    report: &mut Report,
) {
    let rows = rows(tokens, experts);
    let bytes =
        ELEMENT * (tokens * (shape.d_in + shape.rank_a) + experts * shape.rank_a * shape.d_in);
    let sets: Vec<_> = (0..sets(gpu, bytes))
        .map(|_| {
            let x = random([tokens, shape.d_in], 1.0, device);
            let a = random([experts, shape.rank_a, shape.d_in], 0.02, device);
            (random([tokens, shape.rank_a], 1.0, device), x, a)
        })
        .collect();
    for kernel in ["dx", "dA"] {
        let place = Place {
            kernel,
            shape: shape.name,
            tokens,
            experts,
            bytes,
        };
        measure(gpu, report, &place, |launch| {
            let (dz, x, a) = &sets[launch % sets.len()];
            let (x, a) = match kernel {
                "dx" => (None, Some(primitive(a))),
                _ => (Some(primitive(x)), None),
            };
            B::shrink_backward(primitive(dz), x, a, &rows, GROUPED);
        });
    }
}

/// `dz` and `dB` of an expansion.
pub fn expand(
    gpu: &Gpu,
    device: &CudaDevice,
    shape: &Shape,
    (tokens, experts): (usize, usize),
    report: &mut Report,
) {
    let rows = rows(tokens, experts);
    let bytes = ELEMENT * (tokens * (RANK + shape.d_out) + experts * shape.d_out * RANK);
    let sets: Vec<_> = (0..sets(gpu, bytes))
        .map(|_| {
            let z = random([tokens, RANK], 1.0, device);
            let b = random([experts, shape.d_out, RANK], 0.02, device);
            (random([tokens, shape.base], 1.0, device), z, b)
        })
        .collect();
    for kernel in ["dz", "dB"] {
        let place = Place {
            kernel,
            shape: shape.name,
            tokens,
            experts,
            bytes,
        };
        measure(gpu, report, &place, |launch| {
            let (dy, z, b) = &sets[launch % sets.len()];
            let saved = Expanded {
                columns: 0..shape.d_out,
                z: primitive(z),
                b: (kernel == "dz").then(|| primitive(b)),
                between: BETWEEN,
                rows: rows.clone(),
                compute: GROUPED,
            };
            B::expand_backward(primitive(dy), saved, kernel == "dB");
        });
    }
}

fn primitive<const D: usize>(tensor: &Tensor<B, D>) -> burn::tensor::ops::FloatTensor<B> {
    tensor.clone().into_primitive().tensor()
}
