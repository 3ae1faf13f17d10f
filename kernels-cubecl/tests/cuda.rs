//! The grouped kernels on CUDA: tensor cores for half precision and, when asked, for f32.
//!
//! Without a GPU the tests say that they are skipped, and fail where `MOE_LORA_REQUIRE_GPUS` asks
//! for one.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn_fusion::Fusion;
use moe_lora_testkit::kernels;

type Plain = CubeBackend<CudaRuntime, f32, i32, u8>;

/// The error of sums of products whose factors were rounded to these bits.
const BF16: f64 = 1e-2;
const F16: f64 = 2e-3;
const TF32: f64 = 2e-3;

fn gpu() -> Option<CudaDevice> {
    let required = std::env::var("MOE_LORA_REQUIRE_GPUS").is_ok_and(|n| n != "0");
    let found = std::path::Path::new("/dev/nvidia0").exists();
    assert!(
        found || !required,
        "MOE_LORA_REQUIRE_GPUS is set, there is no GPU"
    );
    if !found {
        println!("skipped: there is no GPU");
    }
    found.then(|| CudaDevice::new(0))
}

#[test]
fn f32_has_all_of_its_bits() {
    let Some(device) = gpu() else { return };
    kernels::<Plain>(&device, DType::F32, false, 1e-5, true);
}

#[test]
fn half_precision_is_summed_in_f32_on_tensor_cores() {
    let Some(device) = gpu() else { return };
    kernels::<Plain>(&device, DType::BF16, false, BF16, true);
    kernels::<Plain>(&device, DType::F16, false, F16, true);
}

#[test]
fn tf32_is_used_when_asked_for() {
    let Some(device) = gpu() else { return };
    kernels::<Plain>(&device, DType::F32, true, TF32, true);
}

#[test]
fn fusion_runs_the_same_kernels() {
    let Some(device) = gpu() else { return };
    kernels::<Fusion<Plain>>(&device, DType::F32, false, 1e-5, false);
    kernels::<Fusion<Plain>>(&device, DType::BF16, false, BF16, false);
}
