//! The row groups as kernels read them, on the device.

use std::sync::PoisonError;

use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::client::ComputeClient;
use burn_cubecl::cubecl::prelude::ArrayArg;
use burn_cubecl::cubecl::server::Handle;

use super::plan::{ROWS, WIDE_ROWS};
use super::project::{NO_EXPERT, TILE_WORDS};
use crate::RowGroups;
use crate::philox::halves;

/// One buffer of words: `[expert, first row, end row]` for each tile of at most [`ROWS`] rows of one
/// expert, the same for [`WIDE_ROWS`], then the `E + 1` offsets.
#[derive(Clone)]
pub(crate) struct Table {
    handle: Handle,
    words: usize,
    wide_at: usize,
    pub offsets_at: usize,
}

impl Table {
    /// All of it.
    pub fn arg<R: CubeRuntime>(&self) -> ArrayArg<R> {
        // SAFETY: the buffer was made with this length.
        unsafe { ArrayArg::from_raw_parts(self.handle.clone(), self.words) }
    }

    /// The tiles of [`ROWS`] or [`WIDE_ROWS`] rows, and their number.
    pub fn tiles<R: CubeRuntime>(&self, rows: usize) -> (ArrayArg<R>, usize) {
        let (at, end) = match rows {
            ROWS => (0, self.wide_at),
            _ => (self.wide_at, self.offsets_at),
        };
        debug_assert!(rows == ROWS || rows == WIDE_ROWS);
        let handle = self.handle.clone().offset_start(4 * at as u64);
        // SAFETY: the buffer has this many words from there on.
        let arg = unsafe { ArrayArg::from_raw_parts(handle, self.words - at) };
        (arg, (end - at) / TILE_WORDS)
    }
}

/// Words of a row: the token's low and high half, and the local expert.
pub(crate) const TOKEN_WORDS: usize = 3;

/// [`TOKEN_WORDS`] for each row of an expert.
#[derive(Clone)]
pub(crate) struct TokenTable {
    pub handle: Handle,
    pub words: usize,
}

struct OnDevice<R: CubeRuntime, T> {
    device: R::Device,
    table: T,
}

impl RowGroups {
    /// The table on `device`, uploaded at the first use: the products of a layer, forward and
    /// backward, share it, and none of them waits for it on the host.
    pub(crate) fn table<R: CubeRuntime>(
        &self,
        client: &ComputeClient<R>,
        device: &R::Device,
    ) -> Table {
        self.uploaded::<R, _>(device, || {
            let mut words = self.tiles(ROWS);
            let wide_at = words.len();
            words.extend(self.tiles(WIDE_ROWS));
            let offsets_at = words.len();
            words.extend(self.offsets().iter().map(|offset| word(*offset)));
            Table {
                handle: client.create_from_slice(bytemuck::cast_slice(&words)),
                words: words.len(),
                wide_at,
                offsets_at,
            }
        })
    }

    fn tiles(&self, size: usize) -> Vec<u32> {
        let experts = (0..self.experts()).map(|expert| (expert as u32, self.range(expert)));
        let mut words = Vec::new();
        for (expert, rows) in experts.chain([(NO_EXPERT, self.rows()..self.all_rows())]) {
            for first in rows.clone().step_by(size) {
                words.extend([expert, word(first), word(rows.end.min(first + size))]);
            }
        }
        words
    }

    /// The tokens on `device`, uploaded at the first use.
    ///
    /// # Panics
    ///
    /// When the rows come without tokens.
    pub(crate) fn token_table<R: CubeRuntime>(
        &self,
        client: &ComputeClient<R>,
        device: &R::Device,
    ) -> TokenTable {
        let tokens = self.tokens().expect("a mask is of rows with tokens");
        self.uploaded::<R, _>(device, || {
            let mut words = Vec::new();
            for expert in 0..self.experts() {
                for id in &tokens.ids()[self.range(expert)] {
                    let [low, high] = halves(*id);
                    words.extend([low, high, expert as u32]);
                }
            }
            if words.is_empty() {
                words.push(0); // no backend takes a buffer of none
            }
            TokenTable {
                handle: client.create_from_slice(bytemuck::cast_slice(&words)),
                words: words.len(),
            }
        })
    }

    fn uploaded<R: CubeRuntime, T: Clone + Send + Sync + 'static>(
        &self,
        device: &R::Device,
        upload: impl FnOnce() -> T,
    ) -> T {
        let uploaded = &mut *self.uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        let known = uploaded
            .iter()
            .filter_map(|table| table.downcast_ref::<OnDevice<R, T>>())
            .find(|table| table.device == *device);
        if let Some(known) = known {
            return known.table.clone();
        }
        let table = upload();
        uploaded.push(Box::new(OnDevice::<R, T> {
            device: device.clone(),
            table: table.clone(),
        }));
        table
    }
}

fn word(row: usize) -> u32 {
    u32::try_from(row).expect("an activation has fewer than 2^32 rows")
}
