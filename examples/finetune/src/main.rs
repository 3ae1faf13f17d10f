//! The main job: see `finetune --help`.

use std::io::{Write, stdout};
use std::process::ExitCode;

use clap::Parser;
use finetune::args::Args;
use finetune::job::Job;

fn main() -> ExitCode {
    match Job::new(Args::parse()).and_then(|job| job.run()) {
        Ok(summary) => {
            if let Some(summary) = summary {
                let _ = writeln!(stdout(), "{summary}");
            }
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {}", finetune::report::describe(&error));
            ExitCode::FAILURE
        }
    }
}
