//! What is to be trained on what.

use serde::Serialize;

use crate::PlanError;

/// A fine-tuning job: GPUs, tokens and rank, and the parts of the topology that are fixed already.
#[derive(Clone, Debug, Serialize)]
pub struct Job {
    /// GPUs, a rank each.
    pub gpus: usize,
    /// GPUs that one node's links join.
    pub gpus_per_node: usize,
    /// Tokens `T` that each rank brings to a step.
    pub tokens: usize,
    /// Rank `r` of the adapters.
    pub rank: usize,
    /// Bytes of a GPU; those of the machine where none are given.
    pub memory_bytes: Option<f64>,
    /// Tensor parallel size of dense layers, if it is fixed.
    pub tp: Option<usize>,
    /// Expert parallel size, if it is fixed.
    pub ep: Option<usize>,
    /// Expert tensor parallel size, if it is fixed.
    pub etp: Option<usize>,
}

impl Job {
    /// The share of a GPU's memory that a plan leaves to the allocator, the driver and NCCL.
    pub const HEADROOM: f64 = 0.1;

    /// 4096 tokens a rank, rank 32, 8 GPUs a node, any topology.
    pub fn new(gpus: usize) -> Self {
        Self {
            gpus,
            gpus_per_node: 8,
            tokens: 4096,
            rank: 32,
            memory_bytes: None,
            tp: None,
            ep: None,
            etp: None,
        }
    }

    /// Sets the GPUs that one node's links join.
    pub fn with_gpus_per_node(mut self, gpus: usize) -> Self {
        self.gpus_per_node = gpus;
        self
    }

    /// Sets the tokens of a rank and step.
    pub fn with_tokens(mut self, tokens: usize) -> Self {
        self.tokens = tokens;
        self
    }

    /// Sets the rank of the adapters.
    pub fn with_rank(mut self, rank: usize) -> Self {
        self.rank = rank;
        self
    }

    /// Sets the bytes of a GPU.
    pub fn with_memory(mut self, bytes: Option<f64>) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Fixes parts of the topology.
    pub fn with_topology(
        mut self,
        tp: Option<usize>,
        ep: Option<usize>,
        etp: Option<usize>,
    ) -> Self {
        (self.tp, self.ep, self.etp) = (tp, ep, etp);
        self
    }

    pub(crate) fn check(&self) -> Result<(), PlanError> {
        for (name, value, most) in [
            ("gpus", self.gpus, 1 << 20),
            ("gpus_per_node", self.gpus_per_node, 1 << 20),
            ("tokens", self.tokens, 1 << 31),
            ("rank", self.rank, 1 << 16),
        ] {
            if !(1..=most).contains(&value) {
                return Err(PlanError::Size { name, value, most });
            }
        }
        Ok(())
    }
}
