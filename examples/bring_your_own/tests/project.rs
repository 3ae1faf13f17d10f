//! The project runs as a user runs it.

use std::path::Path;
use std::process::Command;

use burn_moe_lora::interchange::{ModelConfig, PeftAdapter};

/// The losses that it prints, and the adapter that it exports.
fn run(etp: &str) -> ([f64; 2], PeftAdapter) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_bring-your-own"));
    let output = command.arg(etp).arg(folder.path()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let text = String::from_utf8(output.stdout).unwrap();
    let report = include_str!("../report.txt");
    assert!(etp != "2" || text.starts_with(report), "{text}");
    let losses = text.lines().find_map(|line| line.strip_prefix("loss "));
    let (first, last) = losses.unwrap().split_once(" -> ").unwrap();
    let config = ModelConfig::read(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
    let adapter = PeftAdapter::read(&folder.path().join("peft"), &config).unwrap();
    ([first, last].map(|loss| loss.parse().unwrap()), adapter)
}

#[test]
fn it_learns_at_etp_2_what_it_learns_on_one_rank() {
    let ([first, last], adapter) = run("2");
    assert!(last < first / 2.0, "{first} -> {last}");
    let ([first_alone, last_alone], alone) = run("1");
    assert!((first - first_alone).abs() <= 1e-4);
    assert!((last - last_alone).abs() <= 1e-3, "{last}, {last_alone}");
    assert_eq!(adapter.layers.len(), 2);
    let pairs = |adapter: &PeftAdapter| {
        let layers = adapter.layers.values();
        let pairs = layers.flat_map(|layer| layer.pairs().map(|(_, pair)| pair.b.data().to_vec()));
        pairs.collect::<Vec<_>>().concat()
    };
    let (found, expected) = (pairs(&adapter), pairs(&alone));
    let apart = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    let (apart, largest) = (
        apart.fold(0f32, f32::max),
        expected.iter().fold(0f32, |m, x| m.max(x.abs())),
    );
    assert!(
        largest > 0.05 && apart < 0.02 * largest,
        "{apart} of {largest}"
    );
}

#[test]
fn the_training_code_stays_under_60_lines() {
    let source = include_str!("../src/main.rs");
    let lines = source.lines().map(str::trim);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    let code = code.filter(|line| !line.starts_with("use ")).count();
    assert!(code < 60, "{code} lines");
}
