//! Several adapters in one layer, each token with its own: as if each adapter were alone, at every topology.

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::prelude::*;
use moe_lora_examples::{HIDDEN, Result, assert_close, moe_layer, noise};

type B = Autodiff<Flex>;

const TOKENS: usize = 8;

fn config(seed: u64) -> LoraConfig {
    // B as if it were trained: a fresh one is zero.
    let config = LoraConfig::new(4, 32.0).with_init_b(Init::Xavier);
    config.with_seed(seed)
}

/// Outputs of all tokens: every second one French, the others legal; the same with French disabled; all
/// French, in a layer with that adapter alone; and those of the base.
fn outputs(etp: usize) -> Result<[Vec<f32>; 4]> {
    let topology = TopologyConfig::new(etp).with_etp(etp).init()?;
    let ranks = MockWorld::new(etp).run_result(|rank| -> Result<_> {
        let (mesh, device) = (Mesh::<B>::new(topology, &rank)?, Default::default());
        let (count, batch) = (TOKENS / etp, noise(5, TOKENS * HIDDEN));
        let first = mesh.rank() * count;
        let own = batch[first * HIDDEN..][..count * HIDDEN].to_vec();
        let x = Tensor::<B, 2>::from_data(TensorData::new(own, [count, HIDDEN]), &device);
        let own = first as u64..(first + count) as u64;
        let values = |y: Tensor<B, 2>| y.into_data().to_vec::<f32>().unwrap();

        // ANCHOR: named
        let targets = Targets::new(["experts.gate_up_proj", "experts.down_proj"]);
        let mut layer = moe_layer(&mesh)?;
        layer.add_named_adapters("french", &targets, &config(1), &device)?;
        layer.add_named_adapters("legal", &targets, &config(2), &device)?;
        let [french, legal] = [layer.slot("french")?, layer.slot("legal")?];
        // Of each token its id and its adapter; `Slot::BASE` is none.
        let slots: Vec<Slot> = own
            .clone()
            .map(|id| [french, legal][id as usize % 2])
            .collect();
        let ids = TokenIds::new(0, own.clone()).with_slots(slots);
        let mixed = values(layer.forward_tokens(x.clone(), &ids, &mesh));
        // ANCHOR_END: named

        // ANCHOR: combine
        layer.combine("both", &[("french", 0.5), ("legal", 0.5)])?;
        layer.set_enabled("french", false)?; // no part in the output, nor in training
        // ANCHOR_END: combine
        let disabled = values(layer.forward_tokens(x.clone(), &ids, &mesh));
        let base = moe_layer(&mesh)?.forward(x.clone(), &mesh);
        let mut alone = moe_layer(&mesh)?;
        alone.add_named_adapters("french", &targets, &config(1), &device)?;
        let ids = TokenIds::new(0, own.clone()).with_slots(own.map(|_| french).collect::<Vec<_>>());
        let alone = alone.forward_tokens(x, &ids, &mesh);
        Ok([mixed, disabled, values(alone), values(base)])
    })?;
    let joined = |at: usize| ranks.iter().flat_map(|rank| rank[at].clone()).collect();
    Ok(std::array::from_fn(joined))
}

fn main() -> Result<()> {
    let [mixed, disabled, alone, base] = outputs(1)?;
    let row = |values: &[f32], token: usize| values[token * HIDDEN..][..HIDDEN].to_vec();
    for token in (0..TOKENS).step_by(2) {
        assert_close(&row(&mixed, token), &row(&alone, token));
        assert_close(&row(&disabled, token), &row(&base, token));
        assert_ne!(row(&alone, token), row(&base, token));
        // The other tokens are not French.
        assert_eq!(row(&mixed, token + 1), row(&disabled, token + 1));
        assert_ne!(row(&mixed, token + 1), row(&alone, token + 1));
    }
    let [cut, ..] = outputs(2)?;
    assert_close(&cut, &mixed);
    println!("{:?}", row(&mixed, 0));
    Ok(())
}
