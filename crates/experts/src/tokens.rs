//! The ids and slots of tokens that other ranks bring.

use moe_lora_adapters::{Slot, TokenIds};
use moe_lora_parallel::{Group, GroupKind, ParallelBackend};

/// The ids of all ranks of a group, of which rank `k` has `sizes[k]`.
///
/// # Panics
///
/// When the transport fails.
pub(crate) fn exchange<B: ParallelBackend, G: GroupKind>(
    group: &Group<B, G>,
    ids: &[u64],
    sizes: &[usize],
) -> Vec<Vec<u64>> {
    // Host integers go in equal numbers.
    let longest = sizes.iter().copied().max().unwrap_or(0);
    let mut padded: Vec<usize> = ids.iter().map(|id| *id as usize).collect();
    padded.resize(longest, 0);
    let ranks = group.exchange_sizes(&padded).into_iter().zip(sizes);
    ranks
        .map(|(ids, size)| ids[..*size].iter().map(|id| *id as u64).collect())
        .collect()
}

/// The tokens of all ranks of a group one rank after the other.
///
/// # Panics
///
/// When the transport fails.
pub(crate) fn gather<B: ParallelBackend, G: GroupKind>(
    group: &Group<B, G>,
    tokens: &TokenIds,
    sizes: &[usize],
) -> TokenIds {
    travel(tokens.clone(), |ids| exchange(group, ids, sizes).concat())
}

/// The tokens at the end of a way that numbers take: their ids and any slots.
pub(crate) fn travel(tokens: TokenIds, way: impl Fn(&[u64]) -> Vec<u64>) -> TokenIds {
    let arrived = TokenIds::new(tokens.step(), way(tokens.ids()));
    match tokens.slots() {
        None => arrived,
        Some(slots) => {
            let numbers: Vec<u64> = slots.iter().map(|slot| slot.number()).collect();
            arrived.with_slots(way(&numbers).into_iter().map(Slot::from_number))
        }
    }
}
