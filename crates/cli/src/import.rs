//! `moe-lora import`

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use moe_lora_interchange::PeftAdapter;
use serde::Serialize;

use crate::output::Output;
use crate::source::{base_config, expect_no_checkpoint};

#[derive(Serialize)]
struct Imported {
    out: PathBuf,
    adapters: usize,
    tensors: usize,
}

impl fmt::Display for Imported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (adapters, tensors) = (self.adapters, self.tensors);
        let out = self.out.display();
        write!(f, "{adapters} adapters, {tensors} tensors: {out}")
    }
}

/// Writes the adapter of PEFT files as a checkpoint of one rank.
///
/// # Errors
/// Files that are damaged or do not fit the model, or a folder that cannot be written to.
pub fn run(
    folder: &Path,
    out: &Path,
    model: Option<&Path>,
    fuse: bool,
    output: &Output,
) -> Result<()> {
    expect_no_checkpoint(out)?;
    let config = base_config(folder, model)?;
    let mut adapter = PeftAdapter::read(folder, &config)?;
    if fuse {
        adapter = adapter.fuse_gate_up()?;
    }
    let manifest = adapter.write_checkpoint(out, &config)?;
    output.result(&Imported {
        out: out.to_owned(),
        adapters: manifest.adapters.len(),
        tensors: manifest.tensors.len(),
    });
    Ok(())
}
