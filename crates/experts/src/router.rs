//! Which experts a token goes to, and with which weight.

use burn::module::{Module, Param};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Int, Tensor, TensorData};
use moe_lora_kernels::{GroupedBackend, linear};
use moe_lora_parallel::shard_extent;

use crate::{ExpertsError, TokenCounter};

/// How logits become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RouterScore {
    /// Softmax over all experts, then the `K` largest (Qwen, OLMoE, Mixtral).
    SoftmaxThenTopK {
        /// Divide the chosen weights by their sum.
        renormalize: bool,
    },
    /// The `K` largest logits, then softmax over them (GPT-OSS).
    TopKThenSoftmax,
    /// A sigmoid of each logit, then the `K` largest within the best groups of experts
    /// (DeepSeek-V3). The score of a group is the sum of its two largest.
    SigmoidThenTopK {
        /// Equal runs of experts, 1 for no limit.
        n_group: usize,
        /// Best groups that a token chooses from.
        topk_group: usize,
        /// Divide the chosen weights by their sum.
        renormalize: bool,
        /// Multiplies the weights at last.
        scaling_factor: f64,
    },
}

/// A linear router with frozen weights, `logits = x W^T + b`, computed in at least f32.
#[derive(Module, Debug)]
pub struct TopKRouter<B: Backend> {
    /// `[E, H]`, frozen.
    pub weight: Param<Tensor<B, 2>>,
    /// `[1, E]`, frozen: added to the logits.
    pub bias: Option<Param<Tensor<B, 2>>>,
    /// `[1, E]`, frozen: added to the scores for the choice alone, and in no weight.
    pub correction_bias: Option<Param<Tensor<B, 2>>>,
    top_k: usize,
    #[module(skip)]
    score: RouterScore,
    #[module(skip)]
    counter: TokenCounter,
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

impl RouterScore {
    /// Number of groups of experts, and of those that a token chooses from.
    fn groups(self) -> [usize; 2] {
        match self {
            Self::SigmoidThenTopK {
                n_group,
                topk_group,
                ..
            } => [n_group, topk_group],
            _ => [1, 1],
        }
    }
}

impl<B: Backend> TopKRouter<B> {
    /// A router of weight `[E, H]`, without biases.
    ///
    /// # Errors
    ///
    /// When `top_k` is not in `1..=E`, when the groups do not divide `E`, or when the groups
    /// chosen do not hold `top_k` experts.
    pub fn new(
        path: &str,
        weight: Tensor<B, 2>,
        top_k: usize,
        score: RouterScore,
    ) -> Result<Self, ExpertsError> {
        let [num_experts, _] = weight.dims();
        if !(1..=num_experts).contains(&top_k) {
            return Err(ExpertsError::TopK {
                path: path.into(),
                top_k,
                num_experts,
            });
        }
        let [n_group, topk_group] = score.groups();
        let size =
            shard_extent("num_experts", num_experts, "n_group", n_group).map_err(|reason| {
                ExpertsError::Topology {
                    path: path.into(),
                    reason,
                }
            })?;
        let least = top_k.div_ceil(size);
        if !(least..=n_group).contains(&topk_group) {
            return Err(ExpertsError::TopkGroup {
                path: path.into(),
                topk_group,
                n_group,
                size,
                top_k,
                least,
            });
        }
        Ok(Self {
            weight: frozen(weight),
            bias: None,
            correction_bias: None,
            top_k,
            score,
            counter: TokenCounter::new(num_experts),
        })
    }

    /// What counts the choices of this router and of its clones.
    pub fn counter(&self) -> &TokenCounter {
        &self.counter
    }

    /// Adds `[1, E]` to the logits.
    pub fn with_bias(mut self, bias: Option<Tensor<B, 2>>) -> Self {
        self.bias = bias.map(frozen);
        self
    }

    /// Adds `[1, E]` to the scores that the choice goes by, and to no weight.
    pub fn with_correction_bias(mut self, bias: Option<Tensor<B, 2>>) -> Self {
        self.correction_bias = bias.map(frozen);
        self
    }
}

fn frozen<B: Backend>(tensor: Tensor<B, 2>) -> Param<Tensor<B, 2>> {
    Param::from_tensor(tensor).set_require_grad(false)
}

impl<B: GroupedBackend> TopKRouter<B> {
    /// Chooses `K` experts for each row of `x [T, H]`. Of equal scores the lower expert wins.
    pub fn forward(&self, x: Tensor<B, 2>) -> Routing<B> {
        let dtype = x.dtype();
        let mut logits = linear(at_least_f32(x), at_least_f32(self.weight.val()));
        if let Some(bias) = &self.bias {
            logits = logits + at_least_f32(bias.val());
        }
        let scores = match self.score {
            RouterScore::SoftmaxThenTopK { .. } => softmax(logits, 1),
            RouterScore::TopKThenSoftmax => logits,
            RouterScore::SigmoidThenTopK { .. } => sigmoid(logits),
        };
        let experts = self.choose(scores.clone().detach());
        self.counter.add(&experts);
        let indices: Vec<i64> = experts.iter().map(|expert| *expert as i64).collect();
        let indices = Tensor::<B, 2, Int>::from_data(
            TensorData::new(indices, [scores.dims()[0], self.top_k]),
            &scores.device(),
        );
        let chosen = scores.gather(1, indices);
        let renormalized = |chosen: Tensor<B, 2>, renormalize: bool| match renormalize {
            // The constant keeps scores that all underflow from giving 0 / 0, as in DeepSeek-V3.
            true => chosen.clone() / (chosen.sum_dim(1) + 1e-20),
            false => chosen,
        };
        let weights = match self.score {
            RouterScore::SoftmaxThenTopK { renormalize } => renormalized(chosen, renormalize),
            RouterScore::TopKThenSoftmax => softmax(chosen, 1),
            RouterScore::SigmoidThenTopK {
                renormalize,
                scaling_factor,
                ..
            } => renormalized(chosen, renormalize).mul_scalar(scaling_factor),
        };
        Routing {
            weights: weights.cast(dtype),
            experts,
            top_k: self.top_k,
        }
    }

    /// The choice is made on the host, where the dispatcher needs it to size its collectives.
    fn choose(&self, mut scores: Tensor<B, 2>) -> Vec<usize> {
        if let Some(bias) = &self.correction_bias {
            let bias = bias.val().cast(scores.dtype());
            scores = scores + bias;
        }
        let [tokens, experts] = scores.dims();
        if tokens == 0 {
            // A GPU has nothing to read then, and burn takes the bytes of no elements amiss.
            return Vec::new();
        }
        let mut scores: Vec<f64> = scores.into_data().iter::<f64>().collect();
        let [n_group, topk_group] = self.score.groups();
        let size = experts / n_group;
        let mut chosen = Vec::with_capacity(tokens * self.top_k);
        for row in scores.chunks_exact_mut(experts) {
            if topk_group < n_group {
                let best_two = |group: &[f64]| largest(group, 2).iter().map(|e| group[*e]).sum();
                let groups: Vec<f64> = row.chunks_exact(size).map(best_two).collect();
                let best = largest(&groups, topk_group);
                for (group, scores) in row.chunks_exact_mut(size).enumerate() {
                    if !best.contains(&group) {
                        scores.fill(f64::NEG_INFINITY);
                    }
                }
            }
            chosen.extend(largest(row, self.top_k));
        }
        chosen
    }
}

/// Places of the `count` largest scores, the largest first; of equal ones the lower.
fn largest(scores: &[f64], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    order.truncate(count);
    order
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
        TopKRouter::new("gate", weight, 2, score)
            .unwrap()
            .forward(x)
    }

    /// One token whose logits are given.
    fn route_logits<const E: usize>(
        logits: [f32; E],
        correction: [f32; E],
        top_k: usize,
        score: RouterScore,
    ) -> (Vec<usize>, Vec<f32>) {
        let device = Default::default();
        let weight = Tensor::<Flex, 2>::from_floats([logits], &device).transpose();
        let correction = Tensor::from_floats([correction], &device);
        let routing = TopKRouter::new("gate", weight, top_k, score)
            .unwrap()
            .with_correction_bias(Some(correction))
            .forward(Tensor::ones([1, 1], &device));
        let weights = routing.weights.into_data().to_vec().unwrap();
        (routing.experts, weights)
    }

    fn sigmoid_then_top_k(n_group: usize, topk_group: usize) -> RouterScore {
        RouterScore::SigmoidThenTopK {
            n_group,
            topk_group,
            renormalize: false,
            scaling_factor: 1.0,
        }
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
    fn the_correction_bias_decides_the_choice_and_stays_out_of_the_weights() {
        let logits = [2.0, 1.0, 0.0, -1.0];
        let score = sigmoid_then_top_k(1, 1);
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let near = |found: &[f32], expected: &[f32]| {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                assert!((found - expected).abs() < 1e-6, "{found} {expected}");
            }
        };
        let (experts, weights) = route_logits(logits, [0.0; 4], 2, score);
        assert_eq!(experts, [0, 1]);
        near(&weights, &[sigmoid(2.0), sigmoid(1.0)]);
        let (experts, weights) = route_logits(logits, [0.0, 0.0, 0.0, 1.0], 2, score);
        assert_eq!(experts, [3, 0]);
        near(&weights, &[sigmoid(-1.0), sigmoid(2.0)]);
        let scaled = RouterScore::SigmoidThenTopK {
            n_group: 1,
            topk_group: 1,
            renormalize: true,
            scaling_factor: 2.5,
        };
        let (_, weights) = route_logits(logits, [0.0, 0.0, 0.0, 1.0], 2, scaled);
        let sum = sigmoid(-1.0) + sigmoid(2.0);
        near(
            &weights,
            &[2.5 * sigmoid(-1.0) / sum, 2.5 * sigmoid(2.0) / sum],
        );
    }

    #[test]
    fn a_group_is_chosen_by_its_two_best_and_hides_the_experts_of_the_others() {
        // The best expert of all is alone in its group of three.
        let logits = [3.0, -3.0, -3.0, 1.0, 1.0, -2.0];
        let route = |score| route_logits(logits, [0.0; 6], 2, score).0;
        assert_eq!(route(sigmoid_then_top_k(1, 1)), [0, 3]);
        assert_eq!(route(sigmoid_then_top_k(2, 2)), [0, 3]);
        assert_eq!(route(sigmoid_then_top_k(2, 1)), [3, 4]);
        // A masked group does not win over negative corrected scores, as filling zeros would let it.
        let low = [-2.0; 6];
        let (experts, _) = route_logits(logits, low, 3, sigmoid_then_top_k(2, 1));
        assert_eq!(experts, [3, 4, 5]);
        // Of equal groups the lower wins.
        let (experts, _) = route_logits([0.0; 6], [0.0; 6], 2, sigmoid_then_top_k(3, 1));
        assert_eq!(experts, [0, 1]);
    }

    #[test]
    fn group_limits_that_cannot_hold_name_their_values() {
        let message = |top_k, n_group, topk_group| {
            let weight = Tensor::<Flex, 2>::zeros([8, 1], &Default::default());
            TopKRouter::new(
                "gate",
                weight,
                top_k,
                sigmoid_then_top_k(n_group, topk_group),
            )
            .unwrap_err()
            .to_string()
        };
        assert_eq!(
            message(2, 3, 1),
            "gate: num_experts=8 is not divisible by n_group=3 (choose a divisor of 8 as n_group)"
        );
        for (top_k, topk_group, least) in [(2, 0, 1), (2, 5, 1), (5, 2, 3)] {
            assert_eq!(
                message(top_k, 4, topk_group),
                format!(
                    "gate: topk_group={topk_group} is not in {least}..=4 (n_group=4 groups of 2 experts, top_k={top_k})"
                )
            );
        }
        assert!(message(1, 0, 0).contains("n_group=0"));
    }

    #[test]
    fn logits_of_half_precision_are_computed_in_f32() {
        // 1 + 2^-9 rounds to 1 in bf16: a tie there, which the lower expert would win.
        let device = Default::default();
        let weight = Tensor::<Flex, 2>::from_floats([[1.0, 0.0], [1.0, 1.0]], &device);
        let x = Tensor::from_floats([[1.0, 2f32.powi(-9)]], &device).cast(DType::BF16);
        let score = RouterScore::TopKThenSoftmax;
        let routing = TopKRouter::new("gate", weight.cast(DType::BF16), 1, score)
            .unwrap()
            .forward(x);
        assert_eq!(routing.experts, [1]);
        assert_eq!(routing.weights.dtype(), DType::BF16);
    }
}
