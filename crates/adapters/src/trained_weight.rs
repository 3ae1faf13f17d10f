//! What an optimizer, a checkpoint or a report needs to know of a trained factor.

use burn::tensor::backend::Backend;
use moe_lora_parallel::GroupName;

use crate::{LoraConfig, Weight, WeightLayout};

/// A trained factor of an adapter, with what is needed to name, count, save and reduce it.
#[derive(Clone, Debug)]
pub struct TrainedWeight<'a, B: Backend> {
    /// Path with `.lora_A`, `.lora_B` or `.lora_magnitude_vector` at its end.
    pub path: String,
    /// Path of the linear, with the adapter's name at its end where it has one.
    pub linear: &'a str,
    /// Name of the adapter where it is one of several.
    pub adapter: Option<&'a str>,
    /// The adapter's settings.
    pub config: &'a LoraConfig,
    /// The local values.
    pub weight: &'a Weight<B>,
    /// Shape and place.
    pub layout: &'a WeightLayout,
    /// The group whose ranks hold the shards.
    pub group: GroupName,
    /// Whether one weight serves the experts of every expert-parallel rank.
    pub shared_by_experts: bool,
    /// Whether files hold it without its axis of `d_in`, which is 1: a magnitude.
    pub is_vector: bool,
    /// Where a factor of PiSSA started, which checkpoints hold as `{path}.start`.
    pub start: Option<&'a Weight<B>>,
}

impl<B: Backend> TrainedWeight<'_, B> {
    /// Its name in the linear: `lora_A`, `lora_B` or `lora_magnitude_vector`.
    pub fn factor(&self) -> &str {
        let factor = self.path.strip_prefix(self.linear);
        let factor = factor.and_then(|factor| factor.strip_prefix('.'));
        factor.unwrap_or(&self.path)
    }

    /// The same weight without the name of its adapter in its paths. Of one of several adapters, these
    /// are saved as, and loaded from, a checkpoint of an adapter without a name.
    pub fn unnamed(self) -> Self {
        let Some(name) = self.adapter else {
            return self;
        };
        let factor = self.path.strip_prefix(self.linear).unwrap_or_default();
        let linear = self.linear.strip_suffix(name).unwrap_or(self.linear);
        let linear = linear.strip_suffix('.').unwrap_or(linear);
        Self {
            path: format!("{linear}{factor}"),
            linear,
            adapter: None,
            ..self
        }
    }
}
