//! What the ranks compute on, and what they communicate over.

use std::fmt;

use anyhow::{Error, Result, anyhow, ensure};
use clap::ValueEnum;

/// What the ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// The CPU.
    Cpu,
    /// NVIDIA GPUs; needs a build with the feature cuda.
    Cuda,
    /// A GPU by its graphics driver; needs a build with the feature wgpu.
    Wgpu,
}

/// What the ranks communicate over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportKind {
    /// Memory of one process: each rank is a thread, and all of them share one device.
    Mock,
    /// NCCL: each rank has a GPU, as a thread or, under torchrun or srun, as a process.
    Nccl,
}

impl BackendKind {
    /// The transport that is used when none is given: a GPU a rank where that is possible.
    pub fn default_transport(self) -> TransportKind {
        match self {
            Self::Cpu | Self::Wgpu => TransportKind::Mock,
            Self::Cuda => TransportKind::Nccl,
        }
    }

    /// Checks that this binary has the backend, and the backend the transport.
    ///
    /// # Errors
    /// A backend that was not built in, or NCCL without GPUs of its own.
    pub fn check(self, transport: TransportKind) -> Result<()> {
        let built = match self {
            Self::Cpu => true,
            Self::Cuda => cfg!(feature = "cuda"),
            Self::Wgpu => cfg!(feature = "wgpu"),
        };
        if !built {
            return Err(self.not_built());
        }
        ensure!(
            transport == TransportKind::Mock || self == Self::Cuda,
            "--transport {transport} connects CUDA GPUs, not --backend {self} (add --backend cuda or use --transport mock)"
        );
        Ok(())
    }

    /// The error of a binary without the backend.
    pub fn not_built(self) -> Error {
        anyhow!(
            "this finetune was built without the backend {self} (build it with `cargo build --release -p finetune \
             --features {self}`)"
        )
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
            Self::Wgpu => "wgpu",
        })
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mock => "mock",
            Self::Nccl => "nccl",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_is_for_cuda_alone() {
        let error = BackendKind::Cpu.check(TransportKind::Nccl).unwrap_err();
        assert_eq!(
            error.to_string(),
            "--transport nccl connects CUDA GPUs, not --backend cpu (add --backend cuda or use --transport mock)"
        );
        assert!(BackendKind::Cpu.check(TransportKind::Mock).is_ok());
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn a_backend_that_was_not_built_is_refused_with_the_command_that_builds_it() {
        let error = BackendKind::Cuda.check(TransportKind::Nccl).unwrap_err();
        assert_eq!(
            error.to_string(),
            "this finetune was built without the backend cuda (build it with `cargo build --release -p finetune \
             --features cuda`)"
        );
    }
}
