//! Adapters, layers and kernels.

use burn::tensor::DType;
use burn_moe_lora::adapters::{Activation, AdapterError, ClipError, LoraConfig, ResumeError};
use burn_moe_lora::experts::ExpertsError;
use burn_moe_lora::kernels::RowGroups;
use burn_moe_lora::parallel::TopologyError;

use crate::{Examples, examples};

const DOWN: &str = "layers.0.mlp.experts.down_proj";

fn indivisible() -> TopologyError {
    TopologyError::Indivisible {
        what: "lora rank",
        extent: 6,
        by: "etp_size",
        size: 4,
    }
}

pub fn all() -> Vec<Examples> {
    let adapters = "crates/adapters/src/error.rs";
    vec![
        examples(adapters, "AdapterError", "Building adapters", adapter()),
        examples(adapters, "ClipError", "Clipping gradients", clip()),
        examples(
            adapters,
            "ResumeError",
            "Saving and loading adapters",
            resume(),
        ),
        examples(
            "crates/experts/src/error.rs",
            "ExpertsError",
            "Building layers",
            experts(),
        ),
        examples(
            "kernels-cubecl/src/groups.rs",
            "GroupError",
            "Rows of experts",
            [RowGroups::new(&[3, 1], 5).unwrap_err()],
        ),
    ]
}

fn adapter() -> Vec<AdapterError> {
    let path = || DOWN.to_owned();
    vec![
        AdapterError::Topology {
            path: path(),
            reason: indivisible(),
        },
        AdapterError::ZeroRank,
        AdapterError::Alpha { alpha: f64::NAN },
        LoraConfig::new(8, 16.0)
            .with_dora(true)
            .with_activation(Activation::Silu)
            .check()
            .unwrap_err(),
        AdapterError::RankPerExpert { rank: 8, top_k: 3 },
        AdapterError::LearningRateRatio { ratio: 0.0 },
        AdapterError::PissaRank {
            path: path(),
            rank: 16,
            shape: [32, 8],
        },
        AdapterError::PissaBase {
            path: path(),
            dtype: DType::U8,
        },
        AdapterError::NoSvd {
            path: path(),
            expert: Some(3),
        },
        AdapterError::Dropout { probability: 1.0 },
        AdapterError::unknown_target("down_prj", &[DOWN]),
        AdapterError::AlreadyAdapted {
            path: "mlp.experts.gate_proj".into(),
            other: "mlp.experts.gate_up_proj".into(),
        },
        AdapterError::NoTargets,
        AdapterError::NoOuter { path: path() },
        AdapterError::Name { name: "a.b".into() },
        AdapterError::NameTaken {
            path: path(),
            name: "fr".into(),
            other: "fr".into(),
        },
        AdapterError::UnknownName {
            name: "fx".into(),
            hint: ", did you mean \"fr\"?".into(),
            known: vec!["de".into(), "fr".into()],
        },
        AdapterError::Unlike {
            name: "fr".into(),
            other: "de".into(),
            setting: "activation",
            found: "Silu".into(),
            expected: "Identity".into(),
        },
        AdapterError::CombinedDora {
            path: path(),
            name: "fr".into(),
        },
        AdapterError::Weights {
            name: "both".into(),
            weights: vec![f64::NAN, 1.0],
        },
        AdapterError::Several {
            path: path(),
            names: vec!["de".into(), "fr".into()],
        },
        AdapterError::AllExcluded {
            excluded: vec!["*.layers.0.*".into()],
        },
        AdapterError::Unmergeable {
            path: path(),
            activation: Activation::Silu,
        },
        AdapterError::NoMagnitude { path: path() },
        AdapterError::Shape {
            path: path(),
            found: 48,
            expected: vec![4, 2, 8],
        },
        AdapterError::NoAdapters,
        AdapterError::NoGradient {
            linears: vec![path()],
        },
    ]
}

fn clip() -> [ClipError; 2] {
    [
        ClipError::MaxNorm { max_norm: 0.0 },
        ClipError::NotFinite { norm: f64::NAN },
    ]
}

fn resume() -> Vec<ResumeError> {
    let linear = || DOWN.to_owned();
    let factor = || format!("{DOWN}.lora_A");
    vec![
        ResumeError::OtherRank { rank: 1 },
        ResumeError::Dtype {
            path: factor(),
            dtype: DType::U8,
        },
        ResumeError::StoredSettings {
            linear: linear(),
            stored: "rank=8, alpha=16".into(),
            ranks: [Some(8), Some(4)],
        },
        ResumeError::StoredMagnitude {
            linear: linear(),
            dora: true,
        },
        ResumeError::StoredStart {
            path: format!("{DOWN}.lora_A.start"),
            pissa: true,
        },
        ResumeError::OtherStart {
            path: format!("{DOWN}.lora_A.start"),
        },
        ResumeError::Settings {
            linear: linear(),
            stored: "rank=8, alpha=16".into(),
            expected: "rank=4, alpha=16".into(),
        },
        ResumeError::OtherOptimizer {
            path: factor(),
            stored: "adamw".into(),
            optimizer: "sgd",
        },
        ResumeError::OptimizerState {
            path: factor(),
            optimizer: "adamw",
            parts: vec!["moment_1".into()],
        },
    ]
}

fn experts() -> Vec<ExpertsError> {
    let path = || "layers.0.mlp".to_owned();
    vec![
        ExpertsError::Topology {
            path: path(),
            reason: TopologyError::Indivisible {
                what: "num_experts",
                extent: 60,
                by: "ep_size",
                size: 8,
            },
        },
        ExpertsError::TopK {
            path: path(),
            top_k: 9,
            num_experts: 8,
        },
        ExpertsError::TopkGroup {
            path: path(),
            topk_group: 1,
            n_group: 8,
            size: 4,
            top_k: 6,
            least: 2,
        },
        ExpertsError::UnweighedBias { path: path() },
        ExpertsError::Shape {
            path: path(),
            found: 48,
            expected: vec![8, 16],
        },
        ExpertsError::Shared {
            path: path(),
            found: "absent",
            expected: "present with a gate",
        },
    ]
}
