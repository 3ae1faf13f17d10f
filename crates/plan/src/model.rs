//! The sizes of a model, and its parameters by what a topology does with them.

use std::path::Path;

use moe_lora_files::{FileError, JsonFile};
use moe_lora_interchange::ModelConfig;
use serde::Serialize;

use crate::PlanError;
use crate::attention::Attention;

/// A model's sizes, from its `config.json`. Counts are `f64`: exact up to 2^53, and no product of
/// sizes overflows.
#[derive(Clone, Debug)]
pub struct ModelShape {
    /// The sizes of its MoE blocks, and its switches.
    pub config: ModelConfig,
    pub(crate) attention: Attention,
    /// Query heads.
    pub(crate) heads: usize,
    /// Intermediate size of the layers without experts.
    pub(crate) dense_intermediate: f64,
}

/// Numbers of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Parameters {
    /// Of routed experts; over EP x ETP.
    pub experts: f64,
    /// Of attention, shared experts and dense layers; over TP.
    pub dense: f64,
    /// Of embedding, head, norms and routers; whole on every rank.
    pub replicated: f64,
}

impl Parameters {
    /// All of them.
    pub fn total(&self) -> f64 {
        self.experts + self.dense + self.replicated
    }
}

impl ModelShape {
    /// Reads a `config.json`, or that of a folder. Quantised weights are read as if they were not:
    /// only sizes are asked for.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, lacks a size or is of a family that is not known.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        let path = match path.is_dir() {
            true => path.join("config.json"),
            false => path.to_owned(),
        };
        let file = JsonFile::read(path)?;
        let config = ModelConfig::from_file(&file)?;
        let has_dense = config.moe_layers().count() < config.num_hidden_layers;
        Ok(Self {
            attention: Attention::read(&config, &file)?,
            heads: size(&file, "num_attention_heads")? as usize,
            dense_intermediate: match has_dense {
                true => size(&file, "intermediate_size")?,
                false => 0.0,
            },
            config,
        })
    }

    /// Layers that have experts.
    pub fn moe_layers(&self) -> f64 {
        self.config.moe_layers().count() as f64
    }

    /// Layers that have none.
    pub fn dense_layers(&self) -> f64 {
        self.config.num_hidden_layers as f64 - self.moe_layers()
    }

    /// Hidden size `H`.
    pub(crate) fn hidden(&self) -> f64 {
        self.config.hidden_size as f64
    }

    /// Intermediate size `F` of a routed expert.
    pub(crate) fn intermediate(&self) -> f64 {
        self.config.moe_intermediate_size as f64
    }

    /// Intermediate size of the shared expert, 0 without one.
    pub(crate) fn shared_intermediate(&self) -> f64 {
        let shared = self.config.shared_expert;
        shared.map_or(0.0, |shared| shared.intermediate_size as f64)
    }

    /// Counted tensor by tensor as transformers holds them; without heads for further tokens.
    pub fn parameters(&self) -> Parameters {
        let config = &self.config;
        let (hidden, ffn) = (self.hidden(), self.intermediate());
        let (layers, experts) = (config.num_hidden_layers as f64, config.num_experts as f64);
        let (moe, dense) = (self.moe_layers(), self.dense_layers());
        let model_type = config.family.model_type;
        let expert_biases = if model_type == "gpt_oss" {
            2.0 * ffn + hidden
        } else {
            0.0
        };
        let router_bias = if ["gpt_oss", "deepseek_v3"].contains(&model_type) {
            experts
        } else {
            0.0
        };
        let shared_gate = match config.shared_expert {
            Some(shared) if shared.gated => hidden,
            _ => 0.0,
        };
        let embeddings = if config.tie_word_embeddings { 1.0 } else { 2.0 };
        Parameters {
            experts: moe * experts * (3.0 * hidden * ffn + expert_biases),
            dense: layers * self.attention.projections
                + 3.0
                    * hidden
                    * (moe * self.shared_intermediate() + dense * self.dense_intermediate),
            replicated: embeddings * config.vocab_size as f64 * hidden
                + layers * (2.0 * hidden + self.attention.rest)
                + hidden
                + moe * (experts * hidden + router_bias + shared_gate),
        }
    }
}

/// A size from 1 to 2^31 - 1.
pub(crate) fn size(file: &JsonFile, field: &str) -> Result<f64, FileError> {
    let value: u64 = file.require(field)?;
    match (1..1 << 31).contains(&value) {
        true => Ok(value as f64),
        false => Err(file.invalid(field, value, "a number from 1 to 2147483647")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str) -> ModelShape {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/configs")
            .join(name);
        ModelShape::read(&folder).unwrap()
    }

    /// The totals are those of the published files: the sum over all tensors, for DeepSeek-V3
    /// without its head for a further token.
    #[test]
    fn parameters_are_those_of_the_published_models() {
        for (name, total) in [
            ("qwen3-30b-a3b", 30_532_122_624.0),
            ("qwen1.5-moe-a2.7b", 14_315_784_192.0),
            ("olmoe-1b-7b", 6_919_161_856.0),
            ("mixtral-8x7b", 46_702_792_704.0),
            ("deepseek-v3", 671_026_419_200.0),
            ("gpt-oss-20b", 20_914_757_184.0),
            ("gpt-oss-120b", 116_829_156_672.0),
        ] {
            assert_eq!(config(name).parameters().total(), total, "{name}");
        }
    }
}
