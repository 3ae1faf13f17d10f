//! Dropout by counter, on the device: the words are those of the host's generator.

use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::prelude::*;
use burn_cubecl::cubecl::{self, calculate_cube_count_elemwise};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;

use super::table::TOKEN_WORDS;
use crate::DropoutMask;
use crate::dropout::FEATURES;
use crate::philox::{MULTIPLIERS, ROUNDS, WEYL};

/// Units of a cube.
const UNITS: usize = 256;

/// See [`dropout`](crate::dropout).
pub(super) fn run<R: CubeRuntime>(x: CubeTensor<R>, mask: &DropoutMask) -> CubeTensor<R> {
    let [rows, columns] = x.meta.shape().dims();
    let (client, device, dtype) = (x.client.clone(), x.device.clone(), x.dtype);
    let x = into_contiguous(x);
    let shape = x.meta.shape().clone();
    let out = empty_device_contiguous_dtype(client.clone(), device.clone(), shape, dtype);
    let len = rows * columns;
    if len == 0 {
        return out;
    }
    let tokens = mask.rows.token_table::<R>(&client, &device);
    let units = rows * columns.div_ceil(FEATURES);
    let cubes = CubeDim::new_1d(UNITS as u32);
    // SAFETY: the length is the number of elements the buffer was made for.
    let arg =
        |tensor: &CubeTensor<R>| unsafe { ArrayArg::from_raw_parts(tensor.handle.clone(), len) };
    // SAFETY: the length is that of the table.
    let words = unsafe { ArrayArg::from_raw_parts(tokens.handle, tokens.words) };
    // SAFETY: a unit reads and writes elements of one row below `rows` at columns below `columns`,
    // and words of a row that the table has.
    unsafe {
        dropout_kernel::launch_unchecked::<R>(
            &client,
            calculate_cube_count_elemwise(&client, units, cubes),
            cubes,
            AddressType::from_len(len),
            arg(&x),
            arg(&out),
            words,
            rows,
            mask.rows.rows(),
            columns,
            mask.features.first,
            mask.features.width,
            mask.features.stride,
            mask.first_expert,
            mask.key[0],
            mask.key[1],
            mask.threshold(),
            mask.scale() as f32,
            dtype.into(),
        )
    }
    out
}

/// A unit takes as many columns of a row as a counter has words.
#[cube(launch_unchecked, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
fn dropout_kernel<E: Float>(
    x: &Array<E>,
    out: &mut Array<E>,
    tokens: &Array<u32>,
    rows: usize,
    rows_of_experts: usize,
    columns: usize,
    first: u32,
    width: u32,
    stride: u32,
    first_expert: u32,
    key0: u32,
    key1: u32,
    threshold: u32,
    scale: f32,
    #[define(E)] _dtype: StorageType,
) {
    let per_row = columns.div_ceil(FEATURES);
    let row = ABSOLUTE_POS / per_row;
    let column = ABSOLUTE_POS % per_row * FEATURES;
    if row < rows {
        let end = min(column + FEATURES, columns);
        if row < rows_of_experts {
            let token = row * TOKEN_WORDS;
            let expert = first_expert + tokens[token + 2];
            let mut drawn = u32::MAX.runtime();
            let mut words = Words {
                w0: 0u32,
                w1: 0u32,
                w2: 0u32,
                w3: 0u32,
            };
            for at in column..end {
                let local = u32::cast_from(at);
                let feature = first + local / width * stride + local % width;
                let block = feature / comptime!(FEATURES as u32);
                // One draw serves all columns where a shard starts at a multiple of four.
                if block != drawn {
                    let next = philox(tokens[token], tokens[token + 1], block, expert, key0, key1);
                    words.w0 = next.w0;
                    words.w1 = next.w1;
                    words.w2 = next.w2;
                    words.w3 = next.w3;
                    drawn = block;
                }
                let word = feature % comptime!(FEATURES as u32);
                let low = select(word == 0u32, words.w0, words.w1);
                let high = select(word == 2u32, words.w2, words.w3);
                let bits = select(word < 2u32, low, high);
                let value = f32::cast_from(x[row * columns + at]) * scale;
                out[row * columns + at] = E::cast_from(select(bits >= threshold, value, 0.0f32));
            }
        } else {
            for at in column..end {
                out[row * columns + at] = E::cast_from(0.0f32);
            }
        }
    }
}

/// The words of one counter.
#[derive(CubeType)]
struct Words {
    w0: u32,
    w1: u32,
    w2: u32,
    w3: u32,
}

#[cube]
fn philox(c0: u32, c1: u32, c2: u32, c3: u32, key0: u32, key1: u32) -> Words {
    let mut w0 = c0;
    let mut w1 = c1;
    let mut w2 = c2;
    let mut w3 = c3;
    let mut k0 = key0;
    let mut k1 = key1;
    let by0 = comptime!(MULTIPLIERS[0]).runtime();
    let by1 = comptime!(MULTIPLIERS[1]).runtime();
    for _ in 0..ROUNDS {
        let high0 = w0.mul_hi(by0);
        let low0 = w0 * by0;
        let high1 = w2.mul_hi(by1);
        let low1 = w2 * by1;
        w0 = high1 ^ w1 ^ k0;
        w1 = low1;
        w2 = high0 ^ w3 ^ k1;
        w3 = low0;
        k0 += comptime!(WEYL[0]);
        k1 += comptime!(WEYL[1]);
    }
    Words { w0, w1, w2, w3 }
}
