//! Topologies, collectives and the start of ranks.

use std::time::Duration;

use burn_moe_lora::parallel::{
    CollectiveError, CollectiveOp, GroupName, LaunchError, TopologyConfig, TopologyError,
};
use moe_lora_nccl::StartError;

use super::io_fault;
use crate::{Examples, examples};

const OP: CollectiveOp = CollectiveOp::AllReduce;
const GROUP: GroupName = GroupName::ExpertTp;
const WAITED: Duration = Duration::from_secs(60);

pub fn all() -> Vec<Examples> {
    let parallel = "crates/parallel/src/error.rs";
    vec![
        examples(parallel, "TopologyError", "Topologies", topology()),
        examples(parallel, "CollectiveError", "Collectives", collective()),
        examples(
            "crates/parallel/src/mock.rs",
            "LaunchError",
            "Ranks as threads",
            launch(),
        ),
        examples(
            "crates/nccl/src/error.rs",
            "StartError",
            "Ranks on GPUs",
            start(),
        ),
    ]
}

fn topology() -> Vec<TopologyError> {
    vec![
        TopologyConfig::new(4).with_tp(0).init().unwrap_err(),
        TopologyConfig::new(6)
            .with_ep(2)
            .with_etp(2)
            .init()
            .unwrap_err(),
        TopologyError::Rank { rank: 2, world: 2 },
        TopologyError::Indivisible {
            what: "num_experts",
            extent: 60,
            by: "ep_size",
            size: 8,
        },
        TopologyError::Transport {
            transport: 2,
            topology: 4,
        },
    ]
}

fn collective() -> Vec<CollectiveError> {
    let (op, group, rank) = (OP, GROUP, 0);
    vec![
        CollectiveError::Mismatch {
            op,
            group,
            rank,
            calls: "rank 0 all_reduce [1, 4] F32; rank 1 all_reduce [2, 4] F32".into(),
        },
        CollectiveError::Timeout {
            op,
            group,
            rank,
            missing: vec![1],
            waited: WAITED,
        },
        CollectiveError::Departed {
            op,
            group,
            rank,
            departed: 1,
            reason: "panicked: the disk is full".into(),
        },
        CollectiveError::Sizes {
            op,
            group,
            rank,
            sizes: "reduce_scatter, [2, 3] of extent 6".into(),
        },
        CollectiveError::Transport {
            op,
            group,
            rank,
            reason: "ncclAllReduce returned ncclUnhandledCudaError".into(),
        },
    ]
}

fn launch() -> Vec<LaunchError> {
    let rank = 1;
    vec![
        LaunchError::Collective {
            rank,
            source: CollectiveError::Timeout {
                op: OP,
                group: GROUP,
                rank,
                missing: vec![0],
                waited: WAITED,
            },
        },
        LaunchError::Failed {
            rank,
            source: "the disk is full".into(),
        },
        LaunchError::Panicked {
            rank,
            message: "the disk is full".into(),
        },
        LaunchError::NotStarted {
            rank,
            source: io_fault(11),
        },
    ]
}

fn start() -> Vec<StartError> {
    let address = || "node0:29501".to_owned();
    let unset = moe_lora_nccl::Launch::from_vars(|_| None).unwrap_err();
    vec![
        unset,
        StartError::Invalid {
            name: "RANK",
            value: "two".into(),
            expected: "a number up to 3".into(),
        },
        StartError::Listen {
            address: address(),
            source: io_fault(98),
        },
        StartError::Unreachable {
            rank: 1,
            address: address(),
            waited: Duration::from_secs(300),
            reason: "Connection refused (os error 111)".into(),
        },
        StartError::Missing {
            ranks: vec![2, 3],
            waited: Duration::from_secs(300),
        },
        StartError::Token {
            rank: 1,
            address: address(),
        },
        StartError::World {
            rank: 1,
            here: 4,
            there: 2,
        },
        StartError::Taken { rank: 1 },
        StartError::Library { library: "NCCL" },
        StartError::Device {
            rank: 1,
            device: 1,
            reason: "CUDA_ERROR_INVALID_DEVICE".into(),
        },
    ]
}
