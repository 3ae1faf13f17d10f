//! LoRA+: the same optimizer at two rates, its state kept by parameter.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use moe_lora_adapters::{
    AdapterError, ColumnLinear, Init, LinearConfig, LoraConfig, LoraPlus, TrainedWeight, Weight,
};
use moe_lora_parallel::{ExpertTp, Group};
use moe_lora_testkit::{Ad, factors};

type Fc = ColumnLinear<Ad, ExpertTp>;
type Inner = <Ad as AutodiffBackend>::InnerBackend;

const LR: f64 = 0.01;
const RATIO: f64 = 8.0;

/// Two experts with `A`, `B` and magnitudes.
fn linear() -> Fc {
    let (group, device) = (Group::<Ad, ExpertTp>::solo(), Default::default());
    let weight = |expert, row, column| (1 + expert + 2 * row + 3 * column) as f32;
    let mut fc: Fc = LinearConfig::new("fc", 4, 6)
        .with_experts(0..2)
        .init(&group, weight, &device)
        .unwrap();
    let config = LoraConfig::new(2, 4.0)
        .with_init_b(Init::Xavier)
        .with_dora(true);
    fc.adapt("fc", &config, &device).unwrap();
    fc.start_magnitudes(&group);
    fc
}

/// The same made-up gradients at every step: no trajectory depends on another.
fn gradients(fc: &Fc, step: usize) -> GradientsParams {
    let mut grads = GradientsParams::new();
    for trained in fc.trained_weights() {
        let Weight::PerExpert(param) = trained.weight else {
            panic!("every expert has its own")
        };
        let values = param.val().inner();
        let grad = (values.ones_like() * (step + 1) as f64) + values.zeros_like().add_scalar(0.5);
        grads.register::<Inner, 3>(param.id, grad);
    }
    grads
}

/// Values of the factors, by name, after these steps.
fn stepped(mut optimizer: impl Optimizer<Fc, Ad>, fc: Fc, lr: f64, steps: usize) -> Vec<Vec<f64>> {
    let mut fc = fc;
    for step in 0..steps {
        let grads = gradients(&fc, step);
        fc = optimizer.step(lr, fc, grads);
    }
    values(&fc)
}

/// Those of `A`, `B` and the magnitudes.
fn values(fc: &Fc) -> Vec<Vec<f64>> {
    let of = |trained: &TrainedWeight<'_, Ad>| -> Vec<f64> {
        let experts = factors(trained.weight);
        experts
            .into_iter()
            .flat_map(|expert| expert.values)
            .collect()
    };
    fc.trained_weights().iter().map(of).collect()
}

fn plus<O>(optimizer: O) -> LoraPlus<O, impl Fn(&Fc) -> Vec<TrainedWeight<'_, Ad>> + Clone + Send> {
    LoraPlus::new(optimizer, RATIO, |fc: &Fc| fc.trained_weights()).unwrap()
}

#[test]
fn b_and_magnitudes_move_ratio_times_as_far_under_sgd_and_a_as_ever() {
    let fc = linear();
    let start = values(&fc);
    let plain = stepped(SgdConfig::new().init(), fc.clone(), LR, 1);
    let found = stepped(plus(SgdConfig::new().init::<Ad, Fc>()), fc, LR, 1);
    for (factor, ratio) in [(0, 1.0), (1, RATIO), (2, RATIO)] {
        for at in 0..start[factor].len() {
            let moved = |to: &[Vec<f64>]| to[factor][at] - start[factor][at];
            let (found, expected) = (moved(&found), ratio * moved(&plain));
            assert!(
                (found - expected).abs() < 2e-6 * (1.0 + start[factor][at].abs()),
                "factor {factor}: {found} instead of {expected}"
            );
            assert!(expected.abs() > 1e-3, "factor {factor} moves");
        }
    }
}

#[test]
fn moments_and_counts_of_adamw_are_those_of_one_optimizer_a_group() {
    let fc = linear();
    let adam = || AdamWConfig::new().with_weight_decay(0.1).init::<Ad, Fc>();
    let found = stepped(plus(adam()), fc.clone(), LR, 3);
    let slow = stepped(adam(), fc.clone(), LR, 3);
    let fast = stepped(adam(), fc.clone(), LR * RATIO, 3);
    // To the bit: a state that another group had stepped too would count its steps twice.
    assert_eq!(found, [slow[0].clone(), fast[1].clone(), fast[2].clone()]);
    assert_ne!(found[1], slow[1]);

    let mut optimizer = plus(adam());
    let grads = gradients(&fc, 0);
    let fc = optimizer.step(LR, fc, grads);
    assert_eq!(Optimizer::<Fc, Ad>::to_record(&optimizer).len(), 3);
    // State that was saved goes on.
    let record = Optimizer::<Fc, Ad>::to_record(&optimizer);
    let mut resumed = plus(adam()).load_record(record);
    let (first, second) = (gradients(&fc, 1), gradients(&fc, 1));
    let one = values(&optimizer.step(LR, fc.clone(), first));
    assert_eq!(one, values(&resumed.step(LR, fc, second)));
}

/// What the module trains beside adapters, such as a router, is no `B`.
struct Halve;

impl ModuleMapper<Ad> for Halve {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Ad, D>>) -> Param<Tensor<Ad, D>> {
        param.map(|values| Tensor::from_inner(values.inner() * 0.5).require_grad())
    }
}

#[test]
fn parameters_that_are_no_factors_take_the_rate_of_a() {
    let fc = linear().map(&mut Halve);
    let Weight::PerExpert(weight) = &fc.weight.weight else {
        panic!("every expert has its own")
    };
    let (id, before) = (weight.id, weight.val().inner());
    let mut grads = gradients(&fc, 0);
    grads.register::<Inner, 3>(id, before.ones_like());
    let fc = plus(SgdConfig::new().init::<Ad, Fc>()).step(LR, fc, grads);
    let moved = before - fc.weight.weight.stacked().inner();
    let error = (moved - LR).abs().max().into_scalar();
    assert!(error < 1e-6, "{error}");
}

#[test]
fn a_ratio_that_is_not_above_zero_is_refused() {
    for ratio in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let optimizer = SgdConfig::new().init::<Ad, Fc>();
        let refused = LoraPlus::new(optimizer, ratio, |fc: &Fc| fc.trained_weights());
        let error = refused.err().expect("it is no ratio");
        assert!(matches!(error, AdapterError::LearningRateRatio { .. }));
    }
    let error = AdapterError::LearningRateRatio { ratio: 0.0 };
    assert_eq!(
        error.to_string(),
        "the ratio of learning rates 0 is not above zero (choose one such as 16)"
    );
}
