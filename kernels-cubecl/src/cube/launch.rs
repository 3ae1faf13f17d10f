//! Products of tensors, each one launch (two where a sum is split over cubes).

mod outer;
mod project;

use burn_cubecl::cubecl::prelude::AddressType;

pub(crate) use outer::Outer;
pub(crate) use project::Project;

/// Columns of the output, or lines of a narrow side, that a cube of plain units takes.
const UNIT_COLUMNS: usize = 64;

fn address_type(lens: [usize; 3]) -> AddressType {
    lens.map(AddressType::from_len)
        .into_iter()
        .max()
        .unwrap_or_default()
}
