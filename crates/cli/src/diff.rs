//! `moe-lora diff`

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use moe_lora_checkpoint::{Checkpoint, Dtype};
use moe_lora_files::widen;
use moe_lora_interchange::{FactorPair, PeftAdapter};
use serde::Serialize;

use crate::output::Output;
use crate::source::{Source, base_config, expect_adapter, read_adapter};

/// How two adapters differ.
#[derive(Default, Serialize)]
struct Difference {
    /// Of all tensors that both have in one shape.
    largest: f64,
    same: bool,
    tensors: Vec<TensorDifference>,
    only_left: Vec<String>,
    only_right: Vec<String>,
    /// Of different shapes.
    reshaped: Vec<String>,
}

#[derive(Serialize)]
struct TensorDifference {
    name: String,
    largest: f64,
    /// Elements that differ in a bit.
    differing: usize,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for tensor in self.tensors.iter().filter(|tensor| tensor.differing > 0) {
            let TensorDifference {
                name,
                largest,
                differing,
            } = tensor;
            writeln!(f, "{name}: {largest:.3e}, {differing} elements differ")?;
        }
        for (what, names) in [
            ("only on the left", &self.only_left),
            ("only on the right", &self.only_right),
            ("of different shapes", &self.reshaped),
        ] {
            for name in names {
                writeln!(f, "{name}: {what}")?;
            }
        }
        let verdict = if self.same { "same" } else { "different" };
        let (largest, tensors) = (self.largest, self.tensors.len());
        write!(
            f,
            "{verdict}: largest difference {largest:.3e} over {tensors} tensors"
        )
    }
}

/// Compares two adapters; whether they are the same up to `tolerance`.
///
/// Two checkpoints are compared in everything, optimizer state included; otherwise the factors are, and scales with them.
///
/// # Errors
/// Files that are damaged or are no adapters.
pub fn run(
    left: &Path,
    right: &Path,
    model: Option<&Path>,
    tolerance: f64,
    output: &Output,
) -> Result<bool> {
    let sources = (Source::find(left)?, Source::find(right)?);
    for (path, source) in [(left, &sources.0), (right, &sources.1)] {
        expect_adapter(path, source)?;
    }
    let difference = match &sources {
        (Source::Checkpoint(left), Source::Checkpoint(right)) => {
            let [left, right] = [Checkpoint::open(left)?, Checkpoint::open(right)?];
            compare(&stored(&left), &stored(&right), tolerance)?
        }
        _ => {
            let peft = match &sources {
                (Source::Peft(folder), _) | (_, Source::Peft(folder)) => folder.as_path(),
                _ => left,
            };
            let config = base_config(peft, model)?;
            let [left, right] = [left, right].map(|path| read_adapter(path, &config));
            let [left, right] = [left?, right?];
            compare(&factors(&left), &factors(&right), tolerance)?
        }
    };
    output.result(&difference);
    Ok(difference.same)
}

type Values = (Vec<usize>, Vec<f64>);
type Tensors<'a> = BTreeMap<String, Box<dyn Fn() -> Result<Values> + 'a>>;

fn compare(left: &Tensors<'_>, right: &Tensors<'_>, tolerance: f64) -> Result<Difference> {
    let mut difference = Difference::default();
    let names: BTreeSet<&String> = left.keys().chain(right.keys()).collect();
    for name in names {
        let (Some(left), Some(right)) = (left.get(name), right.get(name)) else {
            let only = match left.contains_key(name) {
                true => &mut difference.only_left,
                false => &mut difference.only_right,
            };
            only.push(name.clone());
            continue;
        };
        let [(left_shape, left), (right_shape, right)] = [left()?, right()?];
        if left_shape != right_shape {
            difference.reshaped.push(name.clone());
            continue;
        }
        let mut of_tensor = TensorDifference {
            name: name.clone(),
            largest: 0.0,
            differing: 0,
        };
        for (left, right) in left.iter().zip(&right) {
            if left.to_bits() != right.to_bits() {
                of_tensor.differing += 1;
                let apart = (left - right).abs();
                // A NaN against anything else is as far apart as can be.
                let apart = if apart.is_nan() { f64::INFINITY } else { apart };
                of_tensor.largest = of_tensor.largest.max(apart);
            }
        }
        difference.largest = difference.largest.max(of_tensor.largest);
        difference.tensors.push(of_tensor);
    }
    difference.same = difference.largest <= tolerance
        && difference.only_left.is_empty()
        && difference.only_right.is_empty()
        && difference.reshaped.is_empty();
    Ok(difference)
}

/// Every tensor of a checkpoint, and the settings of its adapters as tensors of two numbers.
fn stored(checkpoint: &Checkpoint) -> Tensors<'_> {
    let manifest = checkpoint.manifest();
    let mut tensors: Tensors<'_> = BTreeMap::new();
    for entry in &manifest.tensors {
        let key = entry.layout.key.clone();
        let read = move |key: &str| {
            let whole = checkpoint.full(key)?;
            let values = match whole.dtype {
                Dtype::I64 => {
                    let words = whole.bytes.as_chunks::<8>().0.iter();
                    words.map(|word| i64::from_le_bytes(*word) as f64).collect()
                }
                Dtype::F64 => {
                    let words = whole.bytes.as_chunks::<8>().0.iter();
                    words.map(|word| f64::from_le_bytes(*word)).collect()
                }
                dtype => {
                    let mut data = Vec::new();
                    widen(dtype, &whole.bytes, &mut data).with_context(|| {
                        format!("{key} is {dtype}, which is not compared (compare adapters of f32, bf16 or f16)")
                    })?;
                    data.into_iter().map(f64::from).collect()
                }
            };
            Ok((whole.shape, values))
        };
        let name = key.clone();
        tensors.insert(name, Box::new(move || read(&key)));
    }
    for (linear, entry) in &manifest.adapters {
        let settings = vec![entry.alpha, f64::from(u8::from(entry.rslora))];
        let name = format!("{linear} (alpha, rslora)");
        tensors.insert(name, Box::new(move || Ok((vec![2], settings.clone()))));
    }
    tensors
}

/// The factors of an adapter and their scales.
fn factors(adapter: &PeftAdapter) -> Tensors<'_> {
    let mut tensors: Tensors<'_> = BTreeMap::new();
    for (layer, of_layer) in &adapter.layers {
        for (projection, pair) in of_layer.pairs() {
            let name = |part: &str| format!("layers.{layer}.experts.{projection}.{part}");
            let FactorPair {
                a, b, magnitude, ..
            } = pair;
            let parts = [
                ("lora_A", Some(a)),
                ("lora_B", Some(b)),
                ("lora_magnitude_vector", magnitude.as_ref()),
            ];
            for (part, tensor) in parts {
                let Some(tensor) = tensor else { continue };
                let values = || {
                    let values = tensor.data().iter().map(|value| f64::from(*value));
                    Ok((tensor.shape().to_vec(), values.collect()))
                };
                tensors.insert(name(part), Box::new(values));
            }
            let scale = adapter.scale(pair);
            tensors.insert(name("scale"), Box::new(move || Ok((vec![], vec![scale]))));
        }
    }
    tensors
}
