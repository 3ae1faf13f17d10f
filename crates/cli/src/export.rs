//! `moe-lora export`

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use moe_lora_interchange::{ModelConfig, PeftAdapter};
use serde::Serialize;

use crate::args::Layout;
use crate::output::Output;
use crate::source::open_checkpoint;

#[derive(Serialize)]
struct Exported {
    out: PathBuf,
    layout: String,
    layers: usize,
    one_sided_layers: Vec<usize>,
}

impl fmt::Display for Exported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            out,
            layout,
            layers,
            one_sided_layers,
        } = self;
        write!(f, "{layers} layers, {layout}: {}", out.display())?;
        if !one_sided_layers.is_empty() {
            write!(
                f,
                "\nwarning: only one of gate_up and down is adapted in layers {one_sided_layers:?}, which SGLang serves \
                 without the adapter"
            )?;
        }
        Ok(())
    }
}

/// Writes the adapter of a checkpoint as PEFT files.
///
/// # Errors
/// A damaged checkpoint, a layout that cannot hold the adapter, or a folder that cannot be written to.
pub fn run(
    checkpoint: &Path,
    out: &Path,
    model: &Path,
    layout: Option<Layout>,
    fuse: bool,
    output: &Output,
) -> Result<()> {
    let config = ModelConfig::read(model)?;
    let checkpoint = open_checkpoint(checkpoint)?;
    let mut adapter = PeftAdapter::from_checkpoint(&checkpoint)?;
    if layout != Some(Layout::SharedOuter) {
        adapter = adapter.expand(config.num_experts)?;
    }
    if fuse {
        adapter = adapter.fuse_gate_up()?;
    }
    let layout = layout.unwrap_or_else(|| adapter.layout().into());
    adapter.write(out, &config, layout.into(), &model.display().to_string())?;
    output.result(&Exported {
        out: out.to_owned(),
        layout: layout.name(),
        layers: adapter.layers.len(),
        one_sided_layers: adapter.one_sided_layers(),
    });
    Ok(())
}
