//! A causal language model without its MoE blocks.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::module::embedding;
use burn::tensor::{Int, Tensor};
use burn_moe_lora::kernels::GroupedBackend;

use crate::config::DenseConfig;
use crate::decoder::DecoderLayer;
use crate::linear::Linear;
use crate::norm::RmsNorm;
use crate::rope::RopeTable;
use crate::weights::WeightReader;

/// Embedding, decoder layers, final norm and output projection, all frozen.
///
/// Only what a closure adds in [`forward_with`](Self::forward_with) can be trained; the weights here take part in an
/// autodiff graph as constants.
#[derive(Module, Debug)]
pub struct CausalLm<B: Backend> {
    /// `[V, H]`.
    embedding: Tensor<B, 2>,
    layers: Vec<DecoderLayer<B>>,
    norm: RmsNorm<B>,
    head: Linear<B>,
    #[module(skip)]
    config: DenseConfig,
}

impl<B: GroupedBackend> CausalLm<B> {
    /// Reads every dense weight by its hub name (`model.embed_tokens.weight`, `model.layers.0.self_attn.q_proj.weight`
    /// and so on); with `config.tie` the embedding serves as `lm_head.weight`.
    ///
    /// # Errors
    /// A config that does not fit itself, an error of `source`, or a tensor of another shape than `config` implies.
    pub fn load(
        config: &DenseConfig,
        device: &B::Device,
        mut source: impl FnMut(&str) -> Result<(Vec<usize>, Vec<f32>)>,
    ) -> Result<Self> {
        config.validate()?;
        let reader = &mut WeightReader::<B>::new(&mut source, device);
        let shape = [config.vocab, config.hidden];
        let embedding = reader.read("model.embed_tokens.weight", shape)?;
        let layers = (0..config.layers)
            .map(|layer| DecoderLayer::load(reader, &format!("model.layers.{layer}"), config))
            .collect::<Result<_>>()?;
        let norm = RmsNorm::load(reader, "model.norm", config.hidden, config.eps)?;
        let head = match config.tie {
            true => Linear {
                weight: embedding.clone(),
                bias: None,
            },
            false => Linear::load(reader, "lm_head", config.vocab, config.hidden, false)?,
        };
        Ok(Self {
            embedding,
            layers,
            norm,
            head,
            config: config.clone(),
        })
    }

    /// Computes the logits of the next byte at every position.
    ///
    /// `blocks` is called once a layer, in order, with the number of the layer and its normalised tokens; see
    /// [`DecoderLayer::forward_with`].
    ///
    /// # Shapes
    /// `ids` is `[N, L]`, `blocks` maps `[T, H]` to `[T, H]` with `T = N * L`, the result is `[N, L, V]`.
    ///
    /// # Panics
    /// If an id is not below `V` or `blocks` returns another shape.
    pub fn forward_with(
        &self,
        ids: Tensor<B, 2, Int>,
        mut blocks: impl FnMut(usize, Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Tensor<B, 3> {
        let [batch, length] = ids.dims();
        let device = ids.device();
        let config = &self.config;
        let rope = RopeTable::new(length, config.head_dim, config.rope_theta, &device);
        let mut x = embedding(self.embedding.clone(), ids);
        for (layer, dense) in self.layers.iter().enumerate() {
            x = dense.forward_with(x, &rope, |tokens| blocks(layer, tokens));
        }
        let rows = self
            .norm
            .forward(x)
            .reshape([batch * length, config.hidden]);
        self.head
            .forward(rows)
            .reshape([batch, length, config.vocab])
    }

    /// Sizes and switches of the dense layers.
    pub fn config(&self) -> &DenseConfig {
        &self.config
    }

    /// Number of frozen parameters, those of the blocks not counted; a tied output projection counts once.
    pub fn parameter_count(&self) -> usize {
        let embedding = self.config.vocab * self.config.hidden;
        let head = match self.config.tie {
            true => 0,
            false => self.head.parameter_count(),
        };
        let layers = self.layers.iter().map(DecoderLayer::parameter_count);
        embedding + head + self.config.hidden + layers.sum::<usize>()
    }
}
