//! The per-expert path on backends that have no path of their own.

#[cfg(feature = "cubecl")]
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
#[cfg(feature = "cubecl")]
use burn_fusion::{Fusion, FusionBackend};
#[cfg(feature = "ndarray")]
use burn_ndarray::{
    FloatNdArrayElement, IntNdArrayElement, NdArray, NdArrayTensor, QuantElement, SharedArray,
};

use crate::GroupedBackend;

#[cfg(feature = "ndarray")]
impl<E, I, Q> GroupedBackend for NdArray<E, I, Q>
where
    E: FloatNdArrayElement,
    I: IntNdArrayElement,
    Q: QuantElement,
    NdArrayTensor: From<SharedArray<E>> + From<SharedArray<I>>,
{
}

#[cfg(feature = "cubecl")]
impl<R, F, I, BT> GroupedBackend for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
}

#[cfg(feature = "cubecl")]
impl<B: FusionBackend> GroupedBackend for Fusion<B> {}
