//! Dropout whose mask is a function of what an element is, not of where it lies: the same at every
//! topology, and drawn again rather than kept.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorData, TensorMetadata, TensorPrimitive};

use crate::low_rank;
use crate::philox::{halves, philox};
use crate::{Compute, GroupedBackend, Layout, RowGroups, TokenIds};

/// Features that share one counter of the generator: it gives four words.
pub(crate) const FEATURES: usize = 4;

/// Names the dropout of one layer among all of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropoutKey {
    /// Seed of the run.
    pub seed: u64,
    /// A hash of the layer's path.
    pub layer: u64,
}

/// The elements of an activation that dropout keeps. What is kept is divided by `1 - p`.
///
/// Whether an element is kept depends on the key, the step, the global token and expert of its row and the
/// global feature of its column, and on nothing else.
#[derive(Clone, Debug, PartialEq)]
pub struct DropoutMask {
    pub(crate) key: [u32; 2],
    probability: f64,
    pub(crate) rows: RowGroups,
    pub(crate) first_expert: u32,
    pub(crate) features: FeatureRuns,
}

/// The global features of local columns: runs of `width`, the first from `first` on, `stride` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FeatureRuns {
    pub first: u32,
    pub width: u32,
    pub stride: u32,
}

impl DropoutMask {
    /// Drops with `probability` in `0..1`, columns being features from 0 on and row groups experts from 0 on.
    ///
    /// # Panics
    ///
    /// When the rows come without [tokens](RowGroups::with_tokens), or the probability is outside.
    pub fn new(probability: f64, key: DropoutKey, rows: &RowGroups) -> Self {
        assert!(
            (0.0..1.0).contains(&probability),
            "dropout probability {probability} is not in 0..1"
        );
        let tokens = rows
            .tokens()
            .expect("the rows have the ids of their tokens");
        let ([step0, step1], [layer0, layer1]) = (halves(tokens.step()), halves(key.layer));
        let [key0, key1, ..] = philox([step0, step1, layer0, layer1], halves(key.seed));
        Self {
            key: [key0, key1],
            probability,
            rows: rows.clone(),
            first_expert: 0,
            features: FeatureRuns {
                first: 0,
                width: u32::MAX,
                stride: 0,
            },
        }
    }

    /// The global expert of the first row group.
    pub fn with_first_expert(mut self, expert: usize) -> Self {
        self.first_expert = word(expert);
        self
    }

    /// The global features of the columns: equal runs at equal distances.
    ///
    /// # Panics
    ///
    /// When there are none, or when they are not equal.
    pub fn with_features(mut self, runs: &[Range<usize>]) -> Self {
        let stride = runs.get(1).map_or(0, |second| second.start - runs[0].start);
        for (k, run) in runs.iter().enumerate() {
            assert!(
                run.len() == runs[0].len() && run.start == runs[0].start + k * stride,
                "runs {runs:?} of features are not equal"
            );
        }
        self.features = FeatureRuns {
            first: word(runs[0].start),
            width: word(runs[0].len()).max(1),
            stride: word(stride),
        };
        self
    }

    /// Whether the element of this global token, expert and feature is kept.
    pub fn keeps(&self, token: u64, expert: usize, feature: usize) -> bool {
        self.words(token, word(expert), word(feature / FEATURES))[feature % FEATURES]
            >= self.threshold()
    }

    /// The rows that it is of.
    pub fn rows(&self) -> &RowGroups {
        &self.rows
    }

    /// `1 / (1 - p)`.
    pub fn scale(&self) -> f64 {
        (1.0 - self.probability).recip()
    }

    /// Words below it are dropped.
    pub(crate) fn threshold(&self) -> u32 {
        (self.probability * (1u64 << 32) as f64) as u32
    }

    pub(crate) fn tokens(&self) -> &TokenIds {
        self.rows.tokens().expect("checked when the mask was made")
    }

    fn words(&self, token: u64, expert: u32, block: u32) -> [u32; FEATURES] {
        let [low, high] = halves(token);
        philox([low, high, block, expert], self.key)
    }

    /// What each element is multiplied by, `[rows, columns]`. Padding rows are dropped.
    fn factors(&self, columns: usize) -> TensorData {
        let all_rows = self.rows.all_rows();
        let (threshold, scale) = (self.threshold(), self.scale() as f32);
        let ids = self.tokens().ids();
        let mut factors = vec![0.0f32; all_rows * columns];
        for group in 0..self.rows.experts() {
            let expert = self.first_expert + word(group);
            for row in self.rows.range(group) {
                let mut block = None;
                let mut words = [0; FEATURES];
                for column in 0..columns {
                    let feature = self.features.at(word(column)) as usize;
                    if block != Some(feature / FEATURES) {
                        block = Some(feature / FEATURES);
                        words = self.words(ids[row], expert, word(feature / FEATURES));
                    }
                    if words[feature % FEATURES] >= threshold {
                        factors[row * columns + column] = scale;
                    }
                }
            }
        }
        TensorData::new(factors, [all_rows, columns])
    }
}

impl FeatureRuns {
    fn at(self, column: u32) -> u32 {
        self.first + column / self.width * self.stride + column % self.width
    }
}

fn word(index: usize) -> u32 {
    u32::try_from(index).expect("experts and features are fewer than 2^32")
}

/// `x` with the mask's elements kept and divided by `1 - p`, the others zero. Backward: the same of
/// the cotangent; the mask is drawn again.
///
/// # Shapes
///
/// `x [T, n]` -> `[T, n]`
///
/// # Panics
///
/// When the mask is for another number of rows.
pub fn dropout<B: GroupedBackend>(x: Tensor<B, 2>, mask: &DropoutMask) -> Tensor<B, 2> {
    check("dropout", x.dims(), mask);
    let y = B::dropout(x.into_primitive().tensor(), mask);
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

/// [`shrink`](crate::shrink) of the [`dropout`] of `x`. Backward needs `x` alone: what was left of it is
/// computed again.
///
/// # Shapes
///
/// `x [T, d_in]` sorted by expert, `a [E, r, d_in]` -> `[T, r]`
///
/// # Panics
///
/// When the groups do not cover the rows, when shapes of `x` and `a` do not match, or when the mask
/// is for another number of rows.
pub fn shrink_dropped<B: GroupedBackend>(
    x: Tensor<B, 2>,
    mask: &DropoutMask,
    a: Tensor<B, 3>,
    rows: &RowGroups,
    layout: Layout,
    compute: Compute,
) -> Tensor<B, 2> {
    check("shrink_dropped", x.dims(), mask);
    rows.check("shrink_dropped", x.dims(), a.dims());
    low_rank::require_kernels(&a, a.dims()[1], compute);
    let z = B::shrink_dropped(
        x.into_primitive().tensor(),
        mask,
        a.into_primitive().tensor(),
        rows,
        layout,
        compute,
    );
    Tensor::from_primitive(TensorPrimitive::Float(z))
}

/// `base` with the [`dropout`] of `delta` added to its columns, in place where its buffer has no other
/// owner. Backward: the cotangent for `base`, what the mask keeps of its columns for `delta`.
///
/// # Shapes
///
/// `base [T, n]`, `delta [T, columns]` -> `[T, n]`
///
/// # Panics
///
/// When shapes do not match, or when the mask is for another number of rows.
pub fn add_dropped<B: GroupedBackend>(
    base: Tensor<B, 2>,
    columns: Range<usize>,
    delta: Tensor<B, 2>,
    mask: &DropoutMask,
) -> Tensor<B, 2> {
    check("add_dropped", delta.dims(), mask);
    let ([rows, n], delta_dims) = (base.dims(), delta.dims());
    assert!(
        delta_dims == [rows, columns.len()] && columns.end <= n,
        "add_dropped: columns {columns:?} of base [{rows}, {n}] do not take delta {delta_dims:?}",
    );
    let y = B::add_dropped(
        base.into_primitive().tensor(),
        columns,
        delta.into_primitive().tensor(),
        mask,
    );
    Tensor::from_primitive(TensorPrimitive::Float(y))
}

fn check(what: &str, x: [usize; 2], mask: &DropoutMask) {
    assert!(
        x[0] == mask.rows.all_rows(),
        "{what}: x {x:?} does not fit a mask of {} rows",
        mask.rows.all_rows(),
    );
}

/// The reference: the mask is drawn on the host.
pub(crate) fn on_host<B: Backend>(x: FloatTensor<B>, mask: &DropoutMask) -> FloatTensor<B> {
    let factors = mask.factors(x.shape()[1]).convert_dtype(x.dtype());
    let factors = B::float_from_data(factors, &B::float_device(&x));
    B::float_mul(x, factors)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: DropoutKey = DropoutKey { seed: 5, layer: 9 };

    fn mask(key: DropoutKey, step: u64, ids: Range<u64>) -> DropoutMask {
        let rows = RowGroups::whole(ids.clone().count()).with_tokens(TokenIds::new(step, ids));
        DropoutMask::new(0.3, key, &rows)
    }

    fn factors(mask: &DropoutMask, columns: usize) -> Vec<f32> {
        mask.factors(columns).to_vec().unwrap()
    }

    #[test]
    fn every_part_of_what_names_an_element_changes_the_mask() {
        let base = mask(KEY, 3, 0..50);
        let all = factors(&base, 40);
        for other in [
            mask(DropoutKey { seed: 6, ..KEY }, 3, 0..50),
            mask(DropoutKey { layer: 8, ..KEY }, 3, 0..50),
            mask(KEY, 4, 0..50),
            mask(KEY, 3, 50..100),
            mask(KEY, 3, 1 << 32..(1 << 32) + 50),
            base.clone().with_first_expert(1),
            base.clone().with_features(std::slice::from_ref(&(40..80))),
        ] {
            let other = factors(&other, 40);
            let same = all.iter().zip(&other).filter(|(a, b)| a == b).count();
            // Independent masks agree on 0.3^2 + 0.7^2 of the elements.
            let share = same as f64 / all.len() as f64;
            assert!((share - 0.58).abs() < 0.06, "{share}");
        }
    }

    #[test]
    fn rows_columns_and_groups_find_their_own_part_of_the_mask() {
        let whole = mask(KEY, 3, 0..6);
        let at = |token: u64, expert, feature| match whole.keeps(token, expert, feature) {
            true => whole.scale() as f32,
            false => 0.0,
        };
        // Tokens out of order over experts 2, 3 and 4, two rows of padding, columns of a fused shard.
        let ids = [4, 1, 0, 5];
        let rows = RowGroups::padded(&[1, 0, 3], 6).unwrap();
        let rows = rows.with_tokens(TokenIds::new(3, ids));
        let part = DropoutMask::new(0.3, KEY, &rows)
            .with_first_expert(2)
            .with_features(&[5..8, 15..18]);
        let features = [5, 6, 7, 15, 16, 17];
        let expected: Vec<f32> = (0..6)
            .flat_map(|row| features.map(|feature| (row, feature)))
            .map(|(row, feature)| match ids.get(row) {
                Some(token) => at(*token, if row == 0 { 2 } else { 4 }, feature),
                None => 0.0,
            })
            .collect();
        assert_eq!(factors(&part, 6), expected);
    }

    #[test]
    fn the_share_of_dropped_elements_is_the_probability() {
        let rows = RowGroups::whole(400).with_tokens(TokenIds::new(0, 0..400));
        for probability in [0.0, 0.1, 0.5, 0.9] {
            let mask = DropoutMask::new(probability, KEY, &rows);
            let factors = factors(&mask, 100);
            let dropped = factors.iter().filter(|factor| **factor == 0.0).count();
            let share = dropped as f64 / factors.len() as f64;
            assert!((share - probability).abs() < 0.01, "{share}");
            let kept = factors.iter().find(|factor| **factor != 0.0).unwrap();
            assert_eq!(*kept, (1.0 / (1.0 - probability)) as f32);
        }
    }
}
