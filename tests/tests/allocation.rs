//! An adapter without ranks to talk to allocates its output and what backward needs, and nothing
//! else of the size of an activation. A binary of its own: it replaces the allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Distribution, Tensor};
use moe_lora_adapters::{
    ColumnLora, Init, Lora, LoraConfig, Placement, RowLora, ShardAxis, WeightLayout,
};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Group};

type B = Autodiff<Flex>;

const TOKENS: usize = 1024;
const D_IN: usize = 64;
const D_OUT: usize = 48;
const RANK: usize = 4;

/// Bytes of the smaller activation; factors and low-rank values are far below.
const ACTIVATION: usize = TOKENS * D_OUT * size_of::<f32>();

thread_local! {
    static LARGE: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

fn count(layout: Layout) {
    if layout.size() >= ACTIVATION {
        LARGE.with(|large| large.set(large.get() + 1));
    }
}

// SAFETY: every call is passed on to the system allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn large<T>(f: impl FnOnce() -> T) -> usize {
    let before = LARGE.get();
    let kept = f();
    let count = LARGE.get() - before;
    drop(kept);
    count
}

fn random(columns: usize) -> Tensor<Flex, 2> {
    let distribution = Distribution::Normal(0.0, 1.0);
    Tensor::random([TOKENS, columns], distribution, &Default::default())
}

fn passes<P: Placement>(
    axis: ShardAxis,
    counts: &[usize],
    forward: impl Fn(&Lora<B, ExpertTp, P>, Tensor<B, 2>, &RowGroups) -> Tensor<B, 2>,
) -> usize {
    let base = WeightLayout {
        experts: (counts.len() > 1).then_some(0..counts.len()),
        d_out: D_OUT,
        d_in: D_IN,
        fragments: 1,
        axis,
        rank: 0,
        ranks: 1,
    };
    let config = LoraConfig::new(RANK, 8.0).with_init_b(Init::Kaiming);
    let lora = Lora::init("linear", &config, &base, &Default::default()).unwrap();
    let rows = RowGroups::new(counts, TOKENS).unwrap();
    let x = Tensor::<B, 2>::from_inner(random(D_IN)).require_grad();
    large(|| {
        let y = forward(&lora, x.clone(), &rows);
        let grads = y.backward();
        (y, x.grad(&grads).expect("the adapter reaches its input"))
    })
}

/// The output, its cotangent of ones and the input's gradient.
const NEEDED: usize = 3;

#[test]
fn an_adapter_in_a_group_of_one_copies_no_activation() {
    for counts in [vec![TOKENS], vec![300, 0, 724]] {
        let column = |copy: bool| {
            passes(
                ShardAxis::Out,
                &counts,
                |lora: &ColumnLora<B, ExpertTp>, x, rows| {
                    let x = if copy { x + 1.0 } else { x };
                    lora.forward(Group::solo().fanout(x), rows).into_tensor()
                },
            )
        };
        let row = || {
            passes(
                ShardAxis::In,
                &counts,
                |lora: &RowLora<B, ExpertTp>, x, rows| {
                    let delta = lora.forward(Group::solo().shard(x), rows);
                    delta.embed().into_term()
                },
            )
        };
        // gemm's workspace is allocated by the first products of a thread.
        let _ = (column(false), row());
        assert_eq!([column(false), row()], [NEEDED; 2], "{counts:?}");
        // Negative control: one pass over the input more is seen.
        assert!(column(true) > NEEDED, "{counts:?}");
    }
}
