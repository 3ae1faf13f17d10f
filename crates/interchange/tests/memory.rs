//! How much memory large models take: their headers on opening, one layer's experts on writing.

mod made;

use made::{EXPERTS, Family};
use moe_lora_interchange::{HubModel, InterchangeError, MAX_SHARD_BYTES, ModelWriter};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::{self, File};
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The system's allocator, counting the bytes in use and the most there were.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// One test at a time is measured.
static MEASURING: Mutex<()> = Mutex::new(());

// SAFETY: every call goes to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let size = layout.size();
        PEAK.fetch_max(IN_USE.fetch_add(size, Relaxed) + size, Relaxed);
        // SAFETY: the caller keeps the same promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the same promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most bytes that `action` had in use beyond those before it.
fn peak<T>(action: impl FnOnce() -> T) -> (T, usize) {
    let before = IN_USE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = action();
    (result, PEAK.load(Relaxed) - before)
}

/// Bytes of this process in physical memory, mapped files included.
#[cfg(target_os = "linux")]
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    let kilobytes: usize = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes * 1024
}

/// A model of 30 GB whose files are holes.
#[cfg(target_os = "linux")]
#[test]
fn opening_thirty_gigabytes_reads_headers_only() {
    const SHARDS: usize = 6;
    let _alone = MEASURING.lock().unwrap();
    let made = Family::mixtral([6, 5]).write(Dtype::F32, 1);
    let at = |name: &str| made.folder.path().join(name);
    fs::remove_file(at("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for shard in 0..SHARDS {
        // 5 GB: 1000 matrices of [2500, 1000] in bf16.
        let (count, bytes) = (1000, 5_000_000);
        let tensors = (0..count).map(|i| {
            let name = format!("model.layers.{shard}.mlp.experts.{i}.up_proj.weight");
            let offsets = [i * bytes, (i + 1) * bytes];
            let info = json!({"dtype": "BF16", "shape": [2500, 1000], "data_offsets": offsets});
            (name, info)
        });
        let header: serde_json::Map<String, Value> = tensors.collect();
        let file = format!("model-{:05}-of-{SHARDS:05}.safetensors", shard + 1);
        map.extend(header.keys().map(|name| (name.clone(), json!(file))));
        let header = Value::Object(header).to_string();
        let mut written = File::create(at(&file)).unwrap();
        written
            .write_all(&(header.len() as u64).to_le_bytes())
            .unwrap();
        written.write_all(header.as_bytes()).unwrap();
        written
            .set_len((8 + header.len() + count * bytes) as u64)
            .unwrap();
    }
    let index = json!({"metadata": {}, "weight_map": map}).to_string();
    fs::write(at("model.safetensors.index.json"), index).unwrap();

    let (start, before) = (Instant::now(), resident());
    let (model, allocated) = peak(|| HubModel::open(made.folder.path()).unwrap());
    let (elapsed, grown) = (start.elapsed(), resident().saturating_sub(before));
    let sizes = model
        .names()
        .map(|name| model.stored(name).unwrap().bytes().len());
    assert_eq!(sizes.sum::<usize>(), 30_000_000_000);
    // Far less on an idle machine; reading 30 GB takes many times this on any.
    assert!(elapsed < Duration::from_secs(2), "{elapsed:?}");
    assert!(allocated < 16 << 20, "{allocated} bytes allocated");
    assert!(grown < 32 << 20, "{grown} bytes in memory");
    // Negative control: reading one tensor shows.
    let (tensor, allocated) = peak(|| model.tensor("model.layers.5.mlp.experts.0.up_proj.weight"));
    assert!(allocated >= 4 * tensor.unwrap().len());
}

#[test]
fn writing_holds_one_layer_at_a_time() {
    let _alone = MEASURING.lock().unwrap();
    let sizes = [256, 64];
    let layer = EXPERTS * 3 * sizes[0] * sizes[1] * 4;
    for mut family in [
        Family::mixtral(sizes),
        Family::gpt_oss(sizes),
        Family::mixtral_stacked(sizes),
    ] {
        family.config["num_hidden_layers"] = 8.into();
        for (name, shape) in family.tensors.clone() {
            if let Some(rest) = name.strip_prefix("model.layers.0.") {
                for layer in 1..8 {
                    family
                        .tensors
                        .insert(format!("model.layers.{layer}.{rest}"), shape.clone());
                }
            }
        }
        let made = family.write(Dtype::F32, 1);
        let model = made.open();
        let name = model.config().family.model_type;
        let target = tempfile::tempdir().unwrap();
        let writer = ModelWriter::new(&model, target.path(), MAX_SHARD_BYTES).unwrap();
        let one = |layer| model.expert_weights(layer)?.into_hub(layer, &model);
        let (result, most) = peak(|| writer.write(one));
        result.unwrap();
        // The experts as read and as stored, less what is given back early.
        assert!(
            2 * most < 5 * layer,
            "{name}: {most} bytes for layers of {layer}"
        );

        // Negative control: all layers at once.
        let target = tempfile::tempdir().unwrap();
        let writer = ModelWriter::new(&model, target.path(), MAX_SHARD_BYTES).unwrap();
        let (_, most) = peak(|| {
            let mut all = std::collections::BTreeMap::new();
            for layer in model.config().moe_layers() {
                all.extend(one(layer).unwrap());
            }
            writer.write(|_| Ok::<_, InterchangeError>(std::mem::take(&mut all)))
        });
        assert!(
            most > 7 * layer,
            "{name}: {most} bytes for layers of {layer}"
        );
    }
}
