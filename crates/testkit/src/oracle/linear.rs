//! A linear with adapters.

use crate::Matrix;

/// An adapter: `scale * B A`, on some of the rows of a weight.
#[derive(Clone, Debug)]
pub struct Lora {
    /// `[r, d_in]`.
    pub a: Matrix,
    /// `[d_out, r]`.
    pub b: Matrix,
    /// `alpha / r`.
    pub scale: f64,
    /// Whether silu stands between `A` and `B`; such an adapter is not folded.
    pub silu: bool,
    /// The first row of the weight that it changes.
    pub first_row: usize,
    /// DoRA's lengths `[d_out, 1]` of the rows of `W + s B A`.
    pub magnitude: Option<Matrix>,
    /// PiSSA: the `A` and `B` it started from, whose product the base is without.
    pub start: Option<[Matrix; 2]>,
}

impl Lora {
    /// What it adds to its rows of the weight.
    fn product(&self) -> Matrix {
        let own = self.b.times(&self.a);
        let product = match &self.start {
            None => own,
            Some([a, b]) => own.zip(&b.times(a), |own, start| own - start),
        };
        product.scaled(self.scale)
    }
}

/// `y = x W'^T + b` with `W' = W + s B A`, its rows at the lengths `m` with DoRA.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Matrix,
    bias: Option<Matrix>,
    folded: Matrix,
    /// `[d_out, 1]`: the lengths of the rows of `W + s B A`, and what they are multiplied by.
    norms: Matrix,
    stretch: Matrix,
    loras: Vec<Lora>,
}

/// Gradients of a [`Linear`].
#[derive(Clone, Debug)]
pub struct LinearGrads {
    /// Of the input.
    pub dx: Matrix,
    /// Of `A`, `B` and any magnitude of every adapter.
    pub factors: Vec<Vec<Matrix>>,
}

impl Linear {
    /// A weight `[d_out, d_in]` with adapters.
    pub fn new(weight: Matrix, loras: Vec<Lora>) -> Self {
        let mut folded = weight.clone();
        for lora in loras.iter().filter(|lora| !lora.silu) {
            folded.add_to_rows(lora.first_row, &lora.product());
        }
        let norms = Matrix::build(folded.rows, 1, |i, _| {
            let row = folded.pick_rows([i]);
            row.dot(&row).sqrt()
        });
        let mut stretch = norms.map(|_| 1.0);
        for lora in &loras {
            if let Some(magnitude) = &lora.magnitude {
                for (row, length) in magnitude.values.iter().enumerate() {
                    let row = lora.first_row + row;
                    stretch.values[row] = length / norms.values[row];
                }
            }
        }
        let folded = folded.stretched(&stretch);
        Self {
            weight,
            bias: None,
            folded,
            norms,
            stretch,
            loras,
        }
    }

    /// The same with a bias `[1, d_out]`.
    pub fn with_bias(mut self, bias: Matrix) -> Self {
        self.bias = Some(bias);
        self
    }

    /// The same with its rows multiplied by what those of `other` are: what a token sees whose dropout
    /// is folded into the factors, while the lengths of the rows are those without dropout.
    pub fn stretched_as(mut self, other: &Self) -> Self {
        let own = self.stretch.map(f64::recip);
        self.folded = self.folded.stretched(&own).stretched(&other.stretch);
        self.norms = other.norms.clone();
        self.stretch = other.stretch.clone();
        self
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Matrix> {
        self.bias.as_ref()
    }

    /// The weight without its adapters.
    pub fn weight(&self) -> &Matrix {
        &self.weight
    }

    /// The weight with its adapters.
    pub fn folded(&self) -> &Matrix {
        &self.folded
    }

    /// The adapters.
    pub fn loras(&self) -> &[Lora] {
        &self.loras
    }

    /// `[T, d_in] -> [T, d_out]`.
    pub fn forward(&self, x: &Matrix) -> Matrix {
        let mut y = x.times(&self.folded.transposed());
        if let Some(bias) = &self.bias {
            y = Matrix::build(y.rows, y.columns, |i, j| y.at(i, j) + bias.at(0, j));
        }
        for lora in self.loras.iter().filter(|lora| lora.silu) {
            let z = x.times(&lora.a.transposed()).map(silu);
            let delta = z.times(&lora.b.transposed()).scaled(lora.scale);
            y = Matrix::build(y.rows, y.columns, |i, j| {
                let column = j.checked_sub(lora.first_row);
                let column = column.filter(|column| *column < delta.columns);
                y.at(i, j) + column.map_or(0.0, |column| delta.at(i, column))
            });
        }
        y
    }

    /// Gradients at `x` for the cotangent `dy`.
    pub fn backward(&self, x: &Matrix, dy: &Matrix) -> LinearGrads {
        // The gradient of the folded weight carries those of both factors.
        let dw = dy.transposed().times(x);
        let mut dx = dy.times(&self.folded);
        let mut factors = Vec::new();
        for lora in &self.loras {
            let rows = lora.first_row..lora.first_row + lora.b.rows;
            if lora.silu {
                let z = x.times(&lora.a.transposed());
                let dy = dy.columns(rows).scaled(lora.scale);
                let dz = dy.times(&lora.b).zip(&z, |g, z| g * silu_slope(z));
                dx = dx.plus(&dz.times(&lora.a));
                factors.push(vec![
                    dz.transposed().times(x),
                    dy.transposed().times(&z.map(silu)),
                ]);
            } else {
                // The lengths of the rows are constants, so their directions are not: no term of the
                // norms.
                let own = dw.stretched(&self.stretch).pick_rows(rows.clone());
                let own = own.scaled(lora.scale);
                let mut grads = vec![
                    lora.b.transposed().times(&own),
                    own.times(&lora.a.transposed()),
                ];
                grads.extend(lora.magnitude.as_ref().map(|magnitude| {
                    Matrix::build(magnitude.rows, 1, |row, _| {
                        let row = lora.first_row + row;
                        let own = dw.pick_rows([row]).dot(&self.folded.pick_rows([row]));
                        own / (self.stretch.at(row, 0) * self.norms.at(row, 0))
                    })
                }));
                factors.push(grads);
            }
        }
        LinearGrads { dx, factors }
    }
}

/// `x / (1 + e^-x)`.
pub(super) fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// The derivative of [`silu`].
pub(super) fn silu_slope(x: f64) -> f64 {
    let s = sigmoid(x);
    s * (1.0 + x * (1.0 - s))
}

pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{central_differences, noise, relative_error};

    #[test]
    fn gradients_are_those_of_central_differences() {
        for silu in [false, true] {
            let (x, dy) = (noise(1, 3, 4), noise(2, 3, 6));
            let linear = |a: &Matrix, b: &Matrix| {
                let lora = Lora {
                    a: a.clone(),
                    b: b.clone(),
                    scale: 1.5,
                    silu,
                    first_row: 2,
                    magnitude: None,
                    start: None,
                };
                Linear::new(noise(3, 6, 4), vec![lora]).with_bias(noise(6, 1, 6))
            };
            let (a, b) = (noise(4, 2, 4), noise(5, 3, 2));
            let grads = linear(&a, &b).backward(&x, &dy);
            let near = |found: &Matrix, expected: Matrix| {
                assert!(
                    relative_error(found, &expected) < 1e-8,
                    "{found:?} {expected:?}"
                );
            };
            let loss = |linear: Linear, x: &Matrix| linear.forward(x).dot(&dy);
            near(
                &grads.dx,
                central_differences(&x, |x| loss(linear(&a, &b), x)),
            );
            let [da, db] = &grads.factors[0][..] else {
                panic!("A and B")
            };
            near(da, central_differences(&a, |a| loss(linear(a, &b), &x)));
            near(db, central_differences(&b, |b| loss(linear(&a, b), &x)));
        }
    }

    #[test]
    fn dora_gradients_are_those_of_central_differences_with_the_norms_held() {
        let (x, dy) = (noise(1, 3, 4), noise(2, 3, 6));
        let (a, b) = (noise(4, 2, 4), noise(5, 3, 2));
        let m = noise(7, 3, 1).map(|m| m.abs() + 0.5);
        let linear = |a: &Matrix, b: &Matrix, m: &Matrix| {
            let lora = Lora {
                a: a.clone(),
                b: b.clone(),
                scale: 1.5,
                silu: false,
                first_row: 2,
                magnitude: Some(m.clone()),
                start: None,
            };
            Linear::new(noise(3, 6, 4), vec![lora]).with_bias(noise(6, 1, 6))
        };
        let at = linear(&a, &b, &m);
        let norm = |row: usize| {
            let row = at.folded().pick_rows([row]);
            row.dot(&row).sqrt()
        };
        for row in 0..3 {
            assert!(
                (norm(2 + row) - m.at(row, 0)).abs() < 1e-12,
                "a row of length m"
            );
        }
        // The same stretch of the rows for other factors: lengths that follow their norms.
        let held = |a: &Matrix, b: &Matrix| {
            let free = linear(a, b, &m);
            let lengths = Matrix::build(3, 1, |row, _| {
                at.stretch.at(2 + row, 0) * free.norms.at(2 + row, 0)
            });
            linear(a, b, &lengths).forward(&x).dot(&dy)
        };
        let grads = at.backward(&x, &dy);
        let near = |found: &Matrix, expected: Matrix| {
            assert!(
                relative_error(found, &expected) < 1e-8,
                "{found:?} {expected:?}"
            );
        };
        near(
            &grads.dx,
            central_differences(&x, |x| at.forward(x).dot(&dy)),
        );
        near(
            &grads.factors[0][0],
            central_differences(&a, |a| held(a, &b)),
        );
        near(
            &grads.factors[0][1],
            central_differences(&b, |b| held(&a, b)),
        );
        let loss = |m: &Matrix| linear(&a, &b, m).forward(&x).dot(&dy);
        near(&grads.factors[0][2], central_differences(&m, loss));
        // Negative control: through the norms the gradient of B is another.
        let through = central_differences(&b, |b| linear(&a, b, &m).forward(&x).dot(&dy));
        assert!(relative_error(&grads.factors[0][1], &through) > 0.1);
    }
}
