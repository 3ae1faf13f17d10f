//! Parallel states, topology, groups and collectives for LoRA on Mixture-of-Experts models in burn.
