//! The SwiGLU MLP.

use super::Linear;
use super::linear::{silu, silu_slope};
use crate::Matrix;

/// `down(silu(gate x) * up x)`, gate above up in one weight.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// `[2F, H]`.
    pub gate_up: Linear,
    /// `[H, F]`.
    pub down: Linear,
}

/// Gradients of an [`Mlp`].
#[derive(Clone, Debug)]
pub struct MlpGrads {
    /// Of the input.
    pub dx: Matrix,
    /// Of `A` and `B` of every adapter, those of gate and up first.
    pub factors: Vec<[Matrix; 2]>,
}

impl Mlp {
    /// `[T, H] -> [T, H]`.
    pub fn forward(&self, x: &Matrix) -> Matrix {
        self.down.forward(&self.hidden(x))
    }

    /// `[T, H] -> [T, F]`.
    pub fn hidden(&self, x: &Matrix) -> Matrix {
        let [gate, up] = self.halves(x);
        gate.zip(&up, |gate, up| silu(gate) * up)
    }

    fn halves(&self, x: &Matrix) -> [Matrix; 2] {
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
            None => down.dx.at(i, j) * up.at(i, j) * silu_slope(gate.at(i, j)),
            Some(j) => down.dx.at(i, j) * silu(gate.at(i, j)),
        });
        let mut grads = self.gate_up.backward(x, &d_gate_up);
        grads.factors.extend(down.factors);
        MlpGrads {
            dx: grads.dx,
            factors: grads.factors,
        }
    }

    /// Gradients of zero.
    pub fn no_grads(&self) -> Vec<[Matrix; 2]> {
        let zeros = |matrix: &Matrix| Matrix::zeros(matrix.rows, matrix.columns);
        let loras = self.gate_up.loras().iter().chain(self.down.loras());
        loras.map(|lora| [zeros(&lora.a), zeros(&lora.b)]).collect()
    }
}

/// Adds the gradients of one batch to those of others.
pub(super) fn accumulate(sum: &mut [[Matrix; 2]], terms: &[[Matrix; 2]]) {
    for (sum, term) in sum.iter_mut().zip(terms) {
        for (sum, term) in sum.iter_mut().zip(term) {
            sum.add_to_rows(0, term);
        }
    }
}
