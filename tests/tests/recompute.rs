//! Activation recompute, by burn's balanced checkpointing and by blocks that keep nothing but their
//! input: the gradients of the plain backward pass, dropout included.

use std::cell::Cell;

use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::{Autodiff, Flex};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Int, Tensor, TensorData};
use moe_lora_adapters::{
    Adaptable, AdapterBackend, Dropout, Init, LinearConfig, LoraConfig, Recompute,
    ReplicatedLinear, TokenIds, Weight,
};
use moe_lora_experts::{MlpWeights, MoeConfig, MoeLayer, MoeWeights};
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{CollectiveOp, GroupName, Mesh, MockWorld, TopologyConfig, Tp};
use moe_lora_testkit::{GateUpTargets, Matrix, noise, synced_gradient};

const H: usize = 8;
const F: usize = 8;
const E: usize = 4;
const TOKENS: usize = 5;

/// A layer without adapters.
fn layer<B: AdapterBackend>(path: &str, mesh: &Mesh<B>) -> MoeLayer<B> {
    let [router, gate, up, down] =
        [E * H, E * F * H, E * F * H, E * H * F].map(|n| noise(n as u64, 1, n).to_f32());
    let weights = MoeWeights {
        router: &router,
        experts: MlpWeights {
            gate: &gate,
            up: &up,
            down: &down,
            biases: None,
        },
        ..Default::default()
    };
    let config = MoeConfig::new(path, H, F, E, 2);
    config.init(weights, mesh, &Default::default()).unwrap()
}

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
            let config = config();
            let layers = ["layers.0.mlp", "layers.1.mlp"].map(|path| {
                let mut layer = layer(path, &mesh);
                let targets = GateUpTargets::Fused.targets();
                layer.add_adapters(&targets, &config, &device).unwrap();
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

fn config() -> LoraConfig {
    LoraConfig::new(2, 4.0).with_init_b(Init::Normal { std: 0.5 })
}

/// Gradients of every factor and of the input, of two stacked layers with these adapters.
fn gradients<C: CheckpointStrategy>(
    [ep, etp]: [usize; 2],
    config: LoraConfig,
    by_blocks: bool,
) -> Vec<Vec<Vec<f32>>> {
    let topology = TopologyConfig::new(ep * etp)
        .with_ep(ep)
        .with_etp(etp)
        .init();
    let topology = topology.unwrap();
    let run = |mesh: Mesh<Autodiff<Flex, C>>| {
        let layers = ["layers.0.mlp", "layers.1.mlp"].map(|path| {
            let mut layer = layer(path, &mesh);
            let targets = GateUpTargets::Fused.targets();
            layer
                .add_adapters(&targets, &config, &Default::default())
                .unwrap();
            layer.start_magnitudes(&mesh);
            layer
        });
        let first = (mesh.rank() * TOKENS) as u64;
        let tokens = TokenIds::new(5, first..first + TOKENS as u64);
        let block = |layer: &MoeLayer<_>, x: Tensor<_, 2>| {
            x.clone() + layer.forward_tokens(x, &tokens, &mesh)
        };
        let x = noise(first + 1, TOKENS, H).tensor::<Flex>(DType::F32);
        let loss = |y: Tensor<Autodiff<Flex, C>, 2>| y.powi_scalar(2).sum();
        let (grads, dx) = if by_blocks {
            let mut blocks = Recompute::new(x, &mesh);
            for layer in &layers {
                blocks = blocks.then(layer, block);
            }
            let mut of_loss = loss(blocks.output()).backward();
            blocks.backward(&mut of_loss)
        } else {
            let x = Tensor::from_inner(x).require_grad();
            let y = layers.iter().fold(x.clone(), |x, layer| block(layer, x));
            let mut grads = loss(y).backward();
            let dx = x.grad_remove(&mut grads).unwrap();
            let mut all = GradientsParams::new();
            for layer in &layers {
                for trained in layer.trained_weights() {
                    let Weight::PerExpert(param) = trained.weight else {
                        panic!("an adapter an expert")
                    };
                    let grad = param.val().grad_remove(&mut grads).unwrap();
                    all.register::<Flex, 3>(param.id, grad);
                }
            }
            (all, dx)
        };
        let weights = layers.iter().flat_map(MoeLayer::trained_weights);
        let mut all: Vec<Vec<f32>> = weights
            .map(|trained| synced_gradient(trained.weight, &grads))
            .map(|experts| experts.iter().flat_map(Matrix::to_f32).collect())
            .collect();
        assert_eq!(all.len(), grads.len());
        all.push(dx.into_data().to_vec().unwrap());
        all
    };
    MockWorld::new(ep * etp)
        .run(|rank| run(Mesh::new(topology, &rank).unwrap()))
        .unwrap()
}

/// Gradient of `A` of a linear whose block sees these steps, one after the other.
fn gradient_at(steps: [u64; 2]) -> Vec<f32> {
    let (mesh, device) = (Mesh::<Autodiff<Flex>>::solo(), Default::default());
    let config = LoraConfig::new(2, 4.0)
        .with_init_b(Init::Xavier)
        .with_dropout(Dropout::before_a(0.5));
    let mut linear: ReplicatedLinear<_, Tp> = LinearConfig::new("fc", H, H)
        .init(mesh.tp(), |_, row, column| (row + column) as f32, &device)
        .unwrap();
    linear.adapt("fc", &config, &device).unwrap();
    let runs = Cell::new(0);
    let x = noise(1, TOKENS, H).tensor::<Flex>(DType::F32);
    let blocks = Recompute::new(x, &mesh).then(&linear, |linear, x| {
        let tokens = TokenIds::new(steps[runs.replace(1)], 0..TOKENS as u64);
        let rows = RowGroups::whole(TOKENS).with_tokens(tokens);
        linear.forward(mesh.tp().replicated(x), &rows).into_tensor()
    });
    let mut of_loss = blocks.output().sum().backward();
    let (grads, _) = blocks.backward(&mut of_loss);
    synced_gradient::<Autodiff<Flex>>(linear.trained_weights()[0].weight, &grads)[0].to_f32()
}

#[test]
fn masks_that_are_not_drawn_again_would_be_seen() {
    assert_eq!(gradient_at([3, 3]), gradient_at([9, 3]));
    assert_ne!(gradient_at([3, 3]), gradient_at([3, 9]));
}

#[test]
fn recompute_draws_the_masks_of_dropout_again_and_changes_no_gradient() {
    for place in [[1, 1], [2, 1], [1, 2], [2, 2]] {
        for dropout in [Dropout::before_a(0.3), Dropout::after_b(0.3)] {
            let config = self::config().with_dropout(dropout);
            let plain = gradients::<NoCheckpointing>(place, config, false);
            assert!(plain.iter().flatten().flatten().any(|grad| *grad != 0.0));
            let balanced = gradients::<BalancedCheckpointing>(place, config, false);
            assert_eq!(balanced, plain, "{place:?} {dropout:?}: balanced");
            let blocks = gradients::<NoCheckpointing>(place, config, true);
            assert_eq!(blocks, plain, "{place:?} {dropout:?}: blocks");
            let none = gradients::<NoCheckpointing>(place, self::config(), false);
            assert_ne!(none, plain);
        }
    }
}

#[test]
fn recompute_computes_the_norms_of_dora_again_and_changes_no_gradient() {
    let config = config().with_dora(true);
    for place in [[1, 1], [2, 1], [1, 2], [2, 2]] {
        let plain = gradients::<NoCheckpointing>(place, config, false);
        for rank in &plain {
            assert_eq!(
                rank.len(),
                2 * 2 * 3 + 1,
                "A, B and m of two layers, and dx"
            );
            assert!(rank.iter().all(|grad| grad.iter().any(|g| *g != 0.0)));
        }
        let balanced = gradients::<BalancedCheckpointing>(place, config, false);
        assert_eq!(balanced, plain, "{place:?}: balanced");
        let blocks = gradients::<NoCheckpointing>(place, config, true);
        assert_eq!(blocks, plain, "{place:?}: blocks");
    }
}
