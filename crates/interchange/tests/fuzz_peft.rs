//! Adapter folders of arbitrary content, and copies of the fixtures with faults: an error or an
//! adapter, never a panic. A longer run: `BOLERO_RANDOM_TEST_TIME_MS=600000`, or `cargo bolero`.

mod folders;

use bolero::check;
use folders::{CONSTITUTION, DORA, PER_EXPERT, SETTINGS, STACKED, WEIGHTS, at, open};
use moe_lora_interchange::{ModelConfig, PeftAdapter, PeftLayout};
use serde_json::{Value, json};
use std::fs;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::time::Duration;
use tempfile::TempDir;

const TEST_TIME: Duration = Duration::from_millis(700);
const ITERATIONS: usize = 20_000;

/// An adapter of the fixtures, held in memory.
struct Seed {
    config: ModelConfig,
    settings: Vec<u8>,
    weights: Vec<u8>,
}

/// One of each layout: three of the fixtures, and one written here.
fn seeds() -> Vec<Seed> {
    let seed = |folder: &std::path::Path, config: &ModelConfig| Seed {
        config: config.clone(),
        settings: fs::read(folder.join(SETTINGS)).unwrap(),
        weights: fs::read(folder.join(WEIGHTS)).unwrap(),
    };
    let mut seeds: Vec<Seed> = [STACKED[0], PER_EXPERT, DORA]
        .map(|model| seed(&at(model).join("adapter"), open(model).config()))
        .into();
    let config = open(CONSTITUTION).config().clone();
    let mut shared = folders::noise_adapter(&config, 2);
    for layer in shared.layers.values_mut() {
        for (name, pair) in layer.pairs_mut() {
            let factor = if name == "down" {
                &mut pair.b
            } else {
                &mut pair.a
            };
            *factor = folders::noise([&[1], &factor.shape()[1..]].concat(), 0);
        }
    }
    let folder = TempDir::new().unwrap();
    shared
        .write(folder.path(), &config, PeftLayout::SharedOuter, "")
        .unwrap();
    seeds.push(seed(folder.path(), &config));
    seeds
}

/// Reads the folder of these two files, and writes in every layout what it holds.
fn read_and_write(config: &ModelConfig, settings: &[u8], weights: &[u8]) -> bool {
    let folder = TempDir::new().unwrap();
    fs::write(folder.path().join(SETTINGS), settings).unwrap();
    fs::write(folder.path().join(WEIGHTS), weights).unwrap();
    let Ok(adapter) = PeftAdapter::read(folder.path(), config) else {
        return false;
    };
    let _ = adapter.fuse_gate_up();
    let forms = [adapter.expand(config.num_experts), Ok(adapter)];
    for form in forms.into_iter().flatten() {
        for layout in [
            PeftLayout::Stacked,
            PeftLayout::PerExpert,
            PeftLayout::SharedOuter,
        ] {
            let _ = form.write(folder.path(), config, layout, "");
        }
    }
    true
}

/// Faults in `bytes`, in the first `within` of them: overwritten, removed, doubled and cut.
fn mutate(bytes: &[u8], within: usize, faults: &[(u32, u8, u8)]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for &(at, operation, byte) in faults {
        let at = at as usize % within.min(bytes.len()).max(1);
        if bytes.is_empty() {
            break;
        }
        match operation % 8 {
            0 => drop(bytes.drain(at..(at + usize::from(byte)).min(bytes.len()))),
            1 => bytes.insert(at, byte),
            2 => bytes.truncate(at),
            3 => bytes.extend_from_within(at..),
            // A digit: another number in its place, mostly of a shape or an offset.
            4..=6 if bytes[at].is_ascii_digit() => bytes[at] = b'0' + byte % 10,
            _ => bytes[at] = byte,
        }
    }
    bytes
}

fn fuzz<T>(run: impl Fn(&[Seed], &T) + RefUnwindSafe + UnwindSafe)
where
    T: bolero::TypeGenerator + std::fmt::Debug + UnwindSafe + 'static,
{
    let seeds = std::panic::AssertUnwindSafe(seeds());
    check!()
        .with_test_time(TEST_TIME)
        .with_iterations(ITERATIONS)
        .with_type::<T>()
        .for_each(move |input| run(&seeds, input));
}

#[test]
fn the_seeds_themselves_are_read() {
    for seed in seeds() {
        assert!(read_and_write(&seed.config, &seed.settings, &seed.weights));
    }
}

#[test]
fn arbitrary_files() {
    fuzz(|seeds, (of, settings, bytes): &(u8, bool, Vec<u8>)| {
        let seed = &seeds[usize::from(*of) % seeds.len()];
        match settings {
            true => read_and_write(&seed.config, bytes, &seed.weights),
            false => read_and_write(&seed.config, &seed.settings, bytes),
        };
    });
}

#[test]
fn damaged_settings() {
    fuzz(|seeds, (of, faults): &(u8, Vec<(u32, u8, u8)>)| {
        let seed = &seeds[usize::from(*of) % seeds.len()];
        let settings = mutate(&seed.settings, usize::MAX, faults);
        read_and_write(&seed.config, &settings, &seed.weights);
    });
}

#[test]
fn settings_of_other_values() {
    fuzz(|seeds, (of, changes): &(u8, Vec<(u8, u8, i64, String)>)| {
        let seed = &seeds[usize::from(*of) % seeds.len()];
        let mut settings: Value = serde_json::from_slice(&seed.settings).unwrap();
        let fields = settings.as_object_mut().unwrap();
        let names: Vec<String> = fields.keys().cloned().collect();
        for (field, kind, number, text) in changes {
            let value = match kind % 10 {
                0 => json!(null),
                1 => json!(number % 2 == 0),
                2 => json!(number),
                3 => json!(number % 9),
                4 => json!(*number as f64 / 3.0),
                5 => json!(text),
                6 => json!([text, "gate_proj", "up_proj", "down_proj"]),
                7 => json!({text: number % 9, "down_proj": 4}),
                8 => json!({".*": number}),
                _ => json!(format!(".*({text}|experts.*)")),
            };
            let name = &names[usize::from(*field) % names.len()];
            fields.insert(name.clone(), value);
        }
        let settings = settings.to_string();
        read_and_write(&seed.config, settings.as_bytes(), &seed.weights);
    });
}

#[test]
fn damaged_weights() {
    fuzz(|seeds, (of, faults): &(u8, Vec<(u32, u8, u8)>)| {
        let seed = &seeds[usize::from(*of) % seeds.len()];
        let header = u64::from_le_bytes(*seed.weights.first_chunk().unwrap());
        let weights = mutate(&seed.weights, 8 + header as usize, faults);
        read_and_write(&seed.config, &seed.settings, &weights);
    });
}

/// Sizes of the model that the adapter is not for.
#[test]
fn models_of_other_sizes() {
    fuzz(|seeds, (of, sizes): &(u8, [u32; 4])| {
        let seed = &seeds[usize::from(*of) % seeds.len()];
        let mut config = seed.config.clone();
        let size = |index: usize, most: u32| sizes[index] as usize % most as usize + 1;
        config.num_experts = size(0, 1 << 16);
        config.num_hidden_layers = size(1, 64);
        config.hidden_size = size(2, i32::MAX as u32);
        config.moe_intermediate_size = size(3, i32::MAX as u32);
        read_and_write(&config, &seed.settings, &seed.weights);
    });
}
