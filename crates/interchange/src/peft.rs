//! LoRA adapters on experts, in the files of Hugging Face PEFT.

mod adapter_config;
mod factor_pair;
mod slot;

pub use factor_pair::FactorPair;

use crate::projection::Projection;
use crate::{InterchangeError, ModelConfig};
use adapter_config::AdapterConfig;
use moe_lora_files::{Staging, StoredTensor, TensorFile};
use slot::Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const WEIGHTS: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// The factors of the map that yields gate and up.
#[derive(Debug, Clone, PartialEq)]
pub enum GateUp {
    /// One pair over gate and up together: `a` `[E, r, H]`, `b` `[E, 2F, r]`, rows of the gate
    /// first.
    Fused(FactorPair),
    /// A pair each: `a` `[E, r, H]`, `b` `[E, F, r]`.
    Separate {
        /// The factors of the gate.
        gate: FactorPair,
        /// The factors of up.
        up: FactorPair,
    },
}

/// The factors on the experts of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertAdapter {
    /// On gate and up (fc1), if they are adapted.
    pub gate_up: Option<GateUp>,
    /// On down (fc2), if it is adapted: `a` `[E, r, F]`, `b` `[E, H, r]`.
    pub down: Option<FactorPair>,
}

/// A LoRA adapter on the experts of a model.
///
/// The weight it stands for is `W + s B A` for every expert, with `s` from [`PeftAdapter::scale`].
#[derive(Debug, Clone, PartialEq)]
pub struct PeftAdapter {
    /// Rank `r`, the same everywhere.
    pub rank: usize,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Whether the scale divides by `sqrt(r)` instead of `r`.
    pub rslora: bool,
    /// The factors by layer, counted from 0; a layer that is not here is not adapted.
    pub layers: BTreeMap<usize, ExpertAdapter>,
}

/// How the factors of a layer's experts lie in the file.
///
/// With `experts` for `base_model.model.model.layers.{layer}.mlp.experts`:
///
/// | layout | tensors | shapes |
/// |---|---|---|
/// | `Stacked` | `experts.lora_A.weight`, `experts.lora_B.weight` | `[E*r, d_in]`, `[d_out, E*r]` |
/// | `PerExpert` | `experts.{expert}.gate_proj.lora_A.weight` and so on | `[r, d_in]`, `[d_out, r]` |
///
/// In the stacked `lora_A` the expert is the slow index of the rows; in `lora_B` it is the fast
/// index of the columns: column `j` is rank `j / E` of expert `j % E`. PEFT wraps the parameters of
/// a module in the order in which the module declares them, `gate_up_proj` before `down_proj`,
/// whatever the order in `target_parameters`. So where both are adapted, `experts.base_layer` holds
/// the factors of `gate_up_proj` and `experts` those of `down_proj`; a single one is at `experts`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeftLayout {
    /// One pair per stacked parameter (`target_parameters`), for transformers 5.
    Stacked,
    /// One pair per expert and projection (`target_modules`), for transformers 4.
    PerExpert,
}

impl PeftAdapter {
    /// The factor on `B A`: `alpha / r`, or `alpha / sqrt(r)` with [`rslora`](Self::rslora).
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.rslora { rank.sqrt() } else { rank }
    }

    /// Reads the adapter in `folder`, in either layout, for a model of `config`.
    ///
    /// Settings of the training, such as the dropout and the initialisation, are not kept.
    ///
    /// # Errors
    ///
    /// When a file is missing or damaged; when `adapter_config.json` sets anything that changes the
    /// numbers and is not plain LoRA on experts; when the tensors are not exactly those it calls
    /// for; when a shape does not fit `config`; and when a stacked square parameter comes from a
    /// PEFT before 0.19.1, which stored it transposed.
    pub fn read(folder: &Path, config: &ModelConfig) -> Result<Self, InterchangeError> {
        expect_upright(config)?;
        let settings = AdapterConfig::read(folder.join(CONFIG), config)?;
        let file = TensorFile::open(folder.join(WEIGHTS))?;
        expect_tensors(&file, &settings.slots, config)?;

        let mut layers: BTreeMap<usize, ExpertAdapter> = BTreeMap::new();
        let mut gates = BTreeMap::new();
        for slot in settings.slots {
            let pair = slot.read(&file, config, settings.rank)?;
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
        Ok(Self {
            rank: settings.rank,
            alpha: settings.alpha,
            rslora: settings.rslora,
            layers,
        })
    }

    /// Writes the adapter to `folder` for PEFT to load onto the model named `base`, whose
    /// configuration is `config`.
    ///
    /// Fused factors in [`PeftLayout::PerExpert`] become two pairs with the same `a` and one half
    /// of `b` each, which is exact.
    ///
    /// # Errors
    ///
    /// When the adapter is empty or does not fit `config`, when separate factors are to be stacked,
    /// and when a file cannot be written. An adapter that was in `folder` before is then still
    /// there.
    pub fn write(
        &self,
        folder: &Path,
        config: &ModelConfig,
        layout: PeftLayout,
        base: &str,
    ) -> Result<(), InterchangeError> {
        expect_upright(config)?;
        let pairs = self.pairs(config, layout)?;
        let settings = AdapterConfig {
            rank: self.rank,
            alpha: self.alpha,
            rslora: self.rslora,
            layout,
            slots: pairs.iter().map(|(slot, _)| *slot).collect(),
        };
        settings.check(&folder.join(CONFIG))?;

        let mut tensors: Vec<(String, StoredTensor<'static>)> = Vec::new();
        for (slot, pair) in pairs {
            let named = slot.write(&pair, config, self.rank)?;
            tensors.extend(
                named
                    .into_iter()
                    .map(|(name, tensor)| (name, tensor.into())),
            );
        }
        let mut staging = Staging::new(folder)?;
        staging.write_tensors(WEIGHTS, tensors)?;
        staging.write(CONFIG, settings.to_json(config, base).as_bytes())?;
        Ok(staging.commit()?)
    }

    /// Every pair with the place it has in `layout`.
    fn pairs(
        &self,
        config: &ModelConfig,
        layout: PeftLayout,
    ) -> Result<Vec<(Slot, FactorPair)>, InterchangeError> {
        let mut pairs = BTreeMap::new();
        for (&layer, adapter) in &self.layers {
            config.expect_moe(layer)?;
            match (&adapter.gate_up, layout) {
                (None, _) => {}
                (Some(GateUp::Fused(pair)), PeftLayout::Stacked) => {
                    pairs.insert((layer, Projection::GateUp), pair.clone());
                }
                (Some(GateUp::Fused(pair)), PeftLayout::PerExpert) => {
                    let (gate, up) = pair.split_rows()?;
                    pairs.insert((layer, Projection::Gate), gate);
                    pairs.insert((layer, Projection::Up), up);
                }
                (Some(GateUp::Separate { .. }), PeftLayout::Stacked) => {
                    return Err(InterchangeError::SeparateInStacked { layer });
                }
                (Some(GateUp::Separate { gate, up }), PeftLayout::PerExpert) => {
                    pairs.insert((layer, Projection::Gate), gate.clone());
                    pairs.insert((layer, Projection::Up), up.clone());
                }
            }
            if let Some(pair) = &adapter.down {
                pairs.insert((layer, Projection::Down), pair.clone());
            }
        }
        if pairs.is_empty() {
            return Err(InterchangeError::EmptyAdapter);
        }
        let slots = Slot::all(layout, config, |layer, projection| {
            pairs.contains_key(&(layer, projection))
        });
        let mut placed = Vec::with_capacity(slots.len());
        for slot in slots {
            placed.extend(
                pairs
                    .remove(&(slot.layer, slot.projection))
                    .map(|pair| (slot, pair)),
            );
        }
        Ok(placed)
    }
}

/// The factors of transposed or interleaved parameters lie otherwise than the layouts here have
/// them.
fn expect_upright(config: &ModelConfig) -> Result<(), InterchangeError> {
    let stacked = config.family.stacked();
    if stacked.transposed || stacked.interleaved {
        let model_type = config.family.model_type;
        return Err(InterchangeError::AdapterFamily { model_type });
    }
    Ok(())
}

/// The file holds the tensors of `slots`, all of them and no others.
fn expect_tensors(
    file: &TensorFile,
    slots: &[Slot],
    config: &ModelConfig,
) -> Result<(), InterchangeError> {
    const SHOWN: usize = 4;
    let names = || slots.iter().flat_map(|slot| slot.tensors(config));
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
