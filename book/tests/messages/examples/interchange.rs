//! Model and adapter folders.

use burn_moe_lora::checkpoint::Dtype;
use burn_moe_lora::interchange::{InterchangeError, PeftLayout};

use crate::{Examples, examples};

const GATE: &str = "model.layers.0.mlp.experts.gate_proj";

pub fn all() -> Vec<Examples> {
    let source = "crates/interchange/src/error.rs";
    let heading = "Models and adapter files";
    vec![examples(source, "InterchangeError", heading, interchange())]
}

fn interchange() -> Vec<InterchangeError> {
    let linear = || GATE.to_owned();
    let (index, adapter) = (
        || "model.safetensors.index.json".into(),
        || "adapter_model.safetensors".into(),
    );
    let names = || vec!["experts.0.gate_proj.lora_A.weight".to_owned()];
    let layer = 1;
    vec![
        InterchangeError::NotExperts {
            linear: "model.layers.0.self_attn.q_proj".into(),
        },
        InterchangeError::Nonlinear { linear: linear() },
        InterchangeError::MixedScales { linear: linear() },
        InterchangeError::HalfGateUp { layer },
        InterchangeError::InnerShared {
            layer,
            projection: "down_proj",
        },
        InterchangeError::StoredDtype {
            key: format!("{GATE}.lora_A"),
            dtype: Dtype::F64,
        },
        InterchangeError::ShardName {
            path: index(),
            name: "../other.safetensors".into(),
        },
        InterchangeError::ShardIndex {
            path: index(),
            shard: "model-00001-of-00002.safetensors".into(),
            tensor: "lm_head.weight".into(),
        },
        InterchangeError::Axes {
            name: "lora_B",
            found: vec![4, 8],
            expected: "[experts, d_out, rank]".into(),
        },
        InterchangeError::LayerRange {
            layer: 2,
            layers: 2,
        },
        InterchangeError::DenseLayer { layer: 0, first: 3 },
        InterchangeError::Quantized {
            path: "config.json".into(),
            name: "quantization_config".into(),
        },
        InterchangeError::UnexpectedBiases {
            layer,
            model_type: "qwen3_moe",
        },
        InterchangeError::Occupied {
            path: "merged/model.safetensors".into(),
        },
        InterchangeError::MissingTensors {
            path: adapter(),
            names: names(),
            more: true,
        },
        InterchangeError::UnexpectedTensors {
            path: adapter(),
            names: names(),
            more: false,
        },
        InterchangeError::NoExpertModules {
            model_type: "gpt_oss",
        },
        InterchangeError::NonFinite { expert: 3, row: 7 },
        InterchangeError::SeparateInStacked { layer },
        InterchangeError::Inexpressible {
            layer,
            projection: "down",
            held: "a magnitude",
            layout: PeftLayout::Stacked,
            remedy: "write it with PeftLayout::PerExpert",
        },
        InterchangeError::MixedMagnitudes {
            layer,
            projection: "down",
        },
        InterchangeError::FusedScales {
            layer,
            gate: 2.0,
            up: 4.0,
        },
        InterchangeError::EmptyAdapter,
    ]
}
