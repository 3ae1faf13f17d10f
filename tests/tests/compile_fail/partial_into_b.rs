//! A row-parallel `A` leaves each rank its own term of `A x`. `B` on that term gives a number that
//! no weight represents.

use moe_lora_adapters::{AdapterBackend, RowLora};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Sharded};

fn delta<B: AdapterBackend>(
    lora: &RowLora<B, ExpertTp>,
    x: Sharded<B, ExpertTp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    let z = lora.a.forward(x, rows);
    lora.b.forward(z, rows)
}

fn main() {}
