//! Ranks that disagree about the sizes of an uneven collective.

use burn::backend::Flex;
use burn::tensor::Tensor;
use moe_lora_parallel::{CollectiveError, Mesh, MockWorld, TopologyConfig};

#[test]
fn an_all_gather_whose_ranks_pass_different_sizes_fails_on_every_rank() {
    let topology = TopologyConfig::new(2).with_etp(2).init().unwrap();
    let errors = MockWorld::new(2)
        .run(|rank| {
            let mesh = Mesh::<Flex>::new(topology, &rank).unwrap();
            // Each rank's own size fits its tensor; rank 1 is wrong about rank 0's.
            let (rows, sizes) = [(1, [1, 2]), (2, [2, 2])][mesh.rank()];
            let x = Tensor::<Flex, 2>::zeros([rows, 3], &Default::default());
            let group = mesh.expert_tp().collective();
            group
                .all_gather(x.into_primitive().tensor(), 0, &sizes)
                .unwrap_err()
        })
        .unwrap();
    for error in errors {
        assert!(matches!(error, CollectiveError::Mismatch { .. }), "{error}");
        assert!(error.to_string().contains("expert_tp"), "{error}");
    }
}
