//! The backends whose tensors lie in CubeCL's CUDA buffers.

use burn::tensor::TensorMetadata;
use burn::tensor::backend::Backend;
use burn::tensor::ops::FloatTensor;
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, FloatElement, IntElement};
use burn_fusion::stream::OperationStreams;
use burn_fusion::{Fusion, NoOp, get_client};
use burn_ir::{BackendIr, InitOperationIr, OperationIr, OperationOutput};

/// burn's CUDA backend, with and without fusion.
pub trait CudaBackend: Backend<Device = CudaDevice> {
    /// The buffer behind a tensor, after the operations that fill it have been queued for the GPU.
    fn resolve(tensor: FloatTensor<Self>) -> CubeTensor<CudaRuntime>;

    /// The tensor of a buffer.
    fn register(tensor: CubeTensor<CudaRuntime>) -> FloatTensor<Self>;
}

impl<F, I, BT> CudaBackend for CubeBackend<CudaRuntime, F, I, BT>
where
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn resolve(tensor: FloatTensor<Self>) -> CubeTensor<CudaRuntime> {
        tensor
    }

    fn register(tensor: CubeTensor<CudaRuntime>) -> FloatTensor<Self> {
        tensor
    }
}

/// Fused operations are pending until their values are asked for, which every collective does: calls
/// are made in program order on every rank.
impl<F, I, BT> CudaBackend for Fusion<CubeBackend<CudaRuntime, F, I, BT>>
where
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn resolve(tensor: FloatTensor<Self>) -> CubeTensor<CudaRuntime> {
        let client = tensor.client.clone();
        client.resolve_tensor_float::<CubeBackend<CudaRuntime, F, I, BT>>(tensor)
    }

    fn register(tensor: CubeTensor<CudaRuntime>) -> FloatTensor<Self> {
        type Inner<F, I, BT> = CubeBackend<CudaRuntime, F, I, BT>;
        let client = get_client::<Inner<F, I, BT>>(&tensor.device);
        let (shape, dtype) = (tensor.shape(), tensor.dtype);
        let handle = Inner::<F, I, BT>::float_tensor_handle(tensor);
        let known = InitOperationIr::create(shape, dtype, || client.register_tensor_handle(handle));
        let operation = NoOp::<Inner<F, I, BT>>::new();
        client
            .register(
                OperationStreams::default(),
                OperationIr::Init(known),
                operation,
            )
            .output()
    }
}
