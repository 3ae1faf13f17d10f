//! Everything that can be wrong with a folder or with what is to be written.

use crate::PeftLayout;
use moe_lora_checkpoint::{CheckpointError, Dtype};
use moe_lora_files::FileError;
use std::path::PathBuf;

/// A fault in a model or adapter folder, or in the values to be written to one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InterchangeError {
    /// A file or tensor by itself.
    #[error(transparent)]
    File(#[from] FileError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// An adapter in a checkpoint that is not on routed experts.
    #[error(
        "{linear} is not a projection of routed experts in a numbered layer, as model.layers.0.mlp.experts.down_proj is, which is all that adapter files hold (name the layer's path so, or leave its adapter out of the checkpoint)"
    )]
    NotExperts {
        /// The linear.
        linear: String,
    },
    /// An adapter in a checkpoint with a function between its factors.
    #[error(
        "{linear} has a function between A and B, which adapter files cannot hold (train it with the identity)"
    )]
    Nonlinear {
        /// The linear.
        linear: String,
    },
    /// Rank-stabilised adapters beside others.
    #[error(
        "{linear} is rank-stabilised where others are not or the other way round, which one adapter file cannot hold (train all of them alike)"
    )]
    MixedScales {
        /// The linear.
        linear: String,
    },
    /// An adapter on gate without one on up, or the other way round.
    #[error(
        "layer {layer} has an adapter on gate or up alone, which adapter files cannot hold (adapt both or neither)"
    )]
    HalfGateUp {
        /// The layer.
        layer: usize,
    },
    /// A factor in a checkpoint of a type that is not widened to `f32`.
    #[error("{key} is stored as {dtype} (supported: F32, BF16, F16)")]
    StoredDtype {
        /// The factor.
        key: String,
        /// Its type.
        dtype: Dtype,
    },
    /// A shard name that is not a plain file name.
    #[error(
        "{path} names the shard {name:?}, which is not a plain .safetensors file name (shards must lie in the model's own folder)"
    )]
    ShardName {
        /// The index file.
        path: PathBuf,
        /// The name it holds.
        name: String,
    },
    /// The index and a shard disagree on where a tensor lies.
    #[error(
        "{path} and shard {shard:?} disagree on tensor {tensor:?} (fetch the index and its shards from the same revision)"
    )]
    ShardIndex {
        /// The index file.
        path: PathBuf,
        /// The shard.
        shard: String,
        /// The tensor that only one of them has.
        tensor: String,
    },
    /// A factor whose axes are not those of a pair.
    #[error(
        "factor {name} has shape {found:?}, expected {expected} (give both factors the same experts and rank)"
    )]
    Axes {
        /// Which of the two factors.
        name: &'static str,
        /// Its shape.
        found: Vec<usize>,
        /// The axes it should have.
        expected: String,
    },
    /// A layer beyond the model's last.
    #[error("layer {layer} is not in a model of num_hidden_layers={layers} (layers count from 0)")]
    LayerRange {
        /// The layer asked for.
        layer: usize,
        /// Layers in the model.
        layers: usize,
    },
    /// A layer whose feed-forward part is dense.
    #[error("layer {layer} has no experts (the first layer that has some is {first})")]
    DenseLayer {
        /// The layer asked for.
        layer: usize,
        /// The first MoE layer.
        first: usize,
    },
    /// Weights in a format of fewer bits, which a widened element cannot stand for.
    #[error(
        "{path} holds {name:?}, the sign of quantised weights (dequantise the model to bf16 first and save it without quantisation)"
    )]
    Quantized {
        /// The configuration, or the model's folder.
        path: PathBuf,
        /// The field or tensor.
        name: String,
    },
    /// Biases of experts whose files hold none.
    #[error(
        "the experts of layer {layer} come with biases, which {model_type} files do not hold (leave them out)"
    )]
    UnexpectedBiases {
        /// The layer.
        layer: usize,
        /// The family of the model.
        model_type: &'static str,
    },
    /// Weights in a folder that the files to be written could not replace in one step.
    #[error(
        "{path} is part of another model, whose weights would be mixed with those to be written (choose an empty folder, or remove that model)"
    )]
    Occupied {
        /// The file in the way.
        path: PathBuf,
    },
    /// An adapter file without tensors that its configuration calls for.
    #[error("{path} lacks {names:?}{} (a partial adapter is not read: save it again)", and_more(.more))]
    MissingTensors {
        /// The adapter file.
        path: PathBuf,
        /// The first few names.
        names: Vec<String>,
        /// Whether there are others.
        more: bool,
    },
    /// An adapter file with tensors that its configuration does not call for.
    #[error("{path} holds unexpected {names:?}{} (only the factors of targeted experts are read)", and_more(.more))]
    UnexpectedTensors {
        /// The adapter file.
        path: PathBuf,
        /// The first few names.
        names: Vec<String>,
        /// Whether there are others.
        more: bool,
    },
    /// A family whose experts are no modules that a pair could be on.
    #[error(
        "{model_type} has no module for each expert and projection, which the per-expert layout names (fuse gate and up and write with PeftLayout::Stacked)"
    )]
    NoExpertModules {
        /// The family of the model.
        model_type: &'static str,
    },
    /// A merged weight that is an infinity or no number.
    #[error(
        "row {row} of expert {expert} holds no finite numbers once merged (look for such values, or a huge alpha, in the adapter)"
    )]
    NonFinite {
        /// The expert.
        expert: usize,
        /// The row of its weight.
        row: usize,
    },
    /// Separate gate and up factors, which a stacked file cannot hold.
    #[error(
        "layer {layer} has separate gate and up factors, which the stacked layout cannot hold (write it with PeftLayout::PerExpert, or fuse them with fuse_gate_up)"
    )]
    SeparateInStacked {
        /// The layer.
        layer: usize,
    },
    /// A pair that a layout cannot hold.
    #[error(
        "layer {layer} has {held} on {projection}, which PeftLayout::{layout:?} cannot hold ({remedy})"
    )]
    Inexpressible {
        /// The layer.
        layer: usize,
        /// `gate_up`, `gate`, `up` or `down`.
        projection: &'static str,
        /// What is in the way.
        held: &'static str,
        /// The layout asked for.
        layout: PeftLayout,
        /// Which layout can hold it, or how it can be changed.
        remedy: &'static str,
    },
    /// A factor that the experts share on the side of their intermediate extent.
    #[error(
        "layer {layer} shares the factor of {projection} on the side of the intermediate extent alone, which is not trained here (give each expert a copy with expand)"
    )]
    InnerShared {
        /// The layer.
        layer: usize,
        /// `gate_up_proj`, `gate_proj`, `up_proj` or `down_proj`.
        projection: &'static str,
    },
    /// DoRA on some pairs alone, which the settings of a file cannot say.
    #[error(
        "layer {layer} has no magnitude on {projection}, unlike other pairs of the adapter (use DoRA on all pairs or on none)"
    )]
    MixedMagnitudes {
        /// The layer.
        layer: usize,
        /// `gate_up`, `gate`, `up` or `down`.
        projection: &'static str,
    },
    /// Gate and up of different scales, for which one fused pair has no exact factors.
    #[error(
        "layer {layer} has scale {gate} on gate and {up} on up, so they do not fuse exactly (write them with PeftLayout::PerExpert)"
    )]
    FusedScales {
        /// The layer.
        layer: usize,
        /// Scale of the gate.
        gate: f64,
        /// Scale of up.
        up: f64,
    },
    /// An adapter that adapts nothing.
    #[error("the adapter has no factors (give it at least one layer with a gate_up or down pair)")]
    EmptyAdapter,
}

impl From<CheckpointError> for InterchangeError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

fn and_more(more: &bool) -> &'static str {
    if *more { " and more" } else { "" }
}
