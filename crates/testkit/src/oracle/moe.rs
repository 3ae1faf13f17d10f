//! The MoE layer, one token after the other.

use super::linear::sigmoid;
use super::mlp::accumulate;
use super::{Mlp, MlpGrads};
use crate::Matrix;

/// How logits become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Score {
    /// Softmax over all experts, then the largest.
    Softmax,
    /// The same, divided by their sum.
    Renormalized,
    /// The largest logits, then softmax over them.
    TopKFirst,
}

/// Experts that every token passes.
#[derive(Clone, Debug)]
pub struct Shared {
    /// The MLP.
    pub mlp: Mlp,
    /// `[1, H]`, weighs its output by `sigmoid(x g^T)`.
    pub gate: Option<Matrix>,
}

/// A layer of experts.
#[derive(Clone, Debug)]
pub struct Moe {
    /// `[E, H]`, frozen.
    pub router: Matrix,
    /// How logits become weights.
    pub score: Score,
    /// `K`.
    pub top_k: usize,
    /// The experts.
    pub experts: Vec<Mlp>,
    /// Experts that every token passes.
    pub shared: Option<Shared>,
}

/// Gradients of a [`Moe`].
#[derive(Clone, Debug)]
pub struct MoeGrads {
    /// Of the input, through experts, router and gate.
    pub dx: Matrix,
    /// Of the factors, by expert and adapter.
    pub experts: Vec<Vec<[Matrix; 2]>>,
    /// Of the factors of the shared experts.
    pub shared: Vec<[Matrix; 2]>,
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let terms: Vec<f64> = logits.iter().map(|l| (l - largest).exp()).collect();
    let sum: f64 = terms.iter().sum();
    terms.iter().map(|term| term / sum).collect()
}

impl Moe {
    /// The chosen experts and their weights of one token `[1, H]`, the largest first.
    pub fn route(&self, x: &Matrix) -> Vec<(usize, f64)> {
        let logits = x.times(&self.router.transposed()).values;
        let mut chosen: Vec<usize> = (0..logits.len()).collect();
        chosen.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        chosen.truncate(self.top_k);
        let weights = match self.score {
            Score::TopKFirst => {
                let logits: Vec<f64> = chosen.iter().map(|e| logits[*e]).collect();
                softmax(&logits)
            }
            Score::Softmax | Score::Renormalized => {
                let p = softmax(&logits);
                let p: Vec<f64> = chosen.iter().map(|e| p[*e]).collect();
                let sum = if self.score == Score::Softmax {
                    1.0
                } else {
                    p.iter().sum()
                };
                p.iter().map(|p| p / sum).collect()
            }
        };
        chosen.into_iter().zip(weights).collect()
    }

    /// `[T, H] -> [T, H]`.
    pub fn forward(&self, x: &Matrix) -> Matrix {
        let mut y = Matrix::zeros(x.rows, x.columns);
        for token in 0..x.rows {
            let x = x.pick_rows([token]);
            for (expert, weight) in self.route(&x) {
                y.add_to_rows(token, &self.experts[expert].forward(&x).scaled(weight));
            }
            if let Some(shared) = &self.shared {
                y.add_to_rows(token, &shared.mlp.forward(&x).scaled(shared.weight(&x)));
            }
        }
        y
    }

    /// Gradients at `x` for the cotangent `dy`.
    pub fn backward(&self, x: &Matrix, dy: &Matrix) -> MoeGrads {
        let mut grads = MoeGrads {
            dx: Matrix::zeros(x.rows, x.columns),
            experts: self.experts.iter().map(Mlp::no_grads).collect(),
            shared: self
                .shared
                .as_ref()
                .map_or(Vec::new(), |s| s.mlp.no_grads()),
        };
        for token in 0..x.rows {
            let (x, dy) = (x.pick_rows([token]), dy.pick_rows([token]));
            let chosen = self.route(&x);
            let mut d_weights = Vec::new();
            for (expert, weight) in &chosen {
                let mlp = &self.experts[*expert];
                d_weights.push(mlp.forward(&x).dot(&dy));
                let MlpGrads { dx, factors } = mlp.backward(&x, &dy.scaled(*weight));
                grads.dx.add_to_rows(token, &dx);
                accumulate(&mut grads.experts[*expert], &factors);
            }
            let d_logits = self.d_logits(&x, &chosen, &d_weights);
            grads.dx.add_to_rows(token, &d_logits.times(&self.router));
            if let Some(shared) = &self.shared {
                let weight = shared.weight(&x);
                let MlpGrads { dx, factors } = shared.mlp.backward(&x, &dy.scaled(weight));
                grads.dx.add_to_rows(token, &dx);
                accumulate(&mut grads.shared, &factors);
                if let Some(gate) = &shared.gate {
                    let slope = weight * (1.0 - weight) * shared.mlp.forward(&x).dot(&dy);
                    grads.dx.add_to_rows(token, &gate.scaled(slope));
                }
            }
        }
        grads
    }

    /// `[1, E]`.
    fn d_logits(&self, x: &Matrix, chosen: &[(usize, f64)], d_weights: &[f64]) -> Matrix {
        let p = softmax(&x.times(&self.router.transposed()).values);
        let mean: f64 = chosen.iter().zip(d_weights).map(|((_, w), d)| w * d).sum();
        let mut d_logits = Matrix::zeros(1, p.len());
        match self.score {
            // Both are a softmax over the chosen logits.
            Score::TopKFirst | Score::Renormalized => {
                for ((expert, weight), d) in chosen.iter().zip(d_weights) {
                    d_logits.values[*expert] = weight * (d - mean);
                }
            }
            Score::Softmax => {
                for (expert, p) in p.iter().enumerate() {
                    d_logits.values[expert] = -p * mean;
                }
                for ((expert, weight), d) in chosen.iter().zip(d_weights) {
                    d_logits.values[*expert] += weight * d;
                }
            }
        }
        d_logits
    }
}

impl Shared {
    fn weight(&self, x: &Matrix) -> f64 {
        let score = |gate: &Matrix| sigmoid(x.times(&gate.transposed()).at(0, 0));
        self.gate.as_ref().map_or(1.0, score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::oracle::Linear;
    use crate::{central_differences, noise, relative_error};

    #[test]
    fn the_input_gradient_is_that_of_central_differences() {
        let mlp = |seed| Mlp {
            gate_up: Linear::new(noise(seed, 6, 4), Vec::new()),
            down: Linear::new(noise(seed + 1, 4, 3), Vec::new()),
        };
        for score in [Score::Softmax, Score::Renormalized, Score::TopKFirst] {
            let moe = Moe {
                router: noise(1, 3, 4),
                score,
                top_k: 2,
                experts: vec![mlp(10), mlp(20), mlp(30)],
                shared: Some(Shared {
                    mlp: mlp(40),
                    gate: Some(noise(2, 1, 4)),
                }),
            };
            let (x, dy) = (noise(3, 5, 4), noise(4, 5, 4));
            let expected = central_differences(&x, |x| moe.forward(x).dot(&dy));
            let error = relative_error(&moe.backward(&x, &dy).dx, &expected);
            assert!(error < 1e-8, "{score:?} {error}");
        }
    }
}
