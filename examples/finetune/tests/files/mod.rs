//! Recorded models and what was recorded of them.

// Every test binary has its own copy of this module and uses a part of it.
#![allow(dead_code, unused_imports)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub use finetune::args::asset;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// Tensors of a file by name: shape and row-major values; integers are given as floats.
pub type Tensors = HashMap<String, (Vec<usize>, Vec<f32>)>;

pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(path)
}

pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

pub fn read_tensors(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.iter()
        .map(|(name, view)| {
            let words = view.data().chunks_exact(4).map(|w| w.try_into().unwrap());
            let values = match view.dtype() {
                Dtype::F32 => words.map(f32::from_le_bytes).collect(),
                Dtype::I32 => words.map(|w| i32::from_le_bytes(w) as f32).collect(),
                other => panic!("{name} is {other:?}"),
            };
            (name.to_string(), (view.shape().to_vec(), values))
        })
        .collect()
}

/// Largest difference relative to the largest expected value; where all of them are zero, only zeros are equal. NaN for a NaN.
pub fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |max, v| max.max(v.abs()));
    let differences = found.iter().zip(expected).map(|(f, e)| (f - e).abs());
    let difference = differences.fold(0f32, |a, b| if a.is_nan() || b <= a { a } else { b });
    if difference == 0.0 {
        0.0
    } else {
        difference / largest
    }
}
