//! Blocks of half precision in shared memory, as copies fill them and tensor cores read them.
//!
//! A row consists of parts of 16 bytes: what one copy asks for, and what a lane names of a square of
//! eight by eight. Each row deals its parts out in another order, so that the same part of eight rows,
//! which is what the tensor cores read at once, lies in different banks.

use burn_cubecl::cubecl;
use burn_cubecl::cubecl::prelude::barrier::{Barrier, copy_async_checked};
use burn_cubecl::cubecl::prelude::*;

use super::activation::between;
use super::product::UNITS;
use crate::Activation;

/// Elements of a part.
pub(crate) const PART: usize = 8;
/// Columns of one sum of a plane.
pub(crate) const HALF: usize = 8;
/// Lanes that share the columns of a sum: each has two neighbours of two rows.
pub(crate) const MEMBERS: usize = 4;

/// The extents of a block. `parts` is a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Swizzled {
    pub rows: usize,
    pub parts: usize,
}

impl Swizzled {
    pub fn new(rows: usize, columns: usize) -> Self {
        let parts = columns / PART;
        debug_assert!(columns.is_multiple_of(PART) && parts.is_power_of_two());
        Self { rows, parts }
    }

    /// Parts of the whole block.
    pub fn len(&self) -> usize {
        self.rows * self.parts
    }
}

/// Which operand of a product a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operand {
    Left,
    Right,
}

/// Where a part of a row lies.
#[cube]
pub(crate) fn place(row: usize, part: usize, #[comptime] block: Swizzled) -> usize {
    let parts = comptime!(block.parts);
    let order = if comptime!(parts >= 8) {
        row % 8
    } else {
        row / comptime!(8 / parts) % parts
    };
    row * parts + (part ^ order)
}

/// How a block is filled from rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Feed {
    pub block: Swizzled,
    /// Elements of one access of device memory: a part, or 1 where rows do not allow it.
    pub width: usize,
    /// Function on the way in.
    pub between: Option<Activation>,
    /// Whether the columns that are there may begin or end within a part, which is then read.
    pub ragged: bool,
    /// Whether 32 rows at a time are dealt out so that the neighbours of a sum's lane are neighbours
    /// in the matrix: see [`dealt`].
    pub dealt: bool,
}

impl Feed {
    pub fn new(block: Swizzled, width: usize) -> Self {
        Self {
            block,
            width,
            between: None,
            ragged: false,
            dealt: false,
        }
    }

    fn copies(&self) -> bool {
        self.width == PART && self.between.is_none()
    }
}

/// What a block has of a matrix: elsewhere it holds zeros.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct There {
    pub first_row: usize,
    pub rows: usize,
    pub first_column: usize,
    pub columns: usize,
}

/// The first `rows` rows and `columns` columns.
#[cube]
pub(crate) fn first(rows: usize, columns: usize) -> There {
    There {
        first_row: 0usize.runtime(),
        rows,
        first_column: 0usize.runtime(),
        columns,
    }
}

/// Fills block `slot`, whose first element is at `start`. Whole parts that nothing is applied to are
/// copied behind the units' backs.
#[cube]
#[allow(clippy::too_many_arguments)]
pub(crate) fn feed<E: Float, NF: Size, N: Size>(
    from: &Array<Vector<E, NF>>,
    start: usize,
    stride: usize,
    there: There,
    scale: f32,
    to: &mut SharedMemory<Vector<E, N>>,
    #[comptime] slot: usize,
    #[comptime] feed: Feed,
) {
    let block = comptime!(feed.block);
    #[unroll]
    for i in 0..comptime!(block.len().div_ceil(UNITS)) {
        let id = UNIT_POS as usize + comptime!(i * UNITS);
        let row = id / block.parts;
        let part = id % block.parts;
        let column = part * PART;
        let at = start + row * stride + column;
        let row_there = row >= there.first_row && row < there.rows;
        if comptime!(block.len().is_multiple_of(UNITS)) || id < block.len() {
            let line = if comptime!(feed.dealt) {
                dealt(row)
            } else {
                row
            };
            let place = comptime!(slot * block.len()) + place(line, part, block);
            let some = row_there && column + PART > there.first_column && column < there.columns;
            let all = row_there && column >= there.first_column && column + PART <= there.columns;
            let mut by_element = true.runtime();
            if comptime!(feed.copies()) {
                by_element = some && !all;
                if comptime!(!feed.ragged) || !by_element {
                    let first = select(all, at / PART, 0usize);
                    let end = first + select(all, 1usize, 0usize);
                    copy_async_checked(
                        &from.slice(first, end),
                        &mut to.slice_mut(place, place + 1).downcast(),
                        comptime!(PART as u32),
                    );
                }
            }
            if comptime!(!feed.copies() || feed.ragged) && by_element {
                let mut value = Vector::<E, N>::new(E::new(0.0));
                #[unroll]
                for access in 0..comptime!(PART / feed.width) {
                    let offset = comptime!(access * feed.width);
                    let c = column + offset;
                    if row_there && c + feed.width > there.first_column && c < there.columns {
                        let elements = from[(at + offset) / feed.width];
                        #[unroll]
                        for j in 0..feed.width {
                            let c = c + j;
                            value[comptime!(offset + j)] = select(
                                c >= there.first_column && c < there.columns,
                                elements[j],
                                E::new(0.0),
                            );
                        }
                    }
                }
                if comptime!(feed.between.is_some()) {
                    let applied = between::<N>(Vector::cast_from(value), scale, feed.between);
                    value = Vector::cast_from(applied);
                }
                to[place] = value;
            }
        }
    }
}

/// Where a column of the output is among those that a plane multiplies: a lane of four sums has pairs
/// of neighbours eight columns apart, and eight neighbours in the output.
#[cube]
pub(crate) fn dealt(column: usize) -> usize {
    column / 32 * 32 + column % 8 / 2 * 8 + column / 8 % 4 * 2 + column % 2
}

/// The `[16, 16]` of an operand in block `slot` from its line `line` and element `k` of the sum on: four
/// registers, of the left operand for both halves of its rows at both halves of the sum, of the right one for
/// both halves of the sum at both halves of its columns.
///
/// `along_k`: the rows of the block are those of the sum.
#[cube]
pub(crate) fn square<E: Float, N: Size, P: Size>(
    memory: &SharedMemory<Vector<E, N>>,
    #[comptime] slot: usize,
    line: usize,
    k: usize,
    #[comptime] block: Swizzled,
    #[comptime] operand: Operand,
    #[comptime] along_k: bool,
) -> Array<Vector<E, P>> {
    let lane = UNIT_POS as usize % 32;
    // Lanes 8 i to 8 i + 7 name the rows of register i.
    let (row, part) = if comptime!((operand == Operand::Left) != along_k) {
        (lane % 16, lane / 16)
    } else {
        (lane % 8 + lane / 16 * 8, lane / 8 % 2)
    };
    let (row, part) = if comptime!(along_k) {
        (k + row, line / PART + part)
    } else {
        (line + row, k / PART + part)
    };
    // Where they lie in pairs, a part has several.
    let width = N::value();
    let at = (comptime!(slot * block.len()) + place(row, part, block)) * comptime!(PART / width);
    let mma = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    mma.load_matrix::<Vector<E, N>, P>(
        &memory.slice(at, at + 1),
        comptime!(match operand {
            Operand::Left => cmma::MatrixIdent::A,
            Operand::Right => cmma::MatrixIdent::B,
        }),
        4usize,
        along_k,
    )
}

/// The sums of `[16, 8 halves]` of a plane, all zero.
#[cube]
pub(crate) fn zeros<P: Size>(#[comptime] halves: usize) -> Sequence<Array<Vector<f32, P>>> {
    let mut sums = Sequence::<Array<Vector<f32, P>>>::new();
    #[unroll]
    for _ in 0..halves {
        let mut sum = Array::<Vector<f32, P>>::new(2usize);
        sum[0] = Vector::new(0.0f32);
        sum[1] = Vector::new(0.0f32);
        sums.push(sum);
    }
    sums
}

/// Adds the product of `left` and the two halves of `right` to the sums from `half` on.
#[cube]
pub(crate) fn multiply<E: Float, P: Size>(
    left: &Array<Vector<E, P>>,
    right: &Array<Vector<E, P>>,
    sums: &mut Sequence<Array<Vector<f32, P>>>,
    #[comptime] half: usize,
) {
    let mma = cmma::MmaDefinition::<E, E, f32>::new(16usize, 8usize, 16usize);
    #[unroll]
    for i in 0..2usize {
        let mut columns = Array::<Vector<E, P>>::new(2usize);
        columns[0] = right[comptime!(2 * i)];
        columns[1] = right[comptime!(2 * i + 1)];
        mma.execute_inplace(left, &columns, sums.index_mut(comptime!(half + i)));
    }
}

/// Writes down `halves` of a plane's sums, times `scale`, from row `row` and column `column` on, in rows
/// that are `pitch` apart.
#[cube]
pub(crate) fn store<MO: Size, P: Size>(
    sums: &Sequence<Array<Vector<f32, P>>>,
    to: &mut SharedMemory<Vector<f32, MO>>,
    row: usize,
    column: usize,
    scale: f32,
    #[comptime] first: usize,
    #[comptime] halves: usize,
    #[comptime] pitch: usize,
    #[comptime] width: usize,
) {
    let lane = UNIT_POS as usize % 32;
    let row = row + lane / MEMBERS;
    let column = column + lane % MEMBERS * 2;
    #[unroll]
    for half in 0..halves {
        #[unroll]
        for i in 0..2usize {
            let pair = sums.index(comptime!(first + half))[i] * Vector::new(scale);
            let at = (row + comptime!(i * HALF)) * pitch + column + comptime!(half * HALF);
            if comptime!(width == 2) {
                let mut both = Vector::<f32, MO>::new(pair[0]);
                both[1] = pair[1];
                to[at / 2] = both;
            } else {
                to[at] = Vector::new(pair[0]);
                to[at + 1] = Vector::new(pair[1]);
            }
        }
    }
}

/// A barrier for each of `count` blocks, which completes when what all units have asked for is there.
#[cube]
pub(crate) fn barriers(
    #[comptime] count: usize,
    #[comptime] units: u32,
) -> Sequence<Shared<Barrier>> {
    let mut barriers = Sequence::<Shared<Barrier>>::new();
    #[unroll]
    for _ in 0..count {
        barriers.push(Barrier::shared_uninit());
    }
    if UNIT_POS == 0 {
        #[unroll]
        for i in 0..count {
            barriers.index(i).init_manual(units);
        }
    }
    sync_cube();
    barriers
}

/// Arrives at a barrier with all that this unit has asked for.
#[cube]
pub(crate) fn arrive(barriers: &Sequence<Shared<Barrier>>, #[comptime] index: usize) {
    let barrier = barriers.index(index);
    barrier.commit_copy_async();
    barrier.arrive();
}
