//! `moe-lora inspect`

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use moe_lora_checkpoint::{AdapterEntry, AdapterSharing, Checkpoint, GroupSizes};
use moe_lora_files::TensorFile;
use moe_lora_interchange::PeftAdapter;
use serde::Serialize;

use crate::norms::{Norms, norms};
use crate::output::Output;
use crate::source::{Source, adapter_file, base_config, open_model};

/// What lies at a path.
#[derive(Default, Serialize)]
struct Inspection {
    kind: &'static str,
    path: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    checkpoint: Option<Saved>,
    tensors: Vec<TensorLine>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    norms: Vec<Norms>,
}

/// What only checkpoints have.
#[derive(Serialize)]
struct Saved {
    step: u64,
    topology: GroupSizes,
    adapters: Vec<(String, AdapterEntry)>,
}

#[derive(Serialize)]
struct TensorLine {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: usize,
    /// The files it lies in, and which box of it lies there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shards: Vec<Shard>,
}

#[derive(Serialize)]
struct Shard {
    file: String,
    offset: Vec<usize>,
    shape: Vec<usize>,
    fragments: Vec<usize>,
}

impl fmt::Display for Inspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: usize = self.tensors.iter().map(|tensor| tensor.bytes).sum();
        let (kind, tensors) = (self.kind, self.tensors.len());
        write!(
            f,
            "{kind} {}: {tensors} tensors, {bytes} bytes",
            self.path.display()
        )?;
        if let Some(saved) = &self.checkpoint {
            let GroupSizes { world, tp, ep, etp } = saved.topology;
            write!(
                f,
                "\nstep {}, saved by {world} ranks: ep {ep} x etp {etp}, tp {tp}",
                saved.step
            )?;
            for (linear, entry) in &saved.adapters {
                let AdapterEntry { rank, alpha, .. } = entry;
                write!(f, "\nadapter {linear}: rank {rank}, alpha {alpha}")?;
                for (is, name) in [
                    (entry.rslora, "rank-stabilised"),
                    (entry.pissa, "PiSSA"),
                    (entry.dora, "DoRA"),
                ] {
                    if is {
                        write!(f, ", {name}")?;
                    }
                }
                match entry.sharing {
                    AdapterSharing::PerExpert => {}
                    AdapterSharing::SharedOuter => {
                        write!(f, ", outer factor shared by the experts")?
                    }
                    AdapterSharing::Shared => write!(f, ", shared by the experts")?,
                }
            }
        }
        let width = self.tensors.iter().map(|tensor| tensor.name.len()).max();
        let width = width.unwrap_or(0).min(96);
        for tensor in &self.tensors {
            let TensorLine {
                name, dtype, shape, ..
            } = tensor;
            // A name may hold anything, line ends and escapes of a terminal included.
            let name = name.escape_debug().to_string();
            write!(f, "\n{name:width$}  {dtype:<5} {shape:?}")?;
            for shard in &tensor.shards {
                write!(f, "\n    {shard}")?;
            }
        }
        for norms in &self.norms {
            let Norms {
                layer,
                projection,
                rank,
                scale,
                experts,
            } = norms;
            write!(
                f,
                "\nlayer {layer} {projection}, rank {rank}, scale {scale}: norms"
            )?;
            for norm in experts {
                write!(f, " {norm:.4e}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            offset,
            shape,
            fragments,
        } = self;
        write!(f, "{file}: ")?;
        for (axis, begin) in offset.iter().enumerate() {
            let (end, parts) = (begin + shape[axis] / fragments[axis], fragments[axis]);
            let separator = if axis == 0 { "" } else { ", " };
            write!(f, "{separator}{begin}..{end}")?;
            if parts > 1 {
                write!(f, " of each of {parts}")?;
            }
        }
        Ok(())
    }
}

/// Lists what lies at `path`; of tensors' data nothing is read, unless norms are asked for.
///
/// # Errors
/// Files that are damaged or of no known kind, or norms of something that is no adapter.
pub fn run(path: &Path, with_norms: bool, model: Option<&Path>, output: &Output) -> Result<()> {
    let source = Source::find(path)?;
    let mut inspection = Inspection {
        path: path.to_owned(),
        ..Inspection::default()
    };
    match &source {
        Source::Checkpoint(folder) => {
            let checkpoint = Checkpoint::open(folder)?;
            let manifest = checkpoint.manifest();
            inspection.kind = "checkpoint";
            inspection.checkpoint = Some(Saved {
                step: manifest.step,
                topology: manifest.topology,
                adapters: manifest.adapters.clone().into_iter().collect(),
            });
            inspection.tensors = stored_tensors(&checkpoint);
        }
        Source::Peft(folder) => {
            inspection.kind = "adapter";
            inspection.tensors = file_tensors(&adapter_file(folder)?)?;
        }
        Source::Model(folder) => {
            let hub = open_model(folder)?;
            inspection.kind = "model";
            for name in hub.names() {
                let stored = hub.stored(name)?;
                inspection.tensors.push(TensorLine {
                    name: name.to_owned(),
                    dtype: stored.dtype().to_string(),
                    shape: stored.shape().to_vec(),
                    bytes: stored.bytes().len(),
                    shards: Vec::new(),
                });
            }
        }
        Source::File(file) => {
            inspection.kind = "file";
            inspection.tensors = file_tensors(&TensorFile::open(file.clone())?)?;
        }
    }
    if with_norms {
        let adapter = match &source {
            Source::Checkpoint(folder) => {
                let checkpoint = Checkpoint::open(folder)?;
                PeftAdapter::from_checkpoint(&checkpoint)?
            }
            Source::Peft(folder) => PeftAdapter::read(folder, &base_config(folder, model)?)?,
            Source::Model(_) | Source::File(_) => bail!(
                "'{}' is no adapter, so there are no norms of deltas (leave out --norms)",
                path.display()
            ),
        };
        inspection.norms = norms(&adapter);
    }
    output.result(&inspection);
    Ok(())
}

fn stored_tensors(checkpoint: &Checkpoint) -> Vec<TensorLine> {
    let entries = checkpoint.manifest().tensors.iter();
    entries
        .map(|entry| TensorLine {
            name: entry.layout.key.clone(),
            dtype: entry.layout.dtype.to_string(),
            shape: entry.layout.shape.clone(),
            bytes: entry.byte_len(),
            shards: entry
                .shards
                .iter()
                .map(|shard| Shard {
                    file: shard.file.clone(),
                    offset: shard.offset.clone(),
                    shape: shard.shape.clone(),
                    fragments: entry.layout.fragments.clone(),
                })
                .collect(),
        })
        .collect()
}

fn file_tensors(file: &TensorFile) -> Result<Vec<TensorLine>> {
    let names = file.names();
    names
        .map(|name| {
            let stored = file.stored(name)?;
            Ok(TensorLine {
                name: name.to_owned(),
                dtype: stored.dtype().to_string(),
                shape: stored.shape().to_vec(),
                bytes: stored.bytes().len(),
                shards: Vec::new(),
            })
        })
        .collect()
}
