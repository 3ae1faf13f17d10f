//! Which part of a full weight a rank holds.

use std::ops::Range;

use moe_lora_parallel::{TopologyError, shard_extent};

use crate::AdapterError;

/// The axis of a weight `[d_out, d_in]` along which the ranks of a group hold slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardAxis {
    /// Every rank holds the whole weight.
    Whole,
    /// Rows: the weight of a column-parallel linear.
    Out,
    /// Columns: the weight of a row-parallel linear.
    In,
}

/// Shape and place of one weight: what is full, and which part of it is local.
///
/// The fused gate/up projection has two `fragments` on `d_out`, gate rows before up rows; each
/// fragment is sharded by itself, so that a rank holds matching slices of both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightLayout {
    /// Global experts that this rank holds; none for a weight without an expert axis.
    pub experts: Option<Range<usize>>,
    /// Full extent of the output.
    pub d_out: usize,
    /// Full extent of the input.
    pub d_in: usize,
    /// Equal parts of `d_out` that are sharded one by one.
    pub fragments: usize,
    /// The sharded axis.
    pub axis: ShardAxis,
    /// This rank's position in the group.
    pub rank: usize,
    /// Number of ranks in the group.
    pub ranks: usize,
}

impl WeightLayout {
    /// Checks that the group divides the sharded axis.
    ///
    /// # Errors
    ///
    /// When a fragment of the sharded axis is not divisible by the number of ranks.
    pub fn check(&self, what: &'static str, by: &'static str) -> Result<(), TopologyError> {
        shard_extent("fragmented d_out", self.d_out, "fragments", self.fragments)?;
        match self.axis {
            ShardAxis::Whole => {}
            ShardAxis::Out => {
                shard_extent(what, self.d_out / self.fragments, by, self.ranks)?;
            }
            ShardAxis::In => {
                shard_extent(what, self.d_in, by, self.ranks)?;
            }
        }
        Ok(())
    }

    /// The full rows that this rank holds, one range a fragment.
    pub fn rows(&self) -> Vec<Range<usize>> {
        match self.axis {
            ShardAxis::Out => {
                let fragment = self.d_out / self.fragments;
                let local = fragment / self.ranks;
                (0..self.fragments)
                    .map(|k| k * fragment + self.rank * local)
                    .map(|start| start..start + local)
                    .collect()
            }
            ShardAxis::Whole | ShardAxis::In => std::iter::once(0..self.d_out).collect(),
        }
    }

    /// The full columns that this rank holds.
    pub fn columns(&self) -> Range<usize> {
        match self.axis {
            ShardAxis::In => {
                let local = self.d_in / self.ranks;
                self.rank * local..(self.rank + 1) * local
            }
            ShardAxis::Whole | ShardAxis::Out => 0..self.d_in,
        }
    }

    /// Local extents `[d_out, d_in]`.
    pub fn local(&self) -> [usize; 2] {
        [
            self.rows().iter().map(Range::len).sum(),
            self.columns().len(),
        ]
    }

    /// Cuts the local part, `[local experts * local d_out * local d_in]` in row-major order, out
    /// of a value for every `(expert, row, column)` of the full weight.
    pub fn gather(&self, mut value: impl FnMut(usize, usize, usize) -> f32) -> Vec<f32> {
        let experts = self.experts.clone().unwrap_or(0..1);
        let [d_out, d_in] = self.local();
        let mut local = Vec::with_capacity(experts.len() * d_out * d_in);
        for expert in experts {
            for row in self.rows().into_iter().flatten() {
                local.extend(self.columns().map(|column| value(expert, row, column)));
            }
        }
        local
    }

    /// The number of experts whose full weights are so many values. Every expert parallel rank
    /// holds equally many experts, so it is a multiple of the local number; of values that fit
    /// none, [`cut`](Self::cut) says so.
    pub(crate) fn experts_in(&self, values: usize) -> usize {
        let Some(local) = &self.experts else {
            return 1;
        };
        let experts = values.checked_div(self.d_out * self.d_in).unwrap_or(0);
        experts - experts.checked_rem(local.len()).unwrap_or(0)
    }

    /// Cuts the local part out of the full `[experts, d_out, d_in]` in row-major order, or of
    /// `[1, d_out, d_in]` for a weight without an expert axis.
    ///
    /// # Errors
    ///
    /// When the values do not fill the full shape, or the local experts are not among them.
    pub fn cut(&self, path: &str, experts: usize, full: &[f32]) -> Result<Vec<f32>, AdapterError> {
        let experts = self
            .experts
            .as_ref()
            .map_or(1, |local| experts.max(local.end));
        let expected = [experts, self.d_out, self.d_in];
        let elements = expected
            .iter()
            .try_fold(1usize, |product, extent| product.checked_mul(*extent));
        if elements != Some(full.len()) {
            return Err(AdapterError::Shape {
                path: path.into(),
                found: full.len(),
                expected: expected.into(),
            });
        }
        Ok(self.gather(|e, row, column| full[(e * self.d_out + row) * self.d_in + column]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(axis: ShardAxis, fragments: usize, rank: usize) -> WeightLayout {
        WeightLayout {
            experts: Some(2..3),
            d_out: 8,
            d_in: 4,
            fragments,
            axis,
            rank,
            ranks: 2,
        }
    }

    #[test]
    fn each_fragment_of_a_fused_weight_is_sharded_by_itself() {
        assert_eq!(layout(ShardAxis::Out, 2, 1).rows(), [2..4, 6..8]);
        assert_eq!(layout(ShardAxis::Out, 1, 1).rows(), vec![4..8]);
        assert_eq!(layout(ShardAxis::In, 1, 1).columns(), 2..4);
        assert_eq!(layout(ShardAxis::Out, 2, 0).local(), [4, 4]);
    }

    #[test]
    fn gather_walks_local_experts_rows_and_columns_in_global_indices() {
        let values = layout(ShardAxis::In, 1, 1)
            .gather(|expert, row, column| (expert * 100 + row * 10 + column) as f32);
        assert_eq!(values[..3], [202., 203., 212.]);
        assert_eq!(values.len(), 16);
    }

    #[test]
    fn an_indivisible_axis_names_its_values() {
        let mut layout = layout(ShardAxis::Out, 2, 0);
        layout.ranks = 3;
        assert_eq!(
            layout.check("d_out", "etp_size").unwrap_err().to_string(),
            "d_out=4 is not divisible by etp_size=3 (choose a divisor of 4 as etp_size)"
        );
    }
}
