//! What is done with adapters by their names, over all linears that have them.

use burn::tensor::backend::Backend;
use moe_lora_kernels::Slot;
use moe_lora_parallel::GroupKind;

use crate::{AdapterError, Linear, MultiLora, Placement};

/// The named adapters of one linear or fragment, whatever its placement.
pub trait NamedSet {
    /// Names in the order of their slots.
    fn names(&self) -> Vec<String>;
    /// As [`NamedAdapters::set_enabled`]; a name that is not here is left alone.
    fn set_enabled(&mut self, name: &str, enabled: bool);
    /// As [`NamedAdapters::remove`]; a name that is not here is left alone.
    fn remove(&mut self, name: &str);
    /// Whether [`combine`](Self::combine) can.
    ///
    /// # Errors
    ///
    /// When the name is unusable or taken, or when a source has DoRA.
    fn check_combine(&self, name: &str, sources: &[(&str, f64)]) -> Result<(), AdapterError>;
    /// As [`NamedAdapters::combine`], of those sources that are here. Nothing without any.
    ///
    /// # Errors
    ///
    /// As [`check_combine`](Self::check_combine).
    fn combine(&mut self, name: &str, sources: &[(&str, f64)]) -> Result<(), AdapterError>;
}

impl<B: Backend, G: GroupKind, P: Placement> NamedSet for MultiLora<B, G, P> {
    fn names(&self) -> Vec<String> {
        let names = self.adapters.iter().map(|named| named.name().to_owned());
        names.collect()
    }

    fn set_enabled(&mut self, name: &str, enabled: bool) {
        self.enable(name, enabled);
    }

    fn remove(&mut self, name: &str) {
        self.adapters.retain(|named| named.name() != name);
    }

    fn check_combine(&self, name: &str, sources: &[(&str, f64)]) -> Result<(), AdapterError> {
        self.check_free(name)?;
        let mut named = sources.iter().filter_map(|(source, _)| self.get(source));
        match named.find(|named| named.lora.config().dora) {
            None => Ok(()),
            Some(named) => Err(AdapterError::CombinedDora {
                path: self.path().into(),
                name: named.name().into(),
            }),
        }
    }

    fn combine(&mut self, name: &str, sources: &[(&str, f64)]) -> Result<(), AdapterError> {
        self.check_combine(name, sources)?;
        if let Some(lora) = self.combined(name, sources) {
            self.insert(name, lora);
        }
        Ok(())
    }
}

/// A linear, an MLP or a layer with adapters that have names.
///
/// Every rank makes the same calls.
pub trait NamedAdapters {
    /// The adapters of each linear and fragment.
    fn sets(&self) -> Vec<&dyn NamedSet>;

    /// The adapters of each linear and fragment.
    fn sets_mut(&mut self) -> Vec<&mut dyn NamedSet>;

    /// The names, each once, sorted.
    fn adapter_names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.sets().iter().flat_map(|set| set.names()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// The slot of the adapter of this name, for [`TokenIds::with_slots`](crate::TokenIds::with_slots).
    /// It is the same in every layer. Linears without the adapter add nothing to its tokens.
    ///
    /// # Errors
    ///
    /// When no adapter has the name.
    fn slot(&self, name: &str) -> Result<Slot, AdapterError> {
        let names = self.adapter_names();
        match names.iter().any(|known| known == name) {
            true => Ok(Slot::named(name)),
            false => Err(AdapterError::unknown_name(name, names)),
        }
    }

    /// Whether tokens of the adapter's slot use it. Those of a disabled one get the base's output, and
    /// it takes no part in training: it has no gradients, and is not among the trained weights.
    ///
    /// # Errors
    ///
    /// When no adapter has the name.
    fn set_enabled(&mut self, name: &str, enabled: bool) -> Result<(), AdapterError> {
        self.slot(name)?;
        for set in self.sets_mut() {
            set.set_enabled(name, enabled);
        }
        Ok(())
    }

    /// Removes the adapter. Tokens of its slot get the base's output from then on.
    ///
    /// # Errors
    ///
    /// When no adapter has the name.
    fn remove(&mut self, name: &str) -> Result<(), AdapterError> {
        self.slot(name)?;
        for set in self.sets_mut() {
            set.remove(name);
        }
        Ok(())
    }

    /// Adds an adapter whose delta is `sum_i w_i * s_i B_i A_i x` over these adapters `i`, as they are
    /// now. It is an adapter as any other: its rank is the sum of theirs, its scale is 1, and it trains
    /// by itself.
    ///
    /// # Errors
    ///
    /// When no adapter has a name among the sources, when one of them has DoRA, when a weight is not
    /// finite, when there are no sources, or when the new name is unusable or taken; nothing is changed
    /// then.
    fn combine(&mut self, name: &str, sources: &[(&str, f64)]) -> Result<(), AdapterError> {
        let weights: Vec<f64> = sources.iter().map(|(_, weight)| *weight).collect();
        if weights.is_empty() || !weights.iter().all(|weight| weight.is_finite()) {
            return Err(AdapterError::Weights {
                name: name.into(),
                weights,
            });
        }
        for (source, _) in sources {
            self.slot(source)?;
        }
        for set in self.sets() {
            set.check_combine(name, sources)?;
        }
        for set in self.sets_mut() {
            set.combine(name, sources)?;
        }
        Ok(())
    }
}

impl<B: Backend, G: GroupKind, P: Placement> NamedAdapters for Linear<B, G, P> {
    fn sets(&self) -> Vec<&dyn NamedSet> {
        self.named.iter().map(|set| set as &dyn NamedSet).collect()
    }

    fn sets_mut(&mut self) -> Vec<&mut dyn NamedSet> {
        let sets = self.named.iter_mut();
        sets.map(|set| set as &mut dyn NamedSet).collect()
    }
}
