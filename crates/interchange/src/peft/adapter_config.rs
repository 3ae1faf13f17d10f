//! `adapter_config.json`: what is adapted, at which rank and scale.

use super::PeftLayout;
use super::slot::Slot;
use crate::ModelConfig;
use crate::projection::{Projection, expert_module, experts_module};
use moe_lora_files::{FileError, JsonFile};
use regex::Regex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Fields that either are read below or do not change the numbers. Any other one must be at rest
/// (null, false or empty), which also refuses whatever later releases of PEFT add and somebody
/// switches on.
const FREE: [&str; 18] = [
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "eva_config",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_rslora",
];

/// Releases before this one stored the factors of `[E, d_out, d_in]` parameters transposed.
const FIRST_UPRIGHT: [u64; 3] = [0, 19, 1];

#[derive(Debug)]
pub(crate) struct AdapterConfig {
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
    pub(crate) rslora: bool,
    pub(crate) layout: PeftLayout,
    pub(crate) slots: Vec<Slot>,
}

impl AdapterConfig {
    pub(crate) fn read(path: PathBuf, config: &ModelConfig) -> Result<Self, FileError> {
        let file = JsonFile::read(path)?;
        let kind: String = file.require("peft_type")?;
        if kind != "LORA" {
            return Err(file.unsupported("peft_type", format!("{kind:?}"), "\"LORA\""));
        }
        refuse_unsupported(&file)?;

        let parameters: Vec<String> = file.get("target_parameters")?.unwrap_or_default();
        let modules = file.value("target_modules").unwrap_or(&Value::Null);
        let no_modules = modules.is_null() || modules.as_array().is_some_and(Vec::is_empty);
        let (layout, slots) = match (parameters.is_empty(), no_modules) {
            (false, true) => (
                PeftLayout::Stacked,
                stacked_slots(&file, &parameters, config)?,
            ),
            (true, false) => (PeftLayout::PerExpert, expert_slots(&file, modules, config)?),
            (true, true) => return Err(file.missing("target_parameters")),
            (false, false) => {
                let supported = "[] beside target_parameters";
                return Err(file.unsupported("target_modules", modules, supported));
            }
        };
        let settings = Self {
            rank: file.require("r")?,
            alpha: file.require("lora_alpha")?,
            rslora: file.get("use_rslora")?.unwrap_or(false),
            layout,
            slots,
        };
        settings.check(file.path())?;
        Ok(settings)
    }

    /// The rank and the scale make sense.
    pub(crate) fn check(&self, path: &Path) -> Result<(), FileError> {
        let invalid = |field: &str, value: String, expected: &str| FileError::InvalidField {
            path: path.to_owned(),
            field: field.to_owned(),
            value,
            expected: expected.to_owned(),
        };
        if !(1..=i32::MAX as usize).contains(&self.rank) {
            return Err(invalid(
                "r",
                self.rank.to_string(),
                "a number from 1 to 2147483647",
            ));
        }
        if !self.alpha.is_finite() {
            return Err(invalid(
                "lora_alpha",
                self.alpha.to_string(),
                "a finite number",
            ));
        }
        Ok(())
    }

    /// The text of the file, with the fields that PEFT writes itself.
    pub(crate) fn to_json(&self, config: &ModelConfig, base: &str) -> String {
        let mut fields = json!({
            "alora_invocation_tokens": null,
            "alpha_pattern": {},
            "arrow_config": null,
            "auto_mapping": null,
            "base_model_name_or_path": base,
            "bias": "none",
            "corda_config": null,
            "ensure_weight_tying": false,
            "eva_config": null,
            "exclude_modules": null,
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "layer_replication": null,
            "layers_pattern": null,
            "layers_to_transform": null,
            "loftq_config": {},
            "lora_alpha": self.alpha,
            "lora_bias": false,
            "lora_dropout": 0.0,
            "megatron_config": null,
            "megatron_core": "megatron.core",
            "modules_to_save": null,
            "peft_type": "LORA",
            "qalora_group_size": 16,
            "r": self.rank,
            "rank_pattern": {},
            "revision": null,
            "task_type": "CAUSAL_LM",
            "trainable_token_indices": null,
            "use_dora": false,
            "use_qalora": false,
            "use_rslora": self.rslora,
        });
        // PEFT declares it an integer.
        if self.alpha.fract() == 0.0 && self.alpha.abs() < 1e15 {
            fields["lora_alpha"] = json!(self.alpha as i64);
        }
        match self.layout {
            PeftLayout::Stacked => {
                fields["peft_version"] = json!("0.21.0");
                fields["target_modules"] = json!([]);
                fields["target_parameters"] = json!(self.target_parameters(config));
                for field in [
                    "kasa_config",
                    "lora_ga_config",
                    "monteclora_config",
                    "use_bdlora",
                    "velora_config",
                ] {
                    fields[field] = Value::Null;
                }
            }
            PeftLayout::PerExpert => {
                fields["peft_version"] = json!("0.18.0");
                fields["target_modules"] = json!(self.target_modules(config));
                fields["target_parameters"] = Value::Null;
            }
        }
        format!("{fields:#}")
    }

    /// One suffix for a parameter that is adapted in every layer, one name a layer otherwise.
    fn target_parameters(&self, config: &ModelConfig) -> Vec<String> {
        let mut targets = BTreeSet::new();
        for projection in [Projection::GateUp, Projection::Down] {
            let slots = self
                .slots
                .iter()
                .filter(|slot| slot.projection == projection);
            let layers: Vec<usize> = slots.map(|slot| slot.layer).collect();
            if layers.len() == config.moe_layers().count() {
                targets.insert(format!("mlp.experts.{}", projection.name()));
            } else {
                targets.extend(layers.into_iter().map(|layer| parameter(layer, projection)));
            }
        }
        targets.into_iter().collect()
    }

    /// One expression, with a branch for each set of projections that some layers share.
    fn target_modules(&self, config: &ModelConfig) -> String {
        let mut layers: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
        for slot in &self.slots {
            layers
                .entry(slot.layer)
                .or_default()
                .push(config.family.one_by_one(slot.projection).1);
        }
        let mut branches: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (layer, names) in layers {
            branches
                .entry(names.join("|"))
                .or_default()
                .push(layer.to_string());
        }
        let (block, _) = config.family.one_by_one(Projection::Gate);
        let branches: Vec<String> = branches
            .into_iter()
            .map(|(names, layers)| {
                if layers.len() == config.moe_layers().count() {
                    format!(r".*experts\.\d+\.({names})")
                } else {
                    let layers = layers.join("|");
                    format!(r".*layers\.({layers})\.{block}\.experts\.\d+\.({names})")
                }
            })
            .collect();
        branches.join("|")
    }
}

fn refuse_unsupported(file: &JsonFile) -> Result<(), FileError> {
    for (field, value) in file.fields() {
        let at_rest = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            _ => false,
        };
        if !at_rest && !FREE.contains(&field) {
            return Err(file.unsupported(field, value, "null, false or empty"));
        }
    }
    if let Some(bias) = file.value("bias")
        && bias != "none"
    {
        return Err(file.unsupported("bias", bias, "\"none\""));
    }
    // The other initialisations also change the base weights, so the factors do not fit the
    // published ones.
    if let Some(init) = file.value("init_lora_weights")
        && !init.is_boolean()
        && !["gaussian", "orthogonal", "eva"]
            .iter()
            .any(|name| init == name)
    {
        let supported = "true, false, \"gaussian\", \"orthogonal\", \"eva\"";
        return Err(file.unsupported("init_lora_weights", init, supported));
    }
    Ok(())
}

fn stacked_slots(
    file: &JsonFile,
    targets: &[String],
    config: &ModelConfig,
) -> Result<Vec<Slot>, FileError> {
    let slots = Slot::all(PeftLayout::Stacked, config, |layer, projection| {
        let name = parameter(layer, projection);
        targets.iter().any(|target| is_suffix(target, &name))
    });
    let unmatched = unmatched(targets, &slots, |slot| {
        parameter(slot.layer, slot.projection)
    });
    if let Some(target) = unmatched {
        let supported = "mlp.experts.gate_up_proj, mlp.experts.down_proj";
        return Err(file.unsupported("target_parameters", target, supported));
    }

    let version: Option<String> = file.get("peft_version")?;
    let transposed = match &version {
        Some(version) => release(version) < FIRST_UPRIGHT,
        // Written by another tool, or by a PEFT from before it wrote its version: the shapes tell,
        // unless square.
        None => slots.iter().any(|slot| {
            let [d_out, d_in] = slot.projection.shape(config);
            d_out == d_in
        }),
    };
    if transposed {
        return Err(file.unsupported(
            "peft_version",
            version.as_deref().unwrap_or("null"),
            "0.19.1 and later for target_parameters, as earlier ones stored the factors transposed",
        ));
    }
    Ok(slots)
}

fn expert_slots(
    file: &JsonFile,
    targets: &Value,
    config: &ModelConfig,
) -> Result<Vec<Slot>, FileError> {
    const FIELD: &str = "target_modules";
    let supported = "gate_proj and up_proj together, down_proj, of experts";
    // An expert that is adapted alone shows later, as missing or unexpected tensors.
    let name = |layer, projection| expert_module(config, layer, 0, projection);
    let slots = match targets {
        Value::String(pattern) => {
            let expression = Regex::new(&format!("^(?:{pattern})$")).map_err(|_| {
                let supported = "regular expressions without look-around and back-references";
                file.unsupported(FIELD, targets, supported)
            })?;
            Slot::all(PeftLayout::PerExpert, config, |layer, projection| {
                expression.is_match(&name(layer, projection))
            })
        }
        _ => {
            let names: Vec<String> = file.require(FIELD)?;
            let slots = Slot::all(PeftLayout::PerExpert, config, |layer, projection| {
                let name = name(layer, projection);
                names.iter().any(|target| is_suffix(target, &name))
            });
            if let Some(target) =
                unmatched(&names, &slots, |slot| name(slot.layer, slot.projection))
            {
                return Err(file.unsupported(FIELD, target, supported));
            }
            slots
        }
    };
    let layers = |projection| {
        let slots = slots
            .iter()
            .filter(move |slot| slot.projection == projection);
        slots.map(|slot| slot.layer)
    };
    if slots.is_empty() || !layers(Projection::Gate).eq(layers(Projection::Up)) {
        return Err(file.unsupported(FIELD, targets, supported));
    }
    Ok(slots)
}

fn unmatched<'a>(
    targets: &'a [String],
    slots: &[Slot],
    name: impl Fn(&Slot) -> String,
) -> Option<&'a String> {
    let names: Vec<String> = slots.iter().map(name).collect();
    targets
        .iter()
        .find(|target| !names.iter().any(|name| is_suffix(target, name)))
}

fn parameter(layer: usize, projection: Projection) -> String {
    format!("{}.{}", experts_module(layer), projection.name())
}

/// PEFT's rule: equal, or equal from some dot on.
fn is_suffix(target: &str, name: &str) -> bool {
    name.strip_suffix(target)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// `0.18.2.dev0@unknown` is `[0, 18, 2]`.
fn release(version: &str) -> [u64; 3] {
    let mut numbers = version
        .split(|c: char| !c.is_ascii_digit())
        .map(|digits| digits.parse().unwrap_or(0));
    std::array::from_fn(|_| numbers.next().unwrap_or(0))
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

    #[test]
    fn releases_compare_by_number() {
        assert!(release("0.18.2.dev0@UNKNOWN") < FIRST_UPRIGHT);
        assert!(release("0.19.0") < FIRST_UPRIGHT);
        assert!(release("0.19.1") >= FIRST_UPRIGHT);
        assert!(release("0.21") >= FIRST_UPRIGHT);
        assert!(release("1") >= FIRST_UPRIGHT);
    }
}
