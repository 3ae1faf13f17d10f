//! The job on WGPU, also where a software driver stands for the GPU.

use clap::Parser;
use finetune::args::Args;
use finetune::job::Job;
use finetune::metrics::read_metrics;

/// Every step's loss.
fn losses(flags: &[&str]) -> Vec<f64> {
    let folder = tempfile::tempdir().unwrap();
    let out = [
        "finetune",
        "--steps",
        "3",
        "--out",
        folder.path().to_str().unwrap(),
    ];
    let args = Args::try_parse_from([&out, flags].concat()).unwrap();
    Job::new(args).unwrap().run().unwrap();
    let metrics = read_metrics(folder.path()).unwrap();
    metrics.iter().map(|step| step.loss).collect()
}

#[test]
fn ranks_that_share_a_device_follow_the_losses_of_one_cpu() {
    let cpu = losses(&["--ep", "1", "--etp", "1"]);
    for (ep, etp) in [("1", "2"), ("2", "1")] {
        let flags = ["--backend", "wgpu", "--ep", ep, "--etp", etp];
        let gpu = losses(&flags);
        for (found, expected) in gpu.iter().zip(&cpu) {
            let error = (found - expected).abs();
            assert!(error <= 1e-4, "ep {ep} etp {etp}: {gpu:?} {cpu:?}");
        }
    }
}
