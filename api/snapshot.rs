//! The public items of every published library are those of `api/<crate>.txt`.
//!
//! They are listed with the features of GPUs, from what `.ci/run` checked with these features: the
//! same packages and features are named here, or burn would be checked once more.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use similar::TextDiff;

/// What `.ci/run` checks with the features of GPUs, beside libraries.
const CHECKED: [&str; 5] = [
    "moe-lora-tests",
    "moe-lora-benches",
    "finetune",
    "learner",
    "moe-lora-examples",
];
const FEATURES: [&str; 11] = [
    "burn-moe-lora/ndarray",
    "burn-moe-lora/nccl",
    "moe-lora-nccl/cuda",
    "moe-lora-tests/gpu",
    "moe-lora-tests/wgpu",
    "moe-lora-benches/gpu",
    "finetune/cuda",
    "finetune/wgpu",
    "moe-lora-examples/nccl",
    "learner/cuda",
    "learner/wgpu",
];

#[test]
fn public_items_are_those_of_the_snapshot() {
    let workspace = Workspace::load();
    let json = workspace.document();
    let mut changes = String::new();
    for library in &workspace.libraries {
        let file = json.join(format!("{}.json", library.replace('-', "_")));
        let snapshot = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("{library}.txt"));
        let items = public_items(&file);
        if std::env::var_os("UPDATE_API").is_some() {
            fs::write(&snapshot, items).unwrap();
            continue;
        }
        let listed = fs::read_to_string(&snapshot).unwrap_or_default();
        let diff = TextDiff::from_lines(&listed, &items);
        let (old, new) = (format!("api/{library}.txt"), format!("{library} as it is"));
        let mut unified = diff.unified_diff();
        write!(changes, "{}", unified.context_radius(1).header(&old, &new)).unwrap();
    }
    assert!(
        changes.is_empty(),
        "public items changed:\n{changes}\n\
         (if that is meant: UPDATE_API=1 cargo test --manifest-path api/Cargo.toml; \
         STABILITY.md says which version a removed item takes)"
    );
}

fn public_items(json: &Path) -> String {
    let api = public_api::Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .build()
        .unwrap_or_else(|error| panic!("{}: {error}", json.display()));
    api.items().map(|item| format!("{item}\n")).collect()
}

struct Workspace {
    /// The published libraries.
    libraries: Vec<String>,
    target: PathBuf,
}

impl Workspace {
    fn load() -> Self {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["metadata", "--format-version=1", "--no-deps", "--locked"]);
        cargo.current_dir("..");
        let output = cargo.output().unwrap();
        assert!(output.status.success(), "cargo metadata fails");
        let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
        let published = |package: &&Value| {
            let targets = package["targets"].as_array().unwrap();
            let library = targets.iter().any(|target| target["kind"][0] == "lib");
            library && package["publish"].is_null()
        };
        let packages = metadata["packages"].as_array().unwrap();
        let names = packages.iter().filter(published);
        let mut libraries: Vec<String> = names
            .map(|package| package["name"].as_str().unwrap().to_owned())
            .collect();
        libraries.sort();
        Self {
            libraries,
            target: metadata["target_directory"].as_str().unwrap().into(),
        }
    }

    /// Documents the libraries as JSON and returns the folder of the files.
    ///
    /// The folder is one of its own, beside the artifacts of the target folder, so that the pages of
    /// `cargo doc` stay.
    fn document(&self) -> PathBuf {
        let folder = self.target.join("api");
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .current_dir("..")
            .args(["doc", "--lib", "--no-deps", "--locked", "--quiet"])
            .args(CHECKED.iter().flat_map(|name| ["-p", name]))
            .args(self.libraries.iter().flat_map(|name| ["-p", name]))
            .args(["--features", &FEATURES.join(",")])
            .arg("--target-dir")
            .arg(&folder)
            .env("CARGO_BUILD_BUILD_DIR", &self.target)
            .env("RUSTDOC", env!("CARGO_BIN_EXE_rustdoc-json"))
            .env("JSON_OF", self.libraries.join(",").replace('-', "_"));
        assert!(cargo.status().unwrap().success(), "cargo doc fails");
        folder.join("doc")
    }
}
