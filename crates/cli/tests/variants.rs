//! Adapters that differ in one thing, made from recorded ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use moe_lora_checkpoint::{
    AdapterActivation, AdapterEntry, AdapterSharing, Axis, Checkpoint, Dtype, GroupSizes, Save,
    TensorLayout,
};
use moe_lora_interchange::{FactorPair, GateUp, HostTensor, ModelConfig, PeftAdapter, PeftLayout};
use serde_json::Value;
use tempfile::TempDir;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(path)
}

fn run(flags: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moe-lora"))
        .args(flags)
        .output()
        .unwrap()
}

/// Exit code, and what was printed as JSON.
fn json(flags: &[&str]) -> (i32, Value) {
    let output = run(&[&["--json"], flags].concat());
    let text = match output.status.code() {
        Some(0 | 1) => output.stdout,
        _ => output.stderr,
    };
    let value = serde_json::from_slice(&text).unwrap();
    (output.status.code().unwrap(), value)
}

/// A recorded model and variants of its adapter.
struct Variants {
    model: PathBuf,
    config: ModelConfig,
    adapter: PeftAdapter,
    scratch: TempDir,
}

impl Variants {
    fn new(name: &str) -> Self {
        let model = fixture(name);
        let config = ModelConfig::read(&model).unwrap();
        Self {
            adapter: PeftAdapter::read(&model.join("adapter"), &config).unwrap(),
            config,
            model,
            scratch: tempfile::tempdir().unwrap(),
        }
    }

    fn path(&self, name: &str) -> String {
        let path = self.scratch.path().join(name);
        path.to_str().unwrap().to_owned()
    }

    /// The adapter with a change, as PEFT files and as a checkpoint.
    fn write(
        &self,
        name: &str,
        layout: PeftLayout,
        change: impl FnOnce(&mut PeftAdapter),
    ) -> [String; 2] {
        let mut adapter = self.adapter.clone();
        change(&mut adapter);
        let [peft, saved] = [self.path(name), self.path(&format!("{name}-saved"))];
        let base = self.model.to_str().unwrap();
        adapter
            .write(Path::new(&peft), &self.config, layout, base)
            .unwrap();
        adapter
            .write_checkpoint(Path::new(&saved), &self.config)
            .unwrap();
        [peft, saved]
    }

    fn stacked(&self, name: &str, change: impl FnOnce(&mut PeftAdapter)) -> [String; 2] {
        self.write(name, PeftLayout::Stacked, change)
    }

    fn diff(&self, left: &str, right: &str) -> (i32, Value) {
        let model = self.model.to_str().unwrap();
        json(&["diff", left, right, "--model", model])
    }
}

/// The pair on down of the first adapted layer.
fn down(adapter: &mut PeftAdapter) -> &mut FactorPair {
    let layer = adapter.layers.values_mut().next().unwrap();
    layer.down.as_mut().unwrap()
}

fn change_value(tensor: &mut HostTensor, value: f32) {
    let mut data = tensor.data().to_vec();
    data[0] = value;
    *tensor = HostTensor::new(tensor.shape(), data).unwrap();
}

#[test]
fn diff_sees_a_scale_a_missing_layer_other_ranks_and_nan() {
    let variants = Variants::new("hf/qwen3_moe");
    let same = variants.stacked("same", |_| ());
    let alpha = variants.stacked("alpha", |adapter| down(adapter).alpha *= 2.0);
    let stabilised = variants.stacked("stabilised", |adapter| adapter.rslora = true);
    let half = variants.stacked("half", |adapter| {
        adapter.layers.values_mut().next().unwrap().down = None;
    });
    let rank = variants.stacked("rank", |adapter| {
        let pair = down(adapter);
        let [experts, _, columns] = *pair.a.shape() else {
            panic!("three axes");
        };
        let rows = pair.b.shape()[1];
        let zeros =
            |shape: [usize; 3]| HostTensor::new(shape, vec![0.0; shape.iter().product()]).unwrap();
        let (a, b) = (zeros([experts, 2, columns]), zeros([experts, rows, 2]));
        *pair = FactorPair::new(a, b, pair.alpha).unwrap();
    });
    let nan = variants.stacked("nan", |adapter| {
        change_value(&mut down(adapter).a, f32::NAN)
    });

    // As PEFT files and as checkpoints alike.
    for kind in 0..2 {
        assert_eq!(variants.diff(&same[kind], &same[kind]).0, 0);
        assert_eq!(variants.diff(&nan[kind], &nan[kind]).0, 0);
        for other in [&alpha, &stabilised, &half, &rank, &nan] {
            for (left, right) in [(&same, other), (other, &same)] {
                let (code, found) = variants.diff(&left[kind], &right[kind]);
                assert_eq!((code, &found["same"]), (1, &Value::from(false)), "{found}");
            }
        }
        let (_, found) = variants.diff(&half[kind], &same[kind]);
        assert!(found["only_left"].as_array().unwrap().is_empty(), "{found}");
        assert!(
            !found["only_right"].as_array().unwrap().is_empty(),
            "{found}"
        );
        let (_, found) = variants.diff(&rank[kind], &same[kind]);
        assert_eq!(found["reshaped"].as_array().unwrap().len(), 2, "{found}");
    }
    // The folder that names the base may be on either side.
    for (left, right) in [(&same[0], &same[1]), (&same[1], &same[0])] {
        assert_eq!(json(&["diff", left, right]).0, 0);
    }
}

#[test]
fn shared_outer_adapters_come_back_as_they_were_and_merge_like_expanded_ones() {
    let variants = Variants::new("hf/qwen3_moe");
    let first = |tensor: &HostTensor| {
        let shape = [&[1], &tensor.shape()[1..]].concat();
        HostTensor::new(shape, tensor.outer(0).to_vec()).unwrap()
    };
    let share = |adapter: &mut PeftAdapter| {
        for layer in adapter.layers.values_mut() {
            let Some(GateUp::Fused(pair)) = &mut layer.gate_up else {
                panic!("fused factors");
            };
            pair.a = first(&pair.a);
            let down = layer.down.as_mut().unwrap();
            down.b = first(&down.b);
        }
    };
    let [peft, saved] = variants.write("shared", PeftLayout::SharedOuter, share);
    let experts = variants.config.num_experts;
    let [expanded, _] = variants.stacked("expanded", |adapter| {
        share(adapter);
        *adapter = adapter.expand(experts).unwrap();
    });
    let model = variants.model.to_str().unwrap();
    let again = variants.path("again");
    let export = ["export", &saved, &again, "--model", model, "--layout"];
    assert_eq!(
        run(&[&export[..], &["shared-outer"]].concat())
            .status
            .code(),
        Some(0)
    );
    let weights = |folder: &str| fs::read(Path::new(folder).join("adapter_model.safetensors"));
    assert!(weights(&peft).unwrap() == weights(&again).unwrap());

    let stacked = variants.path("stacked");
    let export = ["export", &saved, &stacked, "--model", model];
    assert_eq!(run(&export).status.code(), Some(0));
    for left in [&peft, &saved, &stacked] {
        let (code, found) = variants.diff(left, &expanded);
        assert_eq!(code, 0, "{left}: {found}");
    }
    let merged = [&peft, &saved, &expanded].map(|adapter| {
        let out = format!("{adapter}-merged");
        let output = run(&["merge", model, adapter, &out]);
        assert_eq!(output.status.code(), Some(0));
        fs::read(Path::new(&out).join("model.safetensors")).unwrap()
    });
    assert!(merged[0] == merged[1] && merged[1] == merged[2]);
}

#[test]
fn a_merge_refuses_values_and_layers_that_do_not_belong() {
    let variants = Variants::new("hf/qwen3_moe");
    let model = variants.model.to_str().unwrap();
    let out = variants.path("merged");
    let refuse = |adapter: &str, part: &str| {
        let (code, error) = json(&["merge", model, adapter, &out]);
        let message = error["error"].as_str().unwrap();
        assert_eq!(code, 3, "{message}");
        assert!(message.contains(part), "{message}");
        assert!(!Path::new(&out).join("model.safetensors").exists());
    };
    let nan = variants.stacked("nan", |adapter| {
        change_value(&mut down(adapter).a, f32::NAN)
    });
    let huge = variants.stacked("huge", |adapter| down(adapter).alpha = 1e300);
    for [peft, saved] in [nan, huge] {
        refuse(&peft, "layer 0: row");
        refuse(&saved, "holds no finite numbers once merged");
    }
    // A checkpoint does not know how many layers the model has.
    let deep = variants.path("deep");
    let linear = "model.layers.7.mlp.experts.down_proj";
    let pair = variants.adapter.layers[&0].down.as_ref().unwrap();
    let values: BTreeMap<String, &HostTensor> = [
        (format!("{linear}.lora_A"), &pair.a),
        (format!("{linear}.lora_B"), &pair.b),
    ]
    .into();
    let layouts: Vec<_> = values
        .iter()
        .map(|(key, tensor)| TensorLayout::new(key, Dtype::F32, tensor.shape()))
        .collect();
    let place = GroupSizes::new(1, 1).place(0).unwrap();
    let save = Save::begin(Path::new(&deep), place, 0).unwrap();
    save.write(&layouts, |shard| {
        let values = values[&shard.key].data().iter();
        Ok(values
            .flat_map(|value| value.to_le_bytes())
            .collect::<Vec<u8>>()
            .into())
    })
    .unwrap();
    let entry = AdapterEntry {
        rank: pair.rank(),
        alpha: 1.0,
        rslora: false,
        activation: AdapterActivation::Identity,
        sharing: AdapterSharing::PerExpert,
        dora: false,
        pissa: false,
    };
    save.commit([(linear.to_owned(), entry)].into()).unwrap();
    refuse(&deep, "layer 7, which has no experts in this model");
}

#[test]
fn dense_tensors_are_resharded_over_tp_and_only_they() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let save = |folder: &str, layout: TensorLayout| {
        let place = GroupSizes::new(1, 1).place(0).unwrap();
        let save = Save::begin(Path::new(folder), place, 0).unwrap();
        save.write(&[layout], |shard| Ok(vec![7; shard.byte_len()].into()))
            .unwrap();
        save.commit(Default::default()).unwrap();
    };
    let (dense, experts) = (at("dense"), at("experts"));
    save(
        &dense,
        TensorLayout::new("x", Dtype::U8, [4, 2]).with_axis(0, Axis::Tp),
    );
    save(
        &experts,
        TensorLayout::new("x", Dtype::U8, [4, 2]).with_axis(0, Axis::Ep),
    );
    for (ep, etp, tp, world) in [("1", "1", "2", 2), ("2", "2", "2", 4), ("2", "1", "4", 4)] {
        let out = at(&format!("out-{ep}-{etp}-{tp}"));
        let flags = [
            "reshard", &dense, &out, "--ep", ep, "--etp", etp, "--tp", tp,
        ];
        assert_eq!(run(&flags).status.code(), Some(0), "{flags:?}");
        let manifest = Checkpoint::open(Path::new(&out))
            .unwrap()
            .manifest()
            .clone();
        assert_eq!(manifest.topology.world, world);
        assert_eq!(manifest.files().len().to_string(), tp);
    }
    let (code, error) = json(&["reshard", &experts, &at("never"), "--tp", "1000000000"]);
    assert_eq!(code, 3);
    assert!(
        error["error"].as_str().unwrap().contains("(leave it out)"),
        "{error}"
    );
    assert!(!Path::new(&at("never")).exists());
}

#[test]
fn inspect_names_what_an_adapter_is_and_export_finds_the_layout_of_magnitudes() {
    let model = fixture("hf_older/olmoe_dora");
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name).to_str().unwrap().to_owned();
    let (model, adapter) = (model.to_str().unwrap(), model.join("adapter"));
    let adapter = adapter.to_str().unwrap();
    let import = ["import", adapter, &at("saved"), "--model", model];
    assert_eq!(run(&import).status.code(), Some(0));
    let shown = String::from_utf8(run(&["inspect", &at("saved")]).stdout).unwrap();
    let adapters = shown.lines().filter(|line| line.starts_with("adapter "));
    assert!(adapters.clone().count() > 0, "{shown}");
    assert!(
        adapters.clone().all(|line| line.ends_with(", DoRA")),
        "{shown}"
    );
    let export = ["export", &at("saved"), &at("out"), "--model", model];
    let (code, exported) = json(&export);
    assert_eq!((code, &exported["layout"]), (0, &Value::from("per-expert")));
}

#[test]
fn names_with_control_characters_are_printed_escaped() {
    let scratch = tempfile::tempdir().unwrap();
    let folder = scratch.path().join("odd");
    let place = GroupSizes::new(1, 1).place(0).unwrap();
    let save = Save::begin(&folder, place, 0).unwrap();
    let layout = TensorLayout::new("a\u{1b}[31m\nb", Dtype::U8, [1]);
    save.write(&[layout], |_| Ok(vec![7].into())).unwrap();
    save.commit(Default::default()).unwrap();
    let shown = run(&["inspect", folder.to_str().unwrap()]).stdout;
    let shown = String::from_utf8(shown).unwrap();
    assert!(shown.contains(r"a\u{1b}[31m\nb"), "{shown}");
}
