//! Rows by (expert, slot): the base's order, cut finer.

use moe_lora_kernels::{RowGroups, Slot, TokenIds};

/// The groups of one product over (expert, slot). Key of a row: `expert * groups + group`, so rows
/// that are sorted by it are sorted by expert too, as the base reads them.
#[derive(Debug, PartialEq)]
pub(crate) struct SlotGroups {
    /// The adapter of each group of an expert, or none for rows that have none of those known.
    pub adapters: Vec<Option<usize>>,
    /// The rows of every group of every expert.
    pub rows: RowGroups,
}

impl SlotGroups {
    /// The groups of `rows`, which lie by expert and then by slot. `known` is ascending.
    ///
    /// # Panics
    ///
    /// When the rows come without slots, or in another order. `path` is for the message.
    pub(crate) fn of(path: &str, rows: &RowGroups, known: &[Slot]) -> Self {
        let Some((tokens, slots)) = rows.tokens().and_then(|ids| Some((ids, ids.slots()?))) else {
            panic!(
                "{path}: named adapters have no slots of the tokens (call TokenIds::with_slots on the tokens, and MoeLayer::forward_tokens or RowGroups::with_tokens with them)"
            );
        };
        // Before, between and behind the known slots lie rows that have none of them.
        let place = |slot: &Slot| match known.binary_search(slot) {
            Ok(at) => 2 * at + 1,
            Err(at) => 2 * at,
        };
        let places = 2 * known.len() + 1;
        let mut counts = vec![0; rows.experts() * places];
        for expert in 0..rows.experts() {
            let mut last = 0;
            for row in rows.range(expert) {
                let place = place(&slots[row]);
                assert!(
                    last <= place,
                    "{path}: row {row} of expert {expert} lies behind rows of a later slot (sort rows by slot with SlotOrder)"
                );
                last = place;
                counts[expert * places + place] += 1;
            }
        }
        let used = |place: &usize| {
            place % 2 == 1 || counts.chunks(places).any(|expert| expert[*place] > 0)
        };
        let used: Vec<usize> = (0..places).filter(used).collect();
        let counts: Vec<usize> = counts
            .chunks(places)
            .flat_map(|expert| used.iter().map(|place| expert[*place]))
            .collect();
        let adapters = used
            .iter()
            .map(|place| (place % 2 == 1).then_some(place / 2));
        let fine = RowGroups::padded(&counts, rows.all_rows()).expect("they are the same rows");
        Self {
            adapters: adapters.collect(),
            rows: fine.with_tokens(TokenIds::clone(tokens)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: u64) -> Slot {
        Slot::from_number(number)
    }

    fn rows(counts: &[usize], slots: &[u64]) -> RowGroups {
        let tokens = TokenIds::new(0, 0..slots.len() as u64);
        let tokens = tokens.with_slots(slots.iter().copied().map(slot));
        RowGroups::new(counts, slots.len())
            .unwrap()
            .with_tokens(tokens)
    }

    #[test]
    fn groups_are_counted_by_expert_and_then_by_slot() {
        // Slots [0, 1, 1, 0, 1] of experts [0, 0, 1, 1, 1], sorted by expert * 2 + slot.
        let rows = rows(&[2, 3], &[3, 8, 3, 8, 8]);
        let groups = SlotGroups::of("fc", &rows, &[slot(3), slot(8)]);
        assert_eq!(groups.adapters, [Some(0), Some(1)]);
        assert_eq!(groups.rows.offsets(), [0, 1, 2, 3, 5]);
    }

    #[test]
    fn rows_of_no_known_slot_are_groups_without_an_adapter_wherever_they_lie() {
        let rows = rows(&[4, 0, 3], &[0, 3, 5, 8, 0, 3, 9]);
        let groups = SlotGroups::of("fc", &rows, &[slot(3), slot(8)]);
        assert_eq!(groups.adapters, [None, Some(0), None, Some(1), None]);
        let counts = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 1];
        assert_eq!(groups.rows, {
            let tokens = rows.tokens().unwrap().clone();
            RowGroups::new(&counts, 7).unwrap().with_tokens(tokens)
        });
    }

    #[test]
    fn a_slot_without_rows_keeps_its_group() {
        let groups = SlotGroups::of("fc", &rows(&[1, 1], &[8, 8]), &[slot(3), slot(8)]);
        assert_eq!(groups.adapters, [Some(0), Some(1)]);
        assert_eq!(groups.rows.offsets(), [0, 0, 1, 1, 2]);
    }

    #[test]
    #[should_panic(expected = "row 1 of expert 0 lies behind rows of a later slot")]
    fn rows_in_another_order_are_refused() {
        SlotGroups::of("fc", &rows(&[2], &[8, 3]), &[slot(3), slot(8)]);
    }

    #[test]
    #[should_panic(expected = "fc: named adapters have no slots of the tokens")]
    fn rows_without_slots_are_refused() {
        let rows = RowGroups::whole(1).with_tokens(TokenIds::new(0, [4]));
        SlotGroups::of("fc", &rows, &[slot(3)]);
    }
}
