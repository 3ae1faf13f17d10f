//! Two axes for the factors of all experts, as PEFT's `target_parameters` stacks them.

use super::factor_pair::{FactorPair, axes};
use crate::{HostTensor, InterchangeError};

impl FactorPair {
    /// Unpacks the factors that PEFT stacks over experts.
    ///
    /// # Shapes
    ///
    /// `a` is `[E*r, d_in]`, its row `e*r + k` is rank `k` of expert `e`. `b` is `[d_out, E*r]`,
    /// its column `k*E + e` is rank `k` of expert `e`.
    ///
    /// # Errors
    ///
    /// When the two do not have those shapes for `experts` experts.
    pub fn from_stacked(
        a: HostTensor,
        b: &HostTensor,
        experts: usize,
        alpha: f64,
    ) -> Result<Self, InterchangeError> {
        let &[rows, d_in] = a.shape() else {
            return Err(axes("lora_A", &a, "[E*r, d_in]"));
        };
        if experts == 0 || !rows.is_multiple_of(experts) {
            return Err(axes("lora_A", &a, format!("[{experts}*r, d_in]")));
        }
        let d_out = b.shape().first().copied().unwrap_or(0);
        b.expect_shape(|| "lora_B".to_owned(), &[d_out, rows])?;

        let rank = rows / experts;
        let mut unpacked = Vec::with_capacity(b.len());
        for expert in 0..experts {
            for row in 0..d_out {
                let row = b.outer(row);
                unpacked.extend((0..rank).map(|k| row[k * experts + expert]));
            }
        }
        Self::new(
            HostTensor::new([experts, rank, d_in], a.into_data())?,
            HostTensor::new([experts, d_out, rank], unpacked)?,
            alpha,
        )
    }

    /// Packs the factors as PEFT stacks them: `[E*r, d_in]` and `[d_out, E*r]`, the inverse of
    /// [`from_stacked`](Self::from_stacked).
    ///
    /// # Errors
    ///
    /// When the factors do not have the same experts and rank.
    pub fn to_stacked(&self) -> Result<(HostTensor, HostTensor), InterchangeError> {
        let sizes = self.sizes()?;
        let (experts, rank) = (sizes.a_experts, sizes.rank);
        let expected = [experts, sizes.d_out, rank];
        self.b.expect_shape(|| "lora_B".to_owned(), &expected)?;
        let mut packed = Vec::with_capacity(self.b.len());
        for row in 0..sizes.d_out {
            for k in 0..rank {
                packed.extend((0..experts).map(|expert| self.b.outer(expert)[row * rank + k]));
            }
        }
        Ok((
            HostTensor::new([experts * rank, sizes.d_in], self.a.data().to_vec())?,
            HostTensor::new([sizes.d_out, experts * rank], packed)?,
        ))
    }

    /// The pair whose deltas are those of this one, transposed: `A` becomes `B^T` and `B` becomes
    /// `A^T`.
    pub(crate) fn transposed(&self) -> Result<Self, InterchangeError> {
        Self::new(transpose(&self.b)?, transpose(&self.a)?, self.alpha)
    }

    /// Rows that alternate between gate and up, in the order of all of the gate's before all of
    /// up's.
    pub(crate) fn deinterleaved(mut self) -> Result<Self, InterchangeError> {
        let rows = self.even_rows()?;
        self.b = permute_rows(&self.b, |row| match row < rows / 2 {
            true => 2 * row,
            false => 2 * (row - rows / 2) + 1,
        })?;
        Ok(self)
    }

    /// The inverse of [`deinterleaved`](Self::deinterleaved).
    pub(crate) fn interleaved(mut self) -> Result<Self, InterchangeError> {
        let rows = self.even_rows()?;
        self.b = permute_rows(&self.b, |row| row / 2 + row % 2 * rows / 2)?;
        Ok(self)
    }

    fn even_rows(&self) -> Result<usize, InterchangeError> {
        let rows = self.sizes()?.d_out;
        match rows.is_multiple_of(2) {
            true => Ok(rows),
            false => Err(axes("lora_B", &self.b, "[E, 2F, r]")),
        }
    }
}

/// `[E, rows, columns]` to `[E, columns, rows]`.
fn transpose(tensor: &HostTensor) -> Result<HostTensor, InterchangeError> {
    let &[experts, rows, columns] = tensor.shape() else {
        return Err(axes("lora_A", tensor, "three axes"));
    };
    let mut data = Vec::with_capacity(tensor.len());
    for matrix in (0..experts).map(|expert| tensor.outer(expert)) {
        for column in 0..columns {
            data.extend((0..rows).map(|row| matrix[row * columns + column]));
        }
    }
    Ok(HostTensor::new([experts, columns, rows], data)?)
}

/// Row `i` of every expert is what was row `from(i)`.
fn permute_rows(
    tensor: &HostTensor,
    from: impl Fn(usize) -> usize,
) -> Result<HostTensor, InterchangeError> {
    let &[experts, rows, columns] = tensor.shape() else {
        return Err(axes("lora_B", tensor, "three axes"));
    };
    let mut data = Vec::with_capacity(tensor.len());
    for matrix in (0..experts).map(|expert| tensor.outer(expert)) {
        for row in 0..rows {
            data.extend(&matrix[from(row) * columns..][..columns]);
        }
    }
    Ok(HostTensor::new(tensor.shape(), data)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Two experts of rank 2 on 1x1 weights.
    fn small() -> FactorPair {
        FactorPair::new(
            HostTensor::new([2, 2, 1], vec![1.0, 2.0, 3.0, 4.0]).unwrap(),
            HostTensor::new([2, 1, 2], vec![5.0, 6.0, 7.0, 8.0]).unwrap(),
            1.0,
        )
        .unwrap()
    }

    fn deltas(a: &[f32], b: &[f32]) -> [f32; 2] {
        [0, 1].map(|e| (0..2).map(|k| b[2 * e + k] * a[2 * e + k]).sum())
    }

    #[test]
    fn a_is_packed_expert_slow_and_b_expert_fast() {
        let pair = small();
        let (a, b) = pair.to_stacked().unwrap();
        assert_eq!(
            (a.shape(), a.data()),
            (&[4, 1][..], &[1.0, 2.0, 3.0, 4.0][..])
        );
        assert_eq!(
            (b.shape(), b.data()),
            (&[1, 4][..], &[5.0, 7.0, 6.0, 8.0][..])
        );

        let unpacked = FactorPair::from_stacked(a.clone(), &b, 2, 1.0).unwrap();
        assert_eq!(unpacked, pair);
        assert_eq!(deltas(unpacked.a.data(), unpacked.b.data()), [17.0, 53.0]);
        // Negative control: the packed B read as if it were laid out like A has the right shape and
        // is wrong.
        assert_eq!(deltas(a.data(), b.data()), [19.0, 50.0]);
    }

    #[test]
    fn rows_must_divide_among_experts() {
        let a = HostTensor::new([4, 1], vec![0.0; 4]).unwrap();
        let b = HostTensor::new([1, 4], vec![0.0; 4]).unwrap();
        let error = FactorPair::from_stacked(a, &b, 3, 1.0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "factor lora_A has shape [4, 1], expected [3*r, d_in] (give both factors the same experts and rank)"
        );
    }

    #[test]
    fn interleaved_rows_alternate_between_gate_and_up() {
        let pair = FactorPair::new(
            HostTensor::new([1, 1, 1], vec![1.0]).unwrap(),
            HostTensor::new([1, 6, 1], vec![0.0, 1.0, 2.0, 10.0, 11.0, 12.0]).unwrap(),
            1.0,
        )
        .unwrap();
        let mixed = pair.clone().interleaved().unwrap();
        assert_eq!(mixed.b.data(), [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        assert_eq!(mixed.deinterleaved().unwrap(), pair);
    }

    proptest! {
        #[test]
        fn packing_is_a_bijection(
            experts in 1usize..6,
            rank in 1usize..5,
            d_in in 1usize..5,
            d_out in 1usize..5,
        ) {
            // Distinct values, so that any misplaced element shows.
            let count = |from: usize, n: usize| (from..from + n).map(|i| i as f32).collect::<Vec<_>>();
            let (len_a, len_b) = (experts * rank * d_in, experts * d_out * rank);
            let pair = FactorPair::new(
                HostTensor::new([experts, rank, d_in], count(0, len_a)).unwrap(),
                HostTensor::new([experts, d_out, rank], count(len_a, len_b)).unwrap(),
                1.0,
            ).unwrap();
            let (a, b) = pair.to_stacked().unwrap();
            for e in 0..experts {
                for k in 0..rank {
                    prop_assert_eq!(a.outer(e * rank + k), &pair.a.outer(e)[k * d_in..][..d_in]);
                    for o in 0..d_out {
                        prop_assert_eq!(b.outer(o)[k * experts + e], pair.b.outer(e)[o * rank + k]);
                    }
                }
            }
            prop_assert_eq!(&FactorPair::from_stacked(a, &b, experts, 1.0).unwrap(), &pair);

            let other = pair.transposed().unwrap();
            for e in 0..experts {
                for k in 0..rank {
                    for o in 0..d_out {
                        prop_assert_eq!(other.a.outer(e)[k * d_out + o], pair.b.outer(e)[o * rank + k]);
                    }
                    for i in 0..d_in {
                        prop_assert_eq!(other.b.outer(e)[i * rank + k], pair.a.outer(e)[k * d_in + i]);
                    }
                }
            }
            prop_assert_eq!(other.transposed().unwrap(), pair);
        }
    }
}
