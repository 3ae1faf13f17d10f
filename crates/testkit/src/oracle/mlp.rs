//! The gated MLP.

use super::linear::{sigmoid, silu, silu_slope};
use super::{Linear, Lora};
use crate::Matrix;

/// What the down projection reads of gate and up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Glu {
    /// `silu(gate) * up`.
    Silu,
    /// `g / (1 + e^(-alpha g)) * (u + 1)`, `g = min(gate, limit)`, `u = clamp(up, -limit, limit)`.
    Clamped {
        /// Slope.
        alpha: f64,
        /// Bound.
        limit: f64,
    },
}

impl Glu {
    fn value(self, gate: f64, up: f64) -> f64 {
        match self {
            Self::Silu => silu(gate) * up,
            Self::Clamped { alpha, limit } => {
                let gate = gate.min(limit);
                gate * sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1.0)
            }
        }
    }

    /// Derivatives by gate and by up.
    fn slopes(self, gate: f64, up: f64) -> [f64; 2] {
        match self {
            Self::Silu => [silu_slope(gate) * up, silu(gate)],
            Self::Clamped { alpha, limit } => {
                let inside = |inside: bool, slope| if inside { slope } else { 0.0 };
                let (g, u) = (gate.min(limit), up.clamp(-limit, limit));
                let s = sigmoid(alpha * g);
                [
                    inside(gate <= limit, s * (1.0 + alpha * g * (1.0 - s)) * (u + 1.0)),
                    inside(up.abs() <= limit, g * s),
                ]
            }
        }
    }
}

/// `down(glu(gate x, up x))`, gate above up in one weight.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// `[2F, H]`.
    pub gate_up: Linear,
    /// `[H, F]`.
    pub down: Linear,
    /// What stands between them.
    pub glu: Glu,
}

/// Gradients of an [`Mlp`].
#[derive(Clone, Debug)]
pub struct MlpGrads {
    /// Of the input.
    pub dx: Matrix,
    /// Of `A`, `B` and any magnitude of every adapter, those of gate and up first.
    pub factors: Vec<Vec<Matrix>>,
}

impl Mlp {
    /// `[T, H] -> [T, H]`.
    pub fn forward(&self, x: &Matrix) -> Matrix {
        self.down.forward(&self.hidden(x))
    }

    /// `[T, H] -> [T, F]`.
    pub fn hidden(&self, x: &Matrix) -> Matrix {
        let [gate, up] = self.halves(x);
        gate.zip(&up, |gate, up| self.glu.value(gate, up))
    }

    /// The gate and up projections of `[T, H]`, `[T, F]` each.
    pub fn halves(&self, x: &Matrix) -> [Matrix; 2] {
        let y = self.gate_up.forward(x);
        let half = y.columns / 2;
        [y.columns(0..half), y.columns(half..2 * half)]
    }

    /// Gradients at `x` for the cotangent `dy`.
    pub fn backward(&self, x: &Matrix, dy: &Matrix) -> MlpGrads {
        let [gate, up] = self.halves(x);
        let down = self.down.backward(&self.hidden(x), dy);
        let half = gate.columns;
        let d_gate_up = Matrix::build(x.rows, 2 * half, |i, j| match j.checked_sub(half) {
            None => down.dx.at(i, j) * self.glu.slopes(gate.at(i, j), up.at(i, j))[0],
            Some(j) => down.dx.at(i, j) * self.glu.slopes(gate.at(i, j), up.at(i, j))[1],
        });
        let mut grads = self.gate_up.backward(x, &d_gate_up);
        grads.factors.extend(down.factors);
        MlpGrads {
            dx: grads.dx,
            factors: grads.factors,
        }
    }

    /// Gradients of zero.
    pub fn no_grads(&self) -> Vec<Vec<Matrix>> {
        let zeros = |matrix: &Matrix| Matrix::zeros(matrix.rows, matrix.columns);
        let loras = self.gate_up.loras().iter().chain(self.down.loras());
        let factors = |lora: &Lora| {
            let factors = [&lora.a, &lora.b].into_iter().chain(&lora.magnitude);
            factors.map(zeros).collect()
        };
        loras.map(factors).collect()
    }
}

/// Adds the gradients of one batch to those of others.
pub(super) fn accumulate(sum: &mut [Vec<Matrix>], terms: &[Vec<Matrix>]) {
    for (sum, term) in sum.iter_mut().zip(terms) {
        for (sum, term) in sum.iter_mut().zip(term) {
            sum.add_to_rows(0, term);
        }
    }
}
