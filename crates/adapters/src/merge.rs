//! Merging: the weight with its adapters added.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use moe_lora_parallel::{Group, GroupKind};

use crate::{
    Activation, Adaptable, AdapterBackend, AdapterError, Linear, Lora, PlacedWeight, Placement,
    ShardAxis,
};

impl<B: AdapterBackend, G: GroupKind, P: Placement> Linear<B, G, P> {
    /// `W + s B A`, with DoRA its rows at the trained lengths, in the base's own sharding and dtype,
    /// `[E, d_out, d_in]` by local extents with `E = 1` for a linear without experts. Computed in
    /// f32 and rounded once.
    ///
    /// # Errors
    ///
    /// When a function stands between the factors.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn merged_weight(&self, group: &Group<B, G>) -> Result<Tensor<B, 3>, AdapterError> {
        let names = self.adapter_names();
        if !names.is_empty() {
            return Err(AdapterError::Several {
                path: self.path().into(),
                names,
            });
        }
        let adapters = self.adapters.iter().map(|lora| (lora, lora.path()));
        self.merged_with(adapters.collect(), group)
    }

    /// As [`merged_weight`](Self::merged_weight), with this one of the named adapters.
    ///
    /// # Errors
    ///
    /// When no adapter has the name, or when a function stands between its factors.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn merged_weight_of(
        &self,
        name: &str,
        group: &Group<B, G>,
    ) -> Result<Tensor<B, 3>, AdapterError> {
        self.slot(name)?;
        let sets = self.named.iter();
        let named = sets.filter_map(|set| Some((&set.get(name)?.lora, set.path())));
        let others = self.adapters.iter().map(|lora| (lora, lora.path()));
        self.merged_with(others.chain(named).collect(), group)
    }

    /// With these adapters on the whole or on fragments.
    fn merged_with(
        &self,
        adapters: Vec<(&Lora<B, G, P>, &str)>,
        group: &Group<B, G>,
    ) -> Result<Tensor<B, 3>, AdapterError> {
        let base = self.weight.weight.untracked();
        if adapters.is_empty() {
            return Ok(base);
        }
        let dtype = base.dtype();
        let [experts, _, d_in] = base.dims();
        let mut merged = in_f32(base);
        for (lora, path) in adapters {
            let delta = lora.delta_weight(group)?;
            let rows = self.columns(path);
            let place = [0..experts, rows, 0..d_in];
            let sum = merged.clone().slice(place.clone()) + delta;
            let sum = lora.at_magnitudes(sum, group);
            merged = merged.slice_assign(place, sum);
        }
        Ok(merged.cast(dtype))
    }

    /// Replaces the weight by the merged one and leaves no adapters; the bias stays. Returns the
    /// linear as it was, for [`unmerge`](Self::unmerge).
    ///
    /// Dropped, what is returned frees the base. A base that is read anew takes the adapters on
    /// when it is given those of the returned linear.
    ///
    /// # Errors
    ///
    /// When a function stands between the factors; nothing is changed then.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn merge(&mut self, group: &Group<B, G>) -> Result<Self, AdapterError> {
        let weight = self.merged_weight(group)?;
        Ok(self.put(weight))
    }

    /// As [`merge`](Self::merge), with the named adapter alone. The others are left out too.
    ///
    /// # Errors
    ///
    /// As [`merged_weight_of`](Self::merged_weight_of); nothing is changed then.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn merge_named(&mut self, name: &str, group: &Group<B, G>) -> Result<Self, AdapterError> {
        let weight = self.merged_weight_of(name, group)?;
        Ok(self.put(weight))
    }

    /// Puts a merged weight in place, without adapters.
    fn put(&mut self, weight: Tensor<B, 3>) -> Self {
        let mut merged = self.clone();
        if !self.adapters.is_empty() || !self.named.is_empty() {
            merged.weight.weight.replace(weight);
            merged.adapters.clear();
            merged.named.clear();
        }
        std::mem::replace(self, merged)
    }

    /// Puts back what [`merge`](Self::merge) returned, to the bit. Subtracting the deltas would
    /// not: their sum with the weight was rounded.
    ///
    /// # Panics
    ///
    /// When `original` is another linear, or another rank's part.
    pub fn unmerge(&mut self, original: Self) {
        assert_eq!(original.path(), self.path(), "unmerge of another linear");
        assert_eq!(
            original.weight.layout(),
            self.weight.layout(),
            "{}: unmerge of another part",
            self.path()
        );
        *self = original;
    }
}

impl<B: AdapterBackend, G: GroupKind, P: Placement> Lora<B, G, P> {
    /// `s B A` in the base's sharding, `[E, d_out, d_in]` by the base's local extents. Computed in f32 (f64 for f64 factors).
    ///
    /// # Errors
    ///
    /// When a function stands between `A` and `B`.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn delta_weight(&self, group: &Group<B, G>) -> Result<Tensor<B, 3>, AdapterError> {
        if self.config().activation != Activation::Identity {
            return Err(AdapterError::Unmergeable {
                path: self.path().into(),
                activation: self.config().activation,
            });
        }
        Ok(self.product(&self.a, &self.b, group))
    }

    /// `s b a` in the base's sharding, of factors that lie as the adapter's own do.
    pub(crate) fn product(
        &self,
        a: &PlacedWeight<B, G, P>,
        b: &PlacedWeight<B, G, P::Up>,
        group: &Group<B, G>,
    ) -> Tensor<B, 3> {
        // The factor that is sharded as the base is stays as it is; the other one is gathered.
        let a = match P::AXIS {
            ShardAxis::In => a.weight.untracked(),
            _ => a.gather(group),
        };
        let b = match P::AXIS {
            ShardAxis::Out => b.weight.untracked(),
            _ => b.gather(group),
        };
        low_rank_product(in_f32(b), in_f32(a)).mul_scalar(self.config().scale())
    }
}

/// At least f32.
pub(crate) fn in_f32<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => x,
    }
}

/// `b [E, m, r]` times `a [E, r, n]`, one rank-1 term after the other: each element is the same
/// chain of operations however the factors are sharded, so the product has the same bits at
/// every topology. A blocked matmul does not promise that.
fn low_rank_product<B: Backend>(b: Tensor<B, 3>, a: Tensor<B, 3>) -> Tensor<B, 3> {
    let [_, _, rank] = b.dims();
    (0..rank)
        .map(|k| b.clone().narrow(2, k, 1) * a.clone().narrow(1, k, 1))
        .reduce(|sum, term| sum + term)
        .expect("LoraConfig::check refuses a rank of zero")
}
