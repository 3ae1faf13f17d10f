//! The constants of a machine, from what the bench measured on it.

use std::path::Path;

use serde::{Deserialize, Serialize, Serializer};

use crate::bench::Rows;
use crate::{Cost, Kernel, PlanError};

/// What was measured on H200s, in the form of the bench's output.
const H200: &str = include_str!("h200.jsonl");

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
        let rows = Rows::read(path)?;
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
