//! The grid of four GPUs on the CPU: with ranks that know all results, and with ranks that have them
//! from each other, as processes do.

use burn::tensor::DType;
use moe_lora_testkit::{Ad, Member, Mocked, mock};
use moe_lora_tests::grid;
use moe_lora_tests::moe::place;

#[test]
fn adapters_are_exact_on_four_ranks() {
    grid::four_ranks::<Ad>(&Mocked, DType::F32);
}

#[test]
fn adapters_are_exact_in_the_eyes_of_each_of_four_ranks() {
    let place = place(1, 2, 2, &[1, 1, 1, 1]);
    let ran = mock(place.topology).run(|rank| {
        let member = Member::<Ad, _>::new(rank, Default::default());
        grid::idle_experts::<Ad>(&member, &place, DType::F32);
        grid::layers_with_named_adapters::<Ad>(&member, std::slice::from_ref(&place), DType::F32);
    });
    ran.unwrap_or_else(|error| panic!("{error}"));
}
