//! What the examples share: an error type, made-up weights and a layer of them, and a comparison.

use burn_moe_lora::parallel::ParallelBackend;
use burn_moe_lora::prelude::*;

/// Hidden size of [`moe_layer`].
pub const HIDDEN: usize = 8;

/// What an example or a rank of it ends with.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// `count` made-up values in -0.25..0.25, the same on every rank and in every run.
pub fn noise(seed: usize, count: usize) -> Vec<f32> {
    let at = |i: usize| ((i * 37 + seed * 101 + i / 7 * 13) % 64) as f32 / 128.0 - 0.25;
    (0..count).map(at).collect()
}

/// A layer of four experts of width 16, two of them a token, without adapters. `examples/ideas/moe_layer.rs` spells it out.
///
/// # Errors
///
/// When the topology does not divide the sizes.
pub fn moe_layer<B: ParallelBackend>(mesh: &Mesh<B>) -> Result<MoeLayer<B>> {
    let (experts, wide) = (4, 16);
    let router = noise(1, experts * HIDDEN);
    let [gate, up, down] = [2, 3, 4].map(|seed| noise(seed, experts * wide * HIDDEN));
    let weights = MoeWeights {
        router: &router,
        experts: MlpWeights {
            gate: &gate,
            up: &up,
            down: &down,
            biases: None,
        },
        ..Default::default()
    };
    let config = MoeConfig::new("mlp", HIDDEN, wide, experts, 2);
    Ok(config.init(weights, mesh, &Default::default())?)
}

/// Asserts that two results agree within rounding, relative to the largest value.
///
/// # Panics
///
/// When they do not.
pub fn assert_close(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let magnitude = |values: &[f32]| values.iter().fold(0f32, |most, x| most.max(x.abs()));
    let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
    let (apart, largest) = (apart.fold(0f32, f32::max), magnitude(expected));
    assert!(
        largest > 0.0 && apart <= 1e-5 * largest,
        "{apart} apart, of {largest}"
    );
}
