//! The transport on two GPUs.

use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_cubecl::cubecl::Runtime;
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn_cubecl::cubecl::device::Device;
use burn_cubecl::cubecl::device_handle::DeviceHandle;
use moe_lora_nccl::{CudaBackend, Nccl, NcclConfig, gpu_count};
use moe_lora_parallel::{Collective, CollectiveError, GroupName, Mesh, TopologyConfig, Transport};
use moe_lora_testkit::{Body, conformance};

use crate::processes::{ROLE, output, processes};
use crate::ranks::{LONG, gpus, threads};
use crate::{Fused, Plain};

/// Longer than any call takes to be queued, and than the timeouts of the tests that hold a GPU's thread.
const HELD: Duration = Duration::from_secs(30);
/// The test that is a process of the tests here.
const PROCESS: &str = "transport::role";

/// Those in which the suite's values are exact on so many ranks.
fn dtypes(ranks: usize) -> &'static [DType] {
    match ranks {
        2 => &[DType::F32, DType::F16, DType::BF16],
        _ => &[DType::F32, DType::F16],
    }
}

fn checked() -> NcclConfig {
    NcclConfig::new().with_timeout(LONG).with_checks(true)
}

fn threads_conform<B: CudaBackend>() {
    let Some(gpus) = gpus(2) else { return };
    let most = gpus.count.min(4);
    conformance::<B>(most, dtypes(most), |ranks, body: Body<'_, B>| {
        threads(&checked(), ranks, |rank| {
            let device = rank.device().clone();
            body(&rank, &device);
        });
    });
}

#[test]
fn ranks_as_threads_conform() {
    threads_conform::<Plain>();
}

#[test]
fn ranks_as_threads_conform_with_fusion() {
    threads_conform::<Fused>();
}

fn full<B: Backend>(shape: [usize; 2], value: f32, device: &B::Device) -> Tensor<B, 2> {
    Tensor::full(shape, value, device)
}

fn sum<B: Backend>(group: &dyn Collective<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    let sum = group.all_reduce(x.into_primitive().tensor()).unwrap();
    Tensor::from_primitive(TensorPrimitive::Float(sum))
}

/// Nothing but events orders the matmul, the sum and the product: a wrong order is a wrong number.
fn calls_are_ordered<B: CudaBackend>() {
    let Some(_gpus) = gpus(2) else { return };
    let config = NcclConfig::new().with_timeout(LONG);
    threads(&config, 2, |rank| {
        let device = rank.device().clone();
        let group = Transport::<B>::open(&rank, GroupName::Tp, vec![0, 1]);
        let mut last: Vec<(f32, Tensor<B, 2>)> = Vec::new();
        for round in 0..50 {
            let value = |rank: usize| (rank + 1 + round) as f32 / 64.0;
            let x = full::<B>([4096, 2048], value(rank.rank()), &device);
            let z = x.matmul(full([2048, 32], 0.5, &device));
            let y = sum(&*group, z) * 2.0;
            last.push(((value(0) + value(1)) * 2048.0, y));
        }
        for (expected, y) in last {
            let (low, high) = (y.clone().min(), y.max());
            for found in [low, high].map(|y| y.into_scalar()) {
                let found: f32 = burn::tensor::ElementConversion::elem(found);
                assert_eq!(found, expected, "rank {}", rank.rank());
            }
        }
        rank.check().unwrap();
    });
}

#[test]
fn sums_come_after_what_they_sum_and_before_what_uses_them() {
    calls_are_ordered::<Plain>();
}

#[test]
fn sums_come_after_what_they_sum_and_before_what_uses_them_with_fusion() {
    calls_are_ordered::<Fused>();
}

#[test]
fn a_tensor_that_is_used_elsewhere_keeps_its_values() {
    let Some(_gpus) = gpus(2) else { return };
    threads(&NcclConfig::new().with_timeout(LONG), 2, |rank| {
        let device = rank.device().clone();
        let group = Transport::<Plain>::open(&rank, GroupName::Tp, vec![0, 1]);
        let x = full::<Plain>([64, 32], 1.0 + rank.rank() as f32, &device);
        let y = sum(&*group, x.clone());
        let own = group.broadcast(x.clone().into_primitive().tensor(), 0);
        let first = Tensor::<Plain, 2>::from_primitive(TensorPrimitive::Float(own.unwrap()));
        assert_eq!(y.max().into_scalar(), 3.0);
        assert_eq!(first.max().into_scalar(), 1.0);
        assert_eq!(x.max().into_scalar(), 1.0 + rank.rank() as f32);
    });
}

#[test]
fn a_mesh_opens_and_sums_over_its_groups() {
    let Some(_gpus) = gpus(2) else { return };
    for (ep, etp) in [(1, 2), (2, 1)] {
        let topology = TopologyConfig::new(2).with_ep(ep).with_etp(etp);
        let topology = topology.with_tp(2).init().unwrap();
        threads(&checked(), 2, |rank| {
            let mesh = Mesh::<Plain>::new(topology, &rank).unwrap();
            let device = rank.device();
            let one = || full::<Plain>([8, 4], 1.0, device);
            let groups = [
                (mesh.tp().collective(), 2),
                (mesh.expert_tp().collective(), etp),
                (mesh.ep().collective(), ep),
            ];
            for (group, size) in groups {
                assert_eq!(sum(&**group, one()).max().into_scalar(), size as f32);
            }
            assert!(mesh.all(true));
            assert!(!mesh.all(rank.rank() == 0));
        });
    }
}

#[test]
fn a_tensor_of_another_gpu_is_refused() {
    let Some(_gpus) = gpus(2) else { return };
    threads(&checked(), 2, |rank| {
        let group = Transport::<Plain>::open(&rank, GroupName::Tp, vec![0, 1]);
        let other = CudaDevice::new(1 - rank.rank());
        let x = full::<Plain>([2, 2], 1.0, &other).into_primitive().tensor();
        let error = group.all_reduce(x).unwrap_err().to_string();
        let k = rank.rank();
        assert_eq!(
            error,
            format!(
                "all_reduce on group tp at rank {k}: the tensor is on Cuda({}), the rank on gpu {k}",
                1 - k
            )
        );
    });
}

#[test]
fn a_rank_that_panics_ends_the_others_before_the_timeout() {
    let Some(_gpus) = gpus(2) else { return };
    let start = Instant::now();
    let devices = [0, 1].map(CudaDevice::new);
    let config = NcclConfig::new().with_timeout(LONG);
    let mut ranks = config.local(&devices).unwrap().into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let panics = thread::spawn(move || {
        let _second = second;
        panic!("on purpose");
    });
    let error = error_of(&first);
    assert!(
        matches!(error, CollectiveError::Departed { departed: 1, .. }),
        "{error}"
    );
    assert!(panics.join().is_err());
    assert!(start.elapsed() < LONG);
}

/// Sums until it fails.
fn error_of(rank: &Nccl) -> CollectiveError {
    let group = Transport::<Plain>::open(rank, GroupName::Tp, vec![0, 1]);
    error_in(&*group, rank.device())
}

fn error_in(group: &dyn Collective<Plain>, device: &CudaDevice) -> CollectiveError {
    loop {
        let x = full::<Plain>([64, 32], 1.0, device);
        if let Err(error) = group.all_reduce(x.into_primitive().tensor()) {
            return error;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Keeps CubeCL's thread of a GPU busy, until the sender sends or goes: nothing leaves the queue.
fn hold(device: &CudaDevice) -> Sender<()> {
    let (release, released) = mpsc::channel();
    let queue = DeviceHandle::<<CudaRuntime as Runtime>::Server>::new(device.to_id());
    queue.submit(move |_| {
        let _ = released.recv_timeout(HELD);
    });
    queue.flush_queue();
    release
}

/// A group whose members are connected, with a tensor for the next call on the GPU.
fn connected(rank: &Nccl) -> (Arc<dyn Collective<Plain>>, Tensor<Plain, 2>) {
    let group = Transport::<Plain>::open(rank, GroupName::Tp, vec![0, 1]);
    let one = || full::<Plain>([64, 32], 1.0, rank.device());
    assert_eq!(sum(&*group, one()).max().into_scalar(), 2.0);
    let x = one();
    Plain::sync(rank.device()).unwrap();
    (group, x)
}

#[test]
fn a_call_is_queued_and_returns_while_the_gpu_s_thread_is_busy() {
    let Some(_gpus) = gpus(2) else { return };
    threads(&NcclConfig::new().with_timeout(LONG), 2, |rank| {
        let (group, x) = connected(&rank);
        let release = hold(rank.device());
        let start = Instant::now();
        let y = sum(&*group, x);
        let took = start.elapsed();
        drop(release);
        assert!(took < HELD / 2, "{took:?}");
        assert_eq!(y.max().into_scalar(), 2.0);
        rank.check().unwrap();
    });
}

#[test]
fn calls_that_are_queued_when_the_world_ends_still_take_place() {
    let Some(_gpus) = gpus(2) else { return };
    threads(&NcclConfig::new().with_timeout(LONG), 2, |rank| {
        let (group, x) = connected(&rank);
        let release = hold(rank.device());
        let y = sum(&*group, x);
        let later = thread::spawn(move || {
            thread::sleep(Duration::from_millis(300));
            drop(release);
        });
        drop((group, rank));
        later.join().unwrap();
        let (low, high) = (y.clone().min(), y.max());
        assert_eq!([low, high].map(Tensor::into_scalar), [2.0, 2.0]);
    });
}

#[test]
fn a_call_that_fails_in_the_queue_is_an_error_of_check_and_of_the_next_call_of_every_rank() {
    let Some(_gpus) = gpus(2) else { return };
    let start = Instant::now();
    threads(&NcclConfig::new().with_timeout(LONG), 2, |rank| {
        let (group, x) = connected(&rank);
        let cause = "all_reduce on group tp: NCCL has no Flex32";
        if rank.rank() == 0 {
            let mut x = x.into_primitive().tensor();
            x.dtype = DType::Flex32;
            group.all_reduce(x).unwrap();
            Plain::sync(rank.device()).unwrap();
            let error = rank.check().unwrap_err().to_string();
            assert_eq!(error, format!("barrier on group dp at rank 0: {cause}"));
            let error = error_in(&*group, rank.device()).to_string();
            assert_eq!(error, format!("all_reduce on group tp at rank 0: {cause}"));
        } else {
            let error = error_in(&*group, rank.device()).to_string();
            let expected = "all_reduce on group tp at rank 1: rank 0 failed: ";
            assert_eq!(error, format!("{expected}{cause}"));
        }
    });
    assert!(start.elapsed() < LONG);
}

#[test]
fn a_call_that_waits_in_the_queue_is_missed_at_the_timeout_and_never_takes_place() {
    let Some(_gpus) = gpus(2) else { return };
    let timeout = Duration::from_secs(10);
    threads(&NcclConfig::new().with_timeout(timeout), 2, |rank| {
        let (group, x) = connected(&rank);
        group.barrier().unwrap();
        let start = Instant::now();
        let missed = "all_reduce on group tp did not end within 10s";
        if rank.rank() == 0 {
            let release = hold(rank.device());
            let y = sum(&*group, x);
            while rank.check().is_ok() && start.elapsed() < HELD {
                thread::sleep(Duration::from_millis(10));
            }
            drop(release);
            let error = error_in(&*group, rank.device()).to_string();
            let expected = "all_reduce on group tp at rank 0: rank 1 failed: ";
            assert!(error.starts_with(&format!("{expected}{missed}")), "{error}");
            Plain::sync(rank.device()).unwrap();
            assert_eq!(y.max().into_scalar(), 1.0, "the sum did not take place");
        } else {
            let error = error_in(&*group, rank.device()).to_string();
            let expected = "all_reduce on group tp at rank 1: ";
            assert!(error.starts_with(&format!("{expected}{missed}")), "{error}");
        }
        assert!(start.elapsed() < HELD);
    });
}

#[test]
fn a_machine_without_gpus_is_an_error_at_the_start() {
    if gpu_count() > 0 {
        println!("skipped: needs a machine without GPUs");
        return;
    }
    let error = Nccl::local(&[CudaDevice::new(0)]).unwrap_err().to_string();
    assert!(
        error.starts_with("gpu 0 of rank 0: ") || error.contains(" library is not installed"),
        "{error}"
    );
}

// ---- ranks as processes ------------------------------------------------------------------------

/// What a process of these tests does, by its role.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "conform" => conformance::<Plain>(2, dtypes(2), |ranks, body: Body<'_, Plain>| {
            if ranks == 2 {
                let rank = checked().from_env().unwrap();
                let device = rank.device().clone();
                body(&rank, &device);
            }
        }),
        "dies" | "sleeps" => {
            let timeout = if role == "dies" {
                LONG
            } else {
                Duration::from_secs(5)
            };
            let config = NcclConfig::new().with_timeout(timeout);
            let rank = config.from_env().unwrap();
            let group = Transport::<Plain>::open(&rank, GroupName::Tp, vec![0, 1]);
            let one = full::<Plain>([64, 32], 1.0, rank.device());
            assert_eq!(sum(&*group, one).max().into_scalar(), 2.0);
            group.barrier().unwrap();
            if rank.rank() == 1 {
                if role == "dies" {
                    std::process::abort();
                }
                // Killed by the test.
                thread::sleep(LONG);
            }
            let start = Instant::now();
            let error = error_of(&rank);
            println!("after {:?}: {error}", start.elapsed());
            assert!(rank.check().is_err());
            // The GPU is free again: nothing is stuck on it.
            Plain::sync(rank.device()).unwrap();
        }
        role => panic!("no role {role}"),
    }
}

fn processes_conform(vars: &[(&str, &str)]) {
    let Some(_gpus) = gpus(2) else { return };
    for child in processes::<2>(PROCESS, "conform", vars) {
        let (output, text) = output(child);
        assert!(output.status.success(), "{text}");
    }
}

#[test]
fn ranks_as_processes_conform() {
    processes_conform(&[]);
}

#[test]
fn ranks_as_processes_conform_over_sockets() {
    // As two hosts would: no memory that both processes see.
    processes_conform(&[("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")]);
}

/// Rank 0's text, and how long both took. Rank 1 is killed if it still lives then.
fn left_alone(role: &str) -> (String, Duration) {
    let start = Instant::now();
    let [zero, mut one] = processes(PROCESS, role, &[]);
    let (output, text) = output(zero);
    let took = start.elapsed();
    let _ = one.kill();
    let _ = one.wait();
    assert!(output.status.success(), "{text}");
    println!("{text}");
    (text, took)
}

#[test]
fn a_process_that_dies_is_an_error_of_the_other_before_the_timeout() {
    let Some(_gpus) = gpus(2) else { return };
    let (text, took) = left_alone("dies");
    assert!(
        text.contains("all_reduce on group tp at rank 0: "),
        "{text}"
    );
    assert!(took < LONG, "{took:?}");
}

#[test]
fn a_process_that_stops_calling_is_an_error_of_the_other_at_the_timeout() {
    let Some(_gpus) = gpus(2) else { return };
    let (text, took) = left_alone("sleeps");
    // At the first call of a group the others are missed already when the id goes round.
    let missed = ["did not end within 5s", "no call from ranks [1] within 5s"];
    assert!(
        text.contains("all_reduce on group tp at rank 0: ")
            && missed.iter().any(|part| text.contains(part)),
        "{text}"
    );
    assert!(took < LONG, "{took:?}");
}

// ---- speed -------------------------------------------------------------------------------------

#[test]
fn a_sum_that_does_not_stop_the_host_is_faster_than_one_that_does() {
    let Some(_gpus) = gpus(2) else { return };
    const CALLS: u32 = 200;
    let times = threads(&NcclConfig::new().with_timeout(LONG), 2, |rank| {
        let device = rank.device().clone();
        let group = Transport::<Plain>::open(&rank, GroupName::Tp, vec![0, 1]);
        let x = || full::<Plain>([4096, 32], 0.0, &device).cast(DType::BF16);
        let time = |synchronised: bool| {
            let mut x = x();
            Plain::sync(&device).unwrap();
            group.barrier().unwrap();
            let start = Instant::now();
            for _ in 0..CALLS {
                x = sum(&*group, x);
                if synchronised {
                    Plain::sync(&device).unwrap();
                }
            }
            Plain::sync(&device).unwrap();
            start.elapsed() / CALLS
        };
        let mut runs: Vec<_> = (0..6).map(|_| [time(false), time(true)]).collect();
        runs.remove(0);
        [0, 1].map(|k| {
            let mut times: Vec<_> = runs.iter().map(|run| run[k]).collect();
            times.sort();
            times[times.len() / 2]
        })
    });
    let [ordered, synchronised] = times[0];
    println!("all_reduce of 256 KiB in bf16: {ordered:?}, with the host waiting {synchronised:?}");
    assert!(ordered < synchronised);
}
