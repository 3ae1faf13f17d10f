//! Where the ranks of a job start: as threads of this process, or this process as one of them.

use std::env;
use std::time::Duration;

use anyhow::{Result, ensure};
use burn::backend::{Autodiff, Flex};
use burn_moe_lora::adapters::TrainBackend;
use burn_moe_lora::parallel::{
    CollectiveError, Mesh, MockWorld, ParallelBackend, Topology, TopologyError, Transport, raise,
};

use crate::backend::{BackendKind, TransportKind};
use crate::job::Job;
use crate::report::Summary;

/// The job's backend on the CPU.
pub type CpuBackend = Autodiff<Flex>;

/// How long a rank waits for the others, which may be writing a large model.
const TIMEOUT: Duration = Duration::from_secs(600);

/// One rank: its groups and its device.
pub struct Rank<B: ParallelBackend> {
    /// The groups.
    pub mesh: Mesh<B>,
    /// What it computes on.
    pub device: B::Device,
    check: Box<dyn Fn() -> Result<(), CollectiveError>>,
}

impl<B: ParallelBackend> Rank<B> {
    /// The rank of `transport` at `topology`; `check` says whether its calls so far may be relied on.
    fn new<T: Transport<B::Base> + 'static>(
        topology: Topology,
        transport: T,
        device: B::Device,
        check: impl Fn(&T) -> Result<(), CollectiveError> + 'static,
    ) -> Result<Self, TopologyError> {
        Ok(Self {
            mesh: Mesh::new(topology, &transport)?,
            device,
            check: Box::new(move || check(&transport)),
        })
    }

    /// Whether this is rank 0, which prints, and writes what belongs to no rank.
    pub fn is_first(&self) -> bool {
        self.mesh.rank() == 0
    }

    /// Ends the rank if values that it has read come from a collective that failed.
    ///
    /// # Panics
    /// With the collective's error, which [`run`] returns.
    pub fn check(&self) {
        if let Err(error) = (self.check)() {
            raise(error)
        }
    }

    /// The outcome of this rank, if it is good on every rank. Every rank calls it.
    ///
    /// # Errors
    /// Its own, or that another rank has one.
    ///
    /// # Panics
    /// If a collective fails.
    pub fn agree<T>(&self, outcome: Result<T>) -> Result<T> {
        let all = self.mesh.all(outcome.is_ok());
        let value = outcome?;
        let rank = self.mesh.rank();
        ensure!(all, "rank {rank} ends with another rank (see its message)");
        Ok(value)
    }
}

/// Runs a job on all of its ranks, or on the one that a launcher has made of this process. Only rank 0 has a summary.
///
/// # Errors
/// Ranks that cannot start, or one that fails.
pub fn run(job: &Job) -> Result<Option<Summary>> {
    let (backend, transport) = (job.args.backend, job.args.transport());
    if transport == TransportKind::Mock {
        alone(|name| env::var(name).ok())?;
    }
    match (backend, transport) {
        (BackendKind::Cpu, _) => threads::<CpuBackend>(job),
        #[cfg(feature = "wgpu")]
        (BackendKind::Wgpu, _) => threads::<Autodiff<burn::backend::Wgpu>>(job),
        #[cfg(feature = "cuda")]
        (BackendKind::Cuda, TransportKind::Mock) => threads::<cuda::CudaBackend>(job),
        #[cfg(feature = "cuda")]
        (BackendKind::Cuda, TransportKind::Nccl) => cuda::gpus(job),
        #[allow(unreachable_patterns)]
        (other, _) => Err(other.not_built()),
    }
}

/// Every rank a thread, all on the default device.
fn threads<B: TrainBackend>(job: &Job) -> Result<Option<Summary>> {
    let world = MockWorld::new(job.layout.world).with_timeout(TIMEOUT);
    let outcomes = world.run(|rank| {
        let rank = Rank::<B>::new(job.topology, rank, Default::default(), |_| Ok(()));
        job.train_on(&rank?)
    })?;
    first(outcomes)
}

/// What rank 0, the first, has to say.
fn first(outcomes: Vec<Result<Option<Summary>>>) -> Result<Option<Summary>> {
    outcomes.into_iter().next().unwrap_or(Ok(None))
}

/// Whether a launcher has started this process.
#[cfg(feature = "cuda")]
fn launched(var: impl Fn(&str) -> Option<String>) -> bool {
    ["RANK", "SLURM_PROCID"]
        .iter()
        .any(|name| var(name).is_some())
}

/// Refuses to be one of several processes that would each do the whole job, and write the same files.
fn alone(var: impl Fn(&str) -> Option<String>) -> Result<()> {
    for (rank, size) in [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")] {
        let (Some(_), Some(size_text)) = (var(rank), var(size)) else {
            continue;
        };
        ensure!(
            size_text.trim() == "1",
            "{size}={size_text} processes would each run all ranks of the transport mock (start one process without a \
             launcher, unset {rank}, or use --backend cuda --transport nccl)"
        );
    }
    Ok(())
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::sync::{Mutex, PoisonError};

    use anyhow::{anyhow, ensure};
    use burn::backend::Cuda;
    use burn::backend::cuda::CudaDevice;
    use burn_moe_lora::nccl::{Launch, Nccl, NcclConfig, gpu_count};
    use burn_moe_lora::parallel::LaunchError;

    use super::*;

    /// The job's backend on NVIDIA GPUs.
    pub type CudaBackend = Autodiff<Cuda>;

    /// Every rank a GPU: a process each under a launcher, else a thread each.
    pub fn gpus(job: &Job) -> Result<Option<Summary>> {
        let config = NcclConfig::new().with_timeout(TIMEOUT);
        let ranks = job.layout.world;
        if launched(|name| env::var(name).ok()) {
            let launch = Launch::from_env()?;
            ensure!(
                launch.world_size == ranks,
                "the launcher has started {} processes and the topology has {ranks} ranks (start {ranks} processes, \
                 change --ep, --etp or --world, or unset RANK and SLURM_PROCID to run the ranks as threads)",
                launch.world_size
            );
            let rank = launch.rank;
            let outcomes = supervised(job, vec![config.launch(&launch)?]);
            return first(outcomes.map_err(|error| own(error, rank))?);
        }
        let found = gpu_count();
        ensure!(
            ranks <= found,
            "{ranks} ranks need a GPU each and {found} are here (change --ep, --etp or --world, or let the ranks share \
             one with --transport mock)"
        );
        let devices: Vec<_> = (0..ranks).map(CudaDevice::new).collect();
        first(supervised(job, config.local(&devices)?)?)
    }

    /// A thread for each of `ranks`. The threads are those of a mock world, which tells the first cause of a failure; none
    /// of its groups is opened.
    fn supervised(
        job: &Job,
        ranks: Vec<Nccl>,
    ) -> Result<Vec<Result<Option<Summary>>>, LaunchError> {
        let ranks: Vec<_> = ranks
            .into_iter()
            .map(|rank| Mutex::new(Some(rank)))
            .collect();
        MockWorld::new(ranks.len()).run(|thread| {
            let rank = ranks[thread.rank()].lock();
            let nccl = rank.unwrap_or_else(PoisonError::into_inner).take();
            let nccl = nccl.expect("each thread takes its own rank, once");
            let device = nccl.device().clone();
            job.train_on(&Rank::<CudaBackend>::new(
                job.topology,
                nccl,
                device,
                Nccl::check,
            )?)
        })
    }

    /// The error of the one rank of a process: its thread does not know which of the world's it is.
    fn own(error: LaunchError, rank: usize) -> anyhow::Error {
        match error {
            LaunchError::Collective { source, .. } => source.into(),
            LaunchError::Panicked { message, .. } => anyhow!("rank {rank} panicked: {message}"),
            other => other.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_several_does_not_run_all_ranks() {
        let of = |vars: &'static [(&str, &str)]| {
            move |name: &str| {
                let found = vars.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| value.to_string())
            }
        };
        assert!(alone(of(&[])).is_ok());
        assert!(alone(of(&[("RANK", "0"), ("WORLD_SIZE", "1")])).is_ok());
        // A variable of the allocation alone.
        assert!(alone(of(&[("SLURM_NTASKS", "2")])).is_ok());
        let error = alone(of(&[("RANK", "1"), ("WORLD_SIZE", "2")])).unwrap_err();
        assert_eq!(
            error.to_string(),
            "WORLD_SIZE=2 processes would each run all ranks of the transport mock (start one process without a \
             launcher, unset RANK, or use --backend cuda --transport nccl)"
        );
        assert!(alone(of(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")])).is_err());
    }

    #[test]
    fn what_fails_on_one_rank_ends_every_rank() {
        let topology = burn_moe_lora::parallel::TopologyConfig::new(2).with_etp(2);
        let topology = topology.init().unwrap();
        let outcomes = MockWorld::new(2).run(|rank| {
            let index = rank.rank();
            let rank = Rank::<Flex>::new(topology, rank, Default::default(), |_| Ok(())).unwrap();
            assert_eq!(rank.agree(Ok(index)).unwrap(), index);
            let outcome = match index {
                0 => Err(anyhow::anyhow!("the disk is full")),
                _ => Ok(()),
            };
            rank.agree(outcome).unwrap_err().to_string()
        });
        assert_eq!(
            outcomes.unwrap(),
            [
                "the disk is full",
                "rank 1 ends with another rank (see its message)"
            ]
        );
    }
}
