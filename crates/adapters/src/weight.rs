//! Weights that know their sharding: what they read and what they give are parallel states.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::ops::Range;

use burn::module::{Module, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor, TensorData};
use moe_lora_kernels::{
    Between, Compute, DropoutMask, GroupedBackend, Layout, RowGroups, expand, expand_into,
    grouped_matmul, linear, shrink, shrink_dropped,
};
use moe_lora_parallel::region::{GATHER_FROM, apply};
use moe_lora_parallel::state::{IsFanout, IsReplicated, IsSharded};
use moe_lora_parallel::{
    Ep, Fanout, Features, Group, GroupKind, ParallelBackend, Partial, Replicated, Sharded,
};

use crate::{ShardAxis, WeightLayout};

/// A backend that adapters run on: region operations and grouped products.
pub trait AdapterBackend: ParallelBackend + GroupedBackend {}

impl<B: ParallelBackend + GroupedBackend> AdapterBackend for B {}

/// A backend that adapters train on: one with autodiff whose inner backend communicates as it does.
pub trait TrainBackend: AutodiffBackend<InnerBackend = Self::Inner> + AdapterBackend {
    /// The backend without autodiff.
    type Inner: AdapterBackend<Base = Self::Base, Device = Self::Device>;
}

impl<B, I> TrainBackend for B
where
    B: AutodiffBackend<InnerBackend = I> + AdapterBackend,
    I: AdapterBackend<Base = B::Base, Device = B::Device>,
{
    type Inner = I;
}

/// The local part of a weight, one for all rows or one an expert.
#[derive(Module, Debug)]
pub enum Weight<B: Backend> {
    /// `[d_out, d_in]`, applied to every row.
    One(Param<Tensor<B, 2>>),
    /// `[E, d_out, d_in]`, row groups by local expert.
    PerExpert(Param<Tensor<B, 3>>),
}

impl<B: Backend> Weight<B> {
    /// From local values in row-major order; `layout.experts` decides the kind.
    ///
    /// # Panics
    ///
    /// When the values do not fill the layout's local shape.
    pub fn from_values(
        values: Vec<f32>,
        layout: &WeightLayout,
        dtype: DType,
        trained: bool,
        device: &B::Device,
    ) -> Self {
        let [d_out, d_in] = layout.local();
        match &layout.experts {
            None => {
                let data = TensorData::new(values, [d_out, d_in]);
                let tensor = Tensor::from_data(data, (device, dtype));
                Self::One(Param::from_tensor(tensor).set_require_grad(trained))
            }
            Some(experts) => {
                let data = TensorData::new(values, [experts.len(), d_out, d_in]);
                let tensor = Tensor::from_data(data, (device, dtype));
                Self::PerExpert(Param::from_tensor(tensor).set_require_grad(trained))
            }
        }
    }

    /// `[E, d_out, d_in]`, with `E = 1` for one weight of all rows.
    pub fn stacked(&self) -> Tensor<B, 3> {
        match self {
            Self::One(weight) => weight.val().unsqueeze(),
            Self::PerExpert(weight) => weight.val(),
        }
    }

    /// As [`stacked`](Self::stacked), outside of the graph. burn's `detach` alone leaves a trained
    /// leaf tracked.
    pub(crate) fn untracked(&self) -> Tensor<B, 3> {
        self.stacked().set_require_grad(false).detach()
    }

    /// Puts other values of the same kind and shape `[E, d_out, d_in]` in place, frozen.
    pub(crate) fn replace(&mut self, stacked: Tensor<B, 3>) {
        *self = match self {
            Self::One(_) => Self::One(frozen(stacked.squeeze_dim::<2>(0))),
            Self::PerExpert(_) => Self::PerExpert(frozen(stacked)),
        }
    }

    /// The id under which gradients and optimizers have it.
    pub fn id(&self) -> ParamId {
        match self {
            Self::One(weight) => weight.id,
            Self::PerExpert(weight) => weight.id,
        }
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::One(weight) => weight.val().dtype(),
            Self::PerExpert(weight) => weight.val().dtype(),
        }
    }

    /// Number of local values.
    pub fn len(&self) -> usize {
        match self {
            Self::One(weight) => weight.shape().num_elements(),
            Self::PerExpert(weight) => weight.shape().num_elements(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn frozen<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Param<Tensor<B, D>> {
    Param::from_tensor(tensor).set_require_grad(false)
}

impl<B: GroupedBackend> Weight<B> {
    /// `[T, d_in] -> [T, d_out]`: each row times the transpose of its weight.
    fn forward(&self, x: Tensor<B, 2>, rows: &RowGroups) -> Tensor<B, 2> {
        match self {
            Self::One(weight) => linear(x, weight.val()),
            Self::PerExpert(weight) => grouped_matmul(x, weight.val(), rows),
        }
    }
}

/// A factor of an adapter.
impl<B: GroupedBackend> Weight<B> {
    /// The row groups of its products: the experts' rows are one group to a factor that they share.
    fn groups(&self, rows: &RowGroups) -> RowGroups {
        match self {
            Self::One(_) => rows.merged(),
            Self::PerExpert(_) => rows.clone(),
        }
    }

    fn shrink(
        &self,
        x: Tensor<B, 2>,
        dropout: Option<&DropoutMask>,
        rows: &RowGroups,
        layout: Layout,
        compute: Compute,
    ) -> Tensor<B, 2> {
        let rows = self.groups(rows);
        match dropout {
            None => shrink(x, self.stacked(), &rows, layout, compute),
            Some(mask) => shrink_dropped(x, mask, self.stacked(), &rows, layout, compute),
        }
    }

    fn expand(
        &self,
        z: Tensor<B, 2>,
        between: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> Tensor<B, 2> {
        let rows = self.groups(rows);
        expand(z, self.stacked(), between, &rows, compute)
    }

    fn expand_into(
        &self,
        base: Tensor<B, 2>,
        columns: Range<usize>,
        z: Tensor<B, 2>,
        between: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> Tensor<B, 2> {
        let rows = self.groups(rows);
        expand_into(base, columns, z, self.stacked(), between, &rows, compute)
    }
}

/// How a linear's weight lies over its group: [`Column`], [`Row`] or [`Whole`].
pub trait Placement: Clone + Copy + Debug + Send + Sync + 'static {
    /// The sharded axis.
    const AXIS: ShardAxis;
    /// How the `B` of an adapter is placed; its `A` is placed as the base is.
    type Up: Placement;
}

/// Sharded on `d_out`.
#[derive(Clone, Copy, Debug)]
pub struct Column;
/// Sharded on `d_in`.
#[derive(Clone, Copy, Debug)]
pub struct Row;
/// Whole on every rank.
#[derive(Clone, Copy, Debug)]
pub struct Whole;

impl Placement for Column {
    const AXIS: ShardAxis = ShardAxis::Out;
    type Up = Column;
}
impl Placement for Row {
    const AXIS: ShardAxis = ShardAxis::In;
    type Up = Column;
}
impl Placement for Whole {
    const AXIS: ShardAxis = ShardAxis::Whole;
    type Up = Whole;
}

/// A weight placed over the group `G`.
#[derive(Module, Debug)]
pub struct PlacedWeight<B: Backend, G: GroupKind, P: Placement> {
    /// The local part.
    pub weight: Weight<B>,
    #[module(skip)]
    layout: WeightLayout,
    #[module(skip)]
    place: PhantomData<(G, P)>,
}

/// A weight sharded on `d_out`: [`Fanout`](moe_lora_parallel::Fanout) to [`Sharded`].
///
/// Global `[d_out, d_in]` (`[E, d_out, d_in]` with experts), local `[d_out / P, d_in]`.
pub type ColumnWeight<B, G> = PlacedWeight<B, G, Column>;

/// A weight sharded on `d_in`: [`Sharded`] to [`Partial`].
///
/// Global `[d_out, d_in]` (`[E, d_out, d_in]` with experts), local `[d_out, d_in / P]`.
pub type RowWeight<B, G> = PlacedWeight<B, G, Row>;

/// A weight that every rank of the group holds whole: [`Replicated`] to [`Replicated`].
pub type ReplicatedWeight<B, G> = PlacedWeight<B, G, Whole>;

impl<B: Backend, G: GroupKind, P: Placement> PlacedWeight<B, G, P> {
    pub(crate) fn new(weight: Weight<B>, layout: WeightLayout) -> Self {
        debug_assert_eq!(layout.axis, P::AXIS);
        Self {
            weight,
            layout,
            place: PhantomData,
        }
    }

    /// Shape of the full weight and place of the local part.
    pub fn layout(&self) -> &WeightLayout {
        &self.layout
    }
}

impl<B: ParallelBackend, G: GroupKind, P: Placement> PlacedWeight<B, G, P> {
    /// The full weight `[E, d_out, d_in]` of all experts: gathered from the group, then over the
    /// expert parallel ranks. Not tracked by autograd.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn gather_all(&self, group: &Group<B, G>, ep: &Group<B, Ep>) -> Tensor<B, 3> {
        let local = self.gather(group);
        match &self.layout.experts {
            None => local,
            Some(experts) => {
                let sizes = vec![experts.len(); ep.size()].into();
                apply(local, GATHER_FROM, ep, 0, &sizes)
            }
        }
    }

    /// The full weight `[E, d_out, d_in]` of the rank's experts, gathered from the group, rows in
    /// full order: each fragment's slices are brought together, so `[gate_0, up_0 | gate_1, up_1]`
    /// becomes `[gate_0, gate_1 | up_0, up_1]`. Not tracked by autograd.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn gather(&self, group: &Group<B, G>) -> Tensor<B, 3> {
        let local = self.weight.untracked();
        let layout = &self.layout;
        let dim = match P::AXIS {
            ShardAxis::Whole => return local,
            ShardAxis::Out => 1,
            ShardAxis::In => 2,
        };
        let [experts, rows, columns] = local.dims();
        let sizes = vec![local.dims()[dim]; group.size()].into();
        let full = apply(local, GATHER_FROM, group, dim, &sizes);
        if dim == 2 || layout.fragments == 1 {
            return full;
        }
        let slice = rows / layout.fragments * columns;
        full.reshape([experts, group.size(), layout.fragments, slice])
            .swap_dims(1, 2)
            .reshape([experts, layout.d_out, columns])
    }
}

impl<B: AdapterBackend, G: GroupKind> ColumnWeight<B, G> {
    /// `[T, d_in] -> [T, d_out / P]`. Row groups matter to weights of experts alone.
    ///
    /// # Panics
    ///
    /// When `x` has not `d_in` columns or the groups do not cover its rows.
    pub fn forward<X: IsFanout<B, G>>(&self, x: X, rows: &RowGroups) -> Sharded<B, G> {
        let x = x.into_fanout();
        let group = x.group().clone();
        group.shard(self.weight.forward(x.into_tensor(), rows))
    }

    /// As the `A` of an adapter. The ranks gather columns, so the result lies by columns.
    pub(crate) fn shrink(
        &self,
        x: Fanout<B, G>,
        dropout: Option<&DropoutMask>,
        rows: &RowGroups,
        compute: Compute,
    ) -> Sharded<B, G> {
        let group = x.group().clone();
        let x = x.into_tensor();
        group.shard(
            self.weight
                .shrink(x, dropout, rows, Layout::ByFeature, compute),
        )
    }

    /// As the `B` of an adapter.
    pub(crate) fn expand(
        &self,
        z: Fanout<B, G>,
        between: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> Sharded<B, G> {
        let group = z.group().clone();
        let z = z.into_tensor();
        group.shard(self.weight.expand(z, between, rows, compute))
    }

    /// As the `B` of an adapter, added to local columns of a base that is sharded as it is.
    pub(crate) fn expand_into_shard(
        &self,
        base: Sharded<B, G>,
        columns: Range<usize>,
        z: Fanout<B, G>,
        between: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> Sharded<B, G> {
        let z = z.into_tensor();
        base.map(|base| {
            self.weight
                .expand_into(base, columns, z, between, rows, compute)
        })
    }

    /// As the `B` of an adapter, embedded into the rank's own term of the base.
    pub(crate) fn expand_into_term(
        &self,
        base: Partial<B, G>,
        z: Fanout<B, G>,
        between: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> Partial<B, G> {
        let z = z.into_tensor();
        let [width, _] = self.layout.local();
        base.add_embedded(width, |base, columns| {
            self.weight
                .expand_into(base, columns, z, between, rows, compute)
        })
    }
}

impl<B: AdapterBackend, G: GroupKind> RowWeight<B, G> {
    /// `[T, d_in / P] -> [T, d_out]`, each rank its own term. Row groups matter to weights of
    /// experts alone.
    ///
    /// # Panics
    ///
    /// When `x` has not `d_in / P` columns or the groups do not cover its rows.
    pub fn forward<X: IsSharded<B, G, Features>>(&self, x: X, rows: &RowGroups) -> Partial<B, G> {
        let x = x.into_sharded();
        let group = x.group().clone();
        group.partial(self.weight.forward(x.into_tensor(), rows))
    }

    /// As the `A` of an adapter.
    pub(crate) fn shrink(
        &self,
        x: Sharded<B, G>,
        dropout: Option<&DropoutMask>,
        rows: &RowGroups,
        compute: Compute,
    ) -> Partial<B, G> {
        let group = x.group().clone();
        let x = x.into_tensor();
        group.partial(
            self.weight
                .shrink(x, dropout, rows, Layout::ByToken, compute),
        )
    }
}

impl<B: AdapterBackend, G: GroupKind> ReplicatedWeight<B, G> {
    /// `[T, d_in] -> [T, d_out]`. Row groups matter to weights of experts alone.
    ///
    /// # Panics
    ///
    /// When `x` has not `d_in` columns or the groups do not cover its rows.
    pub fn forward<X: IsReplicated<B, G>>(&self, x: X, rows: &RowGroups) -> Replicated<B, G> {
        x.into_replicated().map(|x| self.weight.forward(x, rows))
    }

    /// As the `A` of an adapter.
    pub(crate) fn shrink(
        &self,
        x: Replicated<B, G>,
        dropout: Option<&DropoutMask>,
        rows: &RowGroups,
        compute: Compute,
    ) -> Replicated<B, G> {
        x.map(|x| {
            self.weight
                .shrink(x, dropout, rows, Layout::ByToken, compute)
        })
    }

    /// As the `B` of an adapter.
    pub(crate) fn expand(
        &self,
        z: Replicated<B, G>,
        between: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> Replicated<B, G> {
        z.map(|z| self.weight.expand(z, between, rows, compute))
    }

    /// As the `B` of an adapter, added to the base.
    pub(crate) fn expand_into(
        &self,
        base: Replicated<B, G>,
        z: Replicated<B, G>,
        between: Between,
        rows: &RowGroups,
        compute: Compute,
    ) -> Replicated<B, G> {
        let z = z.into_tensor();
        base.map(|base| {
            let columns = 0..base.dims()[1];
            self.weight
                .expand_into(base, columns, z, between, rows, compute)
        })
    }
}
