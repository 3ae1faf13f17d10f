//! MLPs with adapters, once for the oracle and once for the library.

use moe_lora_adapters::{
    Activation, Adaptable, AdapterBackend, Lora, LoraConfig, Placement, Sharing, Targets,
};
use moe_lora_experts::{GluActivation, MlpBiases, MlpWeights, SwigluMlp};
use moe_lora_parallel::GroupKind;

use crate::{Axis, Matrix, Noise, load_start, oracle};

/// Whether gate and up have one adapter or one each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateUpTargets {
    /// One `A` for both, `B [2F, r]`.
    Fused,
    /// An adapter each, as most PEFT files have them.
    Separate,
}

impl GateUpTargets {
    /// Every linear of an MLP or a layer.
    pub fn targets(self) -> Targets {
        let all = Targets::new(["*"]);
        match self {
            Self::Fused => all,
            Self::Separate => all.without(["gate_up_proj"]),
        }
    }
}

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

/// Every way in which experts share adapters.
pub const SHARING: [Sharing; 3] = [Sharing::PerExpert, Sharing::SharedOuter, Sharing::Shared];

/// Whether the experts share `A` and `B` of fc1, or of fc2.
pub fn shared_pair(config: &LoraConfig, fc2: bool) -> [bool; 2] {
    match config.sharing {
        Sharing::PerExpert => [false, false],
        Sharing::SharedOuter => [!fc2, fc2],
        Sharing::Shared => [true, true],
    }
}

/// Whether the experts share each factor of adapters whose `A` and `B` have these axes; `A` lies by
/// columns in fc2. A magnitude is never shared.
pub fn shared_factors(adapters: &[[Axis; 2]], config: &LoraConfig) -> Vec<bool> {
    let of_adapter = |[a, _]: &[Axis; 2]| {
        let mut shared = shared_pair(config, *a == Axis::Columns).to_vec();
        shared.extend(config.dora.then_some(false));
        shared
    };
    adapters.iter().flat_map(of_adapter).collect()
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
        let mut starts = Noise::new(seed + 200);
        let (h, f) = (self.hidden, self.intermediate);
        let mut loras = || {
            let mut lora = |first_row, d_in, d_out| oracle::Lora {
                a: noise.matrix(self.config.rank, d_in),
                b: noise.matrix(d_out, self.config.rank),
                scale: scale(&self.config),
                silu: self.config.activation == Activation::Silu,
                first_row,
                magnitude: None,
                start: None,
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
                Sharing::SharedOuter => {
                    let [mut gate_up, mut down] = loras();
                    for (own, first) in gate_up.iter_mut().zip(&first[0]) {
                        own.a = first.a.clone();
                    }
                    down[0].b = first[1][0].b.clone();
                    [gate_up, down]
                }
            })
            .collect();
        let mut noise = Noise::new(seed + 1);
        adapters
            .into_iter()
            .map(|mut loras| {
                for lora in loras.iter_mut().flatten().filter(|_| self.config.dora) {
                    lora.magnitude = Some(lengths.lengths(lora.b.rows));
                }
                for lora in loras.iter_mut().flatten().filter(|_| self.config.pissa) {
                    let oracle::Lora { a, b, .. } = &lora;
                    lora.start = Some([a, b].map(|like| starts.matrix(like.rows, like.columns)));
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
        let targets = self.gate_up.targets();
        mlp.add_adapters(&targets, &self.config, device).unwrap();
        self.load(mlp, experts, device);
    }

    /// Gives the MLP's adapters the oracle's factors.
    ///
    /// # Panics
    ///
    /// When they do not fit.
    pub fn load<B: AdapterBackend, G: GroupKind>(
        &self,
        mlp: &mut SwigluMlp<B, G>,
        experts: &[oracle::Mlp],
        device: &B::Device,
    ) {
        for (k, lora) in mlp.gate_up.adapters.iter_mut().enumerate() {
            self.load_one(
                lora,
                experts.iter().map(|mlp| &mlp.gate_up.loras()[k]),
                false,
                device,
            );
        }
        for (k, lora) in mlp.down.adapters.iter_mut().enumerate() {
            self.load_one(
                lora,
                experts.iter().map(|mlp| &mlp.down.loras()[k]),
                true,
                device,
            );
        }
    }

    /// As [`adapt`](Self::adapt), beside other adapters with names.
    ///
    /// # Panics
    ///
    /// When the library refuses them.
    pub fn adapt_named<B: AdapterBackend, G: GroupKind>(
        &self,
        name: &str,
        mlp: &mut SwigluMlp<B, G>,
        experts: &[oracle::Mlp],
        device: &B::Device,
    ) {
        let (targets, config) = (self.gate_up.targets(), &self.config);
        mlp.add_named_adapters(name, &targets, config, device)
            .unwrap();
        let fc1 = mlp.gate_up.named.iter_mut();
        for (k, named) in fc1.filter_map(|set| set.get_mut(name)).enumerate() {
            let loras = experts.iter().map(|mlp| &mlp.gate_up.loras()[k]);
            self.load_one(&mut named.lora, loras, false, device);
        }
        let fc2 = mlp.down.named.iter_mut();
        for (k, named) in fc2.filter_map(|set| set.get_mut(name)).enumerate() {
            let loras = experts.iter().map(|mlp| &mlp.down.loras()[k]);
            self.load_one(&mut named.lora, loras, true, device);
        }
    }

    fn load_one<'a, B: AdapterBackend, G: GroupKind, P: Placement>(
        &self,
        lora: &mut Lora<B, G, P>,
        experts: impl Iterator<Item = &'a oracle::Lora>,
        fc2: bool,
        device: &B::Device,
    ) {
        let all: Vec<_> = experts.collect();
        let values = |of: fn(&oracle::Lora) -> &Matrix, shared: bool| -> Vec<f32> {
            let own = if shared { &all[..1] } else { &all[..] };
            own.iter().flat_map(|lora| of(lora).to_f32()).collect()
        };
        let [a, b] = shared_pair(&self.config, fc2);
        lora.load(&values(|l| &l.a, a), &values(|l| &l.b, b), device)
            .unwrap();
        if self.config.dora {
            let lengths = all.iter().filter_map(|lora| lora.magnitude.as_ref());
            let lengths: Vec<f32> = lengths.flat_map(Matrix::to_f32).collect();
            lora.load_magnitude(&lengths, device).unwrap();
        }
        if self.config.pissa {
            let starts = all.iter().filter_map(|lora| lora.start.as_ref());
            let [a, b] = [0, 1].map(|k| {
                let of_experts = starts.clone().flat_map(|start| start[k].to_f32());
                of_experts.collect::<Vec<_>>()
            });
            load_start(lora, [&a, &b], device);
        }
    }

    /// The axes of `A` and `B` of each adapter.
    fn pairs(&self) -> Vec<[Axis; 2]> {
        let gate_up: &[[Axis; 2]] = match self.gate_up {
            GateUpTargets::Fused => &[[Axis::Rows(1), Axis::Rows(2)]],
            GateUpTargets::Separate => &[[Axis::Rows(1); 2]; 2],
        };
        [gate_up, &[[Axis::Columns, Axis::Rows(1)]]].concat()
    }

    /// The axes of `A`, `B` and any magnitude of each adapter, in the order of the MLP's factors.
    pub fn axes(&self) -> Vec<Axis> {
        factor_axes(&self.pairs(), &self.config)
    }

    /// Whether the experts share each factor, in the same order.
    pub fn shared(&self) -> Vec<bool> {
        shared_factors(&self.pairs(), &self.config)
    }
}
