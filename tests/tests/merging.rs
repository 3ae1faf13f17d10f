//! Merged weights: the same bits at every topology, rounded once, and refused where no weight
//! equals the adapter.

use burn::backend::Flex;
use burn::module::list_param_ids;
use burn::tensor::{DType, Tensor, TensorData};
use moe_lora_adapters::{
    Activation, Adaptable, AdapterError, ColumnLinear, Init, LinearConfig, LoraConfig, RowLinear,
    RowLora, Sharing, Targets, Weight,
};
use moe_lora_experts::{MlpBiases, MlpWeights, MoeConfig, MoeLayer, MoeWeights, SharedConfig};
use moe_lora_parallel::{ExpertTp, Group, Mesh, MockWorld, TopologyConfig};
use moe_lora_testkit::{GateUpTargets, noise};

const RANK: usize = 48;
const D_IN: usize = 104;
const D_OUT: usize = 168;

fn config() -> LoraConfig {
    LoraConfig::new(RANK, 40.0).with_init_b(Init::Xavier)
}

fn value(expert: usize, row: usize, column: usize) -> f32 {
    ((expert * 31 + row * 17 + column * 13) % 101) as f32 / 64.0 - 0.75
}

/// Merged full weights of a column- and a row-parallel linear of two experts.
fn merged(ranks: usize) -> [Vec<f32>; 2] {
    let topology = TopologyConfig::new(ranks).with_etp(ranks).init().unwrap();
    let all = MockWorld::new(ranks).run(|rank| {
        let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
        let (group, ep, device) = (mesh.expert_tp(), mesh.ep(), Default::default());
        let mut fc1: ColumnLinear<Flex, ExpertTp> = LinearConfig::new("gate_up", D_IN, D_OUT)
            .with_experts(0..2)
            .with_fragments(["gate", "up"])
            .init(group, value, &device)
            .unwrap();
        let mut fc2: RowLinear<Flex, ExpertTp> = LinearConfig::new("down", D_IN, D_OUT)
            .with_experts(0..2)
            .init(group, value, &device)
            .unwrap();
        fc1.adapt("gate_up", &config(), &device).unwrap();
        fc2.adapt("down", &config(), &device).unwrap();
        fc1.merge(group).unwrap();
        fc2.merge(group).unwrap();
        assert!(fc1.adapters.is_empty() && fc2.adapters.is_empty());
        let host = |full: Tensor<Flex, 3>| full.into_data().to_vec::<f32>().unwrap();
        [
            host(fc1.weight.gather_all(group, ep)),
            host(fc2.weight.gather_all(group, ep)),
        ]
    });
    all.unwrap().swap_remove(0)
}

#[test]
fn merged_weights_of_a_high_rank_have_the_same_bits_at_every_etp() {
    let bits = |merged: [Vec<f32>; 2]| merged.map(|w| w.into_iter().map(f32::to_bits).collect());
    let one: [Vec<u32>; 2] = bits(merged(1));
    for ranks in [2, 4] {
        assert_eq!(bits(merged(ranks)), one, "ETP {ranks}");
    }
}

#[test]
fn a_bf16_base_is_merged_in_f32_and_rounded_once() {
    let (device, group) = (Default::default(), Group::<Flex, ExpertTp>::solo());
    let mut linear: RowLinear<Flex, ExpertTp> = LinearConfig::new("down", 8, 8)
        .with_dtype(DType::BF16)
        .init(&group, value, &device)
        .unwrap();
    let config = LoraConfig::new(4, 5.0)
        .with_init_b(Init::Xavier)
        .with_dtype(DType::BF16);
    let lora = linear.adapt("down", &config, &device).unwrap();
    let host = |w: Tensor<Flex, 3>| w.cast(DType::F32).into_data().to_vec::<f32>().unwrap();
    let (a, b) = (host(lora.a.weight.stacked()), host(lora.b.weight.stacked()));
    let base = host(linear.weight.weight.stacked());
    let merged = linear.merged_weight(&group).unwrap();
    assert_eq!(merged.dtype(), DType::BF16);

    let round = |x: f32| half::bf16::from_f32(x).to_f32();
    let element = |at: usize, round: &dyn Fn(f32) -> f32| {
        let (row, column) = (at / 8, at % 8);
        let terms = (0..4).map(|k| round(b[row * 4 + k] * a[k * 8 + column]));
        let delta = terms.reduce(|sum, term| round(sum + term)).unwrap();
        round(base[at] + round(delta * 1.25))
    };
    let once: Vec<f32> = (0..64).map(|at| round(element(at, &|x| x))).collect();
    assert_eq!(host(merged), once);
    // Negative control: rounding at every operation gives other weights.
    let often: Vec<f32> = (0..64).map(|at| element(at, &round)).collect();
    assert_ne!(once, often);
}

#[test]
fn a_layer_merges_its_shared_experts_too() {
    let (mesh, device) = (Mesh::<Flex>::solo(), Default::default());
    let values = |seed: u64, n: usize| noise(seed, 1, n).to_f32();
    let (router, experts, shared) = (values(1, 32), values(2, 256), values(3, 64));
    let mlp = |w| MlpWeights {
        gate: w,
        up: w,
        down: w,
        biases: None,
    };
    let shared_config = SharedConfig {
        intermediate: 8,
        gated: false,
        overlap: false,
    };
    let mut layer = MoeConfig::new("mlp", 8, 8, 4, 2)
        .with_shared(Some(shared_config))
        .init(
            MoeWeights {
                router: &router,
                experts: mlp(&experts[..]),
                shared: Some((mlp(&shared[..]), None)),
                ..Default::default()
            },
            &mesh,
            &device,
        )
        .unwrap();
    let x = Tensor::<Flex, 2>::from_data(TensorData::new(values(4, 40), [5, 8]), &device);
    let plain = layer.forward(x.clone(), &mesh);
    let shared_only = Targets::new(["*.shared*"]);
    let lora = LoraConfig::new(2, 8.0).with_init_b(Init::Xavier);
    layer.add_adapters(&shared_only, &lora, &device).unwrap();
    let adapted = layer.forward(x.clone(), &mesh);
    layer.merge(&mesh).unwrap();
    assert!(layer.trained_weights().is_empty());
    let merged = layer.forward(x, &mesh);
    let far = |a: Tensor<Flex, 2>| (a - adapted.clone()).abs().max().into_scalar();
    assert!(far(plain) > 1e-2, "the adapter does something");
    assert!(far(merged) < 1e-5);
}

// ---- unmerge -----------------------------------------------------------------------------------

/// A biased layer of bf16 with shared experts and adapters on everything, on one rank.
fn adapted_layer(mesh: &Mesh<Flex>, adapted: bool) -> MoeLayer<Flex> {
    let device = Default::default();
    let values = |seed: u64, n: usize| noise(seed, 1, n).to_f32();
    let (router, experts, shared, biases) =
        (values(1, 32), values(2, 256), values(3, 64), values(5, 32));
    let mlp = |w, biases| MlpWeights {
        gate: w,
        up: w,
        down: w,
        biases,
    };
    let biases = MlpBiases {
        gate: &biases,
        up: &biases,
        down: &biases,
    };
    let weights = MoeWeights {
        router: &router,
        experts: mlp(&experts[..], Some(biases)),
        shared: Some((mlp(&shared[..], None), None)),
        ..Default::default()
    };
    let shared = SharedConfig {
        intermediate: 8,
        gated: false,
        overlap: false,
    };
    let mut layer = MoeConfig::new("mlp", 8, 8, 4, 2)
        .with_shared(Some(shared))
        .with_dtype(DType::BF16)
        .init(weights, mesh, &device)
        .unwrap();
    if adapted {
        let targets = GateUpTargets::Separate.targets();
        let lora = LoraConfig::new(4, 5.3)
            .with_init_b(Init::Xavier)
            .with_dtype(DType::BF16);
        layer.add_adapters(&targets, &lora, &device).unwrap();
    }
    layer
}

/// Values and dtype of every base weight and bias, then of every factor.
fn state(layer: &MoeLayer<Flex>) -> [Vec<TensorData>; 2] {
    let mlps = layer.shared.as_ref().map(|shared| &shared.mlp);
    let mut base: Vec<_> = mlps
        .into_iter()
        .flat_map(|mlp| [&mlp.gate_up.weight.weight, &mlp.down.weight.weight])
        .collect();
    let (gate_up, down) = (&layer.experts.gate_up, &layer.experts.down);
    base.extend([&gate_up.weight.weight, &down.weight.weight]);
    let biases = [&gate_up.bias, &down.bias];
    base.extend(biases.map(|bias| &bias.as_ref().unwrap().weight));
    let data = |weight: &Weight<Flex>| weight.stacked().into_data();
    let factors = layer.trained_weights();
    [
        base.into_iter().map(data).collect(),
        factors.iter().map(|factor| data(factor.weight)).collect(),
    ]
}

/// Runs on every rank of EP = 2, ETP = 2, with a dense group of 2.
fn on_four_ranks(f: impl Fn(Mesh<Flex>) + Sync) {
    let topology = TopologyConfig::new(4).with_tp(2).with_ep(2).with_etp(2);
    let topology = topology.init().unwrap();
    let run = |rank: &_| f(Mesh::new(topology, rank).unwrap());
    MockWorld::new(4).run(|rank| run(&rank)).unwrap();
}

fn output(layer: &MoeLayer<Flex>, mesh: &Mesh<Flex>) -> TensorData {
    let x = noise(4 + mesh.rank() as u64, 3, 8).tensor(DType::BF16);
    layer.forward(x, mesh).into_data()
}

#[test]
fn unmerge_restores_weights_adapters_and_output_to_the_bit() {
    on_four_ranks(|mesh| {
        let mut layer = adapted_layer(&mesh, true);
        let (before, y) = (state(&layer), output(&layer, &mesh));
        let ids = |layer: &MoeLayer<Flex>| list_param_ids(layer);
        let ids_before = ids(&layer);
        let original = layer.merge(&mesh).unwrap();
        let [merged, factors] = state(&layer);
        assert!(factors.is_empty());
        // Four weights are merged; the two biases stay.
        for (at, (merged, before)) in merged.iter().zip(&before[0]).enumerate() {
            assert_eq!(merged == before, at >= 4, "base tensor {at}");
        }
        layer.unmerge(original);
        assert_eq!(state(&layer), before);
        assert_eq!(output(&layer, &mesh), y);
        // An optimizer finds its state again.
        assert_eq!(ids(&layer), ids_before);
    });
}

#[test]
fn a_base_that_is_read_anew_takes_the_adapters_on_again() {
    on_four_ranks(|mesh| {
        let mut layer = adapted_layer(&mesh, true);
        let (before, y) = (state(&layer), output(&layer, &mesh));
        let original = layer.merge(&mesh).unwrap();
        let mut anew = adapted_layer(&mesh, false);
        assert_ne!(state(&anew)[0], state(&layer)[0]);
        let (experts, shared) = (original.experts, original.shared.unwrap().mlp);
        anew.experts.gate_up.adapters = experts.gate_up.adapters;
        anew.experts.down.adapters = experts.down.adapters;
        let anew_shared = &mut anew.shared.as_mut().unwrap().mlp;
        anew_shared.gate_up.adapters = shared.gate_up.adapters;
        anew_shared.down.adapters = shared.down.adapters;
        assert_eq!(state(&anew), before);
        assert_eq!(output(&anew, &mesh), y);
    });
}

#[test]
fn subtracting_the_delta_does_not_restore_the_bits_of_a_bf16_base() {
    on_four_ranks(|mesh| {
        let mut layer = adapted_layer(&mesh, true);
        let group = mesh.expert_tp();
        let down = &mut layer.experts.down;
        let delta = down.adapters[0].delta_weight(group).unwrap();
        let original = down.merge(group).unwrap();
        let merged = down.weight.weight.stacked();
        let subtracted = (merged.cast(DType::F32) - delta).cast(DType::BF16);
        let base = original.weight.weight.stacked().into_data();
        assert_ne!(subtracted.into_data(), base);
        down.unmerge(original);
        assert_eq!(down.weight.weight.stacked().into_data(), base);
    });
}

#[test]
fn merging_again_without_adapters_changes_nothing() {
    on_four_ranks(|mesh| {
        let mut layer = adapted_layer(&mesh, true);
        let original = layer.merge(&mesh).unwrap();
        let (once, ids) = (state(&layer), list_param_ids(&layer));
        let merged = layer.merge(&mesh).unwrap();
        assert_eq!(state(&layer), once);
        assert_eq!(state(&merged), once);
        assert_eq!(list_param_ids(&layer), ids);
        layer.unmerge(merged);
        assert_eq!(state(&layer), once);
        layer.unmerge(original);
        assert_eq!(state(&layer), state(&adapted_layer(&mesh, true)));
    });
}

#[test]
#[should_panic(expected = "unmerge of another linear")]
fn another_linear_is_not_put_in_place() {
    let mut mlp = adapted_layer(&Mesh::solo(), true).experts;
    let group = Group::solo();
    let mut other: RowLinear<Flex, ExpertTp> = LinearConfig::new("other", 8, 8)
        .with_experts(0..4)
        .init(&group, value, &Default::default())
        .unwrap();
    mlp.down.unmerge(other.merge(&group).unwrap());
}

#[test]
fn an_adapter_with_a_function_between_its_factors_is_not_merged() {
    let (device, group) = (Default::default(), Group::<Flex, ExpertTp>::solo());
    let mut linear: RowLinear<Flex, ExpertTp> = LinearConfig::new("down", 4, 4)
        .init(&group, value, &device)
        .unwrap();
    let config = LoraConfig::new(2, 2.0).with_activation(Activation::Silu);
    linear.adapt("down", &config, &device).unwrap();
    let error = linear.merge(&group).unwrap_err();
    assert_eq!(
        error.to_string(),
        "down: an adapter with Silu between A and B equals no weight (merge needs the identity)"
    );
    assert_eq!(linear.adapters.len(), 1);
}

#[test]
fn a_linear_takes_one_adapter_for_the_whole_or_one_a_fragment() {
    let (device, group) = (Default::default(), Group::<Flex, ExpertTp>::solo());
    let mut linear: ColumnLinear<Flex, ExpertTp> = LinearConfig::new("gate_up", 4, 8)
        .with_fragments(["gate", "up"])
        .init(&group, value, &device)
        .unwrap();
    let config = LoraConfig::new(2, 2.0);
    linear.adapt("gate", &config, &device).unwrap();
    linear.adapt("up", &config, &device).unwrap();
    for path in ["gate", "up", "gate_up"] {
        let error = linear.adapt(path, &config, &device).unwrap_err();
        assert!(
            matches!(error, AdapterError::AlreadyAdapted { .. }),
            "{error}"
        );
    }
    let error = linear.adapt("gat", &config, &device).unwrap_err();
    assert!(
        error.to_string().contains("did you mean \"gate\"?"),
        "{error}"
    );
}

#[test]
fn a_layer_refuses_paths_that_it_does_not_have_and_changes_nothing() {
    let (mesh, device) = (Mesh::<Flex>::solo(), Default::default());
    let (router, w) = (vec![0.1; 8], vec![0.1; 16]);
    let experts = MlpWeights {
        gate: &w,
        up: &w,
        down: &w,
        biases: None,
    };
    let weights = MoeWeights {
        router: &router,
        experts,
        ..Default::default()
    };
    let mut layer = MoeConfig::new("mlp", 4, 2, 2, 1)
        .init(weights, &mesh, &device)
        .unwrap();
    let targets = Targets::new(["experts.down_proj", "mlp.experts.down_prj"]);
    let error = layer
        .add_adapters(&targets, &LoraConfig::new(1, 1.0), &device)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("target \"mlp.experts.down_prj\" matches no linear")
    );
    assert!(layer.trained_weights().is_empty());
}

#[test]
fn factors_of_another_size_are_refused_and_the_adapter_stays() {
    let (device, group) = (Default::default(), Group::<Flex, ExpertTp>::solo());
    let mut linear: RowLinear<Flex, ExpertTp> = LinearConfig::new("down", 4, 6)
        .with_experts(0..2)
        .init(&group, value, &device)
        .unwrap();
    let lora = linear
        .adapt("down", &LoraConfig::new(3, 3.0), &device)
        .unwrap();
    let before = lora.a.weight.stacked().into_data();
    let a = |experts: usize| vec![1.0; experts * 3 * 4];
    let b = |experts: usize| vec![1.0; experts * 6 * 3];
    let refused = |lora: &mut RowLora<Flex, ExpertTp>, a: &[f32], b: &[f32], message: &str| {
        let error = lora.load(a, b, &device).unwrap_err().to_string();
        let rest = " (pass the full, unsharded tensor)";
        assert_eq!(error, format!("down: {message}{rest}"));
    };
    for (a, b, message) in [
        (
            a(2),
            b(2)[1..].to_vec(),
            "35 values do not fill shape [2, 6, 3]",
        ),
        (a(4), b(2), "36 values do not fill shape [4, 6, 3]"),
        // No number of experts of which every expert parallel rank holds two.
        (a(1), b(1), "12 values do not fill shape [2, 3, 4]"),
        (a(3), b(3), "36 values do not fill shape [2, 3, 4]"),
        (
            Vec::new(),
            Vec::new(),
            "0 values do not fill shape [2, 3, 4]",
        ),
    ] {
        refused(lora, &a, &b, message);
        assert_eq!(lora.a.weight.stacked().into_data(), before);
    }
    // Of two experts, or of four that two ranks hold.
    for experts in [2, 4] {
        lora.load(&a(experts), &b(experts), &device).unwrap();
        assert_ne!(lora.a.weight.stacked().into_data(), before);
    }

    let mut shared: RowLinear<Flex, ExpertTp> = LinearConfig::new("down", 4, 6)
        .with_experts(0..2)
        .init(&group, value, &device)
        .unwrap();
    let config = LoraConfig::new(3, 3.0).with_sharing(Sharing::Shared);
    let lora = shared.adapt("down", &config, &device).unwrap();
    let message = "24 values do not fill shape [1, 3, 4]";
    refused(lora, &a(2), &b(2), message);
    lora.load(&a(1), &b(1), &device).unwrap();

    let mut outer: RowLinear<Flex, ExpertTp> = LinearConfig::new("down", 4, 6)
        .with_experts(0..2)
        .init(&group, value, &device)
        .unwrap();
    let config = config.with_sharing(Sharing::SharedOuter);
    let lora = outer.adapt("down", &config, &device).unwrap();
    refused(lora, &a(2), &b(2), "36 values do not fill shape [1, 6, 3]");
    refused(lora, &a(1), &b(1), "12 values do not fill shape [2, 3, 4]");
    lora.load(&a(4), &b(1), &device).unwrap();
}

#[test]
fn a_layer_that_cannot_merge_one_of_its_linears_merges_none() {
    let (mesh, device) = (Mesh::<Flex>::solo(), Default::default());
    let (router, w) = (vec![0.1; 8], vec![0.1; 16]);
    let weights = MoeWeights {
        router: &router,
        experts: MlpWeights {
            gate: &w,
            up: &w,
            down: &w,
            biases: None,
        },
        ..Default::default()
    };
    let mut layer = MoeConfig::new("mlp", 4, 2, 2, 1)
        .init(weights, &mesh, &device)
        .unwrap();
    let plain = LoraConfig::new(1, 1.0).with_init_b(Init::Xavier);
    let fc1 = Targets::new(["gate_up_proj"]);
    layer.add_adapters(&fc1, &plain, &device).unwrap();
    let fc2 = Targets::new(["down_proj"]);
    let silu = plain.with_activation(Activation::Silu);
    layer.add_adapters(&fc2, &silu, &device).unwrap();
    let before = layer.experts.gate_up.weight.weight.stacked().into_data();
    assert!(layer.merge(&mesh).is_err());
    assert_eq!(layer.trained_weights().len(), 4);
    let after = layer.experts.gate_up.weight.weight.stacked().into_data();
    assert_eq!(after, before);
}
