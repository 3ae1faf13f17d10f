//! Weighted sums of adapters as one adapter.

use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use moe_lora_parallel::GroupKind;

use crate::merge::in_f32;
use crate::{Lora, LoraConfig, MultiLora, Placement, Sharing};

impl<B: Backend, G: GroupKind, P: Placement> MultiLora<B, G, P> {
    /// The adapter of `sum_i w_i * s_i B_i act(A_i x)`: the rows of all `A_i`, and the columns of all
    /// `w_i s_i B_i` beside each other. None where none of the sources is here.
    ///
    /// The rows of the `A_i` take turns in equal blocks, as many as the greatest common divisor of the
    /// ranks. A group that divides each rank divides the number of blocks, so a rank's rows of the
    /// combination are those that it has of the sources, and the same full factors come out at every
    /// topology.
    pub(crate) fn combined(&self, name: &str, sources: &[(&str, f64)]) -> Option<Lora<B, G, P>> {
        let sources: Vec<(&Lora<B, G, P>, f64)> = sources
            .iter()
            .filter_map(|(name, weight)| Some((&self.get(name)?.lora, *weight)))
            .collect();
        let (first, _) = sources.first()?;
        let configs = || sources.iter().map(|(lora, _)| lora.config());
        let rank: usize = configs().map(|config| config.rank).sum();
        let sharing = first.config().sharing;
        let alike = configs().all(|config| config.sharing == sharing);
        let sharing = if alike { sharing } else { Sharing::PerExpert };
        let config = LoraConfig {
            rank,
            alpha: rank as f64,
            rslora: false,
            sharing,
            ..*first.config()
        };
        let blocks = configs().fold(0, |blocks, config| gcd(blocks, config.rank));
        let factors = sources
            .iter()
            .flat_map(|(lora, _)| [&lora.a.weight, &lora.b.weight]);
        let experts = factors.map(|factor| factor.untracked().dims()[0]).max()?;
        let of_experts = |factor: Tensor<B, 3>, shared: bool| match factor.dims()[0] {
            1 if !shared => factor.repeat_dim(0, experts),
            _ => factor,
        };
        let [a_shared, b_shared] = sharing.factors(P::AXIS);
        let a = sources.iter().map(|(lora, _)| {
            let a = of_experts(lora.a.weight.untracked(), a_shared);
            let [experts, local, d_in] = a.dims();
            let block = lora.config().rank / blocks;
            a.reshape([experts, local / block, block, d_in])
        });
        let a = Tensor::cat(a.collect(), 2);
        let [experts, local, block, d_in] = a.dims();
        let a = a.reshape([experts, local * block, d_in]);
        let b = sources.iter().map(|(lora, weight)| {
            let b = of_experts(lora.b.weight.untracked(), b_shared);
            let ([experts, d_out, rank], dtype) = (b.dims(), b.dtype());
            // Rounded once.
            let b = in_f32(b).mul_scalar(weight * lora.config().scale());
            let b = b.cast(dtype);
            b.reshape([experts, d_out, blocks, rank / blocks])
        });
        let b = Tensor::cat(b.collect(), 3);
        let [experts, d_out, ..] = b.dims();
        let b = b.reshape([experts, d_out, rank]);
        let path = format!("{}.{name}", self.path());
        Some(first.with_factors(&path, config, a, b))
    }
}

fn gcd(a: usize, b: usize) -> usize {
    match b {
        0 => a,
        b => gcd(b, a % b),
    }
}
