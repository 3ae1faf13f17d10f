//! Expert parallelism and expert tensor parallelism together, on four GPUs.

use std::io::{BufRead, BufReader};
use std::time::Instant;

use burn::backend::Autodiff;
use burn::tensor::DType;
use burn_cubecl::cubecl::cuda::CudaDevice;
use moe_lora_adapters::Sharing;
use moe_lora_nccl::{CudaBackend, Nccl, NcclConfig};
use moe_lora_parallel::{Mesh, ParallelBackend};
use moe_lora_testkit::{GateUpTargets, Member, Ranks, TrainingBackend};
use moe_lora_tests::grid;
use moe_lora_tests::moe::{self, place};

use crate::exactness::DTYPES;
use crate::processes::{ROLE, output, processes};
use crate::ranks::{Connected, LONG, gpus};
use crate::{Fused, Plain};

const RANKS: usize = 4;

fn grid<B: TrainingBackend>(ranks: &impl Ranks<B>) {
    for dtype in DTYPES {
        grid::four_ranks::<B>(ranks, dtype);
    }
}

fn with_threads<B>()
where
    B: TrainingBackend + ParallelBackend<Base: CudaBackend, Device = CudaDevice>,
{
    let Some(_gpus) = gpus(RANKS) else { return };
    grid::<B>(&Connected::new());
}

#[test]
fn adapters_are_exact_with_a_thread_for_each_of_four_gpus() {
    with_threads::<Autodiff<Plain>>();
}

#[test]
fn adapters_are_exact_with_a_thread_for_each_of_four_gpus_and_fusion() {
    with_threads::<Autodiff<Fused>>();
}

// ---- ranks as processes ------------------------------------------------------------------------

/// What a process of these tests does, by its role.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let rank = NcclConfig::new().with_timeout(LONG).from_env().unwrap();
    match role.as_str() {
        "exact" => with_process::<Autodiff<Plain>>(rank),
        "exact with fusion" => with_process::<Autodiff<Fused>>(rank),
        "steps" => steps::<Autodiff<Plain>>(&rank),
        role => panic!("no role {role}"),
    }
}

fn with_process<B>(rank: Nccl)
where
    B: TrainingBackend + ParallelBackend<Base: CudaBackend, Device = CudaDevice>,
{
    let device = rank.device().clone();
    grid::<B>(&Member::new(rank, device));
}

/// Forward and backward passes until one fails.
fn steps<B>(rank: &Nccl)
where
    B: TrainingBackend + ParallelBackend<Base: CudaBackend, Device = CudaDevice>,
{
    let (place, device) = (place(1, 2, 2, &[1, 4, 2, 3]), rank.device());
    let mesh = Mesh::<B>::new(place.topology, rank).unwrap();
    let case = moe::case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32);
    let layer = case.layer(&case.oracle(), &mesh, device);
    let start = Instant::now();
    for step in 0.. {
        case.pass(&layer, &mesh, device, &place.dealt, || ());
        println!("step {step}");
        assert!(start.elapsed() < LONG, "no rank was killed");
    }
}

fn exact_with_processes(role: &str) {
    let Some(_gpus) = gpus(RANKS) else { return };
    let ranks: [_; RANKS] = processes("four::role", role, &[]);
    let outputs = ranks.map(output);
    for (rank, (output, text)) in outputs.iter().enumerate() {
        assert!(output.status.success(), "rank {rank}: {text}");
    }
}

#[test]
fn adapters_are_exact_with_a_process_for_each_of_four_gpus() {
    exact_with_processes("exact");
}

#[test]
fn adapters_are_exact_with_a_process_for_each_of_four_gpus_and_fusion() {
    exact_with_processes("exact with fusion");
}

/// The others end before the timeout, each with an error that says this.
fn killed_during_a_step(victim: usize, says: &str) {
    let Some(_gpus) = gpus(RANKS) else { return };
    let mut ranks: [_; RANKS] = processes("four::role", "steps", &[]);
    let stdout = ranks[victim].stdout.take().unwrap();
    let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
    let training = lines.any(|line| line == "step 20");
    let killed = Instant::now();
    ranks[victim].kill().unwrap();
    let outputs = ranks.map(output);
    let took = killed.elapsed();
    for (rank, (output, text)) in outputs.iter().enumerate() {
        assert!(training, "rank {rank}: {text}");
        if rank != victim {
            assert!(!output.status.success(), "rank {rank}: {text}");
            assert!(text.contains(says), "rank {rank}: {text}");
        }
    }
    println!("rank {victim} was killed, the others ended within {took:?}");
    assert!(took < LONG / 2, "{took:?}");
}

#[test]
fn a_process_that_is_killed_during_a_step_is_named_by_the_other_three() {
    killed_during_a_step(2, "rank 2 is gone");
}

#[test]
fn rank_0_that_is_killed_during_a_step_is_named_by_the_other_three() {
    killed_during_a_step(0, "rank 0 is out of reach");
}
