//! A slow MoE block on one device, in double precision and plain loops, with the adapter folded into the weights.

use std::path::Path;

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::interchange::QkNorm;
use finetune::config::DenseConfig;
use serde_json::Value;

use crate::files::{Tensors, read_json, read_tensors};

fn size(config: &Value, name: &str) -> usize {
    config[name].as_u64().unwrap() as usize
}

pub fn dense_config(config: &Value) -> DenseConfig {
    let kind = config["model_type"].as_str().unwrap();
    let (hidden, heads) = (
        size(config, "hidden_size"),
        size(config, "num_attention_heads"),
    );
    DenseConfig {
        vocab: size(config, "vocab_size"),
        hidden,
        layers: size(config, "num_hidden_layers"),
        heads,
        kv_heads: size(config, "num_key_value_heads"),
        head_dim: match config.get("head_dim") {
            Some(_) => size(config, "head_dim"),
            None => hidden / heads,
        },
        eps: config["rms_norm_eps"].as_f64().unwrap(),
        rope_theta: config["rope_parameters"]["rope_theta"].as_f64().unwrap(),
        qkv_bias: config["qkv_bias"].as_bool().unwrap_or(false),
        qk_norm: match kind {
            "qwen3_moe" => QkNorm::PerHead,
            "olmoe" => QkNorm::Full,
            _ => QkNorm::None,
        },
        tie: config["tie_word_embeddings"].as_bool().unwrap(),
    }
}

/// `[d_out, d_in]` in double precision.
#[derive(Clone)]
struct Matrix {
    d_in: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn of(tensors: &Tensors, name: &str) -> Self {
        let (shape, values) = &tensors[name];
        Self {
            d_in: shape[1],
            values: values.iter().map(|&v| f64::from(v)).collect(),
        }
    }

    fn apply(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.d_in);
        let rows = self.values.chunks_exact(self.d_in);
        rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
            .collect()
    }

    /// Adds `scale * B A` of one expert of a stacked PEFT adapter; the rows of B begin at `first_row`.
    fn fold(
        &mut self,
        a: &Matrix,
        b: &Matrix,
        expert: usize,
        experts: usize,
        first_row: usize,
        scale: f64,
    ) {
        let rank = a.values.len() / a.d_in / experts;
        let d_in = self.d_in;
        for (row, weights) in self.values.chunks_exact_mut(d_in).enumerate() {
            for i in 0..rank {
                // The expert is the slowest index of A's rows and the fastest of B's columns.
                let factor = scale * b.values[(first_row + row) * b.d_in + i * experts + expert];
                let a_row = &a.values[(expert * rank + i) * d_in..][..d_in];
                for (weight, a) in weights.iter_mut().zip(a_row) {
                    *weight += factor * a;
                }
            }
        }
    }
}

struct Expert {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Expert {
    fn of(tensors: &Tensors, name: &str) -> Self {
        let part = |part: &str| Matrix::of(tensors, &format!("{name}.{part}_proj.weight"));
        Self {
            gate: part("gate"),
            up: part("up"),
            down: part("down"),
        }
    }

    fn apply(&self, x: &[f64]) -> Vec<f64> {
        let gate = self.gate.apply(x);
        let up = self.up.apply(x);
        let inner: Vec<f64> = gate
            .iter()
            .zip(&up)
            .map(|(g, u)| g * sigmoid(*g) * u)
            .collect();
        self.down.apply(&inner)
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The MoE block of one layer.
pub struct SlowMoe {
    router: Matrix,
    experts: Vec<Expert>,
    shared: Option<(Expert, Matrix)>,
    top_k: usize,
    renormalise: bool,
}

impl SlowMoe {
    /// Reads the block of a layer and folds the adapter in the folder, if one is given.
    pub fn of(tensors: &Tensors, config: &Value, layer: usize, adapter: Option<&Path>) -> Self {
        let name = format!("model.layers.{layer}.mlp");
        let router = Matrix::of(tensors, &format!("{name}.gate.weight"));
        let count = router.values.len() / router.d_in;
        let mut experts: Vec<Expert> = (0..count)
            .map(|expert| Expert::of(tensors, &format!("{name}.experts.{expert}")))
            .collect();
        if let Some(folder) = adapter {
            let settings = read_json(&folder.join("adapter_config.json"));
            let scale = settings["lora_alpha"].as_f64().unwrap() / settings["r"].as_f64().unwrap();
            let stacked = read_tensors(&folder.join("adapter_model.safetensors"));
            let part = |part: &str| {
                Matrix::of(
                    &stacked,
                    &format!("base_model.model.{name}.experts.{part}.weight"),
                )
            };
            let gate_up = [part("base_layer.lora_A"), part("base_layer.lora_B")];
            let down = [part("lora_A"), part("lora_B")];
            for (index, expert) in experts.iter_mut().enumerate() {
                let inner = expert.gate.values.len() / expert.gate.d_in;
                let ([a, b], [down_a, down_b]) = (&gate_up, &down);
                expert.gate.fold(a, b, index, count, 0, scale);
                expert.up.fold(a, b, index, count, inner, scale);
                expert.down.fold(down_a, down_b, index, count, 0, scale);
            }
        }
        let shared_gate = format!("{name}.shared_expert_gate.weight");
        let shared = tensors.contains_key(&shared_gate).then(|| {
            let expert = Expert::of(tensors, &format!("{name}.shared_expert"));
            (expert, Matrix::of(tensors, &shared_gate))
        });
        Self {
            router,
            experts,
            shared,
            top_k: size(config, "num_experts_per_tok"),
            renormalise: config["norm_topk_prob"].as_bool().unwrap(),
        }
    }

    fn row(&self, x: &[f64]) -> Vec<f64> {
        let exponentials: Vec<f64> = self.router.apply(x).into_iter().map(f64::exp).collect();
        let total: f64 = exponentials.iter().sum();
        let mut ranked: Vec<(usize, f64)> =
            exponentials.iter().map(|e| e / total).enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked.truncate(self.top_k);
        let kept: f64 = match self.renormalise {
            true => ranked.iter().map(|(_, weight)| weight).sum(),
            false => 1.0,
        };
        let mut y = vec![0.0; x.len()];
        let mut add = |weight: f64, term: Vec<f64>| {
            for (y, term) in y.iter_mut().zip(term) {
                *y += weight * term;
            }
        };
        for (expert, weight) in ranked {
            add(weight / kept, self.experts[expert].apply(x));
        }
        if let Some((expert, gate)) = &self.shared {
            add(sigmoid(gate.apply(x)[0]), expert.apply(x));
        }
        y
    }

    pub fn forward<B: Backend>(&self, tokens: Tensor<B, 2>) -> Tensor<B, 2> {
        let shape = tokens.dims();
        let device = tokens.device();
        let values = tokens.into_data().convert::<f64>().to_vec::<f64>().unwrap();
        let output: Vec<f32> = values
            .chunks_exact(shape[1])
            .flat_map(|row| self.row(row))
            .map(|v| v as f32)
            .collect();
        Tensor::from_data(TensorData::new(output, shape), &device)
    }
}
