//! The table of what gradients are summed over and where they lie, and sums over other groups.

use burn::backend::Flex;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Adaptable, GradientPlan, LinearConfig, LoraConfig, ReplicatedLinear, RowLinear, Sharing,
    TrainedWeight, Weight,
};
use moe_lora_parallel::{ExpertTp, GroupName, Mesh, Topology, TopologyConfig, Tp};
use moe_lora_testkit::{
    Ad, GateUpTargets, Matrix, Mocked, SHARING, assert_far, mock, ranks, shared_pair,
    synced_gradient,
};
use moe_lora_tests::moe::{self, Case, place};

fn topology(world: usize, tp: usize, ep: usize, etp: usize) -> Topology {
    let config = TopologyConfig::new(world);
    config.with_tp(tp).with_ep(ep).with_etp(etp).init().unwrap()
}

/// A layer with shared experts, adapters on all of its linears.
fn case(sharing: Sharing) -> Case {
    Case {
        shared: moe::shared(false, false),
        ..moe::case(sharing, GateUpTargets::Fused, DType::F64)
    }
}

/// The plan of a whole layer, as rank 0 prints it.
fn printed(topology: Topology, sharing: Sharing) -> String {
    let (case, world) = (case(sharing), mock(topology));
    let moe = case.oracle();
    let plans = ranks(&world, topology, |mesh| {
        let layer = case.layer(&moe, &mesh, &Default::default());
        GradientPlan::of(&layer.trained_weights(), mesh.topology())
    });
    assert!(plans.iter().all(|plan| *plan == plans[0]), "ranks differ");
    assert!((0..plans.len()).all(|rank| world.calls(rank).is_empty()));
    plans[0].to_string()
}

#[test]
fn the_table_names_the_groups_of_every_factor() {
    assert_eq!(
        printed(topology(8, 2, 2, 2), Sharing::PerExpert),
        "\
linear                          factor  cut along  summed over  divided by  squares over      replicas over
moe.experts.gate_up_proj        lora_A  d_out      expert_dp=2  1           expert_tp=2 ep=2  expert_dp=2
moe.experts.gate_up_proj        lora_B  d_out      expert_dp=2  1           expert_tp=2 ep=2  expert_dp=2
moe.experts.down_proj           lora_A  d_in       expert_dp=2  1           expert_tp=2 ep=2  expert_dp=2
moe.experts.down_proj           lora_B  d_out      expert_dp=2  1           expert_tp=2 ep=2  expert_dp=2
moe.shared_expert.gate_up_proj  lora_A  d_out      dp=4         1           tp=2              dp=4
moe.shared_expert.gate_up_proj  lora_B  d_out      dp=4         1           tp=2              dp=4
moe.shared_expert.down_proj     lora_A  d_in       dp=4         1           tp=2              dp=4
moe.shared_expert.down_proj     lora_B  d_out      dp=4         1           tp=2              dp=4
"
    );
    // One adapter for all experts; experts that lie as the dense layers do.
    let shared = printed(topology(4, 2, 1, 2), Sharing::Shared);
    let rows: Vec<&str> = shared.lines().collect();
    assert_eq!(
        rows[1..3],
        [
            "moe.experts.gate_up_proj        lora_A  d_out      ep=1 dp=2    1           expert_tp=2   ep=1 dp=2",
            "moe.experts.gate_up_proj        lora_B  d_out      ep=1 dp=2    1           expert_tp=2   ep=1 dp=2",
        ]
    );
}

#[test]
fn the_outer_factors_alone_are_summed_over_ep_and_are_replicas_there() {
    let outer = printed(topology(8, 1, 2, 2), Sharing::SharedOuter);
    let rows: Vec<&str> = outer.lines().collect();
    assert_eq!(
        rows[..5],
        [
            "linear                          factor  cut along  summed over       divided by  squares over      replicas over",
            "moe.experts.gate_up_proj        lora_A  d_out      ep=2 expert_dp=2  1           expert_tp=2       ep=2 expert_dp=2",
            "moe.experts.gate_up_proj        lora_B  d_out      expert_dp=2       1           expert_tp=2 ep=2  expert_dp=2",
            "moe.experts.down_proj           lora_A  d_in       expert_dp=2       1           expert_tp=2 ep=2  expert_dp=2",
            "moe.experts.down_proj           lora_B  d_out      ep=2 expert_dp=2  1           expert_tp=2       ep=2 expert_dp=2",
        ]
    );
}

/// Adapters that their tensor parallel groups hold whole.
#[test]
fn a_factor_that_its_group_holds_whole_is_a_replica_there() {
    let mesh = Mesh::<Ad>::solo();
    let (device, config) = (Default::default(), LoraConfig::new(2, 4.0));
    let mut dense: ReplicatedLinear<Ad, Tp> = LinearConfig::new("q", 4, 4)
        .init(mesh.tp(), |_, _, _| 0.0, &device)
        .unwrap();
    dense.adapt("q", &config, &device).unwrap();
    let mut expert: ReplicatedLinear<Ad, ExpertTp> = LinearConfig::new("gate", 4, 4)
        .with_experts(0..2)
        .init(mesh.expert_tp(), |_, _, _| 0.0, &device)
        .unwrap();
    expert.adapt("gate", &config, &device).unwrap();
    let weights = [dense.trained_weights(), expert.trained_weights()].concat();
    let plan = GradientPlan::of(&weights, &topology(8, 2, 2, 2));
    let lies = |k: usize| (&plan.rows()[k].shards[..], &plan.rows()[k].replicas[..]);
    use GroupName::{Dp, Ep, ExpertDp, ExpertTp as Etp, Tp as DenseTp};
    assert_eq!(lies(0), (&[][..], &[DenseTp, Dp][..]));
    assert_eq!(lies(2), (&[Ep][..], &[Etp, ExpertDp][..]));
}

#[test]
fn shards_and_replicas_are_one_decomposition_of_the_world() {
    for (world, tp, ep, etp) in [
        (1, 1, 1, 1),
        (4, 2, 1, 2),
        (8, 2, 2, 2),
        (8, 4, 2, 1),
        (8, 1, 1, 4),
        (8, 1, 4, 1),
    ] {
        let topology = topology(world, tp, ep, etp);
        for sharing in SHARING {
            let case = case(sharing);
            let moe = case.oracle();
            let plan = ranks(&mock(topology), topology, |mesh| {
                let layer = case.layer(&moe, &mesh, &Default::default());
                let weights = layer.trained_weights();
                let plan = GradientPlan::of(&weights, mesh.topology());
                let elements = weights.iter().map(|weight| weight.weight.len());
                (plan, elements.collect::<Vec<_>>())
            });
            let size = |groups: &[GroupName]| -> usize {
                groups.iter().map(|group| topology.size(*group)).product()
            };
            let (plan, local) = &plan[0];
            for (row, local) in plan.rows().iter().zip(local) {
                assert_eq!(size(&row.shards) * size(&row.replicas), world, "{plan}");
                // A gradient has a term on each rank that holds a copy, and on no other.
                assert_eq!(row.sums, row.replicas, "{plan}");
                let r = moe::RANK;
                let width = match (row.linear.as_str(), row.factor.as_str()) {
                    ("moe.experts.gate_up_proj", "lora_A") => moe::HIDDEN,
                    ("moe.experts.gate_up_proj", _) => 2 * moe::INTERMEDIATE,
                    ("moe.experts.down_proj", "lora_A") => moe::INTERMEDIATE,
                    ("moe.experts.down_proj", _) => moe::HIDDEN,
                    ("moe.shared_expert.gate_up_proj", "lora_B") => 2 * moe::SHARED_INTERMEDIATE,
                    // H and the intermediate extent of the shared experts are the same.
                    _ => moe::HIDDEN,
                };
                let of_experts = row.linear.contains("moe.experts");
                let config = LoraConfig::new(r, 1.0).with_sharing(sharing);
                let shared = shared_pair(&config, row.linear.ends_with("down_proj"));
                let experts = match shared[usize::from(row.factor == "lora_B")] {
                    false if of_experts => moe::EXPERTS,
                    _ => 1,
                };
                assert_eq!(local * size(&row.shards), experts * r * width, "{plan}");
            }
        }
    }
}

/// What a rank of `topology` has after `parts` were summed over groups, one after the other.
fn summed(topology: &Topology, mut parts: Vec<Matrix>, groups: &[GroupName]) -> Vec<Matrix> {
    for group in groups {
        let sum = |rank| {
            let members = topology.members(*group, rank).unwrap();
            let terms = members.into_iter().map(|member| parts[member].clone());
            terms.reduce(|a, b| a.plus(&b)).unwrap()
        };
        parts = (0..parts.len()).map(sum).collect();
    }
    parts
}

#[test]
fn a_sum_over_other_groups_than_the_table_s_is_another_gradient() {
    let place = place(2, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]);
    let topology = place.topology;
    for sharing in SHARING {
        let case = case(sharing);
        let moe = case.oracle();
        let found = case.found::<Ad>(&Mocked, &moe, &place);
        let rows = ranks(&mock(topology), topology, |mesh| {
            let layer = case.layer(&moe, &mesh, &Default::default());
            let plan = GradientPlan::of(&layer.trained_weights(), mesh.topology());
            plan.rows().to_vec()
        });
        for (k, row) in rows[0].iter().enumerate() {
            let own = || found.iter().map(|found| Matrix::stack(&found.own[k]));
            let right = summed(&topology, own().collect(), &row.sums);
            for (right, found) in right.iter().zip(&found) {
                let synced = Matrix::stack(&found.synced[k]);
                assert!(moe_lora_testkit::relative_error(right, &synced) < 1e-12);
            }
            use GroupName::{Dp, Ep, ExpertDp, ExpertTp, Tp};
            let config = LoraConfig::new(1, 1.0).with_sharing(sharing);
            let shared = shared_pair(&config, row.linear.ends_with("down_proj"));
            let shared = shared[usize::from(row.factor == "lora_B")];
            let wrong: &[&[GroupName]] = match (row.shards.contains(&Tp), shared) {
                // Shared experts: over none, over the tensor parallel ranks too, over the experts'
                // groups.
                (true, _) => &[&[], &[Tp, Dp], &[ExpertDp], &[Ep]],
                (false, false) => &[&[], &[Ep, ExpertDp], &[ExpertTp, ExpertDp], &[Dp]],
                (false, true) => &[
                    &[],
                    &[ExpertDp],
                    &[Ep],
                    &[Ep, Dp],
                    &[ExpertTp, Ep, ExpertDp],
                ],
            };
            for groups in wrong {
                let found = Matrix::stack(&summed(&topology, own().collect(), groups));
                let name = format!("{} {} over {groups:?}", row.linear, row.factor);
                assert_far(&name, &found, &Matrix::stack(&right));
            }
        }
    }
}

fn fill(grads: &mut GradientsParams, weight: &TrainedWeight<'_, Ad>, value: f64) {
    let Weight::PerExpert(param) = weight.weight else {
        panic!("each expert has a factor of its own");
    };
    let grad: Tensor<Flex, 3> = param.val().inner().full_like(value);
    grads.register(param.id, grad);
}

#[test]
fn sums_over_several_backward_passes_are_divided_by_the_tokens_of_all_ranks() {
    let topology = topology(4, 1, 2, 1);
    let tokens = [3, 0, 4, 2];
    let found = ranks(&mock(topology), topology, |mesh| {
        let local = topology.local_experts(4, mesh.ep().rank()).unwrap();
        let device = Default::default();
        let mut linear: RowLinear<Ad, ExpertTp> = LinearConfig::new("down_proj", 4, 4)
            .with_experts(local)
            .init(mesh.expert_tp(), |_, _, _| 0.0, &device)
            .unwrap();
        let config = LoraConfig::new(2, 4.0).with_dtype(DType::F64);
        linear.adapt("down_proj", &config, &device).unwrap();
        let weights = linear.trained_weights();
        let mut grads = GradientsParams::new();
        for weight in &weights {
            fill(&mut grads, weight, 10f64.powi(mesh.rank() as i32));
        }
        let total = mesh.sum(tokens[mesh.rank()]);
        assert_eq!(total, 9);
        let plan = GradientPlan::of(&weights, mesh.topology()).with_divisor(total as f64);
        assert!(plan.rows().iter().all(|row| row.divisor == 9.0));
        let grads = plan.sync(&weights, grads, &mesh);
        let grad = Matrix::stack(&synced_gradient(weights[0].weight, &grads));
        grad.values[0]
    });
    for (rank, found) in found.iter().enumerate() {
        let sum = [101.0, 1010.0][rank % 2];
        assert!((found / (sum / 9.0) - 1.0).abs() < 1e-15, "{found}");
        // Negative control: by the tokens of the replicas alone.
        assert_far(
            "tokens of two ranks",
            &Matrix::build(1, 1, |_, _| sum / [7.0, 2.0][rank % 2]),
            &Matrix::build(1, 1, |_, _| *found),
        );
    }
}
