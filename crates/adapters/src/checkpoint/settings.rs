//! The settings of an adapter in a manifest.

use burn::tensor::backend::Backend;
use moe_lora_checkpoint::{AdapterActivation, AdapterEntry, AdapterSharing, Checkpoint};

use crate::{Activation, LoraConfig, ResumeError, Sharing, TrainedWeight};

/// The settings are those of the stored factors: an adapter is built from them before a factor is
/// read.
pub(super) fn check_entry(
    checkpoint: &Checkpoint,
    linear: &str,
    entry: &AdapterEntry,
) -> Result<(), ResumeError> {
    // The rank is the second axis from the end of A, and the last one of B.
    let rank = |factor: &str, from_end: usize| {
        let stored = checkpoint
            .manifest()
            .tensor(&format!("{linear}.{factor}"))?;
        let shape = &stored.layout.shape;
        shape.get(shape.len().checked_sub(from_end)?).copied()
    };
    let ranks = [rank("lora_A", 2), rank("lora_B", 1)];
    if ranks != [Some(entry.rank); 2] || !entry.alpha.is_finite() {
        return Err(ResumeError::StoredSettings {
            linear: linear.to_owned(),
            stored: format!("rank={}, alpha={}", entry.rank, entry.alpha),
            ranks,
        });
    }
    let magnitude = format!("{linear}.lora_magnitude_vector");
    if checkpoint.manifest().tensor(&magnitude).is_some() != entry.dora {
        return Err(ResumeError::StoredMagnitude {
            linear: linear.to_owned(),
            dora: entry.dora,
        });
    }
    for factor in ["lora_A", "lora_B"] {
        let start = format!("{linear}.{factor}.start");
        if checkpoint.manifest().tensor(&start).is_some() != entry.pissa {
            return Err(ResumeError::StoredStart {
                path: start,
                pissa: entry.pissa,
            });
        }
    }
    Ok(())
}

/// Factors of another scale or function would load and compute something else.
pub(super) fn check_settings<B: Backend>(
    checkpoint: &Checkpoint,
    weights: &[TrainedWeight<'_, B>],
) -> Result<(), ResumeError> {
    for trained in weights {
        let stored = checkpoint.manifest().adapters.get(trained.linear);
        let expected = entry_of(trained.config);
        if let Some(stored) = stored
            && *stored != expected
        {
            let [stored, expected] = differing(stored, &expected);
            return Err(ResumeError::Settings {
                linear: trained.linear.to_owned(),
                stored,
                expected,
            });
        }
    }
    Ok(())
}

/// What both say where they are not the same.
fn differing(stored: &AdapterEntry, expected: &AdapterEntry) -> [String; 2] {
    let values = |entry: &AdapterEntry| {
        let AdapterEntry {
            rank,
            alpha,
            rslora,
            activation,
            sharing,
            dora,
            pissa,
        } = entry;
        [
            format!("rank={rank}"),
            format!("alpha={alpha}"),
            format!("rslora={rslora}"),
            format!("activation={activation:?}"),
            format!("sharing={sharing:?}"),
            format!("dora={dora}"),
            format!("pissa={pissa}"),
        ]
    };
    let (stored, expected) = (values(stored), values(expected));
    let pairs = stored.into_iter().zip(expected);
    let (stored, expected): (Vec<_>, Vec<_>) = pairs.filter(|(a, b)| a != b).unzip();
    [stored, expected].map(|values| values.join(", "))
}

pub(super) fn entry_of(config: &LoraConfig) -> AdapterEntry {
    AdapterEntry {
        rank: config.rank,
        alpha: config.alpha,
        rslora: config.rslora,
        activation: match config.activation {
            Activation::Identity => AdapterActivation::Identity,
            Activation::Silu => AdapterActivation::Silu,
            Activation::Gelu => AdapterActivation::Gelu,
            Activation::Relu => AdapterActivation::Relu,
        },
        sharing: match config.sharing {
            Sharing::PerExpert => AdapterSharing::PerExpert,
            Sharing::SharedOuter => AdapterSharing::SharedOuter,
            Sharing::Shared => AdapterSharing::Shared,
        },
        dora: config.dora,
        pissa: config.pissa,
    }
}

pub(super) fn config_of(entry: &AdapterEntry) -> LoraConfig {
    LoraConfig::new(entry.rank, entry.alpha)
        .with_rslora(entry.rslora)
        .with_dora(entry.dora)
        .with_pissa(entry.pissa)
        .with_activation(match entry.activation {
            AdapterActivation::Identity => Activation::Identity,
            AdapterActivation::Silu => Activation::Silu,
            AdapterActivation::Gelu => Activation::Gelu,
            AdapterActivation::Relu => Activation::Relu,
        })
        .with_sharing(match entry.sharing {
            AdapterSharing::PerExpert => Sharing::PerExpert,
            AdapterSharing::SharedOuter => Sharing::SharedOuter,
            AdapterSharing::Shared => Sharing::Shared,
        })
}
