//! What can go wrong when adapters are built, trained, saved or loaded.

use burn::tensor::DType;
use moe_lora_checkpoint::CheckpointError;
use moe_lora_parallel::TopologyError;
use thiserror::Error;

use crate::Activation;

/// An adapter that cannot be built as asked, or does not train.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum AdapterError {
    /// A group does not divide an extent.
    #[error("{path}: {reason}")]
    Topology {
        /// The linear.
        path: String,
        /// The extents.
        reason: TopologyError,
    },
    /// A rank of zero.
    #[error("rank=0 gives an adapter without parameters (choose a rank of at least 1)")]
    ZeroRank,
    /// An alpha that is no finite number.
    #[error("alpha={alpha} is not a finite number (choose one such as 2 * rank)")]
    Alpha {
        /// The alpha.
        alpha: f64,
    },
    /// Two settings that make no sense together.
    #[error("{first} with {second} {because}")]
    Combination {
        /// One of them.
        first: &'static str,
        /// The other.
        second: String,
        /// Why not, and what to do.
        because: &'static str,
    },
    /// A rank that the experts of a token do not divide.
    #[error(
        "rank={rank} is not divisible by top_k={top_k} experts of a token ({})",
        match top_k {
            0 => "give the number that the router chooses".into(),
            _ => format!("choose a multiple of {top_k} as rank"),
        }
    )]
    RankPerExpert {
        /// The rank.
        rank: usize,
        /// Experts of a token.
        top_k: usize,
    },
    /// A ratio of learning rates that stops a factor, or turns it around.
    #[error("the ratio of learning rates {ratio} is not above zero (choose one such as 16)")]
    LearningRateRatio {
        /// The ratio.
        ratio: f64,
    },
    /// PiSSA of a weight with fewer singular values than the rank.
    #[error(
        "{path}: rank={rank} is more than the {} singular values of a weight {shape:?} (choose a rank of at most {})",
        shape.iter().min().unwrap_or(&0),
        shape.iter().min().unwrap_or(&0)
    )]
    PissaRank {
        /// The linear.
        path: String,
        /// The rank.
        rank: usize,
        /// `[d_out, d_in]`.
        shape: [usize; 2],
    },
    /// PiSSA of a base that is not in floating point.
    #[error(
        "{path}: PiSSA leaves the rest of the weight in the base, which {} cannot hold (use a base of floats, or a plain start)",
        elements(dtype)
    )]
    PissaBase {
        /// The linear.
        path: String,
        /// The base's element type.
        dtype: DType,
    },
    /// A weight without a singular value decomposition.
    #[error(
        "{path}: the weight{} has no singular value decomposition (look for values that are not finite)",
        expert.map(|expert| format!(" of expert {expert}")).unwrap_or_default()
    )]
    NoSvd {
        /// The linear.
        path: String,
        /// The global expert, where the linear has some.
        expert: Option<usize>,
    },
    /// A dropout that keeps nothing, or is no probability.
    #[error("dropout={probability} is not in 0..1 (choose one such as 0.1, or none)")]
    Dropout {
        /// The probability.
        probability: f64,
    },
    /// A shared outer factor of experts whose base is replicated.
    #[error(
        "{path}: a replicated base has no hidden side whose factor the experts could share (choose Sharing::Shared or Sharing::PerExpert)"
    )]
    NoOuter {
        /// The linear.
        path: String,
    },
    /// A target that no linear matches.
    #[error(
        "target {pattern:?} matches no linear{hint} (known: {})",
        listed(known)
    )]
    UnknownTarget {
        /// The pattern.
        pattern: String,
        /// A near name.
        hint: String,
        /// Paths of the linears.
        known: Vec<String>,
    },
    /// An adapter is already there.
    #[error("{path}: {other} already has an adapter (merge it or leave one of the two out)")]
    AlreadyAdapted {
        /// The linear asked for.
        path: String,
        /// The linear that has one.
        other: String,
    },
    /// A name that paths cannot hold.
    #[error(
        "adapter name {name:?} is not one of letters, digits, \"_\" and \"-\" (choose one such as \"customer-7\")"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// A name, or its slot, that is taken.
    #[error(
        "{path}: adapter {name:?} is {other:?} already (choose another name, or remove that one)"
    )]
    NameTaken {
        /// The linear.
        path: String,
        /// The name asked for.
        name: String,
        /// The adapter with the same slot.
        other: String,
    },
    /// A name that no adapter has.
    #[error("no adapter is named {name:?}{hint} (known: {})", listed(known))]
    UnknownName {
        /// The name.
        name: String,
        /// A near name.
        hint: String,
        /// The names.
        known: Vec<String>,
    },
    /// Adapters that do not fit one product.
    #[error(
        "adapter {name:?} has {setting} {found}, {other:?} has {expected} (the adapters of one linear run in one product: give them the same {setting})"
    )]
    Unlike {
        /// The new adapter.
        name: String,
        /// One that is there.
        other: String,
        /// What differs.
        setting: &'static str,
        /// Of the new adapter.
        found: String,
        /// Of the one that is there.
        expected: String,
    },
    /// A weighted sum with an adapter that has DoRA.
    #[error(
        "{path}: the lengths of rows that {name:?} has with DoRA are those of W + s B A, not of a sum with others (combine adapters without DoRA)"
    )]
    CombinedDora {
        /// The linear.
        path: String,
        /// The adapter.
        name: String,
    },
    /// A weighted sum of nothing, or with a weight that is no number.
    #[error(
        "combination {name:?} has weights {weights:?} (give each adapter of the sum a finite weight, and at least one)"
    )]
    Weights {
        /// The combination.
        name: String,
        /// The weights.
        weights: Vec<f64>,
    },
    /// Several adapters where one is merged.
    #[error(
        "{path}: adapters {names:?} serve different tokens, so no one weight has them all (merge one of them with merge_named)"
    )]
    Several {
        /// The linear.
        path: String,
        /// The adapters.
        names: Vec<String>,
    },
    /// No targets at all.
    #[error("no targets given (name linears such as \"*.experts.down_proj\")")]
    NoTargets,
    /// Targets that are all excluded.
    #[error(
        "no linear is left to adapt: excluded [{}] has all that the targets match (exclude fewer)",
        excluded.join(", ")
    )]
    AllExcluded {
        /// The patterns of those left out.
        excluded: Vec<String>,
    },
    /// A function stands between the factors.
    #[error(
        "{path}: an adapter with {activation:?} between A and B equals no weight (merge needs the identity)"
    )]
    Unmergeable {
        /// The linear.
        path: String,
        /// The function.
        activation: Activation,
    },
    /// A magnitude for an adapter that has none.
    #[error("{path}: the adapter has no magnitude (build it with DoRA)")]
    NoMagnitude {
        /// The linear.
        path: String,
    },
    /// A weight of another shape.
    #[error(
        "{path}: {found} values do not fill shape {expected:?} (pass the full, unsharded tensor)"
    )]
    Shape {
        /// The weight.
        path: String,
        /// Number of values given.
        found: usize,
        /// The full shape.
        expected: Vec<usize>,
    },
    /// No adapters to train.
    #[error("there are no adapters to train (call add_adapters first)")]
    NoAdapters,
    /// Adapters that a backward pass left without gradients.
    #[error(
        "no gradient reached the adapters of {} (pass what their linears give on to the loss, and tokens to their experts; freeze the rest before add_adapters, not after)",
        listed(linears)
    )]
    NoGradient {
        /// The linears.
        linears: Vec<String>,
    },
}

/// Gradients that cannot be clipped.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ClipError {
    /// A bound that would turn the gradients around or leave nothing of them.
    #[error("max_norm={max_norm} is not above zero (choose one such as 1.0)")]
    MaxNorm {
        /// The bound.
        max_norm: f64,
    },
    /// An infinite norm, or none.
    #[error("the gradients have norm {norm} (leave this step out, or lower the learning rate)")]
    NotFinite {
        /// The norm.
        norm: f64,
    },
}

/// A checkpoint that cannot be saved or loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ResumeError {
    /// The files.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Another rank failed; its own error says why.
    #[error("rank {rank} stopped because another rank failed (see the other ranks' errors)")]
    OtherRank {
        /// This rank.
        rank: usize,
    },
    /// A factor of an element type that files do not have.
    #[error("{path}: {dtype:?} cannot be stored (use f32, f64, bf16 or f16 factors)")]
    Dtype {
        /// The factor.
        path: String,
        /// Its type.
        dtype: DType,
    },
    /// Settings that are not those of the stored factors.
    #[error(
        "{linear}: the checkpoint says {stored} and has {} and {} (save it again)",
        of_rank("A", .ranks[0]),
        of_rank("B", .ranks[1])
    )]
    StoredSettings {
        /// The linear.
        linear: String,
        /// The settings.
        stored: String,
        /// Ranks of `A` and `B`, where there are such factors.
        ranks: [Option<usize>; 2],
    },
    /// A magnitude without DoRA, or DoRA without one.
    #[error(
        "{linear}: the checkpoint says dora={dora} and {} a magnitude (save it again)",
        if *dora { "is without" } else { "has" }
    )]
    StoredMagnitude {
        /// The linear.
        linear: String,
        /// Whether the settings say DoRA.
        dora: bool,
    },
    /// The start of a factor without PiSSA, or PiSSA without one.
    #[error(
        "{path} {} an adapter with pissa={pissa} in the checkpoint (save it again)",
        if *pissa { "is missing from" } else { "belongs to no part of" }
    )]
    StoredStart {
        /// The start.
        path: String,
        /// Whether the settings say PiSSA.
        pissa: bool,
    },
    /// PiSSA on a base that has lost another product than the one that is stored.
    #[error(
        "{path}: the base is without the product that the adapter started from here, not in the checkpoint (load before start_pissa)"
    )]
    OtherStart {
        /// The factor.
        path: String,
    },
    /// An adapter of another rank, scale, function or sharing.
    #[error(
        "{linear}: the checkpoint has {stored}, the module {expected} (build the adapter from the checkpoint's settings)"
    )]
    Settings {
        /// The linear.
        linear: String,
        /// Settings in the checkpoint.
        stored: String,
        /// Settings of the module's adapter.
        expected: String,
    },
    /// State of another optimizer.
    #[error(
        "{path}: the checkpoint has the state of {stored}, not of {optimizer} (resume with {stored}, or load the adapters alone)"
    )]
    OtherOptimizer {
        /// The factor.
        path: String,
        /// The optimizer that was saved.
        stored: String,
        /// The optimizer to be resumed.
        optimizer: &'static str,
    },
    /// State of which a part is missing.
    #[error(
        "{path}: {parts:?} is not the whole state of {optimizer} (save the checkpoint again, or load the adapters alone)"
    )]
    OptimizerState {
        /// The factor.
        path: String,
        /// The optimizer.
        optimizer: &'static str,
        /// Names of the stored parts.
        parts: Vec<String>,
    },
}

fn elements(dtype: &DType) -> String {
    match dtype {
        DType::QFloat(_) => "a quantised type".to_owned(),
        other => format!("{other:?}"),
    }
}

/// A stored factor and its rank, if there is one.
fn of_rank(factor: &str, rank: Option<usize>) -> String {
    match rank {
        Some(rank) => format!("{factor} of rank {rank}"),
        None => format!("no {factor}"),
    }
}

/// The first few of many paths.
fn listed(known: &[String]) -> String {
    const SHOWN: usize = 6;
    let mut list = known[..known.len().min(SHOWN)].join(", ");
    if known.len() > SHOWN {
        list += &format!(" and {} more", known.len() - SHOWN);
    }
    list
}
