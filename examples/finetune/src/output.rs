//! The files that a job writes: the adapter, and the merged model.

use std::path::Path;

use anyhow::{Result, anyhow, ensure};
use burn_moe_lora::adapters::TrainBackend;
use burn_moe_lora::checkpoint::Manifest;
use burn_moe_lora::interchange::{HubModel, MAX_SHARD_BYTES, ModelWriter};
use tempfile::NamedTempFile;

use crate::adapter::gather_adapter;
use crate::args::Args;
use crate::merge::gather_experts;
use crate::metrics::METRICS_FILE;
use crate::picture::{EXPERTS_FILE, LOSS_FILE};
use crate::rank_model::RankModel;
use crate::ranks::Rank;

/// Where a job's files go. Rank 0 alone writes; every rank gathers, and learns how the writing went.
pub struct Output<'a> {
    /// The flags that name the folders.
    pub args: &'a Args,
    /// The model that is trained.
    pub hub: &'a HubModel,
}

impl Output<'_> {
    /// Creates the folders and finds out whether they could be written to.
    ///
    /// # Errors
    /// A folder that cannot be, or holds something else.
    pub fn prepare(&self) -> Result<()> {
        let files = [
            "adapter_model.safetensors",
            "adapter_config.json",
            METRICS_FILE,
            LOSS_FILE,
            EXPERTS_FILE,
        ];
        prepare(&self.args.out, &files, "--out")?;
        if let Some(folder) = &self.args.checkpoint {
            prepare(folder, &["manifest.json"], "--checkpoint")?;
            let resumed = self.args.resume.as_deref();
            ensure!(
                !Manifest::path(folder).exists()
                    || resumed.is_some_and(|own| same_folder(own, folder)),
                "folder '{}' holds a checkpoint already (give another one with --checkpoint, or go on from it with \
                 --resume)",
                folder.display()
            );
        }
        match &self.args.merged {
            Some(folder) => {
                prepare(folder, &["model.safetensors", "config.json"], "--merged")?;
                ModelWriter::new(self.hub, folder, MAX_SHARD_BYTES)?;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Writes the adapter as PEFT files. Every rank calls it.
    ///
    /// # Errors
    /// A file that cannot be written, on every rank.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn write_adapter<B: TrainBackend>(
        &self,
        model: &RankModel<B::Inner>,
        rank: &Rank<B>,
    ) -> Result<()> {
        let adapter = gather_adapter(&model.blocks, &model.mesh);
        rank.check();
        let written = adapter.and_then(|adapter| {
            if rank.is_first() {
                let base = self.args.model.display().to_string();
                let layout = adapter.layout();
                adapter.write(&self.args.out, self.hub.config(), layout, &base)?;
            }
            Ok(())
        });
        rank.agree(written)
    }

    /// Writes the model if a folder was given for it. Every rank calls it.
    ///
    /// # Errors
    /// A file that cannot be written, on every rank.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn write_merged<B: TrainBackend>(
        &self,
        model: &RankModel<B::Inner>,
        rank: &Rank<B>,
    ) -> Result<()> {
        let Some(folder) = &self.args.merged else {
            return Ok(());
        };
        let mut layers = 0..model.blocks.layers.len();
        let experts = |layer, keep| {
            let experts = gather_experts(&model.blocks, layer, self.hub, &model.mesh, keep);
            rank.check();
            experts
        };
        let mut written = Ok(());
        if rank.is_first() {
            let writer = ModelWriter::new(self.hub, folder, MAX_SHARD_BYTES);
            written = writer.map_err(Into::into).and_then(|writer| {
                writer.write(|layer| {
                    layers.start = layer + 1;
                    experts(layer, true)
                })
            });
        }
        // The layers that this rank writes nothing of are gathered too: the others wait for it in them.
        let rest: Result<Vec<_>> = layers.map(|layer| experts(layer, false)).collect();
        rank.agree(written.and(rest.map(|_| ())))
    }
}

/// Creates the folder if it is missing, and checks that files of these names can be written to it.
fn prepare(folder: &Path, names: &[&str], flag: &str) -> Result<()> {
    let failed = |action: &str, error: std::io::Error| {
        let folder = folder.display();
        anyhow!("cannot {action} folder '{folder}': {error} (give another one with {flag})")
    };
    std::fs::create_dir_all(folder).map_err(|error| failed("create", error))?;
    // Gone again when it is dropped here.
    NamedTempFile::new_in(folder).map_err(|error| failed("write to", error))?;
    for path in names.iter().map(|name| folder.join(name)) {
        ensure!(
            !path.is_dir(),
            "'{}' is a folder where a file is to be written (move it or give another folder with {flag})",
            path.display()
        );
    }
    Ok(())
}

/// Whether both are there and are one folder.
pub(crate) fn same_folder(a: &Path, b: &Path) -> bool {
    let [a, b] = [a, b].map(|folder| folder.canonicalize().ok());
    a.is_some() && a == b
}
