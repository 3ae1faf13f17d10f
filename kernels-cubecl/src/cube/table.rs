//! The row groups as kernels read them, on the device.

use std::sync::PoisonError;

use burn_cubecl::CubeRuntime;
use burn_cubecl::cubecl::client::ComputeClient;
use burn_cubecl::cubecl::server::Handle;

use super::plan::ROWS;
use super::project::NO_EXPERT;
use crate::RowGroups;

/// One buffer of words: `[expert, first row, end row]` for each tile of at most [`ROWS`] rows of one
/// expert, then the `E + 1` offsets.
#[derive(Clone)]
pub(crate) struct Table {
    pub handle: Handle,
    pub words: usize,
    pub tiles: usize,
    pub offsets_at: usize,
}

struct OnDevice<R: CubeRuntime> {
    device: R::Device,
    table: Table,
}

impl RowGroups {
    /// The table on `device`, uploaded at the first use: the products of a layer, forward and
    /// backward, share it, and none of them waits for it on the host.
    pub(crate) fn table<R: CubeRuntime>(
        &self,
        client: &ComputeClient<R>,
        device: &R::Device,
    ) -> Table {
        let uploaded = &mut *self.uploaded.lock().unwrap_or_else(PoisonError::into_inner);
        let known = uploaded
            .iter()
            .filter_map(|table| table.downcast_ref::<OnDevice<R>>())
            .find(|table| table.device == *device);
        if let Some(known) = known {
            return known.table.clone();
        }
        let mut words = Vec::new();
        let experts = (0..self.experts()).map(|expert| (expert as u32, self.range(expert)));
        for (expert, rows) in experts.chain([(NO_EXPERT, self.rows()..self.all_rows())]) {
            for first in rows.clone().step_by(ROWS) {
                words.extend([expert, word(first), word(rows.end.min(first + ROWS))]);
            }
        }
        let offsets_at = words.len();
        words.extend(self.offsets().iter().map(|offset| word(*offset)));
        let table = Table {
            handle: client.create_from_slice(bytemuck::cast_slice(&words)),
            words: words.len(),
            tiles: offsets_at / 3,
            offsets_at,
        };
        uploaded.push(Box::new(OnDevice::<R> {
            device: device.clone(),
            table: table.clone(),
        }));
        table
    }
}

fn word(row: usize) -> u32 {
    u32::try_from(row).expect("an activation has fewer than 2^32 rows")
}
