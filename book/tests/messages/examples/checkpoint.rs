//! Checkpoints.

use burn_moe_lora::checkpoint::{CheckpointError, GroupSizes, LoadReport};
use burn_moe_lora::interchange::FileError;

use super::{io_fault, json_fault};
use crate::{Examples, examples};

const KEY: &str = "layers.0.mlp.experts.down_proj.lora_B";
const FIRST: &str = "g3-ep0-etp0-dp0.safetensors";
const SECOND: &str = "g3-ep0-etp1-dp0.safetensors";

pub fn all() -> Vec<Examples> {
    let source = "crates/checkpoint/src/error.rs";
    vec![examples(
        source,
        "CheckpointError",
        "Checkpoints",
        checkpoint(),
    )]
}

fn checkpoint() -> Vec<CheckpointError> {
    let (key, path) = (|| KEY.to_owned(), || "saved/manifest.json".into());
    let shard = || format!("saved/{FIRST}").into();
    let [here, there] = ["ep0-etp0-dp0", "ep0-etp1-dp0"].map(str::to_owned);
    let missing = || FileError::Io {
        action: "open",
        path: shard(),
        source: io_fault(2),
    };
    vec![
        CheckpointError::Shard {
            key: key(),
            source: Box::new(missing()),
        },
        GroupSizes::new(0, 1).place(0).unwrap_err(),
        CheckpointError::Rank { rank: 4, world: 4 },
        CheckpointError::Indivisible {
            key: key(),
            axis: 1,
            part: 6,
            by: "etp_size",
            size: 4,
        },
        CheckpointError::Layout {
            key: key(),
            field: "axes",
            value: "[Some(Ep)]".into(),
            expected: "one entry an axis".into(),
        },
        CheckpointError::DuplicateKey { key: key() },
        CheckpointError::Gap {
            key: key(),
            covered: 32,
            wanted: 64,
        },
        CheckpointError::Overlap {
            key: key(),
            first: 0,
            second: 1,
        },
        CheckpointError::DuplicateShard {
            key: key(),
            first: FIRST.into(),
            second: SECOND.into(),
        },
        CheckpointError::Manifest {
            path: path(),
            source: Box::new(CheckpointError::Gap {
                key: key(),
                covered: 32,
                wanted: 64,
            }),
        },
        CheckpointError::Document {
            path: path(),
            format: "manifest",
            source: json_fault(),
        },
        CheckpointError::DocumentTooLarge {
            path: path(),
            bytes: 300 << 20,
            limit: 256 << 20,
        },
        CheckpointError::Format {
            path: path(),
            found: "another".into(),
            expected: "moe-lora-checkpoint",
        },
        CheckpointError::Version {
            path: path(),
            version: 2,
            supported: 1,
        },
        CheckpointError::DocumentChecksum {
            path: path(),
            found: 0x8c6b_7a0e,
            declared: "1b2f0c44".into(),
        },
        CheckpointError::FileName {
            key: key(),
            name: "../other.safetensors".into(),
        },
        CheckpointError::Stored {
            path: shard(),
            key: key(),
            found: "F32 [2, 4]".into(),
            expected: "F32 [2, 8]".into(),
        },
        CheckpointError::Stray {
            path: shard(),
            key: key(),
        },
        CheckpointError::Checksum {
            path: shard(),
            key: key(),
            begin: 16_384,
            end: 32_768,
            found: 0x8c6b_7a0e,
            expected: 0x1b2f_0c44,
        },
        CheckpointError::Read {
            path: shard(),
            key: key(),
            source: io_fault(5),
        },
        CheckpointError::Refused {
            report: Box::new(LoadReport {
                unexpected: vec![key()],
                ..Default::default()
            }),
        },
        CheckpointError::ByteCount {
            key: key(),
            found: 64,
            expected: 128,
        },
        CheckpointError::Alpha {
            path: "layers.0.mlp.experts.down_proj".into(),
            alpha: f64::NAN,
        },
        CheckpointError::LastGeneration {
            path: path(),
            generation: u64::MAX,
        },
        CheckpointError::MissingPart {
            place: there.clone(),
            path: "saved/g3-ep0-etp1-dp0.part.json".into(),
        },
        CheckpointError::Disagreement {
            place: there.clone(),
            what: "step",
            found: "20".into(),
            expected: "30".into(),
        },
        CheckpointError::LayoutDiffers {
            key: key(),
            first: here.clone(),
            second: there.clone(),
        },
        CheckpointError::UnequalReplicas {
            key: key(),
            first: here,
            second: there,
            begin: 0,
            end: 16_384,
        },
    ]
}
