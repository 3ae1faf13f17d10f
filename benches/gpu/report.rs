//! Where numbers go: a table on standard output, and a JSON object a line in a file.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use serde_json::Value;

/// Rows for people and for programs. Only rank 0 has one that writes.
pub struct Report {
    file: Option<File>,
    speaks: bool,
}

impl Report {
    /// Appends to `path`, where there is one.
    pub fn open(path: Option<&Path>) -> Self {
        let open = |path: &Path| OpenOptions::new().create(true).append(true).open(path);
        let file = path.map(|path| {
            open(path).unwrap_or_else(|error| panic!("cannot write {}: {error}", path.display()))
        });
        Self { file, speaks: true }
    }

    /// Says nothing.
    pub fn silent() -> Self {
        Self {
            file: None,
            speaks: false,
        }
    }

    /// A line of text.
    pub fn text(&self, line: impl AsRef<str>) {
        if self.speaks {
            println!("{}", line.as_ref());
        }
    }

    /// A row of a table, and its numbers.
    pub fn row(&mut self, line: impl AsRef<str>, numbers: &Value) {
        self.text(line);
        if let Some(file) = &mut self.file {
            writeln!(file, "{numbers}").expect("the report can be written");
        }
    }
}
