//! The grouped kernels: tensor cores for half precision and, when asked, for f32.

use burn::tensor::DType;
use burn_cubecl::cubecl::cuda::CudaDevice;
use moe_lora_testkit::{dropout_masks, kernels};

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
    kernels::<Plain>(&device, DType::F32, false, 1e-5, 10);
}

#[test]
fn half_precision_is_summed_in_f32_on_tensor_cores() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    kernels::<Plain>(&device, DType::BF16, false, BF16, 35);
    kernels::<Plain>(&device, DType::F16, false, F16, 10);
}

#[test]
fn tf32_is_used_when_asked_for() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    kernels::<Plain>(&device, DType::F32, true, TF32, 10);
}

#[test]
fn fusion_runs_the_same_kernels() {
    let Some(_gpus) = gpus(1) else { return };
    let device = CudaDevice::new(0);
    kernels::<Fused>(&device, DType::F32, false, 1e-5, 10);
    kernels::<Fused>(&device, DType::BF16, false, BF16, 10);
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
