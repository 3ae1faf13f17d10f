//! Model folders: reading, sharding, copying.

mod folders;

use folders::{CONSTITUTION, DORA, PER_EXPERT, STACKED, assert_contains, copy, open, set};
use half::{bf16, f16};
use moe_lora_interchange::{
    HostTensor, HubModel, InterchangeError, MAX_SHARD_BYTES, ModelWriter, Router, SharedExpert,
};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors, serialize_to_file};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

#[test]
fn every_fixture_opens() {
    for folder in STACKED.into_iter().chain([PER_EXPERT, DORA, CONSTITUTION]) {
        let model = open(folder);
        let config = model.config();
        let (experts, ffn, hidden) = (
            config.num_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        );
        for layer in 0..config.num_hidden_layers {
            let weights = model.expert_weights(layer).unwrap();
            assert_eq!(weights.gate.shape(), [experts, ffn, hidden], "{folder}");
            assert_eq!(weights.up.shape(), [experts, ffn, hidden], "{folder}");
            assert_eq!(weights.down.shape(), [experts, hidden, ffn], "{folder}");
        }
        for name in model.names() {
            assert_eq!(
                model.tensor(name).unwrap().shape(),
                model.shape(name).unwrap()
            );
        }
    }
}

#[test]
fn configurations_of_both_generations() {
    let qwen3 = open(STACKED[0]);
    assert_eq!(qwen3.config(), open(PER_EXPERT).config());
    let of = |model: &HubModel| {
        let config = model.config();
        let attention = config.attention.unwrap();
        let sizes = (config.num_experts, config.moe_intermediate_size);
        (
            config.family.model_type,
            sizes,
            attention.head_dim,
            attention.qkv_bias,
        )
    };
    let renormalize = |model: &HubModel| match model.config().router {
        Router::SoftmaxThenTopK { renormalize } => renormalize,
        other => panic!("{other:?}"),
    };
    assert_eq!(of(&qwen3), ("qwen3_moe", (8, 16), 8, false));
    assert!(renormalize(&qwen3) && qwen3.config().shared_expert.is_none());

    let qwen2 = open(STACKED[1]);
    assert_eq!(of(&qwen2), ("qwen2_moe", (4, 16), 8, true));
    let shared = SharedExpert {
        intermediate_size: 24,
        gated: true,
    };
    assert_eq!(qwen2.config().shared_expert, Some(shared));
    assert!(!renormalize(&qwen2));

    let olmoe = open(STACKED[2]);
    assert_eq!(olmoe.config(), open(DORA).config());
    assert_eq!(of(&olmoe), ("olmoe", (8, 16), 8, false));
    assert_eq!(
        (
            olmoe.config().rms_norm_eps,
            olmoe.config().attention.unwrap().rope_theta
        ),
        (1e-5, 1e4)
    );
}

#[test]
fn experts_are_stacked_in_order() {
    let model = open(CONSTITUTION);
    let weights = model.expert_weights(1).unwrap();
    for expert in [0, 7] {
        let name = format!("model.layers.1.mlp.experts.{expert}.up_proj.weight");
        assert_eq!(
            weights.up.outer(expert),
            model.tensor(&name).unwrap().data()
        );
    }
    let tensors = weights.into_hub(1, &model).unwrap();
    assert_eq!(tensors.len(), 24);
    for (name, tensor) in tensors {
        assert_eq!(tensor, model.tensor(&name).unwrap());
    }
}

#[test]
fn unknown_names_come_with_a_near_one() {
    let model = open(STACKED[0]);
    let error = model
        .tensor("model.layers.0.mlp.expert.3.up_proj.weight")
        .unwrap_err();
    assert_contains(
        &error.to_string(),
        &[
            "mlp.expert.3.up_proj",
            "did you mean \"model.layers.0.mlp.experts.3.up_proj.weight\"?",
        ],
    );
    let error = model.tensor("x").unwrap_err();
    assert_contains(
        &error.to_string(),
        &["no tensor \"x\"", "no name there is similar"],
    );
    let error = model.expert_weights(1).unwrap_err();
    assert_contains(
        &error.to_string(),
        &["layer 1 is not in", "num_hidden_layers=1"],
    );
}

/// Rewrites `model.safetensors` with every tensor in `dtype`.
fn convert(file: &Path, dtype: Dtype) {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let converted: Vec<(String, Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, view)| {
            let values = view
                .data()
                .as_chunks()
                .0
                .iter()
                .map(|&le| f32::from_le_bytes(le));
            let bytes = match dtype {
                Dtype::BF16 => values
                    .flat_map(|x| bf16::from_f32(x).to_le_bytes())
                    .collect(),
                Dtype::F16 => values
                    .flat_map(|x| f16::from_f32(x).to_le_bytes())
                    .collect(),
                _ => values.flat_map(|x| f64::from(x).to_le_bytes()).collect(),
            };
            (name.to_owned(), view.shape().to_vec(), bytes)
        })
        .collect();
    let views = converted
        .iter()
        .map(|(name, shape, bytes)| (name, TensorView::new(dtype, shape.clone(), bytes).unwrap()));
    serialize_to_file(views, None, file).unwrap();
}

/// Writes `model` with one tensor replaced.
fn write(
    folder: &Path,
    model: &HubModel,
    name: &str,
    tensor: &HostTensor,
) -> Result<(), InterchangeError> {
    ModelWriter::new(model, folder, MAX_SHARD_BYTES)?
        .write(|_| Ok(BTreeMap::from([(name.to_owned(), tensor.clone())])))
}

#[test]
fn half_precision_is_widened_and_kept_by_a_copy() {
    const NAME: &str = "model.layers.0.mlp.experts.3.down_proj.weight";
    let full = open(STACKED[0]).tensor(NAME).unwrap();
    for dtype in [Dtype::BF16, Dtype::F16] {
        let round = |x: &f32| match dtype {
            Dtype::BF16 => bf16::from_f32(*x).to_f32(),
            _ => f16::from_f32(*x).to_f32(),
        };
        let folder = copy(STACKED[0]);
        let file = folder.path().join("model.safetensors");
        convert(&file, dtype);
        let model = HubModel::open(folder.path()).unwrap();
        let rounded: Vec<f32> = full.data().iter().map(round).collect();
        assert_eq!(model.tensor(NAME).unwrap().data(), rounded);

        // Written over its own source: what was not replaced stays equal to the bit.
        let before = fs::read(&file).unwrap();
        write(folder.path(), &model, NAME, &full).unwrap();
        let after = fs::read(&file).unwrap();
        let [old, new] = [&before, &after].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
        for (name, view) in old.iter() {
            assert_eq!(view, new.tensor(name).unwrap(), "{name}");
        }
        let before = after;

        let mut wide = full.clone().into_data();
        wide[0] = f32::MAX;
        let replaced = HostTensor::new(full.shape(), wide).unwrap();
        let error = write(folder.path(), &model, NAME, &replaced);
        let message = error.unwrap_err().to_string();
        assert_contains(&message, &[NAME, "overflows", &dtype.to_string()]);
        assert!(fs::read(&file).unwrap() == before, "{dtype}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 4, "leftovers");
    }
}

#[test]
fn other_types_are_refused_by_name() {
    let folder = copy(STACKED[0]);
    convert(&folder.path().join("model.safetensors"), Dtype::F64);
    let model = HubModel::open(folder.path()).unwrap();
    let error = model.tensor("lm_head.weight").unwrap_err();
    assert_contains(&error.to_string(), &["lm_head.weight", "stored as F64"]);
    let zeros = HostTensor::new([96, 32], vec![0.0; 96 * 32]).unwrap();
    let error = write(folder.path(), &model, "lm_head.weight", &zeros).unwrap_err();
    assert_contains(&error.to_string(), &["lm_head.weight", "stored as F64"]);
}

/// The first fixture, its tensors divided over two shards.
fn sharded() -> tempfile::TempDir {
    let folder = copy(STACKED[0]);
    let single = folder.path().join("model.safetensors");
    let bytes = fs::read(&single).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let shard = |name: &str| format!("model-0000{}-of-00002.safetensors", 1 + name.len() % 2);
    for number in [1, 2] {
        let file = format!("model-0000{number}-of-00002.safetensors");
        let part = tensors.iter().filter(|(name, _)| shard(name) == file);
        serialize_to_file(part, None, &folder.path().join(&file)).unwrap();
    }
    let map: BTreeMap<&str, String> = tensors
        .iter()
        .map(|(name, _)| (name, shard(name)))
        .collect();
    let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(
        folder.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    fs::remove_file(single).unwrap();
    folder
}

#[test]
fn shards_read_and_copy_like_one_file() {
    let folder = sharded();
    let (whole, parts) = (open(STACKED[0]), HubModel::open(folder.path()).unwrap());
    assert!(whole.names().eq(parts.names()));
    assert_eq!(
        whole.expert_weights(0).unwrap(),
        parts.expert_weights(0).unwrap()
    );

    let target = tempfile::tempdir().unwrap();
    let name = "model.norm.weight";
    let ones = HostTensor::new([32], vec![1.5; 32]).unwrap();
    write(target.path(), &parts, name, &ones).unwrap();
    let written = HubModel::open(target.path()).unwrap();
    assert!(whole.names().eq(written.names()));
    for tensor in whole.names() {
        let expected = if tensor == name {
            ones.clone()
        } else {
            whole.tensor(tensor).unwrap()
        };
        assert_eq!(written.tensor(tensor).unwrap(), expected, "{tensor}");
    }
    assert_eq!(written.config(), whole.config());
}

#[test]
fn a_single_file_goes_before_an_index_beside_it() {
    let whole = open(STACKED[0]);
    let folder = sharded();
    let from = folders::at(STACKED[0]).join("model.safetensors");
    fs::copy(from, folder.path().join("model.safetensors")).unwrap();
    // The index is sound by itself, with one tensor that the single file does not have.
    let shard = folder.path().join("model-00001-of-00002.safetensors");
    let zero = 0f32.to_le_bytes();
    let view = TensorView::new(Dtype::F32, vec![1], &zero).unwrap();
    serialize_to_file([("of_the_index", view)], None, &shard).unwrap();
    let map = json!({"of_the_index": "model-00001-of-00002.safetensors"});
    let index = folder.path().join("model.safetensors.index.json");
    set(&index, "weight_map", Some(map));

    let model = HubModel::open(folder.path()).unwrap();
    assert!(model.names().eq(whole.names()));
    let weights = model.expert_weights(0).unwrap();
    assert_eq!(weights, whole.expert_weights(0).unwrap());

    fs::remove_file(folder.path().join("model.safetensors")).unwrap();
    let model = HubModel::open(folder.path()).unwrap();
    assert!(model.names().eq(["of_the_index"]));
}

#[test]
fn a_shard_name_cannot_leave_the_folder() {
    for name in [
        "../model.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:b.safetensors",
        "./b.safetensors",
        "b.safetensors/",
        "..",
        "",
        "config.json",
        "b.safetensors\0",
    ] {
        let folder = sharded();
        let index = folder.path().join("model.safetensors.index.json");
        set(&index, "weight_map", Some(json!({"lm_head.weight": name})));
        let message = folders::open_error(&folder);
        assert_contains(
            &message,
            &[
                "index.json",
                &format!("{name:?}"),
                "not a plain .safetensors",
            ],
        );
    }
}

#[test]
fn index_and_shards_must_agree() {
    let folder = sharded();
    let index = folder.path().join("model.safetensors.index.json");
    let text = fs::read_to_string(&index).unwrap();
    fs::write(
        &index,
        text.replace("model.norm.weight", "model.norn.weight"),
    )
    .unwrap();
    assert_contains(
        &folders::open_error(&folder),
        &["disagree", "model.norn.weight"],
    );

    let mut map: serde_json::Value = serde_json::from_str(&text).unwrap();
    map["weight_map"]
        .as_object_mut()
        .unwrap()
        .remove("model.norm.weight");
    fs::write(&index, map.to_string()).unwrap();
    assert_contains(
        &folders::open_error(&folder),
        &["disagree", "model.norm.weight"],
    );
}

#[test]
fn a_write_that_fails_leaves_the_folder_as_it_was() {
    let model = open(STACKED[0]);
    let target = tempfile::tempdir().unwrap();
    let file = target.path().join("model.safetensors");
    fs::write(&file, "somebody else's").unwrap();

    let zeros = |size| HostTensor::new([size], vec![0.0; size]).unwrap();
    let error = write(target.path(), &model, "model.norm.weigth", &zeros(32)).unwrap_err();
    assert_contains(&error.to_string(), &["did you mean \"model.norm.weight\"?"]);
    let error = write(target.path(), &model, "model.norm.weight", &zeros(31)).unwrap_err();
    assert_contains(
        &error.to_string(),
        &["model.norm.weight", "[31]", "expected [32]"],
    );
    let refused = ModelWriter::new(&model, target.path(), MAX_SHARD_BYTES)
        .unwrap()
        .write(|_| Err(InterchangeError::EmptyAdapter));
    assert!(matches!(refused, Err(InterchangeError::EmptyAdapter)));
    fs::create_dir(target.path().join("config.json")).unwrap();
    let error = ModelWriter::new(&model, target.path(), MAX_SHARD_BYTES).err();
    let message = error.unwrap().to_string();
    assert_contains(&message, &["config.json is not a regular file"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "somebody else's");
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 2, "leftovers");

    fs::remove_dir(target.path().join("config.json")).unwrap();
    let writer = ModelWriter::new(&model, target.path(), MAX_SHARD_BYTES).unwrap();
    writer
        .write(|_| Ok::<_, InterchangeError>(BTreeMap::new()))
        .unwrap();
    let source = folders::at(STACKED[0]).join("model.safetensors");
    assert!(fs::read(&file).unwrap() == fs::read(source).unwrap());
}
