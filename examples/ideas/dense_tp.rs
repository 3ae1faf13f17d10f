//! LoRA on a dense MLP under tensor parallelism: three training steps end at the same place at every size.

use burn::backend::{Autodiff, Flex};
use burn::module::Module;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::prelude::*;
use moe_lora_examples::{Result, assert_close, noise};

type Cpu = Autodiff<Flex>;

const HIDDEN: usize = 8;
const WIDE: usize = 16;
const TOKENS: usize = 6;

// ANCHOR: module
/// Up, SiLU, down, each rank with its part of the weights.
#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    up: ColumnLinear<B, Tp>,
    down: RowLinear<B, Tp>,
}

impl<B: AdapterBackend> Mlp<B> {
    fn new(mesh: &Mesh<B>, device: &B::Device) -> Result<Self> {
        let (up, down) = (noise(1, WIDE * HIDDEN), noise(2, HIDDEN * WIDE));
        let (tp, lora) = (mesh.tp(), LoraConfig::new(4, 8.0));
        let mut mlp = Self {
            up: LinearConfig::new("mlp.up_proj", HIDDEN, WIDE).init(
                tp,
                |_, row, column| up[row * HIDDEN + column],
                device,
            )?,
            down: LinearConfig::new("mlp.down_proj", WIDE, HIDDEN).init(
                tp,
                |_, row, column| down[row * WIDE + column],
                device,
            )?,
        };
        mlp.up.adapt("mlp.up_proj", &lora, device)?;
        mlp.down.adapt("mlp.down_proj", &lora, device)?;
        Ok(mlp)
    }

    /// `x [T, H]`, the same on every rank of the group, to `[T, H]`.
    fn forward(&self, x: Tensor<B, 2>, mesh: &Mesh<B>) -> Tensor<B, 2> {
        let rows = RowGroups::whole(x.dims()[0]);
        let x = mesh.tp().replicated(x).copy_to(); // Fanout: every rank works on its part
        let inner = self.up.forward(x, &rows); // Sharded by columns
        let inner = inner.map(burn::tensor::activation::silu);
        self.down.forward(inner, &rows).into_tensor() // summed: Replicated
    }

    fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        [self.up.trained_weights(), self.down.trained_weights()].concat()
    }
}
// ANCHOR_END: module

// ANCHOR: train
/// The output after three steps on `tp` ranks.
fn trained(tp: usize) -> Result<Vec<f32>> {
    let topology = TopologyConfig::new(tp).with_tp(tp).init()?;
    let outputs = MockWorld::new(tp).run_result(|rank| -> Result<_> {
        let (mesh, device) = (Mesh::<Cpu>::new(topology, &rank)?, Default::default());
        let mut mlp = Mlp::new(&mesh, &device)?;
        let x = TensorData::new(noise(3, TOKENS * HIDDEN), [TOKENS, HIDDEN]);
        let x = Tensor::from_data(x, &device);
        for _ in 0..3 {
            let y = mlp.forward(x.clone(), &mesh);
            let loss = (y - 1.0).powi_scalar(2).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &mlp);
            let grads = sync_gradients(&mlp.trained_weights(), grads, &mesh);
            mlp = SgdConfig::new().init().step(0.05, mlp, grads);
        }
        let y = mlp.forward(x, &mesh);
        Ok(y.into_data().to_vec::<f32>().unwrap())
    })?;
    assert!(outputs.iter().all(|output| *output == outputs[0]));
    Ok(outputs.into_iter().next().unwrap())
}
// ANCHOR_END: train

fn main() -> Result<()> {
    let alone = trained(1)?;
    for tp in [2, 4] {
        assert_close(&trained(tp)?, &alone);
    }
    println!("after three steps: {:?}", &alone[..4]);
    Ok(())
}
