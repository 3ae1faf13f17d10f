//! Saving and loading a checkpoint against a plain sequential write and read of the same bytes, and
//! the memory that a load at another topology takes.
//!
//! Adapters of a 128-expert model in f32 with two optimizer moments. Each side goes first in every
//! second round; both write the same memory, wait for the disk, and read into fresh memory, once
//! from the disk and once from the page cache, the plain side on one thread and a load on its two.
//! Prints median speeds and the median of the rounds' ratios. Memory and bytes read are those of a
//! process that does nothing else.
//!
//! ```text
//! cargo bench -p moe-lora-benches --profile dev --bench checkpoint -- [--mib 2048] [--rounds 5]
//! ```

use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use moe_lora_checkpoint::{
    Axis, Checkpoint, CheckpointError, Dtype, GroupSizes, Loaded, Save, ShardedTensor, Strictness,
    TensorLayout, reshard,
};

const EXPERTS: usize = 128;
const HIDDEN: usize = 2048;
const INTERMEDIATE: usize = 768;
const RANK: usize = 16;
const MIB: usize = 1 << 20;
/// Bytes that all tensors are slices of; more than fits into the caches of a core.
const NOISE: usize = 64 * MIB;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().collect();
    // `cargo bench` passes flags of the usual harness; a test run only compiles this.
    if args.iter().any(|arg| arg == "--test") {
        return Ok(());
    }
    let value = |flag: &str| {
        let at = args.iter().position(|arg| arg == flag)?;
        args.get(at + 1).cloned()
    };
    let number = |flag: &str, default: usize| -> Outcome<usize> {
        Ok(value(flag)
            .map(|text| text.parse())
            .transpose()?
            .unwrap_or(default))
    };
    let layouts = layouts(number("--mib", 2048)? * MIB);
    if let Some(folder) = value("--load-only") {
        return load_only(Path::new(&folder), &layouts);
    }
    if let Some(folder) = value("--reshard-only") {
        return reshard_only(Path::new(&folder));
    }
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    compare(folder.path(), &layouts, number("--rounds", 5)?)?;
    measure_memory(folder.path(), &layouts)
}

/// Grouped factors of fused gate/up and down with two moments each, of as many layers as fill `bytes`.
fn layouts(bytes: usize) -> Vec<TensorLayout> {
    let layer = |layer: usize| {
        let factor = |name: &str, shape: [usize; 3], axis: usize, fragments: usize| {
            ["", ".adamw.moment_1", ".adamw.moment_2"].map(|state| {
                let key = format!("model.layers.{layer}.mlp.experts.{name}{state}");
                TensorLayout::new(key, Dtype::F32, shape)
                    .with_axis(0, Axis::Ep)
                    .with_axis(axis, Axis::ExpertTp)
                    .with_fragments(axis, fragments)
            })
        };
        [
            factor("gate_up_proj.lora_A", [EXPERTS, RANK, HIDDEN], 1, 1),
            factor(
                "gate_up_proj.lora_B",
                [EXPERTS, 2 * INTERMEDIATE, RANK],
                1,
                2,
            ),
            factor("down_proj.lora_A", [EXPERTS, RANK, INTERMEDIATE], 2, 1),
            factor("down_proj.lora_B", [EXPERTS, HIDDEN, RANK], 1, 1),
        ]
        .concat()
    };
    let each: usize = layer(0)
        .iter()
        .map(|layout| layout.whole().byte_len())
        .sum();
    (0..bytes.div_ceil(each)).flat_map(layer).collect()
}

fn noise() -> Vec<u8> {
    let mut bytes = vec![0; NOISE];
    let mut state = 1u64;
    for chunk in bytes.chunks_exact_mut(8) {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        chunk.copy_from_slice(&(state ^ (state >> 31)).to_le_bytes());
    }
    bytes
}

/// The bytes of a rank's shard: another slice of the noise for each tensor.
fn shard_bytes<'a>(noise: &'a [u8], shard: &ShardedTensor) -> &'a [u8] {
    let hash = shard.key.bytes().fold(0, |hash: usize, byte| {
        hash.wrapping_mul(31) + usize::from(byte)
    });
    let begin = hash % (NOISE - shard.byte_len());
    &noise[begin..begin + shard.byte_len()]
}

fn save(folder: &Path, layouts: &[TensorLayout], sizes: GroupSizes, noise: &[u8]) -> Outcome<()> {
    let mut last = None;
    for place in sizes.places()? {
        let save = Save::begin(folder, place, 0)?;
        save.write(layouts, |shard| {
            Ok(Cow::Borrowed(shard_bytes(noise, shard)))
        })?;
        last = Some(save);
    }
    last.expect("there is a rank").commit(Default::default())?;
    Ok(())
}

fn wanted(
    layouts: &[TensorLayout],
    sizes: GroupSizes,
) -> Result<Vec<ShardedTensor>, CheckpointError> {
    let place = sizes.place(sizes.world - 1)?;
    layouts.iter().map(|layout| layout.shard(&place)).collect()
}

fn load(folder: &Path, wanted: &[ShardedTensor]) -> Outcome<Loaded> {
    Ok(Checkpoint::open(folder)?.load(wanted, Strictness::Exact)?.0)
}

/// Medians over rounds of save, cold load and warm load, and of the plain side of each.
fn compare(folder: &Path, layouts: &[TensorLayout], rounds: usize) -> Outcome<()> {
    let noise = noise();
    let (one, plain) = (GroupSizes::new(1, 1), folder.join("plain"));
    let wanted = wanted(layouts, one)?;
    let bytes: usize = wanted.iter().map(ShardedTensor::byte_len).sum();
    println!(
        "{} tensors, {} MiB, medians of {rounds} alternating rounds",
        layouts.len(),
        bytes / MIB
    );

    let write_plain = || -> Outcome<()> {
        let mut file = File::create(&plain)?;
        for shard in &wanted {
            file.write_all(shard_bytes(&noise, shard))?;
        }
        Ok(file.sync_all()?)
    };
    // Into one buffer a tensor, as a load has it: in what pieces memory is asked for decides how
    // much of it is fresh, which costs more than copying into it.
    let read_plain = || -> Outcome<()> {
        let mut file = File::open(&plain)?;
        let mut all = Vec::new();
        for shard in &wanted {
            let mut bytes = vec![0; shard.byte_len()];
            file.read_exact(&mut bytes)?;
            all.push(bytes);
        }
        assert_eq!(all.len(), wanted.len(), "every tensor was read");
        Ok(())
    };
    let checkpoint = folder.join("checkpoint");
    let write = || save(&checkpoint, layouts, one, &noise);
    let read = || -> Outcome<()> {
        let loaded = load(&checkpoint, &wanted)?;
        assert_eq!(loaded.len(), wanted.len(), "every tensor was loaded");
        Ok(())
    };

    let (mut saves, mut cold, mut warm) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        // No side overwrites or finds in the cache what the other left.
        fs::remove_dir_all(folder)?;
        fs::create_dir_all(folder)?;
        saves.push(pair(round, &write_plain, &write)?);
        forget(folder)?;
        cold.push(pair(round, &read_plain, &read)?);
        warm.push(pair(round, &read_plain, &read)?);
    }
    let loaded = load(&checkpoint, &wanted)?;
    for shard in &wanted {
        assert!(
            loaded[&shard.key].bytes == shard_bytes(&noise, shard),
            "{shard}"
        );
    }

    println!(
        "{:<24}{:>12}{:>16}{:>8}",
        "", "plain MiB/s", "checkpoint", "ratio"
    );
    for (name, pairs) in [
        ("save, to the disk", saves),
        ("load, from the disk", cold),
        ("load, from the cache", warm),
    ] {
        let speed = |side: usize| {
            let times = pairs.iter().map(|pair| pair[side].as_secs_f64());
            bytes as f64 / MIB as f64 / median(times)
        };
        // The two of a round met the same other work on the machine.
        let ratios = pairs
            .iter()
            .map(|[plain, ours]| plain.as_secs_f64() / ours.as_secs_f64());
        let (plain, ours, ratio) = (speed(0), speed(1), median(ratios));
        println!("{name:<24}{plain:>12.0}{ours:>16.0}{ratio:>8.2}");
    }
    fs::remove_dir_all(folder)?;
    Ok(())
}

/// Times both sides, the second first in every second round.
fn pair(
    round: usize,
    plain: &dyn Fn() -> Outcome<()>,
    ours: &dyn Fn() -> Outcome<()>,
) -> Outcome<[Duration; 2]> {
    let time = |side: &dyn Fn() -> Outcome<()>| -> Outcome<Duration> {
        let start = Instant::now();
        side()?;
        Ok(start.elapsed())
    };
    Ok(if round.is_multiple_of(2) {
        [time(plain)?, time(ours)?]
    } else {
        let ours = time(ours)?;
        [time(plain)?, ours]
    })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Has the system drop its copies of all files in a folder.
fn forget(folder: &Path) -> Outcome<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            forget(&path)?;
            continue;
        }
        #[cfg(target_os = "linux")]
        {
            use std::os::fd::AsRawFd;
            let file = File::open(&path)?;
            file.sync_all()?;
            // SAFETY: the descriptor is open for the whole call, which only gives advice.
            let code =
                unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
            assert_eq!(code, 0, "the advice was taken");
        }
    }
    Ok(())
}

/// Saves at (2, 2), then loads one rank of (1, 4) and reshards, each in a process of its own.
fn measure_memory(folder: &Path, layouts: &[TensorLayout]) -> Outcome<()> {
    if !cfg!(target_os = "linux") {
        println!("memory: skipped, needs /proc");
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    save(folder, layouts, GroupSizes::new(2, 2), &noise())?;
    let shards = wanted(layouts, GroupSizes::new(1, 4))?;
    let own = shards.iter().map(ShardedTensor::byte_len).sum::<usize>() / MIB;
    let limit = own * 11 / 10 + 64;
    let mib = layouts
        .iter()
        .map(|layout| layout.whole().byte_len())
        .sum::<usize>()
        / MIB;
    for (flag, what) in [
        ("--load-only", "load at (1, 4) of (2, 2)"),
        ("--reshard-only", "reshard to (1, 4) of (2, 2)"),
    ] {
        let child = Command::new(std::env::current_exe()?)
            .args([flag.as_ref(), folder.as_os_str()])
            .args(["--mib", &mib.to_string()])
            .output()?;
        let text = String::from_utf8(child.stdout)?;
        let numbers: Vec<usize> = text
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let [peak, read] = numbers[..] else {
            return Err(String::from_utf8_lossy(&child.stderr).into_owned().into());
        };
        println!(
            "{what}: a rank has {own} MiB, peak {peak} MiB (at most {limit}), read {read} MiB"
        );
        assert!(peak <= limit, "the peak is within its bound");
    }
    Ok(())
}

/// Loads the last rank of (1, 4) and prints the peak of this process and what it read, in MiB.
fn load_only(folder: &Path, layouts: &[TensorLayout]) -> Outcome<()> {
    let loaded = load(folder, &wanted(layouts, GroupSizes::new(1, 4))?)?;
    assert_eq!(loaded.len(), layouts.len());
    print_usage()
}

fn reshard_only(folder: &Path) -> Outcome<()> {
    let target = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    reshard(
        &Checkpoint::open(folder)?,
        target.path(),
        GroupSizes::new(1, 4),
        |_| (),
    )?;
    print_usage()
}

fn print_usage() -> Outcome<()> {
    let field = |file: &str, name: &str| -> Outcome<usize> {
        let text = fs::read_to_string(file)?;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        Ok(number.ok_or("no such field")?.parse()?)
    };
    let peak = field("/proc/self/status", "VmHWM:")? / 1024;
    let read = field("/proc/self/io", "rchar:")? / MIB;
    println!("{peak} {read}");
    Ok(())
}
