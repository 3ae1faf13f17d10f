//! The two low-rank factors of every expert of one linear map.

use crate::{HostTensor, InterchangeError};

/// The low-rank factors of one linear map, for every expert.
///
/// A factor that all experts share has a leading axis of 1. The weight of expert `e` is
/// `W[e] + s B[e] A[e]`, and with a magnitude each of its rows is scaled to that length: DoRA's
/// `m (W + s B A) / ||W + s B A||`.
#[derive(Debug, Clone, PartialEq)]
pub struct FactorPair {
    /// `A`, `[E, r, d_in]` or `[1, r, d_in]`.
    pub a: HostTensor,
    /// `B`, `[E, d_out, r]` or `[1, d_out, r]`.
    pub b: HostTensor,
    /// Numerator of the scale `s`.
    pub alpha: f64,
    /// DoRA's row lengths `m`, `[E, d_out]`.
    pub magnitude: Option<HostTensor>,
}

/// The axes of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Leading axis of `A`.
    pub(crate) a_experts: usize,
    /// Leading axis of `B`.
    pub(crate) b_experts: usize,
    pub(crate) rank: usize,
    pub(crate) d_in: usize,
    pub(crate) d_out: usize,
}

impl FactorPair {
    /// A pair of factors with the same rank and the same experts, unless one of the factors is
    /// shared.
    ///
    /// # Errors
    ///
    /// [`InterchangeError::Axes`] or [`InterchangeError::File`] when the shapes are not those.
    pub fn new(a: HostTensor, b: HostTensor, alpha: f64) -> Result<Self, InterchangeError> {
        let magnitude = None;
        let pair = Self {
            a,
            b,
            alpha,
            magnitude,
        };
        pair.sizes()?;
        Ok(pair)
    }

    /// The pair with DoRA's magnitude, `[E, d_out]`.
    ///
    /// # Errors
    ///
    /// When it has another shape.
    pub fn with_magnitude(mut self, magnitude: HostTensor) -> Result<Self, InterchangeError> {
        self.magnitude = Some(magnitude);
        self.sizes()?;
        Ok(self)
    }

    /// Rank `r`.
    pub fn rank(&self) -> usize {
        self.a.shape().get(1).copied().unwrap_or(0)
    }

    /// The factor on `B A`: `alpha / r`, or `alpha / sqrt(r)` when rank-stabilised.
    pub fn scale(&self, rslora: bool) -> f64 {
        let rank = self.rank() as f64;
        self.alpha / if rslora { rank.sqrt() } else { rank }
    }

    /// Whether `experts` experts share `A`, and whether they share `B`. A single one shares nothing.
    ///
    /// # Errors
    ///
    /// When the shapes are not those of a pair.
    pub fn shared(&self, experts: usize) -> Result<[bool; 2], InterchangeError> {
        let Sizes {
            a_experts,
            b_experts,
            ..
        } = self.sizes()?;
        Ok([a_experts, b_experts].map(|own| own == 1 && experts > 1))
    }

    /// The pair with a copy of each shared factor for every one of `experts` experts, which gives
    /// the same weights.
    ///
    /// # Errors
    ///
    /// When a leading axis is neither 1 nor `experts`.
    pub fn expand(&self, experts: usize) -> Result<Self, InterchangeError> {
        self.sizes()?;
        let expand = |name, tensor: &HostTensor| {
            let mut shape = tensor.shape().to_vec();
            let data = match shape[0] {
                leading if leading == experts => tensor.data().to_vec(),
                1 => tensor.data().repeat(experts),
                _ => return Err(axes(name, tensor, format!("1 or {experts} experts"))),
            };
            shape[0] = experts;
            Ok(HostTensor::new(shape, data)?)
        };
        Ok(Self {
            a: expand("lora_A", &self.a)?,
            b: expand("lora_B", &self.b)?,
            alpha: self.alpha,
            magnitude: self.magnitude.clone(),
        })
    }

    /// What the pair adds to `start`, which the base is without, as PiSSA trains it: `[A; A_0]` and
    /// `[B, -B_0]`, of twice the rank and on the whole weight, with alpha adjusted so that the scale
    /// stays. The magnitude is that of `self`.
    ///
    /// # Errors
    ///
    /// When `start` has other axes or another alpha.
    pub fn since(&self, start: &Self, rslora: bool) -> Result<Self, InterchangeError> {
        let sizes = self.sizes()?;
        if start.sizes()? != sizes || start.alpha != self.alpha {
            let Sizes {
                d_in, d_out, rank, ..
            } = sizes;
            let expected = format!(
                "the axes of the adapter, [.., {rank}, {d_in}] and [.., {d_out}, {rank}], and its alpha {}",
                self.alpha
            );
            return Err(axes("of the start", &start.b, expected));
        }
        let rank = 2 * sizes.rank;
        let a = (0..sizes.a_experts).flat_map(|e| [self.a.outer(e), start.a.outer(e)].concat());
        let mut b = Vec::with_capacity(sizes.b_experts * sizes.d_out * rank);
        for expert in 0..sizes.b_experts {
            let rows = self.b.outer(expert).chunks_exact(sizes.rank);
            for (row, first) in rows.zip(start.b.outer(expert).chunks_exact(sizes.rank)) {
                b.extend(row);
                b.extend(first.iter().map(|value| -value));
            }
        }
        Ok(Self {
            a: HostTensor::new([sizes.a_experts, rank, sizes.d_in], a.collect())?,
            b: HostTensor::new([sizes.b_experts, sizes.d_out, rank], b)?,
            alpha: self.alpha * if rslora { 2f64.sqrt() } else { 2.0 },
            magnitude: self.magnitude.clone(),
        })
    }

    /// Two pairs with the same `a`, one with the first half of the rows of every expert's `b`, one
    /// with the second.
    pub(crate) fn split_rows(&self) -> Result<(Self, Self), InterchangeError> {
        let sizes = self.sizes()?;
        if !sizes.d_out.is_multiple_of(2) {
            return Err(axes("lora_B", &self.b, "[E, 2F, r]"));
        }
        let rows = sizes.d_out / 2;
        let half = |part: usize| -> Result<Self, InterchangeError> {
            Ok(Self {
                a: self.a.clone(),
                b: half_of(&self.b, part, [sizes.b_experts, rows, sizes.rank].into())?,
                alpha: self.alpha,
                magnitude: self
                    .magnitude
                    .as_ref()
                    .map(|m| half_of(m, part, vec![m.shape()[0], rows]))
                    .transpose()?,
            })
        };
        Ok((half(0)?, half(1)?))
    }

    /// One pair over the rows of `gate` and then those of `up`, of their ranks together: `[A1; A2]`
    /// and `diag(B1, B2)`.
    ///
    /// `alpha` is that of the gate, adjusted to the rank so that its scale stays; the caller sees
    /// to it that both have the same scale.
    pub(crate) fn stack_rows(
        gate: &Self,
        up: &Self,
        rslora: bool,
    ) -> Result<Self, InterchangeError> {
        let (first, second) = (gate.sizes()?, up.sizes()?);
        let same = Sizes {
            rank: second.rank,
            ..first
        };
        if second != same || gate.magnitude.is_some() != up.magnitude.is_some() {
            let Sizes { d_in, d_out, .. } = first;
            let expected = format!("the axes of the gate, [.., r, {d_in}] and [.., {d_out}, r]");
            return Err(axes("of up", &up.b, expected));
        }
        let rank = first.rank + second.rank;
        let a = (0..first.a_experts).flat_map(|e| [gate.a.outer(e), up.a.outer(e)].concat());
        let mut b = Vec::with_capacity(first.b_experts * 2 * first.d_out * rank);
        for expert in 0..first.b_experts {
            for row in gate.b.outer(expert).chunks_exact(first.rank) {
                b.extend(row);
                b.extend(std::iter::repeat_n(0.0, second.rank));
            }
            for row in up.b.outer(expert).chunks_exact(second.rank) {
                b.extend(std::iter::repeat_n(0.0, first.rank));
                b.extend(row);
            }
        }
        let growth = rank as f64 / first.rank as f64;
        let pair = Self::new(
            HostTensor::new([first.a_experts, rank, first.d_in], a.collect())?,
            HostTensor::new([first.b_experts, 2 * first.d_out, rank], b)?,
            gate.alpha * if rslora { growth.sqrt() } else { growth },
        )?;
        match (&gate.magnitude, &up.magnitude) {
            (Some(of_gate), Some(of_up)) => {
                let experts = of_gate.shape()[0];
                let rows = (0..experts).flat_map(|e| [of_gate.outer(e), of_up.outer(e)].concat());
                let shape = [experts, 2 * first.d_out];
                pair.with_magnitude(HostTensor::new(shape, rows.collect())?)
            }
            _ => Ok(pair),
        }
    }

    /// The axes, if they belong together.
    pub(crate) fn sizes(&self) -> Result<Sizes, InterchangeError> {
        let (&[a_experts, rank, d_in], &[b_experts, d_out, columns]) =
            (self.a.shape(), self.b.shape())
        else {
            let (name, factor, expected) = match self.a.shape().len() {
                3 => ("lora_B", &self.b, "[E, d_out, r]"),
                _ => ("lora_A", &self.a, "[E, r, d_in]"),
            };
            return Err(axes(name, factor, expected));
        };
        if rank == 0 || a_experts == 0 || b_experts == 0 {
            return Err(axes("lora_A", &self.a, "at least one expert and one rank"));
        }
        if columns != rank || (b_experts != a_experts && a_experts != 1 && b_experts != 1) {
            let expected = format!("[{a_experts} or 1, {d_out}, {rank}]");
            return Err(axes("lora_B", &self.b, expected));
        }
        if let Some(magnitude) = &self.magnitude {
            let expected = [a_experts.max(b_experts), d_out];
            magnitude.expect_shape(|| "lora_magnitude_vector".to_owned(), &expected)?;
        }
        Ok(Sizes {
            a_experts,
            b_experts,
            rank,
            d_in,
            d_out,
        })
    }
}

/// Of every expert of `tensor` the first or the second half of its rows.
fn half_of(
    tensor: &HostTensor,
    part: usize,
    shape: Vec<usize>,
) -> Result<HostTensor, InterchangeError> {
    let rows = (0..shape[0]).flat_map(|expert| {
        let rows = tensor.outer(expert);
        &rows[part * rows.len() / 2..][..rows.len() / 2]
    });
    let rows = rows.copied().collect();
    Ok(HostTensor::new(shape, rows)?)
}

pub(crate) fn axes(
    name: &'static str,
    tensor: &HostTensor,
    expected: impl Into<String>,
) -> InterchangeError {
    InterchangeError::Axes {
        name,
        found: tensor.shape().to_vec(),
        expected: expected.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: impl Into<Vec<usize>>, first: usize) -> HostTensor {
        let shape = shape.into();
        let len = shape.iter().product::<usize>();
        HostTensor::new(shape, (first..first + len).map(|i| i as f32).collect()).unwrap()
    }

    /// `s B A` of every expert, row by row.
    fn deltas(pair: &FactorPair, rslora: bool) -> Vec<f64> {
        let sizes = pair.sizes().unwrap();
        let experts = sizes.a_experts.max(sizes.b_experts);
        let pair = pair.expand(experts).unwrap();
        let mut deltas = Vec::new();
        for e in 0..experts {
            let (a, b) = (pair.a.outer(e), pair.b.outer(e));
            for o in 0..sizes.d_out {
                for i in 0..sizes.d_in {
                    let sum: f64 = (0..sizes.rank)
                        .map(|k| {
                            f64::from(b[o * sizes.rank + k]) * f64::from(a[k * sizes.d_in + i])
                        })
                        .sum();
                    deltas.push(pair.scale(rslora) * sum);
                }
            }
        }
        deltas
    }

    #[test]
    fn what_was_added_since_the_start_is_a_pair_of_twice_the_rank_with_the_same_scale() {
        for (a_experts, b_experts) in [(2, 2), (1, 2), (2, 1)] {
            for rslora in [false, true] {
                let pair = |first| {
                    let a = tensor([a_experts, 2, 3], first);
                    let b = tensor([b_experts, 4, 2], first + 5);
                    FactorPair::new(a, b, 6.0).unwrap()
                };
                let (now, start) = (pair(7), pair(2));
                let since = now.since(&start, rslora).unwrap();
                assert_eq!(since.rank(), 4);
                let (found, now) = (deltas(&since, rslora), deltas(&now, rslora));
                for ((found, now), start) in found.iter().zip(&now).zip(deltas(&start, rslora)) {
                    assert!((found - (now - start)).abs() < 1e-9 * now.abs());
                    assert!((found - now).abs() > 1.0, "the start counts");
                }
            }
        }
    }

    #[test]
    fn a_start_of_other_axes_or_another_alpha_is_refused() {
        let pair = |rank, alpha| {
            FactorPair::new(tensor([2, rank, 3], 0), tensor([2, 4, rank], 0), alpha).unwrap()
        };
        for other in [pair(1, 6.0), pair(2, 5.0)] {
            let error = pair(2, 6.0).since(&other, false).unwrap_err().to_string();
            assert!(
                error.contains("[.., 2, 3] and [.., 4, 2], and its alpha 6"),
                "{error}"
            );
        }
    }

    #[test]
    fn factors_must_agree() {
        let message = |a, b| {
            let error = FactorPair::new(tensor(a, 0), tensor(b, 0), 1.0).unwrap_err();
            error.to_string()
        };
        assert_eq!(
            message([2, 3, 1], [2, 1, 2]),
            "factor lora_B has shape [2, 1, 2], expected [2 or 1, 1, 3] (give both factors the same experts and rank)"
        );
        assert!(message([8, 3, 1], [4, 1, 3]).contains("[4, 1, 3], expected [8 or 1, 1, 3]"));
        assert!(message([2, 0, 1], [2, 1, 0]).contains("at least one expert and one rank"));
        let error = FactorPair::new(tensor([2, 3], 0), tensor([2, 1, 3], 0), 1.0).unwrap_err();
        assert!(error.to_string().contains("expected [E, r, d_in]"));
        let pair = FactorPair::new(tensor([1, 3, 1], 0), tensor([4, 2, 3], 0), 1.0).unwrap();
        let error = pair.with_magnitude(tensor([1, 2], 0)).unwrap_err();
        assert!(error.to_string().contains("[1, 2], expected [4, 2]"));
    }

    #[test]
    fn odd_rows_do_not_split() {
        let pair = FactorPair::new(tensor([2, 2, 1], 0), tensor([2, 1, 2], 0), 1.0).unwrap();
        let error = pair.split_rows().unwrap_err();
        assert!(error.to_string().contains("expected [E, 2F, r]"), "{error}");
    }

    #[test]
    fn rank_stabilised_scale_divides_by_the_root() {
        let pair = FactorPair::new(tensor([1, 16, 1], 0), tensor([1, 1, 16], 0), 16.0).unwrap();
        assert_eq!((pair.scale(false), pair.scale(true)), (1.0, 4.0));
    }

    #[test]
    fn expanded_pair_has_the_same_deltas() {
        let pair = FactorPair::new(tensor([1, 2, 3], 1), tensor([4, 5, 2], 7), 3.0).unwrap();
        let expanded = pair.expand(4).unwrap();
        assert_eq!(expanded.a.shape(), [4, 2, 3]);
        assert_eq!(expanded.a.outer(3), pair.a.outer(0));
        assert_eq!(expanded.b, pair.b);
        let error = pair.expand(8).unwrap_err().to_string();
        assert!(error.contains("lora_B has shape [4, 5, 2]"), "{error}");
    }

    #[test]
    fn stacked_rows_have_the_deltas_of_both_pairs() {
        for (rslora, rank) in [(false, 2), (true, 2), (false, 3), (true, 3)] {
            // Of equal scales.
            let alpha = |rank: usize| {
                let growth = rank as f64 / 2.0;
                3.0 * if rslora { growth.sqrt() } else { growth }
            };
            let gate = FactorPair::new(tensor([2, 2, 3], 1), tensor([2, 4, 2], 7), 3.0).unwrap();
            let (a, b) = (tensor([2, rank, 3], 31), tensor([2, 4, rank], 60));
            let up = FactorPair::new(a, b, alpha(rank)).unwrap();
            let both = FactorPair::stack_rows(&gate, &up, rslora).unwrap();
            assert_eq!(both.rank(), 2 + rank);
            assert_eq!(both.alpha, alpha(2 + rank));

            let [gate, up] = [gate, up].map(|pair| deltas(&pair, rslora));
            let experts = gate.chunks(12).zip(up.chunks(12));
            let expected: Vec<f64> = experts.flat_map(|(g, u)| [g, u].concat()).collect();
            let difference = |found: &[f64]| {
                let pairs = found.iter().zip(&expected);
                pairs.fold(0f64, |most, (f, e)| most.max((f / e - 1.0).abs()))
            };
            assert!(difference(&deltas(&both, rslora)) < 1e-15);
            // Negative control: alpha kept, as if the scale did not depend on the rank.
            let mut kept = both.clone();
            kept.alpha = 3.0;
            assert!(difference(&deltas(&kept, rslora)) > 0.2);
        }
    }

    #[test]
    fn magnitudes_follow_their_rows() {
        let half = |first| {
            let pair = FactorPair::new(tensor([2, 1, 3], 1), tensor([2, 2, 1], 7), 3.0).unwrap();
            pair.with_magnitude(tensor([2, 2], first)).unwrap()
        };
        let both = FactorPair::stack_rows(&half(0), &half(10), false).unwrap();
        let magnitude = both.magnitude.as_ref().unwrap();
        assert_eq!(magnitude.data(), [0., 1., 10., 11., 2., 3., 12., 13.]);
        let (gate, up) = both.split_rows().unwrap();
        assert_eq!(gate.magnitude.unwrap().data(), [0., 1., 2., 3.]);
        assert_eq!(up.magnitude.unwrap().data(), [10., 11., 12., 13.]);
    }
}
