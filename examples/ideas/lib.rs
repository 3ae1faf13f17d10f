//! What the examples share: an error type, made-up weights, and a comparison.

/// What an example or a rank of it ends with.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// `count` made-up values in -0.25..0.25, the same on every rank and in every run.
pub fn noise(seed: usize, count: usize) -> Vec<f32> {
    let at = |i: usize| ((i * 37 + seed * 101 + i / 7 * 13) % 64) as f32 / 128.0 - 0.25;
    (0..count).map(at).collect()
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
