//! The job on GPUs. Without enough of them a test says that it is skipped, and fails where `MOE_LORA_REQUIRE_GPUS` asks for
//! them.
//!
//! Ranks in processes are this binary again, told by `MOE_LORA_TEST_OUT` where to write.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_moe_lora::nccl::gpu_count;
use clap::Parser;
use finetune::args::Args;
use finetune::job::Job;
use finetune::metrics::{StepMetrics, read_metrics};
use finetune::report::{Summary, describe};

/// Largest difference of a step's loss, in nats a byte: f32 on both, but near-ties in routing may fall otherwise.
const CLOSE: f64 = 1e-2;

const ONE_CPU: &[&str] = &["--ep", "1", "--etp", "1"];
const TWO_GPUS: &[&str] = &["--ep", "1", "--etp", "2", "--backend", "cuda"];
const FOUR_GPUS: &[&str] = &["--ep", "2", "--etp", "2", "--backend", "cuda"];
const OUT: &str = "MOE_LORA_TEST_OUT";
const STEPS: &str = "MOE_LORA_TEST_STEPS";

static ALONE: Mutex<()> = Mutex::new(());

/// Whether there are `needed` GPUs, for one test at a time; where there are fewer, that is said.
fn gpus(needed: usize) -> Option<MutexGuard<'static, ()>> {
    let found = gpu_count();
    let required = std::env::var("MOE_LORA_REQUIRE_GPUS").map_or(0, |n| {
        n.parse()
            .expect("MOE_LORA_REQUIRE_GPUS is a number of GPUs")
    });
    assert!(
        found >= required,
        "MOE_LORA_REQUIRE_GPUS={required}, found {found}"
    );
    if found < needed {
        println!("skipped: needs {needed} GPUs, found {found}");
        return None;
    }
    Some(ALONE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// What the job has done with these flags, if this process has rank 0.
fn run(out: &Path, steps: &str, flags: &[&str]) -> Option<Summary> {
    let own = ["finetune", "--steps", steps, "--out", out.to_str().unwrap()];
    let args = Args::try_parse_from([&own, flags].concat()).unwrap();
    let summary = Job::new(args).and_then(|job| job.run());
    let summary = summary.unwrap_or_else(|error| panic!("{flags:?}: {}", describe(&error)));
    if let Some(summary) = &summary {
        println!("{flags:?}\n{summary}");
    }
    summary
}

/// Every step's loss.
fn losses(steps: &str, flags: &[&str]) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), steps, flags).unwrap();
    read(folder.path())
}

fn read(folder: &Path) -> Vec<f64> {
    let metrics = read_metrics(folder).unwrap().into_iter();
    metrics.map(|StepMetrics { loss, .. }| loss).collect()
}

/// The largest difference, and the step that has it.
fn difference(found: &[f64], expected: &[f64]) -> (f64, usize) {
    assert_eq!(found.len(), expected.len());
    let steps = found.iter().zip(expected).enumerate();
    let differences = steps.map(|(step, (found, expected))| ((found - expected).abs(), step + 1));
    differences.fold((0.0, 0), |a, b| if b.0 <= a.0 { a } else { b })
}

fn check(name: &str, found: &[f64], expected: &[f64]) {
    let (error, step) = difference(found, expected);
    let (first, last) = (found[0], found[found.len() - 1]);
    println!(
        "{name}: {} steps, loss {first:.4} to {last:.4}, at most {error:.1e} from the CPU's (step {step})",
        found.len()
    );
    assert!(error <= CLOSE, "{name}: {error:.1e} at step {step}");
    assert!(last < first - 10.0 * CLOSE, "{name} has learned nothing");
}

#[test]
fn a_thread_for_each_of_two_gpus_follows_the_losses_of_the_cpu() {
    let Some(_alone) = gpus(2) else { return };
    let cpu = losses("100", ONE_CPU);
    check("two GPUs", &losses("100", TWO_GPUS), &cpu);
    // Negative control: a delta that is counted twice, as ranks do that sum what is a sum already.
    let twice = losses("100", &[ONE_CPU, &["--alpha", "32"]].concat());
    assert!(difference(&twice, &cpu).0 > CLOSE);
}

#[test]
fn experts_on_two_gpus_follow_the_losses_of_the_cpu() {
    let Some(_alone) = gpus(2) else { return };
    let flags = ["--ep", "2", "--etp", "1", "--backend", "cuda"];
    check("ep 2", &losses("30", &flags), &losses("30", ONE_CPU));
}

#[test]
fn four_ranks_share_a_gpu() {
    let Some(_alone) = gpus(1) else { return };
    let flags = ["--backend", "cuda", "--transport", "mock"];
    check("one GPU", &losses("30", &flags), &losses("30", ONE_CPU));
}

#[test]
fn a_run_on_gpus_resumes_and_merges() {
    let Some(_alone) = gpus(2) else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (saved, merged) = (at("saved"), at("merged"));
    let save = ["--checkpoint", &*saved, "--save-every", "5"];
    run(folder.path(), "15", &[TWO_GPUS, &save].concat());
    let resume = ["--resume", &*saved, "--merged", &*merged];
    let trained = run(folder.path(), "30", &[TWO_GPUS, &resume].concat()).unwrap();
    check("resumed", &read(folder.path()), &losses("30", ONE_CPU));
    // The merged model starts on the CPU where the training has ended on the GPUs.
    let flags = [ONE_CPU, &["--model", &merged]].concat();
    let served = run(&folder.path().join("served"), "1", &flags).unwrap();
    let error = (served.eval_before - trained.eval_after).abs();
    assert!(error <= CLOSE, "the merged model is off by {error:.1e}");
    assert!(trained.eval_after < trained.eval_before - 10.0 * CLOSE);
}

#[test]
fn more_ranks_than_gpus_are_refused_with_both_numbers() {
    let args = ["finetune", "--backend", "cuda", "--ep", "16", "--etp", "16"];
    let args = Args::try_parse_from([&args[..], &["--batch", "256"]].concat()).unwrap();
    let message = Job::new(args).unwrap().run().unwrap_err().to_string();
    let found = gpu_count();
    assert_eq!(
        message,
        format!(
            "256 ranks need a GPU each and {found} are here (change --ep, --etp or --world, or let the ranks share one \
             with --transport mock)"
        )
    );
}

#[test]
fn a_thread_for_each_of_four_gpus_follows_the_losses_of_the_cpu() {
    let Some(_alone) = gpus(4) else { return };
    let cpu = losses("100", ONE_CPU);
    check("four GPUs", &losses("100", FOUR_GPUS), &cpu);
}

/// Nothing by itself: one rank of [`processes`].
#[test]
fn rank_of_a_world_of_processes() {
    let (Ok(out), Ok(steps)) = (std::env::var(OUT), std::env::var(STEPS)) else {
        return;
    };
    let flags = match &*std::env::var("WORLD_SIZE").unwrap() {
        "2" => TWO_GPUS,
        _ => FOUR_GPUS,
    };
    let summary = run(Path::new(&out), &steps, flags);
    assert_eq!(summary.is_some(), std::env::var("RANK").unwrap() == "0");
}

/// Every step's loss of so many ranks, each a process with a GPU.
fn processes(ranks: usize, steps: &str) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr();
    let port = port.unwrap().port().to_string();
    let start = |rank: usize| -> Child {
        let rank = rank.to_string();
        Command::new(std::env::current_exe().unwrap())
            .args(["rank_of_a_world_of_processes", "--exact", "--nocapture"])
            .env(OUT, folder.path())
            .env(STEPS, steps)
            .env("RANK", &rank)
            .env("LOCAL_RANK", &rank)
            .env("WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", &port)
            .env("MOE_LORA_TOKEN", "a token for tests")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let ranks: Vec<Child> = (0..ranks).map(start).collect();
    for (rank, process) in ranks.into_iter().enumerate() {
        let output = process.wait_with_output().unwrap();
        let [stdout, stderr] =
            [output.stdout, output.stderr].map(|b| String::from_utf8(b).unwrap());
        assert!(output.status.success(), "rank {rank}: {stdout}{stderr}");
        // Rank 0 alone reports.
        assert_eq!(stdout.contains("topology  "), rank == 0, "{stdout}");
        let first = format!("step 1/{steps}");
        assert_eq!(stderr.contains(&first), rank == 0, "{stderr}");
    }
    read(folder.path())
}

#[test]
fn a_process_for_each_of_two_gpus_follows_the_losses_of_the_cpu() {
    let Some(_alone) = gpus(2) else { return };
    check("two processes", &processes(2, "30"), &losses("30", ONE_CPU));
}

#[test]
fn a_process_for_each_of_four_gpus_follows_the_losses_of_the_cpu() {
    let Some(_alone) = gpus(4) else { return };
    let cpu = losses("100", ONE_CPU);
    check("four processes", &processes(4, "100"), &cpu);
}
