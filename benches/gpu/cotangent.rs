//! Starts a backward pass from a given cotangent.
//!
//! burn starts from ones of the root's shape: for `[T, d_out]` that is a fill that no layer of a
//! model has, and `(y * dy).sum()` adds two passes and a reduction. Here the root is a scalar that
//! launches nothing forward and whose step hands `dy` on, as the layer above would: what is left
//! of burn's start is one fill of a single element a backward pass.

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};

#[derive(Debug)]
struct HandOn;

impl<B: Backend> Backward<B, 1> for HandOn {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        grads.consume::<B>(&ops.node);
        let [parent] = ops.parents;
        if let Some(y) = parent {
            grads.register::<B>(y.id, ops.state);
        }
    }
}

/// A scalar whose backward pass gives `y` the cotangent `dy`. Its value is `scalar`, whatever that is.
pub fn from_cotangent<B: Backend, const D: usize>(
    y: Tensor<Autodiff<B>, D>,
    dy: Tensor<B, D>,
    scalar: Tensor<B, 1>,
) -> Tensor<Autodiff<B>, 1> {
    assert_eq!(
        y.dims(),
        dy.dims(),
        "the cotangent has the shape of its value"
    );
    let y = y.into_primitive().tensor();
    let prepared = HandOn
        .prepare::<NoCheckpointing>([y.node.clone()])
        .compute_bound()
        .stateful();
    let scalar = scalar.into_primitive().tensor();
    let root = match prepared {
        OpsKind::Tracked(prep) => prep.finish(dy.into_primitive().tensor(), scalar),
        OpsKind::UnTracked(prep) => prep.finish(scalar),
    };
    Tensor::from_primitive(TensorPrimitive::Float(root))
}
