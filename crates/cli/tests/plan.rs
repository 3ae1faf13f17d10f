//! `moe-lora plan` as its users call it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Files of the cost model's own tests: configurations of public models, a run of the bench.
fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../plan/tests")
        .join(path)
}

fn run(model: &str, flags: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moe-lora"))
        .arg("plan")
        .arg(file("configs").join(model))
        .args(flags.split_whitespace())
        .output()
        .unwrap()
}

fn text(model: &str, flags: &str) -> String {
    let output = run(model, flags);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{flags}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn json(model: &str, flags: &str) -> Value {
    serde_json::from_str(&text(model, &format!("{flags} --json"))).unwrap()
}

fn refusal(model: &str, flags: &str) -> String {
    let output = run(model, flags);
    let errors = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(3), "{flags}: {errors}");
    // Paths are those of a checkout.
    let folder = file("").display().to_string();
    errors.replace(&folder, "").trim_end().to_owned()
}

/// The pages of the book show these.
#[test]
fn plans_read_as_tables() {
    for (name, model, flags) in [
        ("qwen3_8", "qwen3-30b-a3b", "--gpus 8"),
        ("qwen3_etp", "qwen3-30b-a3b", "--gpus 8 --tp 1 --ep 1"),
        (
            "deepseek_128",
            "deepseek-v3",
            "--gpus 128 --tp 2 --ep 16 --etp 1",
        ),
        (
            "deepseek_4096",
            "deepseek-v3",
            "--gpus 4096 --tp 2 --ep 16 --etp 1",
        ),
        (
            "deepseek_ep",
            "deepseek-v3",
            "--gpus 4096 --tp 1 --etp 1 --top 9",
        ),
        (
            "mixtral_80gb",
            "mixtral-8x7b",
            "--gpus 4 --memory 80GB --tokens 8192",
        ),
    ] {
        insta::assert_snapshot!(name, text(model, flags), flags);
    }
}

fn first(plan: &Value) -> &Value {
    &plan["candidates"][0]
}

fn collective<'a>(plan: &'a Value, group: &str, owner: &str) -> &'a Value {
    let calls = first(plan)["collectives"].as_array().unwrap();
    let found = calls
        .iter()
        .find(|call| call["group"] == group && call["owner"] == owner);
    found.unwrap_or_else(|| panic!("no {owner} collective over {group}"))
}

#[test]
fn low_rank_collectives_carry_rows_times_rank() {
    let plan = json(
        "qwen3-30b-a3b",
        "--gpus 4 --tp 1 --ep 1 --etp 4 --tokens 1000 --rank 8",
    );
    // 4 ranks' 1000 tokens, 8 experts each, rank 8, two bytes; three quarters leave a rank.
    let bytes = 4.0 * 1000.0 * 8.0 * 8.0 * 2.0 * 0.75;
    assert_eq!(collective(&plan, "ETP", "adapter")["wire"]["nvlink"], bytes);
    // The base's gathers carry the hidden size in the rank's place.
    let hidden = bytes / 8.0 * 2048.0;
    assert_eq!(collective(&plan, "ETP", "base")["wire"]["nvlink"], hidden);
}

#[test]
fn memory_of_a_rank_falls_with_the_experts_it_holds() {
    let memory = |flags| first(&json("mixtral-8x7b", flags))["memory"].clone();
    let whole = memory("--gpus 1");
    let shard = memory("--gpus 8 --tp 1 --ep 4 --etp 2");
    for part in ["experts", "adapter", "gradients", "moments"] {
        let [whole, shard] = [&whole, &shard].map(|memory| memory[part].as_f64().unwrap());
        assert_eq!(whole / shard, 8.0, "{part}");
    }
    assert_eq!(whole["dense"], shard["dense"]);
}

#[test]
fn a_bench_replaces_the_constants_that_it_measured() {
    let two = file("bench/two_h200.jsonl").display().to_string();
    let flags = "--gpus 2 --tp 1 --ep 1 --etp 2";
    let [own, given] = [flags.to_owned(), format!("{flags} --bench {two}")]
        .map(|flags| json("qwen3-30b-a3b", &flags)["machine"].clone());
    assert_eq!(own["nvlink"], given["nvlink"]);
    let rate = |machine: &Value, kernel: &str| machine["kernels"][kernel]["bytes_per_s"].clone();
    for (kernel, same) in [
        ("shrink", false),
        ("expand", false),
        ("dz", true),
        ("dB", true),
    ] {
        assert_ne!(rate(&own, kernel), Value::Null);
        assert_eq!(rate(&own, kernel) == rate(&given, kernel), same, "{kernel}");
    }
}

#[test]
fn less_memory_takes_recompute_and_then_does_not_fit() {
    let fit = |memory: &str| {
        let flags = format!("--gpus 1 --memory {memory}");
        first(&json("qwen3-30b-a3b", &flags))["fit"].clone()
    };
    assert_eq!(
        ["141GB", "100GB", "60GB"].map(fit),
        ["whole", "recompute", "no"]
    );
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let bench = |name: &str, text: &str| {
        let path = scratch.path().join(name);
        fs::write(&path, text).unwrap();
        let message = refusal(
            "mixtral-8x7b",
            &format!("--gpus 1 --bench {}", path.display()),
        );
        message.replace(&scratch.path().display().to_string(), "")
    };
    let row = |us: &str| format!(r#"{{"part":"kernels","kernel":"dz","bytes":10,"us":{us}}}"#);
    let messages = [
        refusal("mixtral-8x7b", "--gpus 0"),
        refusal("mixtral-8x7b", "--gpus 8 --ep 3"),
        refusal("mixtral-8x7b", "--gpus 8 --etp 8 --rank 4"),
        refusal("absent", "--gpus 8"),
        bench("empty.jsonl", ""),
        bench("text.jsonl", "copy bandwidth"),
        bench("negative.jsonl", &row("-1")),
        bench("one.jsonl", &row("2")),
    ];
    insta::assert_snapshot!(messages.join("\n"));
}
