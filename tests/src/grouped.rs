//! Expert linears over the expert tensor parallel group: rows sorted by expert, one weight an
//! expert, an adapter an expert, one for all, or one with a factor for all.

use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Activation, ColumnLinear, Linear, LinearConfig, Lora, LoraConfig, Placement, ReplicatedLinear,
    RowLinear, TrainedWeight,
};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Mesh, Topology, TopologyConfig};
use moe_lora_testkit::{
    Axis, Matrix, Noise, Ranks, TrainingBackend, assert_close, factor_axes, gradient, load_start,
    noise, oracle, scale, shard, shared_factors, shared_pair, unshard,
};
use serde::{Deserialize, Serialize};

use crate::dropout;

/// Input features.
pub const D_IN: usize = 8;
/// Output features.
pub const D_OUT: usize = 16;
/// Rank of the adapters.
pub const RANK: usize = 4;
/// No power of two, so that the scale rounds.
pub const ALPHA: f64 = 5.3;

/// Rows by expert: none in the middle, at the start, at the end, all on one, none at all, and numbers
/// that 2 and 4 do not divide.
pub const COUNTS: [&[usize]; 7] = [
    &[5, 0, 3],
    &[0, 0, 4],
    &[4, 0, 2],
    &[3, 2],
    &[0, 0, 0],
    &[5],
    &[1, 6, 0, 1],
];

/// Expert tensor parallelism alone.
pub fn etp(size: usize) -> Topology {
    TopologyConfig::new(size).with_etp(size).init().unwrap()
}

/// Groups of so many rows.
pub fn groups(counts: &[usize]) -> RowGroups {
    RowGroups::new(counts, counts.iter().sum()).unwrap()
}

/// Which linear, and with what adapters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// Gate and up under one adapter.
    Fused,
    /// Gate and up with an adapter each.
    Separate,
    /// A column-parallel linear of one part.
    Column,
    /// A row-parallel linear with its collectives suppressed.
    Row,
    /// A linear that every rank holds whole, which no layer has.
    Whole,
}

/// Each of a layer's.
pub const KINDS: [Kind; 4] = [Kind::Fused, Kind::Separate, Kind::Column, Kind::Row];

/// Experts with adapters, their rows and the cotangent of their output.
#[derive(Clone, Debug)]
pub struct Case {
    /// Which linear.
    pub kind: Kind,
    /// The adapters.
    pub config: LoraConfig,
    /// Rows of each expert.
    pub counts: Vec<usize>,
    /// `[T, D_IN]`.
    pub x: Matrix,
    /// `[T, D_OUT]`.
    pub g: Matrix,
    /// The oracle of each expert.
    pub experts: Vec<oracle::Linear>,
}

/// What one rank made of a case, or all of them together, or one device.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The output.
    pub y: Matrix,
    /// The gradient of the input.
    pub dx: Matrix,
    /// The gradients of the factors by adapter, `A` and `B` in turn, then by expert.
    pub factors: Vec<Vec<Matrix>>,
}

impl Case {
    /// A case with noise in every value.
    pub fn new(kind: Kind, config: LoraConfig, counts: &[usize]) -> Self {
        let rows = counts.iter().sum();
        let lora = |expert: usize, k: usize, d_out| {
            let lengths = (100 * expert + 10 * k) as u64 + 5;
            let magnitude = config.dora.then(|| Noise::new(lengths).lengths(d_out));
            let [a, b] = shared_pair(&config, kind == Kind::Row);
            let seed = |shared: bool| (100 * if shared { 0 } else { expert } + 10 * k) as u64;
            oracle::Lora {
                a: noise(seed(a) + 3, config.rank, D_IN),
                b: noise(seed(b) + 4, d_out, config.rank),
                scale: scale(&config),
                silu: config.activation == Activation::Silu,
                first_row: k * d_out,
                magnitude,
                start: config.pissa.then(|| {
                    let seed = (100 * expert + 10 * k) as u64;
                    [
                        noise(seed + 6, config.rank, D_IN),
                        noise(seed + 7, d_out, config.rank),
                    ]
                }),
            }
        };
        let expert = |expert: usize| {
            let loras = match kind {
                Kind::Separate => vec![lora(expert, 0, D_OUT / 2), lora(expert, 1, D_OUT / 2)],
                _ => vec![lora(expert, 0, D_OUT)],
            };
            oracle::Linear::new(noise(1000 + expert as u64, D_OUT, D_IN), loras)
        };
        Self {
            kind,
            config,
            counts: counts.into(),
            x: noise(1, rows, D_IN),
            g: noise(2, rows, D_OUT),
            experts: (0..counts.len()).map(expert).collect(),
        }
    }

    fn paths(&self) -> Vec<String> {
        let paths: &[&str] = match self.kind {
            Kind::Separate => &["gate", "up"],
            _ => &["fc"],
        };
        paths.iter().map(|path| path.to_string()).collect()
    }

    /// How the ranks' slices of the output lie.
    fn fragments(&self) -> usize {
        match self.kind {
            Kind::Fused | Kind::Separate => 2,
            Kind::Column | Kind::Row | Kind::Whole => 1,
        }
    }

    /// The axes of `A` and `B` of each adapter.
    fn pairs(&self) -> &'static [[Axis; 2]] {
        match self.kind {
            Kind::Fused => &[[Axis::Rows(1), Axis::Rows(2)]],
            Kind::Separate => &[[Axis::Rows(1); 2]; 2],
            Kind::Column => &[[Axis::Rows(1); 2]],
            Kind::Row => &[[Axis::Columns, Axis::Rows(1)]],
            Kind::Whole => &[[Axis::Whole; 2]],
        }
    }

    /// The axes of each factor.
    fn axes(&self) -> Vec<Axis> {
        factor_axes(self.pairs(), &self.config)
    }

    /// The full factor of every expert, or the one of all of them, end to end.
    fn factor(&self, lora: usize, shared: bool, of: fn(&oracle::Lora) -> &Matrix) -> Vec<f32> {
        let experts = if shared {
            &self.experts[..1]
        } else {
            &self.experts[..]
        };
        let values = experts
            .iter()
            .map(|expert| of(&expert.loras()[lora]).to_f32());
        values.collect::<Vec<_>>().concat()
    }

    /// Gives adapter `k` the oracle's factors.
    fn load<B: TrainingBackend, P: Placement>(
        &self,
        lora: &mut Lora<B, ExpertTp, P>,
        k: usize,
        device: &B::Device,
    ) {
        let [a, b] = shared_pair(&self.config, self.kind == Kind::Row);
        let (a, b) = (self.factor(k, a, |l| &l.a), self.factor(k, b, |l| &l.b));
        lora.load(&a, &b, device).unwrap();
        if self.config.dora {
            let lengths = self.experts.iter().flat_map(|expert| {
                let magnitude = expert.loras()[k].magnitude.as_ref();
                magnitude.expect("the oracle has DoRA too").to_f32()
            });
            lora.load_magnitude(&lengths.collect::<Vec<_>>(), device)
                .unwrap();
        }
        if self.config.pissa {
            let of = |factor: usize| {
                let starts = self.experts.iter().flat_map(|expert| {
                    let start = expert.loras()[k].start.as_ref();
                    start.expect("the oracle has PiSSA too")[factor].to_f32()
                });
                starts.collect::<Vec<_>>()
            };
            load_start(lora, [&of(0), &of(1)], device);
        }
    }

    fn linear(&self) -> LinearConfig {
        let config = LinearConfig::new("fc", D_IN, D_OUT)
            .with_experts(0..self.experts.len())
            .with_dtype(self.config.dtype);
        match self.kind {
            Kind::Fused | Kind::Separate => config.with_fragments(["gate", "up"]),
            Kind::Column | Kind::Row | Kind::Whole => config,
        }
    }

    fn weight(&self) -> impl Fn(usize, usize, usize) -> f32 + '_ {
        |expert, row, column| self.experts[expert].weight().at(row, column) as f32
    }

    /// One rank's part of a row-parallel case.
    pub fn row<B: TrainingBackend>(
        &self,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> RowLinear<B, ExpertTp> {
        self.adapted(mesh, device)
    }

    /// One rank's part of a column-parallel case.
    pub fn column<B: TrainingBackend>(
        &self,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> ColumnLinear<B, ExpertTp> {
        self.adapted(mesh, device)
    }

    fn adapted<B: TrainingBackend, P: Placement>(
        &self,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> Linear<B, ExpertTp, P> {
        let (group, config) = (mesh.expert_tp(), self.linear());
        let mut linear: Linear<B, ExpertTp, P> = config.init(group, self.weight(), device).unwrap();
        for (k, path) in self.paths().iter().enumerate() {
            let lora = linear.adapt(path, &self.config, device).unwrap();
            self.load(lora, k, device);
        }
        linear.start_pissa(group).unwrap();
        linear
    }

    /// Forward and backward on one rank.
    pub fn rank<B: TrainingBackend>(&self, mesh: &Mesh<B>, device: &B::Device) -> Outcome {
        let group = mesh.expert_tp();
        let rows = RowGroups::padded(&self.counts, self.x.rows).unwrap();
        let ids = 0..rows.rows();
        let rows = dropout::rows(rows, &self.config, ids);
        let dtype = self.config.dtype;
        let (rank, size) = (group.rank(), group.size());
        if self.kind == Kind::Row {
            let linear = self.row(mesh, device);
            let x = shard(&self.x, Axis::Columns, rank, size);
            let x = x.tensor_on::<B>(device, dtype).require_grad();
            let y = linear.forward_suppressed(group.shard(x.clone()), &rows);
            let y = y.reduce_from().into_tensor();
            return outcome(
                x,
                y,
                self.g.tensor_on(device, dtype),
                &linear.trained_weights(),
            );
        }
        if self.kind == Kind::Whole {
            let linear: ReplicatedLinear<B, ExpertTp> = self.adapted(mesh, device);
            let x = self.x.tensor_on::<B>(device, dtype).require_grad();
            let y = linear.forward(group.replicated(x.clone()), &rows);
            let g = self.g.tensor_on(device, dtype);
            return outcome(x, y.into_tensor(), g, &linear.trained_weights());
        }
        let linear = self.column(mesh, device);
        let x = self.x.tensor_on::<B>(device, dtype).require_grad();
        let y = linear.forward(group.replicated(x.clone()).copy_to(), &rows);
        let columns = Axis::Rows(self.fragments());
        let g = shard(&self.g.transposed(), columns, rank, size).transposed();
        let g = g.tensor_on(device, dtype);
        outcome(x, y.into_tensor(), g, &linear.trained_weights())
    }

    /// What the ranks of an expert tensor parallel group made of it together.
    pub fn found<B: TrainingBackend>(&self, ranks: &impl Ranks<B>, size: usize) -> Outcome {
        self.join(&ranks.run(etp(size), |mesh, device| self.rank(mesh, device)))
    }

    /// What the ranks made of it, together.
    pub fn join(&self, found: &[Outcome]) -> Outcome {
        let parts = |of: &dyn Fn(&Outcome) -> Matrix| found.iter().map(of).collect::<Vec<_>>();
        let (y, dx) = match self.kind {
            Kind::Row => (
                unshard(&parts(&|f| f.y.clone()), Axis::Whole),
                unshard(&parts(&|f| f.dx.clone()), Axis::Columns),
            ),
            Kind::Whole => (
                unshard(&parts(&|f| f.y.clone()), Axis::Whole),
                unshard(&parts(&|f| f.dx.clone()), Axis::Whole),
            ),
            _ => {
                let columns = parts(&|f| f.y.transposed());
                (
                    unshard(&columns, Axis::Rows(self.fragments())).transposed(),
                    unshard(&parts(&|f| f.dx.clone()), Axis::Whole),
                )
            }
        };
        let factors = self.axes().into_iter().enumerate().map(|(k, axis)| {
            let experts = 0..found[0].factors[k].len();
            let joined = experts.map(|e| unshard(&parts(&|f| f.factors[k][e].clone()), axis));
            joined.collect()
        });
        Outcome {
            y,
            dx,
            factors: factors.collect(),
        }
    }

    /// What one device makes of it.
    pub fn expected(&self) -> Outcome {
        let rows = groups(&self.counts);
        let mut result = Outcome {
            y: Matrix::zeros(self.x.rows, D_OUT),
            dx: Matrix::zeros(self.x.rows, D_IN),
            factors: vec![Vec::new(); self.axes().len()],
        };
        let shared = shared_factors(self.pairs(), &self.config);
        for (e, expert) in self.experts.iter().enumerate() {
            let x = self.x.pick_rows(rows.range(e));
            let g = self.g.pick_rows(rows.range(e));
            let (y, grads) = match self.config.dropout {
                None => (expert.forward(&x), expert.backward(&x, &g)),
                Some(_) => {
                    let tokens: Vec<usize> = rows.range(e).collect();
                    dropout::linear(expert, &self.config, &self.paths(), e, &tokens, [&x, &g])
                }
            };
            let start = rows.range(e).start;
            result.y.add_to_rows(start, &y);
            result.dx.add_to_rows(start, &grads.dx);
            for (k, grad) in grads.factors.into_iter().flatten().enumerate() {
                match (shared[k], result.factors[k].first_mut()) {
                    (true, Some(sum)) => sum.add_to_rows(0, &grad),
                    _ => result.factors[k].push(grad),
                }
            }
        }
        result
    }

    /// For messages.
    pub fn name(&self, size: usize) -> String {
        let (kind, sharing, activation) = (self.kind, self.config.sharing, self.config.activation);
        format!(
            "{kind:?} {sharing:?} {activation:?} dora={} {:?} etp={size} {:?}",
            self.config.dora, self.config.dropout, self.counts
        )
    }
}

/// Backward of `<y, g>`.
fn outcome<B: TrainingBackend>(
    x: Tensor<B, 2>,
    y: Tensor<B, 2>,
    g: Tensor<B, 2>,
    weights: &[TrainedWeight<'_, B>],
) -> Outcome {
    let grads = (y.clone() * g).sum().backward();
    Outcome {
        y: Matrix::read(y),
        dx: Matrix::read(x.grad(&grads).unwrap()),
        factors: weights.iter().map(|w| gradient(w.weight, &grads)).collect(),
    }
}

/// Additions behind any result.
pub const REDUCTION: usize = D_IN + D_OUT + RANK + 8;

/// Compares every output and gradient.
///
/// # Panics
///
/// When one is not close.
pub fn check(name: &str, dtype: DType, found: &Outcome, expected: &Outcome) {
    let close = |what: &str, found: &Matrix, expected: &Matrix| {
        assert_close(
            &format!("{name}: {what}"),
            found,
            expected,
            dtype,
            REDUCTION,
        );
    };
    close("y", &found.y, &expected.y);
    close("dx", &found.dx, &expected.dx);
    assert_eq!(found.factors.len(), expected.factors.len());
    for (k, (found, expected)) in found.factors.iter().zip(&expected.factors).enumerate() {
        assert_eq!(found.len(), expected.len(), "{name}: experts of factor {k}");
        for (e, (found, expected)) in found.iter().zip(expected).enumerate() {
            close(&format!("factor {k} of expert {e}"), found, expected);
        }
    }
}
