//! The two low-rank factors of every expert of one linear map, and how a stacked file packs them.

use crate::{HostTensor, InterchangeError};

/// The low-rank factors of one linear map, for every expert.
#[derive(Debug, Clone, PartialEq)]
pub struct FactorPair {
    /// `A`, `[E, r, d_in]`.
    pub a: HostTensor,
    /// `B`, `[E, d_out, r]`.
    pub b: HostTensor,
}

impl FactorPair {
    /// A pair whose factors have the same experts and rank.
    ///
    /// # Errors
    ///
    /// [`InterchangeError::Shape`] otherwise.
    pub fn new(a: HostTensor, b: HostTensor) -> Result<Self, InterchangeError> {
        let pair = Self { a, b };
        pair.sizes()?;
        Ok(pair)
    }

    /// Unpacks the factors that PEFT stacks over experts.
    ///
    /// # Shapes
    ///
    /// `a` is `[E*r, d_in]`, its row `e*r + k` is rank `k` of expert `e`. `b` is `[d_out, E*r]`,
    /// its column `k*E + e` is rank `k` of expert `e`.
    ///
    /// # Errors
    ///
    /// [`InterchangeError::Shape`] when the two do not have those shapes for `experts` experts.
    pub fn from_stacked(
        a: HostTensor,
        b: &HostTensor,
        experts: usize,
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
        )
    }

    /// Packs the factors as PEFT stacks them: `[E*r, d_in]` and `[d_out, E*r]`, the inverse of
    /// [`from_stacked`](Self::from_stacked).
    ///
    /// # Errors
    ///
    /// [`InterchangeError::Shape`] when the factors do not have the same experts and rank.
    pub fn to_stacked(&self) -> Result<(HostTensor, HostTensor), InterchangeError> {
        let [experts, rank, d_in, d_out] = self.sizes()?;
        let mut packed = Vec::with_capacity(self.b.len());
        for row in 0..d_out {
            for k in 0..rank {
                packed.extend((0..experts).map(|expert| self.b.outer(expert)[row * rank + k]));
            }
        }
        Ok((
            HostTensor::new([experts * rank, d_in], self.a.data().to_vec())?,
            HostTensor::new([d_out, experts * rank], packed)?,
        ))
    }

    /// Two pairs with the same `a`, one with the first half of the rows of every expert's `b`, one
    /// with the second.
    pub(crate) fn split_rows(&self) -> Result<(Self, Self), InterchangeError> {
        let [experts, rank, _, d_out] = self.sizes()?;
        if !d_out.is_multiple_of(2) {
            return Err(axes("lora_B", &self.b, "[E, 2F, r]"));
        }
        let half = d_out / 2;
        let rows = |start: usize| {
            let data = (0..experts).flat_map(|expert| {
                let b = self.b.outer(expert);
                b[start * rank..(start + half) * rank].iter().copied()
            });
            let b = HostTensor::new([experts, half, rank], data.collect())?;
            Self::new(self.a.clone(), b)
        };
        Ok((rows(0)?, rows(half)?))
    }

    /// `[E, r, d_in, d_out]`.
    fn sizes(&self) -> Result<[usize; 4], InterchangeError> {
        let &[experts, rank, d_in] = self.a.shape() else {
            return Err(axes("lora_A", &self.a, "[E, r, d_in]"));
        };
        let d_out = self.b.shape().get(1).copied().unwrap_or(0);
        self.b
            .expect_shape(|| "lora_B".to_owned(), &[experts, d_out, rank])?;
        Ok([experts, rank, d_in, d_out])
    }
}

fn axes(name: &'static str, tensor: &HostTensor, expected: impl Into<String>) -> InterchangeError {
    InterchangeError::Axes {
        name,
        found: tensor.shape().to_vec(),
        expected: expected.into(),
    }
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

        let unpacked = FactorPair::from_stacked(a.clone(), &b, 2).unwrap();
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
        let error = FactorPair::from_stacked(a, &b, 3).unwrap_err();
        assert_eq!(
            error.to_string(),
            "factor lora_A has shape [4, 1], expected [3*r, d_in] (give both factors the same experts and rank)"
        );
    }

    #[test]
    fn factors_must_agree() {
        let error = FactorPair::new(
            HostTensor::new([2, 3, 1], vec![0.0; 6]).unwrap(),
            HostTensor::new([2, 1, 2], vec![0.0; 4]).unwrap(),
        )
        .unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("tensor \"lora_B\" has shape [2, 1, 2], expected [2, 1, 3]"),
            "{error}"
        );
    }

    #[test]
    fn odd_rows_do_not_split() {
        let error = small().split_rows().unwrap_err();
        assert!(error.to_string().contains("expected [E, 2F, r]"), "{error}");
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
            prop_assert_eq!(FactorPair::from_stacked(a, &b, experts).unwrap(), pair);
        }
    }
}
