//! What runs on GPUs. Without them every test says that it is skipped, and fails where
//! `MOE_LORA_REQUIRE_GPUS` asks for them.

mod exactness;
mod four;
mod kernels;
mod processes;
mod ranks;
mod transport;

use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::CudaRuntime;
use burn_fusion::Fusion;

type Plain = CubeBackend<CudaRuntime, f32, i32, u8>;
type Fused = Fusion<Plain>;
