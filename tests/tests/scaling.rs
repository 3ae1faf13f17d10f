//! The scale of an adapter: rank-stabilised or not, of a rank that experts divide, the same at every
//! topology.

use burn::optim::SgdConfig;
use burn::tensor::DType;
use burn_moe_lora::interchange::PeftAdapter;
use moe_lora_adapters::{
    Adaptable, AdapterError, Column, ColumnLinear, Init, Linear, LinearConfig, LoraConfig,
    Placement, Sharing, Targets, Whole, save_checkpoint,
};
use moe_lora_checkpoint::Checkpoint;
use moe_lora_experts::MoeLayer;
use moe_lora_parallel::{ExpertTp, Group, GroupKind, Mesh, Tp};
use moe_lora_testkit::{Ad, GateUpTargets, Matrix, assert_close, mock, ranks};
use moe_lora_tests::grouped::etp;
use moe_lora_tests::moe;

const PATH: &str = "model.layers.0.mlp.experts.up_proj";

/// `W' - W` of a merged linear and `B A`, of its first expert.
fn delta_and_product<G: GroupKind, P: Placement>(
    experts: Option<usize>,
    config: &LoraConfig,
) -> [Matrix; 2] {
    let (group, device) = (Group::<Ad, G>::solo(), Default::default());
    let linear = LinearConfig::new(PATH, 24, 32);
    let linear = match experts {
        None => linear,
        Some(experts) => linear.with_experts(0..experts),
    };
    let mut linear: Linear<Ad, G, P> = linear.init(&group, |_, _, _| 0.0, &device).unwrap();
    linear.adapt(PATH, config, &device).unwrap();
    let first = |tensor: burn::tensor::Tensor<Ad, 3>| {
        Matrix::read(tensor.narrow(0, 0, 1).squeeze_dim::<2>(0))
    };
    let lora = &linear.adapters[0];
    let product = first(lora.b.weight.stacked()).times(&first(lora.a.weight.stacked()));
    [first(linear.merged_weight(&group).unwrap()), product]
}

#[test]
fn rank_stabilised_with_alpha_16_of_rank_16_the_scale_is_4_on_expert_and_dense_linears() {
    let config = LoraConfig::new(16, 16.0)
        .with_rslora(true)
        .with_init_b(Init::Xavier);
    let dense = delta_and_product::<Tp, Whole>(None, &config);
    let expert = delta_and_product::<ExpertTp, Column>(Some(2), &config);
    assert_eq!(dense, expert, "to the bit");
    let [delta, product] = dense;
    assert_close("delta", &delta, &product.scaled(4.0), DType::F32, 16);
    let plain = delta_and_product::<Tp, Whole>(None, &config.with_rslora(false));
    assert_close("without the root", &plain[0], &product, DType::F32, 16);
}

#[test]
fn an_exported_adapter_says_that_it_is_rank_stabilised() {
    for rslora in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let (mesh, device) = (Mesh::<Ad>::solo(), Default::default());
        let config = LoraConfig::new(16, 16.0).with_rslora(rslora);
        let path = "model.layers.0.mlp.experts.gate_up_proj";
        let mut fc1: ColumnLinear<Ad, ExpertTp> = LinearConfig::new(path, 24, 32)
            .with_experts(0..2)
            .init(mesh.expert_tp(), |_, _, _| 0.0, &device)
            .unwrap();
        fc1.adapt(path, &config, &device).unwrap();
        let sgd = SgdConfig::new().init::<Ad, ColumnLinear<Ad, ExpertTp>>();
        save_checkpoint(folder.path(), 0, &fc1.trained_weights(), &sgd, &mesh).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let adapter = PeftAdapter::from_checkpoint(&checkpoint).unwrap();
        assert_eq!(adapter.rslora, rslora);
        let (_, pair) = adapter.layers[&0].pairs().next().unwrap();
        assert_eq!(adapter.scale(pair), if rslora { 4.0 } else { 1.0 });
    }
}

// ---- rank and experts of a token -----------------------------------------------------------------

fn adapted(rank: usize, top_k: usize, mesh: &Mesh<Ad>) -> Result<MoeLayer<Ad>, AdapterError> {
    let case = moe::Case {
        shared: moe::shared(false, false),
        adapted: false,
        ..moe::case(Sharing::PerExpert, GateUpTargets::Fused, DType::F32)
    };
    let mut layer = case.layer(&case.oracle(), mesh, &Default::default());
    let targets = Targets::new(["*"]).with_rank_per_expert(top_k);
    layer.add_adapters(&targets, &LoraConfig::new(rank, 8.0), &Default::default())?;
    Ok(layer)
}

#[test]
fn the_scale_of_a_divided_rank_is_the_same_at_every_etp() {
    for (size, rank) in [(1, 8), (2, 8), (1, 16), (2, 16), (4, 16)] {
        ranks(&mock(etp(size)), etp(size), |mesh| {
            let layer = adapted(rank, 4, &mesh).unwrap();
            for lora in &layer.experts.gate_up.adapters {
                assert_eq!(lora.a.layout().d_out, rank / 4, "etp={size}");
                assert_eq!(lora.config().scale(), 8.0 / (rank / 4) as f64, "etp={size}");
            }
            for lora in &layer.experts.down.adapters {
                assert_eq!(lora.a.layout().d_out, rank / 4, "etp={size}");
                assert_eq!(lora.config().scale(), 8.0 / (rank / 4) as f64, "etp={size}");
            }
        });
    }
}

#[test]
fn a_rank_that_etp_cannot_cut_is_refused_and_not_rounded_up() {
    // Rounded up to 4, fc1 would have the scale 2 where fc2 has 4.
    let messages = ranks(&mock(etp(4)), etp(4), |mesh| {
        adapted(8, 4, &mesh).unwrap_err().to_string()
    });
    assert!(messages.iter().all(|message| *message == messages[0]));
    assert_eq!(
        messages[0],
        "moe.experts.gate_up_proj: lora rank=2 is not divisible by etp_size=4 (choose a multiple of 4 as rank)"
    );
}

#[test]
fn shared_experts_keep_the_rank_beside_routed_ones_that_divide_it() {
    let layer = adapted(8, 4, &Mesh::solo()).unwrap();
    let (experts, shared) = (&layer.experts, &layer.shared.as_ref().unwrap().mlp);
    for (mlp, rank) in [
        (experts.trained_weights(), 2),
        (shared.trained_weights(), 8),
    ] {
        let a: Vec<_> = mlp.iter().step_by(2).map(|a| a.layout.d_out).collect();
        assert_eq!(a, [rank, rank]);
    }
}
