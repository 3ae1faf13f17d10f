//! Matrices on the host.

use std::ops::Range;

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

/// A matrix of `f64` in row-major order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Matrix {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub columns: usize,
    /// `rows * columns` values.
    pub values: Vec<f64>,
}

impl Matrix {
    /// Element by element.
    pub fn build(rows: usize, columns: usize, mut at: impl FnMut(usize, usize) -> f64) -> Self {
        let mut values = Vec::with_capacity(rows * columns);
        for i in 0..rows {
            values.extend((0..columns).map(|j| at(i, j)));
        }
        Self {
            rows,
            columns,
            values,
        }
    }

    /// Zeros.
    pub fn zeros(rows: usize, columns: usize) -> Self {
        Self::build(rows, columns, |_, _| 0.0)
    }

    /// One element.
    pub fn at(&self, row: usize, column: usize) -> f64 {
        assert!(column < self.columns);
        self.values[row * self.columns + column]
    }

    /// `self other`.
    pub fn times(&self, other: &Self) -> Self {
        assert_eq!(self.columns, other.rows);
        Self::build(self.rows, other.columns, |i, j| {
            (0..self.columns)
                .map(|k| self.at(i, k) * other.at(k, j))
                .sum()
        })
    }

    /// The transpose.
    pub fn transposed(&self) -> Self {
        Self::build(self.columns, self.rows, |i, j| self.at(j, i))
    }

    /// Element by element with another one of the same shape.
    pub fn zip(&self, other: &Self, f: impl Fn(f64, f64) -> f64) -> Self {
        assert_eq!((self.rows, self.columns), (other.rows, other.columns));
        Self::build(self.rows, self.columns, |i, j| {
            f(self.at(i, j), other.at(i, j))
        })
    }

    /// Element by element.
    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self::build(self.rows, self.columns, |i, j| f(self.at(i, j)))
    }

    /// `self + other`.
    pub fn plus(&self, other: &Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    /// `factor * self`.
    pub fn scaled(&self, factor: f64) -> Self {
        self.map(|value| factor * value)
    }

    /// Each row times its value in `[rows, 1]`.
    pub fn stretched(&self, by: &Self) -> Self {
        Self::build(self.rows, self.columns, |i, j| self.at(i, j) * by.at(i, 0))
    }

    /// Sum of the elementwise product.
    pub fn dot(&self, other: &Self) -> f64 {
        self.zip(other, |a, b| a * b).values.iter().sum()
    }

    /// Rows of the given numbers, in the given order.
    pub fn pick_rows(&self, rows: impl IntoIterator<Item = usize>) -> Self {
        let rows: Vec<usize> = rows.into_iter().collect();
        Self::build(rows.len(), self.columns, |i, j| self.at(rows[i], j))
    }

    /// A range of columns.
    pub fn columns(&self, range: Range<usize>) -> Self {
        Self::build(self.rows, range.len(), |i, j| self.at(i, range.start + j))
    }

    /// Adds `part` to the rows from `first` on.
    pub fn add_to_rows(&mut self, first: usize, part: &Self) {
        assert_eq!(self.columns, part.columns);
        let start = first * self.columns;
        for (sum, value) in self.values[start..].iter_mut().zip(&part.values) {
            *sum += value;
        }
    }

    /// One below the other.
    pub fn stack(parts: &[Self]) -> Self {
        let columns = parts[0].columns;
        assert!(parts.iter().all(|part| part.columns == columns));
        Self {
            rows: parts.iter().map(|part| part.rows).sum(),
            columns,
            values: parts.iter().flat_map(|p| p.values.clone()).collect(),
        }
    }

    /// The largest magnitude; 0 for no elements, NaN if there is one.
    pub fn magnitude(&self) -> f64 {
        // `f64::max` would drop a NaN.
        let larger = |a: f64, b: &f64| {
            if a.is_nan() || b.is_nan() {
                f64::NAN
            } else {
                a.max(b.abs())
            }
        };
        self.values.iter().fold(0.0, larger)
    }

    /// The values in f32, in which weights are loaded.
    ///
    /// # Panics
    ///
    /// When a value has no equal in f32: the oracle would then see another weight.
    pub fn to_f32(&self) -> Vec<f32> {
        let exact = |value: &f64| {
            let single = *value as f32;
            assert_eq!(f64::from(single), *value, "not representable in f32");
            single
        };
        self.values.iter().map(exact).collect()
    }

    /// As a tensor of `dtype` on the default device.
    pub fn tensor<B: Backend>(&self, dtype: DType) -> Tensor<B, 2> {
        self.tensor_on(&Default::default(), dtype)
    }

    /// As a tensor of `dtype`.
    pub fn tensor_on<B: Backend>(&self, device: &B::Device, dtype: DType) -> Tensor<B, 2> {
        let shape = [self.rows, self.columns];
        if shape.contains(&0) {
            // CubeCL cannot copy nothing to a GPU.
            return Tensor::empty(shape, (device, dtype));
        }
        Tensor::from_data(TensorData::new(self.values.clone(), shape), (device, dtype))
    }

    /// From a tensor of any float dtype.
    pub fn read<B: Backend>(tensor: Tensor<B, 2>) -> Self {
        let [rows, columns] = tensor.dims();
        let values = match rows * columns {
            // Nor nothing from it.
            0 => Vec::new(),
            _ => tensor.into_data().iter::<f64>().collect(),
        };
        Self {
            rows,
            columns,
            values,
        }
    }
}

/// A stream of values that are the same on every machine.
#[derive(Clone, Debug)]
pub struct Noise(u64);

impl Noise {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x2545_F491_4F6C_DD1D)
    }

    /// 32 random bits: an LCG with the constants of Knuth's MMIX, upper half.
    pub fn bits(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 32
    }

    /// A multiple of 1/64 in `[-1, 1]`, not 0: exact in f32 and bf16, and no term of a sum is lost.
    pub fn value(&mut self) -> f64 {
        let step = (self.bits() % 64 + 1) as f64 / 64.0;
        if self.bits().is_multiple_of(2) {
            step
        } else {
            -step
        }
    }

    /// Lengths of rows `[n, 1]`, multiples of 1/64 in `(1/2, 3/2]`.
    pub fn lengths(&mut self, n: usize) -> Matrix {
        self.matrix(n, 1).map(|value| value.abs() + 0.5)
    }

    /// A matrix of [`value`](Self::value)s.
    pub fn matrix(&mut self, rows: usize, columns: usize) -> Matrix {
        Matrix::build(rows, columns, |_, _| self.value())
    }
}

/// A matrix of deterministic noise, multiples of 1/64 in `[-1, 1]`.
pub fn noise(seed: u64, rows: usize, columns: usize) -> Matrix {
    Noise::new(seed).matrix(rows, columns)
}

/// The gradient of a scalar function by central differences, error of the order of `1e-9` for
/// smooth functions of moderate values.
pub fn central_differences(at: &Matrix, f: impl Fn(&Matrix) -> f64) -> Matrix {
    const STEP: f64 = 1e-5;
    Matrix::build(at.rows, at.columns, |i, j| {
        let shifted = |step: f64| {
            let mut x = at.clone();
            x.values[i * at.columns + j] += step;
            f(&x)
        };
        (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP)
    })
}
