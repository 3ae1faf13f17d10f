//! The collectives of a step: what goes over which links.

use moe_lora_checkpoint::GroupSizes;
use serde::Serialize;

use crate::kernels::ELEMENT;
use crate::{Job, Link, Machine, ModelShape};

/// What a collective is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Owner {
    /// The adapters: `[R, r]` between their factors.
    Adapter,
    /// The base model: tokens to their experts and back, and sequence-parallel dense layers.
    Base,
    /// The adapters' gradients, once a step.
    Gradients,
}

/// Bytes that leave a rank in one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Wire {
    /// To ranks of the same node.
    pub nvlink: f64,
    /// To ranks of others; of a ring that leaves the node, all.
    pub network: f64,
}

/// A collective of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Collective {
    /// What it is for.
    pub owner: Owner,
    /// Where it is and what it carries.
    pub name: &'static str,
    /// Its group: `ETP`, `EP`, `TP` or `expert DP`.
    pub group: &'static str,
    /// Ranks of the group.
    pub ranks: usize,
    /// Bytes that leave a rank in one call.
    pub wire: Wire,
    /// Calls of a rank in the forward pass of a step.
    pub forward_calls: f64,
    /// Calls of a rank in its backward pass, without recompute.
    pub backward_calls: f64,
    /// Time of one call.
    pub us: f64,
}

/// What the ranks of a group exchange.
#[derive(Clone, Copy)]
enum Pattern {
    /// All-gather or reduce-scatter.
    Gather,
    AllReduce,
    AllToAll,
}

/// A group of ranks at equal distances, and the machine it is on.
struct Group<'a> {
    name: &'static str,
    ranks: usize,
    /// From one rank to the next.
    stride: usize,
    gpus_per_node: usize,
    machine: &'a Machine,
}

impl Group<'_> {
    /// Ranks of the group in one node.
    fn in_node(&self) -> usize {
        (self.gpus_per_node / self.stride).clamp(1, self.ranks)
    }

    /// Of a value of so many bytes: the whole one, or what a rank has to send.
    fn wire(&self, pattern: Pattern, bytes: f64) -> Wire {
        let ranks = self.ranks as f64;
        let leaves = (ranks - 1.0) / ranks * bytes;
        let ring = match pattern {
            Pattern::Gather => leaves,
            Pattern::AllReduce => 2.0 * leaves,
            Pattern::AllToAll => {
                let near = (self.in_node() - 1) as f64 / ranks * bytes;
                return Wire {
                    nvlink: near,
                    network: leaves - near,
                };
            }
        };
        match self.in_node() == self.ranks {
            true => Wire {
                nvlink: ring,
                network: 0.0,
            },
            false => Wire {
                nvlink: 0.0,
                network: ring,
            },
        }
    }

    /// The slower of both links; the start grows with the logarithm of the ranks.
    fn us(&self, wire: Wire) -> f64 {
        let doublings = self.ranks.next_power_of_two().ilog2() as f64;
        let time = |link, bytes: f64| {
            let cost = self.machine.link(link);
            match bytes > 0.0 {
                true => cost.us(bytes) + cost.start_us * (doublings - 1.0),
                false => 0.0,
            }
        };
        time(Link::Nvlink, wire.nvlink).max(time(Link::Network, wire.network))
    }

    fn call(
        &self,
        owner: Owner,
        name: &'static str,
        (pattern, bytes): (Pattern, f64),
        [forward_calls, backward_calls]: [f64; 2],
    ) -> Option<Collective> {
        let wire = self.wire(pattern, bytes);
        (self.ranks > 1).then(|| Collective {
            owner,
            name,
            group: self.name,
            ranks: self.ranks,
            wire,
            forward_calls,
            backward_calls,
            us: self.us(wire),
        })
    }
}

/// The collectives of a step; none in groups of one. `gradients` is the number of elements of a
/// rank's factors.
pub(crate) fn collectives(
    model: &ModelShape,
    job: &Job,
    machine: &Machine,
    sizes: GroupSizes,
    gradients: f64,
) -> Vec<Collective> {
    let GroupSizes { world, tp, ep, etp } = sizes;
    let group = |name, ranks, stride| Group {
        name,
        ranks,
        stride,
        gpus_per_node: job.gpus_per_node,
        machine,
    };
    let expert_tp = group("ETP", etp, 1);
    let expert = group("EP", ep, etp);
    let dense = group("TP", tp, 1);
    let replicas = group("expert DP", world / (ep * etp), ep * etp);

    let (moe, layers) = (model.moe_layers(), model.config.num_hidden_layers as f64);
    let tokens = job.tokens as f64;
    let routed = tokens * model.config.num_experts_per_tok as f64;
    let rows = routed * etp as f64;
    let low_rank = ELEMENT * rows * job.rank as f64;
    let hidden = ELEMENT * model.hidden();
    // Attention in every layer, and shared experts or a dense MLP where there is one.
    let blocks = layers
        + model.dense_layers()
        + if model.shared_intermediate() > 0.0 {
            moe
        } else {
            0.0
        };

    use Owner::{Adapter, Base, Gradients};
    use Pattern::{AllReduce, AllToAll, Gather};
    let calls = [
        expert_tp.call(
            Adapter,
            "fc1 all-gather / reduce-scatter [R, r]",
            (Gather, low_rank),
            [moe, moe],
        ),
        expert_tp.call(
            Adapter,
            "fc2 all-reduce [R, r]",
            (AllReduce, low_rank),
            [moe, moe],
        ),
        expert.call(
            Base,
            "dispatch and combine all-to-all [T K, H]",
            (AllToAll, routed * hidden),
            [2.0 * moe, 2.0 * moe],
        ),
        expert_tp.call(
            Base,
            "dispatch and combine all-gather / reduce-scatter [R, H]",
            (Gather, rows * hidden),
            [2.0 * moe, 2.0 * moe],
        ),
        // Gathered again in the backward pass.
        dense.call(
            Base,
            "dense all-gather / reduce-scatter [T TP, H]",
            (Gather, tokens * tp as f64 * hidden),
            [2.0 * blocks, 3.0 * blocks],
        ),
        replicas.call(
            Gradients,
            "all-reduce of the factors' gradients",
            (AllReduce, ELEMENT * gradients),
            [0.0, 1.0],
        ),
    ];
    calls.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(machine: &Machine, ranks: usize, stride: usize) -> Group<'_> {
        Group {
            name: "EP",
            ranks,
            stride,
            gpus_per_node: 8,
            machine,
        }
    }

    #[test]
    fn rings_within_a_node_take_its_links_and_others_the_network() {
        let machine = Machine::h200();
        let wire = group(&machine, 8, 1).wire(Pattern::AllReduce, 800.0);
        assert_eq!((wire.nvlink, wire.network), (1400.0, 0.0));
        let wire = group(&machine, 8, 2).wire(Pattern::Gather, 800.0);
        assert_eq!((wire.nvlink, wire.network), (0.0, 700.0));
    }

    #[test]
    fn an_all_to_all_sends_to_each_rank_over_the_link_to_it() {
        let machine = Machine::h200();
        // Four of sixteen ranks in a node, this one among them.
        let wire = group(&machine, 16, 2).wire(Pattern::AllToAll, 1600.0);
        assert_eq!((wire.nvlink, wire.network), (300.0, 1200.0));
    }

    #[test]
    fn the_start_of_a_collective_doubles_from_two_ranks_to_four() {
        let machine = Machine::h200();
        let us = |ranks| {
            let group = group(&machine, ranks, 1);
            group.us(Wire {
                nvlink: 1e-9,
                network: 0.0,
            })
        };
        assert!((us(4) / us(2) - 2.0).abs() < 1e-6);
        assert_eq!(us(3), us(4));
    }
}
