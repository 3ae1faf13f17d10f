//! What training merges and saves against what the file crates make of the same factors: no topology shows in a file.

mod files;

use std::collections::BTreeMap;
use std::path::Path;

use burn::optim::SgdConfig;
use burn_moe_lora::checkpoint::Checkpoint;
use burn_moe_lora::interchange::{
    HubModel, InterchangeError, MAX_SHARD_BYTES, ModelWriter, PeftAdapter,
};
use burn_moe_lora::parallel::{Mesh, MockWorld, TopologyConfig};
use files::{asset, fixture, read_tensors, relative_error};
use finetune::adapter::{AdapterPlan, gather_adapter};
use finetune::merge::gather_experts;
use finetune::moe::MoeBlocks;
use finetune::rank_model::RankModel;
use finetune::ranks::CpuBackend;
use finetune::text::Batch;
use finetune::trainer::Trainer;

type B = CpuBackend;

const TOPOLOGIES: [(usize, usize); 6] = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)];

/// Recorded models whose attention is run here, with their adapters.
const RUN: [&str; 6] = [
    "hf/qwen3_moe",
    "hf/qwen2_moe",
    "hf/olmoe",
    "hf/mixtral",
    "hf_older/qwen3_moe",
    "hf_older/olmoe_dora",
];

struct Recorded {
    hub: HubModel,
    adapter: PeftAdapter,
}

impl Recorded {
    fn open(model: &Path, adapter: &Path) -> Self {
        let hub = HubModel::open(model).unwrap();
        let adapter = PeftAdapter::read(adapter, hub.config()).unwrap();
        Self { hub, adapter }
    }

    fn fixture(kind: &str) -> Self {
        let folder = fixture(kind);
        Self::open(&folder, &folder.join("adapter"))
    }

    /// What `run` returns on the first rank.
    fn at<T: Send>(&self, (ep, etp): (usize, usize), run: impl Fn(Mesh<B>) -> T + Sync) -> T {
        let topology = TopologyConfig::new(ep * etp).with_ep(ep).with_etp(etp);
        let topology = topology.init().unwrap();
        let ranks = MockWorld::new(ep * etp).run(|rank| {
            let mesh = Mesh::<B>::new(topology, &rank).unwrap();
            run(mesh)
        });
        ranks.unwrap().swap_remove(0)
    }

    fn blocks(&self, mesh: &Mesh<B>) -> MoeBlocks<B> {
        let device = Default::default();
        let mut blocks = MoeBlocks::<B>::load(&self.hub, false, mesh, &device).unwrap();
        let plan = AdapterPlan::given(self.adapter.clone());
        plan.put_on(&mut blocks, mesh, &device).unwrap();
        blocks
    }

    /// Writes the model merged by the file crates alone.
    fn merge_to(&self, folder: &Path) {
        let writer = ModelWriter::new(&self.hub, folder, MAX_SHARD_BYTES).unwrap();
        let merged = writer.write(|layer| -> Result<_, InterchangeError> {
            let Some(adapter) = self.adapter.layers.get(&layer) else {
                return Ok(BTreeMap::new());
            };
            let experts = self.hub.expert_weights(layer)?;
            let merged = experts.merge(adapter, self.adapter.rslora)?;
            merged.into_hub(layer, &self.hub)
        });
        merged.unwrap();
    }
}

#[test]
fn a_merge_in_training_has_the_bits_of_a_merge_of_files_at_every_topology() {
    for kind in [
        "hf/qwen3_moe",
        "hf/deepseek_v3",
        "hf/gpt_oss",
        "hf_older/qwen3_moe",
        "hf_older/olmoe_dora",
    ] {
        let recorded = Recorded::fixture(kind);
        let layers: Vec<usize> = recorded.adapter.layers.keys().copied().collect();
        let expected: Vec<_> = layers
            .iter()
            .map(|layer| {
                let experts = recorded.hub.expert_weights(*layer).unwrap();
                let adapter = &recorded.adapter.layers[layer];
                let merged = experts.merge(adapter, recorded.adapter.rslora).unwrap();
                merged.into_hub(*layer, &recorded.hub).unwrap()
            })
            .collect();
        for topology in TOPOLOGIES {
            let found = recorded.at(topology, |mesh| {
                let mut blocks = recorded.blocks(&mesh);
                blocks.merge(&mesh).unwrap();
                let gather = |layer: &usize| {
                    gather_experts(&blocks, *layer, &recorded.hub, &mesh, true).unwrap()
                };
                layers.iter().map(gather).collect::<Vec<_>>()
            });
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                // Biases are no part of a merge.
                let weights = expected.keys().filter(|name| !name.ends_with("_bias"));
                assert!(found.keys().eq(weights), "{kind}: {:?}", found.keys());
                for (name, tensor) in found {
                    assert!(*tensor == expected[name], "{kind} {topology:?}: {name}");
                }
            }
        }
    }
}

#[test]
fn a_merged_model_read_again_gives_the_adapted_logits() {
    for kind in RUN {
        let recorded = Recorded::fixture(kind);
        let reference = read_tensors(&fixture(kind).join("reference.safetensors"));
        let folder = tempfile::tempdir().unwrap();
        recorded.merge_to(folder.path());
        let merged = HubModel::open(folder.path()).unwrap();
        let error = |hub: &HubModel| {
            let device = Default::default();
            let model = RankModel::<B>::load(hub, None, Mesh::solo(), &device).unwrap();
            let ids = Batch::new((0..13).collect(), 13).unwrap();
            let logits = model.logits(ids.tensor(&device), None).into_data();
            let logits: Vec<f32> = logits.to_vec().unwrap();
            relative_error(&logits, &reference["logits_adapted"].1)
        };
        let (merged, base) = (error(&merged), error(&recorded.hub));
        println!("{kind}: {merged:.2e} merged, {base:.2e} without the adapter");
        assert!(merged <= 1e-5, "{kind}: {merged}");
        assert!(base > 1e-3, "{kind}: {base}");
    }
}

#[test]
fn an_export_has_the_same_bytes_at_every_topology() {
    let model = asset("qwen3-moe-constitution");
    let recorded = Recorded::open(&model, &model.join("adapter_sgd"));
    let [older, dora] = ["hf_older/qwen3_moe", "hf_older/olmoe_dora"].map(Recorded::fixture);
    let original = [
        model.join("adapter_sgd"),
        fixture("hf_older/qwen3_moe/adapter"),
        fixture("hf_older/olmoe_dora/adapter"),
    ];
    for (recorded, original) in [recorded, older, dora].iter().zip(&original) {
        let expected = read_tensors(&original.join("adapter_model.safetensors"));
        let mut files: Vec<Vec<u8>> = Vec::new();
        for topology in TOPOLOGIES {
            let folder = tempfile::tempdir().unwrap();
            let at = |name: &str| folder.path().join(name);
            let gathered = recorded.at(topology, |mesh| {
                let device = Default::default();
                let plan = AdapterPlan::given(recorded.adapter.clone());
                let model = RankModel::load(&recorded.hub, Some(&plan), mesh, &device).unwrap();
                let trainer = Trainer::new(model, SgdConfig::new().init(), 0.1, device);
                trainer.save(&at("saved")).unwrap();
                gather_adapter(&trainer.model.blocks, &trainer.model.mesh).unwrap()
            });
            let saved = Checkpoint::open(&at("saved")).unwrap();
            let from_checkpoint = PeftAdapter::from_checkpoint(&saved).unwrap();
            for (adapter, name) in [(gathered, "gathered"), (from_checkpoint, "checkpoint")] {
                assert!(adapter == recorded.adapter, "{topology:?} {name}");
                let layout = adapter.layout();
                let config = recorded.hub.config();
                adapter.write(&at(name), config, layout, "base").unwrap();
                let file = at(name).join("adapter_model.safetensors");
                assert!(read_tensors(&file) == expected, "{topology:?} {name}");
                files.push(std::fs::read(file).unwrap());
            }
        }
        assert!(files.iter().all(|file| *file == files[0]));
    }
}
