//! rustdoc in cargo's hands, writing JSON for the libraries named in `JSON_OF` and nothing for others.
//!
//! The format is unstable. Allowing it to cargo as a whole would build every dependency again, since
//! build scripts ask for `RUSTC_BOOTSTRAP`; here rustdoc alone has it.

use std::env;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let mut rustdoc = Command::new("rustdoc");
    rustdoc.args(&arguments);
    if let Some(at) = arguments.iter().position(|found| found == "--crate-name") {
        let named = env::var("JSON_OF").unwrap_or_default();
        if !named.split(',').any(|name| name == arguments[at + 1]) {
            return ExitCode::SUCCESS;
        }
        rustdoc.args(["-Z", "unstable-options", "--output-format", "json"]);
        rustdoc.env("RUSTC_BOOTSTRAP", "1");
    }
    let status = rustdoc.status().expect("rustdoc starts");
    ExitCode::from(if status.success() { 0 } else { 1 })
}
