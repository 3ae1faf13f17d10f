//! Calls of one rank's adapter, forward and backward.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::tensor::{DType, Distribution, Tensor, bf16};
use burn_autodiff::grads::Gradients;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn_fusion::Fusion;
use burn_moe_lora::adapters::{ShardAxis, WeightLayout};
use burn_moe_lora::nccl::CudaBackend;
use burn_moe_lora::parallel::ParallelBackend;
use burn_moe_lora::prelude::*;

use crate::case::{Case, EXPERTS, FFN, HIDDEN, RANK, TOKENS};
use crate::cotangent::from_cotangent;

/// burn's CUDA backend in bf16.
pub type Plain = CubeBackend<CudaRuntime, bf16, i32, u8>;
/// With fusion.
pub type Fused = Fusion<Plain>;

/// A backend without autodiff that the cases run on.
pub trait Cuda: CudaBackend + AdapterBackend + ParallelBackend<Base = Self> {}

impl<B: CudaBackend + AdapterBackend + ParallelBackend<Base = B>> Cuda for B {}

enum Adapter<B: AdapterBackend> {
    Column(ColumnLora<B, ExpertTp>),
    Row(RowLora<B, ExpertTp>),
}

/// One rank's adapter, its inputs, and the bases that the deltas join.
///
/// The base of a call is the output of an earlier one, with one owner: the delta is written into its
/// buffer, as into a base linear's output.
pub struct Calls<B: Cuda> {
    adapter: Adapter<Autodiff<B>>,
    group: Group<Autodiff<B>, ExpertTp>,
    rows: RowGroups,
    inputs: Vec<Tensor<Autodiff<B>, 2>>,
    cotangents: Vec<Tensor<B, 2>>,
    bases: Vec<Option<Tensor<B, 2>>>,
    scalar: Tensor<B, 1>,
}

impl<B: Cuda> Calls<B> {
    pub fn new(
        case: &Case,
        collective: Arc<dyn Collective<B>>,
        inputs: usize,
        device: &CudaDevice,
    ) -> Self {
        let group = Group::new(collective);
        let (d_in, d_out) = if case.down {
            (FFN, HIDDEN)
        } else {
            (HIDDEN, FFN)
        };
        let layout = WeightLayout {
            experts: case.grouped.then_some(0..EXPERTS),
            d_out,
            d_in,
            fragments: 1,
            axis: if case.down {
                ShardAxis::In
            } else {
                ShardAxis::Out
            },
            rank: group.rank(),
            ranks: group.size(),
        };
        // A scale of 1, which PyTorch's side leaves out.
        let config = LoraConfig::new(RANK, RANK as f64)
            .with_init_b(Init::Kaiming)
            .with_dtype(DType::BF16);
        let fits = "the shapes of the bench fit";
        let adapter = match case.down {
            true => Adapter::Row(RowLora::init("fc2", &config, &layout, device).expect(fits)),
            false => {
                Adapter::Column(ColumnLora::init("fc1", &config, &layout, device).expect(fits))
            }
        };
        let experts = if case.grouped { EXPERTS } else { 1 };
        let counts = vec![TOKENS / experts; experts];
        let [input, _, base] = case.widths(group.size());
        let random = |width| -> Vec<Tensor<B, 2>> {
            let one = |_| Tensor::random([TOKENS, width], Distribution::Normal(0.0, 1.0), device);
            (0..inputs).map(one).collect()
        };
        let tracked = |x| Tensor::from_inner(x).require_grad();
        Self {
            adapter,
            group,
            rows: RowGroups::new(&counts, TOKENS).expect("the counts sum to the tokens"),
            inputs: random(input).into_iter().map(tracked).collect(),
            cotangents: random(base),
            bases: random(base).into_iter().map(Some).collect(),
            scalar: Tensor::ones([1], device),
        }
    }

    /// `base + delta(x)` of one set of inputs, as the library's linears join them.
    fn joined(&mut self, set: usize) -> Tensor<Autodiff<B>, 2> {
        let x = self.inputs[set].clone();
        let base = self.bases[set]
            .take()
            .expect("a base is put back after its call");
        let base = Tensor::from_inner(base);
        let (group, rows) = (&self.group, &self.rows);
        match &self.adapter {
            Adapter::Row(lora) => lora
                .add_to(group.partial(base), group.shard(x), rows)
                .into_term(),
            Adapter::Column(lora) => {
                let columns = 0..base.dims()[1];
                lora.add_to(group.shard(base), columns, group.fanout(x), rows)
                    .into_tensor()
            }
        }
    }

    /// A forward pass: the output with its graph. Drop it before the next call on the same inputs.
    pub fn forward(&mut self, call: usize) -> Tensor<Autodiff<B>, 2> {
        let set = call % self.inputs.len();
        let y = self.joined(set);
        self.bases[set] = Some(y.clone().inner());
        y
    }

    /// A forward and a backward pass: gradients of the input and of both factors.
    pub fn forward_backward(&mut self, call: usize) -> Gradients {
        let y = self.forward(call);
        let dy = self.cotangents[call % self.cotangents.len()].clone();
        from_cotangent(y, dy, self.scalar.clone()).backward()
    }

    /// Panics unless a call gives finite values and a gradient: what is fast has to be right.
    pub fn check(&mut self) {
        let grads = self.forward_backward(0);
        let largest = |x: Tensor<B, 2>| {
            let x = x.abs().max().into_data().convert::<f32>();
            x.to_vec::<f32>().expect("f32 values")[0]
        };
        let y = self.bases[0]
            .clone()
            .expect("a base is put back after its call");
        let dx = self.inputs[0]
            .grad(&grads)
            .expect("the input has a gradient");
        for (what, value) in [("output", largest(y)), ("input gradient", largest(dx))] {
            assert!(
                value.is_finite() && value > 0.0,
                "the largest {what} is {value}"
            );
        }
    }
}
