//! A world of ranks that are threads of one process: any backend, one device or several.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use burn::tensor::DType;
use burn::tensor::backend::Backend;
use thiserror::Error;

use crate::error::supervise;
use crate::{Collective, CollectiveError, CollectiveOp, GroupName, Transport};

mod group;
mod rendezvous;

use group::MockGroup;
use rendezvous::Rendezvous;

/// Ranks as threads, for tests and for a first look at several ranks on one machine.
///
/// Results do not depend on timing: every rank computes its own from what all of them posted, in
/// rank order. A group whose ranks disagree, or one of whose ranks has ended or does not come
/// within the timeout, errs on every rank. After such an error the group is of no more use.
///
/// Under autodiff, two things to know. Each rank makes its own leaves: ranks that share a tracked
/// tensor share burn's graph and its lock, and wait for each other. And at the end of a backward
/// pass burn takes the lock of every graph of the process, so ranks run as many backward passes
/// as each other and meet between two of them, as a training step does in its forward pass or
/// [`barrier`](Collective::barrier) makes them.
///
/// ```
/// use burn::backend::Flex;
/// use burn::tensor::{Tensor, TensorPrimitive};
/// use moe_lora_parallel::{Mesh, MockWorld, TopologyConfig};
///
/// let topology = TopologyConfig::new(2).with_etp(2).init()?;
/// let sums = MockWorld::new(2).run(|rank| {
///     let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
///     let x = Tensor::<Flex, 1>::full([1], rank.rank() as f32 + 1.0, &Default::default());
///     let group = mesh.expert_tp().collective();
///     let sum = group.all_reduce(x.into_primitive().tensor()).unwrap();
///     Tensor::<Flex, 1>::from_primitive(TensorPrimitive::Float(sum)).into_scalar()
/// })?;
/// assert_eq!(sums, [3.0, 3.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct MockWorld {
    size: usize,
    timeout: Duration,
    board: Arc<Rendezvous>,
    log: Arc<Log>,
}

/// One rank of a [`MockWorld`]: the [`Transport`] that opens its groups.
///
/// [`Transport::open`] panics when the members are not ranks of the world, repeat one, or leave
/// this rank out.
#[derive(Clone)]
pub struct MockRank {
    rank: usize,
    size: usize,
    board: Arc<Rendezvous>,
    log: Arc<Log>,
}

/// A recorded call of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The group's name.
    pub group: GroupName,
    /// World ranks of the group, in group order.
    pub members: Vec<usize>,
    /// What was called.
    pub op: CollectiveOp,
    /// Shape of the tensor that this rank passed; `[len]` for the integers of `exchange_sizes`
    /// and `[]` for a barrier.
    pub shape: Vec<usize>,
    /// Dtype of the tensor; none for `exchange_sizes` and a barrier.
    pub dtype: Option<DType>,
}

/// Why a [`MockWorld`] did not run to its end: the first cause, not what followed from it on
/// other ranks.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// A collective failed, and [`raise`](crate::raise) or a returned error ended the rank.
    #[error("rank {rank} failed: {source}")]
    Collective {
        /// The rank.
        rank: usize,
        /// The collective's error.
        source: CollectiveError,
    },
    /// A rank returned an error of its own.
    #[error("rank {rank} failed: {source}")]
    Failed {
        /// The rank.
        rank: usize,
        /// The error that it returned.
        source: Box<dyn StdError + Send + Sync>,
    },
    /// A rank panicked.
    #[error("rank {rank} panicked: {message}")]
    Panicked {
        /// The rank.
        rank: usize,
        /// The panic's message.
        message: String,
    },
    /// A rank's thread could not be started.
    #[error("rank {rank} was not started: {source}")]
    NotStarted {
        /// The rank.
        rank: usize,
        /// The operating system's error.
        source: std::io::Error,
    },
}

impl MockWorld {
    /// A world of `world_size` ranks that wait 60 s for each other.
    pub fn new(world_size: usize) -> Self {
        let timeout = Duration::from_secs(60);
        Self {
            size: world_size,
            timeout,
            board: Arc::new(Rendezvous::new(world_size, timeout)),
            log: Arc::new(Log(Mutex::new(vec![Vec::new(); world_size]))),
        }
    }

    /// How long a rank waits in a collective for the others.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self.board = Arc::new(Rendezvous::new(self.size, timeout));
        self
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.size
    }

    /// A handle on rank `rank`, for a caller that starts its own threads: nobody tells the others
    /// when such a rank ends, so they wait for it until the timeout. These handles do not meet the
    /// ranks of [`run`](Self::run).
    ///
    /// # Panics
    ///
    /// When the rank is outside the world.
    pub fn rank(&self, rank: usize) -> MockRank {
        assert!(
            rank < self.size,
            "rank={rank} is outside world_size={} (ranks count from 0)",
            self.size
        );
        self.rank_at(rank, &self.board)
    }

    fn rank_at(&self, rank: usize, board: &Arc<Rendezvous>) -> MockRank {
        MockRank {
            rank,
            size: self.size,
            board: board.clone(),
            log: self.log.clone(),
        }
    }

    /// Runs `f` once a rank, each on a thread of its own, and returns the results in rank order.
    ///
    /// A rank that ends, however it ends, releases the ranks that wait for it. All threads are
    /// joined: a rank that hangs outside of a collective hangs the call.
    ///
    /// # Errors
    ///
    /// When a rank panics, [`raise`](crate::raise) included.
    pub fn run<T: Send>(&self, f: impl Fn(MockRank) -> T + Sync) -> Result<Vec<T>, LaunchError> {
        self.launch(|rank| Ok(f(rank)))
    }

    /// As [`run`](Self::run), for ranks that return errors: the first cause among them is returned.
    ///
    /// # Errors
    ///
    /// When a rank panics or returns an error.
    pub fn run_result<T: Send, E: Into<Box<dyn StdError + Send + Sync>>>(
        &self,
        f: impl Fn(MockRank) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, LaunchError> {
        self.launch(|rank| f(rank).map_err(Into::into))
    }

    /// What rank `rank` has called so far, in order, failed calls included.
    ///
    /// # Panics
    ///
    /// When the rank is outside the world.
    pub fn calls(&self, rank: usize) -> Vec<Call> {
        self.log.lock()[rank].clone()
    }

    /// As [`calls`](Self::calls), and forgets them.
    ///
    /// # Panics
    ///
    /// When the rank is outside the world.
    pub fn take_calls(&self, rank: usize) -> Vec<Call> {
        std::mem::take(&mut self.log.lock()[rank])
    }

    fn launch<T: Send>(
        &self,
        f: impl Fn(MockRank) -> Result<T, Box<dyn StdError + Send + Sync>> + Sync,
    ) -> Result<Vec<T>, LaunchError> {
        let stream = DeviceStream::current();
        let body = |handle: MockRank| {
            supervise();
            let (rank, board) = (handle.rank, handle.board.clone());
            let outcome = match catch_unwind(AssertUnwindSafe(|| stream.run(|| f(handle)))) {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(error)) => Err(LaunchError::from_error(rank, error)),
                Err(panic) => Err(LaunchError::from_panic(rank, panic)),
            };
            let reason = outcome.as_ref().err().map(LaunchError::reason);
            let order = board.depart(rank, reason.unwrap_or_else(|| "has finished".into()));
            outcome.map_err(|error| (order, error))
        };
        // A world of its own, so that ranks that ended in an earlier run are not missed in this one.
        let board = Arc::new(Rendezvous::new(self.size, self.timeout));
        let outcomes: Vec<_> = thread::scope(|scope| {
            let start = |handle: MockRank| {
                let (rank, board) = (handle.rank, handle.board.clone());
                thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .spawn_scoped(scope, || body(handle))
                    .map_err(|source| {
                        let order = board.depart(rank, format!("was not started: {source}"));
                        (order, LaunchError::NotStarted { rank, source })
                    })
            };
            let threads: Vec<_> = (0..self.size)
                .map(|rank| start(self.rank_at(rank, &board)))
                .collect();
            let join = |thread: thread::ScopedJoinHandle<'_, _>| {
                thread
                    .join()
                    .unwrap_or_else(|p| std::panic::resume_unwind(p))
            };
            threads.into_iter().map(|t| t.and_then(join)).collect()
        });
        let mut values = Vec::with_capacity(self.size);
        let mut errors = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok(value) => values.push(value),
                Err(error) => errors.push(error),
            }
        }
        first_cause(errors).map_or(Ok(values), Err)
    }
}

impl MockRank {
    /// This rank, `0..world_size`.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.size
    }
}

impl Debug for MockWorld {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MockWorld[{}]", self.size)
    }
}

impl Debug for MockRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MockRank[{}/{}]", self.rank, self.size)
    }
}

impl<B: Backend> Transport<B> for MockRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.size
    }

    fn open(&self, name: GroupName, members: Vec<usize>) -> Arc<dyn Collective<B>> {
        let valid =
            |(k, member): (usize, &usize)| *member < self.size && !members[..k].contains(member);
        let index = members.iter().position(|member| *member == self.rank);
        let index = index.filter(|_| members.iter().enumerate().all(valid));
        let index = index.unwrap_or_else(|| {
            panic!(
                "group {name} of ranks {members:?} cannot be opened by rank {} of {} (members are distinct ranks of the world, this one among them)",
                self.rank, self.size
            )
        });
        Arc::new(MockGroup {
            seat: self.board.open(name, members, index),
            board: self.board.clone(),
            log: self.log.clone(),
        })
    }
}

impl LaunchError {
    fn from_error(rank: usize, error: Box<dyn StdError + Send + Sync>) -> Self {
        match error.downcast::<CollectiveError>() {
            Ok(source) => Self::Collective {
                rank,
                source: *source,
            },
            Err(source) => Self::Failed { rank, source },
        }
    }

    fn from_panic(rank: usize, panic: Box<dyn Any + Send>) -> Self {
        let message = match panic.downcast::<CollectiveError>() {
            Ok(source) => {
                return Self::Collective {
                    rank,
                    source: *source,
                };
            }
            Err(panic) => match panic.downcast::<String>() {
                Ok(message) => *message,
                Err(panic) => panic.downcast_ref::<&str>().map_or_else(
                    || "with a value that is no message".into(),
                    |m| m.to_string(),
                ),
            },
        };
        Self::Panicked { rank, message }
    }

    fn collective(&self) -> Option<&CollectiveError> {
        let mut error: &(dyn StdError + 'static) = match self {
            Self::Collective { source, .. } => return Some(source),
            Self::Failed { source, .. } => source.as_ref(),
            _ => return None,
        };
        loop {
            match error.downcast_ref() {
                Some(collective) => return Some(collective),
                None => error = error.source()?,
            }
        }
    }

    /// How the rank ended, as other ranks are told.
    fn reason(&self) -> String {
        const FOLLOWS: &str = "stopped because";
        match (self.collective(), self) {
            // Only the first cause is passed on, or the reason would grow with every rank.
            (
                Some(CollectiveError::Departed {
                    departed, reason, ..
                }),
                _,
            ) => {
                if reason.starts_with(FOLLOWS) {
                    reason.clone()
                } else {
                    format!("{FOLLOWS} rank {departed} {reason}")
                }
            }
            (_, Self::Collective { source, .. }) => format!("failed: {source}"),
            (_, Self::Failed { source, .. }) => format!("failed: {source}"),
            (_, Self::Panicked { message, .. }) => format!("panicked: {message}"),
            (_, Self::NotStarted { source, .. }) => format!("was not started: {source}"),
        }
    }
}

/// The error that the others follow from: the earliest that is not about a departed rank. Of one
/// fault that several ranks report, the lowest rank's, so that the message does not depend on
/// which of them was quickest. `errors` are in rank order, each after the number of ranks that
/// departed before.
fn first_cause(mut errors: Vec<(usize, LaunchError)>) -> Option<LaunchError> {
    use CollectiveError::{Departed, Mismatch, Timeout};
    let follows = |e: &LaunchError| matches!(e.collective(), Some(Departed { .. }));
    let earliest = (0..errors.len()).min_by_key(|k| (follows(&errors[*k].1), errors[*k].0))?;
    let cause = errors[earliest].1.collective();
    let same = |(_, error): &(usize, LaunchError)| match (cause, error.collective()) {
        (Some(Mismatch { calls: a, .. }), Some(Mismatch { calls: b, .. })) => a == b,
        (Some(Timeout { missing: a, .. }), Some(Timeout { missing: b, .. })) => a == b,
        _ => false,
    };
    let lowest = errors.iter().position(same).unwrap_or(earliest);
    Some(errors.swap_remove(lowest).1)
}

/// The CubeCL stream that ranks share on a device.
///
/// By default each thread has one of its own, and CubeCL 0.10 does not order everything that two of them
/// do to one tensor: with a stream each, two ranks on one WGPU device trained to other losses in every
/// run; on one stream they agree with the CPU to rounding.
#[derive(Clone, Copy)]
struct DeviceStream {
    #[cfg(feature = "cubecl")]
    id: burn_cubecl::cubecl::stream_id::StreamId,
}

impl DeviceStream {
    /// That of this thread.
    fn current() -> Self {
        Self {
            #[cfg(feature = "cubecl")]
            id: burn_cubecl::cubecl::stream_id::StreamId::current(),
        }
    }

    /// Calls `f` with all of its device work on this stream.
    fn run<T>(self, f: impl FnOnce() -> T) -> T {
        #[cfg(feature = "cubecl")]
        return self.id.executes(f);
        #[cfg(not(feature = "cubecl"))]
        f()
    }
}

/// Calls by rank.
#[derive(Debug)]
struct Log(Mutex<Vec<Vec<Call>>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, Vec<Vec<Call>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
