//! The layouts of an adapter file, and what each of them can hold.

use super::slot::Slot;
use super::{ExpertAdapter, FactorPair, GateUp, PeftAdapter};
use crate::projection::Projection;
use crate::{InterchangeError, ModelConfig};
use std::collections::BTreeMap;

/// How the factors of a layer's experts lie in the file.
///
/// With `experts` for `base_model.model.model.layers.{layer}.mlp.experts`:
///
/// | layout | tensors | shapes |
/// |---|---|---|
/// | `Stacked` | `experts.lora_A.weight`, `experts.lora_B.weight` | `[E*r, d_in]`, `[d_out, E*r]` |
/// | `PerExpert` | `experts.{expert}.gate_proj.lora_A.weight` and so on | `[r, d_in]`, `[d_out, r]` |
/// | `SharedOuter` | `experts.gate_up_proj.lora_A.weight`, `.lora_B.weight` | `[1, r, H]`, `[E, 2F, r]` |
/// | | `experts.down_proj.lora_A.weight`, `.lora_B.weight` | `[E, r, F]`, `[1, H, r]` |
///
/// In the stacked `lora_A` the expert is the slow index of the rows; in `lora_B` it is the fast
/// index of the columns: column `j` is rank `j / E` of expert `j % E`. PEFT wraps the parameters of
/// a module in the order in which the module declares them, `gate_up_proj` before `down_proj`,
/// whatever the order in `target_parameters`. So where both are adapted, `experts.base_layer` holds
/// the factors of `gate_up_proj` and `experts` those of `down_proj`; a single one is at `experts`.
/// Files of PEFT before 0.19.1, in which the two factors changed places, are read too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeftLayout {
    /// One pair per stacked parameter (`target_parameters`), for transformers 5.
    Stacked,
    /// One pair per expert and projection (`target_modules`), for transformers 4. The only one that
    /// holds DoRA's magnitudes (`experts.{expert}.gate_proj.lora_magnitude_vector`, `[d_out]`).
    PerExpert,
    /// The factors on the hidden side shared by all experts: the serving layout of SGLang and
    /// Megatron-Bridge, which PEFT itself does not load. Separate pairs are at `gate_proj` and
    /// `up_proj`. On reading, the other factor may also be one tensor for every expert, as in
    /// `experts.{expert}.gate_proj.lora_B.weight`.
    SharedOuter,
}

impl PeftAdapter {
    /// The layout that holds the adapter as it is: stacked, unless the experts share a factor, gate and up have an
    /// adapter each, or there are magnitudes.
    pub fn layout(&self) -> PeftLayout {
        let any = |of: fn(&FactorPair) -> bool| {
            let pairs = self.layers.values().flat_map(ExpertAdapter::pairs);
            pairs.map(|(_, pair)| pair).any(of)
        };
        let separate =
            |layer: &ExpertAdapter| matches!(layer.gate_up, Some(GateUp::Separate { .. }));
        if any(|pair| pair.a.shape()[0] != pair.b.shape()[0]) {
            PeftLayout::SharedOuter
        } else if any(|pair| pair.magnitude.is_some()) || self.layers.values().any(separate) {
            PeftLayout::PerExpert
        } else {
            PeftLayout::Stacked
        }
    }

    /// Every pair with the place it has in `layout`.
    pub(crate) fn placed(
        &self,
        config: &ModelConfig,
        layout: PeftLayout,
    ) -> Result<Vec<(Slot, FactorPair)>, InterchangeError> {
        expect_modules(config, layout)?;
        let mut pairs = BTreeMap::new();
        for (&layer, adapter) in &self.layers {
            config.expect_moe(layer)?;
            for (projection, pair) in adapter.pairs() {
                refuse_inexpressible(layer, projection, pair, layout, config.num_experts)?;
            }
            match (&adapter.gate_up, layout) {
                (None, _) => {}
                (Some(GateUp::Fused(pair)), PeftLayout::Stacked | PeftLayout::SharedOuter) => {
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
                (Some(GateUp::Separate { gate, up }), _) => {
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
        let slots = Slot::all(layout, config, |slot| {
            pairs.contains_key(&(slot.layer, slot.projection))
        });
        let mut placed = Vec::with_capacity(slots.len());
        for slot in slots {
            let pair = pairs.remove(&(slot.layer, slot.projection));
            placed.extend(pair.map(|pair| (slot, pair)));
        }
        let plain = placed.iter().find(|(_, pair)| pair.magnitude.is_none());
        if let Some((slot, _)) = plain
            && placed.iter().any(|(_, pair)| pair.magnitude.is_some())
        {
            let (layer, projection) = (slot.layer, slot.label());
            return Err(InterchangeError::MixedMagnitudes { layer, projection });
        }
        Ok(placed)
    }
}

/// Refuses what the layout has no place for. Shapes that no layout holds are left to the slots.
fn refuse_inexpressible(
    layer: usize,
    projection: &'static str,
    pair: &FactorPair,
    layout: PeftLayout,
    experts: usize,
) -> Result<(), InterchangeError> {
    let refuse = |held, remedy| {
        Err(InterchangeError::Inexpressible {
            layer,
            projection,
            held,
            layout,
            remedy,
        })
    };
    let shared = pair.shared(experts)?;
    if layout == PeftLayout::SharedOuter {
        let outer = match projection {
            "down" => [false, true],
            _ => [true, false],
        };
        if pair.magnitude.is_some() {
            return refuse(
                "a DoRA magnitude",
                "expand it and write it with PeftLayout::PerExpert",
            );
        }
        if experts > 1 && shared != outer {
            return refuse(
                "factors that are not shared on the hidden side alone",
                "expand it if it shares others, and write it with PeftLayout::PerExpert",
            );
        }
        return Ok(());
    }
    if shared.contains(&true) {
        return refuse(
            "a factor that the experts share",
            "write it with PeftLayout::SharedOuter, or give each expert a copy with expand",
        );
    }
    if pair.magnitude.is_some() && layout == PeftLayout::Stacked {
        return refuse("a DoRA magnitude", "write it with PeftLayout::PerExpert");
    }
    Ok(())
}

/// The family has the modules that the layout names.
pub(crate) fn expect_modules(
    config: &ModelConfig,
    layout: PeftLayout,
) -> Result<(), InterchangeError> {
    match layout {
        PeftLayout::PerExpert if !config.family.stores_one_by_one() => {
            let model_type = config.family.model_type;
            Err(InterchangeError::NoExpertModules { model_type })
        }
        _ => Ok(()),
    }
}
