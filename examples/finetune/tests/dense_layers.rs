//! Properties of the dense layers that need no recorded model.

use anyhow::{Result, bail};
use burn::backend::{Autodiff, Flex};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_moe_lora::interchange::QkNorm;
use burn_moe_lora::kernels::GroupedBackend;
use finetune::config::DenseConfig;
use finetune::loss::next_byte_loss;
use finetune::model::CausalLm;

const HIDDEN: usize = 8;

fn config(qk_norm: QkNorm) -> DenseConfig {
    DenseConfig {
        vocab: 16,
        hidden: HIDDEN,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 4,
        eps: 1e-6,
        rope_theta: 1e4,
        qkv_bias: qk_norm == QkNorm::None,
        qk_norm,
        tie: qk_norm == QkNorm::Full,
    }
}

/// Weights that depend on the name alone.
fn made_up(shape: &[usize], name: &str) -> Vec<f32> {
    let mut state = name
        .bytes()
        .fold(7u64, |h, b| h * 31 % 1_000_003 + u64::from(b));
    (0..shape.iter().product())
        .map(|_| {
            state = (state * 48_271 + 11) % 2_147_483_647;
            state as f32 / 2_147_483_647.0 - 0.5
        })
        .collect()
}

/// The shape of a dense tensor, worked out from its hub name.
fn shape_of(config: &DenseConfig, name: &str) -> Vec<usize> {
    let (q, kv) = (
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    );
    let width = |whole| match config.qk_norm {
        QkNorm::Full => whole,
        _ => config.head_dim,
    };
    let stem = name.trim_end_matches(".weight");
    match stem.rsplit('.').next().unwrap() {
        "embed_tokens" | "lm_head" => vec![config.vocab, config.hidden],
        "q_proj" => vec![q, config.hidden],
        "k_proj" | "v_proj" => vec![kv, config.hidden],
        "o_proj" => vec![config.hidden, q],
        "q_norm" => vec![width(q)],
        "k_norm" => vec![width(kv)],
        "bias" if name.contains("q_proj") => vec![q],
        "bias" => vec![kv],
        _ => vec![config.hidden],
    }
}

fn model<B: GroupedBackend>(qk_norm: QkNorm) -> CausalLm<B> {
    let config = config(qk_norm);
    CausalLm::load(&config, &Default::default(), |name| {
        let shape = shape_of(&config, name);
        let values = made_up(&shape, name);
        Ok((shape, values))
    })
    .unwrap()
}

fn ids<B: Backend>(last: i32) -> Tensor<B, 2, Int> {
    Tensor::from_ints([[3, 1, 4, 1, 5], [9, 2, 6, 5, last]], &Default::default())
}

fn weight<B: Backend>() -> Tensor<B, 2> {
    let values = made_up(&[HIDDEN, HIDDEN], "block");
    Tensor::from_data(
        TensorData::new(values, [HIDDEN, HIDDEN]),
        &Default::default(),
    )
}

fn values<const D: usize>(tensor: Tensor<Flex, D>) -> Vec<f32> {
    tensor.into_data().to_vec().unwrap()
}

#[test]
fn a_later_byte_does_not_change_earlier_logits() {
    for qk_norm in [QkNorm::None, QkNorm::PerHead, QkNorm::Full] {
        let model = model::<Flex>(qk_norm);
        let logits = |last| model.forward_with(ids(last), |_, tokens| tokens.matmul(weight()));
        let (one, other) = (logits(3), logits(8));
        let before = |logits: &Tensor<Flex, 3>| values(logits.clone().narrow(1, 0, 4));
        let last =
            |logits: &Tensor<Flex, 3>| values(logits.clone().narrow(1, 4, 1).narrow(0, 1, 1));
        assert_eq!(before(&one), before(&other));
        assert_ne!(last(&one), last(&other));
    }
}

#[test]
fn rows_of_a_batch_do_not_see_each_other() {
    let model = model::<Flex>(QkNorm::PerHead);
    let run = |ids| model.forward_with(ids, |_, tokens| tokens.matmul(weight()));
    let whole = values(run(ids(3)).narrow(0, 1, 1));
    let alone = values(run(ids(3).narrow(0, 1, 1)));
    for (whole, alone) in whole.into_iter().zip(alone) {
        assert!((whole - alone).abs() < 1e-5);
    }
}

#[test]
fn blocks_run_in_order_on_all_tokens() {
    let mut seen = Vec::new();
    model::<Flex>(QkNorm::None).forward_with(ids(3), |layer, tokens| {
        seen.push((layer, tokens.dims()));
        tokens
    });
    assert_eq!(seen, [(0, [10, HIDDEN]), (1, [10, HIDDEN])]);
}

#[test]
fn the_gradient_of_a_block_is_that_of_finite_differences() {
    for qk_norm in [QkNorm::None, QkNorm::PerHead, QkNorm::Full] {
        type A = Autodiff<Flex>;
        let tracked = weight::<A>().require_grad();
        let logits =
            model::<A>(qk_norm).forward_with(ids(3), |_, tokens| tokens.matmul(tracked.clone()));
        let grads = next_byte_loss(logits, ids(3)).sum.backward();
        let grad = values(tracked.grad(&grads).unwrap());

        let plain = model::<Flex>(qk_norm);
        let loss = |weight: Tensor<Flex, 2>| {
            let logits = plain.forward_with(ids(3), |_, tokens| tokens.matmul(weight.clone()));
            f64::from(next_byte_loss(logits, ids(3)).sum.into_scalar())
        };
        // In f32 a single entry drowns in rounding; along the gradient itself the slope is its squared norm.
        let direction = Tensor::<Flex, 2>::from_data(
            TensorData::new(grad.clone(), [HIDDEN, HIDDEN]),
            &Default::default(),
        );
        let squared: f64 = grad.iter().map(|g| f64::from(*g).powi(2)).sum();
        let step = 1e-2 / squared.sqrt();
        let ahead = loss(weight() + direction.clone().mul_scalar(step));
        let behind = loss(weight() - direction.mul_scalar(step));
        let slope = (ahead - behind) / (2.0 * step);
        assert!(squared > 1e-4, "the block gets no gradient");
        assert!(
            (slope - squared).abs() < 2e-3 * squared,
            "{qk_norm:?}: slope {slope}, gradient {squared}"
        );
    }
}

#[test]
#[should_panic(expected = "the block took [10, 8] and returned [9, 8]")]
fn a_block_that_loses_rows_is_named() {
    model::<Flex>(QkNorm::None).forward_with(ids(3), |_, tokens| tokens.narrow(0, 0, 9));
}

fn load_error(mut config: DenseConfig, change: impl Fn(&mut DenseConfig)) -> String {
    let shapes = config.clone();
    change(&mut config);
    let source = |name: &str| -> Result<(Vec<usize>, Vec<f32>)> {
        if name == "model.norm.weight" {
            bail!("no tensor of this name (add it)");
        }
        let shape = shape_of(&shapes, name);
        let values = made_up(&shape, name);
        Ok((shape, values))
    };
    let loaded = CausalLm::<Flex>::load(&config, &Default::default(), source);
    format!("{:#}", loaded.unwrap_err())
}

#[test]
fn weights_that_do_not_fit_the_config_are_named() {
    let plain = || config(QkNorm::None);
    assert_eq!(
        load_error(plain(), |config| config.vocab = 20),
        "weight 'model.embed_tokens.weight' has shape [16, 8] but config.json implies [20, 8] \
         (check that the two files belong to one model)"
    );
    assert!(load_error(plain(), |config| config.kv_heads = 4).contains("k_proj.weight"));
    assert_eq!(
        load_error(plain(), |_| ()),
        "cannot read weight 'model.norm.weight': no tensor of this name (add it)"
    );
    assert!(load_error(plain(), |config| config.kv_heads = 3).contains("not divisible"));
}
