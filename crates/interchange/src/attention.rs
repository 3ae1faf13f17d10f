//! The settings of grouped-query attention, from `config.json`.

use crate::config::{MAX_SIZE, count, positive};
use moe_lora_files::{FileError, JsonFile};

/// Grouped-query attention with rotary embeddings over whole sequences.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of one head; `hidden_size / num_attention_heads` where the file names none.
    pub head_dim: usize,
    /// Base of the rotary embedding's wavelengths.
    pub rope_theta: f64,
    /// Whether q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the output projection has a bias.
    pub output_bias: bool,
    /// Which vectors the norms on q and k run over.
    pub qk_norm: QkNorm,
}

/// Which vectors the norms on q and k run over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// There are none.
    None,
    /// Every head, with one weight for all heads.
    PerHead,
    /// The whole projection.
    Full,
}

/// What distinguishes one grouped-query attention from another.
pub(crate) struct GroupedQueryAttention {
    pub(crate) qk_norm: QkNorm,
    pub(crate) biases: AttentionBiases,
}

/// Which projections the biases are on, and the field that switches them.
pub(crate) enum AttentionBiases {
    Never,
    /// On q, k and v, unless the field is false.
    OnQkv(&'static str),
    /// On q, k, v and the output, if the field is true.
    OnAll(&'static str),
}

impl AttentionConfig {
    pub(crate) fn read(
        file: &JsonFile,
        hidden_size: usize,
        kind: &GroupedQueryAttention,
    ) -> Result<Self, FileError> {
        refuse_unsupported(file)?;
        let size = |field: &str| count(file, field, MAX_SIZE);
        let num_attention_heads = size("num_attention_heads")?;
        let num_key_value_heads = size("num_key_value_heads")?;
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            let expected = format!("a divisor of num_attention_heads={num_attention_heads}");
            return Err(file.invalid("num_key_value_heads", num_key_value_heads, expected));
        }
        let head_dim = match file.value("head_dim") {
            Some(_) => size("head_dim")?,
            None if hidden_size.is_multiple_of(num_attention_heads) => {
                hidden_size / num_attention_heads
            }
            None => {
                let expected =
                    format!("a divisor of hidden_size={hidden_size}, as there is no head_dim");
                return Err(file.invalid("num_attention_heads", num_attention_heads, expected));
            }
        };
        let (qkv_bias, output_bias) = match kind.biases {
            AttentionBiases::Never => (false, false),
            AttentionBiases::OnQkv(field) => (file.get(field)?.unwrap_or(true), false),
            AttentionBiases::OnAll(field) => {
                let biases = file.get(field)?.unwrap_or(false);
                (biases, biases)
            }
        };
        Ok(Self {
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            rope_theta: rope_theta(file)?,
            qkv_bias,
            output_bias,
            qk_norm: kind.qk_norm,
        })
    }
}

/// Refuses what would change the attention and is not carried by [`AttentionConfig`].
fn refuse_unsupported(file: &JsonFile) -> Result<(), FileError> {
    if let Some(value) = file.value("clip_qkv") {
        return Err(file.unsupported("clip_qkv", value, "null"));
    }
    // The window is there by its size alone where no switch is beside it.
    match file.get("use_sliding_window")? {
        Some(true) => return Err(file.unsupported("use_sliding_window", true, false)),
        Some(false) => {}
        None => {
            if let Some(size) = file.value("sliding_window") {
                return Err(file.unsupported("sliding_window", size, "null"));
            }
        }
    }
    let layer_types: Vec<String> = file.get("layer_types")?.unwrap_or_default();
    if let Some(other) = layer_types.iter().find(|kind| *kind != "full_attention") {
        return Err(file.unsupported("layer_types", format!("{other:?}"), "\"full_attention\""));
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
