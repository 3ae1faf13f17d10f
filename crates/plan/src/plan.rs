//! The topologies of a job, from the fastest that fits to those that do not.

use moe_lora_checkpoint::GroupSizes;
use serde::Serialize;

use crate::kernels::Projection;
use crate::traffic::{self, Collective, Owner};
use crate::{Job, Kernel, Machine, Memory, ModelShape, Parameters, PlanError};

/// The topologies of a job.
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// The model's parameters.
    pub parameters: Parameters,
    /// The job.
    pub job: Job,
    /// Bytes of a GPU that may be used.
    pub usable_bytes: f64,
    /// By fit, then by predicted time; those that do not fit by memory.
    pub candidates: Vec<Candidate>,
}

/// What a topology takes.
#[derive(Clone, Debug, Serialize)]
pub struct Candidate {
    /// The topology.
    pub sizes: GroupSizes,
    /// Whether it fits.
    pub fit: Fit,
    /// Trained parameters of one rank.
    pub trained: f64,
    /// Memory of one rank.
    pub memory: Memory,
    /// Collectives of a step.
    pub collectives: Vec<Collective>,
    /// Time of a step.
    pub time: Time,
}

/// Whether a topology's memory is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fit {
    /// With all activations.
    Whole,
    /// When layers run again in the backward pass.
    Recompute,
    /// Not at all.
    No,
}

/// Predicted microseconds of one rank and step. The base's own products are in none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Time {
    /// The adapters' products and collectives, forward; run once more with recompute.
    pub adapter_forward_us: f64,
    /// The same, backward.
    pub adapter_backward_us: f64,
    /// The base's collectives, forward and backward; those of the forward pass once more with
    /// recompute.
    pub base_collectives_us: f64,
    /// Sum of the factors' gradients over replicas.
    pub gradients_us: f64,
}

impl Time {
    /// All of it.
    pub fn total_us(&self) -> f64 {
        self.adapter_forward_us
            + self.adapter_backward_us
            + self.base_collectives_us
            + self.gradients_us
    }
}

impl Plan {
    /// Every topology of the job that divides the model.
    ///
    /// # Errors
    ///
    /// When a size of the job is out of range, or no topology divides.
    pub fn new(model: &ModelShape, job: &Job, machine: &Machine) -> Result<Self, PlanError> {
        job.check()?;
        let memory = job.memory_bytes.unwrap_or(machine.memory_bytes);
        let usable_bytes = memory * (1.0 - Job::HEADROOM);
        let mut candidates: Vec<_> = topologies(model, job)
            .into_iter()
            .map(|sizes| Candidate::new(model, job, machine, sizes, usable_bytes))
            .collect();
        if candidates.is_empty() {
            let asked =
                |size: Option<usize>| size.map_or("any".to_owned(), |size| size.to_string());
            return Err(PlanError::NoTopology {
                gpus: job.gpus,
                tp: asked(job.tp),
                ep: asked(job.ep),
                etp: asked(job.etp),
                rank: job.rank,
                experts: model.config.num_experts,
            });
        }
        candidates.sort_by(|a, b| {
            let fits = |c: &Candidate| c.fit != Fit::No;
            let cost = |c: &Candidate| match c.fit {
                Fit::No => c.memory.total(true),
                _ => c.time.total_us(),
            };
            (fits(b).cmp(&fits(a)))
                .then(cost(a).total_cmp(&cost(b)))
                .then(a.sizes.tp.cmp(&b.sizes.tp))
        });
        Ok(Self {
            parameters: model.parameters(),
            job: job.clone(),
            usable_bytes,
            candidates,
        })
    }
}

/// TP and EP x ETP divide the GPUs; TP the heads and the intermediate sizes of dense layers, EP the
/// experts, ETP what it shards of the experts' weights and factors.
fn topologies(model: &ModelShape, job: &Job) -> Vec<GroupSizes> {
    let config = &model.config;
    let world = job.gpus;
    let dense = [
        model.heads,
        model.shared_intermediate() as usize,
        model.dense_intermediate as usize,
    ];
    let expert = [config.hidden_size, config.moe_intermediate_size, job.rank];
    let sizes = |asked: Option<usize>, extents: &[usize]| -> Vec<usize> {
        let fits = |size: &usize| {
            let divides = |extent: &usize| extent.is_multiple_of(*size);
            world.is_multiple_of(*size) && extents.iter().all(divides)
        };
        let asked_for = |size: &usize| asked.is_none_or(|asked| asked == *size);
        (1..=world).filter(asked_for).filter(fits).collect()
    };
    let (eps, etps) = (
        sizes(job.ep, &[config.num_experts]),
        sizes(job.etp, &expert),
    );
    let mut found = Vec::new();
    for tp in sizes(job.tp, &dense) {
        for &ep in &eps {
            let etps = etps.iter().filter(|etp| world.is_multiple_of(ep * **etp));
            found.extend(etps.map(|&etp| GroupSizes { world, tp, ep, etp }));
        }
    }
    found
}

impl Candidate {
    fn new(
        model: &ModelShape,
        job: &Job,
        machine: &Machine,
        sizes: GroupSizes,
        usable_bytes: f64,
    ) -> Self {
        let projections = projections(model, job, sizes);
        let moe = model.moe_layers();
        let trained = moe * projections.iter().map(Projection::factors).sum::<f64>();
        let memory = Memory::of(model, job, sizes, trained);
        let fit = if memory.total(false) <= usable_bytes {
            Fit::Whole
        } else if memory.total(true) <= usable_bytes {
            Fit::Recompute
        } else {
            Fit::No
        };
        let collectives = traffic::collectives(model, job, machine, sizes, trained);
        let kernels = |kernels: &[Kernel]| moe * kernels_us(machine, &projections, kernels);
        let calls = |owner, count: fn(&Collective) -> f64| -> f64 {
            let of_owner = collectives.iter().filter(|call| call.owner == owner);
            // Not `sum`, whose zero is negative.
            of_owner.fold(0.0, |sum, call| sum + count(call) * call.us)
        };
        let [forward, backward]: [fn(&Collective) -> f64; 2] =
            [|call| call.forward_calls, |call| call.backward_calls];
        let runs = if fit == Fit::Whole { 1.0 } else { 2.0 };
        let time = Time {
            adapter_forward_us: runs * (kernels(&Kernel::FORWARD) + calls(Owner::Adapter, forward)),
            adapter_backward_us: kernels(&Kernel::BACKWARD) + calls(Owner::Adapter, backward),
            base_collectives_us: runs * calls(Owner::Base, forward) + calls(Owner::Base, backward),
            gradients_us: calls(Owner::Gradients, backward),
        };
        Self {
            sizes,
            fit,
            trained,
            memory,
            collectives,
            time,
        }
    }

    /// Replicas of the dense layers.
    pub fn dp(&self) -> usize {
        self.sizes.world / self.sizes.tp
    }

    /// Replicas of the experts.
    pub fn expert_dp(&self) -> usize {
        self.sizes.world / (self.sizes.ep * self.sizes.etp)
    }
}

/// fc1, gate and up as one, and fc2 of one layer on one rank, with tokens spread evenly.
fn projections(model: &ModelShape, job: &Job, sizes: GroupSizes) -> [Projection; 2] {
    let etp = sizes.etp as f64;
    let (hidden, ffn) = (model.hidden(), model.intermediate());
    let rank = job.rank as f64;
    let fc1 = Projection {
        rows: job.tokens as f64 * model.config.num_experts_per_tok as f64 * etp,
        experts: (model.config.num_experts / sizes.ep) as f64,
        d_in: hidden,
        rank_a: rank / etp,
        rank,
        d_out: 2.0 * ffn / etp,
    };
    let fc2 = Projection {
        d_in: ffn / etp,
        rank_a: rank,
        d_out: hidden / etp,
        ..fc1
    };
    [fc1, fc2]
}

fn kernels_us(machine: &Machine, projections: &[Projection], kernels: &[Kernel]) -> f64 {
    let us = |projection: &Projection| -> f64 {
        let of = |kernel: &Kernel| machine.kernel(*kernel).us(projection.bytes(*kernel));
        kernels.iter().map(of).sum()
    };
    projections.iter().map(us).sum()
}
