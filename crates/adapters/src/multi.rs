//! Several named adapters on one linear, each token using the one of its slot.
//!
//! `delta = s_i B_i act(A_i x)` for a token of adapter `i`. All run in one product over (expert,
//! slot): the factors of all adapters are stacked to those of one adapter with a group for each
//! pair, so states, operations and collectives are those of one adapter of the largest rank.

use std::marker::PhantomData;

use burn::module::Module;
use burn::tensor::backend::Backend;
use moe_lora_kernels::Slot;
use moe_lora_parallel::GroupKind;

use crate::{AdapterError, Lora, LoraConfig, Placement, TrainedWeight, WeightLayout};

/// The named adapters of one linear, or of one fragment of it.
///
/// A token uses the adapter of its [`Slot`]; one of the base, or of an adapter that is disabled or not
/// among these, none. Ranks and alphas differ as they like. Smaller ranks are padded with zeros that
/// no gradient reaches.
///
/// Rows lie by expert and then by slot (key `expert * slots + slot`), so that those of an expert, which
/// the base reads, are one range, and those of an adapter in it another.
#[derive(Module, Debug)]
pub struct MultiLora<B: Backend, G: GroupKind, P: Placement> {
    /// In the order of their slots.
    pub adapters: Vec<NamedLora<B, G, P>>,
    #[module(skip)]
    path: String,
    #[module(skip)]
    place: PhantomData<(G, P)>,
}

/// One of several adapters.
#[derive(Module, Debug)]
pub struct NamedLora<B: Backend, G: GroupKind, P: Placement> {
    /// The adapter. Its path is that of the linear with the name at its end.
    pub lora: Lora<B, G, P>,
    #[module(skip)]
    name: String,
    #[module(skip)]
    enabled: bool,
    #[module(skip)]
    place: PhantomData<(G, P)>,
}

impl<B: Backend, G: GroupKind, P: Placement> NamedLora<B, G, P> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether tokens of its slot use it.
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    pub(crate) fn slot(&self) -> Slot {
        Slot::named(&self.name)
    }
}

impl<B: Backend, G: GroupKind, P: Placement> MultiLora<B, G, P> {
    /// None yet, for the linear or fragment at `path`.
    pub fn new(path: &str) -> Self {
        Self {
            adapters: Vec::new(),
            path: path.into(),
            place: PhantomData,
        }
    }

    /// Path of the linear or fragment.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The adapter of this name.
    pub fn get(&self, name: &str) -> Option<&NamedLora<B, G, P>> {
        self.adapters.iter().find(|named| named.name == name)
    }

    /// The adapter of this name.
    pub fn get_mut(&mut self, name: &str) -> Option<&mut NamedLora<B, G, P>> {
        self.adapters.iter_mut().find(|named| named.name == name)
    }

    /// A new adapter, enabled, for a base weight of the layout `base`.
    ///
    /// # Errors
    ///
    /// When the name is unusable or taken, when the config does not fit the linear or asks for PiSSA, or
    /// when it differs from that of the others in what one product has once: function, dropout (and its
    /// seed), element type, way of computing.
    pub fn add(
        &mut self,
        name: &str,
        config: &LoraConfig,
        base: &WeightLayout,
        device: &B::Device,
    ) -> Result<&mut Lora<B, G, P>, AdapterError> {
        self.check_free(name)?;
        self.check_config(name, config)?;
        let path = format!("{}.{name}", self.path);
        let lora = Lora::init(&path, config, base, device)?;
        Ok(self.insert(name, lora))
    }

    pub(crate) fn insert(&mut self, name: &str, lora: Lora<B, G, P>) -> &mut Lora<B, G, P> {
        let named = NamedLora {
            lora,
            name: name.into(),
            enabled: true,
            place: PhantomData,
        };
        let at = self
            .adapters
            .partition_point(|other| other.slot() < named.slot());
        self.adapters.insert(at, named);
        &mut self.adapters[at].lora
    }

    /// # Errors
    ///
    /// When the name is unusable or taken.
    pub(crate) fn check_free(&self, name: &str) -> Result<(), AdapterError> {
        let of_a_path = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        if name.is_empty() || !name.chars().all(of_a_path) {
            return Err(AdapterError::Name { name: name.into() });
        }
        let slot = Slot::named(name);
        let taken = self.adapters.iter().find(|named| named.slot() == slot);
        match taken {
            Some(other) => Err(AdapterError::NameTaken {
                path: self.path.clone(),
                name: name.into(),
                other: other.name.clone(),
            }),
            None => Ok(()),
        }
    }

    fn check_config(&self, name: &str, config: &LoraConfig) -> Result<(), AdapterError> {
        if config.pissa {
            return Err(AdapterError::Combination {
                first: "PiSSA",
                second: format!("the name \"{name}\""),
                because: "would take its start out of the base that other adapters share (use `adapt`, or a plain start)",
            });
        }
        let Some(other) = self.adapters.first() else {
            return Ok(());
        };
        let settings = |config: &LoraConfig| {
            let none = || "none".to_owned();
            let dropout = config.dropout;
            [
                ("activation", format!("{:?}", config.activation)),
                (
                    "dropout",
                    dropout.map_or_else(none, |dropout| dropout.to_string()),
                ),
                (
                    "seed of dropout",
                    dropout.map_or_else(none, |_| config.seed.to_string()),
                ),
                ("dtype", format!("{:?}", config.dtype)),
                ("strategy", config.compute.strategy.to_string()),
                ("tf32", config.compute.tf32.to_string()),
            ]
        };
        let pairs = settings(config)
            .into_iter()
            .zip(settings(other.lora.config()));
        for ((setting, found), (_, expected)) in pairs {
            if found != expected {
                return Err(AdapterError::Unlike {
                    name: name.into(),
                    other: other.name.clone(),
                    setting,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }

    /// The factors of the enabled adapters, in order.
    pub fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        let enabled = self.adapters.iter().filter(|named| named.enabled);
        let weights = enabled.flat_map(|named| {
            let weights = named.lora.trained_weights().into_iter();
            weights.map(|weight| TrainedWeight {
                adapter: Some(&named.name),
                ..weight
            })
        });
        weights.collect()
    }

    pub(crate) fn enable(&mut self, name: &str, enabled: bool) {
        if let Some(named) = self.get_mut(name) {
            named.enabled = enabled;
        }
    }
}
