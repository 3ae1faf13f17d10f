//! The routed experts of one layer, in one form for all families.

use crate::projection::{Projection, expert_module, experts_module};
use crate::stacked::Stacked;
use crate::{HostTensor, HubModel, InterchangeError, ModelConfig};
use moe_lora_files::expect_shape;
use std::collections::BTreeMap;

/// The routed experts of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertWeights {
    /// `[E, F, H]`.
    pub gate: HostTensor,
    /// `[E, F, H]`.
    pub up: HostTensor,
    /// `[E, H, F]`.
    pub down: HostTensor,
    /// In a family that has them.
    pub biases: Option<ExpertBiases>,
}

/// What the routed experts add after each projection.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertBiases {
    /// `[E, F]`.
    pub gate: HostTensor,
    /// `[E, F]`.
    pub up: HostTensor,
    /// `[E, H]`.
    pub down: HostTensor,
}

impl HubModel {
    /// The routed experts of `layer`, whether they lie on disk one by one or stacked.
    ///
    /// # Errors
    ///
    /// When there is no such layer or it has no experts, or a tensor is missing, has another shape
    /// than the configuration says or is stored in an unsupported type.
    pub fn expert_weights(&self, layer: usize) -> Result<ExpertWeights, InterchangeError> {
        self.config().expect_moe(layer)?;
        match self.stacked(layer) {
            Some(stacked) => self.read_stacked(layer, stacked),
            None => Ok(ExpertWeights {
                gate: self.read_one_by_one(layer, Projection::Gate)?,
                up: self.read_one_by_one(layer, Projection::Up)?,
                down: self.read_one_by_one(layer, Projection::Down)?,
                biases: None,
            }),
        }
    }

    /// How the experts of `layer` are stacked, unless they lie one by one.
    pub(crate) fn stacked(&self, layer: usize) -> Option<Stacked> {
        let family = self.config().family;
        let stacked = self.contains(&parameter(layer, Projection::GateUp));
        (stacked || family.one_by_one.is_none()).then_some(family.stacked)
    }

    fn read_one_by_one(
        &self,
        layer: usize,
        projection: Projection,
    ) -> Result<HostTensor, InterchangeError> {
        let config = self.config();
        let experts = config.num_experts;
        let [d_out, d_in] = projection.shape(config);
        let name = |expert| weight(config, layer, expert, projection);
        // All shapes first: a tensor that exists is backed by bytes in its file, so the stack's
        // size is then bounded by the files and not by what the configuration claims.
        for name in (0..experts).map(name) {
            expect_shape(|| name.clone(), self.shape(&name)?, &[d_out, d_in])?;
        }
        let mut data = Vec::with_capacity(experts * d_out * d_in);
        for name in (0..experts).map(name) {
            self.shard(&name)?.widen(&name, &mut data)?;
        }
        Ok(HostTensor::new([experts, d_out, d_in], data)?)
    }

    fn read_stacked(
        &self,
        layer: usize,
        stacked: Stacked,
    ) -> Result<ExpertWeights, InterchangeError> {
        let config = self.config();
        let (experts, hidden, ffn) = (
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        );
        let [gate_up, down] = [Projection::GateUp, Projection::Down];
        // As above, the shapes come first.
        for projection in [gate_up, down] {
            let name = parameter(layer, projection);
            let shape = stacked.shape(experts, projection.shape(config));
            expect_shape(|| name.clone(), self.shape(&name)?, &shape)?;
        }
        let size = experts * ffn * hidden;
        let mut weights = [(); 3].map(|()| Vec::with_capacity(size));
        let mut matrix = Vec::new();
        for expert in 0..experts {
            let [gate, up, _] = &mut weights;
            self.read_matrix(layer, expert, gate_up, stacked, &mut matrix)?;
            stacked.split(&matrix, hidden, gate, up);
        }
        for expert in 0..experts {
            self.read_matrix(layer, expert, down, stacked, &mut matrix)?;
            weights[2].append(&mut matrix);
        }
        let [gate, up, down] = weights;
        Ok(ExpertWeights {
            gate: HostTensor::new([experts, ffn, hidden], gate)?,
            up: HostTensor::new([experts, ffn, hidden], up)?,
            down: HostTensor::new([experts, hidden, ffn], down)?,
            biases: match stacked.biases {
                true => Some(self.read_biases(layer, stacked)?),
                false => None,
            },
        })
    }

    /// One expert's `[d_out, d_in]`.
    fn read_matrix(
        &self,
        layer: usize,
        expert: usize,
        projection: Projection,
        stacked: Stacked,
        matrix: &mut Vec<f32>,
    ) -> Result<(), InterchangeError> {
        let name = parameter(layer, projection);
        matrix.clear();
        self.shard(&name)?.widen_outer(&name, expert, matrix)?;
        stacked.upright(matrix, projection.shape(self.config()));
        Ok(())
    }

    fn read_biases(
        &self,
        layer: usize,
        stacked: Stacked,
    ) -> Result<ExpertBiases, InterchangeError> {
        let config = self.config();
        let (experts, ffn) = (config.num_experts, config.moe_intermediate_size);
        let read = |projection| {
            let [d_out, _] = Projection::shape(projection, config);
            self.expected(&bias_parameter(layer, projection), &[experts, d_out])
        };
        let fused = read(Projection::GateUp)?;
        let (mut gate, mut up) = (Vec::new(), Vec::new());
        for expert in 0..experts {
            stacked.split(fused.outer(expert), 1, &mut gate, &mut up);
        }
        Ok(ExpertBiases {
            gate: HostTensor::new([experts, ffn], gate)?,
            up: HostTensor::new([experts, ffn], up)?,
            down: read(Projection::Down)?,
        })
    }
}

impl ExpertWeights {
    /// The tensors under the names, and in the layout, that `model` has for them: the inverse of
    /// [`HubModel::expert_weights`].
    ///
    /// Without biases, those of a model that has some are left out.
    ///
    /// # Errors
    ///
    /// When there is no such layer or it has no experts, a tensor does not fit `model`, or there are
    /// biases that it has no place for.
    pub fn into_hub(
        self,
        layer: usize,
        model: &HubModel,
    ) -> Result<BTreeMap<String, HostTensor>, InterchangeError> {
        let config = model.config();
        config.expect_moe(layer)?;
        let experts = config.num_experts;
        for (projection, tensor) in [
            (Projection::Gate, &self.gate),
            (Projection::Up, &self.up),
            (Projection::Down, &self.down),
        ] {
            let [d_out, d_in] = projection.shape(config);
            let name = || format!("{} of layer {layer}", projection.name());
            tensor.expect_shape(name, &[experts, d_out, d_in])?;
        }
        let stacked = model.stacked(layer);
        if let Some(biases) = &self.biases {
            if !stacked.is_some_and(|stacked| stacked.biases) {
                return Err(InterchangeError::UnexpectedBiases {
                    layer,
                    model_type: config.family.model_type,
                });
            }
            for (projection, tensor) in [
                (Projection::Gate, &biases.gate),
                (Projection::Up, &biases.up),
                (Projection::Down, &biases.down),
            ] {
                let [d_out, _] = projection.shape(config);
                let name = || format!("{} bias of layer {layer}", projection.name());
                tensor.expect_shape(name, &[experts, d_out])?;
            }
        }
        match stacked {
            Some(stacked) => self.into_stacked(layer, model, stacked),
            None => self.into_one_by_one(layer, model),
        }
    }

    fn into_one_by_one(
        self,
        layer: usize,
        model: &HubModel,
    ) -> Result<BTreeMap<String, HostTensor>, InterchangeError> {
        let config = model.config();
        let mut tensors = BTreeMap::new();
        for (projection, stack) in [
            (Projection::Gate, self.gate),
            (Projection::Up, self.up),
            (Projection::Down, self.down),
        ] {
            for expert in 0..config.num_experts {
                let data = stack.outer(expert).to_vec();
                let tensor = HostTensor::new(projection.shape(config), data)?;
                tensors.insert(weight(config, layer, expert, projection), tensor);
            }
        }
        Ok(tensors)
    }

    fn into_stacked(
        self,
        layer: usize,
        model: &HubModel,
        stacked: Stacked,
    ) -> Result<BTreeMap<String, HostTensor>, InterchangeError> {
        let config = model.config();
        let (experts, hidden) = (config.num_experts, config.hidden_size);
        let mut tensors = BTreeMap::new();
        let mut insert = |projection: Projection, data| -> Result<(), InterchangeError> {
            let shape = stacked.shape(experts, projection.shape(config));
            tensors.insert(parameter(layer, projection), HostTensor::new(shape, data)?);
            Ok(())
        };
        let mut fused = Vec::with_capacity(2 * self.gate.len());
        let mut matrix = Vec::new();
        for expert in 0..experts {
            let (gate, up) = (self.gate.outer(expert), self.up.outer(expert));
            stacked.join(gate, up, hidden, &mut matrix);
            stacked.as_stored(&mut matrix, Projection::GateUp.shape(config));
            fused.append(&mut matrix);
        }
        drop((self.gate, self.up));
        insert(Projection::GateUp, fused)?;
        let mut down = self.down.into_data();
        let [d_out, d_in] = Projection::Down.shape(config);
        for matrix in down.chunks_exact_mut(d_out * d_in) {
            stacked.as_stored(matrix, [d_out, d_in]);
        }
        insert(Projection::Down, down)?;

        if let Some(biases) = self.biases {
            let mut fused = Vec::with_capacity(2 * biases.gate.len());
            for expert in 0..experts {
                let (gate, up) = (biases.gate.outer(expert), biases.up.outer(expert));
                stacked.join(gate, up, 1, &mut fused);
            }
            let width = fused.len() / experts;
            let fused = HostTensor::new([experts, width], fused)?;
            tensors.insert(bias_parameter(layer, Projection::GateUp), fused);
            tensors.insert(bias_parameter(layer, Projection::Down), biases.down);
        }
        Ok(tensors)
    }
}

/// The weight of one projection of one expert, where experts lie one by one.
fn weight(config: &ModelConfig, layer: usize, expert: usize, projection: Projection) -> String {
    format!(
        "{}.weight",
        expert_module(config, layer, expert, projection)
    )
}

/// The stacked weights of one projection.
fn parameter(layer: usize, projection: Projection) -> String {
    format!("{}.{}", experts_module(layer), projection.name())
}

fn bias_parameter(layer: usize, projection: Projection) -> String {
    format!("{}_bias", parameter(layer, projection))
}
