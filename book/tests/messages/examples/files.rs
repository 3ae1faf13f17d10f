//! Single files and tensors.

use burn_moe_lora::checkpoint::Dtype;
use burn_moe_lora::interchange::FileError;

use super::{io_fault, json_fault};
use crate::{Examples, examples};

const TENSOR: &str = "model.layers.0.mlp.experts.0.down_proj.weight";

pub fn all() -> Vec<Examples> {
    let source = "crates/files/src/error.rs";
    vec![examples(source, "FileError", "Files and tensors", file())]
}

fn file() -> Vec<FileError> {
    let (name, tensors) = (|| TENSOR.to_owned(), || "model.safetensors".into());
    let (config, field) = (|| "config.json".into(), || "num_experts".to_owned());
    vec![
        FileError::Io {
            action: "read",
            path: config(),
            source: io_fault(2),
        },
        FileError::NotAFile { path: config() },
        FileError::JsonTooLarge {
            path: config(),
            bytes: 200_000_000,
            limit: 100_000_000,
        },
        FileError::Json {
            path: config(),
            source: json_fault(),
        },
        FileError::MissingField {
            path: config(),
            field: field(),
        },
        FileError::InvalidField {
            path: config(),
            field: field(),
            value: "0".into(),
            expected: "a positive number".into(),
        },
        FileError::UnsupportedField {
            path: config(),
            field: "model_type".into(),
            value: "llama".into(),
            supported: "qwen3_moe, qwen2_moe, olmoe, mixtral, deepseek_v3, gpt_oss".into(),
        },
        FileError::Header {
            path: tensors(),
            source: json_fault(),
        },
        FileError::Length {
            path: tensors(),
            found: 1_000,
            declared: 1_024,
        },
        FileError::unknown_tensor(
            &tensors(),
            "model.layers.0.mlp.experts.0.down_prj.weight",
            [TENSOR],
        ),
        FileError::UnsupportedDtype {
            path: tensors(),
            name: name(),
            dtype: Dtype::F8_E4M3,
        },
        FileError::Shape {
            name: name(),
            found: vec![16, 8],
            expected: vec![8, 16],
        },
        FileError::ElementCount {
            shape: vec![8, 16],
            len: 64,
        },
        FileError::Dtype {
            name: name(),
            found: Dtype::F32,
            expected: Dtype::BF16,
        },
        FileError::Unwritten {
            path: tensors(),
            name: name(),
        },
        FileError::Overflow {
            name: name(),
            value: 70_000.0,
            dtype: Dtype::F16,
        },
    ]
}
