//! What holds of every topology of a plan.

use std::collections::BTreeSet;
use std::path::Path;

use moe_lora_plan::{Candidate, Fit, Job, Machine, ModelShape, Owner, Plan};

fn model(name: &str) -> ModelShape {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configs");
    ModelShape::read(&configs.join(name)).unwrap()
}

fn plan(model: &ModelShape, job: Job) -> Plan {
    Plan::new(model, &job, &Machine::h200()).unwrap()
}

/// The one topology that a job leaves.
fn only(model: &ModelShape, job: Job) -> Candidate {
    let mut candidates = plan(model, job).candidates;
    assert_eq!(candidates.len(), 1);
    candidates.remove(0)
}

fn fixed(gpus: usize, [tp, ep, etp]: [usize; 3]) -> Job {
    Job::new(gpus).with_topology(Some(tp), Some(ep), Some(etp))
}

#[test]
fn every_topology_divides_and_is_there_once() {
    let model = model("qwen3-30b-a3b");
    let plan = plan(&model, Job::new(24).with_rank(6));
    let mut seen = BTreeSet::new();
    for candidate in &plan.candidates {
        let sizes = candidate.sizes;
        assert_eq!(candidate.dp() * sizes.tp, 24);
        assert_eq!(candidate.expert_dp() * sizes.ep * sizes.etp, 24);
        assert!(seen.insert((sizes.tp, sizes.ep, sizes.etp)));
    }
    // TP of 1, 2, 4, 8 heads' divisors; EP of 1, 2, 4, 8; ETP of 1, 2, 3, 6 that 768 and 6 share.
    // 2048 is no multiple of 3, so 3 and 6 fall away; 8 x 2 is no divisor of 24.
    assert_eq!(seen.len(), 4 * (4 + 3));
}

#[test]
fn what_fits_comes_first_and_the_fastest_of_it() {
    let plan = plan(&model("mixtral-8x7b"), Job::new(8).with_memory(Some(80e9)));
    let fits = |candidate: &Candidate| candidate.fit != Fit::No;
    let (yes, no): (Vec<_>, Vec<_>) = plan.candidates.iter().partition(|c| fits(c));
    assert!(!yes.is_empty() && !no.is_empty());
    assert!(plan.candidates.iter().is_sorted_by_key(|c| !fits(c)));
    assert!(yes.is_sorted_by(|a, b| a.time.total_us() <= b.time.total_us()));
    assert!(no.is_sorted_by(|a, b| a.memory.total(true) <= b.memory.total(true)));
    for candidate in plan.candidates {
        let fits = [false, true].map(|again| candidate.memory.total(again) <= plan.usable_bytes);
        let expected = match fits {
            [true, _] => Fit::Whole,
            [false, true] => Fit::Recompute,
            [false, false] => Fit::No,
        };
        assert_eq!(candidate.fit, expected);
    }
}

#[test]
fn factors_of_all_ranks_are_those_of_the_whole_adapter() {
    let (hidden, ffn, experts, layers, rank) = (2048.0, 768.0, 128.0, 48.0, 32.0);
    let whole = layers * experts * rank * ((hidden + 2.0 * ffn) + (ffn + hidden));
    for candidate in plan(&model("qwen3-30b-a3b"), Job::new(16)).candidates {
        let ranks = candidate.sizes.ep * candidate.sizes.etp;
        assert_eq!(candidate.trained * ranks as f64, whole);
    }
}

#[test]
fn adapters_exchange_nothing_where_no_expert_is_cut() {
    let count = |candidate: &Candidate| {
        let of_adapters = candidate.collectives.iter();
        of_adapters
            .filter(|call| call.owner == Owner::Adapter)
            .count()
    };
    for candidate in plan(&model("deepseek-v3"), Job::new(64)).candidates {
        let expected = if candidate.sizes.etp == 1 { 0 } else { 2 };
        assert_eq!(count(&candidate), expected);
    }
}

#[test]
fn replicas_add_to_the_sum_of_gradients_alone_and_that_has_a_limit() {
    let model = model("deepseek-v3");
    let at = |gpus| only(&model, fixed(gpus, [2, 16, 2]));
    let (few, many) = (at(128), at(8192));
    assert_eq!(few.memory, many.memory);
    let sum = |candidate: &Candidate| {
        let mut calls = candidate.collectives.iter();
        calls
            .find(|call| call.owner == Owner::Gradients)
            .unwrap()
            .wire
            .network
    };
    let limit = 2.0 * few.memory.gradients;
    assert_eq!(sum(&few), limit * 3.0 / 4.0);
    assert_eq!(sum(&many), limit * 255.0 / 256.0);
    let mut time = many.time;
    assert!(time.gradients_us > few.time.gradients_us);
    time.gradients_us = few.time.gradients_us;
    assert_eq!(time, few.time);
}

#[test]
fn rows_and_with_them_the_gathers_grow_with_expert_tensor_parallelism() {
    let model = model("qwen3-30b-a3b");
    let base = |etp: usize| {
        let candidate = only(&model, fixed(8, [1, 1, etp]));
        let mut calls = candidate.collectives.into_iter();
        let gather = calls.find(|call| call.owner == Owner::Base).unwrap();
        gather.wire.nvlink
    };
    // (P - 1) / P of P ranks' tokens.
    assert_eq!(base(8) / base(2), 7.0);
}
