//! The MoE block and the whole model at every topology give what was recorded from the originals: output, gradient of
//! the input, gradient of every adapter tensor, logits.

mod files;

use std::collections::BTreeMap;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::adapters::{Adaptable, sync_gradients};
use burn_moe_lora::interchange::{FactorPair, GateUp, HostTensor, HubModel, PeftAdapter};
use burn_moe_lora::parallel::{Mesh, MockWorld, TopologyConfig};
use files::{Tensors, fixture, read_tensors, relative_error};
use finetune::adapter::{AdapterPlan, gather_adapter};
use finetune::moe::MoeBlocks;
use finetune::rank_model::RankModel;
use finetune::ranks::CpuBackend;
use finetune::text::Batch;

type B = CpuBackend;
type Inner = burn::backend::Flex;

const TOLERANCE: f32 = 1e-5;
const TOKENS: usize = 13;

/// `(EP, ETP)`.
const TOPOLOGIES: [(usize, usize); 6] = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)];

/// Ranks and how they are laid out.
#[derive(Clone, Copy, Debug)]
struct Layout {
    world: usize,
    tp: usize,
    ep: usize,
    etp: usize,
    overlap: bool,
}

impl Layout {
    fn experts(ep: usize, etp: usize) -> Self {
        Self {
            world: ep * etp,
            tp: 1,
            ep,
            etp,
            overlap: false,
        }
    }

    /// Ways to deal the tokens to the ranks, none of them even.
    fn deals(&self) -> Vec<Vec<usize>> {
        match self.world {
            1 => vec![vec![13]],
            2 => vec![vec![7, 6], vec![0, 13]],
            4 => vec![vec![4, 3, 3, 3], vec![13, 0, 0, 0], vec![0, 6, 0, 7]],
            other => panic!("no deal for {other} ranks"),
        }
    }

    /// What `run` returns on every rank.
    fn run<T: Send>(&self, run: impl Fn(Mesh<B>) -> T + Sync) -> Vec<T> {
        let topology = TopologyConfig::new(self.world)
            .with_tp(self.tp)
            .with_ep(self.ep)
            .with_etp(self.etp)
            .init()
            .unwrap();
        MockWorld::new(self.world)
            .run(|rank| run(Mesh::new(topology, &rank).unwrap()))
            .unwrap()
    }
}

/// A recorded model with its adapter.
struct Recorded {
    hub: HubModel,
    adapter: PeftAdapter,
    reference: Tensors,
}

impl Recorded {
    fn open(kind: &str) -> Self {
        let folder = fixture(kind);
        let hub = HubModel::open(&folder).unwrap();
        let adapter = PeftAdapter::read(&folder.join("adapter"), hub.config()).unwrap();
        Self {
            hub,
            adapter,
            reference: read_tensors(&folder.join("reference.safetensors")),
        }
    }

    /// A rank's rows of a recorded `[1, 13, H]` tensor.
    fn rows(&self, name: &str, deal: &[usize], rank: usize) -> Tensor<B, 2> {
        let (shape, values) = &self.reference[name];
        let width = shape[2];
        let start: usize = deal[..rank].iter().sum();
        let values = values[start * width..(start + deal[rank]) * width].to_vec();
        let data = TensorData::new(values, [deal[rank], width]);
        Tensor::from_data(data, &Default::default())
    }

    /// Relative error of everything recorded of the block, by name.
    fn block_errors(&self, layout: Layout, deal: &[usize]) -> BTreeMap<String, f32> {
        let plan = AdapterPlan::given(self.adapter.clone());
        let parts = layout.run(|mesh| {
            let device = Default::default();
            let rank = mesh.rank();
            let mut blocks =
                MoeBlocks::<B>::load(&self.hub, layout.overlap, &mesh, &device).unwrap();
            let x = self.rows("x", deal, rank).require_grad();
            let y_base = blocks.layers[0].forward(x.clone().detach(), &mesh);

            plan.put_on(&mut blocks, &mesh, &device).unwrap();
            let y = blocks.layers[0].forward(x.clone(), &mesh);
            let loss = (y.clone() * self.rows("loss_weight", deal, rank)).sum();
            let grads = loss.backward();
            let grad_x = x.grad(&grads).unwrap();
            let grads = GradientsParams::from_grads(grads, &blocks);
            let mut grads = sync_gradients(&blocks.trained_weights(), grads, &mesh);
            let gradients = blocks.map(&mut InPlaceOfWeights(&mut grads));
            assert!(grads.is_empty(), "a gradient belongs to no factor");
            let gradients = gather_adapter(&gradients, &mesh).unwrap();
            let rows = [
                ("y_base", values(y_base.inner())),
                ("y_adapted", values(y.inner())),
                ("grad_x", values(grad_x)),
            ];
            (rows, gradients)
        });
        let mut errors = self.gradient_errors(&parts[0].1);
        for (index, (name, _)) in parts[0].0.iter().enumerate() {
            let found: Vec<f32> = parts
                .iter()
                .flat_map(|(rows, _)| rows[index].1.clone())
                .collect();
            errors.insert(
                (*name).into(),
                relative_error(&found, &self.reference[*name].1),
            );
        }
        errors
    }

    /// Compares gradients under the names that the adapter's tensors have on disk.
    fn gradient_errors(&self, gradients: &PeftAdapter) -> BTreeMap<String, f32> {
        let folder = tempfile::tempdir().unwrap();
        let config = self.hub.config();
        let layout = gradients.layout();
        gradients
            .write(folder.path(), config, layout, "base")
            .unwrap();
        let found = read_tensors(&folder.path().join("adapter_model.safetensors"));
        let recorded = self
            .reference
            .iter()
            .filter(|(name, _)| name.starts_with("grad."));
        let errors: BTreeMap<String, f32> = recorded
            .map(|(name, (shape, expected))| {
                let on_disk = name["grad.".len()..].replace(".default.", ".");
                // A magnitude is a module's weight in memory and goes without that name on disk.
                let on_disk = on_disk.replace("_vector.weight", "_vector");
                let (found_shape, found) = &found[&on_disk];
                assert_eq!(found_shape, shape);
                (name.clone(), relative_error(found, expected))
            })
            .collect();
        assert_eq!(errors.len(), found.len(), "not every gradient is recorded");
        errors
    }

    /// Relative error of the logits on bytes 0 to 12, the largest of all ranks; each runs the whole sequence.
    fn logits_error(&self, layout: Layout) -> f32 {
        let plan = AdapterPlan::given(self.adapter.clone());
        let ids = Batch::new((0..TOKENS as i32).collect(), TOKENS).unwrap();
        let errors = layout.run(|mesh| {
            let device = Default::default();
            let model = RankModel::<B>::load(&self.hub, Some(&plan), mesh, &device).unwrap();
            let logits = model.logits(ids.tensor(&device), None);
            relative_error(&values(logits.inner()), &self.reference["logits_adapted"].1)
        });
        errors.into_iter().max_by(f32::total_cmp).unwrap()
    }
}

/// Puts each gradient in the place of the weight that it belongs to.
struct InPlaceOfWeights<'a>(&'a mut GradientsParams);

impl ModuleMapper<B> for InPlaceOfWeights<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        match self.0.remove::<Inner, D>(param.id) {
            Some(grad) => Param::initialized(param.id, Tensor::from_inner(grad)),
            None => param,
        }
    }
}

fn values<const D: usize>(tensor: Tensor<Inner, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

fn largest(errors: &BTreeMap<String, f32>) -> (&str, f32) {
    let errors = errors.iter().map(|(name, error)| (name.as_str(), *error));
    errors.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap()
}

fn check_block(recorded: &Recorded, kind: &str, layout: Layout) {
    for deal in layout.deals() {
        let errors = recorded.block_errors(layout, &deal);
        let (name, error) = largest(&errors);
        println!("{kind} {layout:?} tokens {deal:?}: {error:.2e} in {name}");
        assert!(
            error <= TOLERANCE,
            "{kind} {layout:?} {deal:?}: {name} is off by {error:.2e}"
        );
    }
}

fn check(kind: &str) {
    let recorded = Recorded::open(kind);
    for (ep, etp) in TOPOLOGIES {
        let layout = Layout::experts(ep, etp);
        check_block(&recorded, kind, layout);
        let error = recorded.logits_error(layout);
        println!("{kind} {layout:?}: {error:.2e} in logits_adapted");
        assert!(
            error <= TOLERANCE,
            "{kind} {layout:?}: logits are off by {error:.2e}"
        );
    }
}

#[test]
fn qwen3_moe_is_exact_at_every_topology() {
    check("hf/qwen3_moe");
}

#[test]
fn qwen2_moe_is_exact_at_every_topology() {
    check("hf/qwen2_moe");
}

#[test]
fn olmoe_is_exact_at_every_topology() {
    check("hf/olmoe");
}

#[test]
fn mixtral_is_exact_at_every_topology() {
    check("hf/mixtral");
}

#[test]
fn olmoe_with_dora_is_exact_at_every_topology_magnitudes_and_their_gradients_included() {
    check("hf_older/olmoe_dora");
}

#[test]
fn magnitudes_left_out_or_of_another_row_are_seen() {
    let layout = Layout::experts(2, 2);
    let change = |change: &dyn Fn(&mut FactorPair)| {
        let mut recorded = Recorded::open("hf_older/olmoe_dora");
        let layers = recorded.adapter.layers.values_mut();
        layers
            .flat_map(|layer| layer.pairs_mut())
            .for_each(|(_, pair)| change(pair));
        recorded.logits_error(layout)
    };
    let left_out = change(&|pair| pair.magnitude = None);
    let rotated = change(&|pair| {
        let magnitude = pair.magnitude.as_ref().unwrap();
        let mut values = magnitude.data().to_vec();
        values.rotate_left(1);
        pair.magnitude = Some(HostTensor::new(magnitude.shape(), values).unwrap());
    });
    assert!(left_out > 1e-3 && rotated > 1e-3, "{left_out} {rotated}");
}

/// The block alone: the attention of the family is not run here.
fn check_blocks(kind: &str) {
    let recorded = Recorded::open(kind);
    for (ep, etp) in TOPOLOGIES {
        check_block(&recorded, kind, Layout::experts(ep, etp));
    }
}

#[test]
fn blocks_of_deepseek_v3_are_exact_at_every_topology() {
    check_blocks("hf/deepseek_v3");
}

#[test]
fn blocks_of_gpt_oss_are_exact_at_every_topology() {
    check_blocks("hf/gpt_oss");
}

#[test]
fn qwen3_moe_with_an_adapter_an_expert_and_projection_is_exact_at_every_topology() {
    check("hf_older/qwen3_moe");
}

#[test]
fn a_shared_expert_is_exact_under_tensor_parallelism_with_and_without_overlap() {
    let recorded = Recorded::open("hf/qwen2_moe");
    for overlap in [false, true] {
        for (ep, etp) in TOPOLOGIES {
            let layout = Layout {
                world: (ep * etp).max(2),
                tp: 2,
                overlap,
                ..Layout::experts(ep, etp)
            };
            check_block(&recorded, "hf/qwen2_moe", layout);
        }
        let layout = Layout {
            tp: 4,
            overlap,
            ..Layout::experts(2, 2)
        };
        check_block(&recorded, "hf/qwen2_moe", layout);
    }
}

/// The pair with the `B` of the first two experts exchanged.
fn swapped(pair: &FactorPair) -> FactorPair {
    let mut b = pair.b.data().to_vec();
    let one = b.len() / pair.b.shape()[0];
    let (first, second) = b.split_at_mut(one);
    first.swap_with_slice(&mut second[..one]);
    let b = HostTensor::new(pair.b.shape(), b).unwrap();
    FactorPair::new(pair.a.clone(), b, pair.alpha).unwrap()
}

#[test]
fn wrong_adapters_miss() {
    let (layout, deal) = (Layout::experts(2, 2), [4, 3, 3, 3]);
    for kind in ["hf/qwen3_moe", "hf/qwen2_moe", "hf/olmoe"] {
        let doubled = |recorded: &mut Recorded| {
            let layers = recorded.adapter.layers.values_mut();
            layers
                .flat_map(|layer| layer.pairs_mut())
                .for_each(|(_, pair)| pair.alpha *= 2.0);
        };
        let exchanged_down = |recorded: &mut Recorded| {
            for layer in recorded.adapter.layers.values_mut() {
                layer.down = layer.down.as_ref().map(swapped);
            }
        };
        let exchanged_gate_up = |recorded: &mut Recorded| {
            for layer in recorded.adapter.layers.values_mut() {
                if let Some(GateUp::Fused(pair)) = &mut layer.gate_up {
                    *pair = swapped(pair);
                }
            }
        };
        let tampers: [&dyn Fn(&mut Recorded); 3] = [&doubled, &exchanged_down, &exchanged_gate_up];
        let mut missed = BTreeMap::<String, f32>::new();
        for tamper in tampers {
            let mut recorded = Recorded::open(kind);
            tamper(&mut recorded);
            let errors = recorded.block_errors(layout, &deal);
            assert!(
                errors["y_adapted"] > 1e-3 && errors["grad_x"] > 1e-3,
                "{kind}: {errors:?}"
            );
            assert!(recorded.logits_error(layout) > 1e-3);
            for (name, error) in errors {
                let most = missed.entry(name).or_default();
                *most = most.max(error);
            }
        }
        // The gradient of the last B does not depend on that B itself, so not every fault shows in every tensor.
        for (name, error) in missed {
            let sees = name == "y_base" || error > 1e-3;
            assert!(sees, "{kind}: {name} is off by only {error:.2e}");
        }
    }
}
