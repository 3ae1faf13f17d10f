//! LoRA adapters on experts, in the files of Hugging Face PEFT.

mod adapter_config;
mod dialect;
mod expert_adapter;
mod factor_pair;
mod layout;
mod patterns;
mod slot;
mod stacked;
mod storage;
mod stored;
mod targets;

pub use expert_adapter::{ExpertAdapter, GateUp};
pub use factor_pair::FactorPair;
pub use layout::PeftLayout;

use crate::projection::Projection;
use crate::{InterchangeError, ModelConfig};
use adapter_config::AdapterConfig;
use layout::expect_modules;
use moe_lora_files::{Staging, StoredTensor, TensorFile};
use slot::Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// A LoRA adapter on the experts of a model.
///
/// The weight it stands for is `W + s B A` for every expert, with `s` from [`PeftAdapter::scale`].
#[derive(Debug, Clone, PartialEq)]
pub struct PeftAdapter {
    /// Whether the scales divide by `sqrt(r)` instead of `r`.
    pub rslora: bool,
    /// The factors by layer, counted from 0; a layer that is not here is not adapted.
    pub layers: BTreeMap<usize, ExpertAdapter>,
}

impl PeftAdapter {
    /// The factor on `B A` of a pair: `alpha / r`, or `alpha / sqrt(r)` with
    /// [`rslora`](Self::rslora).
    pub fn scale(&self, pair: &FactorPair) -> f64 {
        pair.scale(self.rslora)
    }

    /// Reads the adapter in `folder`, in any layout, for a model of `config`.
    ///
    /// Settings of the training, such as the dropout and the initialisation, are not kept.
    ///
    /// # Errors
    ///
    /// When a file is missing or damaged; when `adapter_config.json` sets anything that changes the
    /// numbers and is not LoRA or DoRA on experts; when the tensors are not exactly those it calls
    /// for; when a shape does not fit `config` or the ranks; and when nothing tells which way round
    /// the factors of square stacked parameters lie, because there is no `peft_version`.
    pub fn read(folder: &Path, config: &ModelConfig) -> Result<Self, InterchangeError> {
        let settings = AdapterConfig::read(folder.join(CONFIG))?;
        let file = TensorFile::open(folder.join(WEIGHTS))?;
        let slots = settings.select(&file, config)?;
        if slots.iter().any(|slot| slot.is_per_expert()) {
            expect_modules(config, PeftLayout::PerExpert)?;
        }
        expect_tensors(&file, &slots, settings.dora, config)?;

        let mut layers: BTreeMap<usize, ExpertAdapter> = BTreeMap::new();
        let mut gates = BTreeMap::new();
        for (slot, pair) in settings.pairs(slots, &file, config)? {
            let pair = slot.read(&file, config, pair)?;
            let layer = layers.entry(slot.layer).or_default();
            match slot.projection {
                Projection::GateUp => layer.gate_up = Some(GateUp::Fused(pair)),
                Projection::Down => layer.down = Some(pair),
                Projection::Gate => {
                    gates.insert(slot.layer, pair);
                }
                Projection::Up => {
                    // Slots come gate before up, and never one without the other.
                    layer.gate_up = gates
                        .remove(&slot.layer)
                        .map(|gate| GateUp::Separate { gate, up: pair });
                }
            }
        }
        let rslora = settings.rslora;
        Ok(Self { rslora, layers })
    }

    /// Writes the adapter to `folder` for PEFT to load onto the model named `base`, whose
    /// configuration is `config`.
    ///
    /// Fused factors in [`PeftLayout::PerExpert`] become two pairs with the same `a` and one half
    /// of `b` each, which is exact. The rank and alpha that most pairs have are written as `r` and
    /// `lora_alpha`, the others as patterns.
    ///
    /// # Errors
    ///
    /// When the adapter is empty or does not fit `config`, when the layout cannot hold it, with one
    /// that can, and when a file cannot be written. An adapter that was in `folder` before is then
    /// still there.
    pub fn write(
        &self,
        folder: &Path,
        config: &ModelConfig,
        layout: PeftLayout,
        base: &str,
    ) -> Result<(), InterchangeError> {
        let pairs = self.placed(config, layout)?;
        let path = folder.join(CONFIG);
        let settings = adapter_config::to_json(&path, &pairs, self.rslora, layout, config, base)?;
        let mut tensors: Vec<(String, StoredTensor<'static>)> = Vec::new();
        for (slot, pair) in pairs {
            let named = slot.write(pair, config)?;
            tensors.extend(
                named
                    .into_iter()
                    .map(|(name, tensor)| (name, tensor.into())),
            );
        }
        let mut staging = Staging::new(folder)?;
        staging.write_tensors(WEIGHTS, tensors)?;
        staging.write(CONFIG, settings.as_bytes())?;
        Ok(staging.commit()?)
    }

    /// The adapter with separate gate and up pairs fused: `A` stacked and `B` block-diagonal, of
    /// both ranks together, and alpha adjusted so that the scale stays (twice, or `sqrt(2)` times
    /// with [`rslora`](Self::rslora), where the ranks are equal). The deltas are the same.
    ///
    /// Trained on, it is another adapter: the zeros of `B` get gradients.
    ///
    /// # Errors
    ///
    /// When gate and up of a layer have different scales or shapes that do not belong together.
    pub fn fuse_gate_up(&self) -> Result<Self, InterchangeError> {
        let mut fused = self.clone();
        for (&layer, adapter) in &mut fused.layers {
            let Some(GateUp::Separate { gate, up }) = &adapter.gate_up else {
                continue;
            };
            let scales = (self.scale(gate), self.scale(up));
            if scales.0 != scales.1 {
                let (gate, up) = scales;
                return Err(InterchangeError::FusedScales { layer, gate, up });
            }
            let pair = FactorPair::stack_rows(gate, up, self.rslora)?;
            adapter.gate_up = Some(GateUp::Fused(pair));
        }
        Ok(fused)
    }

    /// The adapter with a copy of each shared factor for every one of `experts` experts, which has
    /// the same deltas.
    ///
    /// # Errors
    ///
    /// When a factor is for another number of experts.
    pub fn expand(&self, experts: usize) -> Result<Self, InterchangeError> {
        let mut expanded = self.clone();
        for adapter in expanded.layers.values_mut() {
            for (_, pair) in adapter.pairs_mut() {
                *pair = pair.expand(experts)?;
            }
        }
        Ok(expanded)
    }

    /// The layers in which only one of gate-up and down is adapted.
    ///
    /// SGLang adapts the experts of a layer only where both are, and otherwise serves the base
    /// without an error: warn before such an adapter is deployed there.
    pub fn one_sided_layers(&self) -> Vec<usize> {
        let layers = self.layers.iter();
        let one_sided = layers.filter(|(_, layer)| layer.gate_up.is_some() != layer.down.is_some());
        one_sided.map(|(&layer, _)| layer).collect()
    }
}

/// The file holds the tensors of `slots`, all of them and no others.
fn expect_tensors(
    file: &TensorFile,
    slots: &[Slot],
    dora: bool,
    config: &ModelConfig,
) -> Result<(), InterchangeError> {
    const SHOWN: usize = 4;
    let names = || slots.iter().flat_map(|slot| slot.tensors(dora, config));
    // A configuration can claim billions of names; stopping at the first few that are missing keeps
    // this bounded by the file.
    let missing: Vec<String> = names()
        .filter(|name| !file.contains(name))
        .take(SHOWN + 1)
        .collect();
    let path = file.path().to_owned();
    if !missing.is_empty() {
        let (names, more) = first(missing, SHOWN);
        return Err(InterchangeError::MissingTensors { path, names, more });
    }
    let expected: BTreeSet<String> = names().collect();
    let unexpected: Vec<String> = file
        .names()
        .filter(|name| !expected.contains(*name))
        .take(SHOWN + 1)
        .map(str::to_owned)
        .collect();
    if !unexpected.is_empty() {
        let (names, more) = first(unexpected, SHOWN);
        return Err(InterchangeError::UnexpectedTensors { path, names, more });
    }
    Ok(())
}

fn first(mut names: Vec<String>, shown: usize) -> (Vec<String>, bool) {
    let more = names.len() > shown;
    names.truncate(shown);
    (names, more)
}
