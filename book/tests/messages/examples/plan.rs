//! Plans of a run.

use moe_lora_plan::PlanError;

use super::json_fault;
use crate::{Examples, examples};

pub fn all() -> Vec<Examples> {
    let source = "crates/plan/src/error.rs";
    vec![examples(source, "PlanError", "Planning a run", plan())]
}

fn plan() -> Vec<PlanError> {
    let bench = || "gpu.jsonl".into();
    vec![
        PlanError::Row {
            path: bench(),
            line: 3,
            source: json_fault(),
        },
        PlanError::Number {
            path: bench(),
            line: 3,
            field: "us",
            value: -1.0,
        },
        PlanError::OneSize {
            path: bench(),
            what: "dz",
        },
        PlanError::NoRows { path: bench() },
        PlanError::Size {
            name: "gpus",
            value: 0,
            most: 1 << 20,
        },
        PlanError::NoTopology {
            gpus: 8,
            tp: "any".into(),
            ep: "3".into(),
            etp: "any".into(),
            rank: 32,
            experts: 8,
        },
    ]
}
