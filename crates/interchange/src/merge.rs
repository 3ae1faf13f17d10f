//! Merging an adapter into the experts of its model.

use crate::{ExpertAdapter, ExpertWeights, FactorPair, GateUp, HostTensor, InterchangeError};
use rayon::prelude::*;

impl ExpertWeights {
    /// Merges the adapter of the layer: `W + s B A`, and with magnitudes `m (W + s B A) / ||row||`.
    ///
    /// Computed in `f32`, one rank-1 term after the other and the weight last, which are the bits
    /// that a merge in training gives at every topology.
    ///
    /// # Errors
    ///
    /// When the adapter's shapes are not those of the experts, and when a merged weight is no finite
    /// number although the weight was one.
    pub fn merge(self, adapter: &ExpertAdapter, rslora: bool) -> Result<Self, InterchangeError> {
        let [experts, intermediate, hidden] = axes(&self.gate);
        let fit = |pair: &FactorPair, rows: usize, columns: usize| {
            let pair = pair.expand(experts)?;
            let rank = pair.rank();
            pair.a
                .expect_shape(|| "lora_A".to_owned(), &[experts, rank, columns])?;
            pair.b
                .expect_shape(|| "lora_B".to_owned(), &[experts, rows, rank])?;
            Ok::<_, InterchangeError>(pair)
        };
        let fused = match &adapter.gate_up {
            Some(GateUp::Fused(pair)) => Some(fit(pair, 2 * intermediate, hidden)?.split_rows()?),
            Some(GateUp::Separate { gate, up }) => Some((
                fit(gate, intermediate, hidden)?,
                fit(up, intermediate, hidden)?,
            )),
            None => None,
        };
        let down = match &adapter.down {
            Some(pair) => Some(fit(pair, hidden, intermediate)?),
            None => None,
        };
        let merge = |weight: HostTensor, pair: Option<&FactorPair>| match pair {
            Some(pair) => add(weight, pair, rslora),
            None => Ok::<_, InterchangeError>(weight),
        };
        Ok(Self {
            gate: merge(self.gate, fused.as_ref().map(|(gate, _)| gate))?,
            up: merge(self.up, fused.as_ref().map(|(_, up)| up))?,
            down: merge(self.down, down.as_ref())?,
            biases: self.biases,
        })
    }
}

fn axes(weight: &HostTensor) -> [usize; 3] {
    match *weight.shape() {
        [experts, rows, columns] => [experts, rows, columns],
        _ => [0; 3],
    }
}

fn add(
    weight: HostTensor,
    pair: &FactorPair,
    rslora: bool,
) -> Result<HostTensor, InterchangeError> {
    let [_, rows, columns] = axes(&weight);
    let (rank, scale) = (pair.rank(), pair.scale(rslora) as f32);
    let shape = weight.shape().to_vec();
    let mut data = weight.into_data();
    let row = |(index, row): (usize, &mut [f32])| -> Result<(), InterchangeError> {
        let was_finite = row.iter().all(|value| value.is_finite());
        let (expert, local) = (index / rows, index % rows);
        let a = pair.a.outer(expert);
        let b = &pair.b.outer(expert)[local * rank..][..rank];
        // The order of operations of the adapters' own merge.
        let mut delta: Vec<f32> = a[..columns].iter().map(|a| b[0] * a).collect();
        for k in 1..rank {
            let terms = a[k * columns..][..columns].iter();
            for (sum, a) in delta.iter_mut().zip(terms) {
                *sum += b[k] * a;
            }
        }
        for (weight, delta) in row.iter_mut().zip(delta) {
            *weight += delta * scale;
        }
        if let Some(magnitude) = &pair.magnitude {
            let square = |sum: f64, value: &f32| sum + f64::from(*value) * f64::from(*value);
            let norm = row.iter().fold(0.0, square).sqrt();
            // A row of zeros has no direction: it stays zero.
            if norm > 0.0 {
                let factor = (f64::from(magnitude.outer(expert)[local]) / norm) as f32;
                row.iter_mut().for_each(|value| *value *= factor);
            }
        }
        match was_finite && row.iter().any(|value| !value.is_finite()) {
            true => Err(InterchangeError::NonFinite { expert, row: local }),
            false => Ok(()),
        }
    };
    if columns > 0 && rank > 0 {
        data.par_chunks_mut(columns).enumerate().try_for_each(row)?;
    }
    Ok(HostTensor::new(shape, data)?)
}
