//! Adapters on GPUs: wall time of whole calls, launches, collectives, allocations, and the kernels'
//! time on the device alone. `NOTES.md` says how the numbers are taken.
//!
//! ```text
//! cargo bench -p moe-lora-benches --features gpu --bench gpu -- --out gpu.jsonl
//! ```
//!
//! Each part runs in processes of its own, this binary again: ranks as processes do not share
//! CubeCL's locks, and counting launches needs a configuration that slows them down.

mod backward;
mod calls;
mod case;
mod collectives;
mod cotangent;
mod counts;
mod gpu;
mod kernels;
mod ranks;
mod report;
mod times;
mod variants;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use burn_moe_lora::prelude::*;
use clap::{Parser, ValueEnum};

use crate::report::Report;

/// What to measure, and how often.
#[derive(Clone, Debug, Parser)]
struct Args {
    /// One part alone; all of them when left out.
    #[arg(value_enum)]
    part: Option<Part>,
    /// Expert tensor parallel size: the ranks that an adapter is cut over, a GPU each.
    #[arg(long, default_value_t = 2)]
    etp: usize,
    /// Expert parallel size: so many such groups at once, each with experts and rows of its own.
    #[arg(long, default_value_t = 1)]
    ep: usize,
    /// Ranks as threads of one process rather than a process each, for the times.
    #[arg(long)]
    threads: bool,
    /// Calls in a window, with one synchronisation at its end.
    #[arg(long, default_value_t = 300)]
    calls: usize,
    /// Windows whose median is taken.
    #[arg(long, default_value_t = 9)]
    windows: usize,
    /// Sets of inputs that the calls rotate among; several together exceed the L2 cache.
    #[arg(long, default_value_t = 4)]
    inputs: usize,
    /// Appends the numbers to this file, a JSON object a line.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// The products of an adapter alone, on one GPU, timed on the device.
    Kernels,
    /// Wall time of the adapters, forward and forward plus backward.
    Times,
    /// Wall time of whole linears: bare, with LoRA, with DoRA, with one named adapter and with eight.
    Variants,
    /// Wall time of collectives alone.
    Collectives,
    /// Launches, collectives and allocations of one call.
    Counts,
}

impl Args {
    /// `ep` groups of `etp` ranks.
    fn topology(&self) -> Topology {
        let config = TopologyConfig::new(self.ep * self.etp);
        let topology = config.with_ep(self.ep).with_etp(self.etp).init();
        topology.unwrap_or_else(|error| panic!("{error}"))
    }
}

fn main() -> ExitCode {
    // `cargo bench` passes flags of the usual harness; a test run only compiles this.
    if std::env::args().any(|arg| arg == "--test") {
        return ExitCode::SUCCESS;
    }
    let args = Args::parse();
    let found = burn_moe_lora::nccl::gpu_count();
    let needed = if args.part == Some(Part::Kernels) {
        1
    } else {
        args.topology().world_size()
    };
    if found < needed {
        eprintln!("needs {needed} GPUs, found {found}");
        return ExitCode::FAILURE;
    }
    match args.part {
        None => every_part(),
        Some(Part::Kernels) => {
            kernels::run(&mut Report::open(args.out.as_deref()));
            ExitCode::SUCCESS
        }
        Some(Part::Times) => ranks::run(&args, times::run),
        Some(Part::Variants) => ranks::run(&args, variants::run),
        Some(Part::Collectives) => ranks::run(&args, collectives::run),
        Some(Part::Counts) => {
            counts::listen();
            // What a process logs is one rank's.
            let args = Args {
                threads: false,
                ..args
            };
            ranks::run(&args, counts::run)
        }
    }
}

/// Runs this binary once a part, also when one of them fails.
fn every_part() -> ExitCode {
    let mut all = ExitCode::SUCCESS;
    for part in Part::value_variants() {
        let name = part.to_possible_value().expect("every part has a name");
        let status = Command::new(std::env::current_exe().expect("this binary has a path"))
            .arg(name.get_name())
            .args(std::env::args_os().skip(1))
            .status()
            .expect("this binary starts");
        if !status.success() {
            eprintln!("{}: {status}", name.get_name());
            all = ExitCode::FAILURE;
        }
    }
    all
}
