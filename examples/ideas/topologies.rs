//! A test of a layer of one's own: the same numbers at every topology, and the fault if ranks disagree.

use std::time::Duration;

use burn::backend::{Autodiff, Flex};
use burn::tensor::{Tensor, TensorData};
use burn_moe_lora::parallel::{CollectiveOp, GroupName};
use burn_moe_lora::prelude::*;
use moe_lora_examples::{Result, assert_close, noise};

type B = Autodiff<Flex>;

/// Column-parallel, tanh, row-parallel: the layer under test, for one expert.
fn my_layer(x: Tensor<B, 2>, mesh: &Mesh<B>) -> Tensor<B, 2> {
    let (group, device) = (mesh.expert_tp(), Default::default());
    let rows = RowGroups::whole(x.dims()[0]);
    let config = |path, d_in, d_out| LinearConfig::new(path, d_in, d_out).with_experts(0..1);
    let weight = |_, row, column| ((row * 5 + column * 3) % 11) as f32 / 11.0 - 0.4;
    let mut up: ColumnLinear<B, ExpertTp> =
        config("up", 4, 8).init(group, weight, &device).unwrap();
    let lora = LoraConfig::new(4, 8.0).with_init_b(Init::Xavier);
    up.adapt("up", &lora, &device).unwrap();
    let down: RowLinear<B, ExpertTp> = config("down", 8, 4).init(group, weight, &device).unwrap();
    let inner = up
        .forward(group.replicated(x).copy_to(), &rows)
        .map(Tensor::tanh);
    down.forward_suppressed(inner, &rows)
        .reduce_from()
        .into_tensor()
}

// ANCHOR: compare
/// Output and input gradient at `etp`, from every rank, and how often rank 0 summed.
fn run(etp: usize) -> Result<(Vec<[Vec<f32>; 2]>, usize)> {
    let topology = TopologyConfig::new(etp).with_etp(etp).init()?;
    let world = MockWorld::new(etp).with_timeout(Duration::from_secs(10));
    let outcomes = world.run_result(|rank| -> Result<_> {
        let mesh = Mesh::<B>::new(topology, &rank)?;
        let x = TensorData::new(noise(3, 12), [3, 4]);
        let x = Tensor::<B, 2>::from_data(x, &Default::default()).require_grad();
        let y = my_layer(x.clone(), &mesh);
        let grads = y.clone().powi_scalar(2).sum().backward();
        let values = |data: TensorData| data.to_vec::<f32>().unwrap();
        Ok([
            values(y.into_data()),
            values(x.grad(&grads).unwrap().into_data()),
        ])
    })?;
    let calls = world.calls(0);
    assert!(calls.iter().all(|call| call.group == GroupName::ExpertTp));
    let sums = calls
        .iter()
        .filter(|call| call.op == CollectiveOp::AllReduce);
    Ok((outcomes, sums.count()))
}

fn every_topology_gives_the_same_numbers() -> Result<()> {
    let (alone, sums) = run(1)?;
    assert_eq!(sums, 0); // one rank talks to nobody
    for etp in [2, 4] {
        let (ranks, sums) = run(etp)?;
        assert_eq!(sums, 2); // the output forward, the input's gradient backward
        for [y, dx] in &ranks {
            assert_close(y, &alone[0][0]);
            assert_close(dx, &alone[0][1]);
        }
    }
    Ok(())
}
// ANCHOR_END: compare

// ANCHOR: disagree
fn ranks_that_disagree_are_told_so() -> Result<()> {
    let topology = TopologyConfig::new(2).with_etp(2).init()?;
    let outcome = MockWorld::new(2).run(|rank| {
        let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
        let rows = 1 + mesh.rank(); // the fault: one rank has another number of rows
        let term = Tensor::ones([rows, 4], &Default::default());
        mesh.expert_tp().partial(term).reduce_from().into_tensor()
    });
    let error = outcome.unwrap_err().to_string();
    assert_eq!(error, include_str!("ranks_disagree.txt").trim_end());
    Ok(())
}
// ANCHOR_END: disagree

fn main() -> Result<()> {
    every_topology_gives_the_same_numbers()?;
    ranks_that_disagree_are_told_so()
}
