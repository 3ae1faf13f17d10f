//! Predictions against what was measured on one H200 and on two.

use serde::Deserialize;

use crate::kernels::tests::bench;
use crate::{Cost, Kernel, Link, Machine};

/// A row of the bench's output.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Row {
    kernel: String,
    shape: String,
    tokens: f64,
    experts: f64,
    bytes: f64,
    us: f64,
    case: String,
    forward_us: f64,
    both_us: f64,
}

fn rows(text: &str) -> Vec<Row> {
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.collect()
}

fn of<'a>(rows: &'a [Row], shape: &'a str, kernel: Kernel) -> impl Iterator<Item = &'a Row> {
    let wanted = move |row: &&Row| row.shape == shape && row.kernel == kernel.name();
    rows.iter().filter(wanted)
}

fn fit(rows: &[Row], shape: &str, kernel: Kernel) -> Cost {
    let points: Vec<_> = of(rows, shape, kernel)
        .map(|row| (row.bytes, row.us))
        .collect();
    Cost::fit(&points).unwrap_or_else(|| panic!("{shape} {kernel:?}: {points:?}"))
}

/// At most 30 percent.
fn assert_near(what: &str, predicted: f64, measured: f64) {
    let ratio = predicted / measured;
    assert!(
        (ratio - 1.0).abs() < 0.3,
        "{what}: {predicted:.1} us predicted, {measured:.1} measured"
    );
    println!("{what}: {predicted:.1} us predicted, {measured:.1} measured, {ratio:.2}");
}

const H200: &str = include_str!("h200.jsonl");
/// An earlier version of the kernels, timed alone and in whole calls in one run.
const TWO: &str = include_str!("../tests/bench/two_h200.jsonl");
/// Whole calls with the kernels of the constants.
const BOTH: &str = include_str!("../tests/bench/two_h200_both.jsonl");

/// Fitted on the down projection, checked on the up projection: other widths, another rank.
#[test]
fn kernels_of_fc1_follow_from_those_of_fc2_on_one_gpu() {
    let rows = rows(H200);
    let mut checked = 0;
    for kernel in Kernel::ALL {
        let cost = fit(&rows, "fc2", kernel);
        for row in of(&rows, "fc1", kernel) {
            let what = format!("fc1 {} of {} tokens", kernel.name(), row.tokens);
            let bytes = bench("fc1", row.tokens, row.experts).bytes(kernel);
            assert_eq!(bytes, row.bytes, "{what}");
            assert_near(&what, cost.us(bytes), row.us);
            checked += 1;
        }
    }
    assert_eq!(checked, 10);
}

#[test]
fn forward_and_backward_of_fc1_follow_from_fc2_on_one_gpu() {
    let rows = rows(H200);
    let us = |kernel: Kernel| fit(&rows, "fc2", kernel).us(bench("fc1", 4096.0, 4.0).bytes(kernel));
    let predicted = Kernel::ALL.map(us).iter().sum();
    let at_4k = rows
        .iter()
        .filter(|row| row.shape == "fc1" && row.tokens == 4096.0);
    assert_near("fc1, all six", predicted, at_4k.map(|row| row.us).sum());
}

/// Whole calls of two ranks through the public adapters, collectives included. Their kernels are
/// fitted on tokens in thousands; the all-reduce of two ranks is that of the constants.
#[test]
fn forward_passes_follow_from_kernels_and_collectives_on_two_gpus() {
    let rows = rows(TWO);
    let link = Machine::h200().link(Link::Nvlink);
    for (shape, sent) in [("fc2", 262_144.0), ("fc1", 131_072.0)] {
        let projection = bench(shape, 4096.0, 4.0);
        let us = |kernel| fit(&rows, shape, kernel).us(projection.bytes(kernel));
        let predicted: f64 = Kernel::FORWARD.map(us).iter().sum::<f64>() + link.us(sent);
        // As processes and as threads; a host that others use made one of them wait.
        let case = format!("grouped {shape}");
        let medians = rows
            .iter()
            .filter(|row| row.case == case)
            .map(|row| row.forward_us);
        let measured = medians.fold(f64::INFINITY, f64::min);
        assert_near(&case, predicted, measured);
        // Negative control: a model without starts.
        let alone = |kernel| projection.bytes(kernel) / fit(&rows, shape, kernel).bytes_per_s * 1e6;
        let without: f64 = Kernel::FORWARD.map(alone).iter().sum();
        assert!(without < 0.7 * measured, "{without} of {measured}");
    }
}

/// The constants alone, as `plan` uses them. The pass back has a collective of the size of that forward.
#[test]
fn forward_and_backward_passes_follow_from_the_constants_on_two_gpus() {
    let (rows, machine) = (rows(BOTH), Machine::h200());
    let link = machine.link(Link::Nvlink);
    for (shape, sent) in [("fc2", 262_144.0), ("fc1", 131_072.0)] {
        let projection = bench(shape, 4096.0, 4.0);
        let us = |kernel: Kernel| machine.kernel(kernel).us(projection.bytes(kernel));
        let predicted = Kernel::ALL.map(us).iter().sum::<f64>() + 2.0 * link.us(sent);
        let case = format!("grouped {shape}");
        let row = rows.iter().find(|row| row.case == case).unwrap();
        assert_near(&case, predicted, row.both_us);
        // Negative control: the kernels without their collectives.
        let alone = Kernel::ALL.map(us).iter().sum::<f64>();
        assert!(alone < 0.7 * row.both_us, "{alone} of {}", row.both_us);
    }
}

/// Negative control: a share of the copy bandwidth and no start, taken where tokens are many, is
/// wrong where they are few.
#[test]
fn a_share_alone_misses_small_kernels() {
    let rows = rows(H200);
    for kernel in Kernel::ALL {
        let [small, large] = [0, 1].map(|at| of(&rows, "fc2", kernel).nth(at).unwrap());
        let predicted = small.bytes * large.us / large.bytes;
        assert!(
            predicted < 0.7 * small.us,
            "{kernel:?}: {predicted} of {}",
            small.us
        );
    }
}
