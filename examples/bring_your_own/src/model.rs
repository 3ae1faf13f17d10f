//! The model: an embedding, layers of a norm and an MoE block, and a head.

use burn::module::{Module, Param};
use burn::nn;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_moe_lora::interchange::ModelConfig;
use burn_moe_lora::prelude::*;

use anyhow::Result;

// ANCHOR: module
#[derive(Module, Debug)]
pub struct Model<B: Backend> {
    embedding: nn::Embedding<B>,
    norms: Vec<nn::RmsNorm<B>>,
    blocks: Vec<MoeLayer<B>>,
    head: nn::Linear<B>,
}

/// All that a model of one's own needs to take adapters: which of its fields have linears.
impl<B: Backend> Adaptable<B> for Model<B> {
    fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
        self.blocks.linears()
    }

    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
        self.blocks.linears_mut()
    }
}
// ANCHOR_END: module

// ANCHOR: load
impl<B: AdapterBackend> Model<B> {
    /// The model with the values of its file: the same on every rank, of which the MoE blocks keep this
    /// rank's part.
    pub fn load(config: &ModelConfig, mesh: &Mesh<B>, device: &B::Device) -> Result<Self> {
        let (h, f) = (config.hidden_size, config.moe_intermediate_size);
        let (vocab, experts) = (config.vocab_size, config.num_experts);
        let param = |seed, shape: [usize; 2]| {
            let data = TensorData::new(values(seed, shape[0] * shape[1]), shape);
            Param::from_tensor(Tensor::from_data(data, device))
        };
        let mut blocks = Vec::new();
        for layer in 0..config.num_hidden_layers {
            let seed = 10 * layer;
            let router = values(seed, experts * h);
            let [gate, up, down] = [1, 2, 3].map(|k| values(seed + k, experts * f * h));
            let weights = MoeWeights {
                router: &router,
                experts: MlpWeights {
                    gate: &gate,
                    up: &up,
                    down: &down,
                    biases: None,
                },
                ..Default::default()
            };
            let path = format!("layers.{layer}.mlp");
            let block = MoeConfig::new(path, h, f, experts, config.num_experts_per_tok);
            blocks.push(block.init(weights, mesh, device)?);
        }
        let norm = nn::RmsNormConfig::new(h);
        Ok(Self {
            embedding: nn::Embedding {
                weight: param(100, [vocab, h]),
            },
            norms: blocks.iter().map(|_| norm.init(device)).collect(),
            blocks,
            head: nn::Linear {
                weight: param(101, [h, vocab]),
                bias: None,
            },
        })
    }
    // ANCHOR_END: load

    // ANCHOR: forward
    /// Logits `[T, vocab]` of tokens `[T]`.
    pub fn forward(&self, tokens: Tensor<B, 1, Int>, mesh: &Mesh<B>) -> Tensor<B, 2> {
        let mut x = self.embedding.weight.val().select(0, tokens);
        for (norm, block) in self.norms.iter().zip(&self.blocks) {
            x = x.clone() + block.forward(norm.forward(x), mesh);
        }
        self.head.forward(x)
    }
    // ANCHOR_END: forward
}

/// `count` made-up values: they stand for a file.
fn values(seed: usize, count: usize) -> Vec<f32> {
    let mut state = seed as u64 + 1;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|_| next()).collect()
}
