//! Shared experts: an MLP over the dense tensor parallel group that every token passes.

use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn::tensor::activation::sigmoid;
use burn::tensor::backend::Backend;
use moe_lora_adapters::AdapterBackend;
use moe_lora_kernels::{RowGroups, TokenIds, linear};
use moe_lora_parallel::{Fanout, Partial, Replicated, Sharded, Tokens, Tp};

use crate::tokens::gather;
use crate::{SlotOrder, SwigluMlp};

/// `mlp(x)`, or `sigmoid(x g^T) * mlp(x)` with a gate.
///
/// One sum over the group brings the result together, and there are three ways to place it:
/// [`forward`](Self::forward) makes it here, [`forward_overlapped`](Self::forward_overlapped)
/// leaves it to the caller, who hides it behind the dispatcher's communication, and
/// [`forward_sequence`](Self::forward_sequence) scatters it over tokens and keeps the rank's own alone.
/// Adapters with dropout need the ids of the tokens, named ones their slots.
#[derive(Module, Debug)]
pub struct SharedExperts<B: Backend> {
    /// The MLP.
    pub mlp: SwigluMlp<B, Tp>,
    /// Gate `[1, H]`, frozen.
    pub gate: Option<Param<Tensor<B, 2>>>,
}

impl<B: AdapterBackend> SharedExperts<B> {
    /// Ordinary tensor parallelism: `[T, H] -> [T, H]`.
    ///
    /// # Panics
    ///
    /// When shapes do not match, or when a collective fails.
    pub fn forward(&self, x: Replicated<B, Tp>, tokens: Option<&TokenIds>) -> Replicated<B, Tp> {
        let order = SlotOrder::of(tokens);
        let x = x.map(|x| order.sort(x));
        let rows = rows(x.tensor(), order.tokens());
        let y = self.mlp.forward(x.clone(), &rows);
        let y = match &self.gate {
            None => y,
            Some(gate) => {
                let factor = score(x.into_tensor(), gate);
                y.map(|y| y * factor)
            }
        };
        y.map(|y| order.restore(y))
    }

    /// Collectives suppressed: `[T, H] -> [T, H]`, each rank its own term. The gate's gradient
    /// has a term on each rank too, which is why it is computed from the [`Fanout`].
    ///
    /// # Panics
    ///
    /// When shapes do not match, or when a collective fails.
    pub fn forward_overlapped(
        &self,
        x: Fanout<B, Tp>,
        tokens: Option<&TokenIds>,
    ) -> Partial<B, Tp> {
        let order = SlotOrder::of(tokens);
        let x = x.map(|x| order.sort(x));
        let rows = rows(x.tensor(), order.tokens());
        let y = self.mlp.forward_suppressed(x.clone(), &rows);
        let y = match &self.gate {
            None => y,
            Some(gate) => y * x.map(|x| score(x, gate)),
        };
        y.map_linear(|y| order.restore(y))
    }

    /// Sequence parallel: this rank's tokens `[sizes[rank], H]`, whose ids `tokens` has, to the same.
    /// Those of the other ranks are gathered, and for the backward pass again rather than kept.
    ///
    /// # Panics
    ///
    /// When shapes do not match, or when a collective fails.
    pub fn forward_sequence(
        &self,
        x: Sharded<B, Tp, Tokens>,
        tokens: Option<&TokenIds>,
    ) -> Sharded<B, Tp, Tokens> {
        let sizes = x.sizes().to_vec();
        let tokens = tokens.map(|tokens| gather(x.group(), tokens, &sizes));
        self.forward_overlapped(x.gather_fanout_again(), tokens.as_ref())
            .reduce_scatter(&sizes)
    }
}

/// All rows of `x`, of these tokens.
fn rows<B: AdapterBackend>(x: &Tensor<B, 2>, tokens: Option<&TokenIds>) -> RowGroups {
    let rows = RowGroups::whole(x.dims()[0]);
    match tokens {
        None => rows,
        Some(tokens) => rows.with_tokens(tokens.clone()),
    }
}

/// `sigmoid(x g^T)`, `[T, 1]`.
fn score<B: AdapterBackend>(x: Tensor<B, 2>, gate: &Param<Tensor<B, 2>>) -> Tensor<B, 2> {
    sigmoid(linear(x, gate.val()))
}
