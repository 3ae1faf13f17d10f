//! Orders of rows.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use moe_lora_adapters::TokenIds;

/// Rows by the slot of their token, as named adapters of a dense linear read them, and back.
///
/// Grouped linears read rows by expert and then by slot; [`Dispatch`](crate::Dispatch) brings them so.
#[derive(Clone, Debug)]
pub struct SlotOrder {
    /// None where no token has a slot: the rows stay as they are.
    order: Option<Vec<usize>>,
    tokens: Option<TokenIds>,
}

impl SlotOrder {
    /// The stable order of these tokens by slot.
    pub fn of(tokens: Option<&TokenIds>) -> Self {
        let order = tokens.and_then(TokenIds::slots).map(sorted_by);
        let sorted = tokens.map(|tokens| match &order {
            None => tokens.clone(),
            Some(order) => tokens.pick(order),
        });
        Self {
            order,
            tokens: sorted,
        }
    }

    /// The tokens of the sorted rows.
    pub fn tokens(&self) -> Option<&TokenIds> {
        self.tokens.as_ref()
    }

    /// Sorts rows.
    pub fn sort<B: Backend>(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        match &self.order {
            None => x,
            Some(order) => select(x, order),
        }
    }

    /// Brings sorted rows back.
    pub fn restore<B: Backend>(&self, y: Tensor<B, 2>) -> Tensor<B, 2> {
        match &self.order {
            None => y,
            Some(order) => select(y, &inverse(order)),
        }
    }
}

/// The stable order that sorts `keys`.
pub(crate) fn sorted_by<K: Ord>(keys: &[K]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|at| &keys[*at]);
    order
}

pub(crate) fn inverse(order: &[usize]) -> Vec<usize> {
    let mut inverse = vec![0; order.len()];
    for (to, from) in order.iter().enumerate() {
        inverse[*from] = to;
    }
    inverse
}

/// Row `i` of the result is row `rows[i]` of `x`.
pub(crate) fn select<B: Backend>(x: Tensor<B, 2>, rows: &[usize]) -> Tensor<B, 2> {
    let ([all, columns], chosen) = (x.dims(), rows.len());
    let rows: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
    let rows = Tensor::<B, 1, Int>::from_data(TensorData::new(rows, [chosen]), &x.device());
    match columns {
        // Without a second dimension: where burn-fusion 0.21 fuses the rows with what broadcasts them,
        // it reads each at its place plus the column of the result.
        1 => x.reshape([all]).select(0, rows).reshape([chosen, 1]),
        _ => x.select(0, rows),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_is_stable_and_its_inverse_restores() {
        let keys = [2, 0, 1, 0, 2];
        let order = sorted_by(&keys);
        assert_eq!(order, [1, 3, 2, 0, 4]);
        let restored: Vec<usize> = inverse(&order).iter().map(|at| order[*at]).collect();
        assert_eq!(restored, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn rows_of_an_expert_lie_by_slot_and_experts_stay_together() {
        let (slots, experts) = ([0, 1, 1, 0, 1], [0, 0, 1, 1, 1]);
        let keys: Vec<(usize, usize)> = experts.into_iter().zip(slots).collect();
        let order = sorted_by(&keys);
        // As by the numbers expert * 2 + slot.
        assert_eq!(order, sorted_by(&[0, 1, 3, 2, 3]));
        assert_eq!(order, [0, 1, 3, 2, 4]);
        let restored: Vec<usize> = inverse(&order).iter().map(|at| order[*at]).collect();
        assert_eq!(restored, [0, 1, 2, 3, 4]);
        // By slot first, as slot * 2 + expert, the rows of expert 0 would lie apart.
        let slot_first = sorted_by(&[0, 2, 3, 1, 3]);
        assert_eq!(slot_first, [0, 3, 1, 2, 4]);
        let apart: Vec<usize> = slot_first.iter().map(|row| experts[*row]).collect();
        assert_eq!(apart, [0, 1, 0, 1, 1]);
    }
}
