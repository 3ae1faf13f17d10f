//! An adapter's forward and backward pass against the plain matmuls it consists of, on the CPU.
//!
//! Two matmuls forward and four backward, by burn's own matmul on the same shapes, timed in
//! alternation with the whole adapter under autodiff. Prints the fastest round of each, since other
//! work on the machine only adds, and their ratio.
//!
//! ```text
//! cargo bench -p moe-lora-benches --profile dev
//! ```

use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex, flex::FlexDevice};
use burn::tensor::{Distribution, Tensor};
use burn_moe_lora::adapters::{ColumnLora, Lora, Placement, RowLora, ShardAxis, WeightLayout};
use burn_moe_lora::parallel::ExpertTp;
use burn_moe_lora::prelude::*;

type B = Autodiff<Flex>;

const TOKENS: usize = 1024;
const RANK: usize = 32;
const ROUNDS: usize = 31;

struct Shape {
    name: &'static str,
    d_in: usize,
    d_out: usize,
    experts: usize,
}

fn main() {
    // `cargo bench` passes flags of the usual harness; a test run only compiles this.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    keep_pages();
    println!("{TOKENS} tokens, rank {RANK}, f32, fastest of {ROUNDS} alternating rounds");
    println!(
        "{:<22}{:>12}{:>12}{:>8}",
        "adapter", "matmuls ms", "adapter ms", "ratio"
    );
    for shape in [
        Shape {
            name: "one, fc1",
            d_in: 2048,
            d_out: 5376,
            experts: 1,
        },
        Shape {
            name: "one, fc2",
            d_in: 2688,
            d_out: 2048,
            experts: 1,
        },
        Shape {
            name: "4 experts, fc1",
            d_in: 2048,
            d_out: 5376,
            experts: 4,
        },
        Shape {
            name: "4 experts, fc2",
            d_in: 2688,
            d_out: 2048,
            experts: 4,
        },
    ] {
        let (plain, adapter) = if shape.d_in < shape.d_out {
            time(
                &shape,
                ShardAxis::Out,
                |lora: &ColumnLora<B, ExpertTp>, x, rows| {
                    lora.forward(Group::solo().fanout(x), rows).into_tensor()
                },
            )
        } else {
            time(
                &shape,
                ShardAxis::In,
                |lora: &RowLora<B, ExpertTp>, x, rows| {
                    lora.forward(Group::solo().shard(x), rows).into_tensor()
                },
            )
        };
        println!(
            "{:<22}{:>12.2}{:>12.2}{:>8.3}",
            shape.name,
            plain.as_secs_f64() * 1e3,
            adapter.as_secs_f64() * 1e3,
            adapter.as_secs_f64() / plain.as_secs_f64(),
        );
    }
}

/// Keeps freed memory in the process, for both sides alike. glibc hands large buffers back to the
/// system or not depending on where they happen to lie, and clearing their pages anew costs more
/// than the products: 1.6 times the matmuls in one run, 1.07 in the next.
#[cfg(target_env = "gnu")]
fn keep_pages() {
    // SAFETY: mallopt only sets parameters of the allocator; no other thread runs yet.
    let set = unsafe {
        libc::mallopt(libc::M_MMAP_MAX, 0) & libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX)
    };
    assert_eq!(set, 1, "mallopt took both parameters");
}

#[cfg(not(target_env = "gnu"))]
fn keep_pages() {}

fn time<P: Placement>(
    shape: &Shape,
    axis: ShardAxis,
    forward: impl Fn(&Lora<B, ExpertTp, P>, Tensor<B, 2>, &RowGroups) -> Tensor<B, 2>,
) -> (Duration, Duration) {
    let device = FlexDevice;
    let base = WeightLayout {
        experts: (shape.experts > 1).then_some(0..shape.experts),
        d_out: shape.d_out,
        d_in: shape.d_in,
        fragments: 1,
        axis,
        rank: 0,
        ranks: 1,
    };
    let config = LoraConfig::new(RANK, 32.0).with_init_b(Init::Kaiming);
    let lora = Lora::<B, ExpertTp, P>::init("bench", &config, &base, &device)
        .expect("the shapes of the bench fit");
    let counts = vec![TOKENS / shape.experts; shape.experts];
    let rows = RowGroups::new(&counts, TOKENS).expect("the counts sum to the tokens");

    let a = lora.a.weight.stacked().inner();
    let b = lora.b.weight.stacked().inner();
    let mut plain = Vec::new();
    let mut adapter = Vec::new();
    for round in 0..ROUNDS + 2 {
        let x = Tensor::<Flex, 2>::random(
            [TOKENS, shape.d_in],
            Distribution::Normal(0.0, 1.0),
            &device,
        );
        let time_matmuls = || {
            let start = Instant::now();
            let kept = matmuls(&x, &a, &b, &rows);
            (start.elapsed(), kept).0
        };
        let tracked = Tensor::<B, 2>::from_inner(x.clone()).require_grad();
        let time_adapter = || {
            let start = Instant::now();
            let y = forward(&lora, tracked.clone(), &rows);
            let grads = y.backward();
            let whole = start.elapsed();
            assert!(
                tracked.grad(&grads).is_some(),
                "the adapter reached its input"
            );
            whole
        };
        // Each goes first in every second round.
        let (matmuls, whole) = if round % 2 == 0 {
            let matmuls = time_matmuls();
            (matmuls, time_adapter())
        } else {
            let whole = time_adapter();
            (time_matmuls(), whole)
        };
        if round >= 2 {
            plain.push(matmuls);
            adapter.push(whole);
        }
    }
    let fastest = |times: Vec<Duration>| times.into_iter().min().expect("there are rounds");
    (fastest(plain), fastest(adapter))
}

/// Output, input gradient and both factor gradients of every expert, upstream gradient ones.
fn matmuls(
    x: &Tensor<Flex, 2>,
    a: &Tensor<Flex, 3>,
    b: &Tensor<Flex, 3>,
    rows: &RowGroups,
) -> Vec<[Tensor<Flex, 2>; 4]> {
    // The upstream gradient comes whole, as a backward pass hands it on.
    let [_, d_out, _] = b.dims();
    let dy = Tensor::<Flex, 2>::ones([rows.rows(), d_out], &x.device());
    (0..rows.experts())
        .map(|expert| {
            let one = |weight: &Tensor<Flex, 3>| -> Tensor<Flex, 2> {
                weight.clone().narrow(0, expert, 1).squeeze_dim(0)
            };
            let x = x.clone().slice([rows.range(expert)]);
            let (a, b) = (one(a), one(b));
            let z = x.clone().matmul(a.clone().transpose());
            let y = z.clone().matmul(b.clone().transpose());
            let dy = dy.clone().slice([rows.range(expert)]);
            let dz = dy.clone().matmul(b);
            [
                y,
                dz.clone().matmul(a),
                dz.transpose().matmul(x),
                dy.transpose().matmul(z),
            ]
        })
        .collect()
}
