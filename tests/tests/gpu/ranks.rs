//! Ranks on GPUs, as threads of this process.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use burn_cubecl::cubecl::cuda::CudaDevice;
use moe_lora_nccl::{CudaBackend, Nccl, NcclConfig, gpu_count};
use moe_lora_parallel::{Mesh, ParallelBackend, Topology};
use moe_lora_testkit::Ranks;

/// Not reached by a test that passes, compilation of kernels included.
pub const LONG: Duration = Duration::from_secs(120);

static ALONE: Mutex<()> = Mutex::new(());

/// The machine's GPUs, for one test at a time.
pub struct Gpus {
    /// How many there are.
    pub count: usize,
    _alone: MutexGuard<'static, ()>,
}

/// The GPUs; none when there are fewer than needed, which is said.
///
/// # Panics
///
/// When there are fewer than `MOE_LORA_REQUIRE_GPUS` asks for.
pub fn gpus(needed: usize) -> Option<Gpus> {
    let found = gpu_count();
    let required = std::env::var("MOE_LORA_REQUIRE_GPUS").map_or(0, |n| {
        n.parse()
            .expect("MOE_LORA_REQUIRE_GPUS is a number of GPUs")
    });
    assert!(
        found >= required,
        "MOE_LORA_REQUIRE_GPUS={required}, found {found}"
    );
    if found < needed {
        let test = thread::current();
        let test = test.name().unwrap_or("a test");
        println!("{test} skipped: needs {needed} GPUs, found {found}");
        return None;
    }
    Some(Gpus {
        count: found,
        _alone: ALONE.lock().unwrap_or_else(PoisonError::into_inner),
    })
}

/// A world of threads, one a GPU.
pub fn threads<T: Send>(
    config: &NcclConfig,
    ranks: usize,
    body: impl Fn(Nccl) -> T + Sync,
) -> Vec<T> {
    let devices: Vec<_> = (0..ranks).map(CudaDevice::new).collect();
    each(config.local(&devices).unwrap(), body)
}

/// Gives each rank to a thread of its own: one that panics drops what it was given, which ends the
/// others.
fn each<R: Send, T: Send>(ranks: Vec<R>, body: impl Fn(R) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|rank| scope.spawn(move || body(rank)))
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

/// Ranks over NCCL, one a GPU. Worlds are kept for the next case at the same topology: connecting
/// takes longer than most cases.
pub struct Connected<B: ParallelBackend> {
    worlds: Mutex<Vec<World<B>>>,
}

type World<B> = (Topology, Vec<(Mesh<B>, CudaDevice)>);

impl<B: ParallelBackend> Connected<B> {
    pub fn new() -> Self {
        Self {
            worlds: Mutex::default(),
        }
    }
}

impl<B> Connected<B>
where
    B: ParallelBackend<Device = CudaDevice>,
    B::Base: CudaBackend,
{
    fn world(&self, topology: Topology) -> World<B> {
        let mut worlds = self.worlds.lock().unwrap();
        if let Some(at) = worlds.iter().position(|world| world.0 == topology) {
            return worlds.swap_remove(at);
        }
        let devices: Vec<_> = (0..topology.world_size()).map(CudaDevice::new).collect();
        let config = NcclConfig::new().with_timeout(LONG);
        let ranks = config.local(&devices).unwrap().into_iter();
        let mesh = |rank: Nccl| (Mesh::new(topology, &rank).unwrap(), rank.device().clone());
        (topology, ranks.map(mesh).collect())
    }
}

impl<B> Ranks<B> for Connected<B>
where
    B: ParallelBackend<Device = CudaDevice>,
    B::Base: CudaBackend,
{
    fn run<T: Send>(
        &self,
        topology: Topology,
        body: impl Fn(&Mesh<B>, &CudaDevice) -> T + Sync,
    ) -> Vec<T> {
        let (_, ranks) = self.world(topology);
        let done = each(ranks, |(mesh, device)| {
            let result = body(&mesh, &device);
            ((mesh, device), result)
        });
        let (ranks, results) = done.into_iter().unzip();
        self.worlds.lock().unwrap().push((topology, ranks));
        results
    }
}
