//! LoRA fine-tuning of Mixture-of-Experts models in burn, exact at every parallel topology.
