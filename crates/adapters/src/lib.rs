//! LoRA adapters that arrive in the parallel state of their base.
