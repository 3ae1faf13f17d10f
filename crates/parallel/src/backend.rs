//! The backends without autodiff that communicate, one impl a backend.

use burn::tensor::ops::FloatTensor;

#[cfg(feature = "cubecl")]
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
#[cfg(feature = "cubecl")]
use burn_fusion::{Fusion, FusionBackend};
#[cfg(feature = "ndarray")]
use burn_ndarray::{
    FloatNdArrayElement, IntNdArrayElement, NdArray, NdArrayTensor, QuantElement, SharedArray,
};

use crate::ParallelBackend;
use crate::region::Step;

#[cfg(feature = "flex")]
impl ParallelBackend for burn::backend::Flex {
    type Base = Self;

    fn step(x: FloatTensor<Self>, forward: &Step<Self>, _: &Step<Self>) -> FloatTensor<Self> {
        forward.run(x)
    }
}

#[cfg(feature = "ndarray")]
impl<E, I, Q> ParallelBackend for NdArray<E, I, Q>
where
    E: FloatNdArrayElement,
    I: IntNdArrayElement,
    Q: QuantElement,
    NdArrayTensor: From<SharedArray<E>> + From<SharedArray<I>>,
{
    type Base = Self;

    fn step(x: FloatTensor<Self>, forward: &Step<Self>, _: &Step<Self>) -> FloatTensor<Self> {
        forward.run(x)
    }
}

#[cfg(feature = "cubecl")]
impl<R, F, I, BT> ParallelBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    type Base = Self;

    fn step(x: FloatTensor<Self>, forward: &Step<Self>, _: &Step<Self>) -> FloatTensor<Self> {
        forward.run(x)
    }
}

#[cfg(feature = "cubecl")]
impl<B: FusionBackend> ParallelBackend for Fusion<B> {
    type Base = Self;

    fn step(x: FloatTensor<Self>, forward: &Step<Self>, _: &Step<Self>) -> FloatTensor<Self> {
        forward.run(x)
    }
}
