//! The groups of one rank, opened over a transport.

use std::sync::Arc;

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

use crate::region::{GATHER_FROM, apply};
use crate::{
    Collective, Coordinates, Dp, Ep, ExpertDp, ExpertTp, Group, GroupKind, GroupName,
    ParallelBackend, Solo, Topology, TopologyError, Tp,
};

/// Opens groups between the ranks of a world.
pub trait Transport<B: Backend> {
    /// This rank, `0..world_size`.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Opens the group of `members` (world ranks, this rank among them, in group order).
    ///
    /// Every member opens the same groups in the same order.
    fn open(&self, name: GroupName, members: Vec<usize>) -> Arc<dyn Collective<B>>;
}

/// The groups of one rank at a topology.
///
/// ```
/// use burn::backend::Flex;
/// use moe_lora_parallel::Mesh;
///
/// let mesh = Mesh::<Flex>::solo();
/// assert_eq!(mesh.expert_tp().size(), 1);
/// ```
#[derive(Clone, Debug)]
pub struct Mesh<B: ParallelBackend> {
    topology: Topology,
    rank: usize,
    tp: Group<B, Tp>,
    expert_tp: Group<B, ExpertTp>,
    ep: Group<B, Ep>,
    dp: Group<B, Dp>,
    expert_dp: Group<B, ExpertDp>,
}

impl<B: ParallelBackend> Mesh<B> {
    /// Opens every group of this rank.
    ///
    /// # Errors
    ///
    /// When the transport has another number of ranks than the topology.
    pub fn new<T: Transport<B::Base>>(
        topology: Topology,
        transport: &T,
    ) -> Result<Self, TopologyError> {
        if transport.world_size() != topology.world_size() {
            return Err(TopologyError::Transport {
                transport: transport.world_size(),
                topology: topology.world_size(),
            });
        }
        let rank = transport.rank();
        let open = |name| -> Result<Arc<dyn Collective<B::Base>>, TopologyError> {
            let members = topology.members(name, rank)?;
            Ok(if members.len() == 1 {
                Arc::new(Solo::new(name))
            } else {
                transport.open(name, members)
            })
        };
        Ok(Self {
            topology,
            rank,
            tp: Group::new(open(GroupName::Tp)?),
            expert_tp: Group::new(open(GroupName::ExpertTp)?),
            ep: Group::new(open(GroupName::Ep)?),
            dp: Group::new(open(GroupName::Dp)?),
            expert_dp: Group::new(open(GroupName::ExpertDp)?),
        })
    }

    /// A world of one rank.
    pub fn solo() -> Self {
        Self {
            topology: Topology::solo(),
            rank: 0,
            tp: Group::solo(),
            expert_tp: Group::solo(),
            ep: Group::solo(),
            dp: Group::solo(),
            expert_dp: Group::solo(),
        }
    }

    /// The same groups seen from another backend with the same base, such as the inner backend of
    /// an autodiff one after `valid()`.
    pub fn cast<C: ParallelBackend<Base = B::Base>>(&self) -> Mesh<C> {
        Mesh {
            topology: self.topology,
            rank: self.rank,
            tp: self.tp.cast(),
            expert_tp: self.expert_tp.cast(),
            ep: self.ep.cast(),
            dp: self.dp.cast(),
            expert_dp: self.expert_dp.cast(),
        }
    }

    /// The topology.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// This rank of the world.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// This rank's place in every group.
    pub fn coordinates(&self) -> Coordinates {
        self.topology
            .coordinates(self.rank)
            .expect("the rank was checked when the mesh was opened")
    }

    /// Tensor parallel group of dense layers and shared experts.
    pub fn tp(&self) -> &Group<B, Tp> {
        &self.tp
    }

    /// Tensor parallel group of the experts.
    pub fn expert_tp(&self) -> &Group<B, ExpertTp> {
        &self.expert_tp
    }

    /// Expert parallel group.
    pub fn ep(&self) -> &Group<B, Ep> {
        &self.ep
    }

    /// Replicas of the dense layers.
    pub fn dp(&self) -> &Group<B, Dp> {
        &self.dp
    }

    /// Replicas of the experts.
    pub fn expert_dp(&self) -> &Group<B, ExpertDp> {
        &self.expert_dp
    }

    /// The sum of every rank's number, such as its count of tokens. Every rank calls it.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn sum(&self, here: usize) -> usize {
        self.sum_each(&[here])[0]
    }

    /// As [`sum`](Self::sum), of as many numbers as every rank passes, each by itself.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn sum_each(&self, here: &[usize]) -> Vec<usize> {
        // Ranks are expert tensor, then expert, then replica coordinates: three passes reach all.
        fn over<B: ParallelBackend, G: GroupKind>(
            group: &Group<B, G>,
            here: &[usize],
        ) -> Vec<usize> {
            let ranks = group.exchange_sizes(here);
            let sum = |at: usize| ranks.iter().map(|numbers| numbers[at]).sum();
            (0..here.len()).map(sum).collect()
        }
        if here.is_empty() {
            return Vec::new();
        }
        let here = over(&self.expert_tp, here);
        let here = over(&self.ep, &here);
        over(&self.expert_dp, &here)
    }

    /// The values of all ranks, in rank order. Every rank passes as many.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn gather(&self, values: Tensor<B, 1>) -> Tensor<B, 1> {
        fn over<B: ParallelBackend, G: GroupKind>(
            values: Tensor<B, 1>,
            group: &Group<B, G>,
        ) -> Tensor<B, 1> {
            let sizes = vec![values.dims()[0]; group.size()].into();
            apply(values, GATHER_FROM, group, 0, &sizes)
        }
        let values = over(values, &self.expert_tp);
        let values = over(values, &self.ep);
        over(values, &self.expert_dp)
    }

    /// Whether it is so on every rank of the world. Every rank calls it.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn all(&self, here: bool) -> bool {
        self.sum(usize::from(!here)) == 0
    }
}
