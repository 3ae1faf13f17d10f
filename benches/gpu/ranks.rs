//! Ranks with a GPU each: processes of this binary, or threads of this process.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::TcpListener;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn_cubecl::cubecl::cuda::CudaDevice;
use burn_moe_lora::nccl::{CudaBackend, Nccl, NcclConfig};
use burn_moe_lora::parallel::{Collective, GroupName, Solo, Transport};

use crate::Args;
use crate::report::Report;

/// What a rank does.
pub type Body = fn(&Args, &Nccl, &mut Report);

/// The ranks that share an adapter with this one.
pub fn expert_tp<B: CudaBackend>(args: &Args, rank: &Nccl) -> Arc<dyn Collective<B>> {
    let members = args.topology().members(GroupName::ExpertTp, rank.rank());
    open(
        rank,
        GroupName::ExpertTp,
        members.expect("the rank is one of the world"),
    )
}

/// All ranks.
pub fn world<B: CudaBackend>(rank: &Nccl) -> Arc<dyn Collective<B>> {
    open(rank, GroupName::Dp, (0..rank.world_size()).collect())
}

fn open<B: CudaBackend>(
    rank: &Nccl,
    name: GroupName,
    members: Vec<usize>,
) -> Arc<dyn Collective<B>> {
    match members.len() {
        1 => Arc::new(Solo::new(name)),
        _ => rank.open(name, members),
    }
}

/// Runs `body` on every rank. A process that a launcher started is one rank of it.
pub fn run(args: &Args, body: Body) -> ExitCode {
    let config = NcclConfig::new().with_timeout(Duration::from_secs(120));
    let ranks = args.topology().world_size();
    if std::env::var_os("RANK").is_some() {
        let rank = config.from_env().unwrap_or_else(|error| panic!("{error}"));
        one(args, &rank, body);
        return ExitCode::SUCCESS;
    }
    if args.threads {
        let devices: Vec<_> = (0..ranks).map(CudaDevice::new).collect();
        let ranks = config
            .local(&devices)
            .unwrap_or_else(|error| panic!("{error}"));
        thread::scope(|scope| {
            for rank in ranks {
                scope.spawn(move || one(args, &rank, body));
            }
        });
        return ExitCode::SUCCESS;
    }
    processes(ranks)
}

fn one(args: &Args, rank: &Nccl, body: Body) {
    assert_eq!(
        rank.world_size(),
        args.topology().world_size(),
        "the launcher has started as many processes as --ep and --etp say"
    );
    let mut report = match rank.rank() {
        0 => Report::open(args.out.as_deref()),
        _ => Report::silent(),
    };
    body(args, rank, &mut report);
    rank.check().unwrap_or_else(|error| panic!("{error}"));
}

/// This binary with the same arguments, once a rank.
fn processes(ranks: usize) -> ExitCode {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a free port").port().to_string();
    let random = || RandomState::new().build_hasher().finish();
    let token = format!("{:016x}{:016x}", random(), random());
    let spawn = |rank: usize| {
        Command::new(std::env::current_exe().expect("this binary has a path"))
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .env("MOE_LORA_TOKEN", &token)
            .spawn()
            .expect("this binary starts")
    };
    let ranks: Vec<_> = (0..ranks).map(spawn).collect();
    let mut all = ExitCode::SUCCESS;
    for (rank, mut process) in ranks.into_iter().enumerate() {
        let status = process.wait().expect("a process that was started ends");
        if !status.success() {
            eprintln!("rank {rank}: {status}");
            all = ExitCode::FAILURE;
        }
    }
    all
}
