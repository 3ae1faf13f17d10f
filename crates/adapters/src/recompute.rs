//! Activation recompute: blocks that keep nothing but their input.

use burn::module::{AutodiffModule, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use moe_lora_parallel::{Mesh, ParallelBackend};

/// Runs a block again on its input, and backward from the cotangent of its output.
type Again<'a, B, const D: usize> =
    Box<dyn FnOnce(Inner<B, D>, Inner<B, D>, &mut GradientsParams) -> Inner<B, D> + 'a>;

type Inner<B, const D: usize> = Tensor<<B as AutodiffBackend>::InnerBackend, D>;

/// Blocks one after the other, such as decoder layers, whose activations are not kept: each block
/// is run again in the backward pass. At most one block's activations are there at a time.
///
/// The values and gradients are those of the blocks run once, dropout included: its masks are
/// functions of the tokens. Residual connections belong inside of a block: what a block reads is what
/// the one before it returned.
///
/// burn cannot run a backward pass inside of another, so the blocks are no part of a graph: the caller
/// takes the [`output`](Self::output), computes the loss of it, and gives its gradients back.
///
/// ```
/// use burn::backend::{Autodiff, Flex};
/// use burn::tensor::Tensor;
/// use moe_lora_adapters::{Init, LinearConfig, LoraConfig, Recompute, ReplicatedLinear};
/// use moe_lora_kernels::RowGroups;
/// use moe_lora_parallel::{Mesh, Tp};
///
/// let (mesh, device) = (Mesh::<Autodiff<Flex>>::solo(), Default::default());
/// let config = LoraConfig::new(2, 4.0).with_init_b(Init::Xavier);
/// let linear = |path: &str| -> Result<_, moe_lora_adapters::AdapterError> {
///     let weight = |_, row, column| (row + column) as f32;
///     let config = LinearConfig::new(path, 4, 4);
///     let linear: ReplicatedLinear<_, Tp> = config.init(mesh.tp(), weight, &device)?;
///     Ok(linear)
/// };
/// let mut layers = [linear("0")?, linear("1")?];
/// for (layer, path) in layers.iter_mut().zip(["0", "1"]) {
///     layer.adapt(path, &config, &device)?;
/// }
///
/// let mut blocks = Recompute::new(Tensor::ones([3, 4], &device), &mesh);
/// for layer in &layers {
///     blocks = blocks.then(layer, |layer, x| {
///         let y = layer.forward(mesh.tp().replicated(x.clone()), &RowGroups::whole(3));
///         x + y.into_tensor()
///     });
/// }
/// let mut of_loss = blocks.output().powi_scalar(2).sum().backward();
/// let (grads, _) = blocks.backward(&mut of_loss);
/// assert_eq!(grads.len(), 4); // A and B of two layers
/// # Ok::<(), moe_lora_adapters::AdapterError>(())
/// ```
pub struct Recompute<'a, B: AutodiffBackend + ParallelBackend, const D: usize> {
    blocks: Vec<(Inner<B, D>, Again<'a, B, D>)>,
    output: Tensor<B, D>,
    mesh: &'a Mesh<B>,
}

impl<'a, B: AutodiffBackend + ParallelBackend, const D: usize> Recompute<'a, B, D> {
    /// No blocks yet, on this input.
    pub fn new(x: Inner<B, D>, mesh: &'a Mesh<B>) -> Self {
        Self {
            blocks: Vec::new(),
            output: leaf(x),
            mesh,
        }
    }

    /// Runs the next block, `f(module, x)`, without a graph.
    ///
    /// Every trained parameter that `f` reads is one of `module`'s.
    pub fn then<M: AutodiffModule<B>>(
        mut self,
        module: &'a M,
        f: impl Fn(&M, Tensor<B, D>) -> Tensor<B, D> + 'a,
    ) -> Self {
        let input = self.output.inner();
        let frozen = module.clone().no_grad();
        self.output = leaf(f(&frozen, Tensor::from_inner(input.clone())).inner());
        let again = move |x: Inner<B, D>, dy: Inner<B, D>, sum: &mut GradientsParams| {
            let x = leaf(x);
            let mut found = (f(module, x.clone()) * Tensor::from_inner(dy))
                .sum()
                .backward();
            let dx = x.grad_remove(&mut found);
            module.visit(&mut Collect { found, sum });
            dx.unwrap_or_else(|| x.inner().zeros_like())
        };
        self.blocks.push((input, Box::new(again)));
        self
    }

    /// What the last block returned, as a leaf of a new graph.
    pub fn output(&self) -> Tensor<B, D> {
        self.output.clone()
    }

    /// The gradients of all blocks' parameters and of the input, for those of a loss of the output.
    ///
    /// # Panics
    ///
    /// When the loss is not one of the output, when a block panics, or when a collective fails.
    pub fn backward(self, of_loss: &mut B::Gradients) -> (GradientsParams, Inner<B, D>) {
        let Self {
            blocks,
            output,
            mesh,
        } = self;
        let dy = output.grad_remove(of_loss);
        let mut dy = dy.expect("the loss is one of the output of the blocks");
        drop(output);
        let mut grads = GradientsParams::new();
        for (x, again) in blocks.into_iter().rev() {
            // burn takes the lock of every graph of the process at the end of a backward pass: none may
            // begin on a rank before the others have ended theirs.
            mesh.all(true);
            dy = again(x, dy, &mut grads);
        }
        (grads, dy)
    }
}

fn leaf<B: AutodiffBackend, const D: usize>(x: Inner<B, D>) -> Tensor<B, D> {
    Tensor::from_inner(x).require_grad()
}

/// Adds what was found of a module's parameters.
struct Collect<'a, B: AutodiffBackend> {
    found: B::Gradients,
    sum: &'a mut GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Collect<'_, B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = param.val().grad_remove(&mut self.found) {
            let grad = match self.sum.remove::<B::InnerBackend, D>(param.id) {
                None => grad,
                Some(sum) => sum + grad,
            };
            self.sum.register::<B::InnerBackend, D>(param.id, grad);
        }
    }
}
