//! The `moe-lora` command.

mod args;
mod diff;
mod export;
mod import;
mod inspect;
mod merge;
mod norms;
mod output;
mod plan;
mod progress;
mod reshard;
mod source;

use std::process::ExitCode;

use anyhow::Result;
use args::{Args, Command};
use clap::Parser;
use output::Output;

/// `diff` found a difference; clap ends with 2 when the flags make no sense.
const DIFFERENT: u8 = 1;
/// Files that cannot be read or written, or do not fit each other.
const FAILED: u8 = 3;

fn main() -> ExitCode {
    let args = Args::parse();
    let output = Output::new(args.json, args.quiet);
    match run(args.command, &output) {
        Ok(code) => code,
        Err(error) => {
            output.error(&error);
            ExitCode::from(FAILED)
        }
    }
}

fn run(command: Command, output: &Output) -> Result<ExitCode> {
    let same = match command {
        Command::Inspect { path, norms, model } => {
            inspect::run(&path, norms, model.as_deref(), output)
        }
        Command::Reshard {
            checkpoint,
            out,
            ep,
            etp,
            tp,
        } => reshard::run(&checkpoint, &out, [ep, etp, tp], output),
        Command::Merge {
            model,
            adapter,
            out,
            max_shard_size,
        } => merge::run(&model, &adapter, &out, max_shard_size, output),
        Command::Export {
            checkpoint,
            out,
            model,
            layout,
            fuse,
        } => export::run(&checkpoint, &out, &model, layout, fuse, output),
        Command::Import {
            adapter,
            out,
            model,
            fuse,
        } => import::run(&adapter, &out, model.as_deref(), fuse, output),
        Command::Plan(args) => plan::run(&args, output),
        Command::Diff {
            left,
            right,
            model,
            tolerance,
        } => {
            let same = diff::run(&left, &right, model.as_deref(), tolerance, output)?;
            return Ok(match same {
                true => ExitCode::SUCCESS,
                false => ExitCode::from(DIFFERENT),
            });
        }
    };
    same.map(|()| ExitCode::SUCCESS)
}
