//! One example of every variant, by crate.

mod adapters;
mod checkpoint;
mod files;
mod interchange;
mod plan;
mod ranks;

use crate::Examples;

/// In the order of the page.
pub fn all() -> Vec<Examples> {
    [
        adapters::all(),
        ranks::all(),
        checkpoint::all(),
        files::all(),
        interchange::all(),
        plan::all(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn json_fault() -> serde_json::Error {
    serde_json::from_str::<serde_json::Value>("{\"rank\": ").unwrap_err()
}

fn io_fault(number: i32) -> std::io::Error {
    std::io::Error::from_raw_os_error(number)
}
