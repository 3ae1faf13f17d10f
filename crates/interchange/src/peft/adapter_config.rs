//! `adapter_config.json`: what is adapted, at which rank and scale.

use super::dialect::Dialect;
use super::patterns::{Patterns, minimal};
use super::slot::Slot;
use super::storage::Pair;
use super::{FactorPair, PeftLayout, targets};
use crate::ModelConfig;
use moe_lora_files::{FileError, JsonFile, TensorFile};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Fields that either are read below or do not change the numbers. Any other one must be at rest
/// (null, false or empty), which also refuses whatever later releases of PEFT add and somebody
/// switches on.
const FREE: [&str; 21] = [
    "alpha_pattern",
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
    "rank_pattern",
    "revision",
    "target_modules",
    "target_parameters",
    "task_type",
    "use_dora",
    "use_rslora",
];

/// The settings of an adapter that is read.
pub(crate) struct AdapterConfig {
    file: JsonFile,
    pub(crate) rslora: bool,
    pub(crate) dora: bool,
    ranks: Patterns<usize>,
    alphas: Patterns<f64>,
}

impl AdapterConfig {
    pub(crate) fn read(path: PathBuf) -> Result<Self, FileError> {
        let file = JsonFile::read(path)?;
        let kind: String = file.require("peft_type")?;
        if kind != "LORA" {
            return Err(file.unsupported("peft_type", format!("{kind:?}"), "\"LORA\""));
        }
        refuse_unsupported(&file)?;
        let ranks = Patterns::read(&file, "r", "rank_pattern", |field, rank| {
            match (1..=i32::MAX as usize).contains(&rank) {
                true => Ok(()),
                false => Err(file.invalid(field, rank, "a number from 1 to 2147483647")),
            }
        })?;
        let alphas = Patterns::read(&file, "lora_alpha", "alpha_pattern", |field, alpha| {
            check_alpha(file.path(), field, alpha)
        })?;
        Ok(Self {
            rslora: file.get("use_rslora")?.unwrap_or(false),
            dora: file.get("use_dora")?.unwrap_or(false),
            file,
            ranks,
            alphas,
        })
    }

    /// The pairs that are adapted, and their layout in `tensors`.
    pub(crate) fn select(
        &self,
        tensors: &TensorFile,
        config: &ModelConfig,
    ) -> Result<Vec<Slot>, FileError> {
        let (layout, slots) = targets::select(&self.file, tensors, config)?;
        if self.dora && layout != PeftLayout::PerExpert {
            let supported = "false unless there is a module for every expert, as PEFT has no magnitude for stacked parameters";
            return Err(self.file.unsupported("use_dora", true, supported));
        }
        Ok(slots)
    }

    /// What each of the slots holds.
    pub(crate) fn pairs(
        &self,
        slots: Vec<Slot>,
        tensors: &TensorFile,
        config: &ModelConfig,
    ) -> Result<Vec<(Slot, Pair)>, FileError> {
        let ranks = slots.into_iter().map(|slot| {
            let rank = self.ranks.of(&self.file, slot, config)?;
            Ok((slot, rank))
        });
        let ranks = ranks.collect::<Result<Vec<_>, FileError>>()?;
        let dialect = match ranks.iter().any(|(slot, _)| slot.is_stacked()) {
            true => Dialect::of_file(&self.file, tensors, &ranks, config)?,
            false => Dialect::Upright,
        };
        let pairs = ranks.into_iter().map(|(slot, rank)| {
            let pair = Pair {
                rank,
                alpha: self.alphas.of(&self.file, slot, config)?,
                dora: self.dora,
                dialect,
            };
            Ok((slot, pair))
        });
        pairs.collect()
    }
}

/// The text of the file, with the fields that PEFT writes itself.
pub(crate) fn to_json(
    path: &Path,
    pairs: &[(Slot, FactorPair)],
    rslora: bool,
    layout: PeftLayout,
    config: &ModelConfig,
    base: &str,
) -> Result<String, FileError> {
    for (_, pair) in pairs {
        check_alpha(path, "lora_alpha", pair.alpha)?;
    }
    let slots: Vec<Slot> = pairs.iter().map(|(slot, _)| *slot).collect();
    let ranks: Vec<_> = pairs.iter().map(|(s, p)| (*s, p.rank())).collect();
    let alphas: Vec<_> = pairs.iter().map(|(s, p)| (*s, p.alpha)).collect();
    let (rank, rank_pattern) = minimal(&ranks, config);
    let (alpha, alpha_pattern) = minimal(&alphas, config);
    let alpha_pattern = alpha_pattern.into_iter().map(|(k, v)| (k, number(v)));
    let rank_pattern = rank_pattern.into_iter().map(|(k, v)| (k, json!(v)));
    let mut fields = json!({
        "alora_invocation_tokens": null,
        "alpha_pattern": alpha_pattern.collect::<Map<_, _>>(),
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
        "lora_alpha": alpha.map(number),
        "lora_bias": false,
        "lora_dropout": 0.0,
        "megatron_config": null,
        "megatron_core": "megatron.core",
        "modules_to_save": null,
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": rank,
        "rank_pattern": rank_pattern.collect::<Map<_, _>>(),
        "revision": null,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": null,
        "use_dora": pairs.iter().any(|(_, pair)| pair.magnitude.is_some()),
        "use_qalora": false,
        "use_rslora": rslora,
    });
    match layout {
        PeftLayout::Stacked => {
            fields["peft_version"] = json!("0.21.0");
            fields["target_modules"] = json!([]);
            fields["target_parameters"] = json!(targets::names(&slots, config));
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
            fields["target_modules"] = json!(targets::expression(&slots, config));
            fields["target_parameters"] = Value::Null;
        }
        PeftLayout::SharedOuter => {
            fields["peft_version"] = json!("0.18.0");
            fields["target_modules"] = json!(targets::names(&slots, config));
            fields["target_parameters"] = Value::Null;
        }
    }
    // As PEFT does. The order of the patterns is free: no two of them match the same module.
    fields.sort_all_objects();
    Ok(format!("{fields:#}"))
}

/// PEFT declares alpha an integer.
fn number(alpha: f64) -> Value {
    match alpha.fract() == 0.0 && alpha.abs() < 1e15 {
        true => json!(alpha as i64),
        false => json!(alpha),
    }
}

fn check_alpha(path: &Path, field: &str, alpha: f64) -> Result<(), FileError> {
    if alpha.is_finite() {
        return Ok(());
    }
    Err(FileError::InvalidField {
        path: path.to_owned(),
        field: field.to_owned(),
        value: alpha.to_string(),
        expected: "a finite number".to_owned(),
    })
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
