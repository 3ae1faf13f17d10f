//! Linears whose placement does not matter to the caller.

use burn::tensor::backend::Backend;
use moe_lora_parallel::GroupKind;

use crate::{AdapterError, Linear, LoraConfig, NamedSet, Placement, TrainedWeight};

/// A [`Linear`] whatever its group and its placement.
pub trait AnyLinear<B: Backend> {
    /// As [`Linear::targets`].
    fn targets(&self) -> Vec<&str>;

    /// As [`Linear::adapt`].
    ///
    /// # Errors
    ///
    /// As [`Linear::adapt`].
    fn adapt(
        &mut self,
        path: &str,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<(), AdapterError>;

    /// As [`Linear::adapt_named`].
    ///
    /// # Errors
    ///
    /// As [`Linear::adapt_named`].
    fn adapt_named(
        &mut self,
        path: &str,
        name: &str,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<(), AdapterError>;

    /// As [`Linear::trained_weights`].
    fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>>;

    /// The named adapters of each target that has some.
    fn sets(&self) -> Vec<&dyn NamedSet>;

    /// The named adapters of each target that has some.
    fn sets_mut(&mut self) -> Vec<&mut dyn NamedSet>;

    /// Elements and bytes of this rank's part of the frozen weight and bias: of the whole, or of the
    /// fragment of that path.
    fn frozen(&self, path: &str) -> [usize; 2];
}

impl<B: Backend, G: GroupKind, P: Placement> AnyLinear<B> for Linear<B, G, P> {
    fn targets(&self) -> Vec<&str> {
        Linear::targets(self)
    }

    fn adapt(
        &mut self,
        path: &str,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<(), AdapterError> {
        Linear::adapt(self, path, config, device).map(|_| ())
    }

    fn adapt_named(
        &mut self,
        path: &str,
        name: &str,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<(), AdapterError> {
        Linear::adapt_named(self, path, name, config, device).map(|_| ())
    }

    fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        Linear::trained_weights(self)
    }

    fn sets(&self) -> Vec<&dyn NamedSet> {
        self.named.iter().map(|set| set as &dyn NamedSet).collect()
    }

    fn sets_mut(&mut self) -> Vec<&mut dyn NamedSet> {
        let sets = self.named.iter_mut();
        sets.map(|set| set as &mut dyn NamedSet).collect()
    }

    fn frozen(&self, path: &str) -> [usize; 2] {
        let [d_out, _] = self.weight.layout().local();
        let columns = self.columns(path).len();
        let bias = self.bias.as_ref().map(|bias| &bias.weight);
        let weights = std::iter::once(&self.weight.weight).chain(bias);
        weights.fold([0, 0], |[elements, bytes], weight| {
            let part = weight.len() * columns / d_out;
            [elements + part, bytes + part * weight.dtype().size()]
        })
    }
}
