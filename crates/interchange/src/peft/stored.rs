//! An adapter as the tensors of a sharded checkpoint, which training at any topology can load.
//!
//! ```text
//! model.layers.{layer}.mlp.experts.gate_up_proj.lora_A    [E, r, H]    or gate_proj and up_proj
//! model.layers.{layer}.mlp.experts.gate_up_proj.lora_B    [E, 2F, r]
//! model.layers.{layer}.mlp.experts.down_proj.lora_A       [E, r, F]
//! model.layers.{layer}.mlp.experts.down_proj.lora_B       [E, H, r]
//! {linear}.lora_magnitude_vector                          [E, d_out]   with DoRA
//! {linear}.lora_A.start, {linear}.lora_B.start            where they started, with PiSSA
//! ```

use super::{ExpertAdapter, FactorPair, GateUp, PeftAdapter};
use crate::{HostTensor, InterchangeError, ModelConfig};
use moe_lora_checkpoint::{
    AdapterActivation, AdapterEntry, AdapterSharing, Axis, Checkpoint, Dtype, GroupSizes, Manifest,
    Save, TensorLayout,
};
use moe_lora_files::widen;
use std::collections::BTreeMap;
use std::path::Path;

impl PeftAdapter {
    /// The adapter in a checkpoint of any topology, without optimizer state. Factors that the experts
    /// share have a leading axis of 1; [`expand`](Self::expand) gives each expert its own. One of PiSSA
    /// becomes a plain one of twice the rank, on the weights as they were published.
    ///
    /// Paths need not be those above: `layers.{layer}` and then `experts.{projection}` at the end
    /// are what counts.
    ///
    /// # Errors
    ///
    /// When an adapter is not on experts, has a function between its factors, or gate without up;
    /// when some are rank-stabilised and others are not; when a factor is missing or damaged.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self, InterchangeError> {
        let mut rslora = None;
        let mut pairs: BTreeMap<(usize, &'static str), FactorPair> = BTreeMap::new();
        for (linear, entry) in &checkpoint.manifest().adapters {
            let place = expert_linear(linear).ok_or_else(|| InterchangeError::NotExperts {
                linear: linear.clone(),
            })?;
            if entry.activation != AdapterActivation::Identity {
                return Err(InterchangeError::Nonlinear {
                    linear: linear.clone(),
                });
            }
            if *rslora.get_or_insert(entry.rslora) != entry.rslora {
                return Err(InterchangeError::MixedScales {
                    linear: linear.clone(),
                });
            }
            let pair = read_pair(checkpoint, linear, entry)?;
            pairs.insert(place, pair);
        }
        let mut layers: BTreeMap<usize, ExpertAdapter> = BTreeMap::new();
        while let Some(((layer, projection), pair)) = pairs.pop_first() {
            let adapter = layers.entry(layer).or_default();
            match projection {
                "down_proj" => adapter.down = Some(pair),
                "gate_up_proj" => adapter.gate_up = Some(GateUp::Fused(pair)),
                "gate_proj" => {
                    let up = pairs.remove(&(layer, "up_proj"));
                    let up = up.ok_or(InterchangeError::HalfGateUp { layer })?;
                    adapter.gate_up = Some(GateUp::Separate { gate: pair, up });
                }
                _ => return Err(InterchangeError::HalfGateUp { layer }),
            }
        }
        if layers.is_empty() {
            return Err(InterchangeError::EmptyAdapter);
        }
        Ok(Self {
            rslora: rslora.unwrap_or(false),
            layers,
        })
    }

    /// Writes the adapter to `folder` as a checkpoint of one rank, without optimizer state and at
    /// step 0. A factor that the experts share has no axis of experts there.
    ///
    /// # Errors
    ///
    /// When the adapter is empty or does not fit `config`, and when a file cannot be written.
    pub fn write_checkpoint(
        &self,
        folder: &Path,
        config: &ModelConfig,
    ) -> Result<Manifest, InterchangeError> {
        let mut adapters = BTreeMap::new();
        let mut layouts = Vec::new();
        let mut values = BTreeMap::new();
        for (layer, adapter) in &self.layers {
            config.expect_moe(*layer)?;
            let pairs = match &adapter.gate_up {
                None => vec![],
                Some(GateUp::Fused(pair)) => vec![("gate_up_proj", pair)],
                Some(GateUp::Separate { gate, up }) => vec![("gate_proj", gate), ("up_proj", up)],
            };
            let down = adapter.down.iter().map(|pair| ("down_proj", pair));
            for (projection, pair) in pairs.into_iter().chain(down) {
                let linear = format!("model.layers.{layer}.mlp.experts.{projection}");
                pair.expand(config.num_experts)?;
                for (layout, tensor) in tensors(&linear, projection, pair, config.num_experts) {
                    values.insert(layout.key.clone(), tensor);
                    layouts.push(layout);
                }
                let sharing = match (pair.shared(config.num_experts)?, projection) {
                    ([false, false], _) => AdapterSharing::PerExpert,
                    ([true, true], _) => AdapterSharing::Shared,
                    ([false, true], "down_proj") => AdapterSharing::SharedOuter,
                    ([true, false], other) if other != "down_proj" => AdapterSharing::SharedOuter,
                    _ => {
                        let layer = *layer;
                        return Err(InterchangeError::InnerShared { layer, projection });
                    }
                };
                let entry = AdapterEntry {
                    rank: pair.rank(),
                    alpha: pair.alpha,
                    rslora: self.rslora,
                    activation: AdapterActivation::Identity,
                    sharing,
                    dora: pair.magnitude.is_some(),
                    pissa: false,
                };
                adapters.insert(linear, entry);
            }
        }
        if adapters.is_empty() {
            return Err(InterchangeError::EmptyAdapter);
        }
        let save = Save::begin(folder, GroupSizes::new(1, 1).place(0)?, 0)?;
        save.write(&layouts, |shard| {
            let data = values[&shard.key].data();
            let bytes: Vec<u8> = data.iter().copied().flat_map(f32::to_le_bytes).collect();
            Ok(bytes.into())
        })?;
        Ok(save.commit(adapters)?)
    }
}

/// The factors of a pair under a linear's path, cut over ranks as training cuts them.
fn tensors<'a>(
    linear: &str,
    projection: &str,
    pair: &'a FactorPair,
    experts: usize,
) -> Vec<(TensorLayout, &'a HostTensor)> {
    // A base that is cut on its columns has A cut there too; every other factor is cut on its rows.
    let row_parallel = projection == "down_proj";
    let fragments = if projection == "gate_up_proj" { 2 } else { 1 };
    let a_axis = if row_parallel { 2 } else { 1 };
    let magnitude = pair.magnitude.as_ref();
    let parts = [
        ("lora_A", Some(&pair.a), a_axis, 1),
        ("lora_B", Some(&pair.b), 1, fragments),
        ("lora_magnitude_vector", magnitude, 1, fragments),
    ];
    let present = parts.into_iter().filter_map(|(name, tensor, axis, parts)| {
        let tensor = tensor?;
        let key = format!("{linear}.{name}");
        let shared = experts > 1 && tensor.shape()[0] == 1;
        let (shape, axis) = match shared {
            true => (&tensor.shape()[1..], axis - 1),
            false => (tensor.shape(), axis),
        };
        let mut layout = TensorLayout::new(key, Dtype::F32, shape).with_fragments(axis, parts);
        if !shared {
            layout = layout.with_axis(0, Axis::Ep);
        }
        Some((layout.with_axis(axis, Axis::ExpertTp), tensor))
    });
    present.collect()
}

fn read_pair(
    checkpoint: &Checkpoint,
    linear: &str,
    entry: &AdapterEntry,
) -> Result<FactorPair, InterchangeError> {
    let read = |name: &str| {
        let key = format!("{linear}.{name}");
        let loaded = checkpoint.full(&key)?;
        let mut shape = loaded.shape;
        if shape.len() == 2 && name != "lora_magnitude_vector" {
            // One factor that the experts share.
            shape.insert(0, 1);
        }
        let mut data = Vec::new();
        widen(loaded.dtype, &loaded.bytes, &mut data).ok_or_else(|| {
            InterchangeError::StoredDtype {
                key: key.clone(),
                dtype: loaded.dtype,
            }
        })?;
        Ok::<_, InterchangeError>(HostTensor::new(shape, data)?)
    };
    let mut pair = FactorPair::new(read("lora_A")?, read("lora_B")?, entry.alpha)?;
    if entry.pissa {
        let start = FactorPair::new(read("lora_A.start")?, read("lora_B.start")?, entry.alpha)?;
        pair = pair.since(&start, entry.rslora)?;
    }
    if entry.dora {
        return pair.with_magnitude(read("lora_magnitude_vector")?);
    }
    Ok(pair)
}

/// Layer and projection of a linear of experts, from its path.
fn expert_linear(path: &str) -> Option<(usize, &'static str)> {
    let mut parts = path.split('.').rev();
    let last = parts.next()?;
    let projection = ["gate_up_proj", "gate_proj", "up_proj", "down_proj"]
        .into_iter()
        .find(|name| *name == last)?;
    if parts.next()? != "experts" {
        return None;
    }
    let parts: Vec<&str> = path.split('.').collect();
    let layers = parts.iter().position(|part| *part == "layers")?;
    let layer = parts.get(layers + 1)?.parse().ok()?;
    Some((layer, projection))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_says_layer_and_projection() {
        for (path, expected) in [
            (
                "model.layers.10.mlp.experts.down_proj",
                Some((10, "down_proj")),
            ),
            (
                "decoder.layers.0.moe.experts.gate_up_proj",
                Some((0, "gate_up_proj")),
            ),
            ("model.layers.0.mlp.shared_expert.down_proj", None),
            ("model.layers.x.mlp.experts.down_proj", None),
            ("mlp.experts.down_proj", None),
            ("model.layers.0.mlp.experts.w1", None),
        ] {
            assert_eq!(expert_linear(path), expected, "{path}");
        }
    }
}
