//! The MoE layer: every rank brings its own tokens, unequal numbers of them. The loss is the sum of
//! the ranks' local losses `<y, G>`.

use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{Adaptable, LoraConfig, Sharing, sync_gradients};
use moe_lora_experts::{MoeConfig, MoeLayer, MoeWeights, RouterScore, SharedConfig, WeighAt};
use moe_lora_parallel::{Mesh, Topology, TopologyConfig, range_of};
use moe_lora_testkit::{
    Axis, GateUpTargets, Matrix, MlpCase, MlpValues, Ranks, TrainingBackend, assert_all_close,
    gradient, noise, oracle, synced_gradient, unshard, unshard_experts,
};
use serde::{Deserialize, Serialize};

use crate::dropout;

/// `H`.
pub const HIDDEN: usize = 8;
/// `F`.
pub const INTERMEDIATE: usize = 12;
/// `F` of the shared experts.
pub const SHARED_INTERMEDIATE: usize = 8;
/// `E`.
pub const EXPERTS: usize = 4;
/// `K`.
pub const TOP_K: usize = 2;
/// Rank of the adapters.
pub const RANK: usize = 4;
/// No power of two, so that the scale rounds.
pub const ALPHA: f64 = 5.3;
/// Additions behind any result: both extents, two ranks, experts, choices and tokens.
pub const REDUCTION: usize = 60;

/// Topology and the tokens of each rank.
#[derive(Clone, Debug)]
pub struct Place {
    /// The topology.
    pub topology: Topology,
    /// Tokens of each rank.
    pub dealt: Vec<usize>,
}

/// A topology over as many ranks as are dealt tokens.
pub fn place(tp: usize, ep: usize, etp: usize, dealt: &[usize]) -> Place {
    let config = TopologyConfig::new(dealt.len());
    Place {
        topology: config.with_tp(tp).with_ep(ep).with_etp(etp).init().unwrap(),
        dealt: dealt.into(),
    }
}

/// Expert topologies, with a rank that has no tokens wherever there are several.
pub fn grid() -> Vec<Place> {
    vec![
        place(1, 1, 1, &[9]),
        place(1, 2, 1, &[9, 0]),
        place(1, 1, 2, &[2, 7]),
        place(1, 2, 2, &[3, 0, 4, 2]),
        place(1, 1, 4, &[0, 5, 1, 3]),
        place(1, 4, 1, &[4, 1, 4, 0]),
    ]
}

/// Several replicas of the experts: two of EP = 2, of EP = 2 with ETP = 2, of ETP = 2.
pub fn replicated() -> Vec<Place> {
    vec![
        place(1, 2, 1, &[3, 0, 4, 2]),
        place(1, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]),
        place(1, 1, 2, &[3, 0, 4, 2]),
    ]
}

/// Dense tensor parallelism of another size than the experts', for the shared experts.
pub fn dense() -> Vec<Place> {
    vec![
        place(2, 2, 1, &[3, 0, 4, 2]),
        place(2, 1, 2, &[3, 0, 4, 2]),
        place(2, 2, 2, &[1, 4, 0, 4]),
        place(2, 1, 4, &[3, 0, 4, 2]),
        place(4, 2, 2, &[3, 0, 4, 2]),
    ]
}

/// All of them.
pub fn everywhere() -> Vec<Place> {
    [grid(), replicated(), dense()].concat()
}

/// A layer with adapters on every linear, its input and the cotangent of its output.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// One adapter for gate and up, or one each.
    pub gate_up: GateUpTargets,
    /// The adapters.
    pub config: LoraConfig,
    /// The router's.
    pub score: oracle::Score,
    /// Where routing weights are applied.
    pub weigh_at: WeighAt,
    /// Experts that every token passes.
    pub shared: Option<SharedConfig>,
    /// The activation.
    pub glu: oracle::Glu,
    /// Whether router and experts have biases.
    pub biased: bool,
    /// Whether the choice of experts is corrected.
    pub corrected: bool,
    /// Whether there are adapters.
    pub adapted: bool,
    /// Whether the experts' rank is the common one divided by the experts of a token.
    pub rank_per_expert: bool,
}

/// A plain layer with these adapters.
pub fn case(sharing: Sharing, gate_up: GateUpTargets, dtype: DType) -> Case {
    Case {
        gate_up,
        config: LoraConfig::new(RANK, ALPHA)
            .with_sharing(sharing)
            .with_dtype(dtype),
        score: oracle::Score::Renormalized,
        weigh_at: WeighAt::Output,
        shared: None,
        glu: oracle::Glu::Silu,
        biased: false,
        corrected: false,
        adapted: true,
        rank_per_expert: false,
    }
}

/// Shared experts.
pub fn shared(gated: bool, overlap: bool) -> Option<SharedConfig> {
    Some(SharedConfig {
        intermediate: SHARED_INTERMEDIATE,
        gated,
        overlap,
    })
}

/// What all ranks, or one device, make of a case.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The output.
    pub y: Matrix,
    /// The gradient of the input.
    pub dx: Matrix,
    /// Of the experts' factors: by adapter, `A` and `B` in turn, then by expert.
    pub experts: Vec<Vec<Matrix>>,
    /// Of the shared experts' factors.
    pub shared: Vec<Matrix>,
}

/// What one rank makes of it, the factors' gradients before and after their synchronisation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Found {
    /// The output for its own tokens.
    pub y: Matrix,
    /// The gradient of its own tokens.
    pub dx: Matrix,
    /// Before.
    pub own: Vec<Vec<Matrix>>,
    /// After.
    pub synced: Vec<Vec<Matrix>>,
}

impl Case {
    /// The experts.
    pub fn experts(&self) -> MlpCase {
        let divisor = if self.rank_per_expert { TOP_K } else { 1 };
        let config = LoraConfig {
            rank: self.config.rank / divisor,
            ..self.config
        };
        MlpCase {
            glu: self.glu,
            biased: self.biased,
            ..MlpCase::new([HIDDEN, INTERMEDIATE, EXPERTS], self.gate_up, config)
        }
    }

    /// The shared experts.
    pub fn shared_mlp(&self) -> MlpCase {
        MlpCase {
            intermediate: SHARED_INTERMEDIATE,
            experts: 1,
            config: self.config,
            ..self.experts()
        }
    }

    /// The layer on one device.
    pub fn oracle(&self) -> oracle::Moe {
        let (router, experts) = (noise(1, EXPERTS, HIDDEN), self.experts().oracle(2));
        oracle::Moe {
            router_bias: self.biased.then(|| noise(10, 1, EXPERTS)),
            correction_bias: self.corrected.then(|| noise(11, 1, EXPERTS)),
            shared: self.shared.map(|shared| oracle::Shared {
                mlp: self.shared_mlp().oracle(4).remove(0),
                gate: shared.gated.then(|| noise(6, 1, HIDDEN)),
            }),
            ..oracle::Moe::new(router, self.score, TOP_K, experts)
        }
    }

    /// Input and cotangent of all tokens, smaller in half precision.
    pub fn data(&self, tokens: usize) -> (Matrix, Matrix) {
        let (x, g) = data(tokens);
        match self.config.dtype {
            DType::F16 | DType::BF16 => (x.scaled(0.25), g),
            _ => (x, g),
        }
    }

    /// One rank's part of the layer.
    pub fn layer<B: TrainingBackend>(
        &self,
        moe: &oracle::Moe,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> MoeLayer<B> {
        let router = moe.router.to_f32();
        let router_bias = moe.router_bias.as_ref().map(Matrix::to_f32);
        let correction_bias = moe.correction_bias.as_ref().map(Matrix::to_f32);
        let experts = MlpValues::of(&moe.experts);
        let shared = moe.shared.as_ref().map(|shared| {
            let gate = shared.gate.as_ref().map(Matrix::to_f32);
            (MlpValues::of(std::slice::from_ref(&shared.mlp)), gate)
        });
        let weights = MoeWeights {
            router: &router,
            router_bias: router_bias.as_deref(),
            correction_bias: correction_bias.as_deref(),
            experts: experts.weights(),
            shared: shared
                .as_ref()
                .map(|(mlp, gate)| (mlp.weights(), gate.as_deref())),
        };
        let score = match self.score {
            oracle::Score::Softmax => RouterScore::SoftmaxThenTopK { renormalize: false },
            oracle::Score::Renormalized => RouterScore::SoftmaxThenTopK { renormalize: true },
            oracle::Score::TopKFirst => RouterScore::TopKThenSoftmax,
            oracle::Score::Sigmoid {
                groups,
                best,
                renormalize,
                scale,
            } => RouterScore::SigmoidThenTopK {
                n_group: groups,
                topk_group: best,
                renormalize,
                scaling_factor: scale,
            },
        };
        let mut layer = MoeConfig::new("moe", HIDDEN, INTERMEDIATE, EXPERTS, TOP_K)
            .with_score(score)
            .with_activation(self.experts().activation())
            .with_weigh_at(self.weigh_at)
            .with_shared(self.shared)
            .with_dtype(self.config.dtype)
            .init(weights, mesh, device)
            .unwrap();
        if self.adapted {
            let mut targets = self.gate_up.targets();
            if self.rank_per_expert {
                targets = targets.with_rank_per_expert(TOP_K);
            }
            layer.add_adapters(&targets, &self.config, device).unwrap();
            self.experts()
                .load(&mut layer.experts, &moe.experts, device);
            if let (Some(layer), Some(oracle)) = (&mut layer.shared, &moe.shared) {
                let mlp = std::slice::from_ref(&oracle.mlp);
                self.shared_mlp().load(&mut layer.mlp, mlp, device);
            }
            layer.start_pissa(mesh).unwrap();
        }
        layer
    }

    /// Forward and backward of a rank's own tokens.
    pub fn pass<B: TrainingBackend>(
        &self,
        layer: &MoeLayer<B>,
        mesh: &Mesh<B>,
        device: &B::Device,
        dealt: &[usize],
        between: impl FnOnce(),
    ) -> (Matrix, Matrix, B::Gradients) {
        let dtype = self.config.dtype;
        let (x, g) = self.data(dealt.iter().sum());
        let own = range_of(dealt, mesh.rank());
        let x = x.pick_rows(own.clone()).tensor_on::<B>(device, dtype);
        let x = x.require_grad();
        let y = match self.config.dropout {
            None => layer.forward(x.clone(), mesh),
            Some(_) => layer.forward_tokens(x.clone(), &dropout::tokens(own.clone()), mesh),
        };
        between();
        let loss: Tensor<B, 1> = (y.clone() * g.pick_rows(own).tensor_on(device, dtype)).sum();
        let grads = loss.backward();
        let dx = x.grad(&grads).expect("the input has a gradient");
        (Matrix::read(y), Matrix::read(dx), grads)
    }

    fn rank<B: TrainingBackend>(
        &self,
        moe: &oracle::Moe,
        mesh: &Mesh<B>,
        device: &B::Device,
        dealt: &[usize],
    ) -> Found {
        let layer = self.layer(moe, mesh, device);
        let (y, dx, grads) = self.pass(&layer, mesh, device, dealt, || ());
        let weights = layer.trained_weights();
        let own = weights.iter().map(|w| gradient(w.weight, &grads)).collect();
        let grads = GradientsParams::from_grads(grads, &layer);
        let grads = sync_gradients(&weights, grads, mesh);
        let synced = weights.iter().map(|w| synced_gradient(w.weight, &grads));
        Found {
            y,
            dx,
            own,
            synced: synced.collect(),
        }
    }

    /// What each rank makes of it.
    pub fn found<B: TrainingBackend>(
        &self,
        ranks: &impl Ranks<B>,
        moe: &oracle::Moe,
        place: &Place,
    ) -> Vec<Found> {
        ranks.run(place.topology, |mesh, device| {
            self.rank(moe, mesh, device, &place.dealt)
        })
    }

    /// What the ranks made of it, together.
    pub fn join(&self, found: &[Found], topology: &Topology) -> Outcome {
        let tokens = |of: fn(&Found) -> &Matrix| {
            let parts: Vec<Matrix> = found.iter().map(|f| of(f).clone()).collect();
            unshard(&parts, Axis::Tokens)
        };
        let (axes, of_all) = (self.experts().axes(), self.experts().shared());
        let of_rank = |k: usize| -> Vec<Vec<Matrix>> {
            found.iter().map(|found| found.synced[k].clone()).collect()
        };
        let experts = axes.iter().enumerate().map(|(k, axis)| {
            let mut full = unshard_experts(&of_rank(k), topology, *axis);
            if of_all[k] {
                // Every expert parallel rank holds the one factor and its whole gradient.
                assert_eq!(full.len(), topology.ep());
                assert!(full.iter().all(|grad| *grad == full[0]));
                full.truncate(1);
            }
            full
        });
        let experts: Vec<_> = experts.collect();
        let mut shared = Vec::new();
        if self.shared.is_some() {
            for (k, axis) in axes.iter().enumerate() {
                let parts = of_rank(axes.len() + k).concat();
                let replicas = parts.chunks(topology.tp());
                let full: Vec<_> = replicas.map(|parts| unshard(parts, *axis)).collect();
                shared.push(unshard(&full, Axis::Whole));
            }
        }
        assert_eq!(found[0].synced.len(), experts.len() + shared.len());
        Outcome {
            y: tokens(|f| &f.y),
            dx: tokens(|f| &f.dx),
            experts,
            shared,
        }
    }

    /// What one device makes of it.
    pub fn expected(&self, moe: &oracle::Moe, tokens: usize) -> Outcome {
        let (x, g) = self.data(tokens);
        self.expected_of(moe, [&x, &g])
    }

    /// What one device makes of this input and cotangent.
    pub fn expected_of(&self, moe: &oracle::Moe, [x, g]: [&Matrix; 2]) -> Outcome {
        let (y, grads) = match self.config.dropout {
            None => (moe.forward(x), moe.backward(x, g)),
            Some(_) => {
                let paths = ["moe.experts", "moe.shared_expert"];
                dropout::layer(moe, &self.config, self.gate_up, paths, [x, g])
            }
        };
        let by_expert: Vec<Vec<Matrix>> = grads
            .experts
            .into_iter()
            .map(|factors| factors.into_iter().flatten().collect())
            .collect();
        let of_all = self.experts().shared();
        let experts = (0..by_expert[0].len()).map(|k| {
            let grads: Vec<Matrix> = by_expert.iter().map(|f| f[k].clone()).collect();
            match of_all[k] {
                false => grads,
                true => vec![grads.into_iter().reduce(|a, b| a.plus(&b)).unwrap()],
            }
        });
        Outcome {
            y,
            dx: grads.dx,
            experts: experts.collect(),
            shared: grads.shared.into_iter().flatten().collect(),
        }
    }

    /// Compares every output and gradient with the oracle's.
    ///
    /// # Panics
    ///
    /// When one is not close.
    pub fn check<B: TrainingBackend>(&self, ranks: &impl Ranks<B>, place: &Place) {
        self.check_against(&self.oracle(), ranks, place);
    }

    /// As [`check`](Self::check), of another layer of this kind.
    ///
    /// # Panics
    ///
    /// When one is not close.
    pub fn check_against<B: TrainingBackend>(
        &self,
        moe: &oracle::Moe,
        ranks: &impl Ranks<B>,
        place: &Place,
    ) {
        let found = self.join(&self.found(ranks, moe, place), &place.topology);
        let expected = self.expected(moe, place.dealt.iter().sum());
        let t = &place.topology;
        let name = format!(
            "tp={} ep={} etp={} of {}, {:?} {:?} {:?} {:?} {:?} {:?} {:?} biased={} corrected={}",
            t.tp(),
            t.ep(),
            t.etp(),
            t.world_size(),
            self.config.sharing,
            self.config.dropout,
            self.gate_up,
            self.score,
            self.weigh_at,
            self.shared,
            self.glu,
            self.biased,
            self.corrected
        );
        let mut results = vec![
            ("y".to_string(), &found.y, &expected.y),
            ("dx".to_string(), &found.dx, &expected.dx),
        ];
        assert_eq!(found.experts.len(), expected.experts.len());
        for (k, (found, expected)) in found.experts.iter().zip(&expected.experts).enumerate() {
            assert_eq!(found.len(), expected.len());
            for (e, (found, expected)) in found.iter().zip(expected).enumerate() {
                results.push((format!("factor {k} of expert {e}"), found, expected));
            }
        }
        assert_eq!(found.shared.len(), expected.shared.len());
        for (k, (found, expected)) in found.shared.iter().zip(&expected.shared).enumerate() {
            results.push((format!("factor {k} of the shared experts"), found, expected));
        }
        assert_all_close(&name, &results, self.config.dtype, REDUCTION);
    }
}

/// Input and cotangent of all tokens.
pub fn data(tokens: usize) -> (Matrix, Matrix) {
    (noise(8, tokens, HIDDEN), noise(9, tokens, HIDDEN))
}
