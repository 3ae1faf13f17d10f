//! The grid in bf16 against the oracle in f64: within a hundredth of the norm, which is what a few
//! roundings to 8 bits leave; for whole MLPs and layers, the root mean square over their results.

use burn::tensor::DType;
use moe_lora_testkit::{Ad, Mocked};
use moe_lora_tests::grouped::KINDS;
use moe_lora_tests::{grid, moe};

#[test]
fn dense_linears_are_within_a_hundredth_in_bf16() {
    for size in [1, 2] {
        grid::dense_linears::<Ad>(&Mocked, size, DType::BF16);
    }
}

#[test]
fn shared_experts_are_within_a_hundredth_in_bf16() {
    for size in [1, 2] {
        grid::shared_experts::<Ad>(&Mocked, size, DType::BF16);
    }
}

#[test]
fn expert_linears_are_within_a_hundredth_in_bf16() {
    for size in [1, 2, 4] {
        grid::expert_linears::<Ad>(&Mocked, &KINDS, size, DType::BF16);
    }
}

#[test]
fn layers_are_within_a_hundredth_in_bf16() {
    let places = [moe::place(1, 1, 1, &[9]), moe::place(2, 1, 2, &[4, 5])];
    grid::layers::<Ad>(&Mocked, &places, DType::BF16);
    grid::layers_with_dropout::<Ad>(&Mocked, &places, DType::BF16);
    grid::layers_with_named_adapters::<Ad>(&Mocked, &places, DType::BF16);
}
