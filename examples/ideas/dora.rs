//! DoRA on an expert linear whose sum is suppressed: the rows of `W + s B A` have trained lengths.

use burn::backend::{Autodiff, Flex};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::prelude::*;
use moe_lora_examples::{Result, assert_close, noise};

type B = Autodiff<Flex>;

const TOKENS: usize = 5;

/// The output on `etp` ranks, before the first step and after three.
fn outputs(etp: usize, dora: bool) -> Result<[Vec<f32>; 2]> {
    let topology = TopologyConfig::new(etp).with_etp(etp).init()?;
    let outputs = MockWorld::new(etp).run_result(|rank| -> Result<_> {
        let (mesh, device) = (Mesh::<B>::new(topology, &rank)?, Default::default());
        let group = mesh.expert_tp();
        let full = noise(1, 2 * 4 * 8);
        let weight = |expert, row, column| full[(expert * 4 + row) * 8 + column];
        let down = LinearConfig::new("down_proj", 8, 4).with_experts(0..2);
        // ANCHOR: dora
        let mut down: RowLinear<B, ExpertTp> = down.init(group, weight, &device)?;
        let lora = LoraConfig::new(2, 4.0).with_dora(dora);
        down.adapt("down_proj", &lora, &device)?;
        down.start_magnitudes(group); // every rank, once, before the first pass
        // ANCHOR_END: dora

        let x = TensorData::new(noise(2, TOKENS * 8), [TOKENS, 8]);
        let x = Tensor::from_data(x, &device);
        let forward = |down: &RowLinear<B, ExpertTp>| {
            let columns = vec![8 / etp; etp];
            let x = group.replicated(x.clone()).scatter_to(&columns);
            let rows = RowGroups::new(&[3, 2], TOKENS).unwrap();
            down.forward_suppressed(x, &rows)
                .reduce_from()
                .into_tensor()
        };
        let values = |y: Tensor<B, 2>| y.into_data().to_vec::<f32>().unwrap();
        let fresh = values(forward(&down));
        for _ in 0..3 {
            let loss = (forward(&down) - 1.0).powi_scalar(2).sum();
            let grads = GradientsParams::from_grads(loss.backward(), &down);
            let grads = sync_gradients(&down.trained_weights(), grads, &mesh);
            down = SgdConfig::new().init().step(0.05, down, grads);
        }
        assert_eq!(down.trained_weights().len(), if dora { 3 } else { 2 });
        Ok([fresh, values(forward(&down))])
    })?;
    Ok(outputs.into_iter().next().unwrap())
}

fn main() -> Result<()> {
    let [plain, _] = outputs(1, false)?;
    let [fresh, trained] = outputs(1, true)?;
    assert_eq!(fresh, plain); // to the bit
    for etp in [2, 4] {
        let [fresh_on_ranks, trained_on_ranks] = outputs(etp, true)?;
        assert_close(&fresh_on_ranks, &fresh);
        assert_close(&trained_on_ranks, &trained);
    }
    println!("fresh: {:?}\ntrained: {:?}", &fresh[..4], &trained[..4]);
    Ok(())
}
