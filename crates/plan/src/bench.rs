//! The output of the GPU bench: constants and measurements, a JSON object a line.

use std::fs;
use std::path::{Path, PathBuf};

use moe_lora_files::{FileError, regular_file_len};
use serde::Deserialize;

use crate::{Kernel, Link, PlanError};

/// A run of the bench writes some 20 kB.
const MAX_BYTES: u64 = 64 << 20;

/// A row of the bench's output. Rows and fields that are not asked for are passed over.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Row {
    part: String,
    name: Option<String>,
    memory_bytes: Option<f64>,
    copy_bytes_per_s: Option<f64>,
    kernel: Option<String>,
    link: Option<Link>,
    bytes_per_s: Option<f64>,
    latency_us: Option<f64>,
    collective: Option<String>,
    group: Option<f64>,
    bytes: Option<f64>,
    us: Option<f64>,
}

/// Constants and measurements by what they are of.
#[derive(Default)]
pub(crate) struct Rows {
    pub path: PathBuf,
    pub name: Option<String>,
    pub memory_bytes: Option<f64>,
    pub copy_bytes_per_s: Option<f64>,
    /// `(bytes, us)`, in the order of [`Kernel::ALL`].
    pub kernels: [Vec<(f64, f64)>; 6],
    pub links: [LinkRows; 2],
}

#[derive(Default)]
pub(crate) struct LinkRows {
    pub bytes_per_s: Option<f64>,
    pub latency_us: Option<f64>,
    /// Bytes that leave a rank, and the time of two ranks.
    pub measured: Vec<(f64, f64)>,
}

impl Rows {
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        let bytes = regular_file_len(path)?;
        if bytes > MAX_BYTES {
            return Err(PlanError::File(FileError::JsonTooLarge {
                path: path.to_owned(),
                bytes,
                limit: MAX_BYTES,
            }));
        }
        let text = fs::read_to_string(path).map_err(FileError::io("read", path))?;
        Self::parse(path, &text)
    }

    pub fn parse(path: &Path, text: &str) -> Result<Self, PlanError> {
        let mut rows = Self {
            path: path.to_owned(),
            ..Self::default()
        };
        for (at, line) in text.lines().enumerate() {
            if !line.trim().is_empty() {
                rows.add(at + 1, line)?;
            }
        }
        Ok(rows)
    }

    fn add(&mut self, line: usize, text: &str) -> Result<(), PlanError> {
        let path = self.path.clone();
        let row: Row =
            serde_json::from_str(text).map_err(|source| PlanError::Row { path, line, source })?;
        for (field, value) in [
            ("memory_bytes", row.memory_bytes),
            ("copy_bytes_per_s", row.copy_bytes_per_s),
            ("bytes_per_s", row.bytes_per_s),
            ("latency_us", row.latency_us),
            ("group", row.group),
            ("bytes", row.bytes),
            ("us", row.us),
        ] {
            if let Some(value) = value
                && !(value.is_finite() && value > 0.0)
            {
                return Err(PlanError::Number {
                    path: self.path.clone(),
                    line,
                    field,
                    value,
                });
            }
        }
        match (row.part.as_str(), row.bytes, row.us) {
            ("machine", ..) => {
                self.name = row.name;
                self.memory_bytes = row.memory_bytes;
            }
            ("kernels", Some(bytes), Some(us)) => {
                let named = |kernel: &Kernel| Some(kernel.name()) == row.kernel.as_deref();
                if let Some(kernel) = Kernel::ALL.into_iter().find(named) {
                    self.kernels[kernel as usize].push((bytes, us));
                }
            }
            ("kernels", ..) => self.copy_bytes_per_s = row.copy_bytes_per_s,
            ("links", ..) => {
                if let Some(link) = row.link {
                    let link = &mut self.links[link as usize];
                    (link.bytes_per_s, link.latency_us) = (row.bytes_per_s, row.latency_us);
                }
            }
            // Costs are those of two ranks; of larger groups the start alone would be another.
            ("collectives", Some(bytes), Some(us)) if row.group == Some(2.0) => {
                let share = match row.collective.as_deref() {
                    Some("all_reduce") => 1.0,
                    Some("all_gather" | "reduce_scatter" | "all_to_all") => 0.5,
                    _ => return Ok(()),
                };
                if let Some(link) = row.link {
                    self.links[link as usize].measured.push((bytes * share, us));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
