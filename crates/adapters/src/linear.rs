//! Frozen linears with an adapter, one for each way the weight is placed.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use moe_lora_kernels::{RowGroups, scale_columns};
use moe_lora_parallel::region::columns;
use moe_lora_parallel::state::{IsFanout, IsReplicated, IsSharded};
use moe_lora_parallel::{Features, Group, GroupKind, Partial, Replicated, Sharded, Tokens};

use crate::lora::size_name;
use crate::pissa::check_base;
use crate::stack::Stack;
use crate::{
    AdapterBackend, AdapterError, Column, Lora, LoraConfig, MultiLora, PlacedWeight, Placement,
    Row, TrainedWeight, Weight, WeightLayout, Whole,
};

/// A frozen weight placed as `P` over the group `G`, and its adapters. Used through
/// [`ColumnLinear`], [`RowLinear`] and [`ReplicatedLinear`].
#[derive(Module, Debug)]
pub struct Linear<B: Backend, G: GroupKind, P: Placement> {
    /// The frozen weight.
    pub weight: PlacedWeight<B, G, P>,
    /// The frozen bias as the weight `[d_out, 1]` of one more input that is always 1. It lies as
    /// the `B` of an adapter does, so that no two ranks hold the same part of it.
    pub bias: Option<PlacedWeight<B, G, P::Up>>,
    /// None, one for the whole output, or one a fragment.
    pub adapters: Vec<Lora<B, G, P>>,
    /// In place of those, several a target, of which each token uses the one of its slot.
    pub named: Vec<MultiLora<B, G, P>>,
    #[module(skip)]
    path: String,
    #[module(skip)]
    fragments: Vec<String>,
    #[module(skip)]
    place: PhantomData<(G, P)>,
}

/// A column-parallel linear: `Fanout [T, d_in]` to `Sharded [T, d_out / P]`.
pub type ColumnLinear<B, G> = Linear<B, G, Column>;

/// A row-parallel linear: `Sharded [T, d_in / P]` to a value of `[T, d_out]`, whose state is the
/// caller's choice of method: [`forward`](RowLinear::forward),
/// [`forward_suppressed`](RowLinear::forward_suppressed) or
/// [`forward_sequence`](RowLinear::forward_sequence).
pub type RowLinear<B, G> = Linear<B, G, Row>;

/// A linear that every rank of the group holds whole: `Replicated` to `Replicated`.
pub type ReplicatedLinear<B, G> = Linear<B, G, Whole>;

impl<B: Backend, G: GroupKind, P: Placement> Linear<B, G, P> {
    /// Without bias and adapters.
    pub(crate) fn new(path: String, fragments: Vec<String>, weight: PlacedWeight<B, G, P>) -> Self {
        Self {
            weight,
            bias: None,
            adapters: Vec::new(),
            named: Vec::new(),
            path,
            fragments,
            place: PhantomData,
        }
    }

    /// The same linear with a frozen bias, whose full element for `(expert, row)` is `value`.
    /// Expert and row are global indices. Merging leaves it as it is.
    ///
    /// # Errors
    ///
    /// When the group does not divide `d_out`: each rank of a row-parallel linear adds the bias
    /// to its own slice of the sum, which counts it once.
    pub fn with_bias(
        mut self,
        mut value: impl FnMut(usize, usize) -> f32,
        device: &B::Device,
    ) -> Result<Self, AdapterError> {
        let layout = WeightLayout {
            d_in: 1,
            axis: P::Up::AXIS,
            ..self.weight.layout().clone()
        };
        layout
            .check("d_out", size_name(G::NAME))
            .map_err(|reason| AdapterError::Topology {
                path: format!("{}.bias", self.path),
                reason,
            })?;
        let values = layout.gather(|expert, row, _| value(expert, row));
        let dtype = self.weight.weight.dtype();
        let weight = Weight::from_values(values, &layout, dtype, false, device);
        self.bias = Some(PlacedWeight::new(weight, layout));
        Ok(self)
    }

    /// Path of the linear.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// What an adapter can be put on: the fragments where there are any, and the whole.
    pub fn targets(&self) -> Vec<&str> {
        std::iter::once(&self.path)
            .chain(&self.fragments)
            .map(String::as_str)
            .collect()
    }

    /// Puts a new adapter on the whole linear, or on the fragment of that path.
    ///
    /// # Errors
    ///
    /// When the path is neither, when an adapter is already there, one with a name included, or when
    /// the config does not fit.
    pub fn adapt(
        &mut self,
        path: &str,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<&mut Lora<B, G, P>, AdapterError> {
        check_base(path, config, self.weight.weight.dtype())?;
        let base = self.base_of(path)?;
        let named = self.named.iter().filter(|set| !set.adapters.is_empty());
        let paths = self.adapters.iter().map(Lora::path);
        self.check_free(path, paths.chain(named.map(MultiLora::path)))?;
        self.adapters.push(Lora::init(path, config, &base, device)?);
        Ok(self.adapters.last_mut().expect("one was pushed"))
    }

    /// Puts a new named adapter on the whole linear, or on the fragment of that path, beside others
    /// with names. Rows then come with the slots of their tokens, sorted by slot, within the rows of an
    /// expert where the linear has experts. See
    /// [`Adaptable`](crate::Adaptable) for what can be done with them.
    ///
    /// # Errors
    ///
    /// When the path is neither, when an adapter without a name is already there, or as
    /// [`MultiLora::add`].
    pub fn adapt_named(
        &mut self,
        path: &str,
        name: &str,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<&mut Lora<B, G, P>, AdapterError> {
        let base = self.base_of(path)?;
        let has_name = |set: &&MultiLora<B, G, P>| set.path() != path && set.get(name).is_some();
        let paths = self.adapters.iter().map(Lora::path);
        let named = self.named.iter().filter(has_name).map(MultiLora::path);
        self.check_free(path, paths.chain(named))?;
        let at = self.named.iter().position(|set| set.path() == path);
        let at = at.unwrap_or_else(|| {
            self.named.push(MultiLora::new(path));
            self.named.len() - 1
        });
        self.named[at].add(name, config, &base, device)
    }

    /// The layout of the whole or of a fragment.
    fn base_of(&self, path: &str) -> Result<WeightLayout, AdapterError> {
        let mut base = self.weight.layout().clone();
        if path != self.path {
            if !self.fragments.iter().any(|fragment| fragment == path) {
                return Err(AdapterError::unknown_target(path, &self.targets()));
            }
            base.d_out /= base.fragments;
            base.fragments = 1;
        }
        Ok(base)
    }

    /// No other adapter changes rows of the target.
    fn check_free<'a>(
        &self,
        path: &str,
        mut others: impl Iterator<Item = &'a str>,
    ) -> Result<(), AdapterError> {
        let overlaps = |other: &&str| *other == path || *other == self.path || path == self.path;
        match others.find(overlaps) {
            None => Ok(()),
            Some(other) => Err(AdapterError::AlreadyAdapted {
                path: path.into(),
                other: other.into(),
            }),
        }
    }

    /// The factors of every adapter, in order. Those of disabled ones are not among them.
    pub fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        let adapters = self.adapters.iter().flat_map(Lora::trained_weights);
        let named = self.named.iter().flat_map(MultiLora::trained_weights);
        adapters.chain(named).collect()
    }

    /// What is added to the base: each adapter, the columns of its delta and its row groups.
    fn adapters_of<'a>(
        &'a self,
        rows: &'a RowGroups,
    ) -> impl Iterator<Item = (Cow<'a, Lora<B, G, P>>, Range<usize>, RowGroups)> {
        let adapters = self.adapters.iter().map(|lora| {
            let columns = self.columns(lora.path());
            (Cow::Borrowed(lora), columns, rows.clone())
        });
        let named = self.named.iter().filter_map(|set| {
            let (lora, rows) = set.stacked(rows)?;
            Some((Cow::Owned(lora), self.columns(set.path()), rows))
        });
        adapters.chain(named)
    }

    /// The local output columns of the delta of an adapter at this path.
    pub(crate) fn columns(&self, path: &str) -> Range<usize> {
        let [d_out, _] = self.weight.layout().local();
        let fragment = self.fragments.iter().position(|fragment| fragment == path);
        match fragment {
            None => 0..d_out,
            Some(fragment) => {
                let width = d_out / self.fragments.len();
                fragment * width..(fragment + 1) * width
            }
        }
    }
}

impl<B: AdapterBackend, G: GroupKind, P: Placement> Linear<B, G, P> {
    /// Starts the magnitudes of DoRA adapters at the row norms of `W + s B A`, where there are none
    /// yet: the adapter is then at its start what it would be without DoRA, to the bit. Every rank of
    /// the group calls it, after [`adapt`](Self::adapt) and before the first pass.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn start_magnitudes(&mut self, group: &Group<B, G>) {
        let base = self.weight.weight.untracked();
        for at in 0..self.adapters.len() {
            // The rows of the weight are the columns of the output.
            let rows = self.columns(self.adapters[at].path());
            let base = output_rows(base.clone(), rows);
            self.adapters[at].start_magnitude(base, group);
        }
        for at in 0..self.named.len() {
            let rows = self.columns(self.named[at].path());
            for named in &mut self.named[at].adapters {
                let base = output_rows(base.clone(), rows.clone());
                named.lora.start_magnitude(base, group);
            }
        }
    }

    fn has_dora(&self) -> bool {
        let named = self.named.iter().flat_map(|set| &set.adapters);
        let named = named.filter(|named| named.is_enabled());
        let mut loras = self.adapters.iter().chain(named.map(|named| &named.lora));
        loras.any(|lora| lora.config().dora)
    }

    /// DoRA's factors of each output column that the rank has in the `B` of its adapters, and the rows
    /// that they are of: those of [`whole_factors`](Self::whole_factors), and those of named adapters,
    /// `[E * groups, d_out / P]`.
    fn dora_factors(
        &self,
        group: &Group<B, G>,
        rows: &RowGroups,
    ) -> Vec<(Tensor<B, 2>, RowGroups)> {
        let whole = self.whole_factors(group).map(|factors| {
            // Groups mean nothing to a base without experts.
            let rows = match factors.dims()[0] {
                1 => RowGroups::whole(rows.all_rows()),
                _ => rows.clone(),
            };
            (factors, rows)
        });
        let mut factors: Vec<_> = whole.into_iter().collect();
        for set in &self.named {
            let columns = self.columns(set.path());
            let base = output_rows(self.weight.weight.untracked(), columns.clone());
            let Some(stack) = Stack::of(set, rows) else {
                continue;
            };
            let Some(of_set) = stack.dora_factors(base, group) else {
                continue;
            };
            // Columns of other fragments stay as they are.
            let [groups, _] = of_set.dims();
            let place = (&of_set.device(), of_set.dtype());
            let ones = |n: usize| (n > 0).then(|| Tensor::ones([groups, n], place));
            let [d_out, _] = self.weight.layout().local();
            let parts = [ones(columns.start), Some(of_set), ones(d_out - columns.end)];
            let of_all = Tensor::cat(parts.into_iter().flatten().collect(), 1);
            factors.push((of_all, stack.rows().clone()));
        }
        factors
    }

    /// DoRA's factor of each output column that the rank has in the `B` of its adapters,
    /// `[E, d_out / P]`, and 1 in those of adapters without DoRA. None without any.
    fn whole_factors(&self, group: &Group<B, G>) -> Option<Tensor<B, 2>> {
        let dora = self.adapters.iter().find(|lora| lora.config().dora)?;
        let dtype = dora.magnitude_dtype();
        let base = self.weight.weight.untracked();
        let whole = self.adapters.iter().any(|lora| lora.path() == self.path);
        let paths = match whole {
            true => std::slice::from_ref(&self.path),
            false => &self.fragments,
        };
        let [experts, rows, _] = base.dims();
        let width = rows / paths.len();
        let mut parts = paths.iter().enumerate().map(|(part, path)| {
            let base = output_rows(base.clone(), part * width..(part + 1) * width);
            let dora = |lora: &&Lora<B, G, P>| lora.path() == path && lora.config().dora;
            match self.adapters.iter().find(dora) {
                Some(lora) => lora.row_factors(base, group).cast(dtype),
                None => Tensor::ones([experts, width], (&base.device(), dtype)),
            }
        });
        if paths.len() == 1 {
            return parts.next();
        }
        Some(Tensor::cat(parts.collect(), 1))
    }
}

/// Rows of a weight `[E, d_out, d_in]`, of which all are the weight itself rather than a copy.
fn output_rows<B: Backend>(weight: Tensor<B, 3>, rows: Range<usize>) -> Tensor<B, 3> {
    match rows == (0..weight.dims()[1]) {
        true => weight,
        false => weight.slice_dim(1, rows),
    }
}

impl<B: AdapterBackend, G: GroupKind> ColumnLinear<B, G> {
    /// `[T, d_in] -> [T, d_out / P]`.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward<X: IsFanout<B, G>>(&self, x: X, rows: &RowGroups) -> Sharded<B, G> {
        let x = x.into_fanout();
        let mut y = self.weight.forward(x.clone(), rows);
        for (lora, columns, rows) in self.adapters_of(rows) {
            y = lora.add_to(y, columns, x.clone(), &rows);
        }
        for (factors, rows) in self.dora_factors(x.group(), rows) {
            y = y.map(|y| scale_columns(y, factors, &rows));
        }
        match &self.bias {
            None => y,
            Some(bias) => y + bias.forward(x.map(|x| ones(&x)), rows),
        }
    }

    /// `[sizes[rank], d_in] -> [T, d_out / P]`: sequence parallel. The rows are those of all ranks'
    /// tokens, which are gathered here and, where the backward pass needs them, there again.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward_sequence(&self, x: Sharded<B, G, Tokens>, rows: &RowGroups) -> Sharded<B, G> {
        self.forward(x.gather_fanout_again(), rows)
    }

    /// As [`forward`](Self::forward), the fragments one by one: `N` of `[T, d_out / N / P]`.
    ///
    /// # Panics
    ///
    /// When the linear has not `N` fragments, when shapes or row groups do not match, or when a
    /// collective fails.
    pub fn forward_fragments<const N: usize, X: IsFanout<B, G>>(
        &self,
        x: X,
        rows: &RowGroups,
    ) -> [Sharded<B, G>; N] {
        assert_eq!(
            self.fragments.len(),
            N,
            "{}: number of fragments",
            self.path
        );
        let y = self.forward(x, rows);
        let group = y.group().clone();
        let y = y.into_tensor();
        let width = y.dims()[1] / N;
        std::array::from_fn(|fragment| {
            let first = fragment * width;
            group.shard(columns(y.clone(), first..first + width))
        })
    }
}

impl<B: AdapterBackend, G: GroupKind> RowLinear<B, G> {
    /// `[T, d_in / P] -> [T, d_out]`, summed here: ordinary tensor parallelism.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward<X: IsSharded<B, G, Features>>(
        &self,
        x: X,
        rows: &RowGroups,
    ) -> Replicated<B, G> {
        let x = x.into_sharded();
        if self.has_dora() {
            // The factors are on the terms, whose sum carries the delta along.
            return self.forward_suppressed(x, rows).reduce_from();
        }
        let y = self.weight.forward(x.clone(), rows);
        let mut y = self.add_bias(y, &x, rows).reduce_from();
        for (lora, _, rows) in self.adapters_of(rows) {
            y = y + lora.forward(x.clone(), &rows).gather_from();
        }
        y
    }

    /// `[T, d_in / P] -> [T, d_out]`, each rank its own term: the caller sums.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward_suppressed<X: IsSharded<B, G, Features>>(
        &self,
        x: X,
        rows: &RowGroups,
    ) -> Partial<B, G> {
        let x = x.into_sharded();
        let mut y = self.weight.forward(x.clone(), rows);
        for (lora, _, rows) in self.adapters_of(rows) {
            y = lora.add_to(y, x.clone(), &rows);
        }
        for (factors, rows) in self.dora_factors(x.group(), rows) {
            // Each rank's term gives a term of the factors' gradient: the gathered ones are `Fanout`.
            let factors = x.group().shard(factors).gather_fanout().into_tensor();
            y = y.map_linear(|y| scale_columns(y, factors, &rows));
        }
        self.add_bias(y, &x, rows)
    }

    /// `[T, d_in / P] -> [sizes[rank], d_out]`: sequence parallel, base and delta summed and
    /// scattered over tokens in one reduce-scatter.
    ///
    /// # Panics
    ///
    /// When shapes, sizes or row groups do not match, or when a collective fails.
    pub fn forward_sequence<X: IsSharded<B, G, Features>>(
        &self,
        x: X,
        rows: &RowGroups,
        sizes: &[usize],
    ) -> Sharded<B, G, Tokens> {
        self.forward_suppressed(x, rows).reduce_scatter(sizes)
    }

    /// The bias is in the terms once: each rank adds its own slice of it.
    fn add_bias(&self, y: Partial<B, G>, x: &Sharded<B, G>, rows: &RowGroups) -> Partial<B, G> {
        match &self.bias {
            None => y,
            Some(bias) => {
                let one = x.group().fanout(ones(x.tensor()));
                y + bias.forward(one, rows).embed()
            }
        }
    }
}

impl<B: AdapterBackend, G: GroupKind> ReplicatedLinear<B, G> {
    /// `[T, d_in] -> [T, d_out]`, no communication.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match.
    pub fn forward<X: IsReplicated<B, G>>(&self, x: X, rows: &RowGroups) -> Replicated<B, G> {
        let x = x.into_replicated();
        let mut y = self.weight.forward(x.clone(), rows);
        for (lora, _, rows) in self.adapters_of(rows) {
            y = lora.add_to(y, x.clone(), &rows);
        }
        for (factors, rows) in self.dora_factors(x.group(), rows) {
            y = y.map(|y| scale_columns(y, factors, &rows));
        }
        match &self.bias {
            None => y,
            Some(bias) => y + bias.forward(x.map(|x| ones(&x)), rows),
        }
    }
}

/// The input `[T, 1]` of a bias.
fn ones<B: Backend>(x: &Tensor<B, 2>) -> Tensor<B, 2> {
    Tensor::ones([x.dims()[0], 1], (&x.device(), x.dtype()))
}
