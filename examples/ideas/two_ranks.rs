//! Two ranks, as threads of this process, share a down projection of two experts and its adapter.

// ANCHOR: all
use burn::backend::{Autodiff, Flex};
use burn::tensor::Tensor;
use burn_moe_lora::prelude::*;
use moe_lora_examples::{Result, assert_close};

type B = Autodiff<Flex>;

/// The output of the layer on `etp` ranks, as each of them has it in the end.
fn on_ranks(etp: usize) -> Result<Vec<Vec<f32>>> {
    let topology = TopologyConfig::new(etp).with_etp(etp).init()?;
    let outputs = MockWorld::new(etp).run_result(|rank| -> Result<_> {
        let mesh = Mesh::<B>::new(topology, &rank)?;
        let (group, device) = (mesh.expert_tp(), Default::default());

        // The full weight by global index: each rank takes its columns of it.
        let weight = |expert, row, column| (expert + 2 * row + column) as f32 / 8.0;
        let mut down: RowLinear<B, ExpertTp> = LinearConfig::new("down_proj", 8, 4)
            .with_experts(0..2)
            .init(group, weight, &device)?;
        let adapter = LoraConfig::new(2, 4.0).with_init_b(Init::Xavier);
        down.adapt("down_proj", &adapter, &device)?;

        // Five tokens, sorted by expert: three of the first, two of the second.
        let x = Tensor::ones([5, 8 / etp], &device);
        let rows = RowGroups::new(&[3, 2], 5)?;
        let term = down.forward_suppressed(group.shard(x), &rows); // Partial
        let sum = term.reduce_from(); // Replicated
        Ok(sum.into_tensor().into_data().to_vec::<f32>().unwrap())
    })?;
    Ok(outputs)
}

fn main() -> Result<()> {
    let (one, two) = (on_ranks(1)?, on_ranks(2)?);
    assert_eq!(two[0], two[1]); // the same bits on both ranks
    assert_close(&two[0], &one[0]); // and what one device computes
    println!("one rank:  {:?}", &one[0][..4]);
    println!("two ranks: {:?}", &two[0][..4]);
    Ok(())
}
// ANCHOR_END: all
