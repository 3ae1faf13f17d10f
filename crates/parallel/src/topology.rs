//! Which rank holds what: sizes, coordinates and the members of every group. Knows no burn.

use std::ops::Range;

use crate::{GroupName, TopologyError};

/// Sizes of a topology; [`init`](TopologyConfig::init) checks them.
///
/// ```
/// use moe_lora_parallel::{GroupName, TopologyConfig};
///
/// let topology = TopologyConfig::new(4).with_ep(2).with_etp(2).init()?;
/// assert_eq!(topology.members(GroupName::ExpertTp, 3)?, [2, 3]);
/// assert_eq!(topology.members(GroupName::Ep, 3)?, [1, 3]);
/// # Ok::<(), moe_lora_parallel::TopologyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TopologyConfig {
    world: usize,
    tp: usize,
    ep: usize,
    etp: usize,
}

impl TopologyConfig {
    /// `world` ranks, all of them data parallel.
    pub fn new(world: usize) -> Self {
        Self {
            world,
            tp: 1,
            ep: 1,
            etp: 1,
        }
    }

    /// Tensor parallel size of dense layers and shared experts.
    pub fn with_tp(mut self, tp: usize) -> Self {
        self.tp = tp;
        self
    }

    /// Expert parallel size.
    pub fn with_ep(mut self, ep: usize) -> Self {
        self.ep = ep;
        self
    }

    /// Expert tensor parallel size.
    pub fn with_etp(mut self, etp: usize) -> Self {
        self.etp = etp;
        self
    }

    /// Checks the sizes.
    ///
    /// # Errors
    ///
    /// When a size is zero, or when `tp` or `ep * etp` does not divide the world size.
    pub fn init(self) -> Result<Topology, TopologyError> {
        for (name, size) in [
            ("world_size", self.world),
            ("tp_size", self.tp),
            ("ep_size", self.ep),
            ("etp_size", self.etp),
        ] {
            if size == 0 {
                return Err(TopologyError::Zero { name });
            }
        }
        let experts = self.ep.saturating_mul(self.etp);
        for (product, sizes) in [
            (self.tp, format!("tp_size={}", self.tp)),
            (
                experts,
                format!("ep_size={} x etp_size={}", self.ep, self.etp),
            ),
        ] {
            if !self.world.is_multiple_of(product) {
                return Err(TopologyError::World {
                    world: self.world,
                    product,
                    sizes,
                });
            }
        }
        Ok(Topology(self))
    }
}

/// A world of ranks divided twice: into TP x DP for the dense layers and into ETP x EP x
/// expert-DP for the experts. Tensor parallel ranks are neighbours.
///
/// # Source
///
/// The two decompositions over one world, the expert one with its own tensor parallel size, are
/// those of Megatron-LM's `parallel_state.py`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology(TopologyConfig);

/// A rank's position in each of its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coordinates {
    /// In the [`Tp`](crate::Tp) group.
    pub tp: usize,
    /// In the [`Dp`](crate::Dp) group.
    pub dp: usize,
    /// In the [`ExpertTp`](crate::ExpertTp) group.
    pub etp: usize,
    /// In the [`Ep`](crate::Ep) group.
    pub ep: usize,
    /// In the [`ExpertDp`](crate::ExpertDp) group.
    pub expert_dp: usize,
}

impl Topology {
    /// One rank.
    pub fn solo() -> Self {
        Self(TopologyConfig::new(1))
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.0.world
    }

    /// Tensor parallel size of dense layers.
    pub fn tp(&self) -> usize {
        self.0.tp
    }

    /// Expert parallel size.
    pub fn ep(&self) -> usize {
        self.0.ep
    }

    /// Expert tensor parallel size.
    pub fn etp(&self) -> usize {
        self.0.etp
    }

    /// Replicas of the dense layers.
    pub fn dp(&self) -> usize {
        self.0.world / self.0.tp
    }

    /// Replicas of the experts.
    pub fn expert_dp(&self) -> usize {
        self.0.world / (self.0.ep * self.0.etp)
    }

    /// Number of ranks in a group.
    pub fn size(&self, group: GroupName) -> usize {
        match group {
            GroupName::Tp => self.tp(),
            GroupName::ExpertTp => self.etp(),
            GroupName::Ep => self.ep(),
            GroupName::Dp => self.dp(),
            GroupName::ExpertDp => self.expert_dp(),
        }
    }

    /// A rank's position in each group.
    ///
    /// # Errors
    ///
    /// When the rank is outside the world.
    pub fn coordinates(&self, rank: usize) -> Result<Coordinates, TopologyError> {
        if rank >= self.0.world {
            return Err(TopologyError::Rank {
                rank,
                world: self.0.world,
            });
        }
        let Self(TopologyConfig { tp, ep, etp, .. }) = *self;
        Ok(Coordinates {
            tp: rank % tp,
            dp: rank / tp,
            etp: rank % etp,
            ep: rank / etp % ep,
            expert_dp: rank / (etp * ep),
        })
    }

    /// The rank at a position of the dense decomposition.
    pub fn dense_rank(&self, tp: usize, dp: usize) -> usize {
        dp * self.0.tp + tp
    }

    /// The rank at a position of the expert decomposition.
    pub fn expert_rank(&self, etp: usize, ep: usize, expert_dp: usize) -> usize {
        (expert_dp * self.0.ep + ep) * self.0.etp + etp
    }

    /// The ranks of the group that `rank` belongs to, in group order.
    ///
    /// # Errors
    ///
    /// When the rank is outside the world.
    pub fn members(&self, group: GroupName, rank: usize) -> Result<Vec<usize>, TopologyError> {
        let at = self.coordinates(rank)?;
        Ok(match group {
            GroupName::Tp => (0..self.tp()).map(|k| self.dense_rank(k, at.dp)).collect(),
            GroupName::Dp => (0..self.dp()).map(|k| self.dense_rank(at.tp, k)).collect(),
            GroupName::ExpertTp => (0..self.etp())
                .map(|k| self.expert_rank(k, at.ep, at.expert_dp))
                .collect(),
            GroupName::Ep => (0..self.ep())
                .map(|k| self.expert_rank(at.etp, k, at.expert_dp))
                .collect(),
            GroupName::ExpertDp => (0..self.expert_dp())
                .map(|k| self.expert_rank(at.etp, at.ep, k))
                .collect(),
        })
    }

    /// The group over which gradients of expert parameters are summed.
    ///
    /// `Dp` when the experts are laid out exactly as the dense layers are (EP = 1 and ETP = TP),
    /// where both groups have the same members; `ExpertDp` otherwise, EP = 1 with ETP != TP included.
    pub fn expert_gradient_group(&self) -> GroupName {
        if self.ep() == 1 && self.etp() == self.tp() {
            GroupName::Dp
        } else {
            GroupName::ExpertDp
        }
    }

    /// The factor that turns summed gradients of per-rank mean losses into those of the mean over
    /// the whole batch, when each of the EP x expert-DP ranks holds its own tokens.
    ///
    /// Experts receive the tokens of every EP rank, so their gradients already sum over EP: the
    /// divisor is EP x expert-DP, not expert-DP alone. Not needed by a loss that is a sum divided
    /// by the global token count.
    pub fn expert_mean_factor(&self) -> f64 {
        1.0 / (self.ep() * self.expert_dp()) as f64
    }

    /// The global experts that EP rank `ep` holds.
    ///
    /// # Errors
    ///
    /// When EP does not divide the number of experts.
    pub fn local_experts(
        &self,
        num_experts: usize,
        ep: usize,
    ) -> Result<Range<usize>, TopologyError> {
        let local = shard_extent("num_experts", num_experts, "ep_size", self.ep())?;
        Ok(ep * local..(ep + 1) * local)
    }
}

/// The extent of one of `size` equal shards.
///
/// # Errors
///
/// When `size` does not divide `extent`; the message carries both under their names.
pub fn shard_extent(
    what: &'static str,
    extent: usize,
    by: &'static str,
    size: usize,
) -> Result<usize, TopologyError> {
    if size == 0 || !extent.is_multiple_of(size) {
        return Err(TopologyError::Indivisible {
            what,
            extent,
            by,
            size,
        });
    }
    Ok(extent / size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(world: usize, tp: usize, ep: usize, etp: usize) -> Topology {
        TopologyConfig::new(world)
            .with_tp(tp)
            .with_ep(ep)
            .with_etp(etp)
            .init()
            .unwrap()
    }

    #[test]
    fn ranks_and_coordinates_are_inverse_and_every_group_partitions_the_world() {
        for (world, tp, ep, etp) in [(1, 1, 1, 1), (8, 2, 2, 2), (8, 4, 2, 1), (12, 3, 2, 2)] {
            let t = topology(world, tp, ep, etp);
            for rank in 0..world {
                let c = t.coordinates(rank).unwrap();
                assert_eq!(t.dense_rank(c.tp, c.dp), rank);
                assert_eq!(t.expert_rank(c.etp, c.ep, c.expert_dp), rank);
                for (group, at) in [
                    (GroupName::Tp, c.tp),
                    (GroupName::Dp, c.dp),
                    (GroupName::ExpertTp, c.etp),
                    (GroupName::Ep, c.ep),
                    (GroupName::ExpertDp, c.expert_dp),
                ] {
                    let members = t.members(group, rank).unwrap();
                    assert_eq!(members[at], rank);
                    assert_eq!(members.len(), t.size(group));
                    for member in &members {
                        assert_eq!(t.members(group, *member).unwrap(), members);
                    }
                }
            }
        }
    }

    #[test]
    fn groups_of_eight_ranks() {
        let t = topology(8, 4, 2, 2);
        assert_eq!(t.members(GroupName::Tp, 5).unwrap(), [4, 5, 6, 7]);
        assert_eq!(t.members(GroupName::Dp, 5).unwrap(), [1, 5]);
        assert_eq!(t.members(GroupName::ExpertTp, 5).unwrap(), [4, 5]);
        assert_eq!(t.members(GroupName::Ep, 5).unwrap(), [5, 7]);
        assert_eq!(t.members(GroupName::ExpertDp, 5).unwrap(), [1, 5]);
    }

    #[test]
    fn expert_gradients_reduce_over_expert_dp_unless_experts_lie_as_the_dense_layers() {
        for (ep, etp, tp, group) in [
            (1, 2, 2, GroupName::Dp),
            (2, 1, 1, GroupName::ExpertDp),
            (1, 1, 2, GroupName::ExpertDp),
            (1, 2, 1, GroupName::ExpertDp),
        ] {
            let t = topology(4, tp, ep, etp);
            assert_eq!(
                t.expert_gradient_group(),
                group,
                "ep={ep} etp={etp} tp={tp}"
            );
            if group == GroupName::Dp {
                for rank in 0..4 {
                    assert_eq!(
                        t.members(GroupName::Dp, rank),
                        t.members(GroupName::ExpertDp, rank)
                    );
                }
            }
        }
    }

    #[test]
    fn expert_gradients_are_scaled_by_the_whole_ep_and_expert_dp_world() {
        assert_eq!(topology(8, 1, 4, 1).expert_mean_factor(), 1.0 / 8.0);
    }

    #[test]
    fn bad_sizes_are_refused_with_their_values() {
        let error = |c: TopologyConfig| c.init().unwrap_err().to_string();
        assert_eq!(
            error(TopologyConfig::new(6).with_ep(2).with_etp(2)),
            "world_size=6 is not divisible by 4 ranks a replica, ep_size=2 x etp_size=2 (choose sizes whose product divides the world size)"
        );
        assert_eq!(
            error(TopologyConfig::new(4).with_tp(0)),
            "tp_size=0 is not a parallel size (use 1 for no parallelism)"
        );
        assert_eq!(
            topology(8, 1, 8, 1)
                .local_experts(60, 0)
                .unwrap_err()
                .to_string(),
            "num_experts=60 is not divisible by ep_size=8 (choose a divisor of 60 as ep_size)"
        );
        assert_eq!(
            topology(2, 1, 1, 1).coordinates(2).unwrap_err().to_string(),
            "rank=2 is outside world_size=2 (ranks count from 0)"
        );
        let huge = TopologyConfig::new(2).with_ep(usize::MAX).with_etp(2);
        assert!(huge.init().is_err());
    }
}
