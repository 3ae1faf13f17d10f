//! Where every element of every family's experts lies on disk.

mod folders;
mod made;

use folders::assert_contains;
use made::{EXPERTS, FLOATS, Family, LAYERS, Made};
use moe_lora_interchange::{
    Activation, ExpertAdapter, ExpertBiases, FactorPair, GateUp, HostTensor, HubModel, ModelConfig,
    PeftAdapter, PeftLayout, Router, SharedExpert,
};
use safetensors::Dtype;
use serde_json::{Value, json};

/// `[H, F]`: one where no two axes are alike, and one where `2F = H`, as in many real models.
const SIZES: [[usize; 2]; 2] = [[6, 5], [8, 4]];

/// Checks all experts of a layer against the element that `at` says each one is.
fn check_experts(
    made: &Made,
    layer: usize,
    [hidden, ffn]: [usize; 2],
    gate: impl Fn(usize, usize, usize) -> (String, Vec<usize>),
    up: impl Fn(usize, usize, usize) -> (String, Vec<usize>),
    down: impl Fn(usize, usize, usize) -> (String, Vec<usize>),
) {
    let weights = made.open().expert_weights(layer).unwrap();
    assert_eq!(weights.gate.shape(), [EXPERTS, ffn, hidden]);
    assert_eq!(weights.up.shape(), [EXPERTS, ffn, hidden]);
    assert_eq!(weights.down.shape(), [EXPERTS, hidden, ffn]);
    let element = |(name, index): (String, Vec<usize>)| made.element(&name, &index);
    for expert in 0..EXPERTS {
        for f in 0..ffn {
            for h in 0..hidden {
                let at = |tensor: &HostTensor, i| tensor.outer(expert)[i];
                let case = format!("layer {layer}, expert {expert}, f {f}, h {h}");
                let found = at(&weights.gate, f * hidden + h);
                assert_eq!(found, element(gate(expert, f, h)), "gate of {case}");
                let found = at(&weights.up, f * hidden + h);
                assert_eq!(found, element(up(expert, f, h)), "up of {case}");
                let found = at(&weights.down, h * ffn + f);
                assert_eq!(found, element(down(expert, f, h)), "down of {case}");
            }
        }
    }
}

/// Checks experts that lie one by one under `block`.
fn check_one_by_one(
    made: &Made,
    layer: usize,
    sizes: [usize; 2],
    block: &str,
    [gate, up, down]: [&str; 3],
) {
    let name = |expert, projection| {
        format!("model.layers.{layer}.{block}.experts.{expert}.{projection}.weight")
    };
    check_experts(
        made,
        layer,
        sizes,
        |expert, f, h| (name(expert, gate), vec![f, h]),
        |expert, f, h| (name(expert, up), vec![f, h]),
        |expert, f, h| (name(expert, down), vec![h, f]),
    );
}

fn expect_tensor(made: &Made, tensor: &HostTensor, name: &str, shape: &[usize]) {
    assert_eq!(tensor.shape(), shape, "{name}");
    assert_eq!(*tensor, made.open().tensor(name).unwrap(), "{name}");
}

#[test]
fn mixtral_gates_by_w1_and_multiplies_by_w3() {
    for sizes in SIZES {
        let made = Family::mixtral(sizes).write(Dtype::F32, 1);
        let model = made.open();
        for layer in 0..LAYERS {
            check_one_by_one(&made, layer, sizes, "block_sparse_moe", ["w1", "w3", "w2"]);
            let router = model.router(layer).unwrap();
            let name = format!("model.layers.{layer}.block_sparse_moe.gate.weight");
            expect_tensor(&made, &router.weight, &name, &[EXPERTS, sizes[0]]);
            assert!(router.bias.is_none());
            assert!(model.shared_expert(layer).unwrap().is_none());
        }
        let config = model.config();
        let router = Router::SoftmaxThenTopK { renormalize: true };
        assert_eq!(
            (config.router, config.activation),
            (router, Activation::Swiglu)
        );
        assert_eq!(config.attention.unwrap().head_dim, sizes[0] / 2);
    }
}

#[test]
fn deepseek_v3_has_dense_layers_first_and_shared_experts_as_one() {
    for [hidden, ffn] in SIZES {
        let made = Family::deepseek_v3([hidden, ffn]).write(Dtype::F32, 1);
        let model = made.open();
        let config = model.config();
        assert!(config.moe_layers().eq([1, 2]) && !config.is_moe(0) && !config.is_moe(3));
        for error in [
            model.expert_weights(0).unwrap_err(),
            model.router(0).unwrap_err(),
            model.shared_expert(0).unwrap_err(),
        ] {
            let message = "layer 0 has no experts (the first layer that has some is 1)";
            assert_eq!(error.to_string(), message);
        }
        // The layer that predicts further tokens is not one of the model's.
        let error = model.expert_weights(3).unwrap_err().to_string();
        assert_contains(&error, &["layer 3 is not in", "num_hidden_layers=3"]);

        for layer in [1, 2] {
            let names = ["gate_proj", "up_proj", "down_proj"];
            check_one_by_one(&made, layer, [hidden, ffn], "mlp", names);
            let block = format!("model.layers.{layer}.mlp");
            let router = model.router(layer).unwrap();
            let weight = format!("{block}.gate.weight");
            expect_tensor(&made, &router.weight, &weight, &[EXPERTS, hidden]);
            let bias = format!("{block}.gate.e_score_correction_bias");
            expect_tensor(&made, &router.bias.unwrap(), &bias, &[EXPERTS]);
            let shared = model.shared_expert(layer).unwrap().unwrap();
            assert!(shared.output_gate.is_none());
            for (tensor, name, shape) in [
                (&shared.gate, "gate_proj", [2 * ffn, hidden]),
                (&shared.up, "up_proj", [2 * ffn, hidden]),
                (&shared.down, "down_proj", [hidden, 2 * ffn]),
            ] {
                let name = format!("{block}.shared_experts.{name}.weight");
                expect_tensor(&made, tensor, &name, &shape);
            }
        }
        let shared = SharedExpert {
            intermediate_size: 2 * ffn,
            gated: false,
        };
        let router = Router::GroupedSigmoid {
            groups: 2,
            top_groups: 1,
            renormalize: true,
            scale: 2.5,
        };
        assert_eq!(config.shared_expert, Some(shared));
        assert_eq!((config.router, config.attention), (router, None));
    }
}

#[test]
fn gpt_oss_transposes_and_lets_gate_and_up_take_turns() {
    for [hidden, ffn] in SIZES {
        let made = Family::gpt_oss([hidden, ffn]).write(Dtype::F32, 1);
        let model = made.open();
        for layer in 0..LAYERS {
            let name = |name: &str| format!("model.layers.{layer}.mlp.{name}");
            check_experts(
                &made,
                layer,
                [hidden, ffn],
                |e, f, h| (name("experts.gate_up_proj"), vec![e, h, 2 * f]),
                |e, f, h| (name("experts.gate_up_proj"), vec![e, h, 2 * f + 1]),
                |e, f, h| (name("experts.down_proj"), vec![e, f, h]),
            );
            let weights = model.expert_weights(layer).unwrap();
            let biases = weights.biases.unwrap();
            let fused = name("experts.gate_up_proj_bias");
            for e in 0..EXPERTS {
                for f in 0..ffn {
                    let gate = made.element(&fused, &[e, 2 * f]);
                    let up = made.element(&fused, &[e, 2 * f + 1]);
                    let found = [&biases.gate, &biases.up].map(|bias| bias.outer(e)[f]);
                    assert_eq!(found, [gate, up]);
                }
            }
            let down = name("experts.down_proj_bias");
            expect_tensor(&made, &biases.down, &down, &[EXPERTS, hidden]);
            let router = model.router(layer).unwrap();
            let weight = name("router.weight");
            expect_tensor(&made, &router.weight, &weight, &[EXPERTS, hidden]);
            expect_tensor(
                &made,
                &router.bias.unwrap(),
                &name("router.bias"),
                &[EXPERTS],
            );

            // Negative control: the halves of the columns have the right shapes and are wrong.
            let stored = model.tensor(&name("experts.gate_up_proj")).unwrap();
            let halves = (0..EXPERTS).flat_map(|e| {
                let matrix = stored.outer(e);
                (0..ffn).flat_map(move |f| (0..hidden).map(move |h| matrix[h * 2 * ffn + f]))
            });
            let halves = HostTensor::new([EXPERTS, ffn, hidden], halves.collect()).unwrap();
            assert_eq!(halves.shape(), weights.gate.shape());
            assert_ne!(halves, weights.gate);
        }
        let config = model.config();
        let activation = Activation::ClampedSwiglu {
            alpha: 1.702,
            limit: 7.0,
        };
        assert_eq!(config.activation, activation);
        assert_eq!(
            (config.router, config.attention),
            (Router::TopKThenSoftmax, None)
        );
    }
}

#[test]
fn experts_that_transformers_5_stacked_have_gate_rows_first() {
    for [hidden, ffn] in SIZES {
        let made = Family::mixtral_stacked([hidden, ffn]).write(Dtype::F32, 1);
        let fused = |layer| format!("model.layers.{layer}.mlp.experts.gate_up_proj");
        let down = |layer| format!("model.layers.{layer}.mlp.experts.down_proj");
        for layer in 0..LAYERS {
            check_experts(
                &made,
                layer,
                [hidden, ffn],
                |e, f, h| (fused(layer), vec![e, f, h]),
                |e, f, h| (fused(layer), vec![e, ffn + f, h]),
                |e, f, h| (down(layer), vec![e, h, f]),
            );
            let router = made.open().router(layer).unwrap();
            let name = format!("model.layers.{layer}.mlp.gate.weight");
            expect_tensor(&made, &router.weight, &name, &[EXPERTS, hidden]);
        }
    }
}

#[test]
fn layers_that_are_listed_as_dense_have_no_experts() {
    let made = Family::qwen3_moe([6, 5]).write(Dtype::F32, 1);
    let model = made.open();
    assert!(model.config().moe_layers().eq([0, 2]));
    for layer in [0, 2] {
        let names = ["gate_proj", "up_proj", "down_proj"];
        check_one_by_one(&made, layer, [6, 5], "mlp", names);
    }
    let message = model.expert_weights(1).unwrap_err().to_string();
    assert_contains(&message, &["layer 1 has no experts", "first", "is 0"]);

    let mut family = Family::qwen3_moe([6, 5]);
    family.config["mlp_only_layers"] = json!([]);
    family.config["decoder_sparse_step"] = json!(2);
    assert!(
        family
            .write(Dtype::F32, 1)
            .open()
            .config()
            .moe_layers()
            .eq([1])
    );
}

#[test]
fn halves_are_widened_from_where_they_lie() {
    for dtype in FLOATS {
        let made = Family::gpt_oss([6, 5]).write(dtype, 2);
        let weights = made.open().expert_weights(2).unwrap();
        let name = "model.layers.2.mlp.experts.gate_up_proj";
        assert_eq!(
            weights.up.outer(3)[4 * 6 + 5],
            made.element(name, &[3, 5, 9])
        );
    }
}

#[test]
fn both_generations_of_transformers_describe_a_model_alike() {
    let newer = |mut family: Family, changes: &[(&str, Option<Value>)]| {
        let fields = family.config.as_object_mut().unwrap();
        for (field, value) in changes {
            match value {
                Some(value) => fields.insert((*field).to_owned(), value.clone()),
                None => fields.remove(*field),
            };
        }
        family.write(Dtype::F32, 1).open().config().clone()
    };
    let rope = |theta: f64| Some(json!({"rope_theta": theta, "rope_type": "default"}));
    let sizes = [6, 5];
    let older = |family: Family| -> ModelConfig { newer(family, &[]) };
    assert_eq!(
        older(Family::mixtral(sizes)),
        newer(
            Family::mixtral(sizes),
            &[
                ("rope_theta", None),
                ("rope_parameters", rope(1e6)),
                ("head_dim", None)
            ]
        )
    );
    // transformers leaves out what the model's own code reads.
    assert_eq!(
        older(Family::deepseek_v3(sizes)),
        newer(
            Family::deepseek_v3(sizes),
            &[
                ("scoring_func", None),
                ("topk_method", None),
                ("moe_layer_freq", None),
                ("rope_theta", None),
                ("rope_scaling", None),
                ("rope_parameters", rope(1e4)),
                ("num_local_experts", Some(json!(EXPERTS))),
            ]
        )
    );
    assert_eq!(
        older(Family::gpt_oss(sizes)),
        newer(
            Family::gpt_oss(sizes),
            &[
                ("experts_per_token", None),
                ("swiglu_alpha", Some(json!(1.702))),
                ("num_local_experts", None),
                ("num_experts", Some(json!(EXPERTS))),
                ("rope_theta", None),
                ("rope_parameters", rope(150000.0)),
            ]
        )
    );
}

#[test]
fn settings_that_would_change_the_numbers_are_refused_by_name() {
    type Make = fn([usize; 2]) -> Family;
    let cases: [(Make, &str, Value, [&str; 2]); 13] = [
        (
            Family::mixtral,
            "hidden_act",
            json!("gelu"),
            ["hidden_act=\"gelu\"", "silu"],
        ),
        (
            Family::mixtral,
            "sliding_window",
            json!(4096),
            ["sliding_window=4096", "null"],
        ),
        (
            Family::mixtral,
            "num_local_experts",
            json!(0),
            ["num_local_experts=0", "from 1"],
        ),
        (
            Family::deepseek_v3,
            "scoring_func",
            json!("softmax"),
            ["scoring_func=\"softmax\"", "sigmoid"],
        ),
        (
            Family::deepseek_v3,
            "topk_method",
            json!("greedy"),
            ["topk_method=\"greedy\"", "noaux_tc"],
        ),
        (
            Family::deepseek_v3,
            "moe_layer_freq",
            json!(2),
            ["moe_layer_freq=2", "1"],
        ),
        (
            Family::deepseek_v3,
            "first_k_dense_replace",
            json!(3),
            ["num_hidden_layers=3", "layers with experts"],
        ),
        (
            Family::deepseek_v3,
            "n_group",
            json!(3),
            ["n_group=3", "a divisor of the 4 experts"],
        ),
        (
            Family::deepseek_v3,
            "n_group",
            json!(4),
            ["n_group=4", "two a group or more"],
        ),
        (
            Family::deepseek_v3,
            "topk_group",
            json!(3),
            ["topk_group=3", "from 1 to 2"],
        ),
        (
            Family::deepseek_v3,
            "num_experts_per_tok",
            json!(3),
            ["num_experts_per_tok=3", "from 1 to 2"],
        ),
        (
            Family::deepseek_v3,
            "n_shared_experts",
            json!(1u64 << 31),
            ["n_shared_experts=2147483648", "from 1 to"],
        ),
        (
            Family::gpt_oss,
            "swiglu_limit",
            json!(0),
            ["swiglu_limit=0", "above 0"],
        ),
    ];
    for (make, field, value, parts) in cases {
        let mut family = make([6, 5]);
        family.config[field] = value;
        let made = family.write(Dtype::F32, 1);
        let message = HubModel::open(made.folder.path()).unwrap_err().to_string();
        assert_contains(&message, &parts);
    }
    for (make, field) in [
        (Family::mixtral as Make, "num_local_experts"),
        (Family::deepseek_v3, "n_routed_experts"),
        (Family::deepseek_v3, "n_shared_experts"),
        (Family::deepseek_v3, "first_k_dense_replace"),
        (Family::deepseek_v3, "routed_scaling_factor"),
        (Family::gpt_oss, "intermediate_size"),
    ] {
        let mut family = make([6, 5]);
        family.config.as_object_mut().unwrap().remove(field);
        let made = family.write(Dtype::F32, 1);
        let message = HubModel::open(made.folder.path()).unwrap_err().to_string();
        assert_contains(&message, &[&format!("no field {field:?}")]);
    }
}

#[test]
fn quantised_weights_are_refused_with_the_way_out() {
    let mut family = Family::deepseek_v3([6, 5]);
    family.config["quantization_config"] = json!({"quant_method": "fp8"});
    let made = family.write(Dtype::F32, 1);
    let message = HubModel::open(made.folder.path()).unwrap_err().to_string();
    assert_contains(
        &message,
        &[
            "\"quantization_config\"",
            "dequantise the model to bf16 first",
        ],
    );

    for name in [
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.mlp.experts.down_proj_scales",
        "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv",
        "model.layers.1.mlp.experts.0.gate_proj.qweight",
    ] {
        let mut family = Family::gpt_oss([6, 5]);
        family.tensors.insert(name.to_owned(), vec![2]);
        let made = family.write(Dtype::F32, 1);
        let message = HubModel::open(made.folder.path()).unwrap_err().to_string();
        assert_contains(&message, &[name, "dequantise the model to bf16 first"]);
    }
}

#[test]
fn experts_that_do_not_fit_the_files_are_not_turned_into_tensors() {
    let mixtral = Family::mixtral([6, 5]).write(Dtype::F32, 1).open();
    let gpt_oss = Family::gpt_oss([6, 5]).write(Dtype::F32, 1).open();
    let biased = gpt_oss.expert_weights(0).unwrap();
    let message = biased
        .clone()
        .into_hub(0, &mixtral)
        .unwrap_err()
        .to_string();
    assert_contains(&message, &["layer 0", "biases", "mixtral"]);

    let mut square = biased.clone();
    square.down = square.gate.clone();
    let message = square.into_hub(1, &gpt_oss).unwrap_err().to_string();
    assert_contains(
        &message,
        &["down_proj of layer 1", "[4, 5, 6]", "expected [4, 6, 5]"],
    );

    let mut short = biased.clone();
    let biases: &mut ExpertBiases = short.biases.as_mut().unwrap();
    biases.gate = HostTensor::new([EXPERTS, 4], vec![0.0; 4 * EXPERTS]).unwrap();
    assert!(short.into_hub(1, &gpt_oss).is_err());

    // Without biases, only the weights are replaced.
    let mut weights = biased;
    weights.biases = None;
    let tensors = weights.into_hub(0, &gpt_oss).unwrap();
    assert!(tensors.keys().all(|name| !name.ends_with("_bias")) && tensors.len() == 2);
}

#[test]
fn a_stacked_parameter_of_another_shape_is_named() {
    // As if the parameter had not been transposed.
    let mut family = Family::gpt_oss([6, 5]);
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    family.tensors.insert(name.to_owned(), vec![EXPERTS, 10, 6]);
    let made = family.write(Dtype::F32, 1);
    let message = made.open().expert_weights(0).unwrap_err().to_string();
    assert_contains(&message, &[name, "[4, 10, 6]", "expected [4, 6, 10]"]);
}

/// Rank 1 on gate, up and down of the layers of `[H, F]`.
fn adapter(layers: &[usize], [hidden, ffn]: [usize; 2]) -> PeftAdapter {
    let pair = |d_in: usize, d_out: usize| {
        let tensor = |shape: [usize; 3], first: f32| {
            let values = (0..shape.iter().product()).map(|i: usize| first + i as f32);
            HostTensor::new(shape, values.collect()).unwrap()
        };
        let (a, b) = (
            tensor([EXPERTS, 1, d_in], 1.0),
            tensor([EXPERTS, d_out, 1], 100.0),
        );
        FactorPair::new(a, b, 2.0).unwrap()
    };
    let factors = ExpertAdapter {
        gate_up: Some(GateUp::Separate {
            gate: pair(hidden, ffn),
            up: pair(hidden, ffn),
        }),
        down: Some(pair(ffn, hidden)),
    };
    PeftAdapter {
        rslora: false,
        layers: layers
            .iter()
            .map(|layer| (*layer, factors.clone()))
            .collect(),
    }
}

#[test]
fn adapters_take_the_names_and_the_layers_of_the_family() {
    let sizes = [6, 5];
    for (family, all, some, name) in [
        (
            Family::mixtral(sizes),
            &[0, 1, 2][..],
            &[1][..],
            "model.layers.1.block_sparse_moe.experts.3.w3",
        ),
        (
            Family::deepseek_v3(sizes),
            &[1, 2],
            &[1],
            "model.layers.1.mlp.experts.3.up_proj",
        ),
    ] {
        let model = family.write(Dtype::F32, 1).open();
        for layers in [all, some] {
            let folder = tempfile::tempdir().unwrap();
            let written = adapter(layers, sizes);
            let layout = PeftLayout::PerExpert;
            written
                .write(folder.path(), model.config(), layout, "base")
                .unwrap();
            let bytes = std::fs::read(folder.path().join("adapter_model.safetensors")).unwrap();
            let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert!(
                file.tensor(&format!("base_model.model.{name}.lora_A.weight"))
                    .is_ok()
            );
            let read = PeftAdapter::read(folder.path(), model.config()).unwrap();
            assert_eq!(read, written);
        }
    }
}

#[test]
fn adapters_that_the_family_has_no_place_for_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let message = |family: Family, layers: &[usize]| {
        let model = family.write(Dtype::F32, 1).open();
        let layout = PeftLayout::PerExpert;
        let written = adapter(layers, [6, 5]).write(folder.path(), model.config(), layout, "base");
        written.unwrap_err().to_string()
    };
    let dense = message(Family::deepseek_v3([6, 5]), &[0, 1]);
    assert_contains(&dense, &["layer 0 has no experts"]);
    let no_modules = message(Family::gpt_oss([6, 5]), &[0]);
    assert_contains(&no_modules, &["gpt_oss", "PeftLayout::Stacked"]);
}
