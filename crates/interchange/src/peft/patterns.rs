//! `rank_pattern` and `alpha_pattern`: a value for all modules, and others for some.
//!
//! A key is a regular expression. It applies to a module whose name it matches from the start or
//! from some dot up to the end, and where several do, the first in the file counts. For a parameter
//! of `target_parameters` the name is the parameter's.

use super::slot::Slot;
use crate::ModelConfig;
use moe_lora_files::{FileError, JsonFile};
use regex::{Regex, RegexBuilder};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Patterns of one setting, a program each.
const MAX_PATTERNS: usize = 512;
/// Bytes of the program of a pattern; real ones, such as an alternative of 100 layers, take a tenth.
const MAX_PROGRAM: usize = 256 << 10;

/// The expression that matches whole names, or what would be accepted in its place.
pub(crate) fn anchored(pattern: &str) -> Result<Regex, &'static str> {
    let expression = RegexBuilder::new(&format!("^(?:{pattern})$"))
        .size_limit(MAX_PROGRAM)
        .dfa_size_limit(MAX_PROGRAM)
        .build();
    expression.map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => "shorter regular expressions",
        _ => "regular expressions without look-around and back-references",
    })
}

/// The values of one setting.
#[derive(Debug)]
pub(crate) struct Patterns<T> {
    common: T,
    /// In the order of the file.
    others: Vec<(Regex, T)>,
    field: &'static str,
}

impl<T: Copy + PartialEq + DeserializeOwned> Patterns<T> {
    /// Reads the value at `common` and the patterns at `field`, each checked with `check`.
    pub(crate) fn read(
        file: &JsonFile,
        common: &'static str,
        field: &'static str,
        check: impl Fn(&str, T) -> Result<(), FileError>,
    ) -> Result<Self, FileError> {
        let value = file.require(common)?;
        check(common, value)?;
        let patterns: Map<String, Value> = file.get(field)?.unwrap_or_default();
        if patterns.len() > MAX_PATTERNS {
            let expected = format!("at most {MAX_PATTERNS} patterns");
            return Err(file.invalid(field, format!("{} patterns", patterns.len()), expected));
        }
        let mut others = Vec::with_capacity(patterns.len());
        for (key, value) in patterns {
            let expression = anchored(&format!(r"(?:.*\.)?(?:{key})"))
                .map_err(|supported| file.unsupported(field, format!("{key:?}"), supported))?;
            let entry = format!("{field}[{key:?}]");
            let value = serde_json::from_value(value.clone())
                .map_err(|source| file.invalid(&entry, value, source))?;
            check(&entry, value)?;
            others.push((expression, value));
        }
        Ok(Self {
            common: value,
            others,
            field,
        })
    }

    /// The value of the slot's modules, which all experts of a layer must share.
    pub(crate) fn of(
        &self,
        file: &JsonFile,
        slot: Slot,
        config: &ModelConfig,
    ) -> Result<T, FileError> {
        let first = self.of_module(&slot.module(0, config));
        if self.others.is_empty() || !slot.is_per_expert() {
            return Ok(first);
        }
        for expert in 1..config.num_experts {
            let module = slot.module(expert, config);
            if self.of_module(&module) != first {
                let supported = format!("the same for all experts of a layer, unlike {module}");
                let value = file.value(self.field).unwrap_or(&Value::Null);
                return Err(file.unsupported(self.field, value, supported));
            }
        }
        Ok(first)
    }

    fn of_module(&self, module: &str) -> T {
        let mut others = self.others.iter();
        let found = others.find(|(expression, _)| expression.is_match(module));
        found.map_or(self.common, |&(_, value)| value)
    }
}

/// The most frequent value, and the fewest patterns for the others: one for each value that a
/// projection has in some layers.
pub(crate) fn minimal<T: Copy + PartialEq>(
    values: &[(Slot, T)],
    config: &ModelConfig,
) -> (Option<T>, Vec<(String, T)>) {
    let count = |value| values.iter().filter(|(_, other)| *other == value).count();
    // The first of the most frequent ones.
    let common = values.iter().map(|&(_, value)| value).rev();
    let common = common.max_by_key(|&value| count(value));

    let mut projections: BTreeMap<_, Vec<(Slot, T)>> = BTreeMap::new();
    for &(slot, value) in values {
        let own = projections.entry(slot.projection).or_default();
        own.push((slot, value));
    }
    let mut patterns = Vec::new();
    for own in projections.into_values() {
        let mut left = own.clone();
        while let Some(&(slot, value)) = left.iter().find(|(_, value)| Some(*value) != common) {
            let (same, rest): (Vec<_>, _) = left.into_iter().partition(|(_, v)| *v == value);
            left = rest;
            let layers = same.iter().map(|(slot, _)| slot.layer.to_string());
            let layers: Vec<String> = layers.collect();
            let layers = (same.len() < own.len()).then(|| layers.join("|"));
            patterns.push((key(slot, layers, config), value));
        }
    }
    (common, patterns)
}

/// The expression for a slot's projection in `layers`, or in all of them.
fn key(slot: Slot, layers: Option<String>, config: &ModelConfig) -> String {
    let layers = layers.map(|layers| format!(r"layers\.({layers})\."));
    let experts = regex::escape(&slot.experts_below_layer(config));
    let expert = if slot.is_per_expert() { r"\.\d+" } else { "" };
    let leaf = regex::escape(slot.leaf(config));
    format!(r"{}{experts}{expert}\.{leaf}", layers.unwrap_or_default())
}
