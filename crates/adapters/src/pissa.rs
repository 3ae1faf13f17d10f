//! PiSSA: factors that start as the principal part of the weight, over a base that keeps the rest.
//!
//! With the singular value decomposition `W = U S V^T`, largest values first,
//! `A = sqrt(S_r / s) V_r^T` and `B = U_r sqrt(S_r / s)`, so `s B A` is the part of `W` with its `r`
//! largest singular values, and the base becomes `W - s B A`. The largest element of each column of
//! `U` is positive.
//!
//! The decomposition is one of the full weight, of each expert's own, in f64 on the host of one rank
//! of the group, so that factors and base have the same bits at every topology. Ranks of other groups
//! compute the same on processors of the same kind.
//!
//! # Source
//!
//! PiSSA: Principal Singular Values and Singular Vectors Adaptation, arXiv:2404.02948.

use std::marker::PhantomData;

use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use faer::diag::Diag;
use faer::dyn_stack::{MemBuffer, MemStack};
use faer::linalg::svd::{ComputeSvdVectors, svd, svd_scratch};
use faer::{Mat, MatRef, Par};
use moe_lora_parallel::region::{REDUCE_FROM, apply};
use moe_lora_parallel::{Group, GroupKind};

use crate::merge::in_f32;
use crate::{
    AdapterBackend, AdapterError, Linear, Lora, LoraConfig, PlacedWeight, Placement, Weight,
    WeightLayout,
};

/// Where the factors of a PiSSA adapter started, frozen: the base is the weight without their product.
///
/// With them the adapter is a plain one of twice the rank on the weight itself,
/// `W + s [B, -B_0] [A; A_0]`. Zeros before the factors are started or loaded.
#[derive(Module, Debug)]
pub struct PissaStart<B: Backend, G: GroupKind, P: Placement> {
    /// The first `A`.
    pub a: PlacedWeight<B, G, P>,
    /// The first `B`.
    pub b: PlacedWeight<B, G, P::Up>,
    /// Whether the base is without their product.
    #[module(skip)]
    left_base: bool,
    #[module(skip)]
    place: PhantomData<(G, P)>,
}

impl<B: Backend, G: GroupKind, P: Placement> PissaStart<B, G, P> {
    /// Zeros, for a base of the layout `base` at `path`.
    pub(crate) fn init(
        path: &str,
        config: &LoraConfig,
        [a, b]: [&WeightLayout; 2],
        device: &B::Device,
    ) -> Result<Self, AdapterError> {
        let shape = [b.d_out, a.d_in];
        if shape.into_iter().any(|extent| extent < config.rank) {
            return Err(AdapterError::PissaRank {
                path: path.into(),
                rank: config.rank,
                shape,
            });
        }
        let zeros = |layout: &WeightLayout| {
            Weight::from_values(
                layout.gather(|_, _, _| 0.0),
                layout,
                config.dtype,
                false,
                device,
            )
        };
        Ok(Self {
            a: PlacedWeight::new(zeros(a), a.clone()),
            b: PlacedWeight::new(zeros(b), b.clone()),
            left_base: false,
            place: PhantomData,
        })
    }
}

/// PiSSA cannot leave the rest of a weight in a base of integers.
pub(crate) fn check_base(
    path: &str,
    config: &LoraConfig,
    dtype: DType,
) -> Result<(), AdapterError> {
    match config.pissa && !dtype.is_float() {
        false => Ok(()),
        true => Err(AdapterError::PissaBase {
            path: path.into(),
            dtype,
        }),
    }
}

impl<B: AdapterBackend, G: GroupKind, P: Placement> Linear<B, G, P> {
    /// Starts the factors of PiSSA adapters as the principal parts of their weights and leaves the
    /// rest in the base, rounded to its type: the output is then what it was, within rounding. Every
    /// rank of the group calls it, after [`adapt`](Self::adapt) and before the first pass. A second
    /// call does nothing.
    ///
    /// To resume from a checkpoint, load the factors first: then the base is rid of the product that
    /// is stored, without a decomposition. The full weight of the rank's experts is gathered for the
    /// length of the call.
    ///
    /// # Errors
    ///
    /// When a weight has no singular value decomposition; every rank of the group gets the error then.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn start_pissa(&mut self, group: &Group<B, G>) -> Result<(), AdapterError> {
        for at in 0..self.adapters.len() {
            let (lora, local) = (&self.adapters[at], self.columns(self.adapters[at].path()));
            let Some(start) = lora.pissa.as_ref().filter(|start| !start.left_base) else {
                continue;
            };
            let largest = start.b.gather(group).abs().max().into_data();
            if largest.iter::<f64>().all(|largest| largest == 0.0) {
                // Each rank has its share of the fragments before, which alone start beyond row 0.
                let first = local.start * group.size();
                let rows = first..first + start.b.layout().d_out;
                let full = self.weight.gather(group).slice_dim(1, rows);
                self.adapters[at].start_from(full, group)?;
            }
            let base = self.weight.weight.untracked();
            let (dtype, base) = (base.dtype(), in_f32(base));
            let [experts, _, d_in] = base.dims();
            let place = [0..experts, local, 0..d_in];
            let lora = &mut self.adapters[at];
            let rest = base.clone().slice(place.clone()) - lora.start_weight(group);
            let base = base.slice_assign(place, rest).cast(dtype);
            if let Some(start) = &mut lora.pissa {
                start.left_base = true;
            }
            self.weight.weight.replace(base);
        }
        Ok(())
    }
}

impl<B: AdapterBackend, G: GroupKind, P: Placement> Lora<B, G, P> {
    /// # Panics
    ///
    /// When it is a PiSSA adapter that was not started.
    pub(crate) fn expect_started(&self) {
        if let Some(start) = &self.pissa {
            assert!(
                start.left_base,
                "{}: the base still has the part that PiSSA's factors start from (call start_pissa after adapt)",
                self.path()
            );
        }
    }

    /// Starts `A` and `B` from the full weights `[E, d_out, d_in]` of the rank's experts.
    fn start_from(&mut self, full: Tensor<B, 3>, group: &Group<B, G>) -> Result<(), AdapterError> {
        let ([experts, d_out, d_in], device) = (full.dims(), full.device());
        let (rank, scale) = (self.config().rank, self.config().scale());
        let mut a = vec![0.0; experts * rank * d_in];
        let mut b = vec![0.0; experts * d_out * rank];
        let factors = a.chunks_mut(rank * d_in).zip(b.chunks_mut(d_out * rank));
        for (expert, (a, b)) in factors.enumerate() {
            // One rank for each expert; the sum below has no other term.
            if expert % group.size() == group.rank() {
                let weight = full.clone().narrow(0, expert, 1).into_data();
                let weight: Vec<f64> = weight.iter::<f64>().collect();
                principal_part(&weight, [d_out, d_in], scale, a, b);
            }
        }
        let of_all = |values: Vec<f32>| -> Vec<f32> {
            let length = values.len();
            let values = TensorData::new(values, [length]);
            let values = Tensor::<B, 1>::from_data(values, (&device, DType::F32));
            let values = apply(values, REDUCE_FROM, group, 0, &[].into());
            values.into_data().iter::<f32>().collect()
        };
        let (a, b) = (of_all(a), of_all(b));
        let first = self.first_expert();
        if let Some(element) = a.iter().position(|value| !value.is_finite()) {
            return Err(AdapterError::NoSvd {
                path: self.path().into(),
                expert: first.map(|first| first + element / (rank * d_in)),
            });
        }
        let dtype = self.config().dtype;
        let cut = |layout: &WeightLayout, full: &[f32], trained| {
            let [rows, columns] = [layout.d_out, layout.d_in];
            let values = layout.gather(|expert, row, column| {
                let expert = expert - first.unwrap_or(0);
                full[(expert * rows + row) * columns + column]
            });
            Weight::from_values(values, layout, dtype, trained, &device)
        };
        let start = self.pissa.as_mut().expect("a PiSSA adapter has a start");
        start.a.weight = cut(start.a.layout(), &a, false);
        start.b.weight = cut(start.b.layout(), &b, false);
        self.a.weight = cut(self.a.layout(), &a, true);
        self.b.weight = cut(self.b.layout(), &b, true);
        Ok(())
    }

    /// The product that the base is without, in the base's sharding.
    fn start_weight(&self, group: &Group<B, G>) -> Tensor<B, 3> {
        let start = self.pissa.as_ref().expect("a PiSSA adapter has a start");
        self.product(&start.a, &start.b, group)
    }
}

/// Writes `A [r, d_in]` and `B [d_out, r]` with `scale * B A` the principal part of `weight`, or NaN
/// where there is none. In row-major order all.
fn principal_part(weight: &[f64], [m, n]: [usize; 2], scale: f64, a: &mut [f32], b: &mut [f32]) {
    let (rank, size) = (a.len() / n, m.min(n));
    let (mut u, mut v) = (Mat::<f64>::zeros(m, size), Mat::<f64>::zeros(n, size));
    let mut s = Diag::<f64>::zeros(size);
    let (thin, par) = (ComputeSvdVectors::Thin, Par::Seq);
    let scratch = svd_scratch::<f64>(m, n, thin, thin, par, Default::default());
    let decomposed = svd(
        MatRef::from_row_major_slice(weight, m, n),
        s.as_mut(),
        Some(u.as_mut()),
        Some(v.as_mut()),
        par,
        MemStack::new(&mut MemBuffer::new(scratch)),
        Default::default(),
    );
    if decomposed.is_err() {
        a.fill(f32::NAN);
        return;
    }
    for k in 0..rank {
        let largest = (0..m).fold(0.0, |largest: f64, row| match u[(row, k)] {
            value if value.abs() > largest.abs() => value,
            _ => largest,
        });
        let root = (s.column_vector()[k] / scale).sqrt();
        let root_signed = root.copysign(largest);
        for column in 0..n {
            // Both change their sign, the product does not.
            a[k * n + column] = (root_signed * v[(column, k)]) as f32;
        }
        for row in 0..m {
            b[row * rank + k] = (root_signed * u[(row, k)]) as f32;
        }
    }
}
