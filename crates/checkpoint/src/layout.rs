//! How one tensor is cut over the ranks of any topology.

use crate::{CheckpointError, Place, ShardedTensor};
use safetensors::Dtype;
use serde::{Deserialize, Serialize};

/// The group whose ranks hold slices of an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Expert parallel: the axis of experts.
    Ep,
    /// Expert tensor parallel: an axis of an expert weight.
    ExpertTp,
    /// Tensor parallel: an axis of a dense weight.
    Tp,
}

impl Axis {
    fn name(self) -> &'static str {
        match self {
            Self::Ep => "ep_size",
            Self::ExpertTp => "etp_size",
            Self::Tp => "tp_size",
        }
    }
}

/// A whole tensor and the group that shards each of its axes: a shard at every topology.
///
/// ```
/// use moe_lora_checkpoint::{Axis, Dtype, GroupSizes, TensorLayout};
///
/// // B of the fused gate/up projection: [experts, gate rows then up rows, rank].
/// let layout = TensorLayout::new("experts.gate_up_proj.lora_B", Dtype::F32, [8, 32, 4])
///     .with_axis(0, Axis::Ep)
///     .with_axis(1, Axis::ExpertTp)
///     .with_fragments(1, 2);
/// let shard = layout.shard(&GroupSizes::new(2, 2).place(1)?)?;
/// assert_eq!((shard.offset, shard.local_shape), (vec![0, 8, 0], vec![4, 16, 4]));
/// # Ok::<(), moe_lora_checkpoint::CheckpointError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorLayout {
    /// Logical path.
    pub key: String,
    /// Element type.
    pub dtype: Dtype,
    /// Extents of the whole tensor.
    pub shape: Vec<usize>,
    /// Equal parts of each axis that are sharded one by one.
    pub fragments: Vec<usize>,
    /// The group that shards each axis, if one does.
    pub axes: Vec<Option<Axis>>,
}

impl TensorLayout {
    /// A tensor that every rank holds whole.
    pub fn new(key: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        Self {
            key: key.into(),
            dtype,
            fragments: vec![1; shape.len()],
            axes: vec![None; shape.len()],
            shape,
        }
    }

    /// Shards an axis over a group.
    ///
    /// # Panics
    ///
    /// When the tensor has no such axis.
    pub fn with_axis(mut self, axis: usize, group: Axis) -> Self {
        self.axes[axis] = Some(group);
        self
    }

    /// Cuts an axis into equal parts that are sharded one by one.
    ///
    /// # Panics
    ///
    /// When the tensor has no such axis.
    pub fn with_fragments(mut self, axis: usize, fragments: usize) -> Self {
        self.fragments[axis] = fragments;
        self
    }

    /// The whole tensor as one shard.
    pub fn whole(&self) -> ShardedTensor {
        ShardedTensor {
            fragments: self.fragments.clone(),
            ..ShardedTensor::whole(&self.key, self.dtype, &*self.shape)
        }
    }

    /// Checks the layout as far as it does not depend on a topology.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Layout`].
    pub fn check(&self) -> Result<(), CheckpointError> {
        self.whole().check()?;
        let shards = |group| {
            self.axes
                .iter()
                .filter(|axis| **axis == Some(group))
                .count()
        };
        let [ep, etp, tp] = [Axis::Ep, Axis::ExpertTp, Axis::Tp].map(shards);
        // One group cannot cut two axes into boxes that fill the tensor, and a dense weight has no
        // place in the expert decomposition of the same ranks.
        let expected = if self.axes.len() != self.shape.len() {
            "one entry for each axis of the shape"
        } else if ep > 1 || etp > 1 || tp > 1 {
            "each group once"
        } else if tp > 0 && ep + etp > 0 {
            "tp, or ep and expert_tp, but not both"
        } else {
            return Ok(());
        };
        Err(CheckpointError::Layout {
            key: self.key.clone(),
            field: "axes",
            value: format!("{:?}", self.axes),
            expected: expected.to_owned(),
        })
    }

    /// The shard of the rank at `place`.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Layout`], and [`CheckpointError::Indivisible`] when the ranks of a group
    /// cannot share a fragment of an axis equally.
    pub fn shard(&self, place: &Place) -> Result<ShardedTensor, CheckpointError> {
        self.check()?;
        let mut shard = self.whole();
        for (axis, group) in self.axes.iter().enumerate() {
            let Some(group) = *group else { continue };
            let sizes = place.sizes();
            let (index, size) = match group {
                Axis::Ep => (place.ep(), sizes.ep),
                Axis::ExpertTp => (place.etp(), sizes.etp),
                Axis::Tp => (place.tp(), sizes.tp),
            };
            let part = self.shape[axis] / self.fragments[axis];
            if !part.is_multiple_of(size) {
                return Err(CheckpointError::Indivisible {
                    key: self.key.clone(),
                    axis,
                    part,
                    by: group.name(),
                    size,
                });
            }
            shard.offset[axis] = index * (part / size);
            shard.local_shape[axis] = self.shape[axis] / size;
        }
        shard.replica = self.replica(place);
        Ok(shard)
    }

    /// Number of the rank among those that hold the same box.
    fn replica(&self, place: &Place) -> usize {
        let sharded = |group| self.axes.contains(&Some(group));
        if sharded(Axis::Tp) {
            return place.dp();
        }
        let mut replica = place.expert_dp();
        if !sharded(Axis::Ep) {
            replica = replica * place.sizes().ep + place.ep();
        }
        if !sharded(Axis::ExpertTp) {
            replica = replica * place.sizes().etp + place.etp();
        }
        replica
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupSizes;
    use std::collections::BTreeMap;

    fn layouts() -> Vec<TensorLayout> {
        let experts = TensorLayout::new("w", Dtype::F32, [8, 16, 4]).with_axis(0, Axis::Ep);
        vec![
            experts
                .clone()
                .with_axis(1, Axis::ExpertTp)
                .with_fragments(1, 2),
            experts.clone().with_axis(2, Axis::ExpertTp),
            experts,
            TensorLayout::new("w", Dtype::F32, [8, 16]).with_axis(1, Axis::ExpertTp),
            TensorLayout::new("w", Dtype::F32, [8, 16]).with_axis(1, Axis::Tp),
            TensorLayout::new("w", Dtype::I64, []),
        ]
    }

    #[test]
    fn each_box_has_one_replica_of_each_number() {
        for (ep, etp) in [(2, 2), (2, 4), (4, 1)] {
            let sizes = GroupSizes::new(ep, etp).with_world(16).with_tp(4);
            for layout in layouts() {
                let mut boxes = BTreeMap::<_, Vec<usize>>::new();
                for place in sizes.places().unwrap() {
                    let shard = layout.shard(&place).unwrap();
                    shard.check().unwrap();
                    let copies = boxes.entry((shard.offset, shard.local_shape)).or_default();
                    copies.push(shard.replica);
                }
                let copies = 16 / boxes.len();
                for replicas in boxes.values_mut() {
                    replicas.sort();
                    assert_eq!(
                        *replicas,
                        Vec::from_iter(0..copies),
                        "{layout:?} at {sizes:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn an_indivisible_axis_names_its_values() {
        let place = GroupSizes::new(1, 3).place(0).unwrap();
        assert_eq!(
            layouts()[0].shard(&place).unwrap_err().to_string(),
            "tensor \"w\": 8 of axis 1 is not divisible by etp_size=3 (choose a divisor of 8 as etp_size)"
        );
    }

    #[test]
    fn axes_that_make_no_boxes_are_refused() {
        let layout = || TensorLayout::new("w", Dtype::F32, [4, 4]);
        let mut short = layout();
        short.axes.pop();
        for (layout, part) in [
            (
                layout().with_axis(0, Axis::Ep).with_axis(1, Axis::Ep),
                "each group once",
            ),
            (
                layout().with_axis(0, Axis::Ep).with_axis(1, Axis::Tp),
                "but not both",
            ),
            (short, "one entry for each axis"),
        ] {
            let message = layout.check().unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
        }
    }
}
