//! The flags of the main job.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use burn_moe_lora::adapters::Targets;
use clap::{Parser, ValueEnum};

use crate::backend::{BackendKind, TransportKind};

/// Most ranks of a job: each may be a thread of this process.
const MAX_WORLD: usize = 256;

/// Most bytes of a step over all ranks.
const MAX_STEP: usize = 1 << 24;

/// Highest rank of an adapter.
const MAX_RANK: usize = 4096;

/// How the adapter is updated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerKind {
    /// Plain gradient descent, without momentum.
    Sgd,
    /// Adam with decoupled weight decay.
    Adamw,
}

impl OptimizerKind {
    /// The learning rate that is used when none is given, fit for the model in the repository.
    pub fn default_lr(self) -> f64 {
        match self {
            Self::Sgd => 0.5,
            Self::Adamw => 5e-3,
        }
    }
}

impl fmt::Display for OptimizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sgd => "sgd",
            Self::Adamw => "adamw",
        })
    }
}

/// How ranks start, at the end of the help.
const RANKS: &str = "\
Ranks:
  On the CPU every rank is a thread. With --backend cuda every rank is a GPU, ep * etp of them or --world:
    finetune --backend cuda --ep 1 --etp 2            one process, a thread for each of the first two GPUs
    finetune --backend cuda --transport mock          the ranks share one GPU, to try a topology
  A process for each GPU, with the same secret in MOE_LORA_TOKEN (openssl rand -hex 16) on every rank:
    torchrun --nproc-per-node 2 --no-python finetune --backend cuda --ep 1 --etp 2
    srun --ntasks 2 --gpus-per-node 2 finetune --backend cuda --ep 1 --etp 2
  torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, srun SLURM_PROCID, SLURM_NTASKS and
  SLURM_LOCALID: export MASTER_ADDR, the host of rank 0, and MASTER_PORT before srun.";

/// Fine-tunes the experts of a Mixture-of-Experts model with LoRA, each rank a thread of this process or a GPU.
///
/// Without arguments it trains the model in the repository on the text in the repository, on four ranks of the CPU.
#[derive(Clone, Debug, Parser)]
#[command(name = "finetune", version, after_help = RANKS)]
pub struct Args {
    /// Model directory in hub layout: config.json and safetensors [default: the model in the example's assets]
    #[arg(long, value_name = "DIR", default_value_os_t = asset("qwen3-moe-constitution"), hide_default_value = true)]
    pub model: PathBuf,

    /// Text file to train on, read as bytes [default: the text in the example's assets]
    #[arg(long, value_name = "FILE", default_value_os_t = asset("text/us-declaration.txt"), hide_default_value = true)]
    pub text: PathBuf,

    /// Expert parallelism: ranks among which the experts are dealt out
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = positive)]
    pub ep: usize,

    /// Expert tensor parallelism: ranks that share the weights of every expert
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = positive)]
    pub etp: usize,

    /// Ranks in all, a multiple of ep * etp; the quotient is the data parallelism [default: ep * etp]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub world: Option<usize>,

    /// What the ranks compute on
    #[arg(long, value_enum, default_value_t = BackendKind::Cpu)]
    pub backend: BackendKind,

    /// What the ranks communicate over [default: nccl for cuda, mock otherwise]
    #[arg(long, value_enum)]
    pub transport: Option<TransportKind>,

    /// Training steps
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = positive)]
    pub steps: usize,

    /// Sequences of a step, over all ranks
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = positive)]
    pub batch: usize,

    /// Bytes of a sequence
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_two)]
    pub length: usize,

    /// Rank of the adapters
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = adapter_rank, conflicts_with = "adapter")]
    pub rank: usize,

    /// Numerator of the adapters' scale, alpha / rank or, with --rslora, alpha / sqrt(rank)
    #[arg(
        long,
        value_name = "X",
        default_value_t = 16.0,
        value_parser = positive_real,
        allow_negative_numbers = true,
        conflicts_with = "adapter"
    )]
    pub alpha: f64,

    /// Learning rate [default: 0.5 for sgd, 0.005 for adamw]
    #[arg(long, value_name = "X", value_parser = positive_real, allow_negative_numbers = true)]
    pub lr: Option<f64>,

    /// How the adapter is updated
    #[arg(long, value_enum, default_value_t = OptimizerKind::Adamw)]
    pub optimizer: OptimizerKind,

    /// LoRA+: how many times as fast as A the factor B learns
    #[arg(long, value_name = "X", default_value_t = 1.0, value_parser = positive_real, allow_negative_numbers = true)]
    pub lora_plus: f64,

    /// Scale gradients down to this norm over all adapters [default: not scaled]
    #[arg(long, value_name = "X", value_parser = positive_real, allow_negative_numbers = true)]
    pub max_norm: Option<f64>,

    /// Probability that an element of an adapter's input is dropped in training
    #[arg(long, value_name = "P", default_value_t = 0.0, value_parser = probability, allow_negative_numbers = true)]
    pub dropout: f64,

    /// Seed of the adapters' start, of the batches and of dropout
    #[arg(
        long,
        value_name = "N",
        default_value_t = 0,
        allow_negative_numbers = true
    )]
    pub seed: u64,

    /// Directory that the adapter is written to, as PEFT files, with every step's numbers in metrics.jsonl and as the
    /// pictures loss.svg and experts.svg
    #[arg(long, value_name = "DIR", default_value = "target/finetune")]
    pub out: PathBuf,

    /// Directory that the model with the adapter merged into it is written to [default: not written]
    #[arg(long, value_name = "DIR")]
    pub merged: Option<PathBuf>,

    /// Linear to put an adapter on, by path or by the end of it, `*` for any run of characters; repeatable
    /// [default: experts.gate_up_proj and experts.down_proj, with --separate gate_proj and up_proj]
    #[arg(long = "target", value_name = "PATTERN", conflicts_with = "adapter")]
    pub targets: Vec<String>,

    /// Start from the PEFT adapter in this directory, with its own rank and alpha
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,

    /// Directory that adapters and optimizer state are saved to at the end, to resume from
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,

    /// Save every so many steps too
    #[arg(long, value_name = "N", value_parser = positive, requires = "checkpoint")]
    pub save_every: Option<usize>,

    /// Continue from the checkpoint in this directory up to --steps, at any topology. It holds what the adapters are; give
    /// --model, --text, --batch, --length, --seed, --optimizer, --lr, --lora-plus, --max-norm and --dropout as before
    #[arg(long, value_name = "DIR", conflicts_with_all = ["adapter", "rank", "alpha", "targets", "separate", "rslora", "pissa", "dora", "shared_outer"])]
    pub resume: Option<PathBuf>,

    /// Give the gate and the up projection an adapter each instead of one that shares its A
    #[arg(long, conflicts_with = "adapter")]
    pub separate: bool,

    /// rsLoRA: scale by alpha / sqrt(rank) in place of alpha / rank
    #[arg(long, conflicts_with = "adapter")]
    pub rslora: bool,

    /// PiSSA: start from the principal part of the weights, and leave the rest to the base; the files that are written hold
    /// the difference to the start, at twice the rank
    #[arg(long, conflicts_with = "adapter")]
    pub pissa: bool,

    /// DoRA: train the lengths of the adapted weights' rows too
    #[arg(long, conflicts_with = "adapter")]
    pub dora: bool,

    /// One factor on the hidden side for all experts: the A of gate and up, the B of down
    #[arg(long, conflicts_with_all = ["adapter", "dora"])]
    pub shared_outer: bool,
}

/// How the ranks are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// Ranks in all.
    pub world: usize,
    /// Expert parallelism.
    pub ep: usize,
    /// Expert tensor parallelism.
    pub etp: usize,
    /// Copies of the experts, `world / (ep * etp)`.
    pub expert_dp: usize,
}

impl fmt::Display for RankLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            world,
            ep,
            etp,
            expert_dp,
        } = self;
        write!(
            f,
            "{world} ranks: ep {ep} x etp {etp} x expert dp {expert_dp}"
        )
    }
}

impl Args {
    /// The layout that `--ep`, `--etp` and `--world` ask for, checked against `--batch`.
    ///
    /// # Errors
    /// A world that is not a multiple of `ep * etp`, or a batch with fewer rows than there are ranks, as the dense
    /// layers run on every rank's own rows; also more than 256 ranks or 2^24 bytes a step.
    pub fn layout(&self) -> Result<RankLayout> {
        let (ep, etp, batch) = (self.ep, self.etp, self.batch);
        let model_ranks = ep
            .checked_mul(etp)
            .with_context(|| format!("ep={ep} times etp={etp} overflows (choose smaller ones)"))?;
        let world = self.world.unwrap_or(model_ranks);
        ensure!(
            world.is_multiple_of(model_ranks),
            "world={world} is not a multiple of ep={ep} times etp={etp}, so the data parallelism would not be a whole \
             number (choose a --world that {model_ranks} divides, or leave it out)"
        );
        ensure!(
            world <= MAX_WORLD,
            "world={world} is more than {MAX_WORLD} ranks (use fewer)"
        );
        ensure!(
            batch >= world,
            "batch={batch} cannot give each of world={world} ranks a sequence (raise --batch to at least {world} or \
             use fewer ranks)"
        );
        let length = self.length;
        ensure!(
            batch
                .checked_mul(length)
                .is_some_and(|bytes| bytes <= MAX_STEP),
            "batch={batch} times length={length} is more than {MAX_STEP} bytes a step (lower --batch or --length)"
        );
        Ok(RankLayout {
            world,
            ep,
            etp,
            expert_dp: world / model_ranks,
        })
    }

    /// The transport, that of the backend if none was given.
    pub fn transport(&self) -> TransportKind {
        self.transport.unwrap_or(self.backend.default_transport())
    }

    /// The linears of routed experts that get a new adapter.
    pub fn targets(&self) -> Targets {
        let targets = match self.targets.is_empty() {
            true => Targets::new(["*"]),
            false => Targets::new(&self.targets),
        };
        match self.separate {
            true => targets.without(["gate_up_proj"]),
            false => targets,
        }
    }

    /// The learning rate, that of the optimizer if none was given.
    pub fn learning_rate(&self) -> f64 {
        self.lr.unwrap_or(self.optimizer.default_lr())
    }
}

/// A file of the example, under its folder `assets`.
pub fn asset(path: &str) -> PathBuf {
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    // A binary that was built on another machine is started from the root of the repository.
    let folder = match built.is_dir() {
        true => built,
        false => Path::new("examples/finetune"),
    };
    folder.join("assets").join(path)
}

fn at_least(least: usize, text: &str) -> Result<usize, String> {
    let value = usize::from_str(text).map_err(|error| format!("{error} (give a whole number)"))?;
    match value >= least {
        true => Ok(value),
        false => Err(format!("{value} is too small (use {least} or more)")),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    at_least(1, text)
}

fn adapter_rank(text: &str) -> Result<usize, String> {
    let rank = positive(text)?;
    match rank <= MAX_RANK {
        true => Ok(rank),
        false => Err(format!("{rank} is too large (use {MAX_RANK} or less)")),
    }
}

fn at_least_two(text: &str) -> Result<usize, String> {
    at_least(2, text)
}

fn positive_real(text: &str) -> Result<f64, String> {
    let value = f64::from_str(text).map_err(|error| format!("{error} (give a number)"))?;
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(format!(
            "{value} is not a positive number (use one above 0)"
        )),
    }
}

/// Below 1: something is kept.
fn probability(text: &str) -> Result<f64, String> {
    let value = f64::from_str(text).map_err(|error| format!("{error} (give a number)"))?;
    match (0.0..1.0).contains(&value) {
        true => Ok(value),
        false => Err(format!(
            "{text} is no probability below 1 (use one such as 0.1)"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(flags: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from([&["finetune"], flags].concat())
    }

    fn refusal(flags: &[&str]) -> String {
        parse(flags).unwrap_err().to_string()
    }

    fn bad_layout(flags: &[&str]) -> String {
        parse(flags).unwrap().layout().unwrap_err().to_string()
    }

    #[test]
    fn the_command_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn no_flags_give_four_ranks_on_the_repository_model() {
        let args = parse(&[]).unwrap();
        assert!(args.model.join("config.json").is_file());
        assert!(args.text.is_file());
        let layout = args.layout().unwrap();
        assert_eq!(layout.to_string(), "4 ranks: ep 2 x etp 2 x expert dp 1");
        assert_eq!(
            (args.rank, args.alpha, args.learning_rate()),
            (8, 16.0, 5e-3)
        );
    }

    #[test]
    fn the_learning_rate_follows_the_optimizer_unless_given() {
        let sgd = parse(&["--optimizer", "sgd"]).unwrap();
        assert_eq!(sgd.learning_rate(), 0.5);
        let given = parse(&["--optimizer", "sgd", "--lr", "0.1"]).unwrap();
        assert_eq!(given.learning_rate(), 0.1);
    }

    #[test]
    fn a_larger_world_is_data_parallel() {
        let flags = ["--ep", "2", "--etp", "1", "--world", "4"];
        let layout = parse(&flags).unwrap().layout().unwrap();
        assert_eq!((layout.expert_dp, layout.world), (2, 4));
    }

    #[test]
    fn worlds_that_do_not_fit_are_refused_with_their_values() {
        assert_eq!(
            bad_layout(&["--world", "6"]),
            "world=6 is not a multiple of ep=2 times etp=2, so the data parallelism would not be a whole number \
             (choose a --world that 4 divides, or leave it out)"
        );
        assert!(bad_layout(&["--world", "2"]).starts_with("world=2 is not a multiple"));
        assert_eq!(
            bad_layout(&["--batch", "3"]),
            "batch=3 cannot give each of world=4 ranks a sequence (raise --batch to at least 4 or use fewer ranks)"
        );
        let huge = usize::MAX.to_string();
        assert!(bad_layout(&["--ep", &huge]).contains("overflows"));
        assert!(bad_layout(&["--ep", "257"]).starts_with("world=514 is more than 256 ranks"));
        assert!(bad_layout(&["--batch", &huge]).ends_with("(lower --batch or --length)"));
        assert!(refusal(&["--rank", &huge]).contains("is too large (use 4096 or less)"));
    }

    #[test]
    fn zeros_are_refused_with_the_flag() {
        for flag in ["--ep", "--etp", "--world", "--steps", "--batch", "--rank"] {
            let message = refusal(&[flag, "0"]);
            assert!(message.contains(flag), "{message}");
            assert!(
                message.contains("0 is too small (use 1 or more)"),
                "{message}"
            );
        }
        assert!(refusal(&["--length", "1"]).contains("1 is too small (use 2 or more)"));
        assert!(refusal(&["--ep", "two"]).contains("(give a whole number)"));
        for value in ["0", "-1", "inf", "NaN"] {
            for flag in ["--lr", "--alpha"] {
                let message = refusal(&[flag, value]);
                assert!(message.contains("is not a positive number"), "{message}");
            }
        }
    }

    #[test]
    fn a_given_adapter_brings_its_own_rank() {
        assert!(parse(&["--adapter", "here"]).is_ok());
        let own = ["--target", "down_proj"];
        for flags in [
            &["--rank", "4"][..],
            &["--alpha", "8"],
            &["--separate"],
            &["--rslora"],
            &["--pissa"],
            &["--dora"],
            &["--shared-outer"],
            &own,
        ] {
            let message = refusal(&[&["--adapter", "here"], flags].concat());
            assert!(message.contains("cannot be used with"), "{message}");
        }
    }
}
