//! The metrics of every step, as a file of one JSON object a line.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Name of the file in the output folder.
pub const METRICS_FILE: &str = "metrics.jsonl";

/// What is known of a step when it is done.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// The step, counted from 1.
    pub step: usize,
    /// Mean loss over the whole batch before the step's update, in nats a byte.
    pub loss: f64,
    /// Norm of the gradients of all adapters.
    pub gradient_norm: f64,
    /// Experts of all layers that no byte chose.
    pub idle_experts: usize,
    /// Bytes of the busiest expert over the mean, in the layer where that is largest.
    pub imbalance: f64,
    /// Bytes of the batch, over all ranks.
    pub tokens: usize,
    /// Wall time of the step.
    pub seconds: f64,
}

/// The open file. A line that cannot be written does not end the training: [`finish`](Self::finish) tells.
pub struct MetricsFile {
    file: File,
    path: PathBuf,
    outcome: io::Result<()>,
}

impl MetricsFile {
    /// Opens the file in `folder`; of an earlier run's lines it keeps those of the first `done` steps.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn create(folder: &Path, done: usize) -> Result<Self> {
        let path = folder.join(METRICS_FILE);
        let mut kept = match done > 0 && path.exists() {
            true => read_metrics(folder)?,
            false => Vec::new(),
        };
        kept.retain(|metrics| metrics.step <= done);
        let file = File::create(&path).with_context(|| cannot("write", &path))?;
        let mut metrics = Self {
            file,
            path,
            outcome: Ok(()),
        };
        kept.iter().for_each(|step| metrics.push(step));
        Ok(metrics)
    }

    /// Adds a line.
    pub fn push(&mut self, metrics: &StepMetrics) {
        if self.outcome.is_ok() {
            let line = serde_json::to_string(metrics).map_err(io::Error::from);
            self.outcome = line.and_then(|line| writeln!(self.file, "{line}"));
        }
    }

    /// Whether all lines were written.
    ///
    /// # Errors
    /// The first failure.
    pub fn finish(self) -> Result<()> {
        self.outcome.with_context(|| cannot("write", &self.path))
    }
}

/// The lines of the file in `folder`.
///
/// # Errors
/// A file that cannot be read, or a line that is no step.
pub fn read_metrics(folder: &Path) -> Result<Vec<StepMetrics>> {
    let path = folder.join(METRICS_FILE);
    let text = std::fs::read_to_string(&path).with_context(|| cannot("read", &path))?;
    let lines = text.lines().enumerate();
    lines
        .map(|(index, line)| {
            serde_json::from_str(line).with_context(|| {
                let path = path.display();
                format!(
                    "line {} of '{path}' is no step (remove the file)",
                    index + 1
                )
            })
        })
        .collect()
}

fn cannot(action: &str, path: &Path) -> String {
    format!("cannot {action} '{}'", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: usize) -> StepMetrics {
        StepMetrics {
            step,
            loss: 2.5 / step as f64,
            gradient_norm: 0.75,
            idle_experts: 1,
            imbalance: 1.5,
            tokens: 256,
            seconds: 0.125,
        }
    }

    #[test]
    fn lines_come_back_to_the_bit_and_a_resumed_run_continues_them() {
        let folder = tempfile::tempdir().unwrap();
        let write = |done, steps: std::ops::RangeInclusive<usize>| {
            let mut file = MetricsFile::create(folder.path(), done).unwrap();
            steps.map(step).for_each(|metrics| file.push(&metrics));
            file.finish().unwrap();
            read_metrics(folder.path()).unwrap()
        };
        assert_eq!(write(0, 1..=7), (1..=7).map(step).collect::<Vec<_>>());
        // The steps after the checkpoint are done again.
        assert_eq!(write(4, 5..=6), (1..=6).map(step).collect::<Vec<_>>());
        assert_eq!(write(0, 1..=2), [step(1), step(2)]);
        let text = std::fs::read_to_string(folder.path().join(METRICS_FILE)).unwrap();
        let line = r#"{"step":1,"loss":2.5,"gradient_norm":0.75,"idle_experts":1,"imbalance":1.5,"tokens":256,"seconds":0.125}"#;
        assert_eq!(text.lines().next(), Some(line));
    }

    #[test]
    fn a_line_that_is_no_step_is_named() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(METRICS_FILE), "{}\n").unwrap();
        let error = MetricsFile::create(folder.path(), 3).err().unwrap();
        assert!(error.to_string().starts_with("line 1 of '"), "{error}");
        assert!(MetricsFile::create(folder.path(), 0).is_ok());
    }
}
