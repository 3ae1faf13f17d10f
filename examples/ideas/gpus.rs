//! The same step on the CPU and on GPUs: the backend is one type parameter, the transport one value.

use burn::backend::cuda::CudaDevice;
use burn::backend::{Autodiff, Cuda, Flex};
use burn::tensor::Tensor;
use burn_moe_lora::nccl::{Nccl, gpu_count};
use burn_moe_lora::parallel::Topology;
use burn_moe_lora::prelude::*;
use moe_lora_examples::{Result, assert_close};

// ANCHOR: step
/// Output of a down projection, cut over the ranks; knows neither device nor transport.
fn output<B: AdapterBackend>(mesh: &Mesh<B>, device: &B::Device) -> Result<Vec<f32>> {
    let weight = |_, row, column| (2 * row + column) as f32 / 8.0;
    let mut down: RowLinear<B, ExpertTp> = LinearConfig::new("down_proj", 8, 4)
        .with_experts(0..1)
        .init(mesh.expert_tp(), weight, device)?;
    let lora = LoraConfig::new(2, 4.0).with_init_b(Init::Xavier);
    down.adapt("down_proj", &lora, device)?;
    let x = mesh
        .expert_tp()
        .shard(Tensor::ones([3, 8 / mesh.expert_tp().size()], device));
    let y = down
        .forward_suppressed(x, &RowGroups::whole(3))
        .reduce_from();
    Ok(y.into_tensor().into_data().to_vec().unwrap())
}
// ANCHOR_END: step

/// A rank of this process, on the device of its backend.
fn rank<B: AdapterBackend, T: Transport<B::Base>>(
    topology: Topology,
    transport: &T,
    device: &B::Device,
) -> Result<Vec<f32>> {
    output(&Mesh::<B>::new(topology, transport)?, device)
}

fn main() -> Result<()> {
    let topology = TopologyConfig::new(2).with_etp(2).init()?;
    let cpu = MockWorld::new(2)
        .run_result(|thread| rank::<Autodiff<Flex>, _>(topology, &thread, &Default::default()))?;
    if std::env::var("RANK").is_ok() || std::env::var("SLURM_PROCID").is_ok() {
        // ANCHOR: process
        let nccl = Nccl::from_env()?; // one process a GPU
        let y = rank::<Autodiff<Cuda>, _>(topology, &nccl, nccl.device())?;
        nccl.check()?; // what was read may be relied on
        // ANCHOR_END: process
        assert_close(&y, &cpu[0]);
    } else if gpu_count() >= 2 {
        // ANCHOR: threads
        let devices: Vec<CudaDevice> = (0..2).map(CudaDevice::new).collect();
        let ranks = Nccl::local(&devices)?; // one thread a GPU
        let outputs: Vec<_> = std::thread::scope(|scope| {
            let start = |nccl: Nccl| {
                scope.spawn(move || -> Result<_> {
                    let y = rank::<Autodiff<Cuda>, _>(topology, &nccl, nccl.device())?;
                    nccl.check()?;
                    Ok(y)
                })
            };
            let threads: Vec<_> = ranks.into_iter().map(start).collect();
            let ends = threads.into_iter().map(|thread| thread.join());
            ends.map(|end| end.expect("the rank did not panic"))
                .collect()
        });
        // ANCHOR_END: threads
        for y in outputs {
            assert_close(&y?, &cpu[0]);
        }
    } else {
        println!("skipped: needs 2 GPUs, found {}", gpu_count());
    }
    Ok(())
}
