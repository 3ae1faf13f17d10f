//! A matrix of two dimensions in a buffer, as kernels index it.

use std::ops::Range;

use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::prelude::ArrayArg;
use burn_cubecl::cubecl::server::Handle;
use burn_cubecl::cubecl::zspace::metadata::Metadata;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;

use crate::Layout;

/// Columns of a matrix whose runs, rows or columns, are contiguous and `stride` elements apart.
pub(crate) struct View {
    pub handle: Handle,
    len: usize,
    elem_size: usize,
    pub layout: Layout,
    pub at: usize,
    pub stride: usize,
}

/// How a matrix lies in memory. What is neither is copied into rows.
pub(crate) fn layout<R: CubeRuntime>(x: &CubeTensor<R>) -> Layout {
    match (x.meta.shape().dims(), strides(x)) {
        ([1, _] | [_, 1], _) => Layout::ByToken,
        ([rows, columns], [1, run]) if run >= rows && columns > 1 => Layout::ByFeature,
        _ => Layout::ByToken,
    }
}

/// `x` where its rows, or its columns, lie one behind the other without a gap, or else such a copy.
///
/// CUDA pads the rows of what burn's operations write to 16 bytes.
pub(crate) fn tight<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let [rows, columns] = x.meta.shape().dims();
    let [row, column] = strides(&x);
    let gapless = match layout(&x) {
        Layout::ByToken => (column == 1 || columns == 1) && (row == columns || rows == 1),
        Layout::ByFeature => column == rows,
    };
    if gapless { x } else { into_contiguous(x) }
}

/// The rows of a stack `[E, n, k]` as one matrix, in its own buffer where the experts lie one behind the
/// other. burn copies where rows are padded.
pub(crate) fn rows<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let [experts, n, k] = x.meta.shape().dims();
    let (expert, row, column) = {
        let strides = x.meta.strides();
        (strides[0], strides[1], strides[2])
    };
    let behind = (expert == n * row || experts == 1) && (column == 1 || k == 1) && row >= k;
    let mut x = if behind { x } else { into_contiguous(x) };
    let row = if behind { row } else { k };
    *x.meta = Metadata::new([experts * n, k], &[row, 1]);
    x
}

fn strides<R: CubeRuntime>(x: &CubeTensor<R>) -> [usize; 2] {
    let strides = x.meta.strides();
    [strides[0], strides[1]]
}

/// Elements of the buffer from the tensor's first one on.
fn len<R: CubeRuntime>(x: &CubeTensor<R>) -> usize {
    let before = x.handle.offset_start.unwrap_or(0);
    let after = x.handle.offset_end.unwrap_or(0);
    (x.handle.size() - before - after) as usize / x.elem_size()
}

impl View {
    /// Any layout.
    pub fn new<R: CubeRuntime>(x: CubeTensor<R>, columns: Range<usize>) -> Self {
        let layout = layout(&x);
        let [rows, all] = x.meta.shape().dims();
        let [row, column] = strides(&x);
        let usable = match layout {
            Layout::ByFeature => true,
            // The stride of a single row or column says nothing.
            Layout::ByToken => (column == 1 || all == 1) && (row >= all || rows == 1),
        };
        let x = if usable { x } else { into_contiguous(x) };
        let [row, column] = strides(&x);
        let (stride, at) = match layout {
            Layout::ByToken => (if rows == 1 { all } else { row }, columns.start),
            Layout::ByFeature => (column, columns.start * column),
        };
        Self {
            len: len(&x),
            elem_size: x.elem_size(),
            handle: x.handle,
            layout,
            at,
            stride,
        }
    }

    /// Rows only.
    pub fn by_token<R: CubeRuntime>(x: CubeTensor<R>, columns: Range<usize>) -> Self {
        let x = match layout(&x) {
            Layout::ByToken => x,
            Layout::ByFeature => into_contiguous(x),
        };
        Self::new(x, columns)
    }

    pub fn arg<R: CubeRuntime>(&self) -> ArrayArg<R> {
        // SAFETY: the length is that of the handle, which the tensor was made with.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.len) }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether runs can be read `width` elements at once when each has a multiple of `width`.
    pub fn allows(&self, width: usize) -> bool {
        let start = self.handle.offset_start.unwrap_or(0) as usize;
        self.at.is_multiple_of(width)
            && self.stride.is_multiple_of(width)
            && start.is_multiple_of(width * self.elem_size)
    }
}

/// A stack of weights `[E, n, k]` whose rows are contiguous.
pub(crate) struct Stack {
    pub handle: Handle,
    len: usize,
    elem_size: usize,
    pub expert: usize,
    pub stride: usize,
}

impl Stack {
    pub fn new<R: CubeRuntime>(w: CubeTensor<R>) -> Self {
        let [experts, n, k] = w.meta.shape().dims();
        let rows = |w: &CubeTensor<R>| {
            let strides = w.meta.strides();
            [strides[0], strides[1], strides[2]]
        };
        let [expert, row, column] = rows(&w);
        let usable =
            (column == 1 || k == 1) && (row >= k || n == 1) && (expert >= n * row || experts == 1);
        let w = if usable { w } else { into_contiguous(w) };
        let [expert, row, _] = rows(&w);
        let row = if n == 1 { k } else { row };
        Self {
            len: len(&w),
            elem_size: w.elem_size(),
            expert: if experts == 1 { n * row } else { expert },
            stride: row,
            handle: w.handle,
        }
    }

    pub fn arg<R: CubeRuntime>(&self) -> ArrayArg<R> {
        // SAFETY: the length is that of the handle, which the tensor was made with.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.len) }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn allows(&self, width: usize) -> bool {
        let start = self.handle.offset_start.unwrap_or(0) as usize;
        self.expert.is_multiple_of(width)
            && self.stride.is_multiple_of(width)
            && start.is_multiple_of(width * self.elem_size)
    }
}
