//! `moe-lora plan`

use std::fmt;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use moe_lora_plan::{Candidate, Fit, Job, Kernel, Link, Machine, Memory, ModelShape, Plan};
use serde::Serialize;

use crate::args::bytes;
use crate::output::Output;

/// What is planned.
#[derive(Clone, Debug, Args)]
pub struct PlanArgs {
    /// Folder with a config.json, or that file
    model: PathBuf,

    /// GPUs, a rank each
    #[arg(long, value_name = "N")]
    gpus: usize,

    /// GPUs that NVLink joins
    #[arg(long, value_name = "N", default_value_t = 8)]
    gpus_per_node: usize,

    /// Tokens that each rank brings to a step
    #[arg(long, value_name = "N", default_value_t = 4096)]
    tokens: usize,

    /// Rank of the adapters
    #[arg(long, value_name = "R", default_value_t = 32)]
    rank: usize,

    /// Memory of a GPU, a tenth of which is left free, such as 80GB [default: the machine's]
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    memory: Option<u64>,

    /// Expert parallelism [default: all that divide]
    #[arg(long, value_name = "N")]
    ep: Option<usize>,

    /// Expert tensor parallelism [default: all that divide]
    #[arg(long, value_name = "N")]
    etp: Option<usize>,

    /// Tensor parallelism of dense layers [default: all that divide]
    #[arg(long, value_name = "N")]
    tp: Option<usize>,

    /// What the GPU bench wrote, for its machine; may be repeated [default: an H200's numbers]
    #[arg(long, value_name = "FILE")]
    bench: Vec<PathBuf>,

    /// Topologies to list
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
}

#[derive(Serialize)]
struct Planned {
    model_type: &'static str,
    machine: Machine,
    /// Of all topologies.
    found: usize,
    #[serde(flatten)]
    plan: Plan,
}

/// Prints the topologies of a job, the fastest that fits first.
///
/// # Errors
///
/// A configuration or a bench's output that cannot be read, or sizes that nothing divides.
pub fn run(args: &PlanArgs, output: &Output) -> Result<()> {
    let model = ModelShape::read(&args.model)?;
    let machine = args
        .bench
        .iter()
        .try_fold(Machine::h200(), |machine, path| machine.with_bench(path))?;
    let job = Job::new(args.gpus)
        .with_gpus_per_node(args.gpus_per_node)
        .with_tokens(args.tokens)
        .with_rank(args.rank)
        .with_memory(args.memory.map(|bytes| bytes as f64))
        .with_topology(args.tp, args.ep, args.etp);
    let mut plan = Plan::new(&model, &job, &machine)?;
    let found = plan.candidates.len();
    plan.candidates.truncate(args.top.max(1));
    output.result(&Planned {
        model_type: model.config.family.model_type,
        machine,
        found,
        plan,
    });
    Ok(())
}

const GB: f64 = 1e9;
const MB: f64 = 1e6;

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (job, parameters) = (&self.plan.job, &self.plan.parameters);
        let billions = |count: f64| format!("{:.2}", count / 1e9);
        writeln!(
            f,
            "{}: {} B parameters; {} in experts, {} in attention and dense layers, {} on every rank",
            self.model_type,
            billions(parameters.total()),
            billions(parameters.experts),
            billions(parameters.dense),
            billions(parameters.replicated)
        )?;
        writeln!(
            f,
            "{} GPUs, {} a node, {:.1} GB of each to use; {} tokens a rank and step, rank {}, bf16",
            job.gpus,
            job.gpus_per_node,
            self.plan.usable_bytes / GB,
            job.tokens,
            job.rank
        )?;
        self.write_machine(f)?;
        self.write_table(f)?;
        match self.plan.candidates.first() {
            Some(first) => write_candidate(f, first),
            None => Ok(()),
        }
    }
}

impl Planned {
    fn write_machine(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        let copy = machine.copy_bytes_per_s;
        write!(
            f,
            "{}: copy {:.2} TB/s\nkernels, start and share of copy:",
            machine.name,
            copy / 1e12
        )?;
        for kernel in Kernel::ALL {
            let cost = machine.kernel(kernel);
            let share = cost.bytes_per_s / copy;
            let separator = if kernel == Kernel::ALL[0] { "" } else { "," };
            let (name, start) = (kernel.name(), cost.start_us);
            write!(f, "{separator} {name} {start:.1} us and {share:.2}")?;
        }
        for (name, link) in [("NVLink", Link::Nvlink), ("network", Link::Network)] {
            let cost = machine.link(link);
            let rate = cost.bytes_per_s / GB;
            let separator = if name == "NVLink" {
                "\ncollectives of two:"
            } else {
                ","
            };
            write!(
                f,
                "{separator} {name} {:.1} us and {rate:.0} GB/s",
                cost.start_us
            )?;
        }
        writeln!(f)
    }

    fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:>33}{:>22}{:>49}",
            "topology", "GB a rank", "ms a step"
        )?;
        writeln!(
            f,
            "{:>5}{:>6}{:>6}{:>6}{:>10}{:>10}{:>12}{:>11}{:>10}{:>10}{:>9}{:>9}  fits",
            "TP",
            "DP",
            "EP",
            "ETP",
            "expert DP",
            "whole",
            "recompute",
            "adapter f",
            "adapter b",
            "base",
            "grads",
            "sum"
        )?;
        for candidate in &self.plan.candidates {
            let (sizes, memory, time) = (&candidate.sizes, &candidate.memory, &candidate.time);
            let gb = |recompute| memory.total(recompute) / GB;
            let ms = |us: f64| us / 1e3;
            let fits = match candidate.fit {
                Fit::Whole => "yes",
                Fit::Recompute => "with recompute",
                Fit::No => "no",
            };
            writeln!(
                f,
                "{:>5}{:>6}{:>6}{:>6}{:>10}{:>10.1}{:>12.1}{:>11.2}{:>10.2}{:>10.2}{:>9.2}{:>9.2}  {fits}",
                sizes.tp,
                candidate.dp(),
                sizes.ep,
                sizes.etp,
                candidate.expert_dp(),
                gb(false),
                gb(true),
                ms(time.adapter_forward_us),
                ms(time.adapter_backward_us),
                ms(time.base_collectives_us),
                ms(time.gradients_us),
                ms(time.total_us()),
            )?;
        }
        let more = self.found - self.plan.candidates.len();
        if more > 0 {
            writeln!(f, "{more} more (--top {})", self.found)?;
        }
        Ok(())
    }
}

/// Memory and collectives of one topology.
fn write_candidate(f: &mut fmt::Formatter<'_>, candidate: &Candidate) -> fmt::Result {
    let sizes = &candidate.sizes;
    writeln!(
        f,
        "\nTP {} EP {} ETP {}, a rank:",
        sizes.tp, sizes.ep, sizes.etp
    )?;
    let Memory {
        experts,
        dense,
        adapter,
        gradients,
        moments,
        activations,
        activations_recomputed,
    } = candidate.memory;
    let rows = [
        ("experts, frozen", experts),
        ("the rest, frozen", dense),
        ("adapter", adapter),
        ("gradients", gradients),
        ("Adam's moments", moments),
        ("activations", activations),
        ("activations, recompute", activations_recomputed),
    ];
    for (name, bytes) in rows {
        writeln!(f, "{name:<24}{:>9.3} GB", bytes / GB)?;
    }
    if candidate.collectives.is_empty() {
        return write!(f, "no collectives");
    }
    write!(
        f,
        "\n{:<57}{:<10}{:>5}{:>11}{:>11}{:>10}{:>8}{:>8}",
        "collective", "group", "ranks", "NVLink MB", "network MB", "us", "fwd", "bwd"
    )?;
    for call in &candidate.collectives {
        write!(
            f,
            "\n{:<57}{:<10}{:>5}{:>11.2}{:>11.2}{:>10.1}{:>8}{:>8}",
            call.name,
            call.group,
            call.ranks,
            call.wire.nvlink / MB,
            call.wire.network / MB,
            call.us,
            call.forward_calls,
            call.backward_calls
        )?;
    }
    Ok(())
}
