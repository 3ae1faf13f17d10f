//! The MoE layer, one token after the other.

use super::linear::sigmoid;
use super::mlp::accumulate;
use super::{Mlp, MlpGrads};
use crate::Matrix;

/// How logits become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Score {
    /// Softmax over all experts, then the largest.
    Softmax,
    /// The same, divided by their sum.
    Renormalized,
    /// The largest logits, then softmax over them.
    TopKFirst,
    /// The sigmoid of each logit; experts of the best groups alone, a group's score being the sum
    /// of its two largest.
    Sigmoid {
        /// Number of equal groups.
        groups: usize,
        /// Number of those that count.
        best: usize,
        /// Divide the chosen scores by their sum.
        renormalize: bool,
        /// Multiplies the weights.
        scale: f64,
    },
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
    /// `[1, E]`, frozen: added to the logits.
    pub router_bias: Option<Matrix>,
    /// `[1, E]`, frozen: added to the scores for the choice alone.
    pub correction_bias: Option<Matrix>,
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
    pub experts: Vec<Vec<Vec<Matrix>>>,
    /// Of the factors of the shared experts.
    pub shared: Vec<Vec<Matrix>>,
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let terms: Vec<f64> = logits.iter().map(|l| (l - largest).exp()).collect();
    let sum: f64 = terms.iter().sum();
    terms.iter().map(|term| term / sum).collect()
}

impl Moe {
    /// A layer without router biases and shared experts.
    pub fn new(router: Matrix, score: Score, top_k: usize, experts: Vec<Mlp>) -> Self {
        Self {
            router,
            router_bias: None,
            correction_bias: None,
            score,
            top_k,
            experts,
            shared: None,
        }
    }

    fn logits(&self, x: &Matrix) -> Vec<f64> {
        let logits = x.times(&self.router.transposed());
        match &self.router_bias {
            None => logits.values,
            Some(bias) => logits.plus(bias).values,
        }
    }

    /// The chosen experts and their weights of one token `[1, H]`, the largest score first.
    pub fn route(&self, x: &Matrix) -> Vec<(usize, f64)> {
        let logits = self.logits(x);
        let scores: Vec<f64> = match self.score {
            Score::TopKFirst => logits,
            Score::Softmax | Score::Renormalized => softmax(&logits),
            Score::Sigmoid { .. } => logits.into_iter().map(sigmoid).collect(),
        };
        let corrected: Vec<f64> = match &self.correction_bias {
            None => scores.clone(),
            Some(bias) => scores
                .iter()
                .zip(&bias.values)
                .map(|(s, b)| s + b)
                .collect(),
        };
        let mut chosen: Vec<usize> = match self.score {
            Score::Sigmoid { groups, best, .. } => {
                let size = corrected.len() / groups;
                let two_best = |group: &usize| {
                    let mut scores = corrected[group * size..(group + 1) * size].to_vec();
                    scores.sort_by(|a, b| b.total_cmp(a));
                    scores[0] + scores[1]
                };
                let mut groups: Vec<usize> = (0..groups).collect();
                groups.sort_by(|a, b| two_best(b).total_cmp(&two_best(a)));
                groups.truncate(best);
                (0..corrected.len())
                    .filter(|e| groups.contains(&(e / size)))
                    .collect()
            }
            _ => (0..corrected.len()).collect(),
        };
        chosen.sort_by(|a, b| corrected[*b].total_cmp(&corrected[*a]));
        chosen.truncate(self.top_k);
        let own: Vec<f64> = chosen.iter().map(|e| scores[*e]).collect();
        let sum: f64 = own.iter().sum();
        let weights: Vec<f64> = match self.score {
            Score::TopKFirst => softmax(&own),
            Score::Softmax => own,
            Score::Renormalized => own.iter().map(|p| p / sum).collect(),
            Score::Sigmoid {
                renormalize, scale, ..
            } => {
                let by = if renormalize { sum + 1e-20 } else { 1.0 };
                own.iter().map(|s| s / by * scale).collect()
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
        let logits = self.logits(x);
        let p = softmax(&logits);
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
            Score::Sigmoid {
                renormalize, scale, ..
            } => {
                let sum: f64 = chosen.iter().map(|(e, _)| sigmoid(logits[*e])).sum();
                for ((expert, _), d) in chosen.iter().zip(d_weights) {
                    let s = sigmoid(logits[*expert]);
                    let d_score = match renormalize {
                        false => scale * d,
                        // `mean` holds `scale / sum` already.
                        true => (scale * d - mean) / sum,
                    };
                    d_logits.values[*expert] = d_score * s * (1.0 - s);
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
    use crate::oracle::{Glu, Linear};
    use crate::{central_differences, noise, relative_error};

    #[test]
    fn the_input_gradient_is_that_of_central_differences() {
        let mlp = |seed, glu| Mlp {
            gate_up: Linear::new(noise(seed, 6, 4), Vec::new()).with_bias(noise(seed + 2, 1, 6)),
            down: Linear::new(noise(seed + 1, 4, 3), Vec::new()).with_bias(noise(seed + 3, 1, 4)),
            glu,
        };
        let sigmoid = |best, renormalize| Score::Sigmoid {
            groups: 2,
            best,
            renormalize,
            scale: 2.5,
        };
        for score in [
            Score::Softmax,
            Score::Renormalized,
            Score::TopKFirst,
            sigmoid(2, false),
            sigmoid(1, true),
        ] {
            for glu in [
                Glu::Silu,
                Glu::Clamped {
                    alpha: 1.702,
                    limit: 0.7,
                },
            ] {
                let experts = [10, 20, 30, 50].map(|seed| mlp(seed, glu)).into();
                let moe = Moe {
                    router_bias: Some(noise(6, 1, 4)),
                    correction_bias: Some(noise(7, 1, 4)),
                    shared: Some(Shared {
                        mlp: mlp(40, glu),
                        gate: Some(noise(2, 1, 4)),
                    }),
                    ..Moe::new(noise(1, 4, 4), score, 2, experts)
                };
                let (x, dy) = (noise(3, 5, 4), noise(4, 5, 4));
                let expected = central_differences(&x, |x| moe.forward(x).dot(&dy));
                let error = relative_error(&moe.backward(&x, &dy).dx, &expected);
                assert!(error < 1e-8, "{score:?} {glu:?} {error}");
            }
        }
    }
}
