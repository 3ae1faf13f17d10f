//! What becomes of each factor's gradient between backward and the optimizer, as a table.

use std::fmt;

use burn::tensor::backend::Backend;
use moe_lora_parallel::{GroupName, Topology};

use crate::{ShardAxis, TrainedWeight};

/// The gradient of one factor: what it is summed over, and where its elements lie.
///
/// `shards` and `replicas` together are one of the two decompositions of the world, TP x DP or
/// ETP x EP x expert-DP: every rank holds a shard of the factor or a copy of one.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientRow {
    /// Path of the linear.
    pub linear: String,
    /// Name of the factor in it, such as `lora_A`.
    pub factor: String,
    /// The axis of the factor along which its tensor parallel group cuts it.
    pub axis: ShardAxis,
    /// Groups whose ranks each hold a term of the gradient: it is summed over them, in this order.
    pub sums: Vec<GroupName>,
    /// What the sum is divided by.
    pub divisor: f64,
    /// Groups whose ranks hold different elements: a norm sums their squares.
    pub shards: Vec<GroupName>,
    /// Groups whose ranks hold the same elements: a norm counts one of them.
    pub replicas: Vec<GroupName>,
}

impl GradientRow {
    fn of<B: Backend>(trained: &TrainedWeight<'_, B>, topology: &Topology) -> Self {
        let (mut shards, mut replicas) = (Vec::new(), Vec::new());
        match trained.layout.axis {
            ShardAxis::Whole => replicas.push(trained.group),
            ShardAxis::Out | ShardAxis::In => shards.push(trained.group),
        }
        let sums = match (trained.group, trained.shared_by_experts) {
            (GroupName::ExpertTp, false) => {
                shards.push(GroupName::Ep);
                vec![topology.expert_gradient_group()]
            }
            (GroupName::ExpertTp, true) => vec![GroupName::Ep, topology.expert_gradient_group()],
            (GroupName::Tp | GroupName::Ep | GroupName::Dp | GroupName::ExpertDp, _) => {
                vec![GroupName::Dp]
            }
        };
        replicas.extend(&sums);
        Self {
            linear: trained.linear.into(),
            factor: trained.factor().into(),
            axis: trained.layout.axis,
            sums,
            divisor: 1.0,
            shards,
            replicas,
        }
    }

    fn cells(&self, topology: &Topology) -> [String; COLUMNS.len()] {
        let groups = |names: &[GroupName]| match names {
            [] => "-".into(),
            names => {
                let sized = names
                    .iter()
                    .map(|name| format!("{name}={}", topology.size(*name)));
                sized.collect::<Vec<_>>().join(" ")
            }
        };
        let axis = match self.axis {
            ShardAxis::Whole => "whole",
            ShardAxis::Out => "d_out",
            ShardAxis::In => "d_in",
        };
        [
            self.linear.clone(),
            self.factor.clone(),
            axis.into(),
            groups(&self.sums),
            self.divisor.to_string(),
            groups(&self.shards),
            groups(&self.replicas),
        ]
    }
}

const COLUMNS: [&str; 7] = [
    "linear",
    "factor",
    "cut along",
    "summed over",
    "divided by",
    "squares over",
    "replicas over",
];

/// How the gradients of an adapter's factors are synchronised and their norm is taken: a row a
/// factor, from the topology alone. [`sync_gradients`](crate::sync_gradients) and
/// [`gradient_norm`](crate::gradient_norm) do what it says.
///
/// | factor | summed over | squares over | replicas over |
/// |---|---|---|---|
/// | of one expert | data | `ExpertTp`, `Ep` | data |
/// | shared by the experts | `Ep`, data | `ExpertTp` | `Ep`, data |
/// | of a dense linear or shared expert | `Dp` | `Tp` | `Dp` |
///
/// Data is [`expert_gradient_group`](Topology::expert_gradient_group). A factor that its tensor
/// parallel group holds whole has that group among the replicas.
///
/// # Averages
///
/// By the crate's convention the loss is the sum of the ranks' local losses: an expert sees the
/// tokens of all ranks, a shared expert those of its tensor parallel group, and with the sums of
/// the table every gradient is that of the one loss. So nothing is divided, and a mean has one
/// divisor for all factors, the global count of what it is over. Divide the local loss by it, or,
/// where it is known only after several backward passes, the sums:
///
/// ```
/// # use burn::backend::{Autodiff, Flex};
/// # use burn::optim::GradientsParams;
/// # use moe_lora_adapters::{AdapterError, ColumnLinear, GradientPlan, LinearConfig, LoraConfig};
/// # use moe_lora_parallel::{ExpertTp, Mesh};
/// # let (mesh, device) = (Mesh::<Autodiff<Flex>>::solo(), Default::default());
/// # let mut layer: ColumnLinear<Autodiff<Flex>, ExpertTp> =
/// #     LinearConfig::new("up_proj", 8, 8).init(mesh.expert_tp(), |_, _, _| 0.0, &device)?;
/// # layer.adapt("up_proj", &LoraConfig::new(2, 4.0), &device)?;
/// # let (accumulated, own_tokens) = (GradientsParams::new(), 5);
/// // Gradients of the local sums over the tokens, and this rank's number of tokens.
/// let tokens = mesh.sum(own_tokens);
/// let weights = layer.trained_weights();
/// let plan = GradientPlan::of(&weights, mesh.topology()).with_divisor(tokens as f64);
/// let grads = plan.sync(&weights, accumulated, &mesh);
/// # Ok::<(), AdapterError>(())
/// ```
///
/// [`Display`](fmt::Display) prints the table with the size of each group.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientPlan {
    topology: Topology,
    rows: Vec<GradientRow>,
}

impl GradientPlan {
    /// The rows of these factors. Communicates nothing.
    pub fn of<B: Backend>(weights: &[TrainedWeight<'_, B>], topology: &Topology) -> Self {
        let rows = weights
            .iter()
            .map(|trained| GradientRow::of(trained, topology));
        Self {
            topology: *topology,
            rows: rows.collect(),
        }
    }

    /// Divides the sums of all factors: by the global token count for the mean of a loss over
    /// tokens. A count of zero gives gradients that are not finite, which
    /// [`clip_gradients`](crate::clip_gradients) refuses.
    pub fn with_divisor(mut self, divisor: f64) -> Self {
        for row in &mut self.rows {
            row.divisor = divisor;
        }
        self
    }

    /// A row a factor, in the order of the weights.
    pub fn rows(&self) -> &[GradientRow] {
        &self.rows
    }
}

impl fmt::Display for GradientPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = vec![COLUMNS.map(String::from)];
        lines.extend(self.rows.iter().map(|row| row.cells(&self.topology)));
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max();
        let widths: Vec<usize> = (0..COLUMNS.len()).filter_map(width).collect();
        for line in &lines {
            let cells = line.iter().zip(&widths);
            let cells: Vec<_> = cells
                .map(|(cell, &width)| format!("{cell:width$}"))
                .collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}
