//! The sizes and switches of a Mixture-of-Experts model, from its `config.json`.

use crate::InterchangeError;
use moe_lora_files::{FileError, JsonFile};
use std::path::Path;

/// Largest size of an axis; keeps every product of two sizes inside 64 bits.
const MAX_SIZE: usize = i32::MAX as usize;
/// Largest number of layers or experts.
const MAX_COUNT: usize = 1 << 16;

/// A model family, by the `model_type` of its configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `qwen3_moe`: per-head norms on q and k.
    Qwen3Moe,
    /// `qwen2_moe`: a gated shared expert beside the routed ones.
    Qwen2Moe,
    /// `olmoe`: norms over all of q and k.
    Olmoe,
}

impl Family {
    const ALL: [Self; 3] = [Self::Qwen3Moe, Self::Qwen2Moe, Self::Olmoe];

    /// The family's `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Family::Qwen3Moe => "qwen3_moe",
            Family::Qwen2Moe => "qwen2_moe",
            Family::Olmoe => "olmoe",
        }
    }
}

/// The sizes and switches of a model, checked against each other.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The model family.
    pub family: Family,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Hidden size `H`.
    pub hidden_size: usize,
    /// Decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head; `hidden_size / num_attention_heads` where the file names none.
    pub head_dim: usize,
    /// Routed experts `E` of each layer.
    pub num_experts: usize,
    /// Experts `K` that each token is sent to.
    pub num_experts_per_tok: usize,
    /// Intermediate size `F` of one routed expert.
    pub moe_intermediate_size: usize,
    /// Whether the `K` router weights of a token are divided by their sum.
    pub norm_topk_prob: bool,
    /// Added to the mean square inside every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// Intermediate size of the shared expert, in the family that has one.
    pub shared_expert_intermediate_size: Option<usize>,
    /// Whether the attention projections have biases: q, k and v in [`Family::Qwen2Moe`], also the
    /// output projection in the others.
    pub attention_bias: bool,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
}

impl ModelConfig {
    /// Reads `config.json` in `folder`, as written by transformers 4 or 5.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, lacks a field, holds values that contradict each other, or
    /// asks for something that is not supported: another family or activation, a scaled rotary
    /// embedding, clipped q, k and v, a sliding window, or dense layers among the sparse ones.
    pub fn read(folder: &Path) -> Result<Self, InterchangeError> {
        let file = JsonFile::read(folder.join("config.json"))?;
        let family = family(&file)?;
        refuse_unsupported(&file)?;

        let size = |field: &str| count(&file, field, MAX_SIZE);
        let hidden_size = size("hidden_size")?;
        let num_attention_heads = size("num_attention_heads")?;
        let num_key_value_heads = size("num_key_value_heads")?;
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads={num_attention_heads}");
            let field = "num_key_value_heads";
            return Err(file.invalid(field, num_key_value_heads, expected).into());
        }
        let head_dim = match file.value("head_dim") {
            Some(_) => size("head_dim")?,
            None if hidden_size.is_multiple_of(num_attention_heads) => {
                hidden_size / num_attention_heads
            }
            None => {
                let expected =
                    format!("a divisor of hidden_size={hidden_size}, as there is no head_dim");
                let field = "num_attention_heads";
                return Err(file.invalid(field, num_attention_heads, expected).into());
            }
        };
        let num_experts = num_experts(&file)?;
        Ok(Self {
            family,
            vocab_size: size("vocab_size")?,
            hidden_size,
            num_hidden_layers: count(&file, "num_hidden_layers", MAX_COUNT)?,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            num_experts,
            num_experts_per_tok: count(&file, "num_experts_per_tok", num_experts)?,
            moe_intermediate_size: size(match family {
                Family::Olmoe => "intermediate_size",
                Family::Qwen2Moe | Family::Qwen3Moe => "moe_intermediate_size",
            })?,
            norm_topk_prob: file.require("norm_topk_prob")?,
            rms_norm_eps: positive(&file, "rms_norm_eps")?,
            rope_theta: rope_theta(&file)?,
            shared_expert_intermediate_size: match family {
                Family::Qwen2Moe => Some(size("shared_expert_intermediate_size")?),
                Family::Qwen3Moe | Family::Olmoe => None,
            },
            attention_bias: match family {
                Family::Qwen2Moe => file.get("qkv_bias")?.unwrap_or(true),
                Family::Qwen3Moe | Family::Olmoe => file.get("attention_bias")?.unwrap_or(false),
            },
            tie_word_embeddings: file.get("tie_word_embeddings")?.unwrap_or(false),
            max_position_embeddings: size("max_position_embeddings")?,
        })
    }
}

fn family(file: &JsonFile) -> Result<Family, FileError> {
    let found: String = file.require("model_type")?;
    let known = Family::ALL.map(Family::model_type);
    Family::ALL
        .into_iter()
        .find(|family| family.model_type() == found)
        .ok_or_else(|| file.unsupported("model_type", format!("{found:?}"), known.join(", ")))
}

/// Refuses what would change the numbers and is not carried by [`ModelConfig`].
fn refuse_unsupported(file: &JsonFile) -> Result<(), FileError> {
    let activation: String = file.require("hidden_act")?;
    if activation != "silu" {
        return Err(file.unsupported("hidden_act", format!("{activation:?}"), "\"silu\""));
    }
    if let Some(value) = file.value("clip_qkv") {
        return Err(file.unsupported("clip_qkv", value, "null"));
    }
    if file.get("use_sliding_window")? == Some(true) {
        return Err(file.unsupported("use_sliding_window", true, false));
    }
    let layer_types: Vec<String> = file.get("layer_types")?.unwrap_or_default();
    if let Some(other) = layer_types.iter().find(|kind| *kind != "full_attention") {
        return Err(file.unsupported("layer_types", format!("{other:?}"), "\"full_attention\""));
    }
    if let Some(step) = file.get::<i64>("decoder_sparse_step")?
        && step != 1
    {
        return Err(file.unsupported("decoder_sparse_step", step, 1));
    }
    let dense: Vec<usize> = file.get("mlp_only_layers")?.unwrap_or_default();
    if !dense.is_empty() {
        return Err(file.unsupported("mlp_only_layers", format!("{dense:?}"), "[]"));
    }
    Ok(())
}

/// transformers 5 nests the settings of the rotary embedding, transformers 4 has `rope_theta`
/// beside an optional `rope_scaling`, whose type was first called `type`.
fn rope_theta(file: &JsonFile) -> Result<f64, FileError> {
    for field in [
        "rope_parameters.rope_type",
        "rope_scaling.rope_type",
        "rope_scaling.type",
    ] {
        if let Some(kind) = file.value(field)
            && kind != "default"
        {
            return Err(file.unsupported(field, kind, "\"default\""));
        }
    }
    let part = "rope_parameters.partial_rotary_factor";
    if let Some(factor) = file.get::<f64>(part)?
        && factor != 1.0
    {
        return Err(file.unsupported(part, factor, 1));
    }
    match file.value("rope_parameters") {
        Some(_) => positive(file, "rope_parameters.rope_theta"),
        None => positive(file, "rope_theta"),
    }
}

fn num_experts(file: &JsonFile) -> Result<usize, FileError> {
    let (old, new) = ("num_experts", "num_local_experts");
    match (file.value(old), file.value(new)) {
        (Some(left), Some(right)) if left != right => {
            Err(file.invalid(old, left, format!("{new}={right}")))
        }
        (None, Some(_)) => count(file, new, MAX_COUNT),
        _ => count(file, old, MAX_COUNT),
    }
}

fn count(file: &JsonFile, field: &str, most: usize) -> Result<usize, FileError> {
    let value: usize = file.require(field)?;
    if !(1..=most).contains(&value) {
        return Err(file.invalid(field, value, format!("a number from 1 to {most}")));
    }
    Ok(value)
}

fn positive(file: &JsonFile, field: &str) -> Result<f64, FileError> {
    let value: f64 = file.require(field)?;
    if !(value > 0.0 && value.is_finite()) {
        return Err(file.invalid(field, value, "a finite number above 0"));
    }
    Ok(value)
}
