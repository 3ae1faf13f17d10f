//! Shared experts over the tensor parallel group, summed in three ways.

use burn::module::Param;
use burn::tensor::Tensor;
use moe_lora_adapters::{Adaptable, LoraConfig};
use moe_lora_experts::{MlpConfig, SharedExperts};
use moe_lora_parallel::{Mesh, range_of};
use moe_lora_testkit::{
    Axis, GateUpTargets, Matrix, MlpCase, MlpValues, Ranks, TrainingBackend, gradient, noise,
    oracle, unshard,
};

use crate::dense::{RANK, TOKENS, sizes, tp};
use crate::dropout;

/// `H`.
pub const HIDDEN: usize = 8;
/// `F`.
pub const INTERMEDIATE: usize = 12;
/// Additions behind a result of the whole MLP.
pub const MLP_REDUCTION: usize = HIDDEN + INTERMEDIATE + 2 * RANK + TOKENS;

/// How the shared experts' sum is placed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// In the MLP.
    Ordinary,
    /// After it.
    Overlapped,
    /// In the MLP, each rank keeping its tokens.
    SequenceParallel,
}

/// Each of them.
pub const WAYS: [Way; 3] = [Way::Ordinary, Way::Overlapped, Way::SequenceParallel];

/// Output, input gradient and gradients of all factors of the shared experts on one rank.
fn shared_rank<B: TrainingBackend>(
    case: &MlpCase,
    mlp: &oracle::Mlp,
    gate: Option<&Matrix>,
    (mesh, device): (&Mesh<B>, &B::Device),
    way: Way,
) -> Vec<Matrix> {
    let (group, dtype) = (mesh.tp(), case.config.dtype);
    let mlp = std::slice::from_ref(mlp);
    let mut shared = SharedExperts {
        mlp: MlpConfig::new("shared", HIDDEN, INTERMEDIATE)
            .with_dtype(dtype)
            .init(MlpValues::of(mlp).weights(), group, device)
            .unwrap(),
        gate: gate
            .map(|gate| Param::from_tensor(gate.tensor_on(device, dtype)).set_require_grad(false)),
    };
    case.adapt(&mut shared.mlp, mlp, device);
    shared.mlp.start_pissa(group).unwrap();
    let (x, g) = data();
    let sizes = sizes(group.size());
    let own = match way {
        Way::SequenceParallel => range_of(&sizes, group.rank()),
        _ => 0..TOKENS,
    };
    let (x, g) = (x.pick_rows(own.clone()), g.pick_rows(own.clone()));
    let x: Tensor<B, 2> = x.tensor_on(device, dtype).require_grad();
    let tokens = case.config.dropout.map(|_| dropout::tokens(own));
    let tokens = tokens.as_ref();
    let y = match way {
        Way::Ordinary => {
            let y = shared.forward(group.replicated(x.clone()), tokens);
            y.into_tensor()
        }
        Way::Overlapped => {
            let term = shared.forward_overlapped(group.replicated(x.clone()).copy_to(), tokens);
            term.reduce_from().into_tensor()
        }
        Way::SequenceParallel => {
            let x = group.shard_tokens(x.clone(), &sizes);
            shared.forward_sequence(x, tokens).into_tensor()
        }
    };
    let grads = (y.clone() * g.tensor_on(device, dtype)).sum().backward();
    let weights = shared.mlp.trained_weights();
    let mut results = vec![Matrix::read(y), Matrix::read(x.grad(&grads).unwrap())];
    results.extend(weights.iter().map(|w| gradient(w.weight, &grads).remove(0)));
    results
}

/// Input and cotangent of the MLP.
pub fn data() -> (Matrix, Matrix) {
    (noise(7, TOKENS, HIDDEN), noise(8, TOKENS, HIDDEN))
}

/// The results of all ranks brought together: output, input gradient, gradients of all factors.
pub fn shared_results<B: TrainingBackend>(
    ranks: &impl Ranks<B>,
    case: &MlpCase,
    mlp: &oracle::Mlp,
    gate: Option<&Matrix>,
    size: usize,
    way: Way,
) -> Vec<Matrix> {
    let found = ranks.run(tp(size), |mesh, device| {
        shared_rank(case, mlp, gate, (mesh, device), way)
    });
    let tokens = match way {
        Way::SequenceParallel => Axis::Tokens,
        _ => Axis::Whole,
    };
    let axes = [vec![tokens; 2], case.axes()].concat();
    axes.into_iter()
        .enumerate()
        .map(|(k, axis)| {
            let parts: Vec<Matrix> = found.iter().map(|found| found[k].clone()).collect();
            unshard(&parts, axis)
        })
        .collect()
}

/// The same of one device.
pub fn shared_oracle(case: &MlpCase, mlp: &oracle::Mlp, gate: Option<&Matrix>) -> Vec<Matrix> {
    let (x, g) = data();
    // A layer without experts of its own.
    let router = Matrix::zeros(0, HIDDEN);
    let layer = oracle::Moe {
        shared: Some(oracle::Shared {
            mlp: mlp.clone(),
            gate: gate.cloned(),
        }),
        ..oracle::Moe::new(router, oracle::Score::Softmax, 0, Vec::new())
    };
    let (y, grads) = match case.config.dropout {
        None => (layer.forward(&x), layer.backward(&x, &g)),
        Some(_) => {
            let paths = ["experts", "shared"];
            dropout::layer(&layer, &case.config, case.gate_up, paths, [&x, &g])
        }
    };
    let mut expected = vec![y, grads.dx];
    expected.extend(grads.shared.into_iter().flatten());
    expected
}

/// Shared experts with these adapters.
pub fn mlp_case(gate_up: GateUpTargets, config: LoraConfig) -> MlpCase {
    MlpCase::new([HIDDEN, INTERMEDIATE, 1], gate_up, config)
}
