//! `target_parameters` and `target_modules`: which weights are adapted, and in which layout.

use super::PeftLayout;
use super::slot::{Part, Slot};
use crate::ModelConfig;
use crate::projection::Projection;
use moe_lora_files::{FileError, JsonFile, TensorFile};
use regex::Regex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const PARAMETERS: &str = "target_parameters";
const MODULES: &str = "target_modules";

/// Names or an expression, with the field they are in.
enum Targets {
    Names(&'static str, Vec<String>),
    Expression(Regex),
}

/// The layout of an adapter and the slots that its settings select.
pub(crate) fn select(
    file: &JsonFile,
    tensors: &TensorFile,
    config: &ModelConfig,
) -> Result<(PeftLayout, Vec<Slot>), FileError> {
    let targets = Targets::read(file)?;
    let matched = |slot: Slot| targets.matches(slot, config);
    // Nothing in the settings says so, but no other layout has a tensor of these names.
    let shared = Slot::all(PeftLayout::SharedOuter, config, |slot| {
        let mut parts = [Part::A, Part::B].into_iter();
        parts.any(|part| tensors.contains(&slot.tensor(0, part, config)))
    });
    let layout = match (&targets, shared.is_empty()) {
        (_, false) => PeftLayout::SharedOuter,
        (Targets::Names(PARAMETERS, _), true) => PeftLayout::Stacked,
        (_, true) => PeftLayout::PerExpert,
    };
    let slots = Slot::all(layout, config, matched);
    let value = || file.value(targets.field()).unwrap_or(&Value::Null);
    let supported = match layout {
        PeftLayout::Stacked => "the stacked parameters gate_up_proj and down_proj of experts",
        PeftLayout::PerExpert => "gate_proj and up_proj together, down_proj, of experts",
        PeftLayout::SharedOuter => {
            "gate_up_proj or gate_proj and up_proj together, down_proj, of experts"
        }
    };
    if let Targets::Names(field, names) = &targets {
        // An expert that is adapted alone shows later, as missing or unexpected tensors.
        let modules: Vec<String> = slots.iter().map(|slot| slot.module(0, config)).collect();
        let unmatched = names.iter().find(|name| {
            let mut modules = modules.iter();
            !modules.any(|module| is_suffix(name, module))
        });
        if let Some(name) = unmatched {
            return Err(file.unsupported(field, name, supported));
        }
    }
    let layers = |projection| {
        let own = slots.iter().filter(move |s| s.projection == projection);
        own.map(|slot| slot.layer).collect::<BTreeSet<_>>()
    };
    let gate = layers(Projection::Gate);
    if slots.is_empty()
        || gate != layers(Projection::Up)
        || !gate.is_disjoint(&layers(Projection::GateUp))
    {
        return Err(file.unsupported(targets.field(), value(), supported));
    }
    let slots = slots.into_iter().map(|slot| slot.found_in(tensors, config));
    Ok((layout, slots.collect()))
}

impl Targets {
    fn read(file: &JsonFile) -> Result<Self, FileError> {
        let parameters: Vec<String> = file.get(PARAMETERS)?.unwrap_or_default();
        let modules = file.value(MODULES).unwrap_or(&Value::Null);
        let no_modules = modules.is_null() || modules.as_array().is_some_and(Vec::is_empty);
        match (parameters.is_empty(), no_modules) {
            (false, true) => Ok(Self::Names(PARAMETERS, parameters)),
            (true, true) => Err(file.missing(PARAMETERS)),
            (false, false) => {
                Err(file.unsupported(MODULES, modules, "[] beside target_parameters"))
            }
            (true, false) => match modules {
                Value::String(pattern) => {
                    let expression = Regex::new(&format!("^(?:{pattern})$")).map_err(|_| {
                        let supported =
                            "regular expressions without look-around and back-references";
                        file.unsupported(MODULES, modules, supported)
                    })?;
                    Ok(Self::Expression(expression))
                }
                _ => Ok(Self::Names(MODULES, file.require(MODULES)?)),
            },
        }
    }

    fn field(&self) -> &'static str {
        match self {
            Self::Names(field, _) => field,
            Self::Expression(_) => MODULES,
        }
    }

    fn matches(&self, slot: Slot, config: &ModelConfig) -> bool {
        let module = slot.module(0, config);
        match self {
            Self::Names(_, names) => names.iter().any(|name| is_suffix(name, &module)),
            Self::Expression(expression) => expression.is_match(&module),
        }
    }
}

/// PEFT's rule: equal, or equal from some dot on.
fn is_suffix(target: &str, name: &str) -> bool {
    name.strip_suffix(target)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// One suffix for what is adapted in every layer, one name a layer otherwise.
pub(crate) fn names(slots: &[Slot], config: &ModelConfig) -> Vec<String> {
    let mut layers: BTreeMap<Projection, Vec<Slot>> = BTreeMap::new();
    for &slot in slots {
        layers.entry(slot.projection).or_default().push(slot);
    }
    let mut targets = BTreeSet::new();
    for own in layers.into_values() {
        if own.len() == config.moe_layers().count() {
            let experts = own[0].experts_below_layer(config);
            targets.insert(format!("{experts}.{}", own[0].leaf(config)));
        } else {
            targets.extend(own.iter().map(|slot| slot.module(0, config)));
        }
    }
    targets.into_iter().collect()
}

/// One expression, with a branch for each set of projections that some layers share.
pub(crate) fn expression(slots: &[Slot], config: &ModelConfig) -> String {
    let mut layers: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for slot in slots {
        let leaves = layers.entry(slot.layer).or_default();
        leaves.push(slot.leaf(config));
    }
    let mut branches: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (layer, names) in layers {
        let layers = branches.entry(names.join("|")).or_default();
        layers.push(layer.to_string());
    }
    let experts = slots.first().map(|slot| slot.experts_below_layer(config));
    let experts = regex::escape(&experts.unwrap_or_default());
    let branches: Vec<String> = branches
        .into_iter()
        .map(|(names, layers)| {
            if layers.len() == config.moe_layers().count() {
                format!(r".*experts\.\d+\.({names})")
            } else {
                let layers = layers.join("|");
                format!(r".*layers\.({layers})\.{experts}\.\d+\.({names})")
            }
        })
        .collect();
    branches.join("|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suffixes_start_at_a_dot() {
        let name = "model.layers.11.mlp.experts.down_proj";
        assert!(is_suffix("mlp.experts.down_proj", name));
        assert!(is_suffix(name, name));
        assert!(!is_suffix("1.mlp.experts.down_proj", name));
        assert!(!is_suffix("own_proj", name));
    }
}
