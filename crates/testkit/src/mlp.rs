//! MLPs with adapters, once for the oracle and once for the library.

use moe_lora_adapters::{Activation, AdapterBackend, Lora, LoraConfig, Placement, Sharing};
use moe_lora_experts::{GateUpTargets, GluActivation, MlpBiases, MlpWeights, SwigluMlp};
use moe_lora_parallel::GroupKind;

use crate::{Axis, Matrix, Noise, oracle};

/// Experts of one layer, or one MLP, with adapters on all of their linears.
#[derive(Clone, Copy, Debug)]
pub struct MlpCase {
    /// `H`.
    pub hidden: usize,
    /// `F`.
    pub intermediate: usize,
    /// `E`, 1 for an MLP of all rows.
    pub experts: usize,
    /// One adapter for gate and up, or one each.
    pub gate_up: GateUpTargets,
    /// The adapters.
    pub config: LoraConfig,
    /// Whether every linear has a bias.
    pub biased: bool,
    /// The activation.
    pub glu: oracle::Glu,
}

/// Full weights of the library's kind.
#[derive(Clone, Debug)]
pub struct MlpValues {
    gate: Vec<f32>,
    up: Vec<f32>,
    down: Vec<f32>,
    /// Of gate, up and down.
    biases: Option<[Vec<f32>; 3]>,
}

impl MlpValues {
    /// The weights of these MLPs, without their adapters.
    pub fn of(experts: &[oracle::Mlp]) -> Self {
        let half = |of: fn(&oracle::Linear) -> Option<Matrix>, part: usize| {
            let rows = |mlp: &oracle::Mlp| {
                let weight = of(&mlp.gate_up)?;
                let half = weight.rows / 2;
                Some(weight.pick_rows(part * half..(part + 1) * half).to_f32())
            };
            experts.iter().map(rows).collect::<Option<Vec<_>>>()
        };
        let down = |of: fn(&oracle::Linear) -> Option<Matrix>| {
            let rows = |mlp: &oracle::Mlp| of(&mlp.down).map(|weight| weight.to_f32());
            experts.iter().map(rows).collect::<Option<Vec<_>>>()
        };
        let parts = |of| Some([half(of, 0)?, half(of, 1)?, down(of)?].map(|part| part.concat()));
        let [gate, up, down] =
            parts(|linear| Some(linear.weight().clone())).expect("every linear has a weight");
        Self {
            gate,
            up,
            down,
            biases: parts(|linear| linear.bias().map(Matrix::transposed)),
        }
    }

    /// As the library takes them.
    pub fn weights(&self) -> MlpWeights<'_> {
        MlpWeights {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            biases: self
                .biases
                .as_ref()
                .map(|[gate, up, down]| MlpBiases { gate, up, down }),
        }
    }
}

/// `alpha / r`, or `alpha / sqrt(r)`: the formula of the papers, not the library's.
pub fn scale(config: &LoraConfig) -> f64 {
    let rank = config.rank as f64;
    config.alpha / if config.rslora { rank.sqrt() } else { rank }
}

/// The axes of every factor of adapters whose `A` and `B` have these: a magnitude lies as its `B`.
pub fn factor_axes(adapters: &[[Axis; 2]], config: &LoraConfig) -> Vec<Axis> {
    let of_adapter = |[a, b]: &[Axis; 2]| match config.dora {
        true => vec![*a, *b, *b],
        false => vec![*a, *b],
    };
    adapters.iter().flat_map(of_adapter).collect()
}

/// Whether factor `k` of adapters in turn is of all experts together: a magnitude never is.
pub fn is_shared(config: &LoraConfig, k: usize) -> bool {
    config.sharing == Sharing::Shared && !(config.dora && k % 3 == 2)
}

impl MlpCase {
    /// Experts of these extents with SwiGLU and without biases.
    pub fn new(
        [hidden, intermediate, experts]: [usize; 3],
        gate_up: GateUpTargets,
        config: LoraConfig,
    ) -> Self {
        Self {
            hidden,
            intermediate,
            experts,
            gate_up,
            config,
            biased: false,
            glu: oracle::Glu::Silu,
        }
    }

    /// The MLP of each expert, with noise in every weight and factor.
    pub fn oracle(&self, seed: u64) -> Vec<oracle::Mlp> {
        let mut noise = Noise::new(seed);
        let mut lengths = Noise::new(seed + 100);
        let (h, f) = (self.hidden, self.intermediate);
        let mut loras = || {
            let mut lora = |first_row, d_in, d_out| oracle::Lora {
                a: noise.matrix(self.config.rank, d_in),
                b: noise.matrix(d_out, self.config.rank),
                scale: scale(&self.config),
                silu: self.config.activation == Activation::Silu,
                first_row,
                magnitude: None,
            };
            let gate_up = match self.gate_up {
                GateUpTargets::Fused => vec![lora(0, h, 2 * f)],
                GateUpTargets::Separate => vec![lora(0, h, f), lora(f, h, f)],
            };
            [gate_up, vec![lora(0, f, h)]]
        };
        let first = loras();
        let adapters: Vec<_> = (0..self.experts)
            .map(|_| match self.config.sharing {
                Sharing::Shared => first.clone(),
                Sharing::PerExpert => loras(),
            })
            .collect();
        let mut noise = Noise::new(seed + 1);
        adapters
            .into_iter()
            .map(|mut loras| {
                for lora in loras.iter_mut().flatten().filter(|_| self.config.dora) {
                    lora.magnitude = Some(lengths.lengths(lora.b.rows));
                }
                let [gate_up, down] = loras;
                let mut linear = |d_out, d_in, loras| {
                    let linear = oracle::Linear::new(noise.matrix(d_out, d_in), loras);
                    match self.biased {
                        true => linear.with_bias(noise.matrix(1, d_out)),
                        false => linear,
                    }
                };
                oracle::Mlp {
                    gate_up: linear(2 * f, h, gate_up),
                    down: linear(h, f, down),
                    glu: self.glu,
                }
            })
            .collect()
    }

    /// The library's name of the activation.
    pub fn activation(&self) -> GluActivation {
        match self.glu {
            oracle::Glu::Silu => GluActivation::Swiglu,
            oracle::Glu::Clamped { alpha, limit } => GluActivation::ClampedSwiglu { alpha, limit },
        }
    }

    /// Puts the oracle's adapters on the library's MLP.
    ///
    /// # Panics
    ///
    /// When the library refuses them.
    pub fn adapt<B: AdapterBackend, G: GroupKind>(
        &self,
        mlp: &mut SwigluMlp<B, G>,
        experts: &[oracle::Mlp],
        device: &B::Device,
    ) {
        let paths = mlp.targets(self.gate_up);
        mlp.adapt(&paths, &self.config, device).unwrap();
        for (k, lora) in mlp.gate_up.adapters.iter_mut().enumerate() {
            self.load(
                lora,
                experts.iter().map(|mlp| &mlp.gate_up.loras()[k]),
                device,
            );
        }
        for (k, lora) in mlp.down.adapters.iter_mut().enumerate() {
            self.load(lora, experts.iter().map(|mlp| &mlp.down.loras()[k]), device);
        }
    }

    fn load<'a, B: AdapterBackend, G: GroupKind, P: Placement>(
        &self,
        lora: &mut Lora<B, G, P>,
        experts: impl Iterator<Item = &'a oracle::Lora>,
        device: &B::Device,
    ) {
        let count = match self.config.sharing {
            Sharing::Shared => 1,
            Sharing::PerExpert => self.experts,
        };
        let all: Vec<_> = experts.collect();
        let experts = &all[..count];
        let values = |of: fn(&oracle::Lora) -> &Matrix| -> Vec<f32> {
            experts.iter().flat_map(|lora| of(lora).to_f32()).collect()
        };
        lora.load(&values(|lora| &lora.a), &values(|lora| &lora.b), device)
            .unwrap();
        if self.config.dora {
            let lengths = all.iter().filter_map(|lora| lora.magnitude.as_ref());
            let lengths: Vec<f32> = lengths.flat_map(Matrix::to_f32).collect();
            lora.load_magnitude(&lengths, device).unwrap();
        }
    }

    /// The axes of `A`, `B` and any magnitude of each adapter, in the order of the MLP's factors.
    pub fn axes(&self) -> Vec<Axis> {
        let gate_up: &[[Axis; 2]] = match self.gate_up {
            GateUpTargets::Fused => &[[Axis::Rows(1), Axis::Rows(2)]],
            GateUpTargets::Separate => &[[Axis::Rows(1); 2]; 2],
        };
        factor_axes(
            &[gate_up, &[[Axis::Columns, Axis::Rows(1)]]].concat(),
            &self.config,
        )
    }
}
