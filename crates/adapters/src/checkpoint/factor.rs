//! A factor as the files see it.

use burn::module::ParamId;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, TensorData};
use moe_lora_checkpoint::{Axis, Dtype, LoadedTensor, TensorLayout};
use moe_lora_parallel::GroupName;

use crate::{ResumeError, ShardAxis, TrainedWeight, Weight, WeightLayout};

/// One factor of the module, apart from its values.
pub(super) struct Factor<B: Backend> {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) layout: TensorLayout,
    pub(super) device: B::Device,
    pub(super) dtype: DType,
    /// Dimensions of the parameter, which has an axis of 1 where files have none.
    pub(super) dims: usize,
}

impl<B: Backend> Factor<B> {
    pub(super) fn of(trained: &TrainedWeight<'_, B>, ep: usize) -> Result<Self, ResumeError> {
        let (id, device, dtype, dims) = match trained.weight {
            Weight::One(param) => (param.id, param.val().device(), param.val().dtype(), 2),
            Weight::PerExpert(param) => (param.id, param.val().device(), param.val().dtype(), 3),
        };
        let stored = match dtype {
            DType::F64 => Dtype::F64,
            DType::F32 | DType::Flex32 => Dtype::F32,
            DType::F16 => Dtype::F16,
            DType::BF16 => Dtype::BF16,
            dtype => {
                let path = trained.path.clone();
                return Err(ResumeError::Dtype { path, dtype });
            }
        };
        Ok(Self {
            id,
            path: trained.path.clone(),
            layout: tensor_layout(trained, ep, stored),
            device,
            dtype,
            dims,
        })
    }

    pub(super) fn part_prefix(&self, optimizer: &str) -> String {
        format!("{}.{optimizer}.", self.path)
    }

    /// Values of the factor's type: its own, or those of a part of the optimizer's state.
    pub(super) fn data(&self, loaded: LoadedTensor) -> TensorData {
        let mut shape = loaded.shape;
        shape.resize(self.dims, 1);
        TensorData::from_bytes_vec(loaded.bytes, shape, self.dtype)
    }
}

/// How the files cut a factor over ranks: experts over `Ep`, and the axis of its placement over the
/// group of its linear.
fn tensor_layout<B: Backend>(
    trained: &TrainedWeight<'_, B>,
    ep: usize,
    dtype: Dtype,
) -> TensorLayout {
    let WeightLayout {
        experts,
        d_out,
        d_in,
        fragments,
        axis,
        ..
    } = trained.layout;
    let group = match trained.group {
        GroupName::ExpertTp => Axis::ExpertTp,
        _ => Axis::Tp,
    };
    let mut shape = vec![*d_out];
    if !trained.is_vector {
        shape.push(*d_in);
    }
    let (layout, rows) = match experts {
        None => (TensorLayout::new(&trained.path, dtype, shape), 0),
        Some(local) => {
            shape.insert(0, local.len() * ep);
            let layout = TensorLayout::new(&trained.path, dtype, shape);
            (layout.with_axis(0, Axis::Ep), 1)
        }
    };
    match axis {
        ShardAxis::Whole => layout,
        ShardAxis::Out => layout
            .with_axis(rows, group)
            .with_fragments(rows, *fragments),
        ShardAxis::In => layout.with_axis(rows + 1, group),
    }
}
