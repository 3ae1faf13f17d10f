//! The command as its users call it: what it writes, prints and returns.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use moe_lora_checkpoint::Checkpoint;
use moe_lora_files::TensorFile;
use serde_json::Value;
use tempfile::TempDir;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(path)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn run(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moe-lora"))
        .args(flags)
        .output()
        .unwrap()
}

/// What a run that must end with this code prints on standard output.
fn ends(code: i32, flags: &[&str]) -> String {
    let output = run(flags);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(code), "{flags:?}: {errors}");
    assert_eq!(errors, "", "{flags:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(code: i32, flags: &[&str]) -> Value {
    serde_json::from_str(&ends(code, &[&["--json"], flags].concat())).unwrap()
}

/// The message of a run that must end with code 3.
fn refusal(flags: &[&str]) -> String {
    let output = run(flags);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{flags:?}: {errors}");
    assert!(!errors.contains("panicked"), "{flags:?}: {errors}");
    assert_eq!(errors.lines().count(), 1, "{flags:?}: {errors}");
    errors.trim_end().strip_prefix("error: ").unwrap().into()
}

/// Every tensor of a file, to the bit.
fn tensors(path: &Path) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    let file = TensorFile::open(path.to_owned()).unwrap();
    file.names()
        .map(|name| {
            let stored = file.stored(name).unwrap();
            let (shape, bytes) = (stored.shape().to_vec(), stored.bytes().to_vec());
            (name.to_owned(), shape, bytes)
        })
        .collect()
}

fn weights(folder: &Path) -> Vec<(String, Vec<usize>, Vec<u8>)> {
    tensors(&folder.join("adapter_model.safetensors"))
}

/// Folders of a recorded model and a scratch folder.
struct Case {
    model: PathBuf,
    adapter: PathBuf,
    scratch: TempDir,
}

impl Case {
    fn new(name: &str) -> Self {
        Self {
            model: fixture(name),
            adapter: fixture(name).join("adapter"),
            scratch: tempfile::tempdir().unwrap(),
        }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Imports the recorded adapter.
    fn imported(name: &str) -> Self {
        let case = Self::new(name);
        let (model, adapter) = (text(&case.model), text(&case.adapter));
        let out = case.at("imported");
        ends(0, &["import", adapter, text(&out), "--model", model]);
        case
    }
}

#[test]
fn adapters_come_back_to_the_bit_from_every_topology() {
    for (name, layout, topologies) in [
        (
            "hf/qwen3_moe",
            "stacked",
            &[["2", "2"], ["1", "4"], ["4", "1"]][..],
        ),
        ("hf/qwen2_moe", "stacked", &[["2", "2"]]),
        ("hf/olmoe", "stacked", &[["2", "2"]]),
        ("hf/mixtral", "stacked", &[["2", "2"]]),
        ("hf/deepseek_v3", "stacked", &[["2", "2"]]),
        ("hf/gpt_oss", "stacked", &[["2", "2"]]),
        (
            "hf_older/qwen3_moe",
            "per-expert",
            &[["2", "2"], ["1", "4"]],
        ),
        (
            "hf_older/olmoe_dora",
            "per-expert",
            &[["2", "2"], ["1", "4"]],
        ),
    ] {
        let case = Case::imported(name);
        for [ep, etp] in topologies {
            let moved = format!("moved-{ep}-{etp}");
            let (imported, moved) = (case.at("imported"), case.at(&moved));
            let (imported, moved) = (text(&imported), text(&moved));
            ends(0, &["reshard", imported, moved, "--ep", ep, "--etp", etp]);
            let checkpoint = Checkpoint::open(Path::new(moved)).unwrap();
            let ranks = ep.parse::<usize>().unwrap() * etp.parse::<usize>().unwrap();
            assert_eq!(checkpoint.manifest().files().len(), ranks, "{name}");

            let (model, out) = (text(&case.model), case.at("exported"));
            let export = ["export", moved, text(&out), "--model", model];
            ends(0, &[&export[..], &["--layout", layout]].concat());
            assert!(weights(&out) == weights(&case.adapter), "{name} {ep} {etp}");
            ends(
                0,
                &["diff", text(&out), text(&case.adapter), "--model", model],
            );
            ends(0, &["diff", imported, moved]);
        }
    }
}

#[test]
fn diff_tells_what_differs_and_by_how_much() {
    let case = Case::imported("hf/qwen3_moe");
    let model = text(&case.model);
    let changed = case.at("changed");
    fs::create_dir(&changed).unwrap();
    let config = "adapter_config.json";
    fs::copy(case.adapter.join(config), changed.join(config)).unwrap();
    let mut bytes = fs::read(case.adapter.join("adapter_model.safetensors")).unwrap();
    let last = bytes.len() - 4;
    let value = f32::from_le_bytes(bytes[last..].try_into().unwrap());
    bytes[last..].copy_from_slice(&(value + 0.5).to_le_bytes());
    fs::write(changed.join("adapter_model.safetensors"), bytes).unwrap();

    let flags = [
        "diff",
        text(&case.adapter),
        text(&changed),
        "--model",
        model,
    ];
    let found = json(1, &flags);
    let largest = found["largest"].as_f64().unwrap();
    assert!((largest - 0.5).abs() < 1e-6, "{found}");
    assert_eq!(found["same"], false);
    let differing: Vec<_> = found["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|tensor| tensor["differing"] == 1)
        .map(|tensor| tensor["name"].as_str().unwrap())
        .collect();
    assert_eq!(differing, ["layers.0.experts.down.lora_B"]);
    let shown = ends(1, &flags);
    assert!(shown.contains("layers.0.experts.down.lora_B: 5.000e-1, 1 elements differ"));
    assert!(shown.contains("different: largest difference 5.000e-1"));
    ends(0, &[&flags[..], &["--tolerance", "0.6"]].concat());

    // A checkpoint against PEFT files, and an adapter of other pairs.
    let imported = case.at("imported");
    let with_file = ["diff", text(&imported), text(&case.adapter)];
    ends(0, &[&with_file[..], &["--model", model]].concat());
    let other = fixture("hf_older/qwen3_moe/adapter");
    let found = json(
        1,
        &["diff", text(&case.adapter), text(&other), "--model", model],
    );
    let only_right = found["only_right"].to_string();
    assert!(
        only_right.contains("layers.0.experts.gate.lora_A"),
        "{only_right}"
    );
}

#[test]
fn inspect_lists_tensors_coordinates_ranks_and_norms() {
    let case = Case::imported("hf/qwen3_moe");
    let (imported, moved) = (case.at("imported"), case.at("moved"));
    let (imported, moved) = (text(&imported), text(&moved));
    ends(0, &["reshard", imported, moved, "--ep", "2", "--etp", "2"]);
    let found = json(0, &["inspect", moved, "--norms"]);
    assert_eq!(found["kind"], "checkpoint");
    assert_eq!(found["checkpoint"]["topology"]["etp"], 2);
    assert_eq!(found["checkpoint"]["adapters"][0][1]["rank"], 4);
    let name = "model.layers.0.mlp.experts.gate_up_proj.lora_B";
    let tensors = found["tensors"].as_array().unwrap();
    let b = tensors.iter().find(|tensor| tensor["name"] == name);
    let shards = &b.unwrap()["shards"];
    assert_eq!(shards.as_array().unwrap().len(), 4);
    assert_eq!(shards[1]["fragments"], serde_json::json!([1, 2, 1]));
    let norms = found["norms"][0]["experts"].as_array().unwrap();
    assert!(norms.iter().all(|norm| norm.as_f64().unwrap() > 0.0));

    let shown = ends(0, &["inspect", moved]);
    assert!(
        shown.contains("saved by 4 ranks: ep 2 x etp 2, tp 1"),
        "{shown}"
    );
    // Four of eight experts, the second half of gate and of up.
    let half = "g1-ep0-etp1-dp0.safetensors: 0..4, 8..16 of each of 2, 0..4";
    assert!(shown.contains(half), "{shown}");
    // The same deltas under other names: norms of the PEFT files are those of the checkpoint.
    let (model, adapter) = (text(&case.model), text(&case.adapter));
    let of_file = json(0, &["inspect", adapter, "--norms", "--model", model]);
    assert_eq!(of_file["norms"], found["norms"]);
    assert_eq!(json(0, &["inspect", model])["kind"], "model");
    let file = case.model.join("model.safetensors");
    assert_eq!(json(0, &["inspect", text(&file)])["kind"], "file");
}

#[test]
fn merge_writes_a_model_in_shards_of_the_size_asked_for() {
    let case = Case::imported("hf/qwen3_moe");
    let (model, imported) = (text(&case.model), case.at("imported"));
    let whole = case.at("whole");
    ends(0, &["merge", model, text(&case.adapter), text(&whole)]);
    assert!(whole.join("model.safetensors").is_file());
    assert!(whole.join("config.json").is_file());

    let shards = case.at("shards");
    let flags = ["merge", model, text(&imported), text(&shards)];
    let found = json(0, &[&flags[..], &["--max-shard-size", "40KB"]].concat());
    let files = found["files"].as_array().unwrap();
    assert!(files.len() > 1, "{found}");
    let mut sharded: Vec<_> = files
        .iter()
        .flat_map(|file| tensors(&shards.join(file.as_str().unwrap())))
        .collect();
    sharded.sort();
    let merged = tensors(&whole.join("model.safetensors"));
    assert!(sharded == merged);
    // Experts are changed and nothing else is.
    let base = tensors(&case.model.join("model.safetensors"));
    for (before, after) in base.iter().zip(&merged) {
        let expert = before.0.contains(".experts.");
        assert_eq!(before == after, !expert, "{}", before.0);
    }
    // One file may not be mixed with the shards of another model.
    let mixed = refusal(&["merge", model, text(&case.adapter), text(&shards)]);
    assert!(mixed.contains("would be mixed"), "{mixed}");
}

#[test]
fn separate_pairs_fuse_only_when_asked() {
    let case = Case::imported("hf_older/qwen3_moe");
    let (model, imported, out) = (text(&case.model), case.at("imported"), case.at("exported"));
    let export = ["export", text(&imported), text(&out), "--model", model];
    let refused = refusal(&[&export[..], &["--layout", "stacked"]].concat());
    assert!(refused.contains("separate gate and up"), "{refused}");
    assert!(!out.exists());
    assert_eq!(json(0, &export)["layout"], "per-expert");
    ends(0, &[&export[..], &["--fuse"]].concat());
    let norms = |path: &Path| {
        let flags = ["inspect", text(path), "--norms", "--model", model];
        json(0, &flags)["norms"].clone()
    };
    let (separate, fused) = (norms(&case.adapter), norms(&out));
    assert_eq!(fused[0]["rank"], 8);
    let square = |norms: &Value| norms["experts"][0].as_f64().unwrap().powi(2);
    let halves = square(&separate[0]) + square(&separate[1]);
    assert!((square(&fused[0]) / halves - 1.0).abs() < 1e-5);
}

#[test]
fn what_is_wrong_is_said_with_a_way_out() {
    let case = Case::imported("hf/qwen3_moe");
    let (model, adapter) = (text(&case.model), text(&case.adapter));
    let (imported, nowhere) = (case.at("imported"), case.at("nowhere"));
    let (imported, nowhere) = (text(&imported), text(&nowhere));
    let export = ["export", imported, nowhere, "--model"];
    for (flags, part) in [
        (vec!["inspect", nowhere], "nothing to read at"),
        (vec!["inspect", model, "--norms"], "is no adapter"),
        (vec!["reshard", model, nowhere], "is no checkpoint"),
        (
            vec!["reshard", imported, nowhere, "--etp", "3"],
            "not divisible by etp_size=3",
        ),
        (vec!["reshard", imported, nowhere, "--ep", "0"], "ep_size=0"),
        (vec!["merge", model, model, nowhere], "is no adapter"),
        ([&export[..], &[nowhere]].concat(), "config.json"),
        (
            [&export[..], &[model, "--layout", "shared-outer"]].concat(),
            "--layout per-expert",
        ),
        (vec!["import", model, nowhere], "adapter_config.json"),
        (vec!["import", adapter, nowhere], "give it with --model"),
        (
            vec!["diff", imported, model, "--model", model],
            "is no adapter",
        ),
    ] {
        let message = refusal(&flags);
        assert!(message.contains(part), "{flags:?}: {message}");
        assert!(!Path::new(nowhere).exists(), "{flags:?}");
    }
    // Flags that make no sense end with 2.
    let size = [
        "merge",
        model,
        imported,
        nowhere,
        "--max-shard-size",
        "5GiB",
    ];
    for flags in [&["reshard", imported][..], &["fly"], &size] {
        assert_eq!(run(flags).status.code(), Some(2), "{flags:?}");
    }
    let output = run(&["--json", "inspect", nowhere]);
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    let message = error["error"].as_str().unwrap();
    assert!(message.contains("nothing to read"), "{message}");
}

#[test]
fn a_damaged_checkpoint_is_named_and_leaves_the_output_alone() {
    let case = Case::imported("hf/qwen3_moe");
    let imported = case.at("imported");
    let checkpoint = Checkpoint::open(&imported).unwrap();
    let file = imported.join(checkpoint.manifest().files().first().unwrap());
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    let out = case.at("out");
    let flags = ["export", text(&imported), text(&out), "--model"];
    let message = refusal(&[&flags[..], &[text(&case.model)]].concat());
    assert!(message.contains("lora_"), "{message}");
    assert!(!out.exists());
    // Headers alone do not show it.
    ends(0, &["inspect", text(&imported)]);
}
