//! A factor pair in the tensors of its slot.

use super::FactorPair;
use super::dialect::Dialect;
use super::slot::{Part, Slot};
use crate::projection::Projection;
use crate::{HostTensor, InterchangeError, ModelConfig};
use moe_lora_files::{FileError, TensorFile, expect_shape};

/// What the settings say of a pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pair {
    pub(crate) rank: usize,
    pub(crate) alpha: f64,
    pub(crate) dora: bool,
    pub(crate) dialect: Dialect,
}

impl Slot {
    /// The pair, whose tensors must have the shapes that the model and the settings say.
    pub(crate) fn read(
        self,
        file: &TensorFile,
        config: &ModelConfig,
        pair: Pair,
    ) -> Result<FactorPair, InterchangeError> {
        let Pair {
            rank,
            alpha,
            dora,
            dialect,
        } = pair;
        let mut pair = match self.is_stacked() {
            true => {
                let [shape_a, shape_b] =
                    dialect.shapes(self.weight(config), config.num_experts * rank);
                let a = self.expect(file, Part::A, &shape_a, config)?;
                let b = self.expect(file, Part::B, &shape_b, config)?;
                let (a, b) = (file.tensor(&a)?, file.tensor(&b)?);
                let pair = FactorPair::from_stacked(a, &b, config.num_experts, alpha)?;
                match dialect {
                    Dialect::Upright => pair,
                    Dialect::Exchanged => pair.transposed()?,
                }
            }
            false => {
                let a = self.read_part(file, Part::A, rank, config)?;
                FactorPair::new(a, self.read_part(file, Part::B, rank, config)?, alpha)?
            }
        };
        if dora {
            pair = pair.with_magnitude(self.read_part(file, Part::Magnitude, rank, config)?)?;
        }
        if self.is_interleaved(config) {
            pair = pair.deinterleaved()?;
        }
        Ok(pair)
    }

    /// The tensors that hold the pair.
    pub(crate) fn write(
        self,
        mut pair: FactorPair,
        config: &ModelConfig,
    ) -> Result<Vec<(String, HostTensor)>, InterchangeError> {
        let rank = pair.sizes()?.rank;
        if self.is_interleaved(config) {
            pair = pair.interleaved()?;
        }
        let mut parts = vec![(Part::A, &pair.a), (Part::B, &pair.b)];
        parts.extend(pair.magnitude.iter().map(|m| (Part::Magnitude, m)));
        for &(part, tensor) in &parts {
            let mut expected = part.shape(self.weight(config), rank);
            expected.insert(0, self.experts(part, config));
            tensor.expect_shape(|| self.tensor(0, part, config), &expected)?;
        }
        if self.is_stacked() {
            let (a, b) = pair.to_stacked()?;
            return Ok(vec![
                (self.tensor(0, Part::A, config), a),
                (self.tensor(0, Part::B, config), b),
            ]);
        }
        let mut tensors = Vec::new();
        for (part, tensor) in parts {
            if !self.is_numbered(part) {
                tensors.push((self.tensor(0, part, config), tensor.clone()));
                continue;
            }
            for expert in 0..config.num_experts {
                let data = tensor.outer(expert).to_vec();
                let tensor = HostTensor::new(&tensor.shape()[1..], data)?;
                tensors.push((self.tensor(expert, part, config), tensor));
            }
        }
        Ok(tensors)
    }

    /// One factor of all experts, `[E, ..]` or, where it is shared, `[1, ..]`.
    fn read_part(
        self,
        file: &TensorFile,
        part: Part,
        rank: usize,
        config: &ModelConfig,
    ) -> Result<HostTensor, InterchangeError> {
        let experts = self.experts(part, config);
        let one = part.shape(self.weight(config), rank);
        let whole = [&[experts], &one[..]].concat();
        let mut data = Vec::new();
        if self.is_numbered(part) {
            for expert in 0..experts {
                let name = self.tensor(expert, part, config);
                expect_shape(|| name.clone(), &file.info(&name)?.shape, &one)?;
                file.widen(&name, &mut data)?;
            }
        } else {
            file.widen(&self.expect(file, part, &whole, config)?, &mut data)?;
        }
        Ok(HostTensor::new(whole, data)?)
    }

    /// The name of a tensor that has this shape.
    fn expect(
        self,
        file: &TensorFile,
        part: Part,
        shape: &[usize],
        config: &ModelConfig,
    ) -> Result<String, FileError> {
        let name = self.tensor(0, part, config);
        expect_shape(|| name.clone(), &file.info(&name)?.shape, shape)?;
        Ok(name)
    }

    /// Whether the rows of gate and up alternate, as in the parameter that the slot adapts.
    fn is_interleaved(self, config: &ModelConfig) -> bool {
        self.projection == Projection::GateUp && config.family.stacked().interleaved
    }
}
