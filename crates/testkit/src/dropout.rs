//! One suite for dropout of every backend: values and gradients have the bits of the host's mask.

use std::ops::Range;

use burn::backend::{Autodiff, Flex};
use burn::tensor::DType;
use burn::tensor::backend::{AutodiffBackend, Backend};
use moe_lora_kernels::{DropoutKey, DropoutMask, GroupedBackend, RowGroups, TokenIds, dropout};

use crate::{Matrix, noise};

/// Rows by expert, padding rows, and the global features of the columns: whole blocks of four, shards that
/// start inside of one, fragments, a single one.
fn cases() -> [(Vec<usize>, usize, Vec<Range<usize>>); 6] {
    let one = |range| std::iter::once(range).collect();
    [
        (vec![7], 0, one(0..64)),
        (vec![5, 0, 3], 0, one(4..20)),
        (vec![40, 7], 45, one(3..10)),
        (vec![100, 1, 0, 33, 64], 3, vec![6..11, 26..31]),
        (vec![1], 0, one(1_000_003..1_000_004)),
        (vec![2, 2], 1, vec![8..16, 72..80, 136..144]),
    ]
}

/// Output and input gradient of the dropout of a transposed view, which is not contiguous.
fn run<B>(mask: &DropoutMask, columns: usize, dtype: DType, device: &B::Device) -> [Matrix; 2]
where
    B: AutodiffBackend + GroupedBackend,
{
    let rows = mask.rows().all_rows();
    // In what every type under test holds.
    let value = |seed, rows, columns| {
        let values = noise(seed, rows, columns).map(|value| (value * 8.0).round() + 0.5);
        values.tensor_on::<B>(device, dtype)
    };
    let x = value(1, columns, rows).require_grad();
    let y = dropout(x.clone().transpose(), mask);
    let grads = (y.clone() * value(2, rows, columns)).sum().backward();
    let dx = x.grad(&grads).expect("the input is tracked");
    [Matrix::read(y), Matrix::read(dx)]
}

/// Compares dropout on `B` with the host's.
///
/// # Panics
///
/// When a bit differs.
pub fn dropout_masks<B: Backend + GroupedBackend>(device: &B::Device, dtype: DType) {
    for (counts, padding, features) in cases() {
        let counted: usize = counts.iter().sum();
        let ids = (u64::from(u32::MAX) - 2..).take(counted);
        let rows = RowGroups::padded(&counts, counted + padding).expect("the rows were counted");
        let rows = rows.with_tokens(TokenIds::new(1 << 40, ids));
        let key = DropoutKey {
            seed: u64::MAX - 1,
            layer: 1 << 63,
        };
        // Half of the elements: what is kept is doubled, in every type exactly.
        let mask = DropoutMask::new(0.5, key, &rows)
            .with_first_expert(3)
            .with_features(&features);
        let columns = features.iter().map(Range::len).sum();
        let expected = run::<Autodiff<Flex>>(&mask, columns, dtype, &Default::default());
        let found = run::<Autodiff<B>>(&mask, columns, dtype, device);
        assert_eq!(found, expected, "{counts:?} + {padding}, {features:?}");
        let kept = |x: &Matrix| x.values.iter().filter(|value| **value != 0.0).count();
        assert_eq!(kept(&found[0]), kept(&found[1]), "forward and backward");
    }
}
