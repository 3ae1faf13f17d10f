//! The groups of ranks, as names, as types and as handles.

use std::fmt::{self, Debug};
use std::marker::PhantomData;
use std::sync::Arc;

use crate::{Collective, CollectiveError, ParallelBackend, Solo, raise};

/// The groups that a topology divides the world into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum GroupName {
    /// Tensor parallel ranks of the dense layers and shared experts.
    Tp,
    /// Tensor parallel ranks of one expert.
    ExpertTp,
    /// Expert parallel ranks: each holds a contiguous range of experts.
    Ep,
    /// Replicas of the dense layers.
    Dp,
    /// Replicas of the experts.
    ExpertDp,
}

impl GroupName {
    /// Every group, in the order in which a [`Mesh`](crate::Mesh) opens them.
    pub const ALL: [GroupName; 5] = [
        GroupName::Tp,
        GroupName::ExpertTp,
        GroupName::Ep,
        GroupName::Dp,
        GroupName::ExpertDp,
    ];
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tp => "tp",
            Self::ExpertTp => "expert_tp",
            Self::Ep => "ep",
            Self::Dp => "dp",
            Self::ExpertDp => "expert_dp",
        })
    }
}

/// A group as a type, so that values over different groups do not mix.
///
/// Implemented by [`Tp`], [`ExpertTp`], [`Ep`], [`Dp`] and [`ExpertDp`].
pub trait GroupKind: Clone + Copy + Debug + Send + Sync + 'static {
    /// The group's name.
    const NAME: GroupName;
}

/// Tensor parallel ranks of the dense layers and shared experts.
#[derive(Clone, Copy, Debug)]
pub struct Tp;
/// Tensor parallel ranks of one expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertTp;
/// Expert parallel ranks.
#[derive(Clone, Copy, Debug)]
pub struct Ep;
/// Replicas of the dense layers.
#[derive(Clone, Copy, Debug)]
pub struct Dp;
/// Replicas of the experts.
#[derive(Clone, Copy, Debug)]
pub struct ExpertDp;

impl GroupKind for Tp {
    const NAME: GroupName = GroupName::Tp;
}
impl GroupKind for ExpertTp {
    const NAME: GroupName = GroupName::ExpertTp;
}
impl GroupKind for Ep {
    const NAME: GroupName = GroupName::Ep;
}
impl GroupKind for Dp {
    const NAME: GroupName = GroupName::Dp;
}
impl GroupKind for ExpertDp {
    const NAME: GroupName = GroupName::ExpertDp;
}

/// One rank's handle on its group `G`: the [`Collective`] under the group's type.
///
/// Cheap to clone. The states of [`crate::state`] carry it, so an operation on a value always
/// communicates over the group that the value belongs to.
pub struct Group<B: ParallelBackend, G: GroupKind> {
    collective: Arc<dyn Collective<B::Base>>,
    kind: PhantomData<G>,
}

impl<B: ParallelBackend, G: GroupKind> Group<B, G> {
    /// Wraps a transport of this group.
    ///
    /// # Panics
    ///
    /// When the transport was opened for another group.
    pub fn new(collective: Arc<dyn Collective<B::Base>>) -> Self {
        assert_eq!(
            collective.name(),
            G::NAME,
            "a transport of group {} cannot carry group {}",
            collective.name(),
            G::NAME
        );
        Self {
            collective,
            kind: PhantomData,
        }
    }

    /// The group of this rank alone.
    pub fn solo() -> Self {
        Self::new(Arc::new(Solo::new(G::NAME)))
    }

    /// Position of this rank within the group.
    pub fn rank(&self) -> usize {
        self.collective.rank()
    }

    /// Number of ranks in the group.
    pub fn size(&self) -> usize {
        self.collective.size()
    }

    /// The transport.
    pub fn collective(&self) -> &Arc<dyn Collective<B::Base>> {
        &self.collective
    }

    /// The same ranks seen from another backend with the same base, such as the inner backend of
    /// an autodiff one.
    pub fn cast<C: ParallelBackend<Base = B::Base>>(&self) -> Group<C, G> {
        Group::new(self.collective.clone())
    }

    /// All-gather of host integers, row `k` from rank `k`.
    ///
    /// # Panics
    ///
    /// When the transport fails, as every region operation does (see [`raise`]).
    pub fn exchange_sizes(&self, sizes: &[usize]) -> Vec<Vec<usize>> {
        if self.size() == 1 {
            return vec![sizes.to_vec()];
        }
        or_raise(self.collective.exchange_sizes(sizes))
    }
}

impl<B: ParallelBackend, G: GroupKind> Clone for Group<B, G> {
    fn clone(&self) -> Self {
        Self {
            collective: self.collective.clone(),
            kind: PhantomData,
        }
    }
}

impl<B: ParallelBackend, G: GroupKind> Debug for Group<B, G> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}/{}]", G::NAME, self.rank(), self.size())
    }
}

/// Unwraps a transport's answer inside code that has no error path, such as a backward pass.
pub(crate) fn or_raise<T>(result: Result<T, CollectiveError>) -> T {
    result.unwrap_or_else(|error| raise(error))
}
