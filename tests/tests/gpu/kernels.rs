//! The grouped kernels: tensor cores for half precision and, when asked, for f32.

use std::ops::Range;

use burn::tensor::DType;
use burn_cubecl::cubecl::cuda::CudaDevice;
use moe_lora_testkit::{dropout_masks, kernels, row_lengths, scaled_columns};

use crate::ranks::gpus;
use crate::{Fused, Plain};

/// The error of sums of products whose factors were rounded to these bits.
const BF16: f64 = 1e-2;
const F16: f64 = 2e-3;
const TF32: f64 = 2e-3;

#[test]
fn f32_has_all_of_its_bits() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    kernels::<Plain>(&device, DType::F32, false, 1e-5, 0..10);
}

/// Every case compiles its own kernels, which takes most of the time: the cases of bf16 are cut in three,
/// for processes beside each other.
fn half_precision(dtype: DType, limit: f64, cases: Range<usize>) {
    let Some(_gpus) = gpus(1) else { return };
    kernels::<Plain>(&CudaDevice::new(0), dtype, false, limit, cases);
}

#[test]
fn bf16_is_summed_in_f32_on_tensor_cores() {
    half_precision(DType::BF16, BF16, 0..12);
}

#[test]
fn bf16_is_summed_in_f32_on_tensor_cores_in_other_shapes() {
    half_precision(DType::BF16, BF16, 12..24);
}

#[test]
fn bf16_is_summed_in_f32_on_tensor_cores_in_further_shapes() {
    half_precision(DType::BF16, BF16, 24..35);
}

#[test]
fn f16_is_summed_in_f32_on_tensor_cores() {
    half_precision(DType::F16, F16, 0..10);
}

#[test]
fn tf32_is_used_when_asked_for() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    kernels::<Plain>(&device, DType::F32, true, TF32, 0..10);
}

#[test]
fn fusion_runs_the_same_kernels() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    kernels::<Fused>(&device, DType::F32, false, 1e-5, 0..10);
    kernels::<Fused>(&device, DType::BF16, false, BF16, 0..10);
}

#[test]
fn dropout_has_the_bits_of_the_host_s_masks() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        dropout_masks::<Plain>(&device, dtype);
        dropout_masks::<Fused>(&device, dtype);
    }
}

#[test]
fn lengths_of_rows_and_columns_times_factors_are_those_of_the_host() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::BF16, BF16), (DType::F16, F16)] {
        row_lengths::<Plain>(&device, dtype, limit);
        row_lengths::<Fused>(&device, dtype, limit);
        scaled_columns::<Plain>(&device, dtype, limit);
        scaled_columns::<Fused>(&device, dtype, limit);
    }
}
