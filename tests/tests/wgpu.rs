//! A part of the exactness grid on burn's WGPU backend with the mock. Without an adapter every test
//! says that it is skipped, and fails where `MOE_LORA_REQUIRE_WGPU` is set.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Autodiff;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::wgpu::WgpuRuntime;
use burn_fusion::Fusion;
use moe_lora_adapters::{Dropout, LoraConfig, Sharing};
use moe_lora_experts::WeighAt;
use moe_lora_testkit::{
    GateUpTargets, Mocked, dropout_masks, kernels, row_lengths, scaled_columns,
};
use moe_lora_tests::grouped::Kind;
use moe_lora_tests::moe::{case, place};
use moe_lora_tests::{grid, grouped, moe};

type Plain = CubeBackend<WgpuRuntime, f32, i32, u32>;
type Fused = Fusion<Plain>;

static ALONE: Mutex<()> = Mutex::new(());

/// The adapter, one test at a time; none where there is none, which is said.
fn adapter() -> Option<MutexGuard<'static, ()>> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // CubeCL panics when it finds none.
    let found = std::panic::catch_unwind(|| Plain::sync(&Default::default()).is_ok());
    if matches!(found, Ok(true)) {
        return Some(alone);
    }
    assert!(
        std::env::var_os("MOE_LORA_REQUIRE_WGPU").is_none(),
        "MOE_LORA_REQUIRE_WGPU is set, found no adapter"
    );
    let test = std::thread::current();
    let test = test.name().unwrap_or("a test");
    println!("{test} skipped: needs a WGPU adapter, found none");
    None
}

#[test]
fn grouped_kernels_are_the_products_of_each_expert() {
    let Some(_alone) = adapter() else { return };
    let device = Default::default();
    kernels::<Plain>(&device, DType::F32, false, 1e-5, 0..10);
    kernels::<Fused>(&device, DType::F32, false, 1e-5, 0..10);
}

#[test]
fn dropout_has_the_bits_of_the_host_s_masks() {
    let Some(_alone) = adapter() else { return };
    dropout_masks::<Plain>(&Default::default(), DType::F32);
    dropout_masks::<Fused>(&Default::default(), DType::F32);
}

#[test]
fn lengths_of_rows_and_columns_times_factors_are_those_of_the_host() {
    let Some(_alone) = adapter() else { return };
    let device = Default::default();
    row_lengths::<Plain>(&device, DType::F32, 1e-5);
    row_lengths::<Fused>(&device, DType::F32, 1e-5);
    scaled_columns::<Plain>(&device, DType::F32, 1e-5);
    scaled_columns::<Fused>(&device, DType::F32, 1e-5);
}

#[test]
fn layers_with_dropout_are_exact() {
    let Some(_alone) = adapter() else { return };
    for dropout in [Dropout::before_a(0.4), Dropout::after_b(0.4)] {
        let case = case(Sharing::PerExpert, GateUpTargets::Separate, DType::F32);
        let config = case.config.with_dropout(dropout);
        let case = moe::Case { config, ..case };
        case.check::<Autodiff<Plain>>(&Mocked, &place(1, 2, 2, &[3, 1, 4, 1]));
        case.check::<Autodiff<Fused>>(&Mocked, &place(1, 1, 2, &[4, 5]));
    }
}

#[test]
fn layers_with_named_adapters_are_exact() {
    let Some(_alone) = adapter() else { return };
    let places = [place(1, 2, 2, &[3, 1, 4, 1])];
    grid::layers_with_named_adapters::<Autodiff<Plain>>(&Mocked, &places, DType::F32);
    let places = [place(1, 1, 2, &[4, 5])];
    grid::layers_with_named_adapters::<Autodiff<Fused>>(&Mocked, &places, DType::F32);
}

#[test]
fn expert_linears_are_exact() {
    let Some(_alone) = adapter() else { return };
    for kind in [Kind::Column, Kind::Row] {
        for dora in [false, true] {
            let config = LoraConfig::new(grouped::RANK, grouped::ALPHA).with_dora(dora);
            let case = grouped::Case::new(kind, config, &[5, 0, 3]);
            let found = case.found::<Autodiff<Plain>>(&Mocked, 2);
            grouped::check(&case.name(2), DType::F32, &found, &case.expected());
        }
    }
}

#[test]
fn a_layer_is_exact_where_no_token_chose_a_rank_s_experts() {
    let Some(_alone) = adapter() else { return };
    grid::idle_experts::<Autodiff<Plain>>(&Mocked, &place(1, 2, 1, &[1, 1]), DType::F32);
    let case = case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32);
    case.check::<Autodiff<Plain>>(&Mocked, &place(1, 2, 2, &[3, 1, 4, 1]));
}

#[test]
fn layers_are_exact_with_fusion() {
    let Some(_alone) = adapter() else { return };
    for weigh_at in [WeighAt::Output, WeighAt::Hidden] {
        let case = case(Sharing::PerExpert, GateUpTargets::Separate, DType::F32);
        let case = moe::Case { weigh_at, ..case };
        case.check::<Autodiff<Fused>>(&Mocked, &place(1, 1, 2, &[4, 5]));
    }
}

#[test]
fn dense_linears_are_exact() {
    let Some(_alone) = adapter() else { return };
    grid::dense_linears::<Autodiff<Plain>>(&Mocked, 2, DType::F32);
}
