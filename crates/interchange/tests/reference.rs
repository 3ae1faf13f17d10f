//! The values of the adapters, against the outputs that PEFT computed with them.
//!
//! Shapes cannot tell how a stacked file is packed, which half is the gate, or which of two nested
//! pairs belongs to which parameter (`2F = H` in these fixtures). A small MoE block in `f64` can.

mod folders;

use folders::{DORA, PER_EXPERT, STACKED, at, open};
use moe_lora_interchange::{
    FactorPair, GateUp, HostTensor, HubModel, ModelConfig, PeftAdapter, Router,
};
use safetensors::SafeTensors;
use std::fs;

/// `[d_out, d_in]` times `[d_in]`.
fn times(weight: &[f64], x: &[f64]) -> Vec<f64> {
    let rows = weight.chunks(x.len());
    rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum())
        .collect()
}

fn silu_times(gate: &[f64], up: &[f64]) -> Vec<f64> {
    let silu = |g: f64| g / (1.0 + (-g).exp());
    gate.iter().zip(up).map(|(&g, u)| silu(g) * u).collect()
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Every expert's `W + s B A` for `W` `[E, d_out, d_in]`, its rows as long as the magnitude says
/// if there is one.
fn merge(weight: &HostTensor, pair: &FactorPair, scale: f64) -> Vec<Vec<f64>> {
    let (rank, d_in) = (pair.a.shape()[1], pair.a.shape()[2]);
    (0..weight.shape()[0])
        .map(|expert| {
            let (a, b) = (pair.a.outer(expert), pair.b.outer(expert));
            let mut merged = widen(weight.outer(expert));
            for (i, element) in merged.iter_mut().enumerate() {
                let (row, column) = (i / d_in, i % d_in);
                let delta = (0..rank)
                    .map(|k| f64::from(b[row * rank + k]) * f64::from(a[k * d_in + column]));
                *element += scale * delta.sum::<f64>();
            }
            if let Some(magnitude) = &pair.magnitude {
                let rows = merged.chunks_mut(d_in).zip(magnitude.outer(expert));
                for (row, &length) in rows {
                    let norm = row.iter().map(|w| w * w).sum::<f64>().sqrt();
                    row.iter_mut().for_each(|w| *w *= f64::from(length) / norm);
                }
            }
            merged
        })
        .collect()
}

/// The halves of a fused pair.
fn halves(pair: &FactorPair, config: &ModelConfig) -> (FactorPair, FactorPair) {
    let half = |part: usize| {
        let b = (0..config.num_experts).flat_map(|expert| {
            let b = pair.b.outer(expert);
            b[part * b.len() / 2..(part + 1) * b.len() / 2]
                .iter()
                .copied()
        });
        let [experts, d_out, rank] = *pair.b.shape() else {
            panic!("b has three axes");
        };
        let b = HostTensor::new([experts, d_out / 2, rank], b.collect()).unwrap();
        let half = FactorPair::new(pair.a.clone(), b, pair.alpha).unwrap();
        let Some(magnitude) = &pair.magnitude else {
            return half;
        };
        let rows = (0..experts).flat_map(|e| {
            let rows = magnitude.outer(e);
            rows[part * d_out / 2..][..d_out / 2].iter().copied()
        });
        let rows = HostTensor::new([experts, d_out / 2], rows.collect()).unwrap();
        half.with_magnitude(rows).unwrap()
    };
    (half(0), half(1))
}

/// The block's output on one token.
fn block(model: &HubModel, experts: &[[Vec<f64>; 3]], x: &[f64]) -> Vec<f64> {
    let config = model.config();
    let logits = times(&widen(model.router(0).unwrap().weight.data()), x);
    let exponentials: Vec<f64> = logits.iter().map(|l| l.exp()).collect();
    let mut chosen: Vec<usize> = (0..config.num_experts).collect();
    chosen.sort_by(|&l, &r| logits[r].total_cmp(&logits[l]));
    chosen.truncate(config.num_experts_per_tok);
    let total: f64 = match config.router {
        Router::SoftmaxThenTopK { renormalize: true } => {
            chosen.iter().map(|&e| exponentials[e]).sum()
        }
        Router::SoftmaxThenTopK { renormalize: false } => exponentials.iter().sum(),
        other => panic!("no fixture here has {other:?}"),
    };

    let mut y = vec![0.0; x.len()];
    let mut add = |share: f64, [gate, up, down]: [&[f64]; 3]| {
        let hidden = silu_times(&times(gate, x), &times(up, x));
        for (y, term) in y.iter_mut().zip(times(down, &hidden)) {
            *y += share * term;
        }
    };
    for expert in chosen {
        let [gate, up, down] = &experts[expert];
        add(exponentials[expert] / total, [gate, up, down]);
    }
    if let Some(shared) = model.shared_expert(0).unwrap() {
        let gate = widen(shared.output_gate.unwrap().data());
        let share = 1.0 / (1.0 + (-times(&gate, x)[0]).exp());
        let [gate, up, down] =
            [shared.gate, shared.up, shared.down].map(|tensor| widen(tensor.data()));
        add(share, [&gate, &up, &down]);
    }
    y
}

/// The largest difference between the block's output and the one on file, relative to the largest
/// output.
fn deviation(
    folder: &str,
    model: &HubModel,
    [gate, up, down]: [&FactorPair; 3],
    scale: f64,
) -> f64 {
    let bytes = fs::read(at(folder).join("reference.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let reference = |name: &str| -> Vec<f64> {
        let data = file.tensor(name).unwrap().data();
        data.as_chunks()
            .0
            .iter()
            .map(|&le| f64::from(f32::from_le_bytes(le)))
            .collect()
    };
    let weights = model.expert_weights(0).unwrap();
    let gate = merge(&weights.gate, gate, scale);
    let up = merge(&weights.up, up, scale);
    let down = merge(&weights.down, down, scale);
    let experts: Vec<[Vec<f64>; 3]> = gate
        .into_iter()
        .zip(up)
        .zip(down)
        .map(|((gate, up), down)| [gate, up, down])
        .collect();

    let (x, expected) = (reference("x"), reference("y_adapted"));
    let tokens = x.chunks(model.config().hidden_size);
    let y: Vec<f64> = tokens.flat_map(|x| block(model, &experts, x)).collect();
    let largest =
        |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, |most: f64, v| most.max(v.abs()));
    largest(&mut y.iter().zip(&expected).map(|(y, e)| y - e))
        / largest(&mut expected.iter().copied())
}

// Sums of at most 32 products in f32: machine epsilon 1.2e-7 times a few tens.
const TOLERANCE: f64 = 4e-6;

#[test]
fn stacked_adapters_give_the_outputs_on_file() {
    for folder in STACKED {
        let model = open(folder);
        let config = model.config();
        let adapter = PeftAdapter::read(&at(folder).join("adapter"), config).unwrap();
        let layer = &adapter.layers[&0];
        let (Some(GateUp::Fused(pair)), Some(down)) = (&layer.gate_up, &layer.down) else {
            panic!("expected both parameters");
        };
        let (gate, up) = halves(pair, config);
        let scale = adapter.scale(down);
        assert_eq!(scale, adapter.scale(pair));
        let right = deviation(folder, &model, [&gate, &up, down], scale);
        assert!(right < TOLERANCE, "{folder}: {right}");

        // Negative controls: halves exchanged, and B read expert slow like A.
        let exchanged = deviation(folder, &model, [&up, &gate, down], scale);
        let (_, packed) = down.to_stacked().unwrap();
        let slow = packed.data().chunks(config.num_experts * down.rank());
        let misread: Vec<f32> = (0..config.num_experts)
            .flat_map(|e| {
                slow.clone()
                    .flat_map(move |row| &row[e * down.rank()..(e + 1) * down.rank()])
            })
            .copied()
            .collect();
        let misread = HostTensor::new(down.b.shape(), misread).unwrap();
        let misread = FactorPair::new(down.a.clone(), misread, down.alpha).unwrap();
        let misread = deviation(folder, &model, [&gate, &up, &misread], scale);
        assert!(
            exchanged > 1e-3 && misread > 1e-3,
            "{folder}: {exchanged}, {misread}"
        );
    }
}

#[test]
fn per_expert_adapters_give_the_outputs_on_file() {
    for folder in [PER_EXPERT, DORA] {
        let model = open(folder);
        let config = model.config();
        let adapter = PeftAdapter::read(&at(folder).join("adapter"), config).unwrap();
        let layer = &adapter.layers[&0];
        let (Some(GateUp::Separate { gate, up }), Some(down)) = (&layer.gate_up, &layer.down)
        else {
            panic!("expected all projections");
        };
        let scale = adapter.scale(down);
        let found = deviation(folder, &model, [gate, up, down], scale);
        assert!(found < TOLERANCE, "{folder}: {found}");

        // One fused pair of twice the rank stands for the same weights, magnitudes included.
        let fused = adapter.fuse_gate_up().unwrap();
        let Some(GateUp::Fused(pair)) = &fused.layers[&0].gate_up else {
            panic!("expected fused factors");
        };
        assert_eq!(fused.scale(pair), scale);
        let (upper, lower) = halves(pair, config);
        let found = deviation(folder, &model, [&upper, &lower, down], scale);
        assert!(found < TOLERANCE, "{folder}: {found}");

        // Negative controls: no magnitude, and that of another expert.
        let Some(magnitude) = &down.magnitude else {
            continue;
        };
        let mut plain = down.clone();
        plain.magnitude = None;
        let plain = deviation(folder, &model, [gate, up, &plain], scale);
        let mut moved = magnitude.data().to_vec();
        moved.rotate_left(magnitude.shape()[1]);
        let moved = HostTensor::new(magnitude.shape(), moved).unwrap();
        let moved = down.clone().with_magnitude(moved).unwrap();
        let moved = deviation(folder, &model, [gate, up, &moved], scale);
        assert!(plain > 1e-3 && moved > 1e-3, "{plain}, {moved}");
    }
}
