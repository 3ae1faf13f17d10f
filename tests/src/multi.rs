//! Layers with several named adapters: each token is that of one device with the adapter of its slot
//! folded into the weights, and one of no adapter that of the base.

use burn::optim::GradientsParams;
use burn::tensor::DType;
use burn::tensor::backend::Backend;
use moe_lora_adapters::{Adaptable, LoraConfig, Slot, TokenIds, sync_gradients};
use moe_lora_experts::MoeLayer;
use moe_lora_parallel::{Mesh, range_of};
use moe_lora_testkit::{
    GateUpTargets, Matrix, Ranks, TrainingBackend, assert_all_close, oracle, synced_gradient,
};

use crate::dropout;
use crate::moe::{self, Found, Outcome, Place};

/// A layer and the adapters on all of its linears.
#[derive(Clone, Debug)]
pub struct Case {
    /// The layer.
    pub layer: moe::Case,
    /// The adapters.
    pub adapters: Vec<Adapter>,
    /// The adapter of each token, from the first on and around.
    pub of_token: Vec<Option<usize>>,
}

/// One of the adapters.
#[derive(Clone, Copy, Debug)]
pub struct Adapter {
    /// Its name.
    pub name: &'static str,
    /// Its settings.
    pub config: LoraConfig,
    /// One for gate and up, or one each.
    pub gate_up: GateUpTargets,
}

/// Output, input gradient, and the gradients of each adapter.
#[derive(Clone, Debug)]
pub struct Results {
    /// The output.
    pub y: Matrix,
    /// The gradient of the input.
    pub dx: Matrix,
    /// Of each adapter's factors; its output and input gradient are those of all tokens.
    pub adapters: Vec<Outcome>,
}

/// Ranks that 4 divides and that differ, alphas that differ; no token uses the second.
pub fn case(layer: moe::Case) -> Case {
    let adapter = |name, rank, alpha| Adapter {
        name,
        config: LoraConfig {
            rank,
            alpha,
            ..layer.config
        },
        gate_up: layer.gate_up,
    };
    Case {
        layer,
        adapters: vec![
            adapter("fr", 8, 5.3),
            adapter("idle", 12, 7.1),
            adapter("de", 4, 2.9),
        ],
        of_token: vec![Some(0), None, Some(2), Some(2), Some(0)],
    }
}

impl Case {
    /// The layer with the adapter `k` alone.
    pub fn with(&self, k: usize) -> moe::Case {
        moe::Case {
            config: self.adapters[k].config,
            gate_up: self.adapters[k].gate_up,
            ..self.layer
        }
    }

    /// The adapter of a token.
    pub fn adapter_of(&self, token: usize) -> Option<usize> {
        self.of_token[token % self.of_token.len()]
    }

    /// One device with one adapter, or with none.
    pub fn oracle(&self, adapter: Option<usize>) -> oracle::Moe {
        let base = self.layer.oracle();
        let seed = |k: usize| 50 + 10 * k as u64;
        let on = |linear: &oracle::Linear, loras: &[oracle::Lora]| {
            let adapted = oracle::Linear::new(linear.weight().clone(), loras.to_vec());
            match linear.bias() {
                None => adapted,
                Some(bias) => adapted.with_bias(bias.clone()),
            }
        };
        let adapted = |mlp: &oracle::Mlp, other: Option<&oracle::Mlp>| {
            let fc1 = other.map_or(&[][..], |other| other.gate_up.loras());
            let fc2 = other.map_or(&[][..], |other| other.down.loras());
            oracle::Mlp {
                gate_up: on(&mlp.gate_up, fc1),
                down: on(&mlp.down, fc2),
                glu: mlp.glu,
            }
        };
        let experts = adapter.map(|k| self.with(k).experts().oracle(seed(k)));
        let shared = adapter.map(|k| self.with(k).shared_mlp().oracle(seed(k) + 5));
        let expert = |e| experts.as_ref().map(|experts: &Vec<_>| &experts[e]);
        oracle::Moe {
            experts: (base.experts.iter().enumerate())
                .map(|(e, mlp)| adapted(mlp, expert(e)))
                .collect(),
            shared: base.shared.as_ref().map(|of_base| oracle::Shared {
                mlp: adapted(&of_base.mlp, shared.as_ref().map(|mlp| &mlp[0])),
                gate: of_base.gate.clone(),
            }),
            ..base
        }
    }

    /// One rank's part of the layer.
    pub fn on_rank<B: TrainingBackend>(&self, mesh: &Mesh<B>, device: &B::Device) -> MoeLayer<B> {
        let base = moe::Case {
            adapted: false,
            ..self.layer
        };
        let mut layer = base.layer(&self.oracle(None), mesh, device);
        for (k, Adapter { name, .. }) in self.adapters.iter().enumerate() {
            let (case, oracle) = (self.with(k), self.oracle(Some(k)));
            let experts = case.experts();
            experts.adapt_named(name, &mut layer.experts, &oracle.experts, device);
            if let (Some(layer), Some(oracle)) = (&mut layer.shared, &oracle.shared) {
                let mlp = std::slice::from_ref(&oracle.mlp);
                let shared = case.shared_mlp();
                shared.adapt_named(name, &mut layer.mlp, mlp, device);
            }
        }
        layer
    }

    /// The ids and slots of tokens.
    pub fn tokens<B: Backend>(
        &self,
        layer: &impl Adaptable<B>,
        tokens: impl Iterator<Item = usize> + Clone,
    ) -> TokenIds {
        let slots = tokens.clone().map(|token| match self.adapter_of(token) {
            None => Slot::BASE,
            Some(k) => layer.slot(self.adapters[k].name).unwrap(),
        });
        dropout::tokens(tokens).with_slots(slots.collect::<Vec<_>>())
    }

    /// Forward and backward of a rank's own tokens, with the gradients of each adapter.
    pub fn rank<B: TrainingBackend>(
        &self,
        layer: &MoeLayer<B>,
        tokens: &TokenIds,
        (mesh, device): (&Mesh<B>, &B::Device),
        dealt: &[usize],
    ) -> Vec<Found> {
        let (x, g) = self.layer.data(dealt.iter().sum());
        let (own, dtype) = (range_of(dealt, mesh.rank()), self.layer.config.dtype);
        let x = x.pick_rows(own.clone()).tensor_on::<B>(device, dtype);
        let x = x.require_grad();
        let y = layer.forward_tokens(x.clone(), tokens, mesh);
        let g = g.pick_rows(own).tensor_on(device, dtype);
        let grads = (y.clone() * g).sum().backward();
        let dx = Matrix::read(x.grad(&grads).expect("the input has a gradient"));
        let (y, weights) = (Matrix::read(y), layer.trained_weights());
        let grads = GradientsParams::from_grads(grads, layer);
        let grads = sync_gradients(&weights, grads, mesh);
        let of_adapter = |adapter: &Adapter| Found {
            y: y.clone(),
            dx: dx.clone(),
            own: Vec::new(),
            synced: weights
                .iter()
                .filter(|weight| weight.adapter == Some(adapter.name))
                .map(|weight| synced_gradient(weight.weight, &grads))
                .collect(),
        };
        self.adapters.iter().map(of_adapter).collect()
    }

    /// What the ranks make of it together.
    pub fn found<B: TrainingBackend>(&self, ranks: &impl Ranks<B>, place: &Place) -> Results {
        let found = ranks.run(place.topology, |mesh, device| {
            let layer = self.on_rank(mesh, device);
            let tokens = self.tokens(&layer, range_of(&place.dealt, mesh.rank()));
            self.rank(&layer, &tokens, (mesh, device), &place.dealt)
        });
        self.join(&found, place)
    }

    /// What the ranks found, brought together.
    pub fn join(&self, found: &[Vec<Found>], place: &Place) -> Results {
        let outcome = |k: usize| {
            let found: Vec<Found> = found.iter().map(|found| found[k].clone()).collect();
            self.with(k).join(&found, &place.topology)
        };
        let adapters: Vec<Outcome> = (0..self.adapters.len()).map(outcome).collect();
        Results {
            y: adapters[0].y.clone(),
            dx: adapters[0].dx.clone(),
            adapters,
        }
    }

    /// What one device makes of it.
    pub fn expected(&self, tokens: usize) -> Results {
        let (x, g) = self.layer.data(tokens);
        let mut y = Matrix::zeros(tokens, moe::HIDDEN);
        let mut dx = y.clone();
        // The adapters one after the other, with the cotangents of their tokens alone.
        let mut run = |adapter: Option<usize>| {
            let own = |token: &usize| self.adapter_of(*token) == adapter;
            let mut of_own = Matrix::zeros(tokens, moe::HIDDEN);
            for token in (0..tokens).filter(own) {
                of_own.add_to_rows(token, &g.pick_rows([token]));
            }
            let case = adapter.map_or(self.layer, |k| self.with(k));
            let found = case.expected_of(&self.oracle(adapter), [&x, &of_own]);
            for token in (0..tokens).filter(own) {
                y.add_to_rows(token, &found.y.pick_rows([token]));
            }
            dx.add_to_rows(0, &found.dx);
            found
        };
        run(None);
        let adapters = (0..self.adapters.len()).map(|k| run(Some(k))).collect();
        Results { y, dx, adapters }
    }

    /// Compares every output and gradient with the oracle's.
    ///
    /// # Panics
    ///
    /// When one is not close.
    pub fn check<B: TrainingBackend>(&self, ranks: &impl Ranks<B>, place: &Place) {
        let found = self.found(ranks, place);
        self.compare(&self.name(place), &found, place);
    }

    /// Compares results with the oracle's.
    ///
    /// # Panics
    ///
    /// When one is not close.
    pub fn compare(&self, name: &str, found: &Results, place: &Place) {
        let expected = self.expected(place.dealt.iter().sum());
        let dtype = self.layer.config.dtype;
        let half = matches!(dtype, DType::F16 | DType::BF16);
        // In half precision one token's gradient can cancel to less than the rounding of its terms, and
        // an adapter has one or two tokens of an expert: there all experts are compared as one.
        let experts = |factor: &[Matrix]| match half {
            true => vec![Matrix::stack(factor)],
            false => factor.to_vec(),
        };
        let of = |results: &Results| {
            let mut all = vec![
                ("y".to_string(), results.y.clone()),
                ("dx".to_string(), results.dx.clone()),
            ];
            for (Adapter { name, .. }, found) in self.adapters.iter().zip(&results.adapters) {
                for (f, factor) in found.experts.iter().enumerate() {
                    for (e, factor) in experts(factor).into_iter().enumerate() {
                        all.push((format!("{name}: factor {f} of expert {e}"), factor));
                    }
                }
                for (f, factor) in found.shared.iter().enumerate() {
                    let what = format!("{name}: factor {f} of the shared experts");
                    all.push((what, factor.clone()));
                }
            }
            all
        };
        let (found, expected) = (of(found), of(&expected));
        let names = |all: &[(String, Matrix)]| -> Vec<String> {
            all.iter().map(|(what, _)| what.clone()).collect()
        };
        assert_eq!(names(&found), names(&expected));
        let results: Vec<_> = (found.iter().zip(&expected))
            .map(|((what, found), (_, expected))| (what.clone(), found, expected))
            .collect();
        assert_all_close(name, &results, dtype, moe::REDUCTION);
    }

    /// For messages.
    pub fn name(&self, place: &Place) -> String {
        let t = &place.topology;
        format!(
            "tp={} ep={} etp={} of {}, {:?} {:?} {:?}",
            t.tp(),
            t.ep(),
            t.etp(),
            t.world_size(),
            self.layer.gate_up,
            self.layer.weigh_at,
            self.layer.shared,
        )
    }
}
