//! Which experts a token goes to, and with which weight.

use burn::module::{Module, Param};
use burn::tensor::activation::softmax;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use moe_lora_kernels::{GroupedBackend, linear};

/// How logits become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouterScore {
    /// Softmax over all experts, then the `K` largest (Qwen, OLMoE, Mixtral).
    SoftmaxThenTopK {
        /// Divide the chosen weights by their sum.
        renormalize: bool,
    },
    /// The `K` largest logits, then softmax over them (GPT-OSS).
    TopKThenSoftmax,
}

/// A linear router with frozen weight, `logits = x W^T`, computed in at least f32.
#[derive(Module, Debug)]
pub struct TopKRouter<B: Backend> {
    /// `[E, H]`, frozen.
    pub weight: Param<Tensor<B, 2>>,
    top_k: usize,
    #[module(skip)]
    score: RouterScore,
}

/// The experts of each token.
#[derive(Clone, Debug)]
pub struct Routing<B: Backend> {
    /// `[T, K]`, differentiable.
    pub weights: Tensor<B, 2>,
    /// Global expert of each `(token, choice)`, `T * K` in row-major order.
    pub experts: Vec<usize>,
    /// `K`.
    pub top_k: usize,
}

impl<B: Backend> TopKRouter<B> {
    /// A router of weight `[E, H]`.
    ///
    /// # Panics
    ///
    /// When `top_k` is not in `1..=E`.
    pub fn new(weight: Tensor<B, 2>, top_k: usize, score: RouterScore) -> Self {
        let [experts, _] = weight.dims();
        assert!(
            (1..=experts).contains(&top_k),
            "top_k={top_k} is not in 1..={experts}"
        );
        Self {
            weight: Param::from_tensor(weight).set_require_grad(false),
            top_k,
            score,
        }
    }
}

impl<B: GroupedBackend> TopKRouter<B> {
    /// Chooses `K` experts for each row of `x [T, H]`. Of equal scores the lower expert wins.
    pub fn forward(&self, x: Tensor<B, 2>) -> Routing<B> {
        let dtype = x.dtype();
        let logits = linear(at_least_f32(x), at_least_f32(self.weight.val()));
        let scores = match self.score {
            RouterScore::SoftmaxThenTopK { .. } => softmax(logits, 1),
            RouterScore::TopKThenSoftmax => logits,
        };
        let experts = self.choose(&scores);
        let indices: Vec<i64> = experts.iter().map(|expert| *expert as i64).collect();
        let indices = Tensor::<B, 2, Int>::from_data(
            TensorData::new(indices, [scores.dims()[0], self.top_k]),
            &scores.device(),
        );
        let chosen = scores.gather(1, indices);
        let weights = match self.score {
            RouterScore::SoftmaxThenTopK { renormalize: false } => chosen,
            RouterScore::SoftmaxThenTopK { renormalize: true } => {
                let sum = chosen.clone().sum_dim(1);
                chosen / sum
            }
            RouterScore::TopKThenSoftmax => softmax(chosen, 1),
        };
        Routing {
            weights: weights.cast(dtype),
            experts,
            top_k: self.top_k,
        }
    }

    /// The choice is made on the host, where the dispatcher needs it to size its collectives.
    fn choose(&self, scores: &Tensor<B, 2>) -> Vec<usize> {
        let [tokens, experts] = scores.dims();
        let scores: Vec<f64> = scores.clone().detach().into_data().iter::<f64>().collect();
        let mut order: Vec<usize> = Vec::with_capacity(experts);
        let mut chosen = Vec::with_capacity(tokens * self.top_k);
        for row in scores.chunks_exact(experts) {
            order.clear();
            order.extend(0..experts);
            order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
            chosen.extend(&order[..self.top_k]);
        }
        chosen
    }
}

fn at_least_f32<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.cast(DType::F32),
        _ => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::Flex;

    fn route(score: RouterScore) -> Routing<Flex> {
        let device = Default::default();
        let weight = Tensor::from_floats([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], &device);
        let x = Tensor::from_floats([[1.0, 2.0], [2.0, 1.0], [0.0, 0.0]], &device);
        TopKRouter::new(weight, 2, score).forward(x)
    }

    fn close(weights: Tensor<Flex, 2>, expected: [[f32; 2]; 3]) {
        let weights: Vec<f32> = weights.into_data().to_vec().unwrap();
        for (found, expected) in weights.iter().zip(expected.as_flattened()) {
            assert!((found - expected).abs() < 1e-6, "{weights:?}");
        }
    }

    #[test]
    fn softmax_then_top_k_keeps_the_weights_of_the_full_softmax() {
        let routing = route(RouterScore::SoftmaxThenTopK { renormalize: false });
        assert_eq!(routing.experts, [2, 1, 1, 2, 0, 1]);
        let sum = 1.0 + 1f32.exp() + 2f32.exp();
        let (large, small, third) = (2f32.exp() / sum, 1f32.exp() / sum, 1.0 / 3.0);
        close(
            routing.weights,
            [[large, small], [large, small], [third, third]],
        );
    }

    #[test]
    fn renormalised_weights_sum_to_one_and_equal_top_k_then_softmax() {
        let large = 1.0 / (1.0 + (-1f32).exp());
        let expected = [[large, 1.0 - large], [large, 1.0 - large], [0.5, 0.5]];
        close(
            route(RouterScore::SoftmaxThenTopK { renormalize: true }).weights,
            expected,
        );
        close(route(RouterScore::TopKThenSoftmax).weights, expected);
    }

    #[test]
    fn logits_of_half_precision_are_computed_in_f32() {
        // 1 + 2^-9 rounds to 1 in bf16: a tie there, which the lower expert would win.
        let device = Default::default();
        let weight = Tensor::<Flex, 2>::from_floats([[1.0, 0.0], [1.0, 1.0]], &device);
        let x = Tensor::from_floats([[1.0, 2f32.powi(-9)]], &device).cast(DType::BF16);
        let score = RouterScore::TopKThenSoftmax;
        let routing = TopKRouter::new(weight.cast(DType::BF16), 1, score).forward(x);
        assert_eq!(routing.experts, [1]);
        assert_eq!(routing.weights.dtype(), DType::BF16);
    }
}
