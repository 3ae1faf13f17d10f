//! The norms of deltas whose factors lie over ranks, against the product on one device.

use burn::tensor::DType;
use moe_lora_adapters::{Adaptable, AdapterNorm, Sharing, adapter_norms};
use moe_lora_parallel::Mesh;
use moe_lora_testkit::{
    Ad, GateUpTargets, Matrix, Mocked, SHARING, assert_close, assert_far, oracle,
};
use moe_lora_tests::moe::{self, Case, Place, place};

/// Additions behind a norm: the extents of two factors and the pairs of a rank.
const REDUCTION: usize = 60;

fn grid() -> Vec<Place> {
    vec![
        place(1, 1, 1, &[9]),
        place(1, 1, 2, &[2, 7]),
        place(2, 2, 1, &[9, 0]),
        place(1, 2, 2, &[3, 0, 4, 2]),
        place(2, 1, 4, &[0, 5, 1, 3]),
        place(4, 4, 1, &[4, 1, 4, 0]),
        place(2, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]),
    ]
}

fn case(sharing: Sharing, gate_up: GateUpTargets, dtype: DType) -> Case {
    Case {
        shared: moe::shared(true, false),
        ..moe::case(sharing, gate_up, dtype)
    }
}

/// The norm of every delta of these MLPs, by adapter and MLP.
fn expected(mlps: &[oracle::Mlp]) -> Vec<Vec<f64>> {
    let loras = |mlp: &oracle::Mlp| [mlp.gate_up.loras(), mlp.down.loras()].concat();
    let norm = |lora: &oracle::Lora| {
        let delta = lora.b.times(&lora.a).scaled(lora.scale);
        delta.dot(&delta).sqrt()
    };
    let by_mlp: Vec<Vec<f64>> = mlps
        .iter()
        .map(|mlp| loras(mlp).iter().map(norm).collect())
        .collect();
    (0..by_mlp[0].len())
        .map(|k| by_mlp.iter().map(|norms| norms[k]).collect())
        .collect()
}

fn row(values: &[f64]) -> Matrix {
    Matrix::build(1, values.len(), |_, k| values[k])
}

fn found(case: &Case, place: &Place) -> Vec<Vec<AdapterNorm>> {
    let moe = case.oracle();
    Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let layer = case.layer(&moe, mesh, device);
        adapter_norms(&layer.trained_weights(), mesh)
    })
}

#[test]
fn norms_are_those_of_the_deltas_on_one_device_at_every_topology() {
    for dtype in [DType::F64, DType::F32] {
        for sharing in SHARING {
            for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
                let case = case(sharing, gate_up, dtype);
                let moe = case.oracle();
                let mut norms = expected(&moe.experts);
                if sharing == Sharing::Shared {
                    // The experts have one delta.
                    norms.iter_mut().for_each(|norms| norms.truncate(1));
                }
                norms.extend(expected(&[moe.shared.unwrap().mlp]));
                for place in grid() {
                    let found = found(&case, &place);
                    assert!(found.iter().all(|norms| *norms == found[0]), "{place:?}");
                    assert_eq!(found[0].len(), norms.len());
                    for (found, expected) in found[0].iter().zip(&norms) {
                        let name = format!("{dtype:?} {sharing:?} {place:?} {}", found.linear);
                        let total = expected.iter().map(|norm| norm * norm).sum::<f64>();
                        // Sums in f64 either way; the factors are exact in f32.
                        let close = |found: &[f64], expected: &[f64]| {
                            let (found, expected) = (row(found), row(expected));
                            assert_close(&name, &found, &expected, DType::F64, REDUCTION)
                        };
                        close(&found.experts, expected);
                        close(&[found.total()], &[total.sqrt()]);
                    }
                }
            }
        }
    }
}

#[test]
fn norms_of_local_factors_are_seen() {
    let case = case(Sharing::PerExpert, GateUpTargets::Fused, DType::F64);
    let (moe, place) = (case.oracle(), place(1, 1, 2, &[2, 7]));
    let [_, down] = <[_; 2]>::try_from(expected(&moe.experts)).unwrap();
    let wrong = Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let layer = case.layer(&moe, mesh, device);
        let weights = layer.experts.down.trained_weights();
        // A mesh of one rank has no sums: each rank takes its own columns of A and rows of B.
        adapter_norms(&weights, &Mesh::solo()).remove(0).experts
    });
    assert_far("local", &row(&wrong[0]), &row(&down));
    // Nor do the squares of the ranks' own norms add up to it.
    let sum = wrong[0].iter().zip(&wrong[1]).map(|(a, b)| a.hypot(*b));
    assert_far("summed", &row(&sum.collect::<Vec<_>>()), &row(&down));
}

#[test]
fn an_adapter_that_does_nothing_has_no_norm_and_a_broken_one_has_no_number() {
    let case = case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32);
    let (moe, place) = (case.oracle(), place(1, 1, 1, &[9]));
    let norms = Mocked.run(place.topology, |mesh: &Mesh<Ad>, device| {
        let mut layer = case.layer(&moe, mesh, device);
        let lora = &mut layer.experts.down.adapters[0];
        let [a, b] = [lora.a.weight.len(), lora.b.weight.len()];
        let mut last_is_nan = vec![0.0; b];
        last_is_nan[b - 1] = f32::NAN;
        lora.load(&vec![1.0; a], &last_is_nan, device).unwrap();
        adapter_norms(&layer.experts.down.trained_weights(), mesh).remove(0)
    });
    let experts = &norms[0].experts;
    assert!(experts[..3].iter().all(|norm| *norm == 0.0), "{experts:?}");
    assert!(experts[3].is_nan() && norms[0].total().is_nan());
}
