//! What can go wrong before the first collective.

use std::io;
use std::time::Duration;

use thiserror::Error;

/// A world of ranks that did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// An environment variable that a launcher sets is missing.
    #[error("{name} is not set ({remedy})")]
    Unset {
        /// The variable.
        name: &'static str,
        /// Where it comes from.
        remedy: &'static str,
    },
    /// An environment variable that cannot be used.
    #[error("{name}={value:?} is not {expected}")]
    Invalid {
        /// The variable.
        name: &'static str,
        /// Its value, left out where it is secret.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// Rank 0 cannot listen for the others.
    #[error("rank 0 cannot listen on {address}: {source} (set MOE_LORA_PORT to a free port)")]
    Listen {
        /// Host and port.
        address: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// Rank 0 cannot be reached.
    #[error(
        "rank {rank} did not reach rank 0 at {address} within {waited:?}: {reason} (start rank 0, or check MASTER_ADDR, MASTER_PORT and MOE_LORA_PORT)"
    )]
    Unreachable {
        /// This rank.
        rank: usize,
        /// Host and port of rank 0.
        address: String,
        /// How long it was tried.
        waited: Duration,
        /// The last failure.
        reason: String,
    },
    /// Ranks that were expected did not come.
    #[error(
        "{} did not come within {waited:?} (start as many ranks as WORLD_SIZE says)",
        ranks_text(.ranks)
    )]
    Missing {
        /// The ranks.
        ranks: Vec<usize>,
        /// How long rank 0 waited.
        waited: Duration,
    },
    /// This rank and rank 0 do not share a token.
    #[error(
        "rank {rank} and rank 0 at {address} have different tokens (set MOE_LORA_TOKEN to the same value on every rank)"
    )]
    Token {
        /// This rank.
        rank: usize,
        /// Host and port of rank 0.
        address: String,
    },
    /// This rank and rank 0 do not agree on the number of ranks.
    #[error(
        "rank {rank} expects world_size={here}, rank 0 has world_size={there} (set WORLD_SIZE to the same value on every rank)"
    )]
    World {
        /// This rank.
        rank: usize,
        /// The size that this rank expects.
        here: usize,
        /// The size that rank 0 expects.
        there: usize,
    },
    /// Another process came as this rank before.
    #[error("rank {rank} is taken (give every process a RANK of its own)")]
    Taken {
        /// This rank.
        rank: usize,
    },
    /// A shared library is missing on this machine.
    #[error("the {library} library is not installed, or not on LD_LIBRARY_PATH")]
    Library {
        /// The library.
        library: &'static str,
    },
    /// A GPU that cannot be used.
    #[error("gpu {device} of rank {rank}: {reason}")]
    Device {
        /// The rank.
        rank: usize,
        /// Index of the GPU on this machine.
        device: usize,
        /// The driver's answer.
        reason: String,
    },
}

/// "rank 2", "ranks 2 and 3", "ranks 1, 2 and 3".
pub(crate) fn ranks_text(ranks: &[usize]) -> String {
    let names: Vec<_> = ranks.iter().map(usize::to_string).collect();
    match names.split_last() {
        None => "no rank".into(),
        Some((last, [])) => format!("rank {last}"),
        Some((last, rest)) => format!("ranks {} and {last}", rest.join(", ")),
    }
}
