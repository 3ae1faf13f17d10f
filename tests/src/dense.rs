//! Dense linears over the tensor parallel group.
//!
//! There is one loss, `<y, G>`. Where `y` is replicated every rank runs backward on its own copy
//! of it, where `y` is sharded on its own slice.

use burn::module::Param;
use burn::nn;
use burn::tensor::Tensor;
use moe_lora_adapters::{
    Activation, ColumnLinear, Linear, LinearConfig, Lora, LoraConfig, Placement, ReplicatedLinear,
    RowLinear, TrainedWeight,
};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{Mesh, Topology, TopologyConfig, Tp, range_of};
use moe_lora_testkit::{
    Axis, Matrix, Noise, TrainingBackend, assert_close, gradient, load_start, noise, oracle, scale,
    shard, unshard,
};
use serde::{Deserialize, Serialize};

use crate::dropout;

/// Rows of the input.
pub const TOKENS: usize = 6;
/// Input features.
pub const D_IN: usize = 8;
/// Output features.
pub const D_OUT: usize = 12;
/// Rank of the adapters.
pub const RANK: usize = 4;
/// No power of two, so that the scale rounds.
pub const ALPHA: f64 = 5.3;

/// Tensor parallelism alone.
pub fn tp(size: usize) -> Topology {
    TopologyConfig::new(size).with_tp(size).init().unwrap()
}

/// Tokens of each rank where they are sharded: unequal, and none on one of four.
pub fn sizes(ranks: usize) -> Vec<usize> {
    match ranks {
        1 => vec![TOKENS],
        2 => vec![4, 2],
        _ => vec![3, 0, 2, 1],
    }
}

/// A linear with a bias and an adapter, its input and the cotangent of its output, and what one device makes
/// of them.
#[derive(Clone, Debug)]
pub struct Case {
    /// `[T, D_IN]`.
    pub x: Matrix,
    /// `[T, D_OUT]`.
    pub g: Matrix,
    /// The oracle.
    pub linear: oracle::Linear,
    /// Its output.
    pub y: Matrix,
    /// Its gradients.
    pub grads: oracle::LinearGrads,
    /// The adapter.
    pub config: LoraConfig,
}

/// What one rank made of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Found {
    /// The output.
    pub y: Matrix,
    /// The gradient of the input.
    pub dx: Matrix,
    /// The gradients of `A`, `B` and any magnitude.
    pub factors: Vec<Matrix>,
}

impl Case {
    /// A case with noise in every value.
    pub fn new(config: LoraConfig) -> Self {
        let (x, g) = (noise(1, TOKENS, D_IN), noise(2, TOKENS, D_OUT));
        let adapter = oracle::Lora {
            a: noise(3, config.rank, D_IN),
            b: noise(4, D_OUT, config.rank),
            scale: scale(&config),
            silu: config.activation == Activation::Silu,
            first_row: 0,
            magnitude: config.dora.then(|| Noise::new(7).lengths(D_OUT)),
            start: (config.pissa)
                .then(|| [noise(8, config.rank, D_IN), noise(9, D_OUT, config.rank)]),
        };
        let linear =
            oracle::Linear::new(noise(5, D_OUT, D_IN), vec![adapter]).with_bias(noise(6, 1, D_OUT));
        let (y, grads) = match config.dropout {
            None => (linear.forward(&x), linear.backward(&x, &g)),
            Some(_) => {
                let tokens: Vec<usize> = (0..TOKENS).collect();
                dropout::linear(&linear, &config, &["fc".into()], 0, &tokens, [&x, &g])
            }
        };
        Self {
            y,
            grads,
            x,
            g,
            linear,
            config,
        }
    }

    fn rows(&self) -> RowGroups {
        dropout::rows(RowGroups::whole(TOKENS), &self.config, 0..TOKENS)
    }

    /// The linear without its adapter.
    pub fn base<B: TrainingBackend, P: Placement>(
        &self,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> Linear<B, Tp, P> {
        let weight = |_, row, column| self.linear.weight().at(row, column) as f32;
        let bias = |_, row| self.linear.bias().unwrap().at(0, row) as f32;
        LinearConfig::new("fc", D_IN, D_OUT)
            .with_dtype(self.config.dtype)
            .init(mesh.tp(), weight, device)
            .and_then(|linear| linear.with_bias(bias, device))
            .unwrap()
    }

    /// Gives an adapter the oracle's factors.
    pub fn load<B: TrainingBackend, P: Placement>(
        &self,
        lora: &mut Lora<B, Tp, P>,
        device: &B::Device,
    ) {
        let oracle::Lora {
            a,
            b,
            magnitude,
            start,
            ..
        } = &self.linear.loras()[0];
        lora.load(&a.to_f32(), &b.to_f32(), device).unwrap();
        if let Some(magnitude) = magnitude {
            lora.load_magnitude(&magnitude.to_f32(), device).unwrap();
        }
        if let Some([a, b]) = start {
            load_start(lora, [&a.to_f32(), &b.to_f32()], device);
        }
    }

    /// A linear with the adapter.
    fn adapted<B: TrainingBackend, P: Placement>(
        &self,
        mut linear: Linear<B, Tp, P>,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> Linear<B, Tp, P> {
        self.load(linear.adapt("fc", &self.config, device).unwrap(), device);
        linear.start_pissa(mesh.tp()).unwrap();
        linear
    }

    /// Backward of `<y, g>` with this rank's `g`.
    pub fn finish<B: TrainingBackend>(
        &self,
        x: &Tensor<B, 2>,
        y: Tensor<B, 2>,
        g: &Matrix,
        factors: Vec<TrainedWeight<'_, B>>,
    ) -> Found {
        let g = g.tensor_on(&x.device(), self.config.dtype);
        let grads = (y.clone() * g).sum().backward();
        Found {
            y: Matrix::read(y),
            dx: Matrix::read(x.grad(&grads).unwrap()),
            factors: factors
                .iter()
                .map(|factor| gradient(factor.weight, &grads).remove(0))
                .collect(),
        }
    }

    /// Forward and backward of a column-parallel linear on one rank.
    pub fn column<B: TrainingBackend>(&self, mesh: &Mesh<B>, device: &B::Device) -> Found {
        let group = mesh.tp();
        let linear: ColumnLinear<B, Tp> = self.adapted(self.base(mesh, device), mesh, device);
        let x = self.x.tensor_on(device, self.config.dtype).require_grad();
        let input = group.replicated(x.clone()).copy_to();
        let y = linear.forward(input, &self.rows());
        let g = shard(&self.g, Axis::Columns, group.rank(), group.size());
        let factors = linear.adapters[0].trained_weights();
        self.finish(&x, y.into_tensor(), &g, factors)
    }

    /// The same with its input sharded over tokens: sequence parallel.
    pub fn column_sequence<B: TrainingBackend>(&self, mesh: &Mesh<B>, device: &B::Device) -> Found {
        let group = mesh.tp();
        let linear: ColumnLinear<B, Tp> = self.adapted(self.base(mesh, device), mesh, device);
        let sizes = sizes(group.size());
        let x = self.x.pick_rows(range_of(&sizes, group.rank()));
        let x = x.tensor_on(device, self.config.dtype).require_grad();
        let input = group.shard_tokens(x.clone(), &sizes);
        let y = linear.forward_sequence(input, &self.rows());
        let g = shard(&self.g, Axis::Columns, group.rank(), group.size());
        let factors = linear.adapters[0].trained_weights();
        self.finish(&x, y.into_tensor(), &g, factors)
    }

    /// Forward and backward of a row-parallel linear on one rank.
    pub fn row<B: TrainingBackend>(&self, mesh: &Mesh<B>, device: &B::Device, sum: Sum) -> Found {
        let group = mesh.tp();
        let linear: RowLinear<B, Tp> = self.adapted(self.base(mesh, device), mesh, device);
        let x = shard(&self.x, Axis::Columns, group.rank(), group.size());
        let x = x.tensor_on(device, self.config.dtype).require_grad();
        let (input, rows) = (group.shard(x.clone()), self.rows());
        let sizes = sizes(group.size());
        let (y, g) = match sum {
            Sum::Here => (linear.forward(input, &rows).into_tensor(), self.g.clone()),
            Sum::ByTheCaller => {
                let term = linear.forward_suppressed(input, &rows);
                (term.reduce_from().into_tensor(), self.g.clone())
            }
            Sum::OverTokens => {
                let y = linear.forward_sequence(input, &rows, &sizes);
                let g = self.g.pick_rows(range_of(&sizes, group.rank()));
                (y.into_tensor(), g)
            }
        };
        let factors = linear.adapters[0].trained_weights();
        self.finish(&x, y, &g, factors)
    }

    /// Forward and backward of a replicated linear on one rank.
    pub fn replicated<B: TrainingBackend>(&self, mesh: &Mesh<B>, device: &B::Device) -> Found {
        self.whole(self.base(mesh, device), mesh, device)
    }

    /// The same of a linear that was burn's.
    pub fn from_burn<B: TrainingBackend>(&self, mesh: &Mesh<B>, device: &B::Device) -> Found {
        self.whole(self.of_burn(mesh, device), mesh, device)
    }

    /// The linear without its adapter, from burn's.
    pub fn of_burn<B: TrainingBackend>(
        &self,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> ReplicatedLinear<B, Tp> {
        let dtype = self.config.dtype;
        let weight = self.linear.weight().transposed().tensor_on(device, dtype);
        let bias: Tensor<B, 2> = self.linear.bias().unwrap().tensor_on(device, dtype);
        let linear = nn::Linear {
            weight: Param::from_tensor(weight),
            bias: Some(Param::from_tensor(bias.squeeze_dim(0))),
        };
        Linear::from_burn("fc", linear, mesh.tp())
    }

    fn whole<B: TrainingBackend>(
        &self,
        linear: ReplicatedLinear<B, Tp>,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> Found {
        let (group, linear) = (mesh.tp(), self.adapted(linear, mesh, device));
        let x = self.x.tensor_on(device, self.config.dtype).require_grad();
        let y = linear.forward(group.replicated(x.clone()), &self.rows());
        let factors = linear.adapters[0].trained_weights();
        self.finish(&x, y.into_tensor(), &self.g, factors)
    }

    /// Compares what the ranks found, brought together along the given axes.
    ///
    /// # Panics
    ///
    /// When one is not close.
    pub fn check(&self, name: &str, found: &[Found], axes: [Axis; 4]) {
        let [y, dx, da, db] = axes;
        let factors = &self.grads.factors[0];
        assert!(found.iter().all(|f| f.factors.len() == factors.len()));
        let mut results = vec![
            ("y", parts(found, |f| &f.y), y, &self.y, D_IN + RANK),
            (
                "dx",
                parts(found, |f| &f.dx),
                dx,
                &self.grads.dx,
                D_OUT + RANK,
            ),
            (
                "dA",
                parts(found, |f| &f.factors[0]),
                da,
                &factors[0],
                TOKENS + D_OUT,
            ),
            (
                "dB",
                parts(found, |f| &f.factors[1]),
                db,
                &factors[1],
                TOKENS + D_IN,
            ),
        ];
        if let Some(magnitude) = factors.get(2) {
            let parts = parts(found, |f| &f.factors[2]);
            results.push(("dm", parts, db, magnitude, TOKENS + D_IN + RANK));
        }
        for (what, parts, axis, expected, reduction) in results {
            let name = format!(
                "{name} tp={} {:?} rslora={} dora={}: {what}",
                found.len(),
                self.config.activation,
                self.config.rslora,
                self.config.dora
            );
            let joined = unshard(&parts, axis);
            assert_close(&name, &joined, expected, self.config.dtype, reduction);
        }
    }
}

/// One result of every rank.
pub fn parts(found: &[Found], of: impl Fn(&Found) -> &Matrix) -> Vec<Matrix> {
    found.iter().map(|found| of(found).clone()).collect()
}

/// How a row-parallel linear's terms come together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sum {
    /// In the linear.
    Here,
    /// After it.
    ByTheCaller,
    /// In the linear, each rank keeping its tokens.
    OverTokens,
}

/// The axes of a column-parallel linear's output, input gradient and factors.
pub const COLUMN_AXES: [Axis; 4] = [Axis::Columns, Axis::Whole, Axis::Rows(1), Axis::Rows(1)];

/// The same of one whose input is sharded over tokens.
pub const COLUMN_SEQUENCE_AXES: [Axis; 4] =
    [Axis::Columns, Axis::Tokens, Axis::Rows(1), Axis::Rows(1)];

/// The axes of a row-parallel linear's.
pub fn row_axes(sum: Sum) -> [Axis; 4] {
    let y = match sum {
        Sum::OverTokens => Axis::Tokens,
        _ => Axis::Whole,
    };
    [y, Axis::Columns, Axis::Columns, Axis::Rows(1)]
}
