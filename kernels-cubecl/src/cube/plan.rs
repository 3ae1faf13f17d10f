//! Which kernel a product gets: what multiplies, and how large its blocks are.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::client::ComputeClient;
use burn_cubecl::cubecl::features::MmaConfig;
use burn_cubecl::cubecl::ir::{BarrierLevel, ElemType, FloatKind, OpaqueType, StorageType};
use burn_cubecl::tensor::CubeTensor;

use super::deep::Deep;
use super::narrow::Narrow;
use super::outer;
use super::product::{Block, PLANES, SQUARE, Tile, UNITS};
use super::project::{Finish, Plan};
use super::swizzled::PART;
use super::view::{Stack, View};
use super::wide::Wide;
use crate::{Activation, Compute, Layout, Strategy};

/// Rows of one expert that a cube takes at once.
pub(crate) const ROWS: usize = 32;
/// The same where the output is wide: a weight is read once for as many rows.
pub(crate) const WIDE_ROWS: usize = 128;
/// Planes along the rows of a narrow output.
const ROW_PLANES: usize = ROWS / SQUARE;
/// Columns of a narrow output that one plane has the registers for.
const COLUMNS_AT_ONCE: usize = 64;
/// The largest rank of the kernels. A weight with both extents above it is no adapter's.
pub(crate) const MAX_RANK: usize = 256;
/// Elements along the sum that tensor cores take into shared memory at once: as many as keep loads
/// under way while the block before is multiplied, and no more than shared memory holds twice.
const STAGE: usize = 8192;
/// The same for plain units, whose shared memory may be 32 KiB in all.
const UNIT_DEPTH: usize = 16;
/// Shared memory of the largest plan for plain units, in bytes.
const UNIT_MEMORY: usize = 24 << 10;
/// Of the largest plan for tensor cores.
const TENSOR_MEMORY: usize = 160 << 10;

/// What multiplies the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Precision {
    /// Of the tensors.
    pub element: StorageType,
    /// Of the blocks in shared memory.
    pub block: StorageType,
    /// The extent of the sum that tensor cores take at once; without them `None`.
    pub step: Option<usize>,
}

impl Precision {
    /// None where the per-expert path is asked for, or where the device cannot do otherwise.
    pub fn of<R: CubeRuntime>(x: &CubeTensor<R>, rank: usize, compute: Compute) -> Option<Self> {
        if compute.strategy == Strategy::PerExpert || supported(&x.client, x.dtype, rank).is_err() {
            return None;
        }
        let element = storage(x.dtype)?;
        let float = |kind| StorageType::Scalar(ElemType::Float(kind));
        let cores = match x.dtype {
            DType::F32 if compute.tf32 => Some((float(FloatKind::TF32), 8)),
            DType::F32 => None,
            _ => Some((element, 16)),
        };
        let cores = cores.filter(|(block, step)| tensor_cores(&x.client, *block, *step));
        Some(match cores {
            Some((block, step)) => Self {
                element,
                block,
                step: Some(step),
            },
            None => Self {
                element,
                block: float(FloatKind::F32),
                step: None,
            },
        })
    }
}

pub(crate) fn storage(dtype: DType) -> Option<StorageType> {
    let kind = match dtype {
        DType::F32 => FloatKind::F32,
        DType::F16 => FloatKind::F16,
        DType::BF16 => FloatKind::BF16,
        _ => return None,
    };
    Some(StorageType::Scalar(ElemType::Float(kind)))
}

fn tensor_cores<R: CubeRuntime>(
    client: &ComputeClient<R>,
    block: StorageType,
    step: usize,
) -> bool {
    let hardware = &client.properties().hardware;
    client.features().matmul.cmma.contains(&MmaConfig {
        a_type: block,
        b_type: block,
        cd_type: StorageType::Scalar(ElemType::Float(FloatKind::F32)),
        m: SQUARE as u32,
        n: SQUARE as u32,
        k: step as u32,
    }) && hardware.plane_size_min == 32
        && hardware.plane_size_max == 32
        && hardware.max_shared_memory_size >= TENSOR_MEMORY
}

/// Whether the device has kernels for adapters of this type and rank, or why not.
pub(crate) fn supported<R: CubeRuntime>(
    client: &ComputeClient<R>,
    dtype: DType,
    rank: usize,
) -> Result<(), String> {
    let hardware = &client.properties().hardware;
    let Some(element) = storage(dtype) else {
        return Err(format!("the kernels have no {dtype:?}"));
    };
    if !client.properties().supports_type(element) {
        return Err(format!("the device has no {dtype:?}"));
    }
    if rank > MAX_RANK {
        return Err(format!("rank {rank} is above the kernels' {MAX_RANK}"));
    }
    if (hardware.max_units_per_cube as usize) < UNITS {
        let units = hardware.max_units_per_cube;
        return Err(format!(
            "the device has {units} units a cube, {UNITS} are needed"
        ));
    }
    if hardware.max_shared_memory_size < UNIT_MEMORY {
        let bytes = hardware.max_shared_memory_size;
        return Err(format!(
            "the device has {bytes} bytes of shared memory, {UNIT_MEMORY} are needed"
        ));
    }
    Ok(())
}

/// How an operand of a product lies: along which axis its runs are, and how many elements of device
/// memory can be read at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    pub inner_k: bool,
    pub width: usize,
}

/// Blocks for `[m, n]` of the output where the sum is over `k`.
///
/// `m` or `n` is as large as the rank where that is the narrow side: then the planes split the sum
/// among them, since one plane's squares cover the output.
pub(crate) fn tile(
    [m, n, k]: [usize; 3],
    left: Side,
    right: Side,
    sums_width: usize,
    precision: Precision,
) -> Tile {
    match precision.step {
        Some(step) => tensor_tile([m, n, k], left, right, sums_width, step),
        None => unit_tile([m, n], left, right),
    }
}

fn tensor_tile(
    [m, n, k]: [usize; 3],
    left: Side,
    right: Side,
    sums_width: usize,
    step: usize,
) -> Tile {
    let (planes_m, m) = share(m);
    let (planes_n, n) = share(n);
    let planes_k = (PLANES / planes_m / planes_n).max(1);
    debug_assert_eq!(planes_m * planes_n * planes_k, PLANES);
    // Half as many elements where they are twice as large.
    let deepest = STAGE * step / 16 / m.max(n);
    let shallowest = planes_k * step;
    let depth = deepest
        .min(k.next_multiple_of(shallowest))
        .next_multiple_of(shallowest);
    let block = |extent: usize, side: Side| {
        let (outer, inner) = if side.inner_k {
            (extent, depth)
        } else {
            (depth, extent)
        };
        Block {
            outer,
            inner,
            // Eight more: then the rows of a square lie in different banks.
            pitch: inner + 8,
            width: side.width,
            shared_width: side.width,
        }
    };
    Tile {
        m,
        n,
        k: depth,
        left: block(m, left),
        left_inner_k: left.inner_k,
        right: block(n, right),
        right_inner_k: right.inner_k,
        planes: [planes_m, planes_n, planes_k],
        step,
        sums_pitch: n + 4,
        sums_width,
    }
}

/// Planes along an extent and the extent they cover: one plane takes at most two squares.
fn share(extent: usize) -> (usize, usize) {
    let squares = extent.div_ceil(SQUARE);
    let planes = squares.div_ceil(2).next_power_of_two().min(PLANES);
    (planes, squares.div_ceil(planes) * planes * SQUARE)
}

fn unit_tile([m, n]: [usize; 2], left: Side, right: Side) -> Tile {
    let block = |extent: usize, side: Side| {
        let (outer, inner) = if side.inner_k {
            (extent, UNIT_DEPTH)
        } else {
            (UNIT_DEPTH, extent)
        };
        Block {
            outer,
            inner,
            // One more: then neighbours along either axis lie in different banks.
            pitch: inner + 1,
            width: side.width,
            shared_width: 1,
        }
    };
    Tile {
        m,
        n,
        k: UNIT_DEPTH,
        left: block(m, left),
        left_inner_k: left.inner_k,
        right: block(n, right),
        right_inner_k: right.inner_k,
        planes: [1, 1, 1],
        step: 1,
        sums_pitch: n + 1,
        sums_width: 1,
    }
}

/// A product as it is asked for.
pub(crate) struct Shape {
    pub n: usize,
    pub k: usize,
    /// Rows of the output.
    pub rows: usize,
    pub between: Option<Activation>,
    pub finish: Finish,
    pub transposed: bool,
    pub grouped: bool,
}

/// A kernel whose blocks are on their way while others are multiplied.
pub(crate) enum Copied {
    Narrow(Narrow),
    Wide(Wide),
}

/// The kernel that copies, where element type, device and extents allow it.
pub(crate) fn copied<R: CubeRuntime>(
    client: &ComputeClient<R>,
    precision: Precision,
    shape: &Shape,
    x: &View,
    w: &Stack,
    out: &View,
) -> Option<Copied> {
    let &Shape { n, k, .. } = shape;
    let inner = if shape.transposed { n } else { k };
    if !copies(client, precision) || !w.allows(PART) || !inner.is_multiple_of(PART) {
        return None;
    }
    if shape.between.is_some() || n > k && n > COLUMNS_AT_ONCE {
        wide(shape, x, out).map(Copied::Wide)
    } else {
        narrow(client, shape, x, out).map(Copied::Narrow)
    }
}

fn narrow<R: CubeRuntime>(
    client: &ComputeClient<R>,
    shape: &Shape,
    x: &View,
    out: &View,
) -> Option<Narrow> {
    let &Shape { n, k, .. } = shape;
    let by_parts = x.layout == Layout::ByToken && x.allows(PART) && k.is_multiple_of(PART);
    if !by_parts || n > MAX_RANK {
        return None;
    }
    let out_by_row = out.layout == Layout::ByToken;
    let out_width = match shape.finish {
        Finish::Slope(_) => 1,
        _ if !out_by_row => 1,
        _ => [8, 4, 2]
            .into_iter()
            .find(|width| out.allows(*width) && n.is_multiple_of(*width))
            .unwrap_or(1),
    };
    let columns = n.next_power_of_two().max(SQUARE);
    let planes_n = columns.div_ceil(COLUMNS_AT_ONCE);
    let planes_k = PLANES / ROW_PLANES / planes_n;
    let depth = if planes_n == 1 { 128 } else { 64 };
    let tile = Tile {
        sums_width: out_width.min(2),
        ..copied_tile([ROWS, columns, depth], [ROW_PLANES, planes_n, planes_k])
    };
    let chunks = k.div_ceil(depth);
    // A processor with a single cube has room for all of the sum, and nothing else to do meanwhile.
    let alone = shape.rows.div_ceil(ROWS) <= processors(client);
    let wanted = if alone { chunks } else { chunks.min(4) };
    let ring = ring(client, &tile, wanted)?;
    Some(Narrow {
        plan: Plan {
            tile,
            blocks: ring,
            between: None,
            finish: shape.finish,
            out_by_row,
            out_width,
            grouped: shape.grouped,
        },
        ring,
        whole: ring >= chunks,
        transposed: shape.transposed,
    })
}

fn wide(shape: &Shape, x: &View, out: &View) -> Option<Wide> {
    let &Shape { n, k, .. } = shape;
    let by_parts = out.layout == Layout::ByToken && out.allows(PART) && n.is_multiple_of(PART);
    if !by_parts || k > MAX_RANK || matches!(shape.finish, Finish::Slope(_)) {
        return None;
    }
    // What is added to waits in registers: half as many columns.
    let columns = if shape.finish == Finish::Add { 64 } else { 128 };
    let depth = k.next_power_of_two().max(SQUARE);
    let x_by_row = x.layout == Layout::ByToken;
    let x_by_parts = x_by_row && x.allows(PART) && k.is_multiple_of(PART);
    Some(Wide {
        plan: Plan {
            tile: copied_tile([WIDE_ROWS, columns, depth], [1, PLANES, 1]),
            blocks: 1,
            between: shape.between,
            finish: shape.finish,
            out_by_row: true,
            out_width: PART,
            grouped: shape.grouped,
        },
        x_width: if x_by_parts { PART } else { 1 },
        x_by_row,
        transposed: shape.transposed,
    })
}

/// The same for the gradient of a factor over `rows` rows of each expert.
pub(crate) fn deep<R: CubeRuntime>(
    client: &ComputeClient<R>,
    precision: Precision,
    [experts, rank, n]: [usize; 3],
    low: &View,
    wide: &View,
    plan: impl FnOnce(Tile) -> outer::Plan,
) -> Option<Deep> {
    if !copies(client, precision) || !wide.allows(PART) || !n.is_multiple_of(PART) {
        return None;
    }
    let lines = rank.next_power_of_two().clamp(SQUARE, 64);
    // Fewer columns a cube where half of the processors would have none.
    let cubes = experts * rank.div_ceil(lines) * n.div_ceil(64);
    let columns = if 2 * cubes > processors(client) {
        64
    } else {
        32
    };
    let planes_n = columns / 32;
    let tile = copied_tile([lines, columns, 128], [1, planes_n, PLANES / planes_n]);
    let low_by_row = low.layout == Layout::ByToken;
    // Runs along the rows may begin and end within a part.
    let low_by_parts = low.allows(PART) && (!low_by_row || rank.is_multiple_of(PART));
    Some(Deep {
        ring: ring(client, &tile, 3)?,
        plan: plan(tile),
        low_width: if low_by_parts { PART } else { 1 },
        low_by_row,
    })
}

/// A tile of blocks whose extents say all.
fn copied_tile([m, n, k]: [usize; 3], planes: [usize; 3]) -> Tile {
    let none = Block {
        outer: 0,
        inner: 0,
        pitch: 0,
        width: 1,
        shared_width: 1,
    };
    Tile {
        m,
        n,
        k,
        left: none,
        left_inner_k: true,
        right: none,
        right_inner_k: true,
        planes,
        step: SQUARE,
        sums_pitch: n + 4,
        sums_width: 1,
    }
}

/// Blocks of a ring: as many as are wanted and shared memory holds, at least two.
fn ring<R: CubeRuntime>(client: &ComputeClient<R>, tile: &Tile, wanted: usize) -> Option<usize> {
    let bytes = 2 * (tile.m + tile.n) * tile.k;
    let others = 4 * tile.sums_len() + 1024;
    let memory = client.properties().hardware.max_shared_memory_size;
    let most = memory.saturating_sub(others) / bytes;
    (most >= 2).then(|| wanted.clamp(2, most))
}

/// Whether the device copies into shared memory while it computes, and multiplies `[16, 16]` by
/// `[16, 8]` from there.
fn copies<R: CubeRuntime>(client: &ComputeClient<R>, precision: Precision) -> bool {
    let features = client.features();
    let barrier = StorageType::Opaque(OpaqueType::Barrier(BarrierLevel::Cube));
    precision.step == Some(SQUARE)
        && registers(client, precision.block)
        && features.matmul.ldmatrix.contains(&precision.block)
        && features.copy_async
        && client.properties().supports_type(barrier)
}

pub(crate) fn processors<R: CubeRuntime>(client: &ComputeClient<R>) -> usize {
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    processors.unwrap_or(1) as usize
}

/// Whether the device multiplies `[16, 16]` by `[16, 8]` from registers.
fn registers<R: CubeRuntime>(client: &ComputeClient<R>, block: StorageType) -> bool {
    client.features().matmul.mma.contains(&MmaConfig {
        a_type: block,
        b_type: block,
        cd_type: StorageType::Scalar(ElemType::Float(FloatKind::F32)),
        m: 16,
        n: 8,
        k: 16,
    })
}

/// The largest width that `fits` among those the device has.
pub(crate) fn width<R: CubeRuntime>(
    client: &ComputeClient<R>,
    elem_size: usize,
    fits: impl Fn(usize) -> bool,
) -> usize {
    client
        .io_optimized_vector_sizes(elem_size)
        .find(|width| *width <= 8 && fits(*width))
        .unwrap_or(1)
}
