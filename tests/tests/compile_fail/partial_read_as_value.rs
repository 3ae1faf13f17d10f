//! A row-parallel linear whose sum is suppressed leaves each rank its own term of the output. A loss of that
//! term is of no model's output.

use burn::tensor::Tensor;
use moe_lora_adapters::{AdapterBackend, RowLinear};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Sharded};

fn loss<B: AdapterBackend>(
    down: &RowLinear<B, ExpertTp>,
    x: Sharded<B, ExpertTp>,
    rows: &RowGroups,
) -> Tensor<B, 1> {
    let y = down.forward_suppressed(x, rows).into_tensor();
    y.powi_scalar(2).sum()
}

fn main() {}
