//! How large the deltas of adapters are, over all ranks.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use moe_lora_parallel::region::{GATHER_FROM, REDUCE_FROM};
use moe_lora_parallel::{GroupName, Mesh, ParallelBackend};

use crate::sync::over;
use crate::{ShardAxis, TrainedWeight};

/// How far an adapter moves its linear: the Frobenius norm of `s B A`, for each expert.
///
/// 0 for an adapter that does nothing yet, and of the factors' product alone: the magnitudes of DoRA
/// and a function between the factors are not taken into account.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterNorm {
    /// Path of the linear.
    pub linear: String,
    /// By global expert; one for a linear without experts.
    pub experts: Vec<f64>,
}

impl AdapterNorm {
    /// The norm over all experts.
    pub fn total(&self) -> f64 {
        let squares = self.experts.iter().map(|norm| norm * norm);
        squares.sum::<f64>().sqrt()
    }
}

/// The norm of every adapter, an entry each in the order of the weights. Every rank calls it and gets
/// the same bits.
///
/// ```text
/// ||s B A||^2 = s^2 <B^T B, A A^T>
/// ```
///
/// so that no rank holds a delta: of each factor the ranks bring `[E, r, r]` together, and the rows of
/// an `A` that is cut along `r`. Two small collectives an adapter, and one over the experts' ranks for
/// all. In f64, in f32 on backends without it.
///
/// # Panics
///
/// When a collective fails.
pub fn adapter_norms<B: ParallelBackend>(
    weights: &[TrainedWeight<'_, B>],
    mesh: &Mesh<B>,
) -> Vec<AdapterNorm> {
    let adapters = weights.windows(2).filter_map(|pair| match pair {
        [a, b] if [a.factor(), b.factor()] == ["lora_A", "lora_B"] => Some((a, b)),
        _ => None,
    });
    let adapters: Vec<_> = adapters.collect();
    // The experts that this rank holds, adapter by adapter.
    let squares = adapters.iter().map(|(a, b)| squares(a, b, mesh));
    let squares: Vec<Tensor<B, 1>> = squares.collect();
    let Some(all) = (!squares.is_empty()).then(|| Tensor::cat(squares.clone(), 0)) else {
        return Vec::new();
    };
    let ranks = over(all.unsqueeze::<2>(), GATHER_FROM, GroupName::Ep, mesh);
    let [ep, local] = ranks.dims();
    let ranks: Vec<f64> = ranks.into_data().iter::<f64>().collect();
    let mut first = 0;
    let norms = adapters.iter().zip(&squares).map(|((a, b), squares)| {
        let own = first..first + squares.dims()[0];
        first = own.end;
        // Every rank has the experts of an adapter, or the one square of a linear without.
        let of_experts = a.layout.experts.is_some() || b.layout.experts.is_some();
        let holders = if of_experts { ep } else { 1 };
        let squares = (0..holders).flat_map(|rank| &ranks[rank * local..][own.clone()]);
        AdapterNorm {
            linear: a.linear.into(),
            experts: squares.map(|square| norm(*square)).collect(),
        }
    });
    norms.collect()
}

/// Rounding can take a square of zero below it; max would hide a NaN.
fn norm(square: f64) -> f64 {
    if square < 0.0 { 0.0 } else { square.sqrt() }
}

/// `||s B A||^2` of this rank's experts, `[E]`.
fn squares<B: ParallelBackend>(
    a: &TrainedWeight<'_, B>,
    b: &TrainedWeight<'_, B>,
    mesh: &Mesh<B>,
) -> Tensor<B, 1> {
    let full = match a.layout.axis {
        // The axis of the gather comes first.
        ShardAxis::Out => over(wide(a).swap_dims(0, 1), GATHER_FROM, a.group, mesh).swap_dims(0, 1),
        ShardAxis::In | ShardAxis::Whole => wide(a),
    };
    let of_a = full.clone().matmul(full.transpose());
    let of_a = match a.layout.axis {
        ShardAxis::In => over(of_a, REDUCE_FROM, a.group, mesh),
        ShardAxis::Out | ShardAxis::Whole => of_a,
    };
    let rows = wide(b);
    let of_b = rows.clone().transpose().matmul(rows);
    let of_b = match b.layout.axis {
        ShardAxis::Out => over(of_b, REDUCE_FROM, b.group, mesh),
        ShardAxis::In | ShardAxis::Whole => of_b,
    };
    let scale = a.config.scale();
    let products = (of_a * of_b).mul_scalar(scale * scale);
    let experts = products.dims()[0];
    products
        .reshape([experts as i32, -1])
        .sum_dim(1)
        .reshape([experts])
}

fn wide<B: Backend>(factor: &TrainedWeight<'_, B>) -> Tensor<B, 3> {
    let values = factor.weight.untracked();
    let wide = B::supports_dtype(&values.device(), DType::F64);
    values.cast(if wide { DType::F64 } else { DType::F32 })
}
