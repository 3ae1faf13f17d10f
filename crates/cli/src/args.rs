//! The commands and their flags.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use moe_lora_interchange::PeftLayout;

use crate::plan::PlanArgs;

/// Works on LoRA adapters of Mixture-of-Experts models: checkpoints, PEFT folders and hub models.
///
/// A checkpoint is a folder with a manifest.json, as written by training; an adapter is a checkpoint or a folder with an
/// adapter_config.json; a model is a folder with a config.json and safetensors. No GPU is used.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "moe-lora",
    version,
    after_help = "Exit codes: 0 done, 1 diff found a difference, 2 flags that make no sense, 3 anything else that went wrong."
)]
pub struct Args {
    /// What to do
    #[command(subcommand)]
    pub command: Command,

    /// Print one JSON object instead of text
    #[arg(long, global = true)]
    pub json: bool,

    /// Show no progress
    #[arg(long, short, global = true)]
    pub quiet: bool,
}

/// What to do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// List the tensors of a checkpoint, an adapter, a model or a safetensors file
    Inspect {
        /// Folder or .safetensors file
        path: PathBuf,

        /// Also read the factors and print the norm of every expert's delta s B A
        #[arg(long)]
        norms: bool,

        /// The adapter's base model [default: the one its configuration names]
        #[arg(long, value_name = "DIR")]
        model: Option<PathBuf>,
    },
    /// Write a checkpoint anew for another topology
    Reshard {
        /// The checkpoint
        checkpoint: PathBuf,

        /// Folder to write to
        out: PathBuf,

        /// Expert parallelism
        #[arg(long, value_name = "N", default_value_t = 1)]
        ep: usize,

        /// Expert tensor parallelism
        #[arg(long, value_name = "N", default_value_t = 1)]
        etp: usize,

        /// Tensor parallelism of dense layers and shared experts
        #[arg(long, value_name = "N", default_value_t = 1)]
        tp: usize,
    },
    /// Merge an adapter into its model
    Merge {
        /// The model
        model: PathBuf,

        /// The adapter
        adapter: PathBuf,

        /// Folder to write the merged model to
        out: PathBuf,

        /// Most bytes of a file, such as 5GB, 800MB or a plain number
        #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = bytes)]
        max_shard_size: u64,
    },
    /// Write a checkpoint's adapter as PEFT files
    Export {
        /// The checkpoint
        checkpoint: PathBuf,

        /// Folder to write to
        out: PathBuf,

        /// The base model
        #[arg(long, value_name = "DIR")]
        model: PathBuf,

        /// How the factors lie in the file [default: stacked, or per-expert where stacked cannot hold the adapter]
        #[arg(long, value_enum)]
        layout: Option<Layout>,

        /// Turn separate gate and up adapters into one of twice the rank
        #[arg(long)]
        fuse: bool,
    },
    /// Write an adapter's PEFT files as a checkpoint
    Import {
        /// Folder with an adapter_config.json
        adapter: PathBuf,

        /// Folder to write to
        out: PathBuf,

        /// The base model [default: the one its configuration names]
        #[arg(long, value_name = "DIR")]
        model: Option<PathBuf>,

        /// Turn separate gate and up adapters into one of twice the rank
        #[arg(long)]
        fuse: bool,
    },
    /// Compare two adapters tensor by tensor
    Diff {
        /// One adapter
        left: PathBuf,

        /// The other one
        right: PathBuf,

        /// The base model of both [default: the one that a configuration names]
        #[arg(long, value_name = "DIR")]
        model: Option<PathBuf>,

        /// Largest difference that counts as none
        #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = tolerance)]
        tolerance: f64,
    },
    /// Predict bytes, memory and time of each topology, before a GPU is booked
    Plan(PlanArgs),
}

/// How factors lie in PEFT files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    /// One pair a stacked parameter (target_parameters), for transformers 5
    Stacked,
    /// One pair an expert and projection (target_modules), for transformers 4
    PerExpert,
    /// Stacked with a leading axis of 1 on shared factors, for serving
    SharedOuter,
}

impl Layout {
    /// As it is written on the command line.
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

impl From<PeftLayout> for Layout {
    fn from(layout: PeftLayout) -> Self {
        match layout {
            PeftLayout::Stacked => Self::Stacked,
            PeftLayout::PerExpert => Self::PerExpert,
            PeftLayout::SharedOuter => Self::SharedOuter,
        }
    }
}

impl From<Layout> for PeftLayout {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Stacked => Self::Stacked,
            Layout::PerExpert => Self::PerExpert,
            Layout::SharedOuter => Self::SharedOuter,
        }
    }
}

fn tolerance(text: &str) -> Result<f64, String> {
    let value: f64 = text
        .parse()
        .map_err(|error| format!("{error} (give a number)"))?;
    match value >= 0.0 {
        true => Ok(value),
        false => Err(format!("{value} is no tolerance (use 0 or more)")),
    }
}

/// A size with an optional decimal unit.
pub fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        other => return Err(format!("{other:?} is no unit (use B, KB, MB or GB)")),
    };
    let number: u64 = digits
        .parse()
        .map_err(|error| format!("{error} (give a whole number and a unit, such as 5GB)"))?;
    match number.checked_mul(unit) {
        Some(size) if size > 0 => Ok(size),
        _ => Err(format!("{text} is out of range (use 1B or more)")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn sizes_take_a_decimal_unit() {
        assert_eq!(bytes("5GB"), Ok(5_000_000_000));
        assert_eq!(bytes("12"), Ok(12));
        assert_eq!(bytes("7kb"), Ok(7_000));
        for wrong in ["", "GB", "5GiB", "-1", "0", "99999999999GB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
