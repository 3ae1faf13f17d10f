//! The sizes and switches of a Mixture-of-Experts model, from its `config.json`.

use crate::InterchangeError;
use crate::attention::AttentionConfig;
use crate::family::{Family, Sizes};
use moe_lora_files::{FileError, JsonFile};
use std::collections::BTreeSet;
use std::path::Path;

/// Largest size of an axis; keeps every product of two sizes inside 64 bits.
pub(crate) const MAX_SIZE: usize = i32::MAX as usize;
/// Largest number of layers or experts.
const MAX_COUNT: usize = 1 << 16;

/// The sizes and switches of a model, checked against each other.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The model family.
    pub family: &'static Family,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Hidden size `H`.
    pub hidden_size: usize,
    /// Decoder layers, with and without experts.
    pub num_hidden_layers: usize,
    /// Routed experts `E` of each MoE layer.
    pub num_experts: usize,
    /// Experts `K` that each token is sent to.
    pub num_experts_per_tok: usize,
    /// Intermediate size `F` of one routed expert.
    pub moe_intermediate_size: usize,
    /// What the experts compute between their projections.
    pub activation: Activation,
    /// How a token's experts and their weights are found.
    pub router: Router,
    /// The expert that every token is sent to, if there is one.
    pub shared_expert: Option<SharedExpert>,
    /// The attention, in families where it is grouped-query attention and no more.
    pub attention: Option<AttentionConfig>,
    /// Added to the mean square inside every norm.
    pub rms_norm_eps: f64,
    /// Whether the output head is the embedding.
    pub tie_word_embeddings: bool,
    /// Longest sequence, in tokens.
    pub max_position_embeddings: usize,
    dense_layers: BTreeSet<usize>,
}

/// What an expert computes from its gate and up projections, for its down projection.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`.
    Swiglu,
    /// `gate * sigmoid(alpha * gate) * (up + 1)`, after the gate was cut to at most `limit` and up to
    /// at most `limit` either way.
    ClampedSwiglu {
        /// Slope of the sigmoid.
        alpha: f64,
        /// Largest magnitude.
        limit: f64,
    },
}

/// How a token's `K` experts and their weights are found from its `E` logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Router {
    /// Softmax over all experts, then the `K` largest.
    SoftmaxThenTopK {
        /// Whether the weights are then divided by their sum.
        renormalize: bool,
    },
    /// The `K` largest logits, bias included, then softmax over them.
    TopKThenSoftmax,
    /// The sigmoids of the logits are scores. The bias is added for the choice alone: of `groups`
    /// equal groups of neighbouring experts, those `top_groups` whose two best experts have the
    /// largest sum, and of their experts the `K` best. The weights are the scores without the bias.
    GroupedSigmoid {
        /// Groups that the experts are divided into; each has two experts or more.
        groups: usize,
        /// Groups that a token's experts come from.
        top_groups: usize,
        /// Whether the weights are divided by their sum.
        renormalize: bool,
        /// What they are multiplied by last.
        scale: f64,
    },
}

/// An expert that every token is sent to, beside the routed ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedExpert {
    /// Its intermediate size; several shared experts count as one that is as wide as all of them.
    pub intermediate_size: usize,
    /// Whether its output is weighed by a sigmoid of the token.
    pub gated: bool,
}

impl ModelConfig {
    /// Reads `config.json` in `folder`, as written by transformers 4 or 5.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, lacks a field, holds values that contradict each other, or
    /// asks for something that is not supported: another family, activation or router, quantised
    /// weights, or, where the attention is described, a scaled rotary embedding, clipped q, k and v
    /// or a sliding window.
    pub fn read(folder: &Path) -> Result<Self, InterchangeError> {
        let file = JsonFile::read(folder.join("config.json"))?;
        let quantization = "quantization_config";
        if file.value(quantization).is_some() {
            return Err(InterchangeError::Quantized {
                path: file.path().to_owned(),
                name: quantization.to_owned(),
            });
        }
        Ok(Self::from_file(&file)?)
    }

    /// The layer exists and has experts.
    pub(crate) fn expect_moe(&self, layer: usize) -> Result<(), InterchangeError> {
        let layers = self.num_hidden_layers;
        if layer >= layers {
            return Err(InterchangeError::LayerRange { layer, layers });
        }
        match self.moe_layers().next() {
            Some(first) if !self.is_moe(layer) => {
                Err(InterchangeError::DenseLayer { layer, first })
            }
            _ => Ok(()),
        }
    }

    /// The sizes of an open `config.json`, whatever its weights are stored as: quantised ones are not
    /// refused, for callers that read none.
    ///
    /// # Errors
    ///
    /// As [`read`](Self::read), quantised weights apart.
    pub fn from_file(file: &JsonFile) -> Result<Self, FileError> {
        let family = family(file)?;
        let layers = count(file, "num_hidden_layers", MAX_COUNT)?;
        let experts = num_experts(file, family)?;
        let sizes = Sizes {
            layers,
            experts,
            experts_per_token: count(file, "num_experts_per_tok", experts)?,
            intermediate: count(file, family.intermediate_size, MAX_SIZE)?,
        };
        let dense_layers = BTreeSet::from_iter((family.read_dense_layers)(file, sizes)?);
        if dense_layers.len() == layers {
            let supported = "layers with experts among them";
            return Err(file.unsupported("num_hidden_layers", layers, supported));
        }
        let hidden_size = count(file, "hidden_size", MAX_SIZE)?;
        let attention = family.attention.as_ref();
        let attention = attention.map(|kind| AttentionConfig::read(file, hidden_size, kind));
        Ok(Self {
            family,
            vocab_size: count(file, "vocab_size", MAX_SIZE)?,
            hidden_size,
            num_hidden_layers: layers,
            num_experts: experts,
            num_experts_per_tok: sizes.experts_per_token,
            moe_intermediate_size: sizes.intermediate,
            activation: (family.read_activation)(file)?,
            router: (family.read_router)(file, sizes)?,
            shared_expert: (family.read_shared_expert)(file, sizes)?,
            attention: attention.transpose()?,
            rms_norm_eps: positive(file, "rms_norm_eps")?,
            tie_word_embeddings: file.get("tie_word_embeddings")?.unwrap_or(false),
            max_position_embeddings: count(file, "max_position_embeddings", MAX_SIZE)?,
            dense_layers,
        })
    }

    /// Whether a layer has experts.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer < self.num_hidden_layers && !self.dense_layers.contains(&layer)
    }

    /// The layers that have experts, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_hidden_layers).filter(|layer| self.is_moe(*layer))
    }
}

fn family(file: &JsonFile) -> Result<&'static Family, FileError> {
    let found: String = file.require("model_type")?;
    let known = Family::ALL.map(|family| family.model_type);
    Family::ALL
        .into_iter()
        .find(|family| family.model_type == found)
        .ok_or_else(|| file.unsupported("model_type", format!("{found:?}"), known.join(", ")))
}

/// The fields of the family that are there, which must agree.
fn num_experts(file: &JsonFile, family: &Family) -> Result<usize, FileError> {
    let present = |field: &&&str| file.value(field).is_some();
    let mut fields = family.num_experts.iter().filter(present);
    let first = fields.next().unwrap_or(&family.num_experts[0]);
    let number = count(file, first, MAX_COUNT)?;
    for field in fields {
        let other = count(file, field, MAX_COUNT)?;
        if other != number {
            return Err(file.invalid(first, number, format!("{field}={other}")));
        }
    }
    Ok(number)
}

/// A number from 1 to `most`.
pub(crate) fn count(file: &JsonFile, field: &str, most: usize) -> Result<usize, FileError> {
    let value: usize = file.require(field)?;
    if !(1..=most).contains(&value) {
        return Err(file.invalid(field, value, format!("a number from 1 to {most}")));
    }
    Ok(value)
}

/// A finite number above 0.
pub(crate) fn positive(file: &JsonFile, field: &str) -> Result<f64, FileError> {
    let value: f64 = file.require(field)?;
    if !(value > 0.0 && value.is_finite()) {
        return Err(file.invalid(field, value, "a finite number above 0"));
    }
    Ok(value)
}
