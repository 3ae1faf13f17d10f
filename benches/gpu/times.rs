//! Wall time of a call in a steady loop, autodiff and collectives included.

use std::sync::Arc;
use std::time::Instant;

use burn_moe_lora::prelude::*;
use serde_json::json;

use crate::Args;
use crate::calls::{Calls, Cuda, Fused, Plain};
use crate::case::{CASES, EXPERTS, FFN, HIDDEN, RANK, TOKENS};
use crate::gpu::Gpu;
use crate::ranks;
use crate::report::Report;

/// Calls before the first window: compilation, autotuning, growth of the memory pools.
const WARM_UP: usize = 50;

/// Microseconds a call, over windows.
#[derive(Clone, Copy, Debug)]
pub struct Times {
    pub median: f64,
    pub least: f64,
    pub most: f64,
}

impl Times {
    pub fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        Self {
            median: times[times.len() / 2],
            least: times[0],
            most: times[times.len() - 1],
        }
    }
}

/// Times windows of `calls` calls on `subject`. `begin` brings the ranks to the same point; `wait`
/// returns when the GPU has nothing left to do; `end` clears up after a window, outside of its time.
pub fn wall<T>(
    windows: usize,
    calls: usize,
    begin: impl Fn(),
    wait: impl Fn(),
    subject: &mut T,
    call: impl Fn(&mut T, usize),
    end: impl Fn(&mut T),
) -> Times {
    (0..WARM_UP).for_each(|i| call(subject, i));
    end(subject);
    let mut window = || {
        wait();
        begin();
        let start = Instant::now();
        (0..calls).for_each(|i| call(subject, i));
        wait();
        let us = start.elapsed().as_secs_f64() * 1e6 / calls as f64;
        end(subject);
        us
    };
    Times::of((0..windows).map(|_| window()).collect())
}

/// Prints the times of every case, without and with fusion.
pub fn run(args: &Args, rank: &Nccl, report: &mut Report) {
    let gpu = Gpu::open(rank.device());
    let ranks = if args.threads { "threads" } else { "processes" };
    report.row(
        format!(
            "copy bandwidth {:.2} TB/s, ranks as {ranks}",
            gpu.bandwidth() / 1e12
        ),
        &json!({
            "part": "times", "copy_bytes_per_s": gpu.bandwidth(), "ranks": ranks,
            "ep": args.ep, "etp": args.etp, "gpus": rank.world_size(),
        }),
    );
    report.text(format!(
        "wall time of a call, {TOKENS} tokens, hidden {HIDDEN}, ffn {FFN}, rank {RANK}, bf16, EP = {}, ETP = {}, \
         {EXPERTS} experts where grouped; median (least to most) of {} windows of {} calls over {} sets of inputs",
        args.ep, args.etp, args.windows, args.calls, args.inputs
    ));
    report.text(format!(
        "{:<13}{:<8}{:>26}{:>7}{:>8}{:>26}{:>7}{:>8}",
        "case", "backend", "fwd us", "MB", "of copy", "fwd+bwd us", "MB", "of copy"
    ));
    time::<Plain>(args, rank, report, &gpu, "plain");
    time::<Fused>(args, rank, report, &gpu, "fusion");
}

fn time<B: Cuda>(args: &Args, rank: &Nccl, report: &mut Report, gpu: &Gpu, backend: &str) {
    let group: Arc<dyn Collective<B>> = ranks::expert_tp(args, rank);
    let world = ranks::world::<B>(rank);
    let begin = || world.barrier().unwrap_or_else(|error| panic!("{error}"));
    let wait = || {
        B::sync(rank.device()).expect("the GPU's work ends well");
        gpu.wait();
    };
    for case in &CASES {
        let mut calls = Calls::<B>::new(case, group.clone(), args.inputs, rank.device());
        // burn lets go of what a forward pass saved at the end of the next backward pass, not before.
        let clear = |calls: &mut Calls<B>| drop(calls.forward_backward(0));
        let forward = wall(
            args.windows,
            args.calls,
            begin,
            wait,
            &mut calls,
            |calls, call| drop(calls.forward(call)),
            clear,
        );
        let both = wall(
            args.windows,
            args.calls,
            begin,
            wait,
            &mut calls,
            |calls, call| drop(calls.forward_backward(call)),
            |_| (),
        );
        calls.check();
        let (forward_bytes, both_bytes) = (
            case.forward_bytes(args.etp),
            case.forward_bytes(args.etp) + case.backward_bytes(args.etp),
        );
        let share = |bytes: usize, us: f64| bytes as f64 / us * 1e6 / gpu.bandwidth();
        let column = |times: &Times, bytes: usize| {
            let (median, range) = (
                times.median,
                format!("({:.1} to {:.1})", times.least, times.most),
            );
            let (megabytes, share) = (bytes as f64 / 1e6, share(bytes, median));
            format!("{median:>8.1}{range:>18}{megabytes:>7.1}{share:>8.2}")
        };
        report.row(
            format!(
                "{:<13}{backend:<8}{}{}",
                case.name,
                column(&forward, forward_bytes),
                column(&both, both_bytes)
            ),
            &json!({
                "part": "times", "case": case.name, "backend": backend,
                "ep": args.ep, "etp": args.etp, "gpus": rank.world_size(),
                "ranks": if args.threads { "threads" } else { "processes" }, "inputs": args.inputs,
                "forward_us": forward.median, "forward_us_least": forward.least,
                "forward_us_most": forward.most, "forward_bytes": forward_bytes,
                "forward_of_copy": share(forward_bytes, forward.median),
                "both_us": both.median, "both_us_least": both.least, "both_us_most": both.most,
                "both_bytes": both_bytes, "both_of_copy": share(both_bytes, both.median),
            }),
        );
    }
}
