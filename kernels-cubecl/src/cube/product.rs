//! The product of two blocks in shared memory, by plain units or by tensor cores.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::*;

/// A matrix in shared memory: `outer` runs of `inner` elements, `pitch` apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Block {
    pub outer: usize,
    pub inner: usize,
    pub pitch: usize,
    /// Elements of one access of device memory.
    pub width: usize,
    /// Elements of one access of shared memory.
    pub shared_width: usize,
}

impl Block {
    /// Elements between the starts of two blocks.
    pub fn len(&self) -> usize {
        self.outer * self.pitch
    }
}

/// `C [m, n] += L [m, k] R [k, n]`, and who computes which part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tile {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub left: Block,
    /// Whether the inner axis of `left` is `k`, or else `m`.
    pub left_inner_k: bool,
    pub right: Block,
    /// Whether the inner axis of `right` is `k`, or else `n`.
    pub right_inner_k: bool,
    /// Planes along `m`, `n` and `k`; those along `k` sum parts of it.
    pub planes: [usize; 3],
    /// Extent of `k` that the tensor cores take at once.
    pub step: usize,
    /// Elements from one row of the sums to the next.
    pub sums_pitch: usize,
    /// Elements of one access of the sums in shared memory.
    pub sums_width: usize,
}

/// Units of a cube.
pub(crate) const UNITS: usize = 256;
/// Units of a plane, where planes matter.
const PLANE: usize = 32;
/// Planes of a cube.
pub(crate) const PLANES: usize = UNITS / PLANE;
/// Rows and columns that the tensor cores take at once.
pub(crate) const SQUARE: usize = 16;

impl Tile {
    /// Rows, columns and steps of one plane, in squares of the tensor cores.
    fn share(&self) -> [usize; 3] {
        let [m, n, k] = self.planes;
        [
            self.m / SQUARE / m,
            self.n / SQUARE / n,
            self.k / self.step / k,
        ]
    }

    /// Elements of the sums of all planes in shared memory.
    pub fn sums_len(&self) -> usize {
        self.planes[2] * self.m * self.sums_pitch
    }
}

/// Who multiplies. Sums are f32.
#[cube]
pub(crate) trait Product: 'static + Send + Sync {
    /// The sums that a unit or a plane holds.
    type Sums: CubeType;

    /// Sums of nothing.
    fn zero(#[comptime] tile: Tile) -> Self::Sums;

    /// Adds the product of the blocks that start at element `left_at` and `right_at`.
    fn add<S: Float, ML: Size, MR: Size>(
        sums: &mut Self::Sums,
        left: &SharedMemory<Vector<S, ML>>,
        left_at: usize,
        right: &SharedMemory<Vector<S, MR>>,
        right_at: usize,
        #[comptime] tile: Tile,
    );

    /// Writes the sums down: one matrix `[m, n]` for each plane along `k`.
    fn store<MO: Size>(
        sums: &Self::Sums,
        to: &mut SharedMemory<Vector<f32, MO>>,
        #[comptime] tile: Tile,
    );
}

/// Every unit has its own elements of the sums. On every device, exact in f32.
pub(crate) struct Units;

#[cube]
impl Product for Units {
    type Sums = Array<f32>;

    fn zero(#[comptime] tile: Tile) -> Array<f32> {
        let mut sums = Array::<f32>::new(comptime!((tile.m * tile.n).div_ceil(UNITS)));
        #[unroll]
        for i in 0..comptime!((tile.m * tile.n).div_ceil(UNITS)) {
            sums[i] = 0.0f32;
        }
        sums
    }

    fn add<S: Float, ML: Size, MR: Size>(
        sums: &mut Array<f32>,
        left: &SharedMemory<Vector<S, ML>>,
        left_at: usize,
        right: &SharedMemory<Vector<S, MR>>,
        right_at: usize,
        #[comptime] tile: Tile,
    ) {
        let unit = UNIT_POS as usize;
        #[unroll]
        for i in 0..comptime!((tile.m * tile.n).div_ceil(UNITS)) {
            let place = unit + comptime!(i * UNITS);
            if place < comptime!(tile.m * tile.n) {
                let row = place / tile.n;
                let column = place % tile.n;
                let (left_start, left_step) = if comptime!(tile.left_inner_k) {
                    (left_at + row * tile.left.pitch, 1usize)
                } else {
                    (left_at + row, tile.left.pitch.runtime())
                };
                let (right_start, right_step) = if comptime!(tile.right_inner_k) {
                    (right_at + column * tile.right.pitch, 1usize)
                } else {
                    (right_at + column, tile.right.pitch.runtime())
                };
                let mut sum = sums[i];
                for k in 0..tile.k {
                    let l = f32::cast_from(left[left_start + k * left_step][0]);
                    let r = f32::cast_from(right[right_start + k * right_step][0]);
                    sum += l * r;
                }
                sums[i] = sum;
            }
        }
    }

    fn store<MO: Size>(
        sums: &Array<f32>,
        to: &mut SharedMemory<Vector<f32, MO>>,
        #[comptime] tile: Tile,
    ) {
        let unit = UNIT_POS as usize;
        #[unroll]
        for i in 0..comptime!((tile.m * tile.n).div_ceil(UNITS)) {
            let place = unit + comptime!(i * UNITS);
            if place < comptime!(tile.m * tile.n) {
                let row = place / tile.n;
                let column = place % tile.n;
                to[row * tile.sums_pitch + column] = Vector::new(sums[i]);
            }
        }
    }
}

/// Every plane has its own squares of the sums.
pub(crate) struct TensorCores;

#[cube]
impl Product for TensorCores {
    type Sums = Sequence<cmma::Matrix<f32>>;

    fn zero(#[comptime] tile: Tile) -> Sequence<cmma::Matrix<f32>> {
        let mut sums = Sequence::new();
        #[unroll]
        for _ in 0..comptime!(tile.share()[0] * tile.share()[1]) {
            sums.push(cmma::Matrix::<f32>::from_value(
                cmma::MatrixIdent::Accumulator,
                SQUARE,
                SQUARE,
                tile.step,
                cmma::MatrixLayout::Undefined,
                0.0f32,
            ));
        }
        sums
    }

    fn add<S: Float, ML: Size, MR: Size>(
        sums: &mut Sequence<cmma::Matrix<f32>>,
        left: &SharedMemory<Vector<S, ML>>,
        left_at: usize,
        right: &SharedMemory<Vector<S, MR>>,
        right_at: usize,
        #[comptime] tile: Tile,
    ) {
        let share = comptime!(tile.share());
        let (plane_m, plane_n, plane_k) = plane_of(tile);
        #[unroll]
        for s in 0..share[2] {
            let k = (plane_k * share[2] + s) * tile.step;
            let mut rights = Sequence::<cmma::Matrix<S>>::new();
            #[unroll]
            for j in 0..share[1] {
                let n = (plane_n * share[1] + j) * SQUARE;
                let at = if comptime!(tile.right_inner_k) {
                    right_at + n * tile.right.pitch + k
                } else {
                    right_at + k * tile.right.pitch + n
                };
                let layout = comptime!(if tile.right_inner_k {
                    cmma::MatrixLayout::ColMajor
                } else {
                    cmma::MatrixLayout::RowMajor
                });
                rights.push(square::<S, MR>(
                    right,
                    at,
                    cmma::MatrixIdent::B,
                    layout,
                    tile.right,
                    tile.step,
                ));
            }
            #[unroll]
            for i in 0..share[0] {
                let m = (plane_m * share[0] + i) * SQUARE;
                let at = if comptime!(tile.left_inner_k) {
                    left_at + m * tile.left.pitch + k
                } else {
                    left_at + k * tile.left.pitch + m
                };
                let layout = comptime!(if tile.left_inner_k {
                    cmma::MatrixLayout::RowMajor
                } else {
                    cmma::MatrixLayout::ColMajor
                });
                let l =
                    square::<S, ML>(left, at, cmma::MatrixIdent::A, layout, tile.left, tile.step);
                #[unroll]
                for j in 0..share[1] {
                    let sum = sums.index(comptime!(i * share[1] + j));
                    cmma::execute::<S, S, f32, f32>(&l, rights.index(j), sum, sum);
                }
            }
        }
    }

    fn store<MO: Size>(
        sums: &Sequence<cmma::Matrix<f32>>,
        to: &mut SharedMemory<Vector<f32, MO>>,
        #[comptime] tile: Tile,
    ) {
        let share = comptime!(tile.share());
        let (plane_m, plane_n, plane_k) = plane_of(tile);
        #[unroll]
        for i in 0..share[0] {
            #[unroll]
            for j in 0..share[1] {
                let m = (plane_m * share[0] + i) * SQUARE;
                let n = (plane_n * share[1] + j) * SQUARE;
                let at = (plane_k * tile.m + m) * tile.sums_pitch + n;
                let end = at + comptime!(SQUARE * tile.sums_pitch);
                cmma::store(
                    &mut to.slice_mut(at / tile.sums_width, end / tile.sums_width),
                    sums.index(comptime!(i * share[1] + j)),
                    comptime!(tile.sums_pitch as u32),
                    cmma::MatrixLayout::RowMajor,
                );
            }
        }
    }
}

/// Which share of a tile is this plane's, along `m`, `n` and `k`.
#[cube]
fn plane_of(#[comptime] tile: Tile) -> (usize, usize, usize) {
    let plane = UNIT_POS as usize / comptime!(PLANE);
    let along_m = comptime!(tile.planes[0]);
    let along_n = comptime!(tile.planes[1]);
    (
        plane % along_m,
        (plane / along_m) % along_n,
        plane / comptime!(along_m * along_n),
    )
}

#[cube]
fn square<S: Float, M: Size>(
    from: &SharedMemory<Vector<S, M>>,
    at: usize,
    #[comptime] ident: cmma::MatrixIdent,
    #[comptime] layout: cmma::MatrixLayout,
    #[comptime] block: Block,
    #[comptime] step: usize,
) -> cmma::Matrix<S> {
    // SAFETY: loaded on the next line.
    let matrix = unsafe { cmma::Matrix::<S>::uninitialized(ident, SQUARE, SQUARE, step, layout) };
    let start = at / block.shared_width;
    let end = comptime!(2 * block.outer * block.pitch / block.shared_width);
    cmma::load(
        &matrix,
        &from.slice(start, end),
        comptime!(block.pitch as u32),
    );
    matrix
}
