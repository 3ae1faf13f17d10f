//! What can go wrong in planning.

use std::path::PathBuf;

use moe_lora_files::FileError;
use moe_lora_interchange::InterchangeError;

/// A model, a bench or a job that no plan can be made of.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The model's configuration.
    #[error(transparent)]
    Model(Box<InterchangeError>),
    /// A file by itself.
    #[error(transparent)]
    File(#[from] FileError),
    /// A row of a bench's output.
    #[error("{path}, line {line}: {source} (give the file that the GPU bench's --out wrote)")]
    Row {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The cause.
        source: serde_json::Error,
    },
    /// A number that makes no sense.
    #[error("{path}, line {line}: {field}={value} (expected a finite number above 0)")]
    Number {
        /// The file.
        path: PathBuf,
        /// Counted from 1.
        line: usize,
        /// The field.
        field: &'static str,
        /// What it holds.
        value: f64,
    },
    /// Too few measurements of something.
    #[error(
        "{path} has {what} of one size alone, which does not tell its start from its rate (run the bench with two sizes or more)"
    )]
    OneSize {
        /// The file.
        path: PathBuf,
        /// The kernel.
        what: &'static str,
    },
    /// A file without a measurement.
    #[error(
        "{path} has no row of a kernel or collective (give the file that the GPU bench's --out wrote)"
    )]
    NoRows {
        /// The file.
        path: PathBuf,
    },
    /// A size of the job.
    #[error("{name}={value} is out of range (choose a number from 1 to {most})")]
    Size {
        /// Its name.
        name: &'static str,
        /// What was asked for.
        value: usize,
        /// The largest.
        most: usize,
    },
    /// Nothing divides.
    #[error(
        "no topology of {gpus} GPUs has tp={tp}, ep={ep} and etp={etp} for this model and rank={rank} \
         (tp and ep x etp divide the GPUs, ep the {experts} experts, etp the rank, the hidden and the intermediate size)"
    )]
    NoTopology {
        /// GPUs of the job.
        gpus: usize,
        /// What was asked for.
        tp: String,
        /// What was asked for.
        ep: String,
        /// What was asked for.
        etp: String,
        /// Rank of the adapters.
        rank: usize,
        /// Experts of a layer.
        experts: usize,
    },
}

impl From<InterchangeError> for PlanError {
    fn from(error: InterchangeError) -> Self {
        Self::Model(Box::new(error))
    }
}
