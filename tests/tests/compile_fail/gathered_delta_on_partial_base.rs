//! The base's terms are summed later, in combine. A full-width delta on every rank would be counted
//! once a rank.

use moe_lora_adapters::{AdapterBackend, RowLora, RowWeight};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Partial, Sharded};

fn output<B: AdapterBackend>(
    base: &RowWeight<B, ExpertTp>,
    lora: &RowLora<B, ExpertTp>,
    x: Sharded<B, ExpertTp>,
    rows: &RowGroups,
) -> Partial<B, ExpertTp> {
    let delta = lora.forward(x.clone(), rows).gather_from();
    base.forward(x, rows) + delta
}

fn main() {}
