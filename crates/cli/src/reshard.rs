//! `moe-lora reshard`

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use moe_lora_checkpoint::{Axis, GroupSizes, reshard};
use serde::Serialize;

use crate::output::Output;
use crate::source::{expect_no_checkpoint, open_checkpoint};

#[derive(Serialize)]
struct Resharded {
    out: PathBuf,
    ep: usize,
    etp: usize,
    tp: usize,
    tensors: usize,
    bytes: usize,
}

impl fmt::Display for Resharded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            out,
            ep,
            etp,
            tp,
            tensors,
            bytes,
        } = self;
        let out = out.display();
        write!(
            f,
            "{tensors} tensors of {bytes} bytes for ep {ep} x etp {etp}, tp {tp}: {out}"
        )
    }
}

/// Writes the checkpoint anew for `[ep, etp, tp]`.
///
/// # Errors
/// A damaged checkpoint, or sizes that do not divide its tensors.
pub fn run(folder: &Path, out: &Path, [ep, etp, tp]: [usize; 3], output: &Output) -> Result<()> {
    let checkpoint = open_checkpoint(folder)?;
    // In its own place it is replaced once the new one is whole.
    let own = folder.canonicalize()?;
    if out.canonicalize().ok() != Some(own) {
        expect_no_checkpoint(out)?;
    }
    let axes = checkpoint.manifest().tensors.iter();
    let dense = axes
        .flat_map(|entry| &entry.layout.axes)
        .any(|axis| *axis == Some(Axis::Tp));
    ensure!(
        dense || tp == 1,
        "--tp {tp}, and the checkpoint has no adapter on a dense linear or shared expert (leave it out)"
    );
    let entries = checkpoint.manifest().tensors.iter();
    let bytes = entries.map(|entry| entry.byte_len()).sum();
    // Each group fits once into the fewest ranks that both decompositions divide.
    let sizes = GroupSizes::new(ep, etp).with_tp(tp);
    let world = least_common_multiple(sizes.world, tp);
    let progress = output.progress("resharding", bytes);
    let manifest = reshard(&checkpoint, out, sizes.with_world(world), |state| {
        progress.done(state.done);
    })?;
    drop(progress);
    output.result(&Resharded {
        out: out.to_owned(),
        ep,
        etp,
        tp,
        tensors: manifest.tensors.len(),
        bytes,
    });
    Ok(())
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    match x {
        0 => 0,
        divisor => (a / divisor).saturating_mul(b),
    }
}
