//! The command itself: what it writes, and what it says when something is wrong.

mod files;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn_moe_lora::interchange::{GateUp, HubModel, PeftAdapter};
use files::{asset, read_json, read_tensors};
use finetune::metrics::read_metrics;
use tempfile::TempDir;

/// What to do about a loss that is no number before the first step.
const NOT_FINITE: &str = "(the model or the adapter holds values that are no finite numbers, or --alpha is far off: \
                          fetch the files again or change --alpha)";

fn model() -> PathBuf {
    asset("qwen3-moe-constitution")
}

/// Two steps, unless the flags say how many.
fn finetune(folder: &Path, flags: &[&str]) -> Output {
    let steps = match flags.contains(&"--steps") {
        true => &[][..],
        false => &["--steps", "2"],
    };
    Command::new(env!("CARGO_BIN_EXE_finetune"))
        .current_dir(folder)
        .args(steps)
        .args(flags)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What a run that must end well prints.
fn succeed(folder: &Path, flags: &[&str]) -> String {
    let output = finetune(folder, flags);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{flags:?}: {errors}");
    assert!(
        errors.contains("step 1/2  loss ") && errors.contains("step 2/2  loss "),
        "{errors}"
    );
    text(&output.stdout)
}

/// The message of a run that must end with one line and exit code 1.
fn refusal(folder: &Path, flags: &[&str]) -> String {
    let output = finetune(folder, flags);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{flags:?}: {errors}");
    assert!(!errors.contains("panicked"), "{flags:?}: {errors}");
    assert_eq!(errors.lines().count(), 1, "{flags:?}: {errors}");
    let message = errors.trim_end().strip_prefix("error: ");
    message
        .unwrap_or_else(|| panic!("{flags:?}: {errors}"))
        .into()
}

/// A number of the summary, by the words around it.
fn number(output: &str, before: &str, after: &str) -> f64 {
    let start = output
        .find(before)
        .unwrap_or_else(|| panic!("no {before:?} in {output}"));
    let rest = &output[start + before.len()..];
    rest[..rest.find(after).unwrap()].parse().unwrap()
}

/// A copy of the model's files that can be damaged.
fn copy() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(model().join(name), folder.path().join(name)).unwrap();
    }
    folder
}

#[test]
fn without_flags_four_ranks_train_and_write_an_adapter() {
    let folder = tempfile::tempdir().unwrap();
    let output = succeed(folder.path(), &[]);
    assert!(
        output.contains("4 ranks: ep 2 x etp 2 x expert dp 1"),
        "{output}"
    );
    assert!(output.contains("34,816 of 241,024 parameters"), "{output}");
    assert!(output.contains("tokens/s)"), "{output}");
    assert!(
        number(&output, "logits within ", " of the adapted") < 1e-5,
        "{output}"
    );
    let (before, after) = (
        number(&output, "eval      loss ", " before"),
        number(&output, " before, ", " after"),
    );
    assert!(after < before, "{output}");

    let hub = HubModel::open(&model()).unwrap();
    let out = folder.path().join("target/finetune");
    let adapter = PeftAdapter::read(&out, hub.config()).unwrap();
    assert_eq!(adapter.layers.len(), 2);
    let pairs = adapter.layers.values().flat_map(|layer| layer.pairs());
    for (_, pair) in pairs {
        assert_eq!((pair.rank(), pair.alpha), (8, 16.0));
    }
    for layer in adapter.layers.values() {
        assert!(matches!(layer.gate_up, Some(GateUp::Fused(_))));
        let moved = layer
            .down
            .as_ref()
            .unwrap()
            .b
            .data()
            .iter()
            .any(|b| *b != 0.0);
        assert!(moved, "B is still zero");
    }
}

#[test]
fn the_merged_model_and_the_adapter_start_where_the_training_ended() {
    let folder = tempfile::tempdir().unwrap();
    let first = succeed(folder.path(), &["--out", "adapter", "--merged", "merged"]);
    let after = number(&first, " before, ", " after");

    let merged = folder.path().join("merged");
    let (old, new) = (
        read_tensors(&model().join("model.safetensors")),
        read_tensors(&merged.join("model.safetensors")),
    );
    assert_eq!(old.len(), new.len());
    for (name, (_, values)) in &old {
        let same = *values == new[name].1;
        assert!(same || name.contains(".experts."), "{name} has changed");
    }
    assert!(old.iter().any(|(name, tensor)| *tensor != new[name]));

    starts_at(folder.path(), after);
}

/// The folders `merged` and `adapter` start at this loss.
fn starts_at(folder: &Path, loss: f64) {
    for flags in [
        ["--model", "merged", "--ep", "1", "--etp", "4"],
        ["--adapter", "adapter", "--ep", "4", "--etp", "1"],
    ] {
        let next = succeed(folder, &flags);
        let before = number(&next, "eval      loss ", " before");
        assert!(
            (before - loss).abs() <= 2e-4,
            "{flags:?}: {before} instead of {loss}"
        );
    }
}

#[test]
fn every_kind_of_adapter_starts_again_where_its_training_ended() {
    for flags in [
        &["--rslora"][..],
        &["--pissa"],
        &["--pissa", "--rslora", "--separate"],
        &["--pissa", "--dora"],
        &["--shared-outer", "--rslora"],
    ] {
        let folder = tempfile::tempdir().unwrap();
        let out = ["--out", "adapter", "--merged", "merged"];
        let first = succeed(folder.path(), &[flags, &out].concat());
        let [before, after] = [("eval      loss ", " before"), (" before, ", " after")]
            .map(|(start, end)| number(&first, start, end));
        assert!((before - after).abs() > 0.01, "{flags:?}: {first}");
        starts_at(folder.path(), after);
    }
}

#[test]
fn separate_adapters_are_written_an_expert_and_projection_each() {
    let folder = tempfile::tempdir().unwrap();
    succeed(
        folder.path(),
        &["--separate", "--optimizer", "sgd", "--out", "separate"],
    );
    let out = folder.path().join("separate");
    let hub = HubModel::open(&model()).unwrap();
    let adapter = PeftAdapter::read(&out, hub.config()).unwrap();
    let mut layers = adapter.layers.values();
    assert!(layers.all(|layer| matches!(layer.gate_up, Some(GateUp::Separate { .. }))));
    let names = read_tensors(&out.join("adapter_model.safetensors"));
    let name = "base_model.model.model.layers.1.mlp.experts.7.up_proj.lora_B.weight";
    assert!(names.contains_key(name));
    succeed(folder.path(), &["--adapter", "separate", "--ep", "1"]);
}

#[test]
fn what_the_flags_say_of_the_training_reaches_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let hub = HubModel::open(&model()).unwrap();
    let mut norms = Vec::new();
    for (out, flags) in [
        ("plain", &[][..]),
        ("rslora", &["--rslora", "--alpha", "1"]),
        ("fast", &["--lora-plus", "16"]),
        ("descent", &["--optimizer", "sgd"]),
        ("clipped", &["--max-norm", "0.001", "--optimizer", "sgd"]),
        ("dropped", &["--dropout", "0.5"]),
        ("pissa", &["--pissa"]),
    ] {
        let output = succeed(folder.path(), &[flags, &["--out", out]].concat());
        // No adapter changes the model before it is trained.
        let before = number(&output, "eval      loss ", " before");
        assert!((before - 6.498).abs() < 0.002, "{out}: {output}");
        let out = folder.path().join(out);
        let adapter = PeftAdapter::read(&out, hub.config()).unwrap();
        assert_eq!(adapter.rslora, out.ends_with("rslora"));
        let pairs = adapter.layers.values().flat_map(|layer| layer.pairs());
        let rank = if out.ends_with("pissa") { 16 } else { 8 };
        assert!(pairs.into_iter().all(|(_, pair)| pair.rank() == rank));
        norms.push(read_metrics(&out).unwrap().remove(1).gradient_norm);
    }
    // The second step's gradients tell the first one's update.
    for (index, norm) in norms.iter().enumerate() {
        assert!(!norms[..index].contains(norm), "{norms:?}");
    }
    // An adapter of files, whose B is not zero, drops from the first step on.
    let first_loss = |flags: &[&str]| {
        succeed(
            folder.path(),
            &[&["--adapter", "plain", "--out", "again"], flags].concat(),
        );
        read_metrics(&folder.path().join("again")).unwrap()[0].loss
    };
    assert_eq!(first_loss(&[]), first_loss(&["--dropout", "0"]));
    assert_ne!(first_loss(&[]), first_loss(&["--dropout", "0.5"]));

    // What is reported is the norm before clipping.
    let clipped = read_metrics(&folder.path().join("clipped")).unwrap();
    assert!(clipped[0].gradient_norm > 0.01, "{clipped:?}");

    let message = refusal(folder.path(), &["--pissa", "--dropout", "0.1"]);
    assert!(message.contains("PiSSA with dropout=0.1"), "{message}");
    let wrong = finetune(folder.path(), &["--dropout", "1"]);
    let errors = text(&wrong.stderr);
    assert!(errors.contains("1 is no probability below 1"), "{errors}");
}

#[test]
fn targets_choose_linears() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--target", "*.layers.1.*down_proj", "--out", "down"];
    let output = succeed(folder.path(), &flags);
    // E * r * (F + H) of one layer.
    assert!(output.contains("trained   7,168 of"), "{output}");
    let hub = HubModel::open(&model()).unwrap();
    let adapter = PeftAdapter::read(&folder.path().join("down"), hub.config()).unwrap();
    assert_eq!(adapter.layers.keys().collect::<Vec<_>>(), [&1]);
    assert_eq!(adapter.layers[&1].gate_up, None);
}

#[test]
fn topologies_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = |flags: &[&str]| refusal(folder.path(), flags);
    assert_eq!(
        refusal(&["--ep", "3", "--etp", "1"]),
        "model.layers.0.mlp: num_experts=8 is not divisible by ep_size=3 (choose a divisor of 8 as ep_size)"
    );
    assert_eq!(
        refusal(&["--ep", "1", "--etp", "3"]),
        "model.layers.0.mlp.experts.gate_up_proj: lora rank=8 is not divisible by etp_size=3 \
         (choose a multiple of 3 as rank)"
    );
    assert_eq!(
        refusal(&["--world", "6", "--ep", "2", "--etp", "2"]),
        "world=6 is not a multiple of ep=2 times etp=2, so the data parallelism would not be a whole number \
         (choose a --world that 4 divides, or leave it out)"
    );
    assert!(
        refusal(&["--batch", "3"]).contains("(raise --batch to at least 4 or use fewer ranks)")
    );
}

#[test]
fn targets_that_match_nothing_are_refused_alike_at_every_topology() {
    let folder = tempfile::tempdir().unwrap();
    for (target, expected) in [
        (
            "nonsense",
            "target \"nonsense\" matches no linear (known: model.layers.0.mlp.experts.gate_up_proj, ",
        ),
        (
            "down_prj",
            "target \"down_prj\" matches no linear, did you mean \"down_proj\"? (known: ",
        ),
    ] {
        let messages =
            [("1", "1"), ("2", "1"), ("2", "2"), ("1", "4"), ("4", "1")].map(|(ep, etp)| {
                refusal(
                    folder.path(),
                    &["--target", target, "--ep", ep, "--etp", etp],
                )
            });
        assert!(messages[0].starts_with(expected), "{}", messages[0]);
        assert!(
            messages.iter().all(|message| *message == messages[0]),
            "{messages:?}"
        );
    }
    assert_eq!(
        refusal(folder.path(), &["--separate", "--target", "*.0.*gate_proj"]),
        "the targets choose model.layers.0.mlp.experts.gate_proj without model.layers.0.mlp.experts.up_proj, \
         which no adapter file can hold (choose both or neither)"
    );
}

#[test]
fn damaged_models_are_refused_alike_at_every_topology() {
    let truncated = |folder: &Path| {
        let path = folder.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(path, &bytes[..bytes.len() - 100]).unwrap();
    };
    let foreign = |folder: &Path| {
        let config = folder.join("config.json");
        std::fs::copy(config, folder.join("model.safetensors")).unwrap();
    };
    let unrelated = |folder: &Path| {
        let tensors = model().join("adapter_start/adapter_model.safetensors");
        std::fs::copy(tensors, folder.join("model.safetensors")).unwrap();
    };
    let set = |field: &'static str, value: Option<usize>| {
        move |folder: &Path| {
            let path = folder.join("config.json");
            let mut config = read_json(&path);
            let fields = config.as_object_mut().unwrap();
            match value {
                Some(value) => fields.insert(field.into(), value.into()),
                None => fields.remove(field),
            };
            std::fs::write(path, config.to_string()).unwrap();
        }
    };
    let (no_hidden, more_heads) = (
        set("hidden_size", None),
        set("num_attention_heads", Some(8)),
    );
    type Case<'a> = (&'a dyn Fn(&Path), &'a str);
    let cases: [Case; 5] = [
        (
            &truncated,
            "(the file is cut short or is not safetensors: fetch it again)",
        ),
        (
            &foreign,
            "(the file is cut short or is not safetensors: fetch it again)",
        ),
        (
            &unrelated,
            "no tensor \"model.layers.0.mlp.experts.0.gate_proj.weight\" in ",
        ),
        (
            &no_hidden,
            "has no field \"hidden_size\" (add it, or fetch the complete file again)",
        ),
        (
            &more_heads,
            "has shape [64, 64] but config.json implies [128, 64] (check that the two files belong",
        ),
    ];
    for (damage, expected) in cases {
        let folder = copy();
        damage(folder.path());
        let path = folder.path().to_str().unwrap();
        let messages = [("1", "1"), ("2", "2")]
            .map(|(ep, etp)| refusal(folder.path(), &["--model", path, "--ep", ep, "--etp", etp]));
        assert!(messages[0].contains(expected), "{}", messages[0]);
        assert_eq!(messages[0], messages[1]);
    }
}

#[test]
fn files_that_are_not_there_or_cannot_be_written_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("empty"), "").unwrap();
    for (flags, start, end) in [
        (
            ["--model", "missing"],
            "cannot open missing/config.json: ",
            "(check the path)",
        ),
        (
            ["--text", "missing"],
            "cannot read text 'missing': ",
            "(give a readable file with --text)",
        ),
        (
            ["--text", "empty"],
            "text 'empty': the text is empty ",
            "(give a file with at least 128 bytes)",
        ),
        (
            ["--adapter", "missing"],
            "cannot open missing/adapter_config.json: ",
            "(check the path)",
        ),
        (
            ["--out", "empty"],
            "cannot create folder 'empty': ",
            "(give another one with --out)",
        ),
        (
            ["--merged", "empty"],
            "cannot create folder 'empty': ",
            "(give another one with --merged)",
        ),
        (
            ["--length", "300"],
            "length=300 is more than max_position_embeddings=256 ",
            "at most 256)",
        ),
    ] {
        let message = refusal(folder.path(), &flags);
        assert!(
            message.starts_with(start) && message.ends_with(end),
            "{message}"
        );
    }
}

#[test]
fn a_loss_that_is_no_number_ends_the_training() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(
        refusal(folder.path(), &["--alpha", "1e300"]),
        format!("the loss before training is NaN {NOT_FINITE}")
    );
    let output = finetune(folder.path(), &["--optimizer", "sgd", "--lr", "1e38"]);
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors
            .ends_with("\nerror: the loss of step 2 is NaN (lower --lr, --alpha or --lora-plus)\n"),
        "{errors}"
    );
}

#[test]
fn an_adapter_that_the_last_step_ruined_is_not_written() {
    let folder = tempfile::tempdir().unwrap();
    succeed(folder.path(), &["--out", "adapter"]);
    let path = folder.path().join("adapter/adapter_model.safetensors");
    let good = std::fs::read(&path).unwrap();
    let flags = ["--adapter", "adapter", "--out", "adapter"];
    let ruin = ["--steps", "1", "--optimizer", "sgd", "--lr", "1e38"];
    let output = finetune(folder.path(), &[&flags[..], &ruin].concat());
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(
        errors.ends_with(
            "\nerror: the loss after training is NaN, so no adapter is written (lower --lr, --alpha or --lora-plus)\n"
        ),
        "{errors}"
    );
    assert!(std::fs::read(&path).unwrap() == good, "written over");
}

#[test]
fn weights_that_are_no_numbers_are_told_from_a_training_that_diverges() {
    let damage = |path: &Path| {
        let mut bytes = std::fs::read(path).unwrap();
        let last = bytes.len() - 4;
        bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
        std::fs::write(path, bytes).unwrap();
    };
    let folder = copy();
    damage(&folder.path().join("model.safetensors"));
    succeed(folder.path(), &["--out", "adapter"]);
    damage(&folder.path().join("adapter/adapter_model.safetensors"));
    for flags in [["--model", "."], ["--adapter", "adapter"]] {
        assert_eq!(
            refusal(folder.path(), &flags),
            format!("the loss before training is NaN {NOT_FINITE}")
        );
    }
}

/// A folder that not even root may write to.
#[cfg(target_os = "linux")]
#[test]
fn folders_that_cannot_be_written_to_are_refused_before_training() {
    let folder = tempfile::tempdir().unwrap();
    for flag in ["--out", "--merged"] {
        let message = refusal(folder.path(), &[flag, "/proc"]);
        assert!(
            message.starts_with("cannot write to folder '/proc': ")
                && message.ends_with(&format!(" (give another one with {flag})")),
            "{message}"
        );
    }
}

#[test]
fn folders_in_the_way_of_files_are_refused_before_training() {
    for (flag, name) in [
        ("--out", "adapter_model.safetensors"),
        ("--out", "adapter_config.json"),
        ("--out", "metrics.jsonl"),
        ("--out", "loss.svg"),
        ("--out", "experts.svg"),
        ("--merged", "model.safetensors"),
        ("--merged", "config.json"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("there").join(name).join("inside");
        std::fs::create_dir_all(&inside).unwrap();
        assert_eq!(
            refusal(folder.path(), &[flag, "there"]),
            format!(
                "'there/{name}' is a folder where a file is to be written (move it or give another folder with {flag})"
            )
        );
        assert!(inside.is_dir());
        let left = std::fs::read_dir(folder.path().join("there")).unwrap();
        assert_eq!(left.count(), 1);
    }
}

#[test]
fn the_merged_model_may_not_overwrite_the_model() {
    let folder = copy();
    let path = folder.path().join("model.safetensors");
    let before = std::fs::read(&path).unwrap();
    for merged in [".", folder.path().to_str().unwrap()] {
        assert_eq!(
            refusal(folder.path(), &["--model", ".", "--merged", merged]),
            "--merged '.' is the folder of the --model, which it would overwrite (give another one with --merged)"
        );
    }
    assert!(std::fs::read(&path).unwrap() == before, "written over");
}

#[test]
fn backends_and_transports_that_are_not_there_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = |flags: &[&str]| refusal(folder.path(), flags);
    #[cfg(not(feature = "cuda"))]
    assert_eq!(
        refusal(&["--backend", "cuda"]),
        "this finetune was built without the backend cuda (build it with `cargo build --release -p finetune --features \
         cuda`)"
    );
    assert!(
        refusal(&["--transport", "nccl"]).ends_with("(add --backend cuda or use --transport mock)")
    );
    assert!(!folder.path().join("target").exists());
}

#[test]
fn every_step_is_a_line_of_the_metrics_and_a_resumed_run_continues_them() {
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--out", "out", "--length", "32", "--batch", "5"];
    let save = ["--checkpoint", "saved", "--optimizer", "sgd"];
    let output = succeed(folder.path(), &[&flags[..], &save].concat());
    assert!(output.contains("backend   cpu over mock\n"), "{output}");
    let resume = ["--steps", "4", "--resume", "saved", "--optimizer", "sgd"];
    let resumed = finetune(folder.path(), &[&flags[..], &resume].concat());
    assert!(resumed.status.success(), "{}", text(&resumed.stderr));
    let steps = read_metrics(&folder.path().join("out")).unwrap();
    assert_eq!(
        steps.iter().map(|m| (m.step, m.tokens)).collect::<Vec<_>>(),
        [(1, 160), (2, 160), (3, 160), (4, 160)]
    );
    let printed = text(&resumed.stderr);
    for (line, step) in printed.lines().zip(&steps[2..]) {
        let loss = format!("  loss {:.4}  ", step.loss);
        assert!(
            line.contains(&loss) && step.seconds > 0.0,
            "{line} {step:?}"
        );
    }
    assert_eq!(printed.lines().count(), 2);
}

#[test]
fn the_experts_are_drawn_alike_at_every_topology() {
    let drawn = |ep: &str, etp: &str| -> Vec<f64> {
        let folder = tempfile::tempdir().unwrap();
        let topology = ["--ep", ep, "--etp", etp, "--out", "out"];
        let batch = ["--length", "32", "--batch", "5", "--optimizer", "sgd"];
        succeed(folder.path(), &[topology.as_slice(), &batch].concat());
        let picture = std::fs::read_to_string(folder.path().join("out/experts.svg")).unwrap();
        let lines = picture.lines();
        lines.filter_map(|line| line.parse().ok()).collect()
    };
    let one = drawn("1", "1");
    let [layers, experts, steps] = [2, 8, 2];
    // A token count and a norm for every expert, their numbers, and the ends of two scales.
    assert_eq!(one.len(), 2 * (layers * experts + experts + 2));
    let tokens: f64 = one[..layers * experts].iter().sum();
    assert_eq!(
        tokens as usize,
        layers * steps * 5 * 32 * 2,
        "two experts a token"
    );
    let norms = &one[layers * experts + experts + 2..][..layers * experts];
    assert!(norms.iter().any(|norm| *norm > 0.0), "{norms:?}");
    for (ep, etp) in [("4", "1"), ("1", "4"), ("2", "2")] {
        let found = drawn(ep, etp);
        assert_eq!(found.len(), one.len());
        for (found, one) in found.iter().zip(&one) {
            // The last digit of a norm may round the other way.
            assert!(
                (found - one).abs() < 1.5e-3,
                "ep {ep} etp {etp}: {found} and {one}"
            );
        }
    }
}

#[test]
fn wrong_usage_ends_with_code_2() {
    let folder = tempfile::tempdir().unwrap();
    for flags in [["--ep", "0"], ["--lr", "fast"], ["--optimizer", "magic"]] {
        let output = finetune(folder.path(), &flags);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(flags[0]));
    }
    for (flag, expected) in [
        ("--lr", "-1 is not a positive number (use one above 0)"),
        ("--alpha", "-1 is not a positive number (use one above 0)"),
        ("--seed", "invalid digit found in string"),
    ] {
        let output = finetune(folder.path(), &[flag, "-1"]);
        assert_eq!(output.status.code(), Some(2));
        let errors = text(&output.stderr);
        assert!(
            errors.contains(flag) && errors.contains(expected),
            "{errors}"
        );
    }
}

#[test]
fn a_run_that_was_cut_goes_on_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let run = |steps: &str, out: &str, more: &[&str]| {
        let flags = ["--steps", steps, "--out", out, "--length", "32"];
        let output = finetune(folder.path(), &[&flags, more].concat());
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{more:?}: {errors}");
        std::fs::read(folder.path().join(out).join("adapter_model.safetensors")).unwrap()
    };
    let unbroken = run("4", "whole", &[]);
    run("2", "half", &["--checkpoint", "saved"]);
    let resumed = run("4", "resumed", &["--resume", "saved"]);
    assert!(resumed == unbroken);
    // The checkpoint of an earlier step is replaced by that of a later one, and goes on in its place.
    let again = [
        "--resume",
        "saved",
        "--checkpoint",
        "saved",
        "--save-every",
        "1",
    ];
    assert!(run("4", "again", &again) == unbroken);
    let other = ["--resume", "saved", "--ep", "1", "--etp", "4"];
    assert!(run("5", "moved", &other) != unbroken);

    // What the checkpoint holds comes from there, the rest from the same flags.
    let rest = ["--dropout", "0.2", "--lora-plus", "4", "--max-norm", "0.05"];
    let pissa = ["--pissa", "--rslora"];
    let unbroken = run("4", "whole-pissa", &pissa);
    run(
        "2",
        "half",
        &[&pissa[..], &["--checkpoint", "saved-pissa"]].concat(),
    );
    assert!(run("4", "resumed", &["--resume", "saved-pissa"]) == unbroken);
    let unbroken = run("4", "whole-rest", &rest);
    run(
        "2",
        "half",
        &[&rest[..], &["--checkpoint", "saved-rest"]].concat(),
    );
    let resume = ["--resume", "saved-rest"];
    assert!(run("4", "resumed", &[&rest[..], &resume].concat()) == unbroken);
    for left_out in [0, 2, 4] {
        let mut fewer = rest.to_vec();
        fewer.drain(left_out..left_out + 2);
        let other = run("4", "resumed", &[&fewer[..], &resume].concat());
        assert!(other != unbroken, "{fewer:?}");
    }

    for (flags, part) in [
        (
            &["--resume", "saved", "--steps", "4"][..],
            "has done 4 steps and --steps is 4 (raise --steps)",
        ),
        (&["--resume", "nowhere"], "manifest.json"),
        (
            &["--resume", "saved", "--steps", "6", "--optimizer", "sgd"],
            "has the state of adamw, not of sgd (resume with adamw",
        ),
    ] {
        let message = refusal(folder.path(), flags);
        assert!(message.contains(part), "{flags:?}: {message}");
    }
    // What is not this run's checkpoint is neither read nor replaced, which is found out before the training.
    std::fs::write(folder.path().join("file"), "").unwrap();
    for (flags, part) in [
        (["--checkpoint", "saved"], "holds a checkpoint already"),
        (
            ["--checkpoint", "file"],
            "(give another one with --checkpoint)",
        ),
        (["--adapter", "saved"], "(go on from it with --resume)"),
        (["--resume", "whole"], "(start from them with --adapter)"),
    ] {
        let message = refusal(folder.path(), &flags);
        assert!(message.contains(part), "{flags:?}: {message}");
    }
    let both = finetune(folder.path(), &["--resume", "saved", "--rank", "4"]);
    assert_eq!(both.status.code(), Some(2));
}
