//! The part of the exactness grid that every backend and transport runs: each kind of adapter, in
//! one element type, against the oracle in `f64`.
//!
//! Each rank has tokens, as CubeCL can launch no kernel on tensors without elements on CUDA.

use burn::tensor::DType;
use moe_lora_adapters::{Activation, Dropout, LoraConfig, Sharing};
use moe_lora_experts::{SharedConfig, WeighAt};
use moe_lora_testkit::{
    Axis, GateUpTargets, Matrix, Ranks, SHARING, TrainingBackend, assert_all_close, noise, oracle,
};

use crate::dense::{COLUMN_AXES, COLUMN_SEQUENCE_AXES, Sum, row_axes, sizes, tp};
use crate::grouped::{KINDS, Kind};
use crate::moe::{Place, place};
use crate::shared_experts::{MLP_REDUCTION, WAYS, Way, mlp_case, shared_oracle, shared_results};
use crate::{dense, grouped, moe, multi};

const GATE_UP: [GateUpTargets; 2] = [GateUpTargets::Fused, GateUpTargets::Separate];

fn config(dtype: DType) -> LoraConfig {
    LoraConfig::new(dense::RANK, dense::ALPHA).with_dtype(dtype)
}

/// Column-parallel, row-parallel and replicated linears over 1, 2 or 4 tensor parallel ranks.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn dense_linears<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize, dtype: DType) {
    for config in [
        config(dtype),
        config(dtype).with_activation(Activation::Silu),
        config(dtype).with_dora(true),
    ] {
        let case = dense::Case::new(config);
        let found = ranks.run(tp(size), |mesh, device| case.column(mesh, device));
        case.check("column", &found, COLUMN_AXES);
        if every_rank_has_tokens(size) {
            let found = ranks.run(tp(size), |mesh, device| case.column_sequence(mesh, device));
            case.check("column of tokens", &found, COLUMN_SEQUENCE_AXES);
        }
        for sum in [Sum::Here, Sum::ByTheCaller, Sum::OverTokens] {
            if sum == Sum::OverTokens && !every_rank_has_tokens(size) {
                continue;
            }
            let found = ranks.run(tp(size), |mesh, device| case.row(mesh, device, sum));
            case.check(&format!("row {sum:?}"), &found, row_axes(sum));
        }
        let found = ranks.run(tp(size), |mesh, device| case.replicated(mesh, device));
        case.check("replicated", &found, [Axis::Whole; 4]);
    }
}

/// Whether the linears' tokens, dealt to so many ranks, leave none without; whole layers are sequence
/// parallel over any number.
fn every_rank_has_tokens(size: usize) -> bool {
    !sizes(size).contains(&0)
}

/// Shared experts, gated or not and summed in every way, over 1, 2 or 4 tensor parallel ranks.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn shared_experts<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize, dtype: DType) {
    for gate_up in GATE_UP {
        let case = mlp_case(gate_up, config(dtype));
        let mlp = case.oracle(9).remove(0);
        for gate in [None, Some(noise(10, 1, case.hidden))] {
            let expected = shared_oracle(&case, &mlp, gate.as_ref());
            for way in WAYS {
                if way == Way::SequenceParallel && !every_rank_has_tokens(size) {
                    continue;
                }
                let found = shared_results(ranks, &case, &mlp, gate.as_ref(), size, way);
                assert_eq!(found.len(), expected.len());
                let gated = gate.is_some();
                let name = format!("shared {way:?} tp={size} {gate_up:?} gated={gated}");
                let results = found.iter().zip(&expected).enumerate();
                let results: Vec<_> = results
                    .map(|(k, (found, expected))| (format!("result {k}"), found, expected))
                    .collect();
                assert_all_close(&name, &results, dtype, MLP_REDUCTION);
            }
        }
    }
}

/// Linears of experts: the given kinds with each way to share adapters, and with DoRA; experts
/// without rows among them.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn expert_linears<B: TrainingBackend>(
    ranks: &impl Ranks<B>,
    kinds: &[Kind],
    size: usize,
    dtype: DType,
) {
    for kind in kinds {
        let mut configs = SHARING
            .map(|sharing| config(dtype).with_sharing(sharing))
            .to_vec();
        if matches!(dtype, DType::F32 | DType::F64) {
            // In half precision the sum over few rows that a magnitude's gradient is cancels to less
            // than the rounding of the base's own terms: whole layers are compared there.
            configs.push(config(dtype).with_dora(true));
        }
        for config in configs {
            for counts in [&[5, 0, 3][..], &[0, 0, 4], &[3, 2], &[5], &[1, 6, 0, 1]] {
                let case = grouped::Case::new(*kind, config, counts);
                let found = case.found(ranks, size);
                grouped::check(&case.name(size), dtype, &found, &case.expected());
            }
        }
    }
}

/// Whole layers, with and without shared experts, routing weights before and after the down
/// projection.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn layers<B: TrainingBackend>(ranks: &impl Ranks<B>, places: &[Place], dtype: DType) {
    for place in places {
        for sharing in SHARING {
            for gate_up in GATE_UP {
                for (weigh_at, shared) in kinds_of_layers() {
                    let case = moe::Case {
                        weigh_at,
                        shared,
                        ..moe::case(sharing, gate_up, dtype)
                    };
                    case.check(ranks, place);
                }
            }
        }
        let plain = moe::case(Sharing::PerExpert, GateUpTargets::Separate, dtype);
        let dora = moe::Case {
            config: plain.config.with_dora(true),
            shared: moe::shared(true, true),
            ..plain
        };
        dora.check(ranks, place);
    }
}

/// Whole layers whose adapters drop elements of their input or of their delta.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn layers_with_dropout<B: TrainingBackend>(
    ranks: &impl Ranks<B>,
    places: &[Place],
    dtype: DType,
) {
    for place in places {
        for dropout in [Dropout::before_a(0.5), Dropout::after_b(0.5)] {
            for gate_up in GATE_UP {
                for (weigh_at, shared) in kinds_of_layers() {
                    let case = moe::case(Sharing::PerExpert, gate_up, dtype);
                    let case = moe::Case {
                        config: case.config.with_dropout(dropout),
                        weigh_at,
                        shared,
                        ..case
                    };
                    case.check(ranks, place);
                }
            }
        }
    }
}

/// Whole layers with several named adapters, one of them without tokens and tokens without one.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn layers_with_named_adapters<B: TrainingBackend>(
    ranks: &impl Ranks<B>,
    places: &[Place],
    dtype: DType,
) {
    for place in places {
        for gate_up in GATE_UP {
            for (weigh_at, shared) in kinds_of_layers() {
                let case = multi::case(moe::Case {
                    weigh_at,
                    shared,
                    ..moe::case(Sharing::PerExpert, gate_up, dtype)
                });
                case.check(ranks, place);
            }
        }
    }
}

/// A layer at EP = 2, all of whose tokens choose the experts of the first.
///
/// # Panics
///
/// When a result is not close to the oracle's, or the others' experts have tokens.
pub fn idle_experts<B: TrainingBackend>(ranks: &impl Ranks<B>, place: &Place, dtype: DType) {
    let case = moe::Case {
        score: oracle::Score::Sigmoid {
            groups: 2,
            best: 1,
            renormalize: true,
            scale: 1.0,
        },
        corrected: true,
        ..moe::case(Sharing::PerExpert, GateUpTargets::Fused, dtype)
    };
    let tokens = place.dealt.iter().sum();
    let mut moe = case.oracle();
    // More than two scores differ by.
    let favoured = |expert| if expert < moe::EXPERTS / 2 { 4.0 } else { 0.0 };
    moe.correction_bias = Some(Matrix::build(1, moe::EXPERTS, |_, expert| favoured(expert)));
    let (x, _) = case.data(tokens);
    for token in 0..tokens {
        let chosen = moe.route(&x.pick_rows([token]));
        assert!(chosen.iter().all(|(expert, _)| *expert < moe::EXPERTS / 2));
    }
    case.check_against(&moe, ranks, place);
}

/// The whole grid on four ranks: linears at TP = ETP = 4, layers at every way to lay the experts over
/// them, with tensor parallel shared experts, and experts without rows at EP = ETP = 2.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn four_ranks<B: TrainingBackend>(ranks: &impl Ranks<B>, dtype: DType) {
    dense_linears::<B>(ranks, 4, dtype);
    shared_experts::<B>(ranks, 4, dtype);
    expert_linears::<B>(ranks, &KINDS, 4, dtype);
    idle_experts::<B>(ranks, &place(1, 2, 2, &[1, 1, 1, 1]), dtype);
    let places = [
        place(1, 2, 2, &[1, 4, 2, 3]),
        place(2, 2, 2, &[1, 3, 1, 4]),
        place(4, 2, 2, &[2, 1, 5, 1]),
        place(1, 1, 4, &[1, 5, 1, 2]),
        place(4, 1, 4, &[3, 1, 1, 4]),
        place(1, 4, 1, &[4, 1, 3, 1]),
    ];
    layers::<B>(ranks, &places, dtype);
    layers_with_dropout::<B>(ranks, &places, dtype);
    layers_with_named_adapters::<B>(ranks, &places, dtype);
}

fn kinds_of_layers() -> [(WeighAt, Option<SharedConfig>); 3] {
    [
        (WeighAt::Output, None),
        (WeighAt::Hidden, moe::shared(true, false)),
        (WeighAt::Output, moe::shared(true, true)),
    ]
}
