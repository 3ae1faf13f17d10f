//! Arbitrary bytes, and valid files damaged at random, never make the readers panic.
//!
//! Under `cargo test` each target runs for a bounded time; `cargo bolero test` runs it for as long as
//! wanted.

mod made;

use bolero::{TypeGenerator, check};
use made::Family;
use moe_lora_files::TensorFile;
use moe_lora_interchange::{HubModel, ModelConfig};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize_to_file};
use std::fs;
use std::ops::Range;
use std::panic::RefUnwindSafe;
use std::path::Path;
use std::time::Duration;

const TIME: Duration = Duration::from_secs(3);

/// A file as it is written in the place of a valid one.
#[derive(Debug, Clone, TypeGenerator)]
enum Damage {
    /// Only these bytes.
    Bytes(Vec<u8>),
    /// The valid file with some bytes replaced, and maybe cut short.
    Edits {
        edits: Vec<(u32, u8)>,
        length: Option<u32>,
    },
    /// The valid file with a piece of it taken out or copied elsewhere.
    Piece {
        from: u32,
        length: u8,
        to: u32,
        keep: bool,
    },
    /// The valid file with a number in it replaced.
    Number { which: u32, value: i64 },
}

impl Damage {
    fn apply(&self, valid: &[u8]) -> Vec<u8> {
        let within = |place: u32| place as usize % (valid.len() + 1);
        let mut bytes = valid.to_vec();
        match self {
            Damage::Bytes(all) => return all.clone(),
            Damage::Edits { edits, length } => {
                for (place, byte) in edits {
                    bytes[*place as usize % valid.len()] = *byte;
                }
                bytes.truncate(length.map_or(valid.len(), within));
            }
            Damage::Piece {
                from,
                length,
                to,
                keep,
            } => {
                let from = within(*from);
                let end = valid.len().min(from + *length as usize);
                if !keep {
                    bytes.drain(from..end);
                }
                let to = within(*to).min(bytes.len());
                bytes.splice(to..to, valid[from..end].iter().copied());
            }
            Damage::Number { which, value } => {
                let digit = |i: &usize| {
                    valid[*i].is_ascii_digit() && (*i == 0 || !valid[*i - 1].is_ascii_digit())
                };
                let starts: Vec<usize> = (0..valid.len()).filter(digit).collect();
                if let Some(&start) = starts.get(*which as usize % starts.len().max(1)) {
                    let digits = valid[start..].iter().take_while(|b| b.is_ascii_digit());
                    let end = start + digits.count();
                    bytes.splice(start..end, value.to_string().into_bytes());
                }
            }
        }
        bytes
    }
}

/// Everything that can be read of the model in `folder`.
fn read_all(folder: &Path) {
    let Ok(model) = HubModel::open(folder) else {
        return;
    };
    // Nothing is allocated that the files do not hold, so large numbers of layers end here.
    for layer in model.config().moe_layers().take(4) {
        if let Ok(weights) = model.expert_weights(layer) {
            weights.into_hub(layer, &model).unwrap();
        }
        let _ = model.router(layer);
        let _ = model.shared_expert(layer);
    }
    for name in model.names() {
        let _ = model.tensor(name);
    }
}

/// Damages a part of the valid file at `path` for a while, and reads what comes of it.
fn fuzz(path: &Path, part: Range<usize>, read: impl Fn(&Path) + RefUnwindSafe) {
    let valid = fs::read(path).unwrap();
    check!()
        .with_type::<Damage>()
        .with_test_time(TIME)
        .with_iterations(usize::MAX)
        .for_each(|damage| {
            let damaged = damage.apply(&valid[part.clone()]);
            let pieces = [&valid[..part.start], &damaged, &valid[part.end..]];
            fs::write(path, pieces.concat()).unwrap();
            read(path);
        });
}

/// Damages the configuration alone, without weights.
fn fuzz_config(family: Family) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let text = family.config.to_string();
    fs::write(&path, &text).unwrap();
    fuzz(&path, 0..text.len(), |_| {
        let _ = ModelConfig::read(folder.path());
    });
}

#[test]
fn damaged_configurations_of_mixtral() {
    fuzz_config(Family::mixtral([6, 5]));
}

#[test]
fn damaged_configurations_of_deepseek_v3() {
    fuzz_config(Family::deepseek_v3([6, 5]));
}

#[test]
fn configurations_that_do_not_fit_the_weights() {
    let made = Family::deepseek_v3([6, 5]).write(Dtype::F32, 1);
    let path = made.folder.path().join("config.json");
    let length = fs::metadata(&path).unwrap().len() as usize;
    fuzz(&path, 0..length, |_| read_all(made.folder.path()));
}

#[test]
fn damaged_indexes() {
    let made = Family::gpt_oss([6, 5]).write(Dtype::F32, 2);
    let path = made.folder.path().join("model.safetensors.index.json");
    let length = fs::metadata(&path).unwrap().len() as usize;
    fuzz(&path, 0..length, |_| read_all(made.folder.path()));
}

#[test]
fn damaged_headers_of_tensor_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.safetensors");
    let data = [0; 48];
    let view = |dtype, shape, bytes| TensorView::new(dtype, shape, &data[..bytes]).unwrap();
    let views = [
        ("wide", view(Dtype::F64, vec![1, 2], 16)),
        ("float", view(Dtype::F32, vec![2, 3], 24)),
        ("half", view(Dtype::BF16, vec![3], 6)),
        ("nibbles", view(Dtype::F4, vec![4], 2)),
    ];
    serialize_to_file(views, None, &path).unwrap();
    let header = u64::from_le_bytes(*fs::read(&path).unwrap().first_chunk().unwrap());
    fuzz(&path, 0..8 + header as usize, |path| {
        let Ok(file) = TensorFile::open(path.to_owned()) else {
            return;
        };
        for name in file.names() {
            let _ = file.tensor(name);
            let rows = file.info(name).unwrap().shape.first().copied();
            for row in 0..rows.unwrap_or(0).min(4) {
                let _ = file.widen_outer(name, row, &mut Vec::new());
            }
        }
    });
}
