//! One decoder layer around a block that is given from outside.

use anyhow::Result;
use burn::module::Module;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_moe_lora::kernels::GroupedBackend;

use crate::attention::Attention;
use crate::config::DenseConfig;
use crate::norm::RmsNorm;
use crate::rope::RopeTable;
use crate::weights::WeightReader;

/// The dense parts of a pre-norm decoder layer.
///
/// `h = x + attention(norm1(x))`, then `y = h + block(norm2(h))`.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    attention: Attention<B>,
    input_norm: RmsNorm<B>,
    block_norm: RmsNorm<B>,
}

impl<B: GroupedBackend> DecoderLayer<B> {
    /// Reads the layer under `name`, such as `model.layers.0`.
    ///
    /// # Errors
    /// A tensor that is missing or has another shape than `config` implies.
    pub fn load(
        reader: &mut WeightReader<'_, B>,
        name: &str,
        config: &DenseConfig,
    ) -> Result<Self> {
        let norm = |part: &str, reader: &mut WeightReader<'_, B>| {
            RmsNorm::load(reader, &format!("{name}.{part}"), config.hidden, config.eps)
        };
        Ok(Self {
            input_norm: norm("input_layernorm", reader)?,
            block_norm: norm("post_attention_layernorm", reader)?,
            attention: Attention::load(reader, &format!("{name}.self_attn"), config)?,
        })
    }

    /// Runs the layer with `block` in the place of its feed-forward part.
    ///
    /// The block sees the normalised tokens as rows, sequence by sequence, and returns its output for the same rows
    /// without the residual.
    ///
    /// # Shapes
    /// `x` is `[N, L, H]`, and so is the result; `block` maps `[T, H]` to `[T, H]` with `T = N * L`.
    ///
    /// # Panics
    /// If `block` returns another shape, or `x` does not fit the weights or `rope`.
    pub fn forward_with(
        &self,
        x: Tensor<B, 3>,
        rope: &RopeTable<B>,
        block: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Tensor<B, 3> {
        let [batch, length, hidden] = x.dims();
        let attended = self
            .attention
            .forward(self.input_norm.forward(x.clone()), rope);
        let h = x + attended;
        let tokens = self
            .block_norm
            .forward(h.clone())
            .reshape([batch * length, hidden]);
        let output = block(tokens);
        let [rows, width] = output.dims();
        assert!(
            rows == batch * length && width == hidden,
            "the block took [{}, {hidden}] and returned [{rows}, {width}] (return one row for every row)",
            batch * length
        );
        h + output.reshape([batch, length, hidden])
    }

    /// Number of frozen parameters, those of the block not counted.
    pub fn parameter_count(&self) -> usize {
        self.attention.parameter_count()
            + self.input_norm.weight.dims()[0]
            + self.block_norm.weight.dims()[0]
    }
}
