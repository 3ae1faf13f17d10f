//! `gather_from` gives the right value, but its backward keeps a slice of one rank's gradient. Each
//! rank's `B` returns its own term of it: `A` would miss the terms of the other ranks.

use moe_lora_adapters::{AdapterBackend, ColumnLora};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Fanout, Sharded};

fn delta<B: AdapterBackend>(
    lora: &ColumnLora<B, ExpertTp>,
    x: Fanout<B, ExpertTp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    let z = lora.a.forward(x, rows).gather_from();
    lora.b.forward(z, rows)
}

fn main() {}
