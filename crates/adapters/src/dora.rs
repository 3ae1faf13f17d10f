//! DoRA: the rows of `W + s B A` at trained lengths.
//!
//! `y = (m / n) * (W x + s B A x)` with `m` trained and `n` the row norms of `W + s B A`, constants
//! to the backward pass. `m / n` scales output columns, so it multiplies the terms of a sum as well
//! as the sum; the bias is not scaled.
//!
//! With dropout the norms are those of the undropped `W + s B A`, and only the adapter drops:
//! `(m / n) * (W x + s B A drop(x))`. PEFT's `(m / n - 1) W` reads the dropped input too, for which it
//! multiplies by `W` twice; the two agree where `m = n`, and without dropout.
//!
//! Under a row-parallel base no rank has a whole row. With `M = W A^T` and `G = A A^T`, sums over
//! the ranks both, `n^2 = |W|^2 + 2 s (M . B) + s^2 (B G . B)` row by row:
//!
//! | base | collectives, forward / backward |
//! |---|---|
//! | column-parallel | all-gather of `A` / none |
//! | row-parallel | reduce-scatter of `M` and `\|W\|^2`, `[d_out, r + 1]`; all-reduce of `G`; all-gather of `m / n` / reduce-scatter of its `[d_out]` |
//! | replicated | none |
//!
//! # Source
//!
//! DoRA: Weight-Decomposed Low-Rank Adaptation, arXiv:2402.09353, sections 4.1 and 4.3.

use burn::tensor::{Tensor, TensorData};
use moe_lora_kernels::{Compute, RowTerms, row_norms, row_terms};
use moe_lora_parallel::region::{GATHER_FROM, REDUCE_FROM, REDUCE_SCATTER, apply};
use moe_lora_parallel::{Group, GroupKind};

use crate::{AdapterBackend, Lora, Placement, ShardAxis};

impl<B: AdapterBackend, G: GroupKind, P: Placement> Lora<B, G, P> {
    /// `m / n` of the rows that the rank has in its `B`, `[E, d_out / P]`, for the local base weight
    /// `[E, d_out, d_in]`. Gradients reach `m` alone.
    ///
    /// # Panics
    ///
    /// When there are no magnitudes, or when a collective fails.
    pub(crate) fn row_factors(&self, base: Tensor<B, 3>, group: &Group<B, G>) -> Tensor<B, 2> {
        let magnitude = self.magnitude.as_ref().unwrap_or_else(|| {
            panic!(
                "{}: the magnitudes of DoRA are not there yet (call start_magnitudes after adapt, or load them)",
                self.path()
            )
        });
        // A row of zeros has no direction: it stays zero.
        let norms = self.row_norms(base, group, 1.0);
        (magnitude.weight.stacked() / norms).squeeze_dim(2)
    }

    /// Starts the magnitudes at the row norms, where there are none yet.
    pub(crate) fn start_magnitude(&mut self, base: Tensor<B, 3>, group: &Group<B, G>) {
        if self.config().dora && self.magnitude.is_none() {
            let norms = self.row_norms(base, group, 0.0);
            self.set_magnitude(norms);
        }
    }

    /// The norms of the rows of `W + s B A` that the rank has in its `B`, `[E, d_out / P, 1]`, with
    /// `of_zero` for those that are zero. In f32, or in f64 for factors of f64, and outside of the graph.
    ///
    /// `M` and `G` are products of what `W` and `A` are in, where both are in the same type.
    fn row_norms(&self, base: Tensor<B, 3>, group: &Group<B, G>, of_zero: f64) -> Tensor<B, 3> {
        let wide = self.magnitude_dtype();
        let (scale, rank) = (self.config().scale(), self.config().rank);
        let [experts, rows, _] = base.dims();
        let of_every_expert = |factor: Tensor<B, 3>| match factor.dims()[0] == experts {
            true => factor,
            false => factor.repeat_dim(0, experts),
        };
        let a = of_every_expert(match P::AXIS {
            ShardAxis::Out => self.a.gather(group),
            ShardAxis::In | ShardAxis::Whole => self.a.weight.untracked(),
        });
        let b = of_every_expert(self.b.weight.untracked());
        // Norms decide every output: not in TF32, whatever the adapter's own products are in.
        let compute = Compute {
            tf32: false,
            ..self.config().compute
        };
        let mut terms = row_terms(base, a, self.norm_rows(experts, rows), wide, compute);
        if P::AXIS == ShardAxis::In && group.size() > 1 {
            let sizes = vec![rows / group.size(); group.size()].into();
            let sums = Tensor::cat(vec![terms.products.cast(wide), terms.squares], 2);
            let sums = apply(sums, REDUCE_SCATTER, group, 1, &sizes);
            terms = RowTerms {
                squares: sums.clone().narrow(2, rank, 1),
                products: sums.narrow(2, 0, rank),
                gram: apply(terms.gram.cast(wide), REDUCE_FROM, group, 0, &[].into()),
            };
        }
        row_norms(terms, b, scale, of_zero)
    }

    /// The merged weight of the local `W + s B A [E, d_out, d_in]`: its rows at the lengths `m`,
    /// where there are any. The norms are summed in f64 over whole rows from their first column
    /// on, so that the bits are the same at every topology.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub(crate) fn at_magnitudes(&self, sum: Tensor<B, 3>, group: &Group<B, G>) -> Tensor<B, 3> {
        let Some(magnitude) = &self.magnitude else {
            return sum;
        };
        let (whole, magnitude) = match P::AXIS {
            ShardAxis::In => {
                let sizes = vec![sum.dims()[2]; group.size()].into();
                let whole = apply(sum.clone(), GATHER_FROM, group, 2, &sizes);
                (whole, magnitude.gather(group))
            }
            ShardAxis::Out | ShardAxis::Whole => (sum.clone(), magnitude.weight.untracked()),
        };
        let [experts, rows, d_in] = whole.dims();
        let whole: Vec<f64> = whole.into_data().iter::<f64>().collect();
        let lengths: Vec<f64> = magnitude.into_data().iter::<f64>().collect();
        let factors = whole.chunks_exact(d_in).zip(lengths).map(|(row, length)| {
            let norm = row.iter().fold(0.0, |sum, w| sum + w * w).sqrt();
            // A row of zeros has no direction: it stays zero.
            if norm > 0.0 { length / norm } else { 1.0 }
        });
        let factors = TensorData::new(factors.collect(), [experts, rows, 1]);
        let place = (&sum.device(), sum.dtype());
        sum * Tensor::from_data(factors, place)
    }
}
