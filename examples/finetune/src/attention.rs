//! Grouped-query self-attention.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Tensor, activation};
use burn_moe_lora::interchange::QkNorm;
use burn_moe_lora::kernels::{GroupedBackend, RowGroups, grouped_matmul};

use crate::config::DenseConfig;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::precision::{at_least_f32, back_to};
use crate::rope::RopeTable;
use crate::weights::WeightReader;

/// Causal self-attention whose query heads share key and value heads in groups.
///
/// `softmax(q k^T / sqrt(D)) v`, projected back to `H`. Query head `h` uses key and value head
/// `h / (heads / kv_heads)`.
#[derive(Module, Debug)]
pub struct Attention<B: Backend> {
    q: Linear<B>,
    k: Linear<B>,
    v: Linear<B>,
    o: Linear<B>,
    /// Norms of queries and keys; both or none.
    norms: Option<[RmsNorm<B>; 2]>,
    #[module(skip)]
    qk_norm: QkNorm,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl<B: GroupedBackend> Attention<B> {
    /// Reads the projections and norms under `name`, such as `model.layers.0.self_attn`.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape than `config` implies.
    pub fn load(
        reader: &mut WeightReader<'_, B>,
        name: &str,
        config: &DenseConfig,
    ) -> Result<Self> {
        let (hidden, bias) = (config.hidden, config.qkv_bias);
        let (q_width, kv_width) = (config.q_width(), config.kv_width());
        let norm_widths = match config.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some((config.head_dim, config.head_dim)),
            QkNorm::Full => Some((q_width, kv_width)),
        };
        let norms = match norm_widths {
            None => None,
            Some((q, k)) => Some([
                RmsNorm::load(reader, &format!("{name}.q_norm"), q, config.eps)?,
                RmsNorm::load(reader, &format!("{name}.k_norm"), k, config.eps)?,
            ]),
        };
        Ok(Self {
            q: Linear::load(reader, &format!("{name}.q_proj"), q_width, hidden, bias)?,
            k: Linear::load(reader, &format!("{name}.k_proj"), kv_width, hidden, bias)?,
            v: Linear::load(reader, &format!("{name}.v_proj"), kv_width, hidden, bias)?,
            o: Linear::load(reader, &format!("{name}.o_proj"), hidden, q_width, false)?,
            norms,
            qk_norm: config.qk_norm,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        })
    }

    /// Attends from every position to itself and the positions before it.
    ///
    /// # Shapes
    /// `x` is `[N, L, H]`, and so is the result.
    ///
    /// # Panics
    /// If `H` is not that of the weights or `L` is not that of `rope`.
    pub fn forward(&self, x: Tensor<B, 3>, rope: &RopeTable<B>) -> Tensor<B, 3> {
        let [batch, length, hidden] = x.dims();
        let dtype = x.dtype();
        let device = x.device();
        let rows = x.reshape([batch * length, hidden]);
        let [q_norm, k_norm] = match &self.norms {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        let heads_of = |projected: Tensor<B, 2>, heads: usize, norm: Option<&RmsNorm<B>>| {
            let projected = match (self.qk_norm, norm) {
                (QkNorm::Full, Some(norm)) => norm.forward(projected),
                _ => projected,
            };
            let split = projected.reshape([batch, length, heads, self.head_dim]);
            let split = match (self.qk_norm, norm) {
                (QkNorm::PerHead, Some(norm)) => norm.forward(split),
                _ => split,
            };
            split.swap_dims(1, 2)
        };
        let q = rope.rotate(heads_of(self.q.forward(rows.clone()), self.heads, q_norm));
        let k = rope.rotate(heads_of(
            self.k.forward(rows.clone()),
            self.kv_heads,
            k_norm,
        ));
        let v = heads_of(self.v.forward(rows), self.kv_heads, None);

        // The query heads of a group are neighbours, so stacking them along the rows lets one product per key head serve
        // the group and no key or value is copied. It is that of the experts, whose f32 is exact on every backend.
        let (group_rows, groups) = (self.heads / self.kv_heads * length, batch * self.kv_heads);
        let rows = groups * group_rows;
        let by_head =
            RowGroups::new(&vec![group_rows; groups], rows).expect("the heads cover the rows");
        let keys = k.reshape([groups, length, self.head_dim]);
        let scores = grouped_matmul(q.reshape([rows, self.head_dim]), keys, &by_head);
        let scores = at_least_f32(scores).mul_scalar((self.head_dim as f64).sqrt().recip());
        let scores = scores.reshape([batch, self.heads, length, length]);
        let future = Tensor::<B, 2, Bool>::tril_mask([length, length], 0, &device)
            .unsqueeze::<4>()
            .expand([batch, self.heads, length, length]);
        let weights = activation::softmax(scores.mask_fill(future, f32::NEG_INFINITY), 3);
        let weights = back_to(weights, dtype);
        let values = v.swap_dims(2, 3).reshape([groups, self.head_dim, length]);
        let mixed = grouped_matmul(weights.reshape([rows, length]), values, &by_head)
            .reshape([batch, self.heads, length, self.head_dim])
            .swap_dims(1, 2)
            .reshape([batch * length, self.heads * self.head_dim]);
        self.o.forward(mixed).reshape([batch, length, hidden])
    }

    /// Number of weights, biases and norm weights.
    pub fn parameter_count(&self) -> usize {
        let linears = [&self.q, &self.k, &self.v, &self.o];
        let norms = self.norms.iter().flatten();
        linears
            .iter()
            .map(|linear| linear.parameter_count())
            .sum::<usize>()
            + norms.map(|norm| norm.weight.dims()[0]).sum::<usize>()
    }
}
