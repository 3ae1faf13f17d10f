//! The grouped kernels on WGPU: plain units, on a GPU or on a software Vulkan such as Mesa's.
//!
//! Without either the tests say that they are skipped, and fail where `MOE_LORA_REQUIRE_WGPU` is set.

use burn::backend::wgpu::CubeBackend;
use burn::backend::wgpu::WgpuDevice;
use burn::backend::wgpu::WgpuRuntime;
use burn::tensor::DType;
use burn_fusion::Fusion;
use moe_lora_testkit::kernels;

type Plain = CubeBackend<WgpuRuntime, f32, i32, u32>;

#[test]
fn kernels_are_the_products_of_each_expert() {
    kernels::<Plain>(&WgpuDevice::default(), DType::F32, false, 1e-5, false);
}

#[test]
fn kernels_are_the_products_of_each_expert_under_fusion() {
    kernels::<Fusion<Plain>>(&WgpuDevice::default(), DType::F32, false, 1e-5, false);
}
