//! Dropout before A and after B: at every topology output and all gradients equal those of one device
//! that folds each token's mask into the factors.

use burn::backend::Flex;
use burn::module::AutodiffModule;
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Activation, ColumnLinear, Dropout, LinearConfig, LoraConfig, Sharing, TokenIds,
};
use moe_lora_experts::{MoeLayer, WeighAt};
use moe_lora_kernels::{Compute, DropoutKey, DropoutMask, Layout, RowGroups, shrink_dropped};
use moe_lora_parallel::{Group, Mesh, TopologyConfig, Tp, range_of};
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Matrix, Mocked, Ranks, SHARING, assert_close, assert_far, noise,
    panic_message, unshard,
};
use moe_lora_tests::dense::{self, COLUMN_AXES, Sum, row_axes, tp};
use moe_lora_tests::dropout::tokens;
use moe_lora_tests::grouped::{self, COUNTS, KINDS};
use moe_lora_tests::moe::{self, shared};

const P: f64 = 0.4;
const DROPOUTS: [fn(f64) -> Dropout; 2] = [Dropout::before_a, Dropout::after_b];

#[test]
fn a_layer_with_dropout_is_exact_at_every_topology() {
    for place in moe::everywhere() {
        for dropout in DROPOUTS {
            for sharing in SHARING {
                for gate_up in [GateUpTargets::Fused, GateUpTargets::Separate] {
                    for (weigh_at, shared) in [
                        (WeighAt::Output, None),
                        (WeighAt::Hidden, shared(true, false)),
                        (WeighAt::Output, shared(false, true)),
                    ] {
                        let case = moe::case(sharing, gate_up, DType::F32);
                        let config = case.config.with_dropout(dropout(P)).with_seed(11);
                        let case = moe::Case {
                            config,
                            weigh_at,
                            shared,
                            ..case
                        };
                        case.check::<Ad>(&Mocked, &place);
                    }
                }
            }
        }
    }
}

#[test]
fn a_dora_layer_whose_adapters_drop_is_exact_with_the_lengths_of_all_of_it() {
    for place in moe::everywhere() {
        for dropout in DROPOUTS {
            let case = moe::case(Sharing::PerExpert, GateUpTargets::Separate, DType::F32);
            let case = moe::Case {
                config: case.config.with_dropout(dropout(P)).with_dora(true),
                shared: shared(true, true),
                ..case
            };
            case.check::<Ad>(&Mocked, &place);
        }
    }
}

#[test]
fn linears_of_experts_with_dropout_are_exact() {
    for dropout in DROPOUTS {
        for kind in KINDS {
            for (activation, sharing, dora) in [
                (Activation::Identity, Sharing::PerExpert, false),
                (Activation::Identity, Sharing::PerExpert, true),
                (Activation::Silu, Sharing::PerExpert, false),
                (Activation::Identity, Sharing::SharedOuter, false),
                (Activation::Silu, Sharing::SharedOuter, false),
            ] {
                let config = LoraConfig::new(grouped::RANK, grouped::ALPHA)
                    .with_activation(activation)
                    .with_sharing(sharing)
                    .with_dora(dora)
                    .with_dropout(dropout(P));
                for counts in COUNTS {
                    let case = grouped::Case::new(kind, config, counts);
                    for size in [1, 2, 4] {
                        let found = case.found::<Ad>(&Mocked, size);
                        let name = case.name(size);
                        grouped::check(&name, DType::F32, &found, &case.expected());
                    }
                }
            }
        }
    }
}

#[test]
fn dense_linears_with_dropout_are_exact() {
    let configs = DROPOUTS.map(|dropout| {
        let config = LoraConfig::new(dense::RANK, dense::ALPHA).with_dropout(dropout(P));
        [config, config.with_dora(true)]
    });
    for config in configs.concat() {
        let case = dense::Case::new(config);
        for size in [1, 2, 4] {
            let run =
                |body: &(dyn Fn(&_, &_) -> _ + Sync)| Ranks::<Ad>::run(&Mocked, tp(size), body);
            let found = run(&|mesh, device| case.column(mesh, device));
            case.check("column", &found, COLUMN_AXES);
            for sum in [Sum::Here, Sum::ByTheCaller, Sum::OverTokens] {
                let found = run(&|mesh, device| case.row(mesh, device, sum));
                case.check(&format!("row {sum:?}"), &found, row_axes(sum));
            }
            let found = run(&|mesh, device| case.replicated(mesh, device));
            case.check("replicated", &found, [Axis::Whole; 4]);
        }
    }
}

// ---- what the mask is of -----------------------------------------------------------------------

/// The output of a column-parallel linear for rows of these ids.
fn output(config: &LoraConfig, x: &Matrix, tokens: TokenIds) -> Matrix {
    let (group, device) = (Group::<Ad, Tp>::solo(), Default::default());
    let value = |_, row, column| ((row * 5 + column * 3) % 7) as f32;
    let mut fc: ColumnLinear<Ad, Tp> = LinearConfig::new("fc", x.columns, 6)
        .init(&group, value, &device)
        .unwrap();
    let lora = fc.adapt("fc", config, &device).unwrap();
    let [a, b] = [(4, x.columns), (6, 4)].map(|(rows, columns)| noise(5, rows, columns).to_f32());
    lora.load(&a, &b, &device).unwrap();
    let rows = RowGroups::padded(&[tokens.ids().len()], x.rows).unwrap();
    let x = group.fanout(x.tensor(DType::F32));
    Matrix::read(fc.forward(x, &rows.with_tokens(tokens)).into_tensor())
}

fn config(dropout: Dropout) -> LoraConfig {
    LoraConfig::new(4, 8.0).with_dropout(dropout)
}

#[test]
fn steps_seeds_and_ranks_of_other_tokens_draw_other_masks() {
    let x = noise(1, 6, 8);
    for dropout in DROPOUTS {
        let config = config(dropout(P));
        let base = output(&config, &x, TokenIds::new(0, 0..6));
        assert_eq!(base, output(&config, &x, TokenIds::new(0, 0..6)));
        assert_far("step", &output(&config, &x, TokenIds::new(1, 0..6)), &base);
        // Another data-parallel rank.
        assert_far("rank", &output(&config, &x, TokenIds::new(0, 6..12)), &base);
        let seed = output(&config.with_seed(1), &x, TokenIds::new(0, 0..6));
        assert_far("seed", &seed, &base);
    }
}

#[test]
fn padding_and_the_order_of_rows_change_no_mask() {
    let x = noise(1, 6, 8);
    let order = [3, 0, 5, 2, 1, 4];
    for dropout in DROPOUTS {
        let config = config(dropout(P));
        let base = output(&config, &x, TokenIds::new(0, 10..16));
        let ids = TokenIds::new(0, order.map(|row| 10 + row as u64));
        let permuted = output(&config, &x.pick_rows(order), ids);
        assert_eq!(permuted, base.pick_rows(order));
        let padded = Matrix::stack(&[x.clone(), noise(2, 3, 8)]);
        let padded = output(&config, &padded, TokenIds::new(0, 10..16));
        assert_eq!(padded.pick_rows(0..6), base);
    }
}

#[test]
fn rows_without_ids_are_refused_in_training_and_need_none_in_evaluation() {
    for dropout in DROPOUTS {
        let case = moe::case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32);
        let config = case.config.with_dropout(dropout(P));
        let (case, mesh, device) = (
            moe::Case { config, ..case },
            Mesh::<Ad>::solo(),
            Default::default(),
        );
        let (moe, x) = (case.oracle(), moe::data(5).0);
        let layer = case.layer(&moe, &mesh, &device);
        assert_eq!(
            panic_message(|| layer.forward(x.tensor(DType::F32), &mesh)),
            "moe.experts.gate_up_proj: dropout of 0.4 has no ids of the tokens (call RowGroups::with_tokens on the rows, or MoeLayer::forward_tokens)"
        );
        let tokens = tokens(0..5);
        let dropped = layer.forward_tokens(x.tensor(DType::F32), &tokens, &mesh);
        let (mut layer, mesh) = (layer.valid(), mesh.cast::<Flex>());
        let output = |layer: &MoeLayer<Flex>| {
            Matrix::read(layer.forward_tokens(x.tensor(DType::F32), &tokens, &mesh))
        };
        let y = output(&layer);
        let close = |what, found: &Matrix, expected: &Matrix| {
            assert_close(what, found, expected, DType::F32, moe::REDUCTION);
        };
        close("evaluation", &y, &moe.forward(&x));
        assert_eq!(Matrix::read(layer.forward(x.tensor(DType::F32), &mesh)), y);
        assert_far("training", &Matrix::read(dropped), &y);
        layer.merge(&mesh).unwrap();
        close("merged", &output(&layer), &y);
    }
}

// ---- negative controls -------------------------------------------------------------------------

#[test]
fn ids_that_each_rank_counts_for_itself_give_another_layer() {
    for dropout in DROPOUTS {
        let case = moe::case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32);
        let config = case.config.with_dropout(dropout(P));
        let case = moe::Case { config, ..case };
        let (moe, dealt) = (case.oracle(), [4, 5]);
        let topology = TopologyConfig::new(2).with_ep(2).init().unwrap();
        let expected = case.expected(&moe, 9).y;
        let run = |local: bool| {
            let parts = Ranks::<Ad>::run(&Mocked, topology, |mesh, device| {
                let own = range_of(&dealt, mesh.rank());
                let ids = if local { 0..own.len() } else { own.clone() };
                let x = moe::data(9).0.pick_rows(own).tensor(DType::F32);
                let layer = case.layer(&moe, mesh, device);
                Matrix::read(layer.forward_tokens(x, &tokens(ids), mesh))
            });
            unshard(&parts, Axis::Tokens)
        };
        assert_close(
            "global ids",
            &run(false),
            &expected,
            DType::F32,
            moe::REDUCTION,
        );
        assert_far("local ids", &run(true), &expected);
    }
}

#[test]
fn features_that_each_rank_counts_for_itself_give_another_product() {
    let (x, a) = (noise(1, 6, 8), noise(2, 4, 8));
    let rows = RowGroups::whole(6).with_tokens(tokens(0..6));
    let mask = DropoutMask::new(P, DropoutKey { seed: 0, layer: 7 }, &rows);
    let expected = Matrix::build(6, 8, |row, feature| {
        let kept = mask.keeps(rows.tokens().unwrap().ids()[row], 0, feature);
        if kept {
            x.at(row, feature) / (1.0 - P)
        } else {
            0.0
        }
    });
    let expected = expected.times(&a.transposed());
    // The terms of two ranks that hold four columns each.
    let sum = |mask: &dyn Fn(usize) -> DropoutMask| {
        let term = |rank: usize| {
            let columns = 4 * rank..4 * rank + 4;
            let x: Tensor<Flex, 2> = x.columns(columns.clone()).tensor(DType::F32);
            let a = a.columns(columns).tensor::<Flex>(DType::F32).unsqueeze();
            let (rows, compute) = (RowGroups::whole(6), Compute::default());
            let z = shrink_dropped(x, &mask(rank), a, &rows, Layout::ByToken, compute);
            Matrix::read(z)
        };
        term(0).plus(&term(1))
    };
    let right = sum(&|rank| {
        mask.clone()
            .with_features(std::slice::from_ref(&(4 * rank..4 * rank + 4)))
    });
    assert_close("global features", &right, &expected, DType::F32, 12);
    assert_far("local features", &sum(&|_| mask.clone()), &expected);
}
