//! An adapter's products alone on one GPU, timed on the device; those of the backward pass are in
//! `backward`.

use std::time::{Duration, Instant};

use burn::tensor::{Distribution, Tensor, bf16};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn_moe_lora::kernels::{
    Activation, Between, Compute, Layout, RowGroups, Strategy, expand_into, shrink,
};
use serde_json::json;

use crate::backward;
use crate::case::{FFN, HIDDEN, RANK};
use crate::gpu::Gpu;
use crate::report::Report;
use crate::times::Times;

pub type B = CubeBackend<CudaRuntime, bf16, i32, u8>;

/// The kernels' own strategy: a fallback to the per-expert path would go unseen with `Auto`.
pub const GROUPED: Compute = Compute {
    strategy: Strategy::Grouped,
    tf32: false,
};
/// A scale that is applied on the way.
pub const BETWEEN: Between = Between {
    activation: Activation::Identity,
    scale: 2.0,
};

/// Launches in one timing. CubeCL waits for the GPU after every 64 uploads from the host, so that a
/// kernel with one upload a launch could not be issued much further ahead.
const LAUNCHES: usize = 50;
const REPEATS: usize = 7;

/// Ranks that the projections are cut over.
const ETP: usize = 2;

/// One rank's part of a projection.
pub struct Shape {
    pub name: &'static str,
    pub d_in: usize,
    /// Rows of the local `A`.
    pub rank_a: usize,
    pub d_out: usize,
    pub base: usize,
}

const SHAPES: [Shape; 2] = [
    Shape {
        name: "fc2",
        d_in: FFN / ETP,
        rank_a: RANK,
        d_out: HIDDEN / ETP,
        base: HIDDEN,
    },
    Shape {
        name: "fc1",
        d_in: HIDDEN,
        rank_a: RANK / ETP,
        d_out: FFN / ETP,
        base: FFN / ETP,
    },
];

/// Tokens and experts: linear in the one, flat in the other.
const SIZES: [(usize, usize); 13] = [
    (4 << 10, 4),
    (8 << 10, 4),
    (16 << 10, 4),
    (32 << 10, 4),
    (64 << 10, 4),
    (4 << 10, 8),
    (4 << 10, 16),
    (4 << 10, 32),
    (4 << 10, 64),
    (64 << 10, 8),
    (64 << 10, 16),
    (64 << 10, 32),
    (64 << 10, 64),
];

/// Prints time and share of the copy bandwidth for every shape and size.
pub fn run(report: &mut Report) {
    let device = CudaDevice::new(0);
    let gpu = Gpu::open(&device);
    report.row(
        format!(
            "copy bandwidth {:.2} TB/s, L2 {} MB",
            gpu.bandwidth() / 1e12,
            gpu.l2_bytes() >> 20
        ),
        &json!({"part": "kernels", "copy_bytes_per_s": gpu.bandwidth(), "l2_bytes": gpu.l2_bytes()}),
    );
    report.text(format!(
        "device time of a launch, bf16, rank {RANK}; * the host was still issuing, its time is in it"
    ));
    report.text(format!(
        "{:<6}{:<8}{:>8}{:>9}{:>10}{:>9}{:>8}",
        "shape", "kernel", "tokens", "experts", "us", "MB", "of copy"
    ));
    for shape in &SHAPES {
        for (tokens, experts) in SIZES {
            measure_shrink(&gpu, &device, shape, (tokens, experts), report);
            measure_expand(&gpu, &device, shape, (tokens, experts), report);
            backward::expand(&gpu, &device, shape, (tokens, experts), report);
            backward::shrink(&gpu, &device, shape, (tokens, experts), report);
        }
    }
}

pub fn random<const D: usize>(shape: [usize; D], std: f64, device: &CudaDevice) -> Tensor<B, D> {
    Tensor::random(shape, Distribution::Normal(0.0, std), device)
}

/// Buffers to rotate among, so that none is in the cache when its turn comes.
pub fn sets(gpu: &Gpu, bytes: usize) -> usize {
    (4 * gpu.l2_bytes()).div_ceil(bytes).max(2)
}

pub fn rows(tokens: usize, experts: usize) -> RowGroups {
    RowGroups::new(&vec![tokens / experts; experts], tokens).expect("the experts divide the tokens")
}

fn measure_shrink(
    gpu: &Gpu,
    device: &CudaDevice,
    shape: &Shape,
    (tokens, experts): (usize, usize),
    report: &mut Report,
) {
    let rows = rows(tokens, experts);
    let bytes = 2 * (tokens * (shape.d_in + shape.rank_a) + experts * shape.rank_a * shape.d_in);
    let sets: Vec<_> = (0..sets(gpu, bytes))
        .map(|_| {
            let x = random([tokens, shape.d_in], 1.0, device);
            (x, random([experts, shape.rank_a, shape.d_in], 0.02, device))
        })
        .collect();
    let place = Place {
        kernel: "shrink",
        shape: shape.name,
        tokens,
        experts,
        bytes,
    };
    measure(gpu, report, &place, |launch| {
        let (x, a) = &sets[launch % sets.len()];
        shrink(x.clone(), a.clone(), &rows, Layout::ByToken, GROUPED);
    });
}

fn measure_expand(
    gpu: &Gpu,
    device: &CudaDevice,
    shape: &Shape,
    (tokens, experts): (usize, usize),
    report: &mut Report,
) {
    let rows = rows(tokens, experts);
    // The slice of the base is read and written.
    let bytes = 2 * (tokens * (RANK + 2 * shape.d_out) + experts * shape.d_out * RANK);
    let mut sets: Vec<_> = (0..sets(gpu, bytes))
        .map(|_| {
            let z = random([tokens, RANK], 1.0, device);
            let b = random([experts, shape.d_out, RANK], 0.02, device);
            (z, b, Some(random([tokens, shape.base], 1.0, device)))
        })
        .collect();
    let place = Place {
        kernel: "expand",
        shape: shape.name,
        tokens,
        experts,
        bytes,
    };
    measure(gpu, report, &place, |launch| {
        let turn = launch % sets.len();
        let (z, b, base) = &mut sets[turn];
        // Taken, so that the buffer has one owner and can be written.
        let alone = base.take().expect("a base is put back after its turn");
        let columns = 0..shape.d_out;
        let sum = expand_into(
            alone,
            columns,
            z.clone(),
            b.clone(),
            BETWEEN,
            &rows,
            GROUPED,
        );
        *base = Some(sum);
    });
}

pub struct Place {
    pub kernel: &'static str,
    pub shape: &'static str,
    pub tokens: usize,
    pub experts: usize,
    pub bytes: usize,
}

pub fn measure(gpu: &Gpu, report: &mut Report, place: &Place, mut launch: impl FnMut(usize)) {
    let mut all = || (0..LAUNCHES).for_each(&mut launch);
    for _ in 0..2 {
        all();
        gpu.wait();
    }
    let start = Instant::now();
    all();
    gpu.wait();
    let hold = (2 * start.elapsed() + Duration::from_millis(2)).min(Duration::from_millis(100));
    let mut alone = true;
    let times = (0..REPEATS).map(|_| {
        let time = gpu.time(hold, &mut all);
        alone &= time.alone;
        time.us / LAUNCHES as f64
    });
    let us = Times::of(times.collect());
    let share = place.bytes as f64 / us.median * 1e6 / gpu.bandwidth();
    let Place {
        kernel,
        shape,
        tokens,
        experts,
        bytes,
    } = place;
    report.row(
        format!(
            "{shape:<6}{kernel:<8}{tokens:>8}{experts:>9}{:>9.2}{}{:>9.1}{share:>8.2}",
            us.median,
            if alone { ' ' } else { '*' },
            *bytes as f64 / 1e6,
        ),
        &json!({
            "part": "kernels", "kernel": kernel, "shape": shape, "tokens": tokens,
            "experts": experts, "us": us.median, "us_least": us.least, "us_most": us.most,
            "bytes": bytes, "of_copy": share, "device_alone": alone,
        }),
    );
}
