//! f32 products with all of f32's bits.
//!
//! burn's own matmul takes f32 to tensor cores as TF32, with 10 bits, wherever the device has them:
//! losses of a small model are then off by some 1e-2 after a hundred steps.

use burn::tensor::ops::{FloatTensor, FloatTensorOps};
use burn::tensor::{DType, Shape, TensorMetadata};
use burn_cubecl::ops::numeric::empty_device_dtype;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use cubek::matmul::definition::{MatmulElems, MatmulGlobalElems};
use cubek::matmul::launch::{Strategy, launch_ref};
use cubek::std::InputBinding;

/// `lhs rhs` of matrices or of equally many in a batch.
pub(super) fn product<R, F, I, BT>(
    lhs: FloatTensor<CubeBackend<R, F, I, BT>>,
    rhs: FloatTensor<CubeBackend<R, F, I, BT>>,
) -> FloatTensor<CubeBackend<R, F, I, BT>>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    let mut shape = lhs.shape().to_vec();
    *shape.last_mut().expect("a matrix") = rhs.shape()[rhs.shape().num_dims() - 1];
    if lhs.dtype != DType::F32 || shape.contains(&0) {
        return CubeBackend::<R, F, I, BT>::float_matmul(lhs, rhs);
    }
    let out = empty_device_dtype(
        lhs.client.clone(),
        lhs.device.clone(),
        Shape::from(shape),
        DType::F32,
    );
    let element = DType::F32.into();
    let launch = |strategy: Strategy| {
        launch_ref(
            &strategy,
            &lhs.client,
            InputBinding::new(lhs.clone().binding(), element),
            InputBinding::new(rhs.clone().binding(), element),
            out.clone().binding(),
            &mut MatmulElems::from_globals(&MatmulGlobalElems {
                lhs: element,
                rhs: element,
                out: element,
            }),
        )
    };
    launch(Strategy::SimpleUnit(Default::default()))
        .or_else(|_| launch(Strategy::Naive))
        .expect("the plain kernel takes every shape");
    out
}
