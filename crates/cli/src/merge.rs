//! `moe-lora merge`

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, ensure};
use moe_lora_interchange::{InterchangeError, ModelWriter};
use serde::Serialize;

use crate::output::Output;
use crate::source::{open_model, read_adapter};

#[derive(Serialize)]
struct Merged {
    out: PathBuf,
    layers: usize,
    files: Vec<String>,
}

impl fmt::Display for Merged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layers, files) = (self.layers, self.files.len());
        let out = self.out.display();
        write!(
            f,
            "merged {layers} layers, files of weights: {files}: {out}"
        )
    }
}

/// An error with the layer that it is about.
#[derive(Debug)]
struct MergeError(anyhow::Error);

impl From<InterchangeError> for MergeError {
    fn from(error: InterchangeError) -> Self {
        Self(error.into())
    }
}

/// Writes `W + s B A` of every adapted expert, and the rest of the model as it is.
///
/// # Errors
/// Files that are damaged or do not fit each other, or a folder that cannot be written to.
pub fn run(
    model: &Path,
    adapter: &Path,
    out: &Path,
    max_shard_bytes: u64,
    output: &Output,
) -> Result<()> {
    let hub = open_model(model)?;
    let adapter = read_adapter(adapter, hub.config())?;
    let max_shard_bytes = usize::try_from(max_shard_bytes).unwrap_or(usize::MAX);
    let writer = ModelWriter::new(&hub, out, max_shard_bytes)?;
    let outside = adapter
        .layers
        .keys()
        .find(|layer| !hub.config().is_moe(**layer));
    ensure!(
        outside.is_none(),
        "the adapter is on layer {}, which has no experts in this model (check that the two belong together)",
        outside.unwrap_or(&0)
    );
    let progress = output.progress("merging", hub.config().num_hidden_layers);
    let written = writer.write(|layer| -> Result<_, MergeError> {
        progress.done(layer);
        let Some(adapter_of_layer) = adapter.layers.get(&layer) else {
            return Ok(BTreeMap::new());
        };
        let experts = hub.expert_weights(layer)?;
        let merged = experts.merge(adapter_of_layer, adapter.rslora);
        let merged = merged.map_err(|error| MergeError(anyhow!("layer {layer}: {error}")))?;
        Ok(merged.into_hub(layer, &hub)?)
    });
    written.map_err(|error| error.0)?;
    drop(progress);
    output.result(&Merged {
        out: out.to_owned(),
        layers: adapter.layers.len(),
        files: writer.file_names().into_iter().map(String::from).collect(),
    });
    Ok(())
}
