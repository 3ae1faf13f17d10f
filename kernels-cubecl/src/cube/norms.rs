//! The lengths of rows: as many units as a row has lines at once, several rows a cube.

use burn::tensor::{DType, Shape};
use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::plan::{storage, width};
use super::view::Stack;

/// Units of a row.
const LINES: usize = 32;
/// Rows of a cube.
const LANES: usize = 8;

/// Whether the kernels read `x`.
pub(super) fn reads<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    storage(x.dtype).is_some_and(|element| x.client.properties().supports_type(element))
}

/// The sums of the squares of rows, in f32.
pub(super) fn squares<R: CubeRuntime>(w: CubeTensor<R>) -> CubeTensor<R> {
    let [experts, n, k] = w.meta.shape().dims();
    let (client, device, dtype, elem_size) =
        (w.client.clone(), w.device.clone(), w.dtype, w.elem_size());
    let out = empty_device_contiguous_dtype(
        client.clone(),
        device,
        Shape::from([experts, n, 1]),
        DType::F32,
    );
    let rows = experts * n;
    if rows == 0 {
        return out;
    }
    let w = Stack::new(w);
    let width = width(&client, elem_size, |width| {
        w.allows(width) && k.is_multiple_of(width)
    });
    // SAFETY: the kernel reads `k` elements of each row of the stack, and writes an element for it.
    unsafe {
        squares_kernel::launch_unchecked::<R>(
            &client,
            CubeCount::Static(rows.div_ceil(LANES) as u32, 1, 1),
            CubeDim::new_1d((LINES * LANES) as u32),
            AddressType::from_len(w.len()),
            width,
            w.arg(),
            ArrayArg::from_raw_parts(out.handle.clone(), rows),
            n,
            rows,
            w.expert / width,
            w.stride / width,
            k / width,
            width,
            dtype.into(),
        )
    }
    out
}

/// See [`row_norms`](crate::row_norms). `terms` in the order of [`RowTerms`](crate::RowTerms), the squares in
/// f32.
pub(super) fn norms<R: CubeRuntime>(
    terms: [CubeTensor<R>; 3],
    b: CubeTensor<R>,
    scale: f64,
    of_zero: f64,
) -> CubeTensor<R> {
    let [experts, n, rank] = b.meta.shape().dims();
    let [squares, products, gram] = terms.map(into_contiguous);
    let b = into_contiguous(b);
    let client = b.client.clone();
    let shape = Shape::from([experts, n, 1]);
    let out = empty_device_contiguous_dtype(client.clone(), b.device.clone(), shape, DType::F32);
    let rows = experts * n;
    if rows == 0 {
        return out;
    }
    // SAFETY: the length is the number of elements the buffer was made for.
    let arg = |tensor: &CubeTensor<R>| unsafe {
        ArrayArg::from_raw_parts(tensor.handle.clone(), tensor.meta.num_elements())
    };
    let dtypes = [products.dtype, b.dtype, gram.dtype].map(StorageType::from);
    // SAFETY: the kernel reads the rows below `rows` of squares, products and B, and the `rank * rank`
    // elements of their experts' G; it writes an element for each row.
    unsafe {
        norms_kernel::launch_unchecked::<R>(
            &client,
            CubeCount::Static(rows.div_ceil(LANES) as u32, 1, 1),
            CubeDim::new_1d((LINES * LANES) as u32),
            AddressType::from_len(rows * rank.max(1)),
            arg(&squares),
            arg(&products),
            arg(&b),
            arg(&gram),
            arg(&out),
            n,
            rows,
            rank,
            (2.0 * scale) as f32,
            (scale * scale) as f32,
            of_zero as f32,
            dtypes,
        )
    }
    out
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn squares_kernel<E: Float, N: Size>(
    w: &Array<Vector<E, N>>,
    out: &mut Array<f32>,
    rows_of_expert: usize,
    rows: usize,
    expert_stride: usize,
    row_stride: usize,
    lines: usize,
    #[comptime] width: usize,
    #[define(E)] _dtype: StorageType,
) {
    let row = CUBE_POS_X as usize * LANES + UNIT_POS as usize / LINES;
    let member = UNIT_POS as usize % LINES;
    let mut sums = Vector::<f32, N>::new(0.0f32);
    if row < rows {
        let at = row / rows_of_expert * expert_stride + row % rows_of_expert * row_stride;
        for i in 0..lines.div_ceil(LINES) {
            let line = i * LINES + member;
            if line < lines {
                let value = Vector::<f32, N>::cast_from(w[at + line]);
                sums += value * value;
            }
        }
    }
    let mut sum = 0.0f32;
    #[unroll]
    for j in 0..width {
        sum += sums[j];
    }
    let total = over_members(sum);
    if member == 0 && row < rows {
        out[row] = total;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn norms_kernel<P: Float, F: Float, G: Float>(
    squares: &Array<f32>,
    products: &Array<P>,
    b: &Array<F>,
    gram: &Array<G>,
    out: &mut Array<f32>,
    rows_of_expert: usize,
    rows: usize,
    rank: usize,
    of_products: f32,
    of_gram: f32,
    of_zero: f32,
    #[define(P, F, G)] _dtypes: [StorageType; 3],
) {
    let row = CUBE_POS_X as usize * LANES + UNIT_POS as usize / LINES;
    let member = UNIT_POS as usize % LINES;
    let mut sum = 0.0f32;
    if row < rows {
        let gram_at = row / rows_of_expert * rank * rank;
        for i in 0..rank.div_ceil(LINES) {
            let column = i * LINES + member;
            if column < rank {
                let mut b_gram = 0.0f32;
                for k in 0..rank {
                    b_gram += f32::cast_from(b[row * rank + k])
                        * f32::cast_from(gram[gram_at + k * rank + column]);
                }
                let inner =
                    of_products * f32::cast_from(products[row * rank + column]) + of_gram * b_gram;
                sum += f32::cast_from(b[row * rank + column]) * inner;
            }
        }
    }
    let total = over_members(sum);
    if member == 0 && row < rows {
        let square = squares[row] + total;
        let norm = f32::sqrt(max(square, 0.0f32));
        out[row] = select(norm == 0.0f32, of_zero, norm);
    }
}

/// The sum over the units of a row, in the first of them. Every unit of the cube calls it.
#[cube]
fn over_members(sum: f32) -> f32 {
    let unit = UNIT_POS as usize;
    let mut shared = SharedMemory::<f32>::new_aligned(comptime!(LINES * LANES), 32usize);
    shared[unit] = sum;
    sync_cube();
    let mut total = 0.0f32;
    if unit % LINES == 0 {
        for member in 0..LINES {
            total += shared[unit + member];
        }
    }
    total
}
