//! Blocks that keep nothing but their input, run again in the backward pass: the same gradients.

use burn::backend::{Autodiff, Flex};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::adapters::Weight;
use burn_moe_lora::prelude::*;
use moe_lora_examples::{Result, assert_close, noise};

type B = Autodiff<Flex>;

fn main() -> Result<()> {
    let (mesh, device) = (Mesh::<B>::solo(), Default::default());
    let block = |seed: usize| -> Result<ReplicatedLinear<B, Tp>> {
        let (path, weight) = (format!("blocks.{seed}"), noise(seed, 8 * 8));
        let mut linear: ReplicatedLinear<B, Tp> = LinearConfig::new(path.as_str(), 8, 8).init(
            mesh.tp(),
            |_, row, column| weight[row * 8 + column],
            &device,
        )?;
        let lora = LoraConfig::new(2, 4.0).with_init_b(Init::Xavier);
        linear.adapt(&path, &lora.with_dropout(Dropout::before_a(0.5)), &device)?;
        Ok(linear)
    };
    let blocks = [block(0)?, block(1)?, block(2)?];
    let forward = |block: &ReplicatedLinear<B, Tp>, x: Tensor<B, 2>| {
        let rows = RowGroups::whole(4).with_tokens(TokenIds::new(7, 0..4)); // step 7
        x.clone() + block.forward(mesh.tp().replicated(x), &rows).into_tensor()
    };
    let x = TensorData::new(noise(9, 4 * 8), [4, 8]);

    let mut y = Tensor::<B, 2>::from_data(x.clone(), &device);
    for block in &blocks {
        y = forward(block, y);
    }
    let kept = GradientsParams::from_grads(y.powi_scalar(2).sum().backward(), &blocks.to_vec());

    // ANCHOR: recompute
    let mut run = Recompute::new(Tensor::from_data(x, &device), &mesh);
    for block in &blocks {
        run = run.then(block, forward);
    }
    let mut of_loss = run.output().powi_scalar(2).sum().backward();
    let (again, _of_input) = run.backward(&mut of_loss);
    // ANCHOR_END: recompute

    assert_eq!((kept.len(), again.len()), (6, 6)); // A and B of three blocks
    for block in &blocks {
        let lora = &block.adapters[0];
        for factor in [&lora.a.weight, &lora.b.weight] {
            let Weight::One(param) = factor else { continue };
            let gradient = |grads: &GradientsParams| {
                let gradient = grads.get::<Flex, 2>(param.id).unwrap();
                gradient.into_data().to_vec::<f32>().unwrap()
            };
            assert_close(&gradient(&again), &gradient(&kept));
        }
    }
    println!(
        "{} gradients, the same with and without recompute",
        again.len()
    );
    Ok(())
}
