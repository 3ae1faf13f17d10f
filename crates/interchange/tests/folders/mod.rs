//! Where the fixtures lie, and copies of them to damage.
#![allow(dead_code, reason = "each test binary uses its own part")]

use moe_lora_interchange::{
    ExpertAdapter, FactorPair, GateUp, HostTensor, HubModel, ModelConfig, PeftAdapter,
};
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::Value;
use std::collections::BTreeMap;
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

/// What the file puts before the name of a tensor of the first layer's experts.
pub const EXPERTS: &str = "base_model.model.model.layers.0.mlp.experts";
pub const WEIGHTS: &str = "adapter_model.safetensors";
pub const SETTINGS: &str = "adapter_config.json";

/// Shape and bytes by name.
pub type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

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

/// Every adapter of the fixtures with its model's configuration: the stacked ones, then those of
/// one pair per expert.
pub fn adapters() -> Vec<(String, ModelConfig)> {
    let mut found: Vec<(String, &str)> = STACKED.map(|m| (format!("{m}/adapter"), m)).into();
    for name in ["adapter_start", "adapter_sgd"] {
        found.push((format!("{CONSTITUTION}/{name}"), CONSTITUTION));
    }
    for model in [PER_EXPERT, DORA] {
        found.push((format!("{model}/adapter"), model));
    }
    let configs = found.into_iter();
    configs
        .map(|(folder, model)| (folder, open(model).config().clone()))
        .collect()
}

pub fn read(folder: &str, config: &ModelConfig) -> PeftAdapter {
    PeftAdapter::read(&at(folder), config).unwrap()
}

pub fn tensors(folder: &Path) -> Tensors {
    let bytes = fs::read(folder.join(WEIGHTS)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let views = file.iter();
    views
        .map(|(name, view)| (name.to_owned(), (view.shape().into(), view.data().into())))
        .collect()
}

/// Rewrites the tensors of an adapter.
pub fn edit(folder: &Path, change: impl FnOnce(&mut Tensors)) {
    let mut named = tensors(folder);
    change(&mut named);
    let views = named.iter().map(|(name, (shape, bytes))| {
        let view = TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
        (name, view.unwrap())
    });
    serialize_to_file(views, None, &folder.join(WEIGHTS)).unwrap();
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.as_chunks().0.iter();
    chunks.map(|&le| f32::from_le_bytes(le)).collect()
}

pub fn settings(folder: &Path) -> Value {
    serde_json::from_slice(&fs::read(folder.join(SETTINGS)).unwrap()).unwrap()
}

/// Different values without a pattern that a permutation could keep.
pub fn noise(shape: impl Into<Vec<usize>>, seed: u32) -> HostTensor {
    let shape = shape.into();
    let len = shape.iter().product::<usize>() as u32;
    let hash = |i: u32| (i + 1).wrapping_mul(2654435761).wrapping_add(seed * 97) >> 8;
    let values = (0..len).map(|i| hash(i) as f32 / 8388608.0 - 1.0).collect();
    HostTensor::new(shape, values).unwrap()
}

/// A pair of that rank for every expert.
pub fn noise_pair(experts: usize, [d_out, d_in]: [usize; 2], rank: usize, seed: u32) -> FactorPair {
    let a = noise([experts, rank, d_in], seed);
    let b = noise([experts, d_out, rank], seed + 1);
    FactorPair::new(a, b, 2.0 * rank as f64).unwrap()
}

/// An adapter on all layers of a model, one pair over gate and up.
pub fn noise_adapter(config: &ModelConfig, rank: usize) -> PeftAdapter {
    let (hidden, ffn) = (config.hidden_size, config.moe_intermediate_size);
    let layer = |layer: usize| {
        let seed = 10 * layer as u32;
        let gate_up = noise_pair(config.num_experts, [2 * ffn, hidden], rank, seed);
        let down = noise_pair(config.num_experts, [hidden, ffn], rank, seed + 5);
        ExpertAdapter {
            gate_up: Some(GateUp::Fused(gate_up)),
            down: Some(down),
        }
    };
    PeftAdapter {
        rslora: false,
        layers: (0..config.num_hidden_layers)
            .map(|l| (l, layer(l)))
            .collect(),
    }
}

/// `s B A` of every expert, `[E, d_out, d_in]` in one row.
pub fn deltas(adapter: &PeftAdapter, pair: &FactorPair) -> Vec<f64> {
    let experts = pair.a.shape()[0].max(pair.b.shape()[0]);
    let (rank, d_in, d_out) = (pair.rank(), pair.a.shape()[2], pair.b.shape()[1]);
    let own = |tensor: &HostTensor, e: usize| tensor.outer(e % tensor.shape()[0]).to_vec();
    let mut deltas = Vec::with_capacity(experts * d_out * d_in);
    for e in 0..experts {
        let (a, b) = (own(&pair.a, e), own(&pair.b, e));
        for (o, i) in (0..d_out).flat_map(|o| (0..d_in).map(move |i| (o, i))) {
            let terms = (0..rank).map(|k| f64::from(b[o * rank + k]) * f64::from(a[k * d_in + i]));
            deltas.push(adapter.scale(pair) * terms.sum::<f64>());
        }
    }
    deltas
}
