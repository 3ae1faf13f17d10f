//! Two ranks, a GPU each: processes of this binary, or threads of this process.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::TcpListener;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::Duration;

use burn_cubecl::cubecl::cuda::CudaDevice;
use burn_moe_lora::nccl::{Nccl, NcclConfig};

use crate::Args;
use crate::case::RANKS;
use crate::report::Report;

/// What a rank does.
pub type Body = fn(&Args, &Nccl, &mut Report);

/// Runs `body` on every rank. A process that a launcher started is one rank of it.
pub fn run(args: &Args, body: Body) -> ExitCode {
    let config = NcclConfig::new().with_timeout(Duration::from_secs(120));
    if std::env::var_os("RANK").is_some() {
        let rank = config.from_env().unwrap_or_else(|error| panic!("{error}"));
        one(args, &rank, body);
        return ExitCode::SUCCESS;
    }
    if args.threads {
        let devices: Vec<_> = (0..RANKS).map(CudaDevice::new).collect();
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
    processes()
}

fn one(args: &Args, rank: &Nccl, body: Body) {
    assert_eq!(
        rank.world_size(),
        RANKS,
        "the cases are cut over {RANKS} ranks"
    );
    let mut report = match rank.rank() {
        0 => Report::open(args.out.as_deref()),
        _ => Report::silent(),
    };
    body(args, rank, &mut report);
    rank.check().unwrap_or_else(|error| panic!("{error}"));
}

/// This binary with the same arguments, once a rank.
fn processes() -> ExitCode {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = port.expect("a free port").port().to_string();
    let random = || RandomState::new().build_hasher().finish();
    let token = format!("{:016x}{:016x}", random(), random());
    let spawn = |rank: usize| {
        Command::new(std::env::current_exe().expect("this binary has a path"))
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", RANKS.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .env("MOE_LORA_TOKEN", &token)
            .spawn()
            .expect("this binary starts")
    };
    let ranks: Vec<_> = (0..RANKS).map(spawn).collect();
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
