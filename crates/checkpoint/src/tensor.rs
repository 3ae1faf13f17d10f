//! One shard of one logical tensor.

use crate::CheckpointError;
use safetensors::Dtype;
use std::fmt;

/// Axes of a tensor; far above any real one, so that a hostile file cannot ask for more work.
const MAX_AXES: usize = 8;
/// Fragments of an axis; gate and up are two.
const MAX_FRAGMENTS: usize = 4096;

/// One shard of one logical tensor: what the whole is, and which box of it this is.
///
/// An axis of `k` fragments is `k` equal parts that are sharded one by one. The fused gate/up
/// projection `[E, 2F, r]` has fragments `[1, 2, 1]`: over two ranks, rank 1 holds the second half of
/// gate and the second half of up.
///
/// ```text
/// global  | gate: F          | up: F            |      global_shape = 2F
/// rank 1            | F/2    |         | F/2    |      offset = F/2, local_shape = F
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardedTensor {
    /// Logical path such as `model.layers.0.mlp.experts.down_proj.lora_A`; never a rank number.
    pub key: String,
    /// Element type, of whole bytes.
    pub dtype: Dtype,
    /// Extents of the whole tensor, in elements.
    pub global_shape: Vec<usize>,
    /// Equal parts of each axis that are sharded one by one; 1 for most.
    pub fragments: Vec<usize>,
    /// Where the shard begins inside each fragment of each axis, in elements.
    pub offset: Vec<usize>,
    /// Extents of the shard over all fragments, in elements.
    pub local_shape: Vec<usize>,
    /// Number of this copy among those of the same box; only copy 0 is stored.
    pub replica: usize,
}

impl ShardedTensor {
    /// A tensor that one shard holds whole.
    pub fn whole(key: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        let shape = shape.into();
        Self {
            key: key.into(),
            dtype,
            fragments: vec![1; shape.len()],
            offset: vec![0; shape.len()],
            local_shape: shape.clone(),
            global_shape: shape,
            replica: 0,
        }
    }

    /// Bytes of the shard. No overflow once [`check`](Self::check) has passed.
    pub fn byte_len(&self) -> usize {
        self.local_shape.iter().product::<usize>() * element_bytes(self.dtype)
    }

    /// Whether the shard is the whole tensor.
    pub fn is_whole(&self) -> bool {
        self.local_shape == self.global_shape
    }

    /// Checks that the fields agree with each other and that no size overflows.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Layout`] with the field at fault.
    pub fn check(&self) -> Result<(), CheckpointError> {
        let fault = |field, value: &dyn fmt::Debug, expected: String| {
            Err(CheckpointError::Layout {
                key: self.key.clone(),
                field,
                value: format!("{value:?}"),
                expected,
            })
        };
        // The name under which a safetensors header keeps its own entries.
        if self.key.is_empty() || self.key == "__metadata__" {
            return fault("key", &self.key, "the path of a tensor".into());
        }
        if !self.dtype.bitsize().is_multiple_of(8) {
            return fault("dtype", &self.dtype, "elements of whole bytes".into());
        }
        let axes = self.global_shape.len();
        if axes > MAX_AXES {
            return fault(
                "shape",
                &self.global_shape,
                format!("at most {MAX_AXES} axes"),
            );
        }
        for (field, extents) in [
            ("fragments", &self.fragments),
            ("offset", &self.offset),
            ("local_shape", &self.local_shape),
        ] {
            if extents.len() != axes {
                return fault(field, extents, format!("{axes} axes, as the shape has"));
            }
        }
        // Empty axes are left out of the product: strides of other axes must not overflow either.
        let bytes = self
            .global_shape
            .iter()
            .filter(|&&extent| extent > 0)
            .try_fold(element_bytes(self.dtype), |product, &extent| {
                product.checked_mul(extent)
            });
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return fault(
                "shape",
                &self.global_shape,
                "a size that fits in memory".into(),
            );
        }
        for axis in 0..axes {
            let (extent, count) = (self.global_shape[axis], self.fragments[axis]);
            if count == 0 || count > MAX_FRAGMENTS || !extent.is_multiple_of(count) {
                let expected = format!("a divisor of {extent}, at most {MAX_FRAGMENTS}");
                return fault("fragments", &self.fragments, expected);
            }
            let local = self.local_shape[axis];
            if !local.is_multiple_of(count) {
                let expected = format!("a multiple of {count} on axis {axis}");
                return fault("local_shape", &self.local_shape, expected);
            }
            let end = self.offset[axis].checked_add(local / count);
            if end.is_none_or(|end| end > extent / count) {
                let expected = format!(
                    "offset + {} to be at most {} on axis {axis}",
                    local / count,
                    extent / count
                );
                return fault("offset", &self.offset, expected);
            }
        }
        Ok(())
    }
}

/// The key and the box: `"w"[0..2, 4..8 of each of 2]`.
impl fmt::Display for ShardedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[", self.key)?;
        for (axis, count) in self.fragments.iter().enumerate() {
            let begin = self.offset[axis];
            let separator = if axis == 0 { "" } else { ", " };
            write!(
                f,
                "{separator}{begin}..{}",
                begin + self.local_shape[axis] / count
            )?;
            if *count > 1 {
                write!(f, " of each of {count}")?;
            }
        }
        write!(f, "]")
    }
}

/// Bytes of one element of a type of whole bytes.
pub(crate) fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn up_half() -> ShardedTensor {
        ShardedTensor {
            fragments: vec![1, 2, 1],
            offset: vec![0, 3, 0],
            local_shape: vec![4, 6, 5],
            ..ShardedTensor::whole("w", Dtype::F32, [4, 12, 5])
        }
    }

    fn fault(change: impl FnOnce(&mut ShardedTensor)) -> String {
        let mut tensor = up_half();
        change(&mut tensor);
        tensor.check().unwrap_err().to_string()
    }

    #[test]
    fn a_shard_of_two_fragments_is_sound() {
        up_half().check().unwrap();
        assert_eq!(up_half().byte_len(), 4 * 6 * 5 * 4);
        assert_eq!(
            up_half().to_string(),
            r#""w"[0..4, 3..6 of each of 2, 0..5]"#
        );
        ShardedTensor::whole("step", Dtype::I64, [])
            .check()
            .unwrap();
        ShardedTensor::whole("none", Dtype::I64, [0, 7])
            .check()
            .unwrap();
    }

    #[test]
    fn every_contradiction_is_named_with_its_values() {
        assert_eq!(
            fault(|t| t.offset[1] = 4),
            "tensor \"w\": offset=[0, 4, 0], expected offset + 3 to be at most 6 on axis 1 (correct the layout)"
        );
        for (message, part) in [
            (fault(|t| t.key.clear()), "key=\"\""),
            (
                fault(|t| t.key = "__metadata__".into()),
                "key=\"__metadata__\"",
            ),
            (fault(|t| t.dtype = Dtype::F4), "dtype=F4"),
            (
                fault(|t| t.offset[0] = usize::MAX),
                "offset=[18446744073709551615",
            ),
            (fault(|t| t.local_shape[1] = 5), "local_shape=[4, 5, 5]"),
            (fault(|t| t.fragments[1] = 0), "fragments=[1, 0, 1]"),
            (fault(|t| t.fragments[1] = 5), "fragments=[1, 5, 1]"),
            (fault(|t| _ = t.fragments.pop()), "expected 3 axes"),
            (fault(|t| t.global_shape = vec![1; 9]), "at most 8 axes"),
            (
                fault(|t| t.global_shape[0] = usize::MAX / 64),
                "fits in memory",
            ),
            (
                fault(|t| t.global_shape = vec![0, 1 << 40, 1 << 40]),
                "fits in memory",
            ),
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
