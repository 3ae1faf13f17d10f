//! The constants of a machine, from what the bench measured on it.

use std::fs;
use std::path::{Path, PathBuf};

use moe_lora_files::{FileError, regular_file_len};
use serde::{Deserialize, Serialize, Serializer};

use crate::{Cost, Kernel, PlanError};

/// What was measured on H200s, in the form of the bench's output.
const H200: &str = include_str!("h200.jsonl");

/// A run of the bench writes some 20 kB.
const MAX_BYTES: u64 = 64 << 20;

/// Links between GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// Within a node.
    Nvlink,
    /// Between nodes.
    Network,
}

/// The constants of a machine.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// What it is called.
    pub name: String,
    /// Bytes of a GPU.
    pub memory_bytes: f64,
    /// Of a large copy on one GPU: bytes read plus written.
    pub copy_bytes_per_s: f64,
    /// In the order of [`Kernel::ALL`].
    #[serde(serialize_with = "by_name")]
    kernels: [Cost; 6],
    /// A collective of two ranks within a node; the rate is that out of one GPU.
    nvlink: Cost,
    /// A collective of two ranks of two nodes; the rate is that out of one GPU.
    network: Cost,
}

fn by_name<S: Serializer>(kernels: &[Cost; 6], serializer: S) -> Result<S::Ok, S::Error> {
    let names = Kernel::ALL.map(Kernel::name);
    serializer.collect_map(names.into_iter().zip(kernels))
}

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
struct Rows {
    path: PathBuf,
    name: Option<String>,
    memory_bytes: Option<f64>,
    copy_bytes_per_s: Option<f64>,
    /// `(bytes, us)`, in the order of [`Kernel::ALL`].
    kernels: [Vec<(f64, f64)>; 6],
    links: [LinkRows; 2],
}

#[derive(Default)]
struct LinkRows {
    bytes_per_s: Option<f64>,
    latency_us: Option<f64>,
    /// Bytes that leave a rank, and the time of two ranks.
    measured: Vec<(f64, f64)>,
}

impl Machine {
    /// H200s, eight a node: kernels, copy and an all-reduce of two as measured, the links' rates
    /// those of the data sheet, the network's latency assumed.
    pub fn h200() -> Self {
        let rows = Rows::parse(Path::new("h200.jsonl"), H200).and_then(|rows| Self::of(&rows));
        rows.expect("a test reads the constants")
    }

    /// These constants with those that the bench wrote to `path` instead, as far as they are there.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, has a row that is no JSON object or holds a number that is none
    /// above 0, has a kernel at one size alone, or has no row of a kernel or collective.
    pub fn with_bench(mut self, path: &Path) -> Result<Self, PlanError> {
        let bytes = regular_file_len(path)?;
        if bytes > MAX_BYTES {
            return Err(PlanError::File(FileError::JsonTooLarge {
                path: path.to_owned(),
                bytes,
                limit: MAX_BYTES,
            }));
        }
        let text = fs::read_to_string(path).map_err(FileError::io("read", path))?;
        let rows = Rows::parse(path, &text)?;
        let kernels = rows.kernels.iter().any(|measured| !measured.is_empty());
        let links = rows.links.iter().any(|link| !link.measured.is_empty());
        if !kernels && !links {
            let path = path.to_owned();
            return Err(PlanError::NoRows { path });
        }
        self.take(&rows)?;
        Ok(self)
    }

    fn of(rows: &Rows) -> Result<Self, PlanError> {
        let none = Cost {
            start_us: 0.0,
            bytes_per_s: f64::INFINITY,
        };
        let mut machine = Self {
            name: String::new(),
            memory_bytes: 0.0,
            copy_bytes_per_s: 0.0,
            kernels: [none; 6],
            nvlink: none,
            network: none,
        };
        machine.take(rows)?;
        Ok(machine)
    }

    fn take(&mut self, rows: &Rows) -> Result<(), PlanError> {
        if let Some(name) = &rows.name {
            self.name = name.clone();
        }
        self.memory_bytes = rows.memory_bytes.unwrap_or(self.memory_bytes);
        self.copy_bytes_per_s = rows.copy_bytes_per_s.unwrap_or(self.copy_bytes_per_s);
        for (kernel, measured) in Kernel::ALL.into_iter().zip(&rows.kernels) {
            if !measured.is_empty() {
                let what = kernel.name();
                let path = rows.path.clone();
                self.kernels[kernel as usize] =
                    Cost::fit(measured).ok_or(PlanError::OneSize { path, what })?;
            }
        }
        for (cost, link) in [&mut self.nvlink, &mut self.network]
            .into_iter()
            .zip(&rows.links)
        {
            cost.bytes_per_s = link.bytes_per_s.unwrap_or(cost.bytes_per_s);
            cost.start_us = link.latency_us.unwrap_or(cost.start_us);
            if !link.measured.is_empty() {
                let fit = Cost::fit(&link.measured);
                *cost = fit.unwrap_or_else(|| Cost::with_rate(cost.bytes_per_s, &link.measured));
            }
        }
        Ok(())
    }

    /// The cost of a kernel.
    pub fn kernel(&self, kernel: Kernel) -> Cost {
        self.kernels[kernel as usize]
    }

    /// The cost of a collective of two ranks over a link.
    pub fn link(&self, link: Link) -> Cost {
        match link {
            Link::Nvlink => self.nvlink,
            Link::Network => self.network,
        }
    }
}

impl Rows {
    fn parse(path: &Path, text: &str) -> Result<Self, PlanError> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Machine, PlanError> {
        let rows = Rows::parse(Path::new("gpu.jsonl"), text)?;
        let mut machine = Machine::h200();
        machine.take(&rows)?;
        Ok(machine)
    }

    #[test]
    fn constants_are_those_of_the_rows() {
        let machine = parse(
            r#"{"part":"kernels","copy_bytes_per_s":3e12,"l2_bytes":1}
               {"part":"kernels","kernel":"dz","bytes":1e6,"us":3}
               {"part":"kernels","kernel":"dz","bytes":3e6,"us":5}
               {"part":"kernels","kernel":"another","bytes":3e6,"us":5}
               {"part":"collectives","collective":"all_gather","link":"nvlink","group":2,"bytes":2e6,"us":7}
               {"part":"collectives","collective":"all_reduce","link":"nvlink","group":2,"bytes":3e6,"us":9}
               {"part":"collectives","collective":"all_reduce","link":"nvlink","group":8,"bytes":3e6,"us":99}
               {"part":"counts","launches":7}"#,
        )
        .unwrap();
        let near = |cost: Cost, start: f64, rate: f64| {
            let found = (cost.start_us / start - 1.0).abs() + (cost.bytes_per_s / rate - 1.0).abs();
            assert!(found < 1e-9, "{cost:?}");
        };
        assert_eq!(machine.copy_bytes_per_s, 3e12);
        near(machine.kernel(Kernel::Dz), 2.0, 1e12);
        near(machine.link(Link::Nvlink), 6.0, 1e12);
        let h200 = Machine::h200();
        assert_eq!(machine.kernel(Kernel::Dx), h200.kernel(Kernel::Dx));
        assert_eq!(machine.link(Link::Network), h200.link(Link::Network));
    }

    #[test]
    fn one_size_of_a_collective_keeps_the_rate_of_the_data_sheet() {
        let row = r#"{"part":"collectives","collective":"all_reduce","link":"network","group":2,"bytes":5e6,"us":150}"#;
        let cost = parse(row).unwrap().link(Link::Network);
        assert_eq!((cost.start_us, cost.bytes_per_s), (50.0, 50e9));
    }

    #[test]
    fn any_text_is_read_or_refused() {
        let seeds = [
            H200,
            "{\"part\":\"kernels\",\"kernel\":\"dz\",\"bytes\":1e308,\"us\":1e-308}",
        ];
        for seed in seeds {
            let _ = parse(seed);
        }
        bolero::check!().for_each(|bytes: &[u8]| {
            let _ = parse(&String::from_utf8_lossy(bytes));
        });
    }
}
