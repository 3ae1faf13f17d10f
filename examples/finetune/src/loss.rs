//! Next-byte cross-entropy.

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, activation};

use crate::precision::at_least_f32;

/// A loss as a sum and the number of positions it runs over.
///
/// Ranks that hold different rows of one batch add both over the ranks and divide once, so that all of them train on the
/// one global mean, whatever share of the rows each has.
#[derive(Clone, Debug)]
pub struct SummedLoss<B: Backend> {
    /// `[1]`: the sum of the negative log-likelihoods of this rank's positions, in nats.
    pub sum: Tensor<B, 1>,
    /// Number of those positions.
    pub count: usize,
}

impl<B: Backend> SummedLoss<B> {
    /// This rank's term of the mean over `total` positions, `sum / total`.
    ///
    /// The terms of all ranks add up to the global mean; with `total` equal to the own count it is the local mean.
    ///
    /// # Shapes
    /// `[1]`.
    pub fn over(self, total: usize) -> Tensor<B, 1> {
        self.sum.div_scalar(total.max(1) as f64)
    }
}

/// Sums `-log softmax(logits)[next id]` over every position that has a next byte.
///
/// # Shapes
/// `logits` is `[N, L, V]` and `ids` `[N, L]`; the count is `N * (L - 1)`. A length of 1 has nothing to predict and
/// gives a sum and a count of zero.
///
/// # Panics
/// If the first two axes differ.
pub fn next_byte_loss<B: Backend>(logits: Tensor<B, 3>, ids: Tensor<B, 2, Int>) -> SummedLoss<B> {
    let [batch, length, vocab] = logits.dims();
    assert!(
        ids.dims() == [batch, length],
        "logits are [{batch}, {length}, {vocab}] but ids are {:?} (give both the same batch)",
        ids.dims()
    );
    let predicted = length.saturating_sub(1);
    let count = batch * predicted;
    if count == 0 {
        // The product keeps the graph of the logits alive, as every rank has to walk the same one.
        let sum = at_least_f32(logits).sum().mul_scalar(0.0);
        return SummedLoss { sum, count };
    }
    let logits = at_least_f32(logits.narrow(1, 0, predicted)).reshape([count, vocab]);
    let next = ids.narrow(1, 1, predicted).reshape([count, 1]);
    let sum = activation::log_softmax(logits, 1)
        .gather(1, next)
        .sum()
        .neg();
    SummedLoss { sum, count }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};
    use burn::tensor::TensorData;

    fn value(loss: &SummedLoss<Flex>) -> f32 {
        loss.sum.clone().into_scalar()
    }

    fn logits(batch: usize, length: usize, vocab: usize) -> Tensor<Flex, 3> {
        let count = batch * length * vocab;
        let values: Vec<f32> = (0..count)
            .map(|i| ((i * 37 % 101) as f32 / 25.0) - 2.0)
            .collect();
        Tensor::from_data(
            TensorData::new(values, [batch, length, vocab]),
            &Default::default(),
        )
    }

    #[test]
    fn equal_logits_cost_the_log_of_the_vocabulary() {
        let device = Default::default();
        let ids = Tensor::<Flex, 2, Int>::from_ints([[0, 1, 2], [3, 4, 5]], &device);
        let loss = next_byte_loss(Tensor::zeros([2, 3, 8], &device), ids);
        assert_eq!(loss.count, 4);
        assert!((value(&loss) - 4.0 * 8f32.ln()).abs() < 1e-5);
    }

    #[test]
    fn labels_are_the_following_ids() {
        let device = Default::default();
        let ids = Tensor::<Flex, 2, Int>::from_ints([[0, 2, 1]], &device);
        let sure = Tensor::from_floats([[[0., 0., 90.], [0., 90., 0.], [90., 0., 0.]]], &device);
        assert!(value(&next_byte_loss(sure, ids)).abs() < 1e-6);
    }

    #[test]
    fn the_terms_of_the_rows_add_up_to_the_mean_of_the_batch() {
        let device = Default::default();
        let ids = Tensor::<Flex, 2, Int>::from_ints([[0, 1, 2], [3, 4, 5], [1, 1, 0]], &device);
        let all = logits(3, 3, 6);
        let whole = next_byte_loss(all.clone(), ids.clone());
        let total = whole.count;
        let parts: f32 = [(0, 1), (1, 2)]
            .into_iter()
            .map(|(start, rows)| {
                let part = next_byte_loss(
                    all.clone().narrow(0, start, rows),
                    ids.clone().narrow(0, start, rows),
                );
                part.over(total).into_scalar()
            })
            .sum();
        assert!((parts - whole.over(total).into_scalar()).abs() < 1e-6);
    }

    #[test]
    fn the_gradient_is_the_softmax_minus_the_label() {
        type A = Autodiff<Flex>;
        let device = Default::default();
        let ids = Tensor::<A, 2, Int>::from_ints([[0, 1]], &device);
        let logits = Tensor::<A, 3>::zeros([1, 2, 4], &device).require_grad();
        let grads = next_byte_loss(logits.clone(), ids).sum.backward();
        let grad = logits.grad(&grads).unwrap();
        let expected = [0.25, -0.75, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0];
        let grad = grad.into_data().to_vec::<f32>().unwrap();
        for (found, expected) in grad.into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-6);
        }
    }

    #[test]
    fn a_single_byte_has_nothing_to_predict() {
        let device = Default::default();
        let ids = Tensor::<Flex, 2, Int>::from_ints([[3]], &device);
        let loss = next_byte_loss(logits(1, 1, 6), ids);
        assert_eq!((value(&loss), loss.count), (0.0, 0));
    }
}
