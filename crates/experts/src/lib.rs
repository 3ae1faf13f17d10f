//! Router, dispatcher, expert MLP and MoE layer, exact under expert and expert-tensor parallelism.
