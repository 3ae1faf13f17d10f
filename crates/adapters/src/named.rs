//! What is done with the adapters of one linear by their names.

use burn::tensor::backend::Backend;
use moe_lora_parallel::GroupKind;

use crate::{AdapterError, MultiLora, Placement};

/// The named adapters of one linear or fragment, whatever its placement.
pub trait NamedSet {
    /// Names in the order of their slots.
    fn names(&self) -> Vec<String>;
    /// As [`Adaptable::set_enabled`](crate::Adaptable::set_enabled); a name that is not here is left alone.
    fn set_enabled(&mut self, name: &str, enabled: bool);
    /// As [`Adaptable::remove`](crate::Adaptable::remove); a name that is not here is left alone.
    fn remove(&mut self, name: &str);
    /// Whether [`combine`](Self::combine) can.
    ///
    /// # Errors
    ///
    /// When the name is unusable or taken, or when a source has DoRA.
    fn check_combine(&self, name: &str, sources: &[(&str, f64)]) -> Result<(), AdapterError>;
    /// As [`Adaptable::combine`](crate::Adaptable::combine), of those sources that are here. Nothing without any.
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
