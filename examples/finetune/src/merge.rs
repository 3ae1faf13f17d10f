//! The merged model: checked against the adapted one, and written.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::adapters::AdapterBackend;
use burn_moe_lora::interchange::{ExpertWeights, HostTensor, HubModel};
use burn_moe_lora::kernels::linear;
use burn_moe_lora::parallel::Mesh;

use crate::adapter::to_host;
use crate::moe::MoeBlocks;
use crate::rank_model::{RankModel, gather_world};
use crate::text::Batch;

/// Largest difference between the two models' logits, relative to the largest logit.
pub const TOLERANCE: f64 = 1e-4;

/// Router logits this close may change places when the block before is rounded otherwise.
const TIE: f32 = 1e-3;

/// How far the merged model's logits are from the adapted one's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MergeReport {
    /// Largest difference, relative to the largest logit.
    pub error: f64,
    /// Positions compared.
    pub compared: usize,
    /// Positions left out: a token that the router is undecided about may go to another expert, and then its logits and
    /// those of the tokens after it in its sequence differ by more than rounding.
    pub left_out: usize,
}

/// Compares the logits of two models on `batches`; every rank calls it and gets the same report.
///
/// # Errors
/// Logits further apart than [`TOLERANCE`], or a batch with fewer rows than ranks.
///
/// # Panics
/// If a collective fails.
pub fn check_merged<B: AdapterBackend>(
    adapted: &RankModel<B>,
    merged: &RankModel<B>,
    batches: &[Batch],
    device: &B::Device,
) -> Result<MergeReport> {
    let mesh = &adapted.mesh;
    let mut local = Difference::default();
    for batch in batches {
        let batch = batch.shard(mesh.rank(), mesh.topology().world_size())?;
        let [before, after] = [adapted, merged].map(|model| Trace::of(model, &batch, device));
        local.add(&before, &after, batch.length());
    }
    let report = local.over_world(mesh, device);
    let MergeReport {
        error,
        compared,
        left_out,
    } = report;
    let remedy = match error.is_finite() {
        true => "use the adapter files; they are written",
        false => "lower --lr, --alpha or --lora-plus",
    };
    // Written so that a NaN is refused too.
    ensure!(
        error <= TOLERANCE && left_out <= compared,
        "the merged model's logits differ from the adapted model's by {error:.1e} of the largest logit, more than \
         {TOLERANCE:.0e}, with {left_out} of {} positions left out ({remedy})",
        compared + left_out
    );
    Ok(report)
}

/// The full weights of one layer's experts under their hub names. Every rank calls it, `keep` says who keeps them.
///
/// # Errors
/// Weights that do not fit the model.
///
/// # Panics
/// If a collective fails.
pub fn gather_experts<B: AdapterBackend>(
    blocks: &MoeBlocks<B>,
    layer: usize,
    hub: &HubModel,
    mesh: &Mesh<B>,
    keep: bool,
) -> Result<BTreeMap<String, HostTensor>> {
    let (etp, ep) = (mesh.expert_tp(), mesh.ep());
    let size = hub.config().moe_intermediate_size;
    let index = blocks.numbers.iter().position(|number| *number == layer);
    let index = index.with_context(|| format!("layer {layer} has no experts"))?;
    let experts = &blocks.layers[index].experts;
    let gate_up = experts.gate_up.weight.gather_all(etp, ep);
    let down = experts.down.weight.gather_all(etp, ep);
    if !keep {
        return Ok(BTreeMap::new());
    }
    let weights = ExpertWeights {
        gate: to_host(gate_up.clone().narrow(1, 0, size))?,
        up: to_host(gate_up.narrow(1, size, size))?,
        down: to_host(down)?,
        biases: None,
    };
    Ok(weights.into_hub(layer, hub)?)
}

/// What a model makes of a batch: its logits, and where the routers sent the tokens.
struct Trace {
    /// `[T, V]`.
    logits: Vec<f32>,
    /// The routers' logits `[T, E]`, a layer each.
    scores: Vec<Vec<f32>>,
    /// The chosen experts `[T, K]`, a layer each.
    experts: Vec<Vec<usize>>,
    tokens: usize,
}

impl Trace {
    fn of<B: AdapterBackend>(model: &RankModel<B>, batch: &Batch, device: &B::Device) -> Self {
        let (mut scores, mut experts) = (Vec::new(), Vec::new());
        let logits = model
            .dense
            .forward_with(batch.tensor(device), |layer, tokens| {
                let block = &model.blocks.layers[layer];
                let weight = block.router.weight.val();
                scores.push(values(linear(tokens.clone(), weight)));
                experts.push(block.router.forward(tokens.clone()).experts);
                block.forward(tokens, &model.mesh)
            });
        Self {
            logits: values(logits),
            scores,
            experts,
            tokens: batch.rows() * batch.length(),
        }
    }

    /// Whether `other` sends the token to other experts of one of the layers, between which this router is undecided.
    fn undecided(&self, other: &Self, token: usize) -> bool {
        (0..self.scores.len()).any(|layer| {
            let scores = self.row(&self.scores[layer], token);
            let (mine, theirs) = (
                self.row(&self.experts[layer], token),
                self.row(&other.experts[layer], token),
            );
            let left = mine.iter().filter(|expert| !theirs.contains(expert));
            let joined: Vec<_> = theirs
                .iter()
                .filter(|expert| !mine.contains(expert))
                .collect();
            !joined.is_empty()
                && left.into_iter().all(|a| {
                    joined
                        .iter()
                        .all(|b| (scores[*a] - scores[**b]).abs() <= TIE)
                })
        })
    }

    fn row<'a, T>(&self, rows: &'a [T], token: usize) -> &'a [T] {
        let width = rows.len() / self.tokens;
        &rows[token * width..(token + 1) * width]
    }
}

fn values<B: AdapterBackend, const D: usize>(tensor: Tensor<B, D>) -> Vec<f32> {
    tensor.into_data().iter::<f32>().collect()
}

/// The differences seen so far.
#[derive(Default)]
struct Difference {
    difference: f64,
    largest: f64,
    compared: usize,
    left_out: usize,
}

impl Difference {
    /// Adds the positions of every sequence up to the first undecided token: attention carries its difference on.
    fn add(&mut self, before: &Trace, after: &Trace, length: usize) {
        for start in (0..before.tokens).step_by(length) {
            let sequence = start..start + length;
            let end = sequence
                .clone()
                .find(|token| before.undecided(after, *token))
                .unwrap_or(sequence.end);
            self.compared += end - start;
            self.left_out += sequence.end - end;
            for token in start..end {
                let rows = [before, after].map(|trace| trace.row(&trace.logits, token));
                for (before, after) in rows[0].iter().zip(rows[1]) {
                    let difference = f64::from((before - after).abs());
                    self.difference = keep_nan(self.difference, difference);
                    self.largest = self.largest.max(f64::from(before.abs()));
                }
            }
        }
    }

    fn over_world<B: AdapterBackend>(&self, mesh: &Mesh<B>, device: &B::Device) -> MergeReport {
        let counts = [self.compared, self.left_out].map(|count| count as f64);
        let local = [self.difference, self.largest, counts[0], counts[1]];
        let all = gather_world(Tensor::from_data(TensorData::from(local), device), mesh);
        let column = |index: usize| all.chunks_exact(local.len()).map(move |rank| rank[index]);
        let difference = column(0).fold(0.0, keep_nan);
        MergeReport {
            error: difference / column(1).fold(f64::MIN_POSITIVE, f64::max),
            compared: column(2).sum::<f64>() as usize,
            left_out: column(3).sum::<f64>() as usize,
        }
    }
}

/// The larger one; `f64::max` would drop a NaN.
fn keep_nan(a: f64, b: f64) -> f64 {
    if a.is_nan() || b <= a { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One sequence of three tokens over two experts, `K = 1`, a single logit each.
    fn trace(logits: [f32; 3], second: [f32; 2], expert: usize) -> Trace {
        Trace {
            logits: logits.into(),
            scores: vec![vec![1.0, 0.0, second[0], second[1], 0.0, 1.0]],
            experts: vec![vec![0, expert, 1]],
            tokens: 3,
        }
    }

    fn difference(before: &Trace, after: &Trace) -> (f64, usize, usize) {
        let mut difference = Difference::default();
        difference.add(before, after, 3);
        (
            difference.difference,
            difference.compared,
            difference.left_out,
        )
    }

    #[test]
    fn every_position_counts_when_the_tokens_go_the_same_way() {
        let before = trace([1.0, 2.0, 4.0], [0.5, 0.4], 0);
        let after = trace([1.0, 2.5, 4.0], [0.5, 0.4], 0);
        assert_eq!(difference(&before, &after), (0.5, 3, 0));
    }

    #[test]
    fn a_tied_token_and_those_after_it_are_left_out() {
        let before = trace([1.0, 2.0, 4.0], [0.5, 0.4999], 0);
        let after = trace([1.25, 9.0, 9.0], [0.5, 0.5001], 1);
        assert_eq!(difference(&before, &after), (0.25, 1, 2));
    }

    #[test]
    fn a_decided_token_may_not_go_elsewhere() {
        let before = trace([1.0, 2.0, 4.0], [0.5, 0.4], 0);
        let after = trace([1.0, 9.0, 4.0], [0.4, 0.5], 1);
        assert_eq!(difference(&before, &after), (7.0, 3, 0));
    }

    #[test]
    fn a_logit_that_is_no_number_is_not_overlooked() {
        let before = trace([1.0, 2.0, 4.0], [0.5, 0.4], 0);
        let after = trace([f32::NAN, 2.0, 4.0], [0.5, 0.4], 0);
        assert!(difference(&before, &after).0.is_nan());
    }
}
