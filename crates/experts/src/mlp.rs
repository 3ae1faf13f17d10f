//! The gated MLP, of many experts or of one.

use std::marker::PhantomData;
use std::ops::Range;

use burn::module::Module;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use moe_lora_adapters::{
    Adaptable, AdapterBackend, AdapterError, AnyLinear, ColumnLinear, Linear, LinearConfig,
    Placement, RowLinear,
};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::state::{IsFanout, IsSharded};
use moe_lora_parallel::{
    Fanout, Features, Group, GroupKind, ParallelBackend, Partial, Replicated, Sharded,
};

use crate::{ExpertsError, GluActivation};

/// Full, unsharded weights of an MLP in row-major order; `E` is 1 for an MLP of one expert.
#[derive(Clone, Copy, Debug, Default)]
pub struct MlpWeights<'a> {
    /// `[E, F, H]`.
    pub gate: &'a [f32],
    /// `[E, F, H]`.
    pub up: &'a [f32],
    /// `[E, H, F]`.
    pub down: &'a [f32],
    /// Of all three linears or of none.
    pub biases: Option<MlpBiases<'a>>,
}

/// Full, unsharded biases of an MLP in row-major order.
#[derive(Clone, Copy, Debug)]
pub struct MlpBiases<'a> {
    /// `[E, F]`.
    pub gate: &'a [f32],
    /// `[E, F]`.
    pub up: &'a [f32],
    /// `[E, H]`.
    pub down: &'a [f32],
}

/// Shape and path of an MLP.
#[derive(Clone, Debug)]
pub struct MlpConfig {
    path: String,
    hidden: usize,
    intermediate: usize,
    experts: Option<(usize, Range<usize>)>,
    activation: GluActivation,
    dtype: DType,
}

impl MlpConfig {
    /// `H` and `F` of an MLP that serves all rows, SwiGLU, f32.
    pub fn new(path: impl Into<String>, hidden: usize, intermediate: usize) -> Self {
        Self {
            path: path.into(),
            hidden,
            intermediate,
            experts: None,
            activation: GluActivation::Swiglu,
            dtype: DType::F32,
        }
    }

    /// One MLP for each expert: `global` of them, of which this rank holds `local`.
    pub fn with_experts(mut self, global: usize, local: Range<usize>) -> Self {
        self.experts = Some((global, local));
        self
    }

    /// What stands between gate, up and down.
    pub fn with_activation(mut self, activation: GluActivation) -> Self {
        self.activation = activation;
        self
    }

    /// Element type of the weights.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// A frozen MLP holding this rank's part of `weights`.
    ///
    /// # Errors
    ///
    /// When a weight or bias has another size, or when the group does not divide `F`, or `H`
    /// where there are biases.
    pub fn init<B: ParallelBackend, G: GroupKind>(
        &self,
        weights: MlpWeights<'_>,
        group: &Group<B, G>,
        device: &B::Device,
    ) -> Result<SwigluMlp<B, G>, ExpertsError> {
        let (h, f) = (self.hidden, self.intermediate);
        let global = self.experts.as_ref().map_or(1, |(global, _)| *global);
        let mut sizes = vec![
            ("gate_proj", weights.gate, vec![global, f, h]),
            ("up_proj", weights.up, vec![global, f, h]),
            ("down_proj", weights.down, vec![global, h, f]),
        ];
        if let Some(biases) = weights.biases {
            sizes.extend([
                ("gate_proj.bias", biases.gate, vec![global, f]),
                ("up_proj.bias", biases.up, vec![global, f]),
                ("down_proj.bias", biases.down, vec![global, h]),
            ]);
        }
        for (name, values, expected) in sizes {
            if values.len() != expected.iter().product::<usize>() {
                return Err(ExpertsError::Shape {
                    path: format!("{}.{name}", self.path),
                    found: values.len(),
                    expected,
                });
            }
        }
        let linear = |name: &str, d_in, d_out| {
            let config = LinearConfig::new(format!("{}.{name}", self.path), d_in, d_out)
                .with_dtype(self.dtype);
            match &self.experts {
                Some((_, local)) => config.with_experts(local.clone()),
                None => config,
            }
        };
        let gate_up = |expert: usize, row: usize, column: usize| match row.checked_sub(f) {
            None => weights.gate[(expert * f + row) * h + column],
            Some(row) => weights.up[(expert * f + row) * h + column],
        };
        let down = |e: usize, row: usize, column: usize| weights.down[(e * h + row) * f + column];
        let fragments = ["gate_proj", "up_proj"].map(|name| format!("{}.{name}", self.path));
        let mut mlp = SwigluMlp {
            gate_up: linear("gate_up_proj", h, 2 * f)
                .with_fragments(fragments)
                .init(group, gate_up, device)?,
            down: linear("down_proj", f, h).init(group, down, device)?,
            activation: self.activation,
            group: PhantomData,
        };
        if let Some(biases) = weights.biases {
            let gate_up = |expert: usize, row: usize| match row.checked_sub(f) {
                None => biases.gate[expert * f + row],
                Some(row) => biases.up[expert * f + row],
            };
            let down = |expert: usize, row: usize| biases.down[expert * h + row];
            mlp.gate_up = mlp.gate_up.with_bias(gate_up, device)?;
            mlp.down = mlp.down.with_bias(down, device)?;
        }
        Ok(mlp)
    }
}

/// `down(activation(gate x, up x))` with a column-parallel gate/up and a row-parallel down projection.
#[derive(Module, Debug)]
pub struct SwigluMlp<B: Backend, G: GroupKind> {
    /// `[2F, H]`, gate rows before up rows, each sharded by itself.
    pub gate_up: ColumnLinear<B, G>,
    /// `[H, F]`.
    pub down: RowLinear<B, G>,
    #[module(skip)]
    activation: GluActivation,
    #[module(skip)]
    group: PhantomData<G>,
}

impl<B: AdapterBackend, G: GroupKind> SwigluMlp<B, G> {
    /// Starts the magnitudes of DoRA adapters, see
    /// [`Linear::start_magnitudes`](moe_lora_adapters::Linear::start_magnitudes).
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn start_magnitudes(&mut self, group: &Group<B, G>) {
        self.gate_up.start_magnitudes(group);
        self.down.start_magnitudes(group);
    }

    /// Starts PiSSA adapters, see [`Linear::start_pissa`](moe_lora_adapters::Linear::start_pissa).
    ///
    /// # Errors
    ///
    /// When a weight has no singular value decomposition.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn start_pissa(&mut self, group: &Group<B, G>) -> Result<(), AdapterError> {
        self.gate_up.start_pissa(group)?;
        self.down.start_pissa(group)
    }

    /// `[T, H] -> [T, F / P]`: what the down projection reads.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn hidden<X: IsFanout<B, G>>(&self, x: X, rows: &RowGroups) -> Sharded<B, G> {
        let [gate, up] = self.gate_up.forward_fragments(x, rows);
        let group = gate.group().clone();
        let (gate, up) = (gate.into_tensor(), up.into_tensor());
        group.shard(self.activation.forward(gate, up))
    }

    /// `[T, H] -> [T, H]`, each rank its own term: the caller sums.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward_suppressed(&self, x: Fanout<B, G>, rows: &RowGroups) -> Partial<B, G> {
        self.down_suppressed(self.hidden(x, rows), rows)
    }

    /// The down projection alone, each rank its own term.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn down_suppressed<X: IsSharded<B, G, Features>>(
        &self,
        hidden: X,
        rows: &RowGroups,
    ) -> Partial<B, G> {
        self.down.forward_suppressed(hidden, rows)
    }

    /// `[T, H] -> [T, H]`, summed here: ordinary tensor parallelism.
    ///
    /// # Panics
    ///
    /// When shapes or row groups do not match, or when a collective fails.
    pub fn forward(&self, x: Replicated<B, G>, rows: &RowGroups) -> Replicated<B, G> {
        self.down.forward(self.hidden(x.copy_to(), rows), rows)
    }

    /// Replaces the weights by the merged ones and leaves no adapters. Returns the MLP as it was,
    /// for [`unmerge`](Self::unmerge).
    ///
    /// # Errors
    ///
    /// When a function stands between the factors of an adapter; nothing is changed then.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn merge(&mut self, group: &Group<B, G>) -> Result<Self, AdapterError> {
        let mut merged = self.clone();
        merged.gate_up.merge(group)?;
        merged.down.merge(group)?;
        Ok(std::mem::replace(self, merged))
    }

    /// As [`merge`](Self::merge), with the named adapter alone. The others are left out too.
    ///
    /// # Errors
    ///
    /// When no linear has the adapter, or a function stands between its factors; nothing is changed
    /// then.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn merge_named(&mut self, name: &str, group: &Group<B, G>) -> Result<Self, AdapterError> {
        self.slot(name)?;
        self.merge_present(name, group)
    }

    /// As [`merge_named`](Self::merge_named), also where no linear has the adapter.
    pub(crate) fn merge_present(
        &mut self,
        name: &str,
        group: &Group<B, G>,
    ) -> Result<Self, AdapterError> {
        let mut merged = self.clone();
        merge_present(&mut merged.gate_up, name, group)?;
        merge_present(&mut merged.down, name, group)?;
        Ok(std::mem::replace(self, merged))
    }

    /// Puts back what [`merge`](Self::merge) returned, to the bit.
    ///
    /// # Panics
    ///
    /// When `original` is another MLP, or another rank's part.
    pub fn unmerge(&mut self, original: Self) {
        self.gate_up.unmerge(original.gate_up);
        self.down.unmerge(original.down);
    }
}

/// Merges the named adapter where the linear has it, and leaves the others out.
fn merge_present<B: AdapterBackend, G: GroupKind, P: Placement>(
    linear: &mut Linear<B, G, P>,
    name: &str,
    group: &Group<B, G>,
) -> Result<(), AdapterError> {
    match linear.slot(name) {
        Ok(_) => {
            linear.merge_named(name, group)?;
        }
        Err(_) => {
            linear.named.clear();
            linear.merge(group)?;
        }
    }
    Ok(())
}

impl<B: Backend, G: GroupKind> Adaptable<B> for SwigluMlp<B, G> {
    fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
        vec![&self.gate_up, &self.down]
    }

    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
        vec![&mut self.gate_up, &mut self.down]
    }
}
