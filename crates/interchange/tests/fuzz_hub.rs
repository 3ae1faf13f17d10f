//! Arbitrary bytes, and valid files damaged at random, never make the readers panic.
//!
//! Under `cargo test` each target runs for a bounded time; `cargo bolero test` runs it for as long as
//! wanted.

mod made;

use bolero::{TypeGenerator, check};
use made::Family;
use moe_lora_interchange::HubModel;
use safetensors::Dtype;
use std::fs;
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

/// Damages `file` of a folder of `family` for a while.
fn fuzz(family: Family, shards: usize, file: &str, piece: fn(&[u8]) -> (usize, usize)) {
    let made = family.write(Dtype::F32, shards);
    let path = made.folder.path().join(file);
    let valid = fs::read(&path).unwrap();
    let (begin, end) = piece(&valid);
    check!()
        .with_type::<Damage>()
        .with_test_time(TIME)
        .with_iterations(usize::MAX)
        .for_each(|damage| {
            let damaged = damage.apply(&valid[begin..end]);
            fs::write(&path, [&valid[..begin], &damaged, &valid[end..]].concat()).unwrap();
            read_all(made.folder.path());
        });
}

fn whole(bytes: &[u8]) -> (usize, usize) {
    (0, bytes.len())
}

/// The length of the header and the header.
fn header(bytes: &[u8]) -> (usize, usize) {
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    (0, 8 + length)
}

#[test]
fn damaged_configurations() {
    fuzz(Family::deepseek_v3([6, 5]), 1, "config.json", whole);
}

#[test]
fn damaged_configurations_of_attention() {
    fuzz(Family::qwen3_moe([6, 5]), 1, "config.json", whole);
}

#[test]
fn damaged_indexes() {
    fuzz(
        Family::gpt_oss([6, 5]),
        2,
        "model.safetensors.index.json",
        whole,
    );
}

#[test]
fn damaged_headers() {
    fuzz(Family::gpt_oss([6, 5]), 1, "model.safetensors", header);
}
