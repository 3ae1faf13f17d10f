//! Stacked factors the way round they lie since PEFT 0.19.1, and the way they lay before.

mod folders;

use folders::{
    EXPERTS, SETTINGS, STACKED, Tensors, adapter_error, assert_contains, bytes, deltas, edit,
    floats, noise_adapter, open, set, tensors,
};
use moe_lora_interchange::{ModelConfig, PeftAdapter, PeftLayout};
use serde_json::json;
use tempfile::TempDir;

/// Hidden size and intermediate size: nothing square, then gate-up square, then down square.
const SIZES: [[usize; 2]; 3] = [[12, 5], [12, 6], [6, 6]];

fn config([hidden, ffn]: [usize; 2]) -> ModelConfig {
    let mut config = open(STACKED[0]).config().clone();
    (config.hidden_size, config.moe_intermediate_size) = (hidden, ffn);
    config.num_experts = 3;
    config
}

/// The delta of a parameter as PEFT computes it from the tensors of its file: `A` `[E*r, x]` split
/// into `[E, r, x]`, `B` `[y, r*E]` into `[y, r, E]`, the sum over `r` in the order `[E, x, y]`
/// before 0.19.1 and `[E, y, x]` since.
fn peft_delta(file: &Tensors, module: &str, experts: usize, old: bool, scale: f64) -> Vec<f64> {
    let tensor = |factor| &file[&format!("{module}.lora_{factor}.weight")];
    let ((shape_a, a), (shape_b, b)) = (tensor('A'), tensor('B'));
    let (a, b) = (floats(a), floats(b));
    let (rank, x, y) = (shape_a[0] / experts, shape_a[1], shape_b[0]);
    assert_eq!(shape_b[1], rank * experts);
    let element = |e: usize, x_i: usize, y_i: usize| {
        let terms = (0..rank).map(|k| {
            let b = b[y_i * rank * experts + k * experts + e];
            f64::from(b) * f64::from(a[(e * rank + k) * x + x_i])
        });
        scale * terms.sum::<f64>()
    };
    let mut delta = Vec::new();
    for e in 0..experts {
        match old {
            true => delta.extend(
                (0..x)
                    .flat_map(|i| (0..y).map(move |j| (i, j)))
                    .map(|(i, j)| element(e, i, j)),
            ),
            false => delta.extend(
                (0..y)
                    .flat_map(|j| (0..x).map(move |i| (i, j)))
                    .map(|(i, j)| element(e, i, j)),
            ),
        }
    }
    delta
}

/// The factors of one file in the other's places: `A` of the old one holds `B` of the new one,
/// expert slow, and its `B` holds `A`, expert fast.
fn to_old(folder: &TempDir, experts: usize) {
    edit(folder.path(), |file| {
        for module in [format!("{EXPERTS}.base_layer"), EXPERTS.to_owned()] {
            let name = |factor| format!("{module}.lora_{factor}.weight");
            let Some((shape_a, a)) = file.remove(&name('A')) else {
                continue;
            };
            let (shape_b, b) = file.remove(&name('B')).unwrap();
            let (a, b) = (floats(&a), floats(&b));
            let (columns, d_in, d_out) = (shape_a[0], shape_a[1], shape_b[0]);
            let rank = columns / experts;
            let (mut old_a, mut old_b) = (vec![0.0; b.len()], vec![0.0; a.len()]);
            for e in 0..experts {
                for k in 0..rank {
                    for o in 0..d_out {
                        old_a[(e * rank + k) * d_out + o] = b[o * columns + k * experts + e];
                    }
                    for i in 0..d_in {
                        old_b[i * columns + k * experts + e] = a[(e * rank + k) * d_in + i];
                    }
                }
            }
            file.insert(name('A'), (vec![columns, d_out], bytes(&old_a)));
            file.insert(name('B'), (vec![d_in, columns], bytes(&old_b)));
        }
    });
    set_version(folder, Some("0.18.0"));
}

fn set_version(folder: &TempDir, version: Option<&str>) {
    let version = version.map(|version| json!(version));
    set(&folder.path().join(SETTINGS), "peft_version", version);
}

/// The same adapter in the file of today and in the old one.
fn both(config: &ModelConfig, adapter: &PeftAdapter) -> [TempDir; 2] {
    let [new, old] = [(); 2].map(|_| TempDir::new().unwrap());
    for folder in [&new, &old] {
        let folder = folder.path();
        adapter
            .write(folder, config, PeftLayout::Stacked, "")
            .unwrap();
    }
    to_old(&old, config.num_experts);
    [new, old]
}

/// The deltas of gate-up and down.
fn both_deltas(adapter: &PeftAdapter) -> Vec<Vec<f64>> {
    let pairs = adapter.layers[&0].pairs();
    pairs.map(|(_, pair)| deltas(adapter, pair)).collect()
}

#[test]
fn both_ways_round_give_the_deltas_that_peft_computes() {
    for sizes in SIZES {
        let config = config(sizes);
        let adapter = noise_adapter(&config, 2);
        let expected = both_deltas(&adapter);
        let [new, old] = both(&config, &adapter);
        for (folder, is_old) in [(&new, false), (&old, true)] {
            let file = tensors(folder.path());
            let modules = [&format!("{EXPERTS}.base_layer"), EXPERTS];
            for (module, expected) in modules.into_iter().zip(&expected) {
                let found = peft_delta(&file, module, config.num_experts, is_old, 2.0);
                assert_eq!(&found, expected, "the file itself, {sizes:?}");
            }
            let read = PeftAdapter::read(folder.path(), &config).unwrap();
            assert_eq!(both_deltas(&read), expected, "{sizes:?}, old: {is_old}");
            assert_eq!(read, adapter);
        }

        // Negative control: where a parameter is square, its factors the wrong way round are
        // another adapter of the same shapes.
        let (upright, exchanged) = (tensors(new.path()), tensors(old.path()));
        let square = [2 * sizes[1] == sizes[0], sizes[0] == sizes[1]];
        for (module, square) in [&format!("{EXPERTS}.base_layer"), EXPERTS]
            .into_iter()
            .zip(square)
        {
            let name = format!("{module}.lora_A.weight");
            assert_eq!(upright[&name].0 == exchanged[&name].0, square);
            if square {
                let right = peft_delta(&upright, module, config.num_experts, false, 2.0);
                let wrong = peft_delta(&upright, module, config.num_experts, true, 2.0);
                let differ = right
                    .iter()
                    .zip(wrong)
                    .filter(|(r, w)| (*r - w).abs() > 1e-3);
                assert!(differ.count() > right.len() / 2);
            }
        }
    }
}

#[test]
fn without_a_version_the_shapes_decide() {
    for sizes in SIZES {
        let config = config(sizes);
        let adapter = noise_adapter(&config, 2);
        for folder in both(&config, &adapter) {
            set_version(&folder, None);
            assert_eq!(PeftAdapter::read(folder.path(), &config).unwrap(), adapter);
        }
    }
}

#[test]
fn square_parameters_alone_need_a_version() {
    for (sizes, gate_up) in [([12, 6], true), ([6, 6], false)] {
        let config = config(sizes);
        let mut adapter = noise_adapter(&config, 2);
        let layer = adapter.layers.get_mut(&0).unwrap();
        match gate_up {
            true => layer.down = None,
            false => layer.gate_up = None,
        }
        let folders = both(&config, &adapter);
        for folder in &folders {
            assert_eq!(PeftAdapter::read(folder.path(), &config).unwrap(), adapter);
            set_version(folder, None);
            assert_contains(
                &adapter_error(folder, &config),
                &[
                    "peft_version=null",
                    "transposed before 0.19.1",
                    "set peft_version",
                ],
            );
        }
        // The version alone tells: each of the two files is the other adapter at the other one.
        let [new, old] = &folders;
        set_version(new, Some("0.19.0"));
        set_version(old, Some("0.19.1"));
        for folder in [new, old] {
            assert_ne!(PeftAdapter::read(folder.path(), &config).unwrap(), adapter);
        }
    }
}

#[test]
fn shapes_that_contradict_the_version_are_refused() {
    let config = config([12, 6]);
    let [new, old] = both(&config, &noise_adapter(&config, 2));
    set_version(&new, Some("0.18.1"));
    assert_contains(
        &adapter_error(&new, &config),
        &["peft_version=0.18.1, expected 0.19.1 or later"],
    );
    set_version(&old, Some("0.21.0"));
    assert_contains(
        &adapter_error(&old, &config),
        &["peft_version=0.21.0, expected a release before 0.19.1"],
    );
}
