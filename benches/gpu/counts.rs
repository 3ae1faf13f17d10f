//! Launches, collectives and allocations of one call.
//!
//! CubeCL logs every kernel that it launches and every buffer that it hands out, when it is
//! configured to; what it logs is counted here. NCCL's own kernels are in the collectives. The log
//! says a buffer's size to three digits.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_cubecl::cubecl::config::memory::MemoryLogLevel;
use burn_cubecl::cubecl::config::profiling::ProfilingLogLevel;
use burn_cubecl::cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use burn_moe_lora::parallel::{CollectiveError, GroupName, Solo};
use burn_moe_lora::prelude::*;
use log::{LevelFilter, Log, Metadata, Record};
use serde_json::json;

use crate::Args;
use crate::calls::{Calls, Cuda, Fused, Plain};
use crate::case::{CASES, Case};
use crate::gpu::Gpu;
use crate::ranks::expert_tp;
use crate::report::Report;

/// Calls before the ones that are counted: compilation, autotuning, what fusion learns.
const WARM_UP: usize = 10;

/// What CubeCL has logged.
static LOGGED: Logged = Logged(Mutex::new(Vec::new()));

struct Logged(Mutex<Vec<String>>);

impl Log for Logged {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = record.args().to_string();
        if line.starts_with(LAUNCH) || line.starts_with(BUFFER) {
            self.0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line);
        }
    }

    fn flush(&self) {}
}

const LAUNCH: &str = "Executing ";
const BUFFER: &str = "[Main GPU Memory] Reserved memory ";

/// Has CubeCL log to this process. Before anything else uses it.
pub fn listen() {
    log::set_logger(&LOGGED).expect("there is no other logger");
    log::set_max_level(LevelFilter::Info);
    let mut config = CubeClRuntimeConfig::default();
    config.profiling.logger.level = ProfilingLogLevel::Minimal;
    config.profiling.logger.log = Some(Default::default());
    config.memory.logger.level = MemoryLogLevel::Full;
    config.memory.logger.log = Some(Default::default());
    CubeClRuntimeConfig::set(config);
}

/// Takes what was logged, once nothing more comes: CubeCL logs on a thread of its own.
fn logged() -> Vec<String> {
    let lines = || LOGGED.0.lock().unwrap_or_else(PoisonError::into_inner);
    let mut before = usize::MAX;
    loop {
        let now = lines().len();
        if now == before {
            return std::mem::take(&mut *lines());
        }
        before = now;
        thread::sleep(Duration::from_millis(300));
    }
}

/// A transport that counts the calls on tensors.
#[derive(Debug)]
struct Counting<B: Backend> {
    inner: Arc<dyn Collective<B>>,
    calls: AtomicUsize,
}

impl<B: Backend> Counting<B> {
    fn count(&self) -> &dyn Collective<B> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        &*self.inner
    }
}

type Answer<T> = Result<T, CollectiveError>;

impl<B: Backend> Collective<B> for Counting<B> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn name(&self) -> GroupName {
        self.inner.name()
    }

    fn all_reduce(&self, x: FloatTensor<B>) -> Answer<FloatTensor<B>> {
        self.count().all_reduce(x)
    }

    fn all_gather(&self, x: FloatTensor<B>, dim: usize, sizes: &[usize]) -> Answer<FloatTensor<B>> {
        self.count().all_gather(x, dim, sizes)
    }

    fn reduce_scatter(
        &self,
        x: FloatTensor<B>,
        dim: usize,
        sizes: &[usize],
    ) -> Answer<FloatTensor<B>> {
        self.count().reduce_scatter(x, dim, sizes)
    }

    fn all_to_all(
        &self,
        x: FloatTensor<B>,
        send: &[usize],
        recv: &[usize],
    ) -> Answer<FloatTensor<B>> {
        self.count().all_to_all(x, send, recv)
    }

    fn broadcast(&self, x: FloatTensor<B>, root: usize) -> Answer<FloatTensor<B>> {
        self.count().broadcast(x, root)
    }

    fn barrier(&self) -> Answer<()> {
        self.inner.barrier()
    }

    fn exchange_sizes(&self, sizes: &[usize]) -> Answer<Vec<Vec<usize>>> {
        self.inner.exchange_sizes(sizes)
    }
}

/// What one call did.
struct Counts {
    collectives: usize,
    /// Kernels by name.
    launches: BTreeMap<String, usize>,
    /// Bytes of each buffer, large ones first.
    buffers: Vec<f64>,
}

impl Counts {
    fn of<B: Backend>(group: &Counting<B>, wait: impl Fn(), call: impl FnOnce()) -> Self {
        wait();
        logged();
        let before = group.calls.load(Ordering::Relaxed);
        call();
        wait();
        let mut counts = Self {
            collectives: group.calls.load(Ordering::Relaxed) - before,
            launches: BTreeMap::new(),
            buffers: Vec::new(),
        };
        for line in logged() {
            if let Some(name) = line.strip_prefix(LAUNCH) {
                *counts.launches.entry(name.to_owned()).or_default() += 1;
            } else if let Some(size) = line.strip_prefix(BUFFER) {
                counts.buffers.push(bytes(size));
            }
        }
        counts.buffers.sort_by(|a, b| b.total_cmp(a));
        counts
    }

    /// A row; `kept` are the bytes that are in use after the call and were not before.
    fn show(&self, report: &mut Report, case: &Case, place: &Place, pass: &str, kept: i64) {
        let Place { ranks, ep, backend } = place;
        let launches: usize = self.launches.values().sum();
        let sum: f64 = self.buffers.iter().sum();
        let largest = self.buffers.first().copied().unwrap_or(0.0);
        let [input, base] = case.activation_bytes(place.ranks);
        report.row(
            format!(
                "{:<13}{ranks:>4} {backend:<8}{pass:>8}{launches:>9}{:>7}{:>8}{:>10.2}{:>9.2}{:>9.2}{:>8.2}{:>8.2}",
                case.name,
                self.collectives,
                self.buffers.len(),
                sum / 1e6,
                largest / 1e6,
                kept as f64 / 1e6,
                input as f64 / 1e6,
                base as f64 / 1e6,
            ),
            &json!({
                "part": "counts", "case": case.name, "etp": ranks, "backend": backend, "pass": pass,
                "ep": ep, "gpus": ep * ranks,
                "launches": launches, "kernels": self.launches,
                "collectives": self.collectives, "buffers": self.buffers, "buffer_bytes": sum,
                "kept_bytes": kept, "input_bytes": input, "base_bytes": base,
            }),
        );
    }
}

/// `"8.39 MB using dynamic pool"`, or without a unit `"8388608 using persistent memory"`.
fn bytes(size: &str) -> f64 {
    let mut words = size.split_whitespace();
    let number: f64 = words
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("CubeCL logged the size '{size}'"));
    number
        * match words.next() {
            Some("KB") => 1e3,
            Some("MB") => 1e6,
            Some("GB") => 1e9,
            _ => 1.0,
        }
}

/// Prints the counts of every case, without and with fusion.
pub fn run(args: &Args, rank: &Nccl, report: &mut Report) {
    let gpu = Gpu::open(rank.device());
    report.text(
        "one call: launches of CubeCL, collectives, and all buffers that were handed out, in MB",
    );
    report.text(format!(
        "{:<13}{:>4} {:<8}{:>8}{:>9}{:>7}{:>8}{:>10}{:>9}{:>9}{:>8}{:>8}",
        "case",
        "ETP",
        "backend",
        "pass",
        "launches",
        "coll.",
        "buffers",
        "their sum",
        "largest",
        "kept",
        "input",
        "base"
    ));
    let sizes = if args.etp == 1 {
        vec![1]
    } else {
        vec![args.etp, 1]
    };
    for ranks in sizes {
        count::<Plain>(
            args,
            rank,
            report,
            &gpu,
            Place {
                ranks,
                ep: args.ep,
                backend: "plain",
            },
        );
        count::<Fused>(
            args,
            rank,
            report,
            &gpu,
            Place {
                ranks,
                ep: args.ep,
                backend: "fusion",
            },
        );
    }
}

/// The size of the group, how many such groups there are, and the backend.
struct Place {
    ranks: usize,
    ep: usize,
    backend: &'static str,
}

fn count<B: Cuda>(args: &Args, rank: &Nccl, report: &mut Report, gpu: &Gpu, place: Place) {
    let group = Arc::new(Counting {
        inner: match place.ranks {
            1 => Arc::new(Solo::new(GroupName::ExpertTp)),
            _ => expert_tp(args, rank),
        },
        calls: AtomicUsize::new(0),
    });
    let wait = || {
        B::sync(rank.device()).expect("the GPU's work ends well");
        gpu.wait();
    };
    for case in &CASES {
        let mut calls = Calls::<B>::new(case, group.clone(), args.inputs, rank.device());
        for call in 0..WARM_UP {
            calls.forward(call);
            calls.forward_backward(call);
        }
        // The output lies in the base's buffer: every buffer is beyond inputs and output. It is held
        // with its graph, so that what is kept is what the backward pass reads.
        wait();
        let before = gpu.in_use();
        let mut y = None;
        let forward = Counts::of(&group, wait, || y = Some(calls.forward(0)));
        forward.show(report, case, &place, "fwd", gpu.in_use() - before);
        drop(y);
        // The gradients of the input and of the factors are outputs of this one, and held.
        wait();
        let before = gpu.in_use();
        let mut grads = None;
        let both = Counts::of(&group, wait, || grads = Some(calls.forward_backward(0)));
        both.show(report, case, &place, "fwd+bwd", gpu.in_use() - before);
        drop(grads);
    }
}
