//! The layer on another backend without autodiff of its own gives the numbers of Flex, ranks
//! without tokens included.

use burn::backend::{Autodiff, Flex, NdArray};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor, TensorData};
use burn_moe_lora::adapters::Weight;
use burn_moe_lora::parallel::ParallelBackend;
use burn_moe_lora::prelude::*;
use moe_lora_testkit::{GateUpTargets, noise};

const H: usize = 8;
const E: usize = 4;
const TOKENS: usize = 9;

/// Output, input gradient and factor gradients of every rank, `dealt[k]` tokens on rank `k`.
fn train<B, I>(ep: usize, etp: usize, dealt: &[usize], weigh_at: WeighAt) -> Vec<Vec<Vec<f32>>>
where
    B: AutodiffBackend<InnerBackend = I> + AdapterBackend,
    I: ParallelBackend<Base = B::Base>,
    B::Device: Default,
{
    let values = |seed, n| noise(seed, 1, n).to_f32();
    let (router, all) = (values(1, E * H), values(2, TOKENS * H));
    let experts = [3, 4, 5].map(|seed| values(seed, E * H * H));
    let shared = [6, 7, 8].map(|seed| values(seed, H * H));
    let gate = values(9, H);
    let topology = TopologyConfig::new(ep * etp)
        .with_ep(ep)
        .with_etp(etp)
        .init()
        .unwrap();
    MockWorld::new(ep * etp)
        .run(|rank| {
            let device = Default::default();
            let mesh = Mesh::<B>::new(topology, &rank).unwrap();
            let config = MoeConfig::new("mlp", H, H, E, 2)
                .with_weigh_at(weigh_at)
                .with_shared(Some(SharedConfig {
                    intermediate: H,
                    gated: true,
                    overlap: true,
                }));
            let weights = MoeWeights {
                router: &router,
                experts: MlpWeights {
                    gate: &experts[0],
                    up: &experts[1],
                    down: &experts[2],
                    biases: None,
                },
                shared: Some((
                    MlpWeights {
                        gate: &shared[0],
                        up: &shared[1],
                        down: &shared[2],
                        biases: None,
                    },
                    Some(&gate),
                )),
                ..Default::default()
            };
            let mut layer = config.init(weights, &mesh, &device).unwrap();
            let targets = GateUpTargets::Separate.targets();
            let lora = LoraConfig::new(4, 8.0).with_init_b(Init::Xavier);
            layer.add_adapters(&targets, &lora, &device).unwrap();

            let at = mesh.rank();
            let start = dealt[..at].iter().sum::<usize>() * H;
            let own = all[start..start + dealt[at] * H].to_vec();
            let x = TensorData::new(own, [dealt[at], H]);
            let x = Tensor::<B, 2>::from_data(x, &device).require_grad();
            let y = layer.forward(x.clone(), &mesh);
            let host = |data: TensorData| data.to_vec::<f32>().unwrap();
            let mut results = vec![host(y.clone().into_data())];
            let grads = y.powi_scalar(2).sum().backward();
            results.push(host(x.grad(&grads).unwrap().into_data()));
            let grads = GradientsParams::from_grads(grads, &layer);
            let grads = sync_gradients(&layer.trained_weights(), grads, &mesh);
            results.extend(layer.trained_weights().iter().map(|trained| {
                let data = match trained.weight {
                    Weight::One(param) => grads.get::<I, 2>(param.id).unwrap().into_data(),
                    Weight::PerExpert(param) => grads.get::<I, 3>(param.id).unwrap().into_data(),
                };
                host(data)
            }));
            results
        })
        .unwrap()
}

#[test]
fn ndarray_gives_the_numbers_of_flex_with_and_without_tokens_on_a_rank() {
    for (ep, etp, dealt) in [
        (1, 1, vec![9]),
        (1, 1, vec![0]),
        (2, 1, vec![9, 0]),
        (1, 2, vec![2, 7]),
        (2, 2, vec![3, 0, 4, 2]),
        (1, 4, vec![0, 5, 1, 3]),
        (4, 1, vec![4, 1, 4, 0]),
    ] {
        for weigh_at in [WeighAt::Output, WeighAt::Hidden] {
            let flex = train::<Autodiff<Flex>, Flex>(ep, etp, &dealt, weigh_at);
            let ndarray = train::<Autodiff<NdArray>, NdArray>(ep, etp, &dealt, weigh_at);
            for (flex, ndarray) in flex.iter().flatten().zip(ndarray.iter().flatten()) {
                assert_eq!(flex.len(), ndarray.len());
                let largest = flex.iter().fold(0f32, |largest, v| largest.max(v.abs()));
                for (a, b) in flex.iter().zip(ndarray) {
                    let close = (a - b).abs() <= 1e-5 * largest;
                    assert!(
                        close,
                        "ep={ep} etp={etp} {dealt:?} {weigh_at:?}: {a} and {b}"
                    );
                }
            }
        }
    }
}

#[test]
fn ndarray_has_the_bits_of_dropout_s_masks() {
    moe_lora_testkit::dropout_masks::<NdArray>(&Default::default(), DType::F32);
}

#[test]
fn lengths_of_rows_and_columns_times_factors_are_those_of_the_host() {
    use moe_lora_testkit::{row_lengths, scaled_columns};
    let device = Default::default();
    for (dtype, limit) in [(DType::F32, 1e-5), (DType::F64, 1e-13), (DType::BF16, 1e-2)] {
        row_lengths::<Flex>(&device, dtype, limit);
        scaled_columns::<Flex>(&device, dtype, limit);
    }
    row_lengths::<NdArray>(&Default::default(), DType::F32, 1e-5);
    scaled_columns::<NdArray>(&Default::default(), DType::F32, 1e-5);
}
