//! Which bytes of which stored shards make up a wanted one: a pure function of their boxes.

use crate::tensor::element_bytes;
use crate::{CheckpointError, ShardedTensor};

/// What one stored shard gives to a wanted one: every combination of one span an axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Index of the stored shard.
    pub source: usize,
    /// Spans of each axis, in rising order of both sides.
    pub axes: Vec<Vec<Span>>,
}

/// Neighbouring indices of one axis that both sides hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First index in the stored shard.
    pub source: usize,
    /// First index in the wanted shard.
    pub target: usize,
    /// Number of indices.
    pub len: usize,
}

/// Bytes that lie side by side on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First byte in the stored shard.
    pub source: usize,
    /// First byte in the wanted shard.
    pub target: usize,
    /// Number of bytes.
    pub len: usize,
}

/// Where `wanted` finds its elements among `stored`: each of them exactly once.
///
/// Shards of the same tensor may differ in their fragments; boxes are compared in whole indices.
///
/// # Errors
///
/// [`CheckpointError::Gap`] when elements are in no stored shard, [`CheckpointError::Overlap`] when
/// some are in two, [`CheckpointError::Layout`] when a shard contradicts itself or is of another
/// tensor.
pub fn plan(
    stored: &[ShardedTensor],
    wanted: &ShardedTensor,
) -> Result<Vec<Transfer>, CheckpointError> {
    wanted.check()?;
    let mut transfers: Vec<Transfer> = Vec::new();
    for (source, shard) in stored.iter().enumerate() {
        shard.check()?;
        if (shard.dtype, &shard.global_shape) != (wanted.dtype, &wanted.global_shape) {
            return Err(CheckpointError::Layout {
                key: shard.key.clone(),
                field: "shape",
                value: format!("{} {:?}", shard.dtype, shard.global_shape),
                expected: format!("{} {:?}", wanted.dtype, wanted.global_shape),
            });
        }
        let axes: Vec<_> = (0..wanted.global_shape.len())
            .map(|axis| common_spans(shard, wanted, axis))
            .collect();
        if axes.iter().all(|spans| !spans.is_empty()) {
            transfers.push(Transfer { source, axes });
        }
    }
    for (index, first) in transfers.iter().enumerate() {
        let second = transfers[index + 1..]
            .iter()
            .find(|second| overlap(first, second));
        if let Some(second) = second {
            return Err(CheckpointError::Overlap {
                key: wanted.key.clone(),
                first: first.source,
                second: second.source,
            });
        }
    }
    let elements = wanted.local_shape.iter().product();
    let covered = transfers.iter().map(Transfer::elements).sum();
    if covered != elements {
        return Err(CheckpointError::Gap {
            key: wanted.key.clone(),
            covered,
            wanted: elements,
        });
    }
    Ok(transfers)
}

impl Transfer {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        let extent = |spans: &Vec<Span>| spans.iter().map(|span| span.len).sum::<usize>();
        self.axes.iter().map(extent).product()
    }

    /// Whether the stored shard is the wanted one, byte for byte.
    pub fn is_same(&self, stored: &ShardedTensor, wanted: &ShardedTensor) -> bool {
        stored.local_shape == wanted.local_shape
            && self.elements() == wanted.local_shape.iter().product::<usize>()
    }

    /// Calls `copy` with each run, in rising order of the stored shard.
    ///
    /// # Errors
    ///
    /// The first of `copy`.
    pub fn runs<E>(
        &self,
        stored: &ShardedTensor,
        wanted: &ShardedTensor,
        mut copy: impl FnMut(Run) -> Result<(), E>,
    ) -> Result<(), E> {
        let element = element_bytes(stored.dtype);
        // Axes that both sides hold whole, from the last one on, add to the length of a run.
        let whole = |axis: usize| {
            let extent = stored.local_shape[axis];
            let span = Span {
                source: 0,
                target: 0,
                len: extent,
            };
            wanted.local_shape[axis] == extent && self.axes[axis] == [span]
        };
        let mut outer = self.axes.len();
        while outer > 0 && whole(outer - 1) {
            outer -= 1;
        }
        let inner = stored.local_shape[outer..].iter().product::<usize>() * element;
        let mut walk = Walk {
            axes: &self.axes[..outer],
            source: strides(&stored.local_shape[..outer], inner),
            target: strides(&wanted.local_shape[..outer], inner),
            copy: &mut copy,
        };
        let start = Run {
            source: 0,
            target: 0,
            len: inner,
        };
        walk.visit(0, start)
    }
}

/// Steps through the combinations of spans, last axis fastest.
struct Walk<'a, F> {
    axes: &'a [Vec<Span>],
    source: Vec<usize>,
    target: Vec<usize>,
    copy: &'a mut F,
}

impl<E, F: FnMut(Run) -> Result<(), E>> Walk<'_, F> {
    fn visit(&mut self, axis: usize, at: Run) -> Result<(), E> {
        let Some(spans) = self.axes.get(axis) else {
            return (self.copy)(at);
        };
        let (source, target) = (self.source[axis], self.target[axis]);
        let step = |index: usize, span: &Span, len| Run {
            source: at.source + (span.source + index) * source,
            target: at.target + (span.target + index) * target,
            len,
        };
        for span in spans {
            if axis + 1 == self.axes.len() {
                (self.copy)(step(0, span, span.len * at.len))?;
            } else {
                for index in 0..span.len {
                    self.visit(axis + 1, step(index, span, at.len))?;
                }
            }
        }
        Ok(())
    }
}

/// Bytes from one index of each axis to the next, the last axis `inner` bytes apart.
fn strides(shape: &[usize], inner: usize) -> Vec<usize> {
    let mut strides = vec![inner; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

/// A piece of one axis: whole indices and where they lie in the shard.
struct Piece {
    global: usize,
    local: usize,
    len: usize,
}

/// The whole indices of an axis that a shard holds, one piece a fragment.
fn pieces(shard: &ShardedTensor, axis: usize) -> Vec<Piece> {
    let (extent, local) = (shard.global_shape[axis], shard.local_shape[axis]);
    // Fragments held whole lie side by side.
    let count = if local == extent {
        1
    } else {
        shard.fragments[axis]
    };
    let len = local / count;
    let piece = |fragment| Piece {
        global: fragment * (extent / count) + shard.offset[axis],
        local: fragment * len,
        len,
    };
    (0..count).map(piece).collect()
}

/// The indices of one axis that both shards hold. Neighbours on both sides are one span.
fn common_spans(stored: &ShardedTensor, wanted: &ShardedTensor, axis: usize) -> Vec<Span> {
    let (stored, wanted) = (pieces(stored, axis), pieces(wanted, axis));
    let (mut from, mut to) = (stored.iter().peekable(), wanted.iter().peekable());
    let mut spans: Vec<Span> = Vec::new();
    while let (Some(a), Some(b)) = (from.peek(), to.peek()) {
        let begin = a.global.max(b.global);
        let (a_end, b_end) = (a.global + a.len, b.global + b.len);
        let end = a_end.min(b_end);
        if begin < end {
            let span = Span {
                source: a.local + begin - a.global,
                target: b.local + begin - b.global,
                len: end - begin,
            };
            match spans.last_mut() {
                Some(last)
                    if last.source + last.len == span.source
                        && last.target + last.len == span.target =>
                {
                    last.len += span.len;
                }
                _ => spans.push(span),
            }
        }
        if a_end <= b_end {
            from.next()
        } else {
            to.next()
        };
    }
    spans
}

/// Whether two transfers write the same element: on every axis they share an index.
fn overlap(first: &Transfer, second: &Transfer) -> bool {
    let shares = |(a, b): (&Vec<Span>, &Vec<Span>)| {
        let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
        while let (Some(left), Some(right)) = (a.peek(), b.peek()) {
            let (left_end, right_end) = (left.target + left.len, right.target + right.len);
            if left.target.max(right.target) < left_end.min(right_end) {
                return true;
            }
            if left_end <= right_end {
                a.next()
            } else {
                b.next()
            };
        }
        false
    };
    first.axes.iter().zip(&second.axes).all(shares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, GroupSizes, TensorLayout};
    use proptest::prelude::*;
    use safetensors::Dtype;

    /// The elements of a shard of a tensor whose elements are its own flat indices, written without
    /// spans: every whole index of every axis is asked whether the shard holds it.
    fn cut(shard: &ShardedTensor) -> Vec<u16> {
        let held = |axis: usize| {
            let (extent, count) = (shard.global_shape[axis], shard.fragments[axis]);
            let part = shard.local_shape[axis] / count;
            (0..extent).filter(move |index| {
                let inside = index % (extent / count);
                (shard.offset[axis]..shard.offset[axis] + part).contains(&inside)
            })
        };
        (0..shard.global_shape.len()).fold(vec![0], |flat, axis| {
            let extent = shard.global_shape[axis];
            let next = |base: u16| held(axis).map(move |index| base * extent as u16 + index as u16);
            flat.into_iter().flat_map(next).collect()
        })
    }

    fn bytes(elements: &[u16]) -> Vec<u8> {
        elements.iter().flat_map(|e| e.to_le_bytes()).collect()
    }

    /// Runs a plan on the shards' bytes; counts how often each wanted byte is written.
    fn execute(stored: &[ShardedTensor], wanted: &ShardedTensor) -> (Vec<u8>, Vec<usize>) {
        let mut out = vec![0; wanted.byte_len()];
        let mut writes = vec![0; wanted.byte_len()];
        for transfer in plan(stored, wanted).unwrap() {
            let shard = &stored[transfer.source];
            let data = bytes(&cut(shard));
            let mut last = 0;
            let copy = |run: Run| {
                assert!(run.source >= last, "runs rise");
                last = run.source + run.len;
                let target = run.target..run.target + run.len;
                out[target.clone()].copy_from_slice(&data[run.source..last]);
                writes[target].iter_mut().for_each(|count| *count += 1);
                Ok::<_, ()>(())
            };
            transfer.runs(shard, wanted, copy).unwrap();
        }
        (out, writes)
    }

    fn stored(layout: &TensorLayout, sizes: GroupSizes) -> Vec<ShardedTensor> {
        let shards = sizes
            .places()
            .unwrap()
            .map(|place| layout.shard(&place).unwrap());
        shards.filter(|shard| shard.replica == 0).collect()
    }

    fn sizes() -> impl Strategy<Value = GroupSizes> {
        let size = || prop::sample::select(vec![1, 2, 4]);
        (size(), size(), 1..3usize)
            .prop_map(|(ep, etp, dp)| GroupSizes::new(ep, etp).with_world(ep * etp * dp))
    }

    fn layout() -> impl Strategy<Value = TensorLayout> {
        // Each axis: how many parts of each fragment, fragments, and what shards it.
        let axis = (prop::sample::select(vec![0usize, 4, 8]), 1..4usize);
        let axes = prop::collection::vec(axis, 0..4);
        (axes, 0..5usize, 0..5usize).prop_map(|(axes, ep, etp)| {
            let shape: Vec<_> = axes.iter().map(|(part, count)| part * count).collect();
            let mut layout = TensorLayout::new("w", Dtype::U16, shape);
            for (axis, (_, count)) in axes.iter().enumerate() {
                layout = layout.with_fragments(axis, *count);
            }
            for (axis, group) in [(ep, Axis::Ep), (etp, Axis::ExpertTp)] {
                if axis < axes.len() && layout.axes[axis].is_none() {
                    layout = layout.with_axis(axis, group);
                }
            }
            layout
        })
    }

    proptest! {
        #[test]
        fn any_partition_gives_any_other_bit_for_bit_and_once(
            layout in layout(), from in sizes(), to in sizes(),
        ) {
            let stored = stored(&layout, from);
            let places = to.places().unwrap().map(|place| layout.shard(&place).unwrap());
            for wanted in places.chain([layout.whole()]) {
                let (out, writes) = execute(&stored, &wanted);
                prop_assert_eq!(&out, &bytes(&cut(&wanted)));
                prop_assert!(writes.iter().all(|count| *count == 1));
            }
        }

        #[test]
        fn a_missing_or_doubled_shard_is_found(
            layout in layout(), from in sizes(), pick in any::<prop::sample::Index>(),
        ) {
            let stored = stored(&layout, from);
            prop_assume!(layout.whole().byte_len() > 0);
            let index = pick.index(stored.len());
            let mut missing = stored.clone();
            missing.remove(index);
            let error = plan(&missing, &layout.whole()).unwrap_err();
            let is_gap = matches!(error, CheckpointError::Gap { .. });
            prop_assert!(is_gap, "{}", error);
            let mut doubled = stored.clone();
            doubled.push(stored[index].clone());
            let error = plan(&doubled, &layout.whole()).unwrap_err();
            let is_overlap = matches!(error, CheckpointError::Overlap { .. });
            prop_assert!(is_overlap, "{}", error);
        }
    }

    fn gate_up() -> TensorLayout {
        TensorLayout::new("gate_up", Dtype::U16, [2, 8, 3])
            .with_axis(0, Axis::Ep)
            .with_axis(1, Axis::ExpertTp)
            .with_fragments(1, 2)
    }

    #[test]
    fn a_gap_and_an_overlap_of_equal_size_do_not_cancel() {
        let mut stored = stored(&gate_up(), GroupSizes::new(1, 2));
        stored[1].offset[1] = 0;
        assert_eq!(
            plan(&stored, &gate_up().whole()).unwrap_err().to_string(),
            "tensor \"gate_up\": shards 0 and 1 hold the same elements (leave one out)"
        );
    }

    #[test]
    fn shards_taken_as_plain_slices_mix_gate_with_up() {
        let layout = gate_up();
        let mut stored = stored(&layout, GroupSizes::new(1, 2));
        let right = execute(&stored, &layout.whole()).0;
        let data: Vec<_> = stored.iter().map(|shard| bytes(&cut(shard))).collect();
        // The wrong algebra: the same bytes, described as halves of one axis without fragments.
        for (rank, shard) in stored.iter_mut().enumerate() {
            shard.fragments[1] = 1;
            shard.offset[1] = rank * 4;
        }
        let mut wrong = vec![0; right.len()];
        for transfer in plan(&stored, &layout.whole()).unwrap() {
            let copy = |run: Run| {
                let source = &data[transfer.source][run.source..run.source + run.len];
                wrong[run.target..run.target + run.len].copy_from_slice(source);
                Ok::<_, ()>(())
            };
            transfer
                .runs(&stored[transfer.source], &layout.whole(), copy)
                .unwrap();
        }
        assert_ne!(wrong, right);
        assert_eq!(right, bytes(&Vec::from_iter(0..48)));
    }

    #[test]
    fn equal_boxes_are_one_run() {
        let stored = stored(&gate_up(), GroupSizes::new(2, 2));
        let transfers = plan(&stored, &stored[3]).unwrap();
        assert_eq!((transfers.len(), transfers[0].source), (1, 3));
        let mut runs = Vec::new();
        let keep = |run| {
            runs.push(run);
            Ok::<_, ()>(())
        };
        transfers[0].runs(&stored[3], &stored[3], keep).unwrap();
        let len = stored[3].byte_len();
        assert_eq!(
            runs,
            [Run {
                source: 0,
                target: 0,
                len
            }]
        );
        assert!(transfers[0].is_same(&stored[3], &stored[3]));
    }

    #[test]
    fn a_shard_of_another_shape_is_refused() {
        let mut other = gate_up().whole();
        other.global_shape[2] = 4;
        let message = plan(&[other], &gate_up().whole()).unwrap_err().to_string();
        assert!(
            message.contains("U16 [2, 8, 4], expected U16 [2, 8, 3]"),
            "{message}"
        );
    }
}
