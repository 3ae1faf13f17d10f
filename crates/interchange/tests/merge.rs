//! Merged experts: values by hand, bits against a plain loop, and numbers that are none.

mod folders;

use folders::{noise, noise_pair, open};
use moe_lora_interchange::{
    ExpertAdapter, ExpertWeights, FactorPair, GateUp, HostTensor, InterchangeError, PeftAdapter,
};

const GPT_OSS: &str = "tests/fixtures/hf/gpt_oss";

fn tensor(shape: impl Into<Vec<usize>>, data: &[f32]) -> HostTensor {
    HostTensor::new(shape, data.to_vec()).unwrap()
}

/// Experts of zeros but for the down projection.
fn with_down(down: HostTensor) -> ExpertWeights {
    let &[experts, hidden, ffn] = down.shape() else {
        panic!("down has three axes")
    };
    let zeros = tensor([experts, ffn, hidden], &vec![0.0; experts * ffn * hidden]);
    ExpertWeights {
        gate: zeros.clone(),
        up: zeros,
        down,
        biases: None,
    }
}

/// Merges a pair into the down projection alone.
fn merge_down(
    down: &HostTensor,
    pair: FactorPair,
    rslora: bool,
) -> Result<HostTensor, InterchangeError> {
    let adapter = ExpertAdapter {
        gate_up: None,
        down: Some(pair),
    };
    let merged = with_down(down.clone()).merge(&adapter, rslora)?;
    Ok(merged.down)
}

fn bits(tensor: &HostTensor) -> Vec<u32> {
    tensor.data().iter().map(|value| value.to_bits()).collect()
}

/// Two experts, two rows each. Merged, the rows are (3, 4), (0, 2) and (5, 12), (-6, 8), whose
/// lengths are whole numbers, and each has a magnitude of its own.
#[test]
fn magnitudes_are_the_row_lengths_of_their_own_expert() {
    let weight = tensor([2, 2, 2], &[1., 0., 0., 2., 1., 12., -4., 8.]);
    let a = tensor([2, 1, 2], &[1., 2., 1., 0.]);
    let b = [1., 0., 2., -1.];
    let magnitude = [10., 1., 26., 5.];
    let expected = tensor([2, 2, 2], &[6., 8., 0., 1., 10., 24., -3., 4.]);

    let pair = FactorPair::new(a.clone(), tensor([2, 2, 1], &b), 2.0).unwrap();
    let pair = pair.with_magnitude(tensor([2, 2], &magnitude)).unwrap();
    assert_eq!(merge_down(&weight, pair, false).unwrap(), expected);

    // The same rows as those of the gate; those of up, (3, 4) and (8, 6), change in length alone.
    let halves = |gate: &[f32], up: &[f32]| {
        let experts = gate.chunks(2).zip(up.chunks(2));
        Vec::from_iter(experts.flat_map(|(gate, up)| [gate, up].concat()))
    };
    let b = tensor([2, 4, 1], &halves(&b, &[0.0; 4]));
    let magnitude = tensor([2, 4], &halves(&magnitude, &[10., 5., 20., 30.]));
    let pair = FactorPair::new(a, b, 2.0).unwrap();
    let pair = pair.with_magnitude(magnitude).unwrap();
    let weights = ExpertWeights {
        gate: weight,
        up: tensor([2, 2, 2], &[3., 4., 8., 6., 3., 4., 8., 6.]),
        ..with_down(tensor([2, 2, 2], &[7.0; 8]))
    };
    let adapter = ExpertAdapter {
        gate_up: Some(GateUp::Fused(pair)),
        down: None,
    };
    let merged = weights.clone().merge(&adapter, false).unwrap();
    assert_eq!(merged.gate, expected);
    let up = tensor([2, 2, 2], &[6., 8., 4., 3., 12., 16., 24., 18.]);
    assert_eq!(merged.up, up);
    assert_eq!(merged.down, weights.down);
}

#[test]
fn a_rank_stabilised_merge_divides_by_the_root_of_the_rank() {
    let ones = |shape: [usize; 3]| tensor(shape, &[1.0; 4]);
    let weight = tensor([1, 1, 1], &[0.5]);
    // Four products of 1, and alpha 8 over 4 or over 2.
    for (rslora, expected) in [(false, 8.5), (true, 16.5)] {
        let pair = FactorPair::new(ones([1, 4, 1]), ones([1, 1, 4]), 8.0).unwrap();
        let merged = merge_down(&weight, pair, rslora).unwrap();
        assert_eq!(merged.data(), [expected], "rslora={rslora}");
    }
}

/// Scales that are no powers of two, so that a product that is not rounded before it is added, or a
/// scale that goes into a factor, has other bits.
#[test]
fn merged_weights_have_the_bits_of_a_loop_that_rounds_each_step() {
    const EXPERTS: usize = 3;
    const ROWS: usize = 16;
    const COLUMNS: usize = 12;
    for (rank, alpha) in [(5, 3.0), (4, 3.0), (5, 8.0)] {
        let weight = noise([EXPERTS, ROWS, COLUMNS], 7);
        let mut pair = noise_pair(EXPERTS, [ROWS, COLUMNS], rank, 40);
        pair.alpha = alpha;
        let scale = (alpha / rank as f64) as f32;
        let mut expected = Vec::new();
        let mut fused = Vec::new();
        for expert in 0..EXPERTS {
            let (a, b) = (pair.a.outer(expert), pair.b.outer(expert));
            for (at, &weight) in weight.outer(expert).iter().enumerate() {
                let (row, column) = (at / COLUMNS, at % COLUMNS);
                let factors = |k: usize| (b[row * rank + k], a[k * COLUMNS + column]);
                let (first, second) = factors(0);
                let (mut sum, mut without_rounding) = (first * second, first * second);
                for k in 1..rank {
                    let (b, a) = factors(k);
                    let product = b * a;
                    sum += product;
                    without_rounding = b.mul_add(a, without_rounding);
                }
                let delta = sum * scale;
                expected.push((weight + delta).to_bits());
                fused.push(without_rounding.mul_add(scale, weight).to_bits());
            }
        }
        let merged = bits(&merge_down(&weight, pair, false).unwrap());
        assert!(merged == expected, "alpha={alpha} r={rank}");
        // Negative control: fused multiply-adds would show.
        assert!(merged != fused, "alpha={alpha} r={rank}");
    }
}

#[test]
fn biases_are_kept_by_a_merge() {
    let model = open(GPT_OSS);
    let path = folders::at(GPT_OSS).join("adapter");
    let adapter = PeftAdapter::read(&path, model.config()).unwrap();
    let (&layer, factors) = adapter.layers.first_key_value().unwrap();
    let merged = model.expert_weights(layer).unwrap();
    let merged = merged.merge(factors, adapter.rslora).unwrap();
    let merged = merged.into_hub(layer, &model).unwrap();
    for projection in ["gate_up_proj", "down_proj"] {
        let weight = format!("model.layers.{layer}.mlp.experts.{projection}");
        let bias = format!("{weight}_bias");
        assert_eq!(bits(&merged[&bias]), bits(&model.tensor(&bias).unwrap()));
        assert_ne!(merged[&weight], model.tensor(&weight).unwrap());
    }
}

#[test]
fn a_merge_without_finite_numbers_names_expert_and_row() {
    let weight = noise([3, 4, 5], 1);
    let pair = || noise_pair(3, [4, 5], 2, 20);
    let with = |tensor: &HostTensor, at: usize, value: f32| {
        let mut data = tensor.data().to_vec();
        data[at] = value;
        HostTensor::new(tensor.shape(), data).unwrap()
    };
    let refused = |pair: FactorPair| match merge_down(&weight, pair, false) {
        Err(InterchangeError::NonFinite { expert, row }) => (expert, row),
        other => panic!("{other:?}"),
    };
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        // B is [3, 4, 2]: expert 1, row 2.
        let mut broken = pair();
        broken.b = with(&broken.b, (4 + 2) * 2, value);
        assert_eq!(refused(broken), (1, 2), "{value}");
        // A is shared by all rows of its expert; which of them is met first is open.
        let mut broken = pair();
        broken.a = with(&broken.a, 2 * 2 * 5 + 7, value);
        assert_eq!(refused(broken).0, 2, "{value}");
    }
    for alpha in [1e300, -1e300, f64::INFINITY, f64::NAN] {
        let mut huge = pair();
        huge.alpha = alpha;
        refused(huge);
    }
    let mut broken = pair();
    broken.magnitude = Some(with(&noise([3, 4], 5), 9, f32::INFINITY));
    assert_eq!(refused(broken), (2, 1));
}

#[test]
fn weights_that_were_no_numbers_before_are_left_alone() {
    let mut data = noise([3, 4, 5], 1).into_data();
    let sound = merge_down(
        &tensor([3, 4, 5], &data),
        noise_pair(3, [4, 5], 2, 20),
        false,
    );
    let mut expected = sound.unwrap().into_data();
    let (nan, infinite) = ((4 + 2) * 5 + 3, 2);
    for values in [&mut data, &mut expected] {
        values[nan] = f32::NAN;
        values[infinite] = f32::INFINITY;
    }
    let merged = merge_down(
        &tensor([3, 4, 5], &data),
        noise_pair(3, [4, 5], 2, 20),
        false,
    );
    let merged = merged.unwrap().into_data();
    for (at, (found, expected)) in merged.iter().zip(&expected).enumerate() {
        let same = found.to_bits() == expected.to_bits() || (found.is_nan() && at == nan);
        assert!(same, "{found} is not {expected} at {at}");
    }
}
