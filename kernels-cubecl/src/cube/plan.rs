//! Which kernel a product gets: what multiplies, and how large its blocks are.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::client::ComputeClient;
use burn_cubecl::cubecl::features::MmaConfig;
use burn_cubecl::cubecl::ir::{ElemType, FloatKind, StorageType};
use burn_cubecl::tensor::CubeTensor;

use super::direct::{self, Direct};
use super::direct_outer::DirectOuter;
use super::outer;
use super::product::{Block, PLANES, SQUARE, Tile, UNITS};
use super::project::{Finish, Plan};
use super::view::{Stack, View};
use crate::{Activation, Compute, Layout, Strategy};

/// Rows of one expert that a cube takes at once.
pub(crate) const ROWS: usize = 32;
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

fn storage(dtype: DType) -> Option<StorageType> {
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

/// A product that may go straight through registers.
pub(crate) struct DirectShape {
    pub n: usize,
    pub k: usize,
    pub between: Option<Activation>,
    pub finish: Finish,
    pub transposed: bool,
    pub grouped: bool,
}

/// The kernel without shared memory, where element type, device and extents allow it.
pub(crate) fn direct<R: CubeRuntime>(
    client: &ComputeClient<R>,
    precision: Precision,
    shape: &DirectShape,
    x: &View,
    w: &Stack,
    out: &View,
) -> Option<Direct> {
    let &DirectShape { n, k, .. } = shape;
    if precision.step != Some(SQUARE) || !registers(client, precision.block) {
        return None;
    }
    let wide = n > k && n > 64;
    let shared = wide || shape.between.is_some();
    // The narrow side is the one that all planes share.
    if shared && k > MAX_RANK {
        return None;
    }
    let width = [8, 4]
        .into_iter()
        .find(|width| k.is_multiple_of(*width) && (shape.transposed || w.allows(*width)))?;
    let width = if shared && k <= 16 { 4 } else { width };
    let n_tiles = if wide {
        4
    } else {
        n.div_ceil(8).next_power_of_two().min(8)
    };
    if shape.transposed && !(n.is_multiple_of(n_tiles) && w.allows(n_tiles)) {
        return None;
    }
    let x_by_row = x.layout == Layout::ByToken;
    if x_by_row && !x.allows(width) || !x_by_row && !shared {
        return None;
    }
    // Fewer chunks at once where each has more columns: their registers are what limits a processor.
    let (planes, ahead) = if wide {
        ([2, 4, 1], 1)
    } else {
        let planes_n = n.div_ceil(8 * n_tiles).next_power_of_two();
        ([1, planes_n, PLANES / planes_n], (8 / n_tiles).min(4))
    };
    let out_by_row = out.layout == Layout::ByToken;
    let fits = |width: usize| out.allows(width) && n.is_multiple_of(width);
    let out_width = match shape.finish {
        Finish::Slope(_) => 1,
        _ if !out_by_row => 1,
        _ => [8, 4, 2]
            .into_iter()
            .find(|width| *width <= 2 * n_tiles && fits(*width))
            .unwrap_or(1),
    };
    // The sums of a single plane are written from registers, row by row.
    if wide && (!out_by_row || matches!(shape.finish, Finish::Slope(_))) {
        return None;
    }
    let chunk = 4 * width;
    let tile = direct::tile(planes, planes[1] * 8 * n_tiles, out_width.min(4), chunk);
    Some(Direct {
        plan: Plan {
            tile,
            blocks: 1,
            between: shape.between,
            finish: shape.finish,
            out_by_row,
            out_width,
            grouped: shape.grouped,
        },
        n_tiles,
        width,
        ahead,
        shared: shared.then(|| k.next_multiple_of(chunk * planes[2] * ahead)),
        transposed: shape.transposed,
        x_by_row,
    })
}

/// The same for the gradient of a factor.
pub(crate) fn direct_outer<R: CubeRuntime>(
    client: &ComputeClient<R>,
    precision: Precision,
    [rank, n]: [usize; 2],
    low: &View,
    wide: &View,
    plan: impl FnOnce(Tile) -> outer::Plan,
) -> Option<DirectOuter> {
    const N_TILES: usize = 4;
    if precision.step != Some(SQUARE) || !registers(client, precision.block) {
        return None;
    }
    let m_tiles = rank.div_ceil(SQUARE).next_power_of_two().min(4);
    let planes_m = rank.div_ceil(SQUARE * m_tiles).next_power_of_two();
    let low_by_row = low.layout == Layout::ByToken;
    let slots = 2 * m_tiles;
    let fits = wide.allows(N_TILES)
        && n.is_multiple_of(N_TILES)
        && (!low_by_row || low.allows(slots) && rank.is_multiple_of(slots));
    fits.then(|| {
        let mut tile = direct::tile([planes_m, 1, PLANES / planes_m], 8 * N_TILES, 1, SQUARE);
        tile.m = planes_m * m_tiles * SQUARE;
        DirectOuter {
            plan: plan(tile),
            m_tiles,
            n_tiles: N_TILES,
            ahead: if m_tiles <= 2 { 2 } else { 1 },
            low_by_row,
        }
    })
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
