//! Brings blocks of device memory into shared memory, zeros where there is nothing.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

use super::activation::between;
use super::product::{Block, UNITS};
use crate::Activation;

impl Block {
    /// Accesses of one unit.
    pub fn accesses(&self) -> usize {
        (self.outer * self.inner / self.width).div_ceil(UNITS)
    }
}

/// Asks for the block whose first element is `at` and whose runs are `stride` elements apart. Beyond
/// the first `outer` runs or the first `inner` elements of a run there are zeros.
#[cube]
pub(crate) fn fetch<E: Float, N: Size>(
    from: &Array<Vector<E, N>>,
    at: usize,
    stride: usize,
    outer: usize,
    inner: usize,
    into: &mut Array<Vector<E, N>>,
    #[comptime] block: Block,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!(block.accesses()) {
        let place = (unit + comptime!(i * UNITS)) * block.width;
        let row = place / block.inner;
        let column = place % block.inner;
        let mut value = Vector::<E, N>::new(E::new(0.0));
        if row < outer && column < inner && row < block.outer {
            value = from[(at + row * stride + column) / block.width];
        }
        into[i] = value;
    }
}

/// Puts what was fetched into shared memory at element `at`, through what stands between the factors.
#[cube]
pub(crate) fn put<E: Float, N: Size, S: Float, M: Size>(
    from: &Array<Vector<E, N>>,
    to: &mut SharedMemory<Vector<S, M>>,
    at: usize,
    scale: f32,
    #[comptime] activation: Option<Activation>,
    #[comptime] block: Block,
) {
    let unit = UNIT_POS as usize;
    #[unroll]
    for i in 0..comptime!(block.accesses()) {
        let place = (unit + comptime!(i * UNITS)) * block.width;
        let row = place / block.inner;
        let column = place % block.inner;
        if row < block.outer {
            let start = (at + row * block.pitch + column) / block.shared_width;
            if comptime!(activation.is_none() && block.shared_width == block.width) {
                to[start] = Vector::cast_from(from[i]);
            } else {
                let value = between::<N>(Vector::cast_from(from[i]), scale, activation);
                if comptime!(block.shared_width == block.width) {
                    to[start] = Vector::cast_from(value);
                } else {
                    #[unroll]
                    for j in 0..comptime!(block.width) {
                        to[start + j] = Vector::new(S::cast_from(value[j]));
                    }
                }
            }
        }
    }
}
