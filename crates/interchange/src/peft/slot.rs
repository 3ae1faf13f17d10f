//! One factor pair's place in an adapter file.

use super::{FactorPair, PeftLayout};
use crate::projection::{Projection, expert_module, experts_module};
use crate::{HostTensor, InterchangeError, ModelConfig};
use moe_lora_files::TensorFile;
use moe_lora_files::expect_shape;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) layer: usize,
    pub(crate) projection: Projection,
    layout: PeftLayout,
    /// Whether another wrapper lies around this one.
    wrapped: bool,
}

impl Slot {
    /// The slots of a layout for which `adapted` holds, by layer, then gate before up before down.
    pub(crate) fn all(
        layout: PeftLayout,
        config: &ModelConfig,
        adapted: impl Fn(usize, Projection) -> bool,
    ) -> Vec<Slot> {
        let mut slots = Vec::new();
        for layer in config.moe_layers() {
            for &projection in projections(layout) {
                if adapted(layer, projection) {
                    slots.push(Slot {
                        layer,
                        projection,
                        layout,
                        wrapped: projection == Projection::GateUp
                            && adapted(layer, Projection::Down),
                    });
                }
            }
        }
        slots
    }

    /// The names of the slot's tensors in the file.
    pub(crate) fn tensors(self, config: &ModelConfig) -> impl Iterator<Item = String> {
        (0..self.parts(config))
            .flat_map(move |part| [self.name(config, part, 'A'), self.name(config, part, 'B')])
    }

    pub(crate) fn read(
        self,
        file: &TensorFile,
        config: &ModelConfig,
        rank: usize,
    ) -> Result<FactorPair, InterchangeError> {
        let [d_out, d_in] = self.projection.shape(config);
        let experts = config.num_experts;
        let columns = match self.layout {
            PeftLayout::Stacked => experts * rank,
            PeftLayout::PerExpert => rank,
        };
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for part in 0..self.parts(config) {
            for (factor, shape, data) in [
                ('A', [columns, d_in], &mut a),
                ('B', [d_out, columns], &mut b),
            ] {
                let name = self.name(config, part, factor);
                expect_shape(|| name.clone(), &file.info(&name)?.shape, &shape)?;
                file.widen(&name, data)?;
            }
        }
        match self.layout {
            PeftLayout::Stacked => FactorPair::from_stacked(
                HostTensor::new([columns, d_in], a)?,
                &HostTensor::new([d_out, columns], b)?,
                experts,
            ),
            PeftLayout::PerExpert => FactorPair::new(
                HostTensor::new([experts, rank, d_in], a)?,
                HostTensor::new([experts, d_out, rank], b)?,
            ),
        }
    }

    pub(crate) fn write(
        self,
        pair: &FactorPair,
        config: &ModelConfig,
        rank: usize,
    ) -> Result<Vec<(String, HostTensor)>, InterchangeError> {
        let [d_out, d_in] = self.projection.shape(config);
        let experts = config.num_experts;
        for (factor, tensor, shape) in [
            ('A', &pair.a, [experts, rank, d_in]),
            ('B', &pair.b, [experts, d_out, rank]),
        ] {
            tensor.expect_shape(|| self.name(config, 0, factor), &shape)?;
        }
        if self.layout == PeftLayout::Stacked {
            let (a, b) = pair.to_stacked()?;
            return Ok(vec![
                (self.name(config, 0, 'A'), a),
                (self.name(config, 0, 'B'), b),
            ]);
        }
        let mut tensors = Vec::with_capacity(2 * experts);
        for expert in 0..experts {
            for (factor, tensor, shape) in
                [('A', &pair.a, [rank, d_in]), ('B', &pair.b, [d_out, rank])]
            {
                let data = tensor.outer(expert).to_vec();
                tensors.push((
                    self.name(config, expert, factor),
                    HostTensor::new(shape, data)?,
                ));
            }
        }
        Ok(tensors)
    }

    /// Into how many tensors each factor is divided.
    fn parts(self, config: &ModelConfig) -> usize {
        match self.layout {
            PeftLayout::Stacked => 1,
            PeftLayout::PerExpert => config.num_experts,
        }
    }

    fn name(self, config: &ModelConfig, part: usize, factor: char) -> String {
        let module = match self.layout {
            PeftLayout::PerExpert => expert_module(config, self.layer, part, self.projection),
            PeftLayout::Stacked if self.wrapped => {
                format!("{}.base_layer", experts_module(self.layer))
            }
            PeftLayout::Stacked => experts_module(self.layer),
        };
        format!("base_model.model.{module}.lora_{factor}.weight")
    }
}

fn projections(layout: PeftLayout) -> &'static [Projection] {
    match layout {
        PeftLayout::Stacked => &[Projection::GateUp, Projection::Down],
        PeftLayout::PerExpert => &[Projection::Gate, Projection::Up, Projection::Down],
    }
}
