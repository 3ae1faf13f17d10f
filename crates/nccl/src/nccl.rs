//! One rank of a world of GPUs.

use std::fmt::{self, Debug};
use std::sync::Arc;
use std::time::Duration;

use burn_cubecl::cubecl::cuda::CudaDevice;
use moe_lora_parallel::{Collective, CollectiveError, CollectiveOp, GroupName, Transport};

use crate::backend::CudaBackend;
use crate::board::Board;
use crate::device::Device;
use crate::group::NcclGroup;
use crate::host::Host;
use crate::world::{Owner, World};
use crate::{Launch, StartError};

/// How ranks over NCCL start and fail.
///
/// ```no_run
/// use moe_lora_nccl::NcclConfig;
/// use std::time::Duration;
///
/// let rank = NcclConfig::new().with_timeout(Duration::from_secs(120)).from_env()?;
/// # Ok::<(), moe_lora_nccl::StartError>(())
/// ```
#[derive(Clone, Debug)]
pub struct NcclConfig {
    timeout: Duration,
    start: Duration,
    checks: bool,
}

impl Default for NcclConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl NcclConfig {
    /// Calls may take 10 minutes, processes 5 minutes to find each other; calls are not compared.
    pub fn new() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            start: Duration::from_secs(300),
            checks: false,
        }
    }

    /// How long a call may take, from the end of the one before it. A rank whose process ends is
    /// found within a second whatever this is.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long processes wait for each other at the start.
    pub fn with_start_timeout(mut self, timeout: Duration) -> Self {
        self.start = timeout;
        self
    }

    /// Whether the ranks compare operation, shape and dtype before every call, the same on every
    /// rank. It finds ranks that disagree, and stops the host in every call. Without it such ranks
    /// run into the timeout, or sum what does not belong together.
    pub fn with_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }

    /// One rank a GPU, for threads of this process.
    ///
    /// # Errors
    ///
    /// When the driver or NCCL is not installed, or a GPU is not there.
    pub fn local(&self, devices: &[CudaDevice]) -> Result<Vec<Nccl>, StartError> {
        let board = Arc::new(Board::default());
        let place = |rank| (rank, devices.len());
        let ranks = devices.iter().enumerate();
        ranks
            .map(|(rank, device)| self.rank(place(rank), device, Host::Here(board.clone())))
            .collect()
    }

    /// This process's rank, as torchrun or SLURM say: see [`Launch`].
    ///
    /// # Errors
    ///
    /// As [`Launch::from_env`]; when the other processes do not come, or do not share the token;
    /// when the driver or NCCL is not installed, or the GPU is not there.
    pub fn from_env(&self) -> Result<Nccl, StartError> {
        self.launch(&Launch::from_env()?)
    }

    /// The rank of a process that knows its place.
    ///
    /// # Errors
    ///
    /// As [`from_env`](Self::from_env), but for the variables.
    pub fn launch(&self, launch: &Launch) -> Result<Nccl, StartError> {
        let place = (launch.rank, launch.world_size);
        let device = CudaDevice::new(launch.local_rank);
        // The GPU first: a rank that has none does not let the others wait for it.
        let gpu = Device::open(device.index, launch.rank)?;
        let host = launch.connect(self.start, self.timeout)?;
        Ok(self.with_gpu(place, device, gpu, host))
    }

    fn rank(
        &self,
        place: (usize, usize),
        device: &CudaDevice,
        host: Host,
    ) -> Result<Nccl, StartError> {
        let gpu = Device::open(device.index, place.0)?;
        Ok(self.with_gpu(place, device.clone(), gpu, host))
    }

    fn with_gpu(&self, place: (usize, usize), device: CudaDevice, gpu: Device, host: Host) -> Nccl {
        let world = World::new(place, host, gpu, self.timeout, self.checks);
        Nccl {
            device,
            owner: Arc::new(Owner::new(world)),
        }
    }
}

/// One rank of a world of GPUs: the [`Transport`] that opens its groups.
///
/// Calls on tensors are queued for the GPU as CubeCL's launches are, and ordered with them by events;
/// the host waits for neither. A call returns an error of its own when its sizes, its tensor's GPU or,
/// with checks, the other ranks' calls do not fit. What is found once it is queued is the error of
/// every later call on any thread: when a rank is lost, a call fails or takes too long, a watchdog
/// aborts what is under way, and the error says what the rank calls now, in which group, and which
/// call or rank was the cause. Values of calls that were queued or under way are then meaningless:
/// [`check`](Self::check) after reading a loss says so.
///
/// Use it and its groups on one thread at a time. The world ends for this rank with the last of
/// them; rank 0's process stays until the other ranks have ended too.
///
/// [`Transport::open`] panics when the members are not ranks of the world, repeat one, or leave
/// this rank out.
pub struct Nccl {
    device: CudaDevice,
    owner: Arc<Owner>,
}

impl Nccl {
    /// As [`NcclConfig::local`], with the defaults.
    ///
    /// # Errors
    ///
    /// As [`NcclConfig::local`].
    pub fn local(devices: &[CudaDevice]) -> Result<Vec<Self>, StartError> {
        NcclConfig::new().local(devices)
    }

    /// As [`NcclConfig::from_env`], with the defaults.
    ///
    /// # Errors
    ///
    /// As [`NcclConfig::from_env`].
    pub fn from_env() -> Result<Self, StartError> {
        NcclConfig::new().from_env()
    }

    /// This rank, `0..world_size`.
    pub fn rank(&self) -> usize {
        self.owner.world.rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.owner.world.size
    }

    /// This rank's GPU.
    pub fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Whether all calls may be relied on whose results have been read.
    ///
    /// # Errors
    ///
    /// What has failed, as a barrier of group Dp would return it.
    pub fn check(&self) -> Result<(), CollectiveError> {
        let world = &self.owner.world;
        world.check(CollectiveOp::Barrier, GroupName::Dp)
    }
}

impl Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, size) = (self.rank(), self.world_size());
        write!(f, "Nccl[{rank}/{size}] on {:?}", self.device)
    }
}

impl<B: CudaBackend> Transport<B> for Nccl {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn open(&self, name: GroupName, members: Vec<usize>) -> Arc<dyn Collective<B>> {
        let (rank, size) = (self.rank(), self.world_size());
        let valid = |(k, member): (usize, &usize)| *member < size && !members[..k].contains(member);
        let index = members.iter().position(|member| *member == rank);
        let index = index.filter(|_| members.iter().enumerate().all(valid));
        let index = index.unwrap_or_else(|| {
            panic!(
                "group {name} of ranks {members:?} cannot be opened by rank {rank} of {size} (members are distinct ranks of the world, this one among them)"
            )
        });
        Arc::new(NcclGroup::new(self.owner.clone(), name, members, index))
    }
}
