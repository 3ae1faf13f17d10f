//! Several adapters as one that has a row group for each pair of expert and slot.

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use moe_lora_kernels::{RowGroups, Slot};
use moe_lora_parallel::{Group, GroupKind};

use crate::merge::in_f32;
use crate::slots::SlotGroups;
use crate::{AdapterBackend, Lora, MultiLora, NamedLora, Placement, ShardAxis};

impl<B: Backend, G: GroupKind, P: Placement> MultiLora<B, G, P> {
    /// The enabled adapters as one of the largest rank, with a row group for each pair of expert and
    /// slot, and those groups. None where none is enabled.
    ///
    /// Its factors are in the graph of those that it is made of, and it is no module of its own.
    ///
    /// # Panics
    ///
    /// When the rows come without slots, or are not sorted by expert and then by slot.
    pub fn stacked(&self, rows: &RowGroups) -> Option<(Lora<B, G, P>, RowGroups)> {
        let stack = Stack::of(self, rows)?;
        Some((stack.lora(), stack.groups.rows))
    }
}

/// The enabled adapters of a linear or fragment, and the groups of its rows.
pub(crate) struct Stack<'a, B: Backend, G: GroupKind, P: Placement> {
    path: &'a str,
    loras: Vec<&'a Lora<B, G, P>>,
    experts: usize,
    groups: SlotGroups,
}

impl<'a, B: Backend, G: GroupKind, P: Placement> Stack<'a, B, G, P> {
    /// None where none is enabled.
    ///
    /// # Panics
    ///
    /// When the rows come without slots, or are not sorted by expert and then by slot.
    pub(crate) fn of(set: &'a MultiLora<B, G, P>, rows: &RowGroups) -> Option<Self> {
        let enabled = || set.adapters.iter().filter(|named| named.is_enabled());
        let loras: Vec<_> = enabled().map(|named| &named.lora).collect();
        let slots: Vec<Slot> = enabled().map(NamedLora::slot).collect();
        let groups = match loras.first()?.first_expert() {
            Some(_) => SlotGroups::of(set.path(), rows, &slots),
            // Groups mean nothing to a weight of all rows.
            None => SlotGroups::of(set.path(), &rows.merged(), &slots),
        };
        Some(Self {
            path: set.path(),
            loras,
            experts: groups.rows.experts() / groups.adapters.len(),
            groups,
        })
    }

    /// The rows of each group.
    pub(crate) fn rows(&self) -> &RowGroups {
        &self.groups.rows
    }

    /// The adapters as one of the largest rank. Gradients of the factors reach those of each adapter,
    /// zeros where it has no rows.
    pub(crate) fn lora(&self) -> Lora<B, G, P> {
        let first = self.loras[0];
        let configs = || self.loras.iter().map(|lora| lora.config());
        let rank = configs().map(|config| config.rank).fold(0, usize::max);
        let scales: Vec<f64> = configs().map(|config| config.scale()).collect();
        // Where ranks hold slices of `A`'s rank, each slice is padded.
        let slices = match P::AXIS {
            ShardAxis::Out => first.a.layout().ranks,
            ShardAxis::In | ShardAxis::Whole => 1,
        };
        let a = self.stacked(0.0, |lora| {
            pad(self.of_experts(lora.a.weight.stacked()), 1, rank / slices)
        });
        let mut b = self.stacked(0.0, |lora| {
            let b = self.of_experts(lora.b.weight.stacked());
            let [experts, d_out, own] = b.dims();
            let b = b.reshape([experts * d_out, slices, own / slices]);
            pad(b, 2, rank / slices).reshape([experts, d_out, rank])
        });
        let mut config = *first.config();
        config.dora = false;
        config.rslora = false;
        config.rank = rank;
        config.alpha = rank as f64;
        match scales.iter().all(|scale| *scale == scales[0]) {
            true => config.alpha *= scales[0],
            false => b = self.scaled(b, &scales),
        }
        let groups = self.groups.adapters.len();
        first.of_groups(self.path, config, a, b, groups)
    }

    /// `b` with the scale of each group's adapter. In f32, rounded once: half precision would round
    /// the scales too.
    fn scaled(&self, b: Tensor<B, 3>, scales: &[f64]) -> Tensor<B, 3> {
        let of_group = |adapter: &Option<usize>| adapter.map_or(0.0, |at| scales[at]);
        let of_groups: Vec<f64> = self.groups.adapters.iter().map(of_group).collect();
        let values = of_groups.repeat(self.experts);
        let (dtype, shape) = (b.dtype(), [values.len(), 1, 1]);
        let wide = in_f32(b);
        let place = (&wide.device(), wide.dtype());
        let scales = Tensor::from_data(TensorData::new(values, shape), place);
        (wide * scales).cast(dtype)
    }

    /// What every group has of its adapter, `[E, m, n]` each, as `[E * groups, m, n]`; `none` for rows
    /// without an adapter.
    fn stacked(&self, none: f64, of: impl Fn(&Lora<B, G, P>) -> Tensor<B, 3>) -> Tensor<B, 3> {
        let parts: Vec<_> = self.loras.iter().map(|lora| of(lora)).collect();
        let ([experts, m, n], place) = (parts[0].dims(), (&parts[0].device(), parts[0].dtype()));
        let groups = self.groups.adapters.iter().map(|adapter| match adapter {
            Some(adapter) => parts[*adapter].clone(),
            None => Tensor::full([experts, m, n], none, place),
        });
        let groups: Vec<_> = groups.collect();
        let all = experts * groups.len();
        Tensor::cat(groups, 1).reshape([all, m, n])
    }

    /// A factor that experts share, once for each.
    fn of_experts(&self, factor: Tensor<B, 3>) -> Tensor<B, 3> {
        match factor.dims()[0] == self.experts {
            true => factor,
            false => factor.repeat_dim(0, self.experts),
        }
    }
}

impl<B: AdapterBackend, G: GroupKind, P: Placement> Stack<'_, B, G, P> {
    /// DoRA's `m / n` of each group, `[E * groups, d_out / P]`, for the local base weight
    /// `[E, d_out, d_in]`; 1 for rows of adapters without DoRA. None without any.
    ///
    /// # Panics
    ///
    /// When there are no magnitudes, or when a collective fails.
    pub(crate) fn dora_factors(
        &self,
        base: Tensor<B, 3>,
        group: &Group<B, G>,
    ) -> Option<Tensor<B, 2>> {
        let dora = self.loras.iter().find(|lora| lora.config().dora)?;
        let dtype = dora.magnitude_dtype();
        let device = base.device();
        let factors = self.stacked(1.0, |lora| match lora.config().dora {
            true => lora
                .row_factors(base.clone(), group)
                .cast(dtype)
                .unsqueeze_dim(1),
            false => {
                let [d_out, _] = lora.b.layout().local();
                Tensor::ones([self.experts, 1, d_out], (&device, dtype))
            }
        });
        Some(factors.squeeze_dim(1))
    }
}

/// `x` with zeros behind it along `dim`.
fn pad<B: Backend>(x: Tensor<B, 3>, dim: usize, to: usize) -> Tensor<B, 3> {
    let mut shape = x.dims();
    shape[dim] = to - shape[dim];
    match shape[dim] {
        0 => x,
        _ => {
            let zeros = Tensor::zeros(shape, (&x.device(), x.dtype()));
            Tensor::cat(vec![x, zeros], dim)
        }
    }
}
