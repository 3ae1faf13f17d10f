//! The MoE layer: router, dispatcher, experts and shared experts.

use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor, TensorData};
use moe_lora_adapters::{Adaptable, AdapterBackend, AnyLinear, TokenIds};
use moe_lora_parallel::{ExpertTp, Mesh, ParallelBackend, Tokens};

use crate::tokens::gather;
use crate::{
    Dispatch, ExpertsError, GluActivation, MlpConfig, MlpWeights, RouterScore, Routing,
    SharedExperts, SwigluMlp, TopKRouter,
};

/// Where the routing weights are multiplied in. The two agree but for rounding, and where experts
/// have biases only the first is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeighAt {
    /// On the way back, after the down projection.
    Output,
    /// Before the down projection: the weights travel with the tokens.
    Hidden,
}

/// Shared experts of a layer.
#[derive(Clone, Copy, Debug)]
pub struct SharedConfig {
    /// `F` of the shared MLP.
    pub intermediate: usize,
    /// Whether a sigmoid gate weighs them.
    pub gated: bool,
    /// Whether their collectives are issued around those of the dispatcher. The tokens of the dense
    /// group are then kept for the backward pass rather than gathered again there.
    pub overlap: bool,
}

/// Shape and path of a layer.
#[derive(Clone, Debug)]
pub struct MoeConfig {
    path: String,
    hidden: usize,
    intermediate: usize,
    num_experts: usize,
    top_k: usize,
    score: RouterScore,
    activation: GluActivation,
    weigh_at: WeighAt,
    shared: Option<SharedConfig>,
    dtype: DType,
}

/// Full, unsharded weights of a layer in row-major order. Those that a family does not have are
/// left to `..Default::default()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct MoeWeights<'a> {
    /// Router `[E, H]`.
    pub router: &'a [f32],
    /// `[E]`, added to the logits (GPT-OSS).
    pub router_bias: Option<&'a [f32]>,
    /// `[E]`, added to the scores for the choice of experts alone (DeepSeek-V3).
    pub correction_bias: Option<&'a [f32]>,
    /// Experts.
    pub experts: MlpWeights<'a>,
    /// Shared experts and their gate `[1, H]`.
    pub shared: Option<(MlpWeights<'a>, Option<&'a [f32]>)>,
}

impl MoeConfig {
    /// `H`, `F`, `E` and `K` of a layer; softmax, then top-k without renormalising; SwiGLU; f32.
    pub fn new(
        path: impl Into<String>,
        hidden: usize,
        intermediate: usize,
        num_experts: usize,
        top_k: usize,
    ) -> Self {
        Self {
            path: path.into(),
            hidden,
            intermediate,
            num_experts,
            top_k,
            score: RouterScore::SoftmaxThenTopK { renormalize: false },
            activation: GluActivation::Swiglu,
            weigh_at: WeighAt::Output,
            shared: None,
            dtype: DType::F32,
        }
    }

    /// How logits become weights.
    pub fn with_score(mut self, score: RouterScore) -> Self {
        self.score = score;
        self
    }

    /// The activation of the experts, shared ones included.
    pub fn with_activation(mut self, activation: GluActivation) -> Self {
        self.activation = activation;
        self
    }

    /// Where the routing weights are multiplied in.
    pub fn with_weigh_at(mut self, weigh_at: WeighAt) -> Self {
        self.weigh_at = weigh_at;
        self
    }

    /// Shared experts.
    pub fn with_shared(mut self, shared: Option<SharedConfig>) -> Self {
        self.shared = shared;
        self
    }

    /// [`SharedConfig::overlap`] of the shared experts, if there are any.
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.shared = self.shared.map(|shared| SharedConfig { overlap, ..shared });
        self
    }

    /// Element type of the weights.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// A frozen layer holding this rank's part of `weights`.
    ///
    /// # Errors
    ///
    /// When a weight has another size, when `top_k` or a group limit is out of range, when EP does
    /// not divide `E`, when ETP or TP does not divide `F`, or when routing weights would leave a
    /// bias unweighed. Every rank of the mesh gets the same error.
    pub fn init<B: ParallelBackend>(
        &self,
        weights: MoeWeights<'_>,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> Result<MoeLayer<B>, ExpertsError> {
        let path = || self.path.clone();
        let (hidden, num_experts) = (self.hidden, self.num_experts);
        if self.weigh_at == WeighAt::Hidden && weights.experts.biases.is_some() {
            return Err(ExpertsError::UnweighedBias { path: path() });
        }
        let local = mesh
            .topology()
            .local_experts(num_experts, mesh.ep().rank())
            .map_err(|reason| ExpertsError::Topology {
                path: path(),
                reason,
            })?;
        let matrix = |name: &str, values: &[f32], shape: [usize; 2], dtype: DType| {
            if shape[0].checked_mul(shape[1]) != Some(values.len()) {
                return Err(ExpertsError::Shape {
                    path: format!("{}.{name}", self.path),
                    found: values.len(),
                    expected: shape.into(),
                });
            }
            let data = TensorData::new(values.to_vec(), shape);
            Ok(Tensor::<B, 2>::from_data(data, (device, dtype)))
        };
        let vector = |name: &str, values: Option<&[f32]>, dtype| {
            let row = |values| matrix(name, values, [1, num_experts], dtype);
            values.map(row).transpose()
        };
        let router = TopKRouter::new(
            &format!("{}.gate", self.path),
            matrix("gate", weights.router, [num_experts, hidden], self.dtype)?,
            self.top_k,
            self.score,
        )?
        .with_bias(vector("gate.bias", weights.router_bias, self.dtype)?)
        // Model files keep it in f32 beside weights of half precision.
        .with_correction_bias(vector(
            "gate.e_score_correction_bias",
            weights.correction_bias,
            DType::F32,
        )?);
        let experts = MlpConfig::new(format!("{}.experts", self.path), hidden, self.intermediate)
            .with_experts(num_experts, local)
            .with_activation(self.activation)
            .with_dtype(self.dtype)
            .init(weights.experts, mesh.expert_tp(), device)?;
        let shared = match (self.shared, weights.shared) {
            (None, None) => None,
            (Some(config), Some((mlp, gate))) if config.gated == gate.is_some() => {
                let path = format!("{}.shared_expert", self.path);
                Some(SharedExperts {
                    mlp: MlpConfig::new(path, hidden, config.intermediate)
                        .with_activation(self.activation)
                        .with_dtype(self.dtype)
                        .init(mlp, mesh.tp(), device)?,
                    gate: gate
                        .map(|gate| matrix("shared_expert_gate", gate, [1, hidden], self.dtype))
                        .transpose()?
                        .map(|gate| Param::from_tensor(gate).set_require_grad(false)),
                })
            }
            (config, weights) => {
                let name = |some, gated| match (some, gated) {
                    (false, _) => "absent",
                    (true, false) => "present without a gate",
                    (true, true) => "present with a gate",
                };
                return Err(ExpertsError::Shared {
                    path: path(),
                    found: name(weights.is_some(), weights.is_some_and(|(_, g)| g.is_some())),
                    expected: name(config.is_some(), config.is_some_and(|c| c.gated)),
                });
            }
        };
        Ok(MoeLayer {
            router,
            experts,
            shared,
            overlap: self.shared.is_some_and(|shared| shared.overlap),
            weigh_at: self.weigh_at,
        })
    }
}

/// A frozen Mixture-of-Experts layer whose experts carry adapters.
#[derive(Module, Debug)]
pub struct MoeLayer<B: Backend> {
    /// Chooses experts.
    pub router: TopKRouter<B>,
    /// The experts of this rank.
    pub experts: SwigluMlp<B, ExpertTp>,
    /// The shared experts.
    pub shared: Option<SharedExperts<B>>,
    overlap: bool,
    #[module(skip)]
    weigh_at: WeighAt,
}

impl<B: AdapterBackend> MoeLayer<B> {
    /// Starts the magnitudes of DoRA adapters that have none yet. Every rank calls it, after
    /// [`add_adapters`](Adaptable::add_adapters) and before the first pass; without DoRA it does nothing. See
    /// [`Linear::start_magnitudes`](moe_lora_adapters::Linear::start_magnitudes).
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn start_magnitudes(&mut self, mesh: &Mesh<B>) {
        self.experts.start_magnitudes(mesh.expert_tp());
        if let Some(shared) = &mut self.shared {
            shared.mlp.start_magnitudes(mesh.tp());
        }
    }

    /// Starts PiSSA adapters that are not started yet. Every rank calls it, after
    /// [`add_adapters`](Adaptable::add_adapters) and before the first pass; without PiSSA it does nothing. See
    /// [`Linear::start_pissa`](moe_lora_adapters::Linear::start_pissa).
    ///
    /// # Errors
    ///
    /// When a weight has no singular value decomposition; the ranks that share it get the error.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn start_pissa(&mut self, mesh: &Mesh<B>) -> Result<(), ExpertsError> {
        self.experts.start_pissa(mesh.expert_tp())?;
        if let Some(shared) = &mut self.shared {
            shared.mlp.start_pissa(mesh.tp())?;
        }
        Ok(())
    }

    /// `x [T, H]` to `[T, H]`: this rank's own tokens, as many as it has, none included.
    ///
    /// With dense tensor parallelism the tokens are the rank's sequence-parallel share: no two
    /// ranks bring the same token.
    ///
    /// On CUDA a rank brings at least one, such as one of zeros that its loss leaves out: CubeCL
    /// cannot launch kernels on tensors without elements.
    ///
    /// # Panics
    ///
    /// When shapes do not match, or when a collective fails.
    pub fn forward(&self, x: Tensor<B, 2>, mesh: &Mesh<B>) -> Tensor<B, 2> {
        self.run(x, None, mesh)
    }

    /// As [`forward`](Self::forward), of tokens with these ids, one a row of `x`: what adapters with dropout
    /// need. No two ranks bring the same id. The ids travel with the tokens, on the host, and so do their
    /// slots, which named adapters need.
    ///
    /// # Panics
    ///
    /// When shapes do not match, or when a collective fails.
    pub fn forward_tokens(
        &self,
        x: Tensor<B, 2>,
        tokens: &TokenIds,
        mesh: &Mesh<B>,
    ) -> Tensor<B, 2> {
        self.run(x, Some(tokens), mesh)
    }

    fn run(&self, x: Tensor<B, 2>, ids: Option<&TokenIds>, mesh: &Mesh<B>) -> Tensor<B, 2> {
        let Some(shared) = &self.shared else {
            return self.routed(x, ids, mesh);
        };
        let sizes: Vec<usize> = mesh.tp().exchange_sizes(&[x.dims()[0]]).concat();
        let tokens = mesh.tp().shard_tokens(x.clone(), &sizes);
        if !self.overlap {
            let routed = self.routed(x, ids, mesh);
            return routed + shared.forward_sequence(tokens, ids).into_tensor();
        }
        // The shared experts' gather goes out before the dispatcher's, their sum after it.
        let gathered = tokens.gather_fanout();
        let gathered_ids = ids.map(|ids| gather(mesh.tp(), ids, &sizes));
        let routed = self.routed(x, ids, mesh);
        let term = shared.forward_overlapped(gathered, gathered_ids.as_ref());
        routed + term.reduce_scatter::<Tokens>(&sizes).into_tensor()
    }

    fn routed(&self, x: Tensor<B, 2>, ids: Option<&TokenIds>, mesh: &Mesh<B>) -> Tensor<B, 2> {
        let [tokens, hidden] = x.dims();
        let Routing {
            weights,
            experts,
            top_k,
        } = self.router.forward(x.clone());
        let local = self
            .experts
            .down
            .weight
            .layout()
            .experts
            .as_ref()
            .map_or(1, |experts| experts.len());
        let way =
            Dispatch::plan(&experts, top_k, local, mesh).expect("the ranks' counts were exchanged");
        let way = match ids {
            None => way,
            Some(ids) => way.with_tokens(ids),
        };
        let rows = way.rows().clone();
        let mut inner = self.experts.hidden(way.tokens(x), &rows);
        if self.weigh_at == WeighAt::Hidden {
            let weights = way.assignments(weights.clone().reshape([tokens * top_k, 1]));
            inner = inner.map(|inner| inner * weights.into_tensor());
        }
        let y = way.combine(self.experts.down_suppressed(inner, &rows));
        let y = y.reshape([tokens, top_k, hidden]);
        let y = match self.weigh_at {
            WeighAt::Output => y * weights.unsqueeze_dim::<3>(2),
            WeighAt::Hidden => y,
        };
        y.sum_dim(1).reshape([tokens, hidden])
    }

    /// Replaces every adapted weight by the merged one and leaves no adapters. Returns the layer
    /// as it was, for [`unmerge`](Self::unmerge); weights without adapters are shared with it.
    ///
    /// Dropped, what is returned frees the bases. A layer that is read anew takes the adapters on
    /// when its linears are given those of the returned one's.
    ///
    /// # Errors
    ///
    /// When a function stands between the factors of an adapter; nothing is changed then.
    ///
    /// # Panics
    ///
    /// When a collective fails.
    pub fn merge(&mut self, mesh: &Mesh<B>) -> Result<Self, ExpertsError> {
        let mut merged = self.clone();
        merged.experts.merge(mesh.expert_tp())?;
        if let Some(shared) = &mut merged.shared {
            shared.mlp.merge(mesh.tp())?;
        }
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
    pub fn merge_named(&mut self, name: &str, mesh: &Mesh<B>) -> Result<Self, ExpertsError> {
        self.slot(name)?;
        let mut merged = self.clone();
        merged.experts.merge_present(name, mesh.expert_tp())?;
        if let Some(shared) = &mut merged.shared {
            shared.mlp.merge_present(name, mesh.tp())?;
        }
        Ok(std::mem::replace(self, merged))
    }

    /// Puts back what [`merge`](Self::merge) returned, to the bit.
    ///
    /// # Panics
    ///
    /// When `original` is another layer, or another rank's part.
    pub fn unmerge(&mut self, original: Self) {
        self.experts.unmerge(original.experts);
        if let (Some(shared), Some(original)) = (&mut self.shared, original.shared) {
            shared.mlp.unmerge(original.mlp);
        }
    }
}

impl<B: Backend> Adaptable<B> for MoeLayer<B> {
    fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
        let shared = self.shared.iter().flat_map(|shared| shared.mlp.linears());
        self.experts.linears().into_iter().chain(shared).collect()
    }

    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
        let shared = self.shared.iter_mut();
        let shared = shared.flat_map(|shared| shared.mlp.linears_mut());
        let experts = self.experts.linears_mut().into_iter();
        experts.chain(shared).collect()
    }
}
