//! Models written with some tensors replaced: what changes, what stays, and where it may be written.

mod folders;
mod made;

use folders::assert_contains;
use made::{FLOATS, Family, LAYERS, Made};
use moe_lora_interchange::{HostTensor, HubModel, InterchangeError, MAX_SHARD_BYTES, ModelWriter};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const SIZES: [usize; 2] = [6, 5];

/// Every tensor of a model: type, shape and bytes.
fn tensors(model: &HubModel) -> BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> {
    let names = model.names().map(str::to_owned);
    let all = names.map(|name| {
        let stored = model.stored(&name).unwrap();
        let tensor = (
            stored.dtype(),
            stored.shape().to_vec(),
            stored.bytes().to_vec(),
        );
        (name, tensor)
    });
    all.collect()
}

/// Every expert read and given back as it is.
fn unchanged(
    model: &HubModel,
    layer: usize,
) -> Result<BTreeMap<String, HostTensor>, InterchangeError> {
    match model.config().is_moe(layer) {
        true => model.expert_weights(layer)?.into_hub(layer, model),
        false => Ok(BTreeMap::new()),
    }
}

fn nothing(_: usize) -> Result<BTreeMap<String, HostTensor>, InterchangeError> {
    Ok(BTreeMap::new())
}

fn files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn experts_read_and_written_back_are_equal_to_the_bit() {
    for family in 0..Family::all(SIZES).len() {
        for dtype in FLOATS {
            for (shards_in, max_bytes) in [
                (1, MAX_SHARD_BYTES),
                (3, 2000),
                (1, 2000),
                (3, MAX_SHARD_BYTES),
            ] {
                let sizes = if shards_in == 1 { SIZES } else { [8, 4] };
                let made = Family::all(sizes)
                    .into_iter()
                    .nth(family)
                    .unwrap()
                    .write(dtype, shards_in);
                let model = made.open();
                let target = tempfile::tempdir().unwrap();
                let writer = ModelWriter::new(&model, target.path(), max_bytes).unwrap();
                let mut layers = Vec::new();
                writer
                    .write(|layer| {
                        layers.push(layer);
                        let tensors = unchanged(&model, layer)?;
                        assert_eq!(tensors.is_empty(), !model.config().is_moe(layer));
                        Ok::<_, InterchangeError>(tensors)
                    })
                    .unwrap();
                assert_eq!(layers, [0, 1, 2]);
                let written = HubModel::open(target.path()).unwrap();
                assert!(
                    tensors(&written) == tensors(&model),
                    "{:?} {dtype}",
                    model.config().family
                );
                assert_eq!(written.config(), model.config());
                let single = files(target.path()).contains(&"model.safetensors".to_owned());
                assert_eq!(single, max_bytes == MAX_SHARD_BYTES);
            }
        }
    }
}

#[test]
fn a_replaced_element_is_the_only_one_that_changes() {
    type Case = (fn([usize; 2]) -> Family, [(&'static str, usize); 3]);
    let cases: [Case; 3] = [
        // Expert 2, gate and up at f 3 and h 4, down at h 4 and f 3, with H 6 and F 5.
        (
            Family::mixtral,
            [
                ("block_sparse_moe.experts.2.w1.weight", 3 * 6 + 4),
                ("block_sparse_moe.experts.2.w3.weight", 3 * 6 + 4),
                ("block_sparse_moe.experts.2.w2.weight", 4 * 5 + 3),
            ],
        ),
        (
            Family::gpt_oss,
            [
                ("mlp.experts.gate_up_proj", (2 * 6 + 4) * 10 + 6),
                ("mlp.experts.gate_up_proj", (2 * 6 + 4) * 10 + 7),
                ("mlp.experts.down_proj", (2 * 5 + 3) * 6 + 4),
            ],
        ),
        (
            Family::mixtral_stacked,
            [
                ("mlp.experts.gate_up_proj", (2 * 10 + 3) * 6 + 4),
                ("mlp.experts.gate_up_proj", (2 * 10 + 5 + 3) * 6 + 4),
                ("mlp.experts.down_proj", (2 * 6 + 4) * 5 + 3),
            ],
        ),
    ];
    for (make, places) in cases {
        let made = make(SIZES).write(Dtype::F32, 1);
        let model = made.open();
        for (which, (name, index)) in places.into_iter().enumerate() {
            let target = tempfile::tempdir().unwrap();
            let writer = ModelWriter::new(&model, target.path(), MAX_SHARD_BYTES).unwrap();
            let change = |layer| {
                let mut weights = model.expert_weights(layer)?;
                if layer == 1 {
                    let tensor = [&mut weights.gate, &mut weights.up, &mut weights.down];
                    let [_, rows, columns] = *tensor[which].shape() else {
                        unreachable!()
                    };
                    let at = match which {
                        2 => (2 * rows + 4) * columns + 3,
                        _ => (2 * rows + 3) * columns + 4,
                    };
                    let mut data = tensor[which].data().to_vec();
                    data[at] = -1.0;
                    *tensor.into_iter().nth(which).unwrap() =
                        HostTensor::new([4, rows, columns], data)?;
                }
                weights.into_hub(layer, &model)
            };
            writer.write(change).unwrap();
            let (old, mut new) = (
                tensors(&model),
                tensors(&HubModel::open(target.path()).unwrap()),
            );
            let changed = &mut new.get_mut(&format!("model.layers.1.{name}")).unwrap().2;
            let element = &mut changed[4 * index..4 * index + 4];
            assert_eq!(*element, (-1.0f32).to_le_bytes(), "{name} at {index}");
            element.copy_from_slice(
                &old[&format!("model.layers.1.{name}")].2[4 * index..4 * index + 4],
            );
            assert!(new == old, "{name} at {index}");
        }
    }
}

#[test]
fn shards_are_numbered_in_the_order_of_the_layers() {
    let mut family = Family::mixtral(SIZES);
    family.config["num_hidden_layers"] = 11.into();
    for layer in LAYERS..11 {
        for (name, shape) in family.tensors.clone() {
            if let Some(rest) = name.strip_prefix("model.layers.0.") {
                family
                    .tensors
                    .insert(format!("model.layers.{layer}.{rest}"), shape);
            }
        }
    }
    let made = family.write(Dtype::F32, 1);
    let model = made.open();
    let target = tempfile::tempdir().unwrap();
    // One layer is 4 * (4 * 3 * 30 + 24 + 6) bytes.
    let max_bytes = 2000;
    let writer = ModelWriter::new(&model, target.path(), max_bytes).unwrap();
    let names: Vec<String> = writer.file_names().into_iter().map(str::to_owned).collect();
    writer.write(|layer| unchanged(&model, layer)).unwrap();

    let index: Value = serde_json::from_slice(
        &fs::read(target.path().join("model.safetensors.index.json")).unwrap(),
    )
    .unwrap();
    let map = index["weight_map"].as_object().unwrap();
    let shard = |name: &str| map[name].as_str().unwrap();
    let norms = (0..11).map(|layer| shard(&format!("model.layers.{layer}.input_layernorm.weight")));
    assert!(norms.is_sorted());
    let count = names.len();
    assert!(count > 8);
    let expected = (1..=count).map(|i| format!("model-{i:05}-of-{count:05}.safetensors"));
    assert!(expected.eq(names.iter().cloned()));

    let mut total = 0;
    for name in &names {
        let bytes = fs::read(target.path().join(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let size: usize = file.iter().map(|(_, view)| view.data().len()).sum();
        assert!(size <= max_bytes, "{name} has {size} bytes");
        total += size;
    }
    assert_eq!(index["metadata"]["total_size"], total);
    assert!(tensors(&HubModel::open(target.path()).unwrap()) == tensors(&model));
}

#[test]
fn a_tensor_larger_than_a_shard_has_one_of_its_own() {
    let made = Family::gpt_oss(SIZES).write(Dtype::F32, 1);
    let model = made.open();
    let target = tempfile::tempdir().unwrap();
    let writer = ModelWriter::new(&model, target.path(), 1).unwrap();
    assert_eq!(writer.file_names().len(), model.names().count());
    writer.write(nothing).unwrap();
    assert!(tensors(&HubModel::open(target.path()).unwrap()) == tensors(&model));
}

#[test]
fn a_shard_that_is_exactly_full_is_not_split() {
    let made = Family::mixtral(SIZES).write(Dtype::F32, 1);
    let model = made.open();
    let target = tempfile::tempdir().unwrap();
    let bytes = |name| model.stored(name).unwrap().bytes().len();
    let total: usize = model.names().map(bytes).sum();
    for (max_bytes, count) in [(total, 1), (total - 1, 2)] {
        let writer = ModelWriter::new(&model, target.path(), max_bytes).unwrap();
        assert_eq!(writer.file_names().len(), count, "{max_bytes} of {total}");
    }
}

/// Files that the source has besides its weights, and one more that is nobody's.
fn with_companions(made: &Made) {
    for name in [
        "tokenizer.json",
        "merges.txt",
        "generation_config.json",
        "notes.txt",
    ] {
        fs::write(made.folder.path().join(name), name).unwrap();
    }
}

#[test]
fn the_tokenizer_comes_along() {
    let made = Family::mixtral(SIZES).write(Dtype::BF16, 2);
    with_companions(&made);
    let model = made.open();
    let target = tempfile::tempdir().unwrap();
    let writer = ModelWriter::new(&model, target.path(), MAX_SHARD_BYTES).unwrap();
    writer.write(nothing).unwrap();
    let expected = [
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ];
    assert_eq!(files(target.path()), expected);
    let copied = fs::read_to_string(target.path().join("tokenizer.json")).unwrap();
    assert_eq!(copied, "tokenizer.json");

    fs::remove_file(made.folder.path().join("merges.txt")).unwrap();
    fs::create_dir(made.folder.path().join("merges.txt")).unwrap();
    let before = fs::read(target.path().join("model.safetensors")).unwrap();
    let message = writer.write(nothing).unwrap_err().to_string();
    assert_contains(&message, &["merges.txt is not a regular file"]);
    assert!(fs::read(target.path().join("model.safetensors")).unwrap() == before);
    assert_eq!(files(target.path()), expected);
}

#[test]
fn shards_are_not_mixed_with_those_of_another_model() {
    let made = Family::mixtral(SIZES).write(Dtype::F32, 1);
    let model = made.open();
    for (in_the_way, max_bytes) in [
        ("model.safetensors", 2000),
        ("model.safetensors.index.json", 2000),
        ("model.safetensors.index.json", MAX_SHARD_BYTES),
        ("model-00001-of-00002.safetensors", 2000),
        ("model-00001-of-00002.safetensors", MAX_SHARD_BYTES),
    ] {
        let target = tempfile::tempdir().unwrap();
        fs::write(target.path().join(in_the_way), "somebody else's").unwrap();
        let error = ModelWriter::new(&model, target.path(), max_bytes)
            .err()
            .unwrap();
        assert!(
            matches!(error, InterchangeError::Occupied { .. }),
            "{error}"
        );
        assert_contains(&error.to_string(), &[in_the_way, "choose an empty folder"]);
        assert_eq!(files(target.path()), [in_the_way]);
    }
    // What came into the folder in the meantime is found before anything is asked for.
    let target = tempfile::tempdir().unwrap();
    let writer = ModelWriter::new(&model, target.path(), 2000).unwrap();
    fs::write(target.path().join("model.safetensors"), "somebody else's").unwrap();
    let error = writer.write(|_| -> Result<_, InterchangeError> { panic!("asked") });
    assert!(matches!(error, Err(InterchangeError::Occupied { .. })));
}

#[test]
fn a_write_that_fails_at_any_layer_leaves_the_folder_as_it_was() {
    let made = Family::gpt_oss(SIZES).write(Dtype::F16, 1);
    let model = made.open();
    let before = fs::read(made.folder.path().join("model.safetensors")).unwrap();
    for fails in 0..LAYERS {
        let writer = ModelWriter::new(&model, made.folder.path(), MAX_SHARD_BYTES).unwrap();
        let error = writer.write(|layer| match layer == fails {
            true => Err(InterchangeError::EmptyAdapter),
            false => unchanged(&model, layer),
        });
        assert!(matches!(error, Err(InterchangeError::EmptyAdapter)));
        let wide = writer.write(|layer| {
            let mut weights = model.expert_weights(layer)?;
            if layer == fails {
                let mut data = weights.down.data().to_vec();
                data[7] = 1e6;
                weights.down = HostTensor::new(weights.down.shape(), data)?;
            }
            weights.into_hub(layer, &model)
        });
        let message = wide.unwrap_err().to_string();
        assert_contains(&message, &["down_proj", "1000000", "overflows F16"]);
        assert_eq!(
            files(made.folder.path()),
            ["config.json", "model.safetensors"]
        );
        assert!(fs::read(made.folder.path().join("model.safetensors")).unwrap() == before);
    }
}
