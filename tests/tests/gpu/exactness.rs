//! The exactness grid on GPUs: on one of them with the mock, on two over NCCL, with and without
//! fusion.

use burn::backend::Autodiff;
use burn::tensor::DType;
use burn_cubecl::cubecl::cuda::CudaDevice;
use moe_lora_nccl::CudaBackend;
use moe_lora_parallel::ParallelBackend;
use moe_lora_testkit::{Mocked, Ranks, TrainingBackend};
use moe_lora_tests::grid;
use moe_lora_tests::grouped::KINDS;
use moe_lora_tests::moe::{Place, place};

use crate::ranks::{Connected, gpus};
use crate::{Fused, Plain};

/// At 1e-5 and at 1e-2 of the norm.
pub const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// The kinds of linears at TP = ETP = `size`.
fn linears<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize) {
    for dtype in DTYPES {
        grid::dense_linears::<B>(ranks, size, dtype);
        grid::shared_experts::<B>(ranks, size, dtype);
        grid::expert_linears::<B>(ranks, &KINDS, size, dtype);
    }
}

fn layers<B: TrainingBackend>(ranks: &impl Ranks<B>, places: &[Place]) {
    for dtype in DTYPES {
        grid::idle_experts::<B>(ranks, &place(1, 2, 1, &[1, 1]), dtype);
        grid::layers::<B>(ranks, places, dtype);
        grid::layers_with_dropout::<B>(ranks, places, dtype);
        grid::layers_with_named_adapters::<B>(ranks, places, dtype);
    }
}

/// All on one GPU.
fn mocked<B: TrainingBackend<Device = CudaDevice>>() {
    let Some(_gpus) = gpus(1) else { return };
    for size in [1, 2] {
        linears::<B>(&Mocked, size);
    }
    let places = [
        place(1, 1, 1, &[9]),
        place(1, 2, 1, &[8, 1]),
        place(2, 1, 2, &[4, 5]),
        place(2, 2, 2, &[1, 3, 1, 4]),
        place(1, 1, 4, &[1, 5, 1, 2]),
        place(1, 4, 1, &[4, 1, 3, 1]),
    ];
    layers::<B>(&Mocked, &places);
}

#[test]
fn adapters_are_exact_on_one_gpu_with_the_mock() {
    mocked::<Autodiff<Plain>>();
}

#[test]
fn adapters_are_exact_on_one_gpu_with_the_mock_and_fusion() {
    mocked::<Autodiff<Fused>>();
}

fn linears_over_nccl<B>()
where
    B: TrainingBackend + ParallelBackend<Base: CudaBackend, Device = CudaDevice>,
{
    let Some(_gpus) = gpus(2) else { return };
    linears::<B>(&Connected::new(), 2);
}

#[test]
fn linears_are_exact_on_two_gpus_at_tp_2_and_etp_2() {
    linears_over_nccl::<Autodiff<Plain>>();
}

#[test]
fn linears_are_exact_on_two_gpus_at_tp_2_and_etp_2_with_fusion() {
    linears_over_nccl::<Autodiff<Fused>>();
}

fn layers_over_nccl<B>()
where
    B: TrainingBackend + ParallelBackend<Base: CudaBackend, Device = CudaDevice>,
{
    let Some(_gpus) = gpus(2) else { return };
    let places = [
        place(2, 1, 2, &[4, 5]),
        place(2, 2, 1, &[8, 1]),
        place(1, 2, 1, &[4, 5]),
    ];
    layers::<B>(&Connected::new(), &places);
}

#[test]
fn layers_are_exact_on_two_gpus_at_tp_2_with_etp_2_and_with_ep_2() {
    layers_over_nccl::<Autodiff<Plain>>();
}

#[test]
fn layers_are_exact_on_two_gpus_at_tp_2_with_etp_2_and_with_ep_2_and_fusion() {
    layers_over_nccl::<Autodiff<Fused>>();
}
