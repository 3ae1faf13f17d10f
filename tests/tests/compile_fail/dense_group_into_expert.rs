//! The tensor-parallel group of the dense layers is not that of the experts: their sizes differ, and
//! a sum over the wrong one counts other experts' terms.

use moe_lora_adapters::{AdapterBackend, ColumnLora, RowLora};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Fanout, Sharded, Tp};

fn fc1<B: AdapterBackend>(
    lora: &ColumnLora<B, ExpertTp>,
    x: Fanout<B, Tp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    lora.forward(x, rows)
}

fn fc2<B: AdapterBackend>(
    lora: &RowLora<B, ExpertTp>,
    x: Sharded<B, Tp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    lora.forward(x, rows)
}

fn main() {}
