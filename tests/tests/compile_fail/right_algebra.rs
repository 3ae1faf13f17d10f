//! What the failing files should have said: the same functions with the operation that was missing.

use burn::tensor::Tensor;
use moe_lora_adapters::{AdapterBackend, ColumnLora, RowLinear, RowLora, RowWeight};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Fanout, Partial, Sharded};

/// Against `partial_into_b` and `replicated_sum_into_b`.
pub fn fc2_delta<B: AdapterBackend>(
    lora: &RowLora<B, ExpertTp>,
    x: Sharded<B, ExpertTp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    let z = lora.a.forward(x, rows).reduce_fanout();
    lora.b.forward(z, rows)
}

/// Against `replicated_gather_into_b`.
pub fn fc1_delta<B: AdapterBackend>(
    lora: &ColumnLora<B, ExpertTp>,
    x: Fanout<B, ExpertTp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    let z = lora.a.forward(x, rows).gather_fanout();
    lora.b.forward(z, rows)
}

/// Against `gathered_delta_on_partial_base`.
pub fn fc2_output<B: AdapterBackend>(
    base: &RowWeight<B, ExpertTp>,
    lora: &RowLora<B, ExpertTp>,
    x: Sharded<B, ExpertTp>,
    rows: &RowGroups,
) -> Partial<B, ExpertTp> {
    let delta = lora.forward(x.clone(), rows).embed();
    base.forward(x, rows) + delta
}

/// Against `dense_group_into_expert`.
pub fn expert_group<B: AdapterBackend>(
    lora: &ColumnLora<B, ExpertTp>,
    x: Fanout<B, ExpertTp>,
    rows: &RowGroups,
) -> Sharded<B, ExpertTp> {
    lora.forward(x, rows)
}

/// Against `partial_read_as_value`.
pub fn loss<B: AdapterBackend>(
    down: &RowLinear<B, ExpertTp>,
    x: Sharded<B, ExpertTp>,
    rows: &RowGroups,
) -> Tensor<B, 1> {
    let y = down.forward_suppressed(x, rows).reduce_from().into_tensor();
    y.powi_scalar(2).sum()
}
