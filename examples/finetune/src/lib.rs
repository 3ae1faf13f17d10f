//! Fine-tunes the experts of a Qwen3-MoE directory with LoRA at any expert topology.
