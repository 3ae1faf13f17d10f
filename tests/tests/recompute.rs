//! Activation recompute: burn's balanced checkpointing gives the gradients of the plain backward
//! pass, issues the same collectives, and trains adapters above a frozen embedding.

use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::{Autodiff, Flex};
use burn::optim::GradientsParams;
use burn::tensor::{Int, Tensor, TensorData};
use moe_lora_adapters::{Init, LoraConfig, Weight};
use moe_lora_experts::{GateUpTargets, MlpWeights, MoeConfig, MoeWeights};
use moe_lora_parallel::{CollectiveOp, GroupName, Mesh, MockWorld, TopologyConfig};
use moe_lora_testkit::noise;

const H: usize = 8;
const F: usize = 8;
const E: usize = 4;
const TOKENS: usize = 5;

/// A rank's gradients, a factor each, and its calls.
type Trained = (Vec<Vec<f32>>, Vec<(GroupName, CollectiveOp)>);

/// Gradients of every factor and the calls of each rank, of two stacked layers over a frozen embedding.
fn train<C: CheckpointStrategy>() -> Vec<Trained> {
    let topology = TopologyConfig::new(4)
        .with_ep(2)
        .with_etp(2)
        .init()
        .unwrap();
    let world = MockWorld::new(4);
    let grads = world
        .run(|rank| {
            let mesh = Mesh::<Autodiff<Flex, C>>::new(topology, &rank).unwrap();
            let device = Default::default();
            let [router, gate, up, down] =
                [E * H, E * F * H, E * F * H, E * H * F].map(|n| noise(n as u64, 1, n).to_f32());
            let experts = MlpWeights {
                gate: &gate,
                up: &up,
                down: &down,
                biases: None,
            };
            let config = LoraConfig::new(2, 4.0).with_init_b(Init::Normal { std: 0.5 });
            let layers = ["layers.0.mlp", "layers.1.mlp"].map(|path| {
                let weights = MoeWeights {
                    router: &router,
                    experts,
                    ..Default::default()
                };
                let mut layer = MoeConfig::new(path, H, F, E, 2)
                    .init(weights, &mesh, &device)
                    .unwrap();
                let paths = layer.targets(GateUpTargets::Fused);
                layer.adapt(&paths, &config, &device).unwrap();
                layer
            });
            let table = TensorData::new(noise(3, 1, 10 * H).to_f32(), [10, H]);
            let embedding = Tensor::<Autodiff<Flex, C>, 2>::from_data(table, &device);
            let first = mesh.rank() as i64;
            let ids = Tensor::<_, 1, Int>::arange(first..first + TOKENS as i64, &device);

            let x = embedding.select(0, ids);
            let h = x.clone() + layers[0].forward(x, &mesh);
            let y = h.clone() + layers[1].forward(h, &mesh);
            let mut grads = y.powi_scalar(2).sum().backward();
            layers
                .iter()
                .flat_map(|layer| {
                    let grads = GradientsParams::from_module(&mut grads, layer);
                    let factor = |weight: &Weight<_>| match weight {
                        Weight::One(param) => grads.get::<Flex, 2>(param.id).map(Tensor::into_data),
                        Weight::PerExpert(param) => {
                            grads.get::<Flex, 3>(param.id).map(Tensor::into_data)
                        }
                    };
                    let weights = layer.trained_weights().into_iter();
                    weights
                        .map(|trained| factor(trained.weight).expect("every factor is trained"))
                        .map(|data| data.to_vec().unwrap())
                        .collect::<Vec<_>>()
                })
                .collect::<Vec<Vec<f32>>>()
        })
        .unwrap();
    let calls = |rank| {
        let calls = world.take_calls(rank).into_iter();
        calls.map(|call| (call.group, call.op)).collect()
    };
    let ranks = grads.into_iter().enumerate();
    ranks.map(|(rank, grads)| (grads, calls(rank))).collect()
}

#[test]
fn recompute_above_a_frozen_embedding_changes_no_gradient_and_no_collective() {
    let plain = train::<NoCheckpointing>();
    let recomputed = train::<BalancedCheckpointing>();
    assert_eq!(plain, recomputed);
    for (grads, calls) in plain {
        assert_eq!(grads.len(), 8, "A and B of fc1 and fc2 of two layers");
        for grad in grads {
            let norm = grad.iter().map(|g| g * g).sum::<f32>().sqrt();
            assert!(norm > 1e-3, "a gradient norm of {norm}");
        }
        assert!(calls.len() > 20, "{} calls", calls.len());
    }
}
