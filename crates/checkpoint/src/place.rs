//! Sizes of the groups of a world, and the place of a rank among them.

use crate::CheckpointError;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Ranks of a world; far above any real one, so that a wrong size does not ask for as many files.
const MAX_WORLD: usize = 1 << 16;

/// Sizes of the groups of a world: dense layers are cut over `tp` ranks, experts over `ep` and `etp`.
///
/// Ranks count up along tensor parallelism first, then expert parallelism, then replicas.
///
/// ```
/// use moe_lora_checkpoint::GroupSizes;
///
/// let sizes = GroupSizes::new(2, 2).with_world(8);
/// let place = sizes.place(5)?;
/// assert_eq!((place.ep(), place.etp(), place.expert_dp()), (0, 1, 1));
/// # Ok::<(), moe_lora_checkpoint::CheckpointError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSizes {
    /// Number of ranks.
    pub world: usize,
    /// Tensor parallel size of dense layers.
    pub tp: usize,
    /// Expert parallel size.
    pub ep: usize,
    /// Expert tensor parallel size.
    pub etp: usize,
}

impl GroupSizes {
    /// One replica of the experts over `ep * etp` ranks, dense layers whole on each.
    pub fn new(ep: usize, etp: usize) -> Self {
        Self {
            world: ep.saturating_mul(etp),
            tp: 1,
            ep,
            etp,
        }
    }

    /// Number of ranks; a multiple of `ep * etp` and of `tp`.
    pub fn with_world(mut self, world: usize) -> Self {
        self.world = world;
        self
    }

    /// Tensor parallel size of dense layers.
    pub fn with_tp(mut self, tp: usize) -> Self {
        self.tp = tp;
        self
    }

    /// Checks that the groups divide the world.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::GroupSize`].
    pub fn check(&self) -> Result<(), CheckpointError> {
        let Self { world, tp, ep, etp } = *self;
        let fault = |name, size, expected| {
            Err(CheckpointError::GroupSize {
                name,
                size,
                expected,
            })
        };
        for (name, size) in [("tp_size", tp), ("ep_size", ep), ("etp_size", etp)] {
            if size == 0 {
                return fault(name, size, "at least 1".to_owned());
            }
        }
        if world > MAX_WORLD {
            return fault("world_size", world, format!("at most {MAX_WORLD}"));
        }
        let experts = ep.checked_mul(etp);
        let fits = experts.is_some_and(|experts| world.is_multiple_of(experts));
        if world == 0 || !fits || !world.is_multiple_of(tp) {
            let expected =
                format!("a multiple of ep_size={ep} x etp_size={etp} and of tp_size={tp}");
            return fault("world_size", world, expected);
        }
        Ok(())
    }

    /// The place of a rank.
    ///
    /// # Errors
    ///
    /// When the sizes make no topology, or the rank is outside the world.
    pub fn place(self, rank: usize) -> Result<Place, CheckpointError> {
        self.check()?;
        if rank >= self.world {
            let world = self.world;
            return Err(CheckpointError::Rank { rank, world });
        }
        Ok(Place { sizes: self, rank })
    }

    /// The places of all ranks, in order.
    ///
    /// # Errors
    ///
    /// When the sizes make no topology.
    pub fn places(self) -> Result<impl Iterator<Item = Place>, CheckpointError> {
        self.check()?;
        Ok((0..self.world).map(move |rank| Place { sizes: self, rank }))
    }
}

/// Where a rank is in each of its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    sizes: GroupSizes,
    rank: usize,
}

impl Place {
    /// Sizes of the groups.
    pub fn sizes(&self) -> &GroupSizes {
        &self.sizes
    }

    /// In the tensor parallel group of dense layers.
    pub fn tp(&self) -> usize {
        self.rank % self.sizes.tp
    }

    /// Among the replicas of the dense layers.
    pub fn dp(&self) -> usize {
        self.rank / self.sizes.tp
    }

    /// In the expert tensor parallel group.
    pub fn etp(&self) -> usize {
        self.rank % self.sizes.etp
    }

    /// In the expert parallel group.
    pub fn ep(&self) -> usize {
        self.rank / self.sizes.etp % self.sizes.ep
    }

    /// Among the replicas of the experts.
    pub fn expert_dp(&self) -> usize {
        self.rank / (self.sizes.etp * self.sizes.ep)
    }
}

/// The coordinates that tell a rank from every other, as its files are named: `ep0-etp1-dp0`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (ep, etp, dp) = (self.ep(), self.etp(), self.expert_dp());
        write!(f, "ep{ep}-etp{etp}-dp{dp}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_do_not_divide_the_world_are_refused_with_their_values() {
        let message = |sizes: GroupSizes| sizes.check().unwrap_err().to_string();
        assert_eq!(
            message(GroupSizes::new(2, 2).with_world(6)),
            "world_size=6, expected a multiple of ep_size=2 x etp_size=2 and of tp_size=1 (choose other group sizes)"
        );
        assert!(message(GroupSizes::new(0, 2)).starts_with("ep_size=0, expected at least 1"));
        assert!(message(GroupSizes::new(2, 2).with_tp(3)).contains("tp_size=3"));
        assert!(message(GroupSizes::new(usize::MAX, 2)).contains("world_size"));
        assert!(GroupSizes::new(1, 1).place(1).is_err());
    }

    #[test]
    fn a_world_larger_than_any_real_one_is_refused() {
        let largest = GroupSizes::new(1 << 15, 2);
        largest.check().unwrap();
        let error = largest.with_world(1 << 17).check().unwrap_err();
        assert_eq!(
            error.to_string(),
            "world_size=131072, expected at most 65536 (choose other group sizes)"
        );
        let error = GroupSizes::new(1, usize::MAX).places().err().unwrap();
        assert!(
            error.to_string().contains("expected at most 65536"),
            "{error}"
        );
    }

    #[test]
    fn every_rank_has_a_name_of_its_own() {
        let sizes = GroupSizes::new(2, 2).with_world(8).with_tp(4);
        let mut names: Vec<_> = sizes.places().unwrap().map(|p| p.to_string()).collect();
        assert_eq!(names[6], "ep1-etp0-dp1");
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 8);
    }
}
