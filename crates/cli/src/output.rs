//! Where results, progress and errors go.

use std::fmt::Display;
use std::io::{IsTerminal, Write, stderr, stdout};

use crate::progress::Progress;
use serde::Serialize;

/// What the remedies of the libraries call a thing, and the flag for it.
const FLAGS: [(&str, &str); 5] = [
    ("PeftLayout::Stacked", "--layout stacked"),
    ("PeftLayout::PerExpert", "--layout per-expert"),
    ("PeftLayout::SharedOuter", "--layout shared-outer"),
    ("fuse_gate_up", "--fuse"),
    ("fuse gate and up", "--fuse"),
];

/// Results on standard output, as text or as one JSON object; the rest on standard error.
pub struct Output {
    json: bool,
    quiet: bool,
}

impl Output {
    /// As the flags ask.
    pub fn new(json: bool, quiet: bool) -> Self {
        Self { json, quiet }
    }

    /// Prints a result. A closed pipe is no error.
    pub fn result(&self, result: &(impl Display + Serialize)) {
        let text = match self.json {
            true => serde_json::to_string(result).expect("results are plain data"),
            false => result.to_string(),
        };
        let _ = writeln!(stdout(), "{text}");
    }

    /// Prints an error with its causes, on one line.
    pub fn error(&self, error: &anyhow::Error) {
        let mut text = error.to_string();
        for cause in error.chain().skip(1) {
            // Some errors repeat their cause in their own message.
            let cause = cause.to_string();
            if !text.contains(&cause) {
                text += &format!(": {cause}");
            }
        }
        for (name, flag) in FLAGS {
            text = text.replace(name, flag);
        }
        let _ = match self.json {
            true => writeln!(stderr(), "{}", serde_json::json!({ "error": text })),
            false => writeln!(stderr(), "error: {text}"),
        };
    }

    /// A bar over so many bytes or layers; none without a terminal.
    pub fn progress(&self, what: &'static str, total: usize) -> Progress {
        let shown = !self.quiet && !self.json && stderr().is_terminal();
        Progress::new(what, total, shown)
    }
}
