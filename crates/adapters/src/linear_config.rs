//! What a linear is before it has values: shape, path, fragments.

use std::ops::Range;

use burn::tensor::DType;
use moe_lora_parallel::{Group, GroupKind, ParallelBackend};

use crate::lora::size_name;
use crate::{AdapterError, Linear, PlacedWeight, Placement, ShardAxis, Weight, WeightLayout};

/// Shape and path of a linear.
///
/// ```
/// use burn::backend::Flex;
/// use moe_lora_adapters::{ColumnLinear, LinearConfig};
/// use moe_lora_parallel::{ExpertTp, Group};
///
/// let group = Group::<Flex, ExpertTp>::solo();
/// let linear: ColumnLinear<Flex, ExpertTp> = LinearConfig::new("experts.up_proj", 4, 8)
///     .with_experts(0..2)
///     .init(&group, |expert, row, column| (expert + row + column) as f32, &Default::default())?;
/// # Ok::<(), moe_lora_adapters::AdapterError>(())
/// ```
#[derive(Clone, Debug)]
pub struct LinearConfig {
    path: String,
    d_in: usize,
    d_out: usize,
    experts: Option<Range<usize>>,
    fragments: Vec<String>,
    dtype: DType,
}

impl LinearConfig {
    /// A linear of full extents `d_in` and `d_out`, one weight for all rows, f32.
    pub fn new(path: impl Into<String>, d_in: usize, d_out: usize) -> Self {
        Self {
            path: path.into(),
            d_in,
            d_out,
            experts: None,
            fragments: Vec::new(),
            dtype: DType::F32,
        }
    }

    /// One weight for each of these global experts; rows come sorted by expert.
    pub fn with_experts(mut self, local: Range<usize>) -> Self {
        self.experts = Some(local);
        self
    }

    /// Paths of equal parts of the output that are sharded one by one, such as gate and up.
    pub fn with_fragments<S: Into<String>>(mut self, paths: impl IntoIterator<Item = S>) -> Self {
        self.fragments = paths.into_iter().map(Into::into).collect();
        self
    }

    /// Element type of the weight.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// A frozen linear holding this rank's part of the weight whose full element for `(expert,
    /// row, column)` is `value`. Expert, row and column are global indices.
    ///
    /// # Errors
    ///
    /// When the group does not divide the sharded axis.
    ///
    /// # Panics
    ///
    /// When a linear that is not column-parallel is given fragments.
    pub fn init<B: ParallelBackend, G: GroupKind, P: Placement>(
        self,
        group: &Group<B, G>,
        value: impl FnMut(usize, usize, usize) -> f32,
        device: &B::Device,
    ) -> Result<Linear<B, G, P>, AdapterError> {
        assert!(
            self.fragments.is_empty() || P::AXIS == ShardAxis::Out,
            "{}: only a column-parallel linear has fragments",
            self.path
        );
        let layout = WeightLayout {
            experts: self.experts,
            d_out: self.d_out,
            d_in: self.d_in,
            fragments: self.fragments.len().max(1),
            axis: P::AXIS,
            rank: group.rank(),
            ranks: group.size(),
        };
        let what = match P::AXIS {
            ShardAxis::In => "d_in",
            _ => "d_out",
        };
        layout
            .check(what, size_name(G::NAME))
            .map_err(|reason| AdapterError::Topology {
                path: self.path.clone(),
                reason,
            })?;
        let values = layout.gather(value);
        let weight = Weight::from_values(values, &layout, self.dtype, false, device);
        let weight = PlacedWeight::new(weight, layout);
        Ok(Linear::new(self.path, self.fragments, weight))
    }
}
