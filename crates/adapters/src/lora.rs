//! LoRA adapters, one for each way a base linear is placed.
//!
//! `delta = s * B act(A x)`, in the parallel state of the base's output. All collectives of an
//! adapter carry `[T, r]`, but for the one that brings an ordinary row-parallel delta together.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::OnceLock;

use burn::module::{Module, Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use moe_lora_kernels::{DropoutMask, RowGroups, add_dropped, dropout};
use moe_lora_parallel::state::{IsFanout, IsReplicated, IsSharded};
use moe_lora_parallel::{Fanout, Features, GroupKind, GroupName, Partial, Replicated, Sharded};

use crate::{
    AdapterBackend, AdapterError, Column, DropoutAt, Init, InitKey, LoraConfig, PissaStart,
    PlacedWeight, Placement, Row, ShardAxis, Sharing, TrainedWeight, Weight, WeightLayout, Whole,
};

/// The adapter of a base weight placed as `P`. Used through [`ColumnLora`], [`RowLora`] and
/// [`ReplicatedLora`].
///
/// # Shapes
///
/// Full `A [r, d_in]` and `B [d_out, r]`, each with a leading `E` where experts have their own.
#[derive(Module, Debug)]
pub struct Lora<B: Backend, G: GroupKind, P: Placement> {
    /// Down to the rank.
    pub a: PlacedWeight<B, G, P>,
    /// Up to the output.
    pub b: PlacedWeight<B, G, P::Up>,
    /// DoRA's lengths of the rows of `W + s B A`, as the weight `[d_out, 1]` of one more input. It
    /// lies as `B` does, so that no two ranks hold the same part of it; with experts each has its
    /// own, those that share `A` and `B` too. None without DoRA, and before the lengths are
    /// [started](crate::Linear::start_magnitudes) or loaded.
    pub magnitude: Option<PlacedWeight<B, G, P::Up>>,
    /// Where a PiSSA adapter started, see [`start_pissa`](crate::Linear::start_pissa).
    pub pissa: Option<PissaStart<B, G, P>>,
    #[module(skip)]
    magnitude_layout: WeightLayout,
    #[module(skip)]
    path: String,
    #[module(skip)]
    config: LoraConfig,
    #[module(skip)]
    first_expert: Option<usize>,
    /// Row groups of an expert: one, or one for each of several stacked adapters.
    #[module(skip)]
    groups: usize,
    /// The rows of the base's weight and those of `A`, by expert: DoRA's products are of these.
    #[module(skip)]
    norm_rows: OnceLock<[RowGroups; 2]>,
    #[module(skip)]
    place: PhantomData<(G, P)>,
}

/// The adapter of a column-parallel linear.
///
/// # Parallel state
///
/// `Fanout -> A: Sharded(r) -> gather_fanout -> B: Sharded(d_out)`. One all-gather of `[T, r]`
/// forward, one reduce-scatter of it backward.
///
/// # Shapes
///
/// Local `A [r / P, d_in]`, `B [d_out / P, r]`.
pub type ColumnLora<B, G> = Lora<B, G, Column>;

/// The adapter of a row-parallel linear.
///
/// # Parallel state
///
/// `Sharded -> A: Partial -> reduce_fanout -> B: Sharded(d_out)`, which then joins the base:
/// `embed` where the base's sum is suppressed, `gather_from` where the base sums itself. One
/// all-reduce of `[T, r]` forward, one backward.
///
/// # Shapes
///
/// Local `A [r, d_in / P]`, `B [d_out / P, r]`.
pub type RowLora<B, G> = Lora<B, G, Row>;

/// The adapter of a linear that every rank holds whole: no collectives.
pub type ReplicatedLora<B, G> = Lora<B, G, Whole>;

/// The name of a group's size in messages.
pub(crate) fn size_name(group: GroupName) -> &'static str {
    match group {
        GroupName::Tp => "tp_size",
        GroupName::ExpertTp => "etp_size",
        GroupName::Ep => "ep_size",
        GroupName::Dp => "dp_size",
        GroupName::ExpertDp => "expert_dp_size",
    }
}

impl<B: Backend, G: GroupKind, P: Placement> Lora<B, G, P> {
    /// An adapter for the linear at `path` whose base weight has the layout `base`.
    ///
    /// # Errors
    ///
    /// When the group does not divide the rank or `d_out` as the placement needs it, when the config
    /// is unusable, or when the experts of a replicated base are to share the outer factor.
    pub fn init(
        path: &str,
        config: &LoraConfig,
        base: &WeightLayout,
        device: &B::Device,
    ) -> Result<Self, AdapterError> {
        config.check()?;
        if base.experts.is_some()
            && config.sharing == Sharing::SharedOuter
            && P::AXIS == ShardAxis::Whole
        {
            return Err(AdapterError::NoOuter { path: path.into() });
        }
        let experts = |shared: bool| base.experts.clone().filter(|_| !shared);
        let [a_shared, b_shared] = config.sharing.factors(P::AXIS);
        let a = WeightLayout {
            experts: experts(a_shared),
            d_out: config.rank,
            fragments: 1,
            axis: P::AXIS,
            ..base.clone()
        };
        let b = WeightLayout {
            experts: experts(b_shared),
            d_in: config.rank,
            axis: P::Up::AXIS,
            ..base.clone()
        };
        let magnitude_layout = WeightLayout {
            d_in: 1,
            axis: P::Up::AXIS,
            ..base.clone()
        };
        let rank = match P::AXIS {
            ShardAxis::In => "d_in",
            _ => "lora rank",
        };
        for (layout, what) in [(&a, rank), (&b, "d_out")] {
            layout
                .check(what, size_name(G::NAME))
                .map_err(|reason| AdapterError::Topology {
                    path: path.into(),
                    reason,
                })?;
        }
        let start = |init: Init, factor: &str, layout: &WeightLayout| {
            let key = InitKey {
                seed: config.seed,
                path: &format!("{path}.{factor}"),
            };
            Weight::from_values(init.values(key, layout), layout, config.dtype, true, device)
        };
        let pissa = match config.pissa {
            false => None,
            true => Some(PissaStart::init(path, config, [&a, &b], device)?),
        };
        Ok(Self {
            a: PlacedWeight::new(start(config.init_a, "lora_A", &a), a),
            b: PlacedWeight::new(start(config.init_b, "lora_B", &b), b),
            magnitude: None,
            pissa,
            magnitude_layout,
            path: path.into(),
            config: *config,
            first_expert: base.experts.as_ref().map(|experts| experts.start),
            groups: 1,
            norm_rows: OnceLock::new(),
            place: PhantomData,
        })
    }

    /// An adapter on the same base that has `groups` row groups an expert, each with factors of its
    /// own: `a [E * groups, r, d_in]` and `b [E * groups, d_out, r]` by local extents.
    pub(crate) fn of_groups(
        &self,
        path: &str,
        config: LoraConfig,
        a: Tensor<B, 3>,
        b: Tensor<B, 3>,
        groups: usize,
    ) -> Self {
        // In the graph as they come: parameters of their own would be leaves.
        let weight = |w| Weight::PerExpert(Param::initialized(ParamId::new(), w));
        let lora = self.with_weights(path, config, weight(a), weight(b));
        Self { groups, ..lora }
    }

    /// An adapter on the same base with these factors, trained from here on.
    pub(crate) fn with_factors(
        &self,
        path: &str,
        config: LoraConfig,
        a: Tensor<B, 3>,
        b: Tensor<B, 3>,
    ) -> Self {
        let [a_shared, b_shared] = config.sharing.factors(P::AXIS);
        let weight = |w: Tensor<B, 3>, shared: bool| match self.first_expert.is_none() || shared {
            true => Weight::One(Param::from_tensor(w.squeeze_dim(0))),
            false => Weight::PerExpert(Param::from_tensor(w)),
        };
        self.with_weights(path, config, weight(a, a_shared), weight(b, b_shared))
    }

    fn with_weights(&self, path: &str, config: LoraConfig, a: Weight<B>, b: Weight<B>) -> Self {
        let [a_shared, b_shared] = config.sharing.factors(P::AXIS);
        let experts = |shared: bool| self.magnitude_layout.experts.clone().filter(|_| !shared);
        let a_layout = WeightLayout {
            experts: experts(a_shared),
            d_out: config.rank,
            ..self.a.layout().clone()
        };
        let b_layout = WeightLayout {
            experts: experts(b_shared),
            d_in: config.rank,
            ..self.b.layout().clone()
        };
        Self {
            a: PlacedWeight::new(a, a_layout),
            b: PlacedWeight::new(b, b_layout),
            magnitude: None,
            pissa: None,
            magnitude_layout: self.magnitude_layout.clone(),
            path: path.into(),
            config,
            first_expert: self.first_expert,
            groups: 1,
            norm_rows: OnceLock::new(),
            place: PhantomData,
        }
    }

    /// Path of the linear.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The adapter's settings.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The first global expert of the rank where the base is one of experts.
    pub(crate) fn first_expert(&self) -> Option<usize> {
        self.first_expert
    }

    /// The groups of `all` rows. They mean nothing to a base without experts, whose rows are one, unless
    /// they are those of stacked adapters.
    fn rows(&self, rows: &RowGroups, all: usize) -> RowGroups {
        match (self.first_expert, rows.tokens()) {
            (Some(_), _) => rows.clone(),
            (None, Some(_)) if self.groups > 1 => rows.clone(),
            (None, Some(_)) => rows.merged(),
            (None, None) => RowGroups::whole(all),
        }
    }

    /// `rows` rows of the base's weight, and those of `A`, by expert. Kept, so that kernels have them on the
    /// device.
    pub(crate) fn norm_rows(&self, experts: usize, rows: usize) -> &[RowGroups; 2] {
        self.norm_rows.get_or_init(|| {
            [rows, self.config.rank].map(|rows| {
                let groups = RowGroups::new(&vec![rows; experts], experts * rows);
                groups.expect("as many rows an expert")
            })
        })
    }

    /// Rows by expert of rows by group.
    pub(crate) fn rows_of_experts(&self, rows: &RowGroups) -> RowGroups {
        rows.joined(self.groups)
    }

    /// Takes the local part of full factors, `a [E, r, d_in]` and `b [E, d_out, r]` in row-major
    /// order, with `E` the global number of experts, or 1 for a factor that the experts share.
    ///
    /// # Errors
    ///
    /// When the values do not fill the shapes of one `E` that holds the local experts; nothing is
    /// changed then.
    pub fn load(&mut self, a: &[f32], b: &[f32], device: &B::Device) -> Result<(), AdapterError> {
        let experts = match self.a.layout().experts {
            Some(_) => self.a.layout().experts_in(a.len()),
            None => self.b.layout().experts_in(b.len()),
        };
        let cut = |layout: &WeightLayout, values: &[f32]| {
            let values = layout.cut(&self.path, experts, values)?;
            Ok(Weight::from_values(
                values,
                layout,
                self.config.dtype,
                true,
                device,
            ))
        };
        let (a, b) = (cut(self.a.layout(), a)?, cut(self.b.layout(), b)?);
        self.a.weight = a;
        self.b.weight = b;
        Ok(())
    }

    /// Takes the local part of DoRA's full lengths `[E, d_out]`, with `E` the global number of
    /// experts, or 1 for a linear without experts.
    ///
    /// # Errors
    ///
    /// When the adapter is without DoRA, or the values do not fill the shape of one `E` that holds
    /// the local experts; nothing is changed then.
    pub fn load_magnitude(
        &mut self,
        values: &[f32],
        device: &B::Device,
    ) -> Result<(), AdapterError> {
        if !self.config.dora {
            return Err(AdapterError::NoMagnitude {
                path: self.path.clone(),
            });
        }
        let layout = &self.magnitude_layout;
        let local = layout.cut(&self.path, layout.experts_in(values.len()), values)?;
        let dtype = self.magnitude_dtype();
        let weight = Weight::from_values(local, layout, dtype, true, device);
        self.magnitude = Some(PlacedWeight::new(weight, layout.clone()));
        Ok(())
    }

    /// Takes the local lengths `[E, d_out, 1]`.
    pub(crate) fn set_magnitude(&mut self, lengths: Tensor<B, 3>) {
        let layout = self.magnitude_layout.clone();
        let weight = match layout.experts {
            None => Weight::One(Param::from_tensor(lengths.squeeze_dim(0))),
            Some(_) => Weight::PerExpert(Param::from_tensor(lengths)),
        };
        self.magnitude = Some(PlacedWeight::new(weight, layout));
    }

    /// Half precision would round the lengths, and `m / n` would not start at 1.
    pub(crate) fn magnitude_dtype(&self) -> DType {
        match self.config.dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }

    /// `A`, `B` and, where there is one, the magnitude, in this order.
    pub fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        let [a_shared, b_shared] = self.config.sharing.factors(P::AXIS);
        let start = self.pissa.as_ref();
        let trained = |factor, weight, layout, shared_by_experts| TrainedWeight {
            path: format!("{}.{factor}", self.path),
            linear: &self.path,
            adapter: None,
            config: &self.config,
            weight,
            layout,
            group: G::NAME,
            shared_by_experts,
            is_vector: false,
            start: None,
        };
        let mut weights = vec![
            TrainedWeight {
                start: start.map(|start| &start.a.weight),
                ..trained("lora_A", &self.a.weight, self.a.layout(), a_shared)
            },
            TrainedWeight {
                start: start.map(|start| &start.b.weight),
                ..trained("lora_B", &self.b.weight, self.b.layout(), b_shared)
            },
        ];
        if let Some(m) = &self.magnitude {
            weights.push(TrainedWeight {
                is_vector: true,
                ..trained("lora_magnitude_vector", &m.weight, m.layout(), false)
            });
        }
        weights
    }
}

impl<B: AdapterBackend, G: GroupKind> ColumnLora<B, G> {
    /// The delta `[T, d_out / P]` of `x [T, d_in]`.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward<X: IsFanout<B, G>>(&self, x: X, rows: &RowGroups) -> Sharded<B, G> {
        let x = x.into_fanout();
        let rows = &self.rows(rows, x.tensor().dims()[0]);
        let dropped = self.mask(DropoutAt::AfterB, rows, &x.tensor().device());
        let z = self.low(x, rows);
        self.b
            .expand(z, self.config.between(), rows, self.config.compute)
            .map(|delta| kept(delta, dropped))
    }

    /// `base` with the delta added to its local columns `columns`, in place where the buffer has no
    /// other owner.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn add_to<X: IsFanout<B, G>>(
        &self,
        base: Sharded<B, G>,
        columns: Range<usize>,
        x: X,
        rows: &RowGroups,
    ) -> Sharded<B, G> {
        let x = x.into_fanout();
        let rows = &self.rows(rows, x.tensor().dims()[0]);
        let dropped = self.mask(DropoutAt::AfterB, rows, &x.tensor().device());
        let z = self.low(x, rows);
        let (between, compute) = (self.config.between(), self.config.compute);
        let Some(mask) = dropped else {
            return self
                .b
                .expand_into_shard(base, columns, z, between, rows, compute);
        };
        let delta = self.b.expand(z, between, rows, compute).into_tensor();
        base.map(|base| add_dropped(base, columns, delta, &mask))
    }

    fn low(&self, x: Fanout<B, G>, rows: &RowGroups) -> Fanout<B, G> {
        self.expect_started();
        let dropped = self.mask(DropoutAt::BeforeA, rows, &x.tensor().device());
        self.a
            .shrink(x, dropped.as_ref(), rows, self.config.compute)
            .gather_fanout()
    }
}

impl<B: AdapterBackend, G: GroupKind> RowLora<B, G> {
    /// The rank's slice `[T, d_out / P]` of the delta of `x [T, d_in / P]`.
    ///
    /// Call [`embed`](Sharded::embed) on it where the base's output is [`Partial`],
    /// [`gather_from`](Sharded::gather_from) where it is [`Replicated`].
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward<X: IsSharded<B, G, Features>>(&self, x: X, rows: &RowGroups) -> Sharded<B, G> {
        let x = x.into_sharded();
        let rows = &self.rows(rows, x.tensor().dims()[0]);
        let dropped = self.mask(DropoutAt::AfterB, rows, &x.tensor().device());
        let z = self.low(x, rows);
        self.b
            .expand(z, self.config.between(), rows, self.config.compute)
            .map(|delta| kept(delta, dropped))
    }

    /// `base + delta.embed()` in one write into the base's own columns, in place where the buffer has
    /// no other owner.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn add_to<X: IsSharded<B, G, Features>>(
        &self,
        base: Partial<B, G>,
        x: X,
        rows: &RowGroups,
    ) -> Partial<B, G> {
        let x = x.into_sharded();
        let rows = &self.rows(rows, x.tensor().dims()[0]);
        let dropped = self.mask(DropoutAt::AfterB, rows, &x.tensor().device());
        let z = self.low(x, rows);
        let (between, compute) = (self.config.between(), self.config.compute);
        let Some(mask) = dropped else {
            return self.b.expand_into_term(base, z, between, rows, compute);
        };
        let delta = self.b.expand(z, between, rows, compute).into_tensor();
        base.add_embedded(delta.dims()[1], |base, columns| {
            add_dropped(base, columns, delta, &mask)
        })
    }

    fn low(&self, x: Sharded<B, G>, rows: &RowGroups) -> Fanout<B, G> {
        self.expect_started();
        let dropped = self.mask(DropoutAt::BeforeA, rows, &x.tensor().device());
        self.a
            .shrink(x, dropped.as_ref(), rows, self.config.compute)
            .reduce_fanout()
    }
}

impl<B: AdapterBackend, G: GroupKind> ReplicatedLora<B, G> {
    /// The delta `[T, d_out]` of `x [T, d_in]`.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match.
    pub fn forward<X: IsReplicated<B, G>>(&self, x: X, rows: &RowGroups) -> Replicated<B, G> {
        let x = x.into_replicated();
        let rows = &self.rows(rows, x.tensor().dims()[0]);
        let dropped = self.mask(DropoutAt::AfterB, rows, &x.tensor().device());
        let (between, compute) = (self.config.between(), self.config.compute);
        self.b
            .expand(self.low(x, rows), between, rows, compute)
            .map(|delta| kept(delta, dropped))
    }

    /// `base` with the delta added, in place where the buffer has no other owner.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match.
    pub fn add_to<X: IsReplicated<B, G>>(
        &self,
        base: Replicated<B, G>,
        x: X,
        rows: &RowGroups,
    ) -> Replicated<B, G> {
        let x = x.into_replicated();
        let rows = &self.rows(rows, x.tensor().dims()[0]);
        let dropped = self.mask(DropoutAt::AfterB, rows, &x.tensor().device());
        let z = self.low(x, rows);
        let (between, compute) = (self.config.between(), self.config.compute);
        let Some(mask) = dropped else {
            return self.b.expand_into(base, z, between, rows, compute);
        };
        let delta = self.b.expand(z, between, rows, compute).into_tensor();
        base.map(|base| add_dropped(base, 0..delta.dims()[1], delta, &mask))
    }

    fn low(&self, x: Replicated<B, G>, rows: &RowGroups) -> Replicated<B, G> {
        self.expect_started();
        let dropped = self.mask(DropoutAt::BeforeA, rows, &x.tensor().device());
        self.a
            .shrink(x, dropped.as_ref(), rows, self.config.compute)
    }
}

/// What the mask keeps of a delta.
fn kept<B: AdapterBackend>(delta: Tensor<B, 2>, mask: Option<DropoutMask>) -> Tensor<B, 2> {
    match mask {
        None => delta,
        Some(mask) => dropout(delta, &mask),
    }
}
