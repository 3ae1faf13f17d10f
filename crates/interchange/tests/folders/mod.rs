//! Where the fixtures lie, and copies of them to damage.
#![allow(dead_code, reason = "each test binary uses its own part")]

use moe_lora_interchange::{HubModel, ModelConfig, PeftAdapter};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub const STACKED: [&str; 3] = [
    "tests/fixtures/hf/qwen3_moe",
    "tests/fixtures/hf/qwen2_moe",
    "tests/fixtures/hf/olmoe",
];
pub const PER_EXPERT: &str = "tests/fixtures/hf_older/qwen3_moe";
pub const DORA: &str = "tests/fixtures/hf_older/olmoe_dora";
pub const CONSTITUTION: &str = "examples/finetune/assets/qwen3-moe-constitution";

pub fn at(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(folder)
}

pub fn open(folder: &str) -> HubModel {
    HubModel::open(&at(folder)).unwrap()
}

/// A temporary copy of the files directly in `folder`.
pub fn copy(folder: &str) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(at(folder)).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    copy
}

/// Sets `field` of a JSON file; `None` removes it.
pub fn set(file: &Path, field: &str, value: Option<Value>) {
    let mut json: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let fields = json.as_object_mut().unwrap();
    match value {
        Some(value) => fields.insert(field.to_owned(), value),
        None => fields.remove(field),
    };
    fs::write(file, json.to_string()).unwrap();
}

/// A safetensors file of the given header and as many zero bytes of data.
pub fn write_raw(file: &Path, header: &[u8], data: usize) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + data, 0);
    fs::write(file, bytes).unwrap();
}

pub fn open_error(folder: &TempDir) -> String {
    HubModel::open(folder.path()).unwrap_err().to_string()
}

pub fn adapter_error(folder: &TempDir, config: &ModelConfig) -> String {
    PeftAdapter::read(folder.path(), config)
        .unwrap_err()
        .to_string()
}

#[track_caller]
pub fn assert_contains(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    assert!(message.ends_with(')'), "no remedy in: {message}");
}
