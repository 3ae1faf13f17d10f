//! An adapter from a training checkpoint to the files that others serve, and back, with the same deltas.

use std::path::{Path, PathBuf};

use burn_moe_lora::checkpoint::Checkpoint;
use burn_moe_lora::interchange::{HubModel, PeftAdapter, PeftLayout};
use moe_lora_examples::Result;

/// The model in the repository and an adapter that was trained on it.
fn model() -> PathBuf {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../finetune/assets");
    assets.join("qwen3-moe-constitution")
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let (model, out) = (HubModel::open(&model())?, folder.path());
    let config = model.config();
    let trained = PeftAdapter::read(&model.folder().join("adapter_sgd"), config)?;
    trained.write_checkpoint(&out.join("checkpoint"), config)?; // stands for a training run

    // ANCHOR: export
    let checkpoint = Checkpoint::open(&out.join("checkpoint"))?;
    let adapter = PeftAdapter::from_checkpoint(&checkpoint)?;
    for layer in adapter.one_sided_layers() {
        println!("layer {layer}: SGLang serves it without the adapter");
    }
    // For transformers 5 and for transformers 4.
    adapter.write(
        &out.join("stacked"),
        config,
        PeftLayout::Stacked,
        "my/model",
    )?;
    adapter.write(
        &out.join("one-by-one"),
        config,
        PeftLayout::PerExpert,
        "my/model",
    )?;
    // ANCHOR_END: export

    assert_eq!(PeftAdapter::read(&out.join("stacked"), config)?, trained);
    let split = PeftAdapter::read(&out.join("one-by-one"), config)?;

    // ANCHOR: merge
    for layer in config
        .moe_layers()
        .filter(|layer| adapter.layers.contains_key(layer))
    {
        let experts = model.expert_weights(layer)?;
        let merged = experts
            .clone()
            .merge(&adapter.layers[&layer], adapter.rslora)?;
        // The same weights, to the bit, whichever file the adapter went through.
        assert_eq!(experts.merge(&split.layers[&layer], split.rslora)?, merged);
    }
    // ANCHOR_END: merge
    println!("{} layers exported and read back", adapter.layers.len());
    Ok(())
}
