//! `reduce_from` gives the right value, but its gradient is taken to be the same on all ranks. Each
//! rank's `B` returns its own term of it: `A` would be trained by a part of its gradient.

use moe_lora_adapters::{AdapterBackend, RowLora};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Sharded};

fn delta<B: AdapterBackend>(
    lora: &RowLora<B, ExpertTp>,
    x: Sharded<B, ExpertTp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    let z = lora.a.forward(x, rows).reduce_from();
    lora.b.forward(z, rows)
}

fn main() {}
