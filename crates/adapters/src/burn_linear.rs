//! A linear of burn's as one that takes adapters.

use burn::module::Param;
use burn::nn;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use moe_lora_parallel::{Group, GroupKind, ParallelBackend};

use crate::{Linear, PlacedWeight, ReplicatedLinear, ShardAxis, Weight, WeightLayout};

impl<B: ParallelBackend, G: GroupKind> ReplicatedLinear<B, G> {
    /// A linear of burn's, frozen: `x W + b` with `W [d_in, d_out]` becomes `W^T x + b`. Every rank of
    /// the group holds it whole, with the same values: load them, as burn's random start values
    /// differ from rank to rank.
    ///
    /// ```
    /// use burn::backend::Flex;
    /// use burn::nn;
    /// use burn::tensor::{Distribution, Tensor};
    /// use moe_lora_adapters::ReplicatedLinear;
    /// use moe_lora_kernels::RowGroups;
    /// use moe_lora_parallel::Mesh;
    ///
    /// let (mesh, device) = (Mesh::<Flex>::solo(), Default::default());
    /// let theirs = nn::LinearConfig::new(8, 4).init(&device);
    /// let x = Tensor::random([3, 8], Distribution::Default, &device);
    /// let expected = theirs.forward(x.clone());
    ///
    /// let ours = ReplicatedLinear::from_burn("head", theirs, mesh.tp());
    /// let y = ours.forward(mesh.tp().replicated(x), &RowGroups::whole(3)).into_tensor();
    /// y.into_data().assert_approx_eq::<f32>(&expected.into_data(), Default::default());
    /// ```
    pub fn from_burn(path: impl Into<String>, linear: nn::Linear<B>, group: &Group<B, G>) -> Self {
        let [d_in, d_out] = linear.weight.dims();
        let layout = WeightLayout {
            experts: None,
            d_out,
            d_in,
            fragments: 1,
            axis: ShardAxis::Whole,
            rank: group.rank(),
            ranks: group.size(),
        };
        let bias = linear.bias.map(|bias| {
            let layout = WeightLayout {
                d_in: 1,
                ..layout.clone()
            };
            PlacedWeight::new(frozen(bias.val().unsqueeze_dim(1)), layout)
        });
        let weight = frozen(linear.weight.val().transpose());
        let weight = PlacedWeight::new(weight, layout);
        let mut linear = Linear::new(path.into(), Vec::new(), weight);
        linear.bias = bias;
        linear
    }
}

fn frozen<B: Backend>(weight: Tensor<B, 2>) -> Weight<B> {
    Weight::One(Param::from_tensor(weight.detach()).set_require_grad(false))
}
