//! What adapters can be put on: a linear, a layer, a model.

use burn::module::Module;
use burn::tensor::backend::Backend;
use moe_lora_kernels::Slot;
use moe_lora_parallel::GroupKind;

use crate::{
    AdapterError, AdapterReport, AnyLinear, Linear, LoraConfig, NamedSet, Placement, Targets,
    TrainedWeight,
};

/// A module with linears that adapters can be put on: a linear, an MLP, a layer, or one of your own,
/// which lists the linears of its fields and has all the rest.
///
/// ```
/// use burn::backend::Flex;
/// use burn::module::Module;
/// use burn::nn;
/// use burn::tensor::backend::Backend;
/// use moe_lora_adapters::{Adaptable, AnyLinear, LoraConfig, ReplicatedLinear, Targets};
/// use moe_lora_parallel::{Mesh, Tp};
///
/// #[derive(Module, Debug)]
/// struct Attention<B: Backend> {
///     query: ReplicatedLinear<B, Tp>,
///     value: ReplicatedLinear<B, Tp>,
///     scale: nn::RmsNorm<B>,
/// }
///
/// impl<B: Backend> Adaptable<B> for Attention<B> {
///     fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
///         [self.query.linears(), self.value.linears()].concat()
///     }
///     fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
///         let Self { query, value, .. } = self;
///         query.linears_mut().into_iter().chain(value.linears_mut()).collect()
///     }
/// }
///
/// let (mesh, device) = (Mesh::<Flex>::solo(), Default::default());
/// let linear = |path| {
///     let linear = nn::LinearConfig::new(64, 32).with_bias(false).init(&device);
///     ReplicatedLinear::from_burn(path, linear, mesh.tp())
/// };
/// let mut attention = Attention {
///     query: linear("layers.0.q_proj"),
///     value: linear("layers.0.v_proj"),
///     scale: nn::RmsNormConfig::new(64).init(&device).no_grad(),
/// };
/// let report = attention.add_adapters(&Targets::new(["q_proj"]), &LoraConfig::new(4, 8.0), &device)?;
/// assert_eq!(report.to_string(), "\
/// pattern  linears  trained  frozen  bytes
/// q_proj         1      384    2048   9728
/// (none)         1        0    2112   8448
/// total          2      384    4160  18176
/// ");
/// # Ok::<(), moe_lora_adapters::AdapterError>(())
/// ```
///
/// Every rank makes the same calls. Lists and options of such modules are such modules.
pub trait Adaptable<B: Backend>: Module<B> {
    /// The linears, in an order that is the same on every rank.
    fn linears(&self) -> Vec<&dyn AnyLinear<B>>;

    /// The linears, in the order of [`linears`](Self::linears).
    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>>;

    /// Puts a new adapter on each target and says what that came to.
    ///
    /// Of a linear with fragments, such as gate and up, a pattern with `*` takes the whole, and the
    /// fragments that are left where it or one of them is excluded.
    ///
    /// # Errors
    ///
    /// As [`Targets::resolve`], with nothing changed; and as [`Linear::adapt`].
    fn add_adapters(
        &mut self,
        targets: &Targets,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<AdapterReport, AdapterError> {
        add(self, targets, None, config, device)
    }

    /// As [`add_adapters`](Self::add_adapters), of adapters with this name, beside others with names.
    /// Each token then uses the adapter of its [`slot`](Self::slot).
    ///
    /// # Errors
    ///
    /// As [`Targets::resolve`], with nothing changed; and as [`Linear::adapt_named`].
    fn add_named_adapters(
        &mut self,
        name: &str,
        targets: &Targets,
        config: &LoraConfig,
        device: &B::Device,
    ) -> Result<AdapterReport, AdapterError> {
        add(self, targets, Some(name), config, device)
    }

    /// The factors of every adapter, in an order that is the same on every rank. Those of disabled
    /// ones are not among them.
    fn trained_weights(&self) -> Vec<TrainedWeight<'_, B>> {
        let linears = self.linears().into_iter();
        linears
            .flat_map(|linear| linear.trained_weights())
            .collect()
    }

    /// The names, each once, sorted.
    fn adapter_names(&self) -> Vec<String> {
        let mut names: Vec<_> = sets(self).iter().flat_map(|set| set.names()).collect();
        names.sort();
        names.dedup();
        names
    }

    /// The slot of the adapter of this name, for [`TokenIds::with_slots`](crate::TokenIds::with_slots).
    /// It is the same in every layer. Linears without the adapter add nothing to its tokens.
    ///
    /// # Errors
    ///
    /// When no adapter has the name.
    fn slot(&self, name: &str) -> Result<Slot, AdapterError> {
        let names = self.adapter_names();
        match names.iter().any(|known| known == name) {
            true => Ok(Slot::named(name)),
            false => Err(AdapterError::unknown_name(name, names)),
        }
    }

    /// Whether tokens of the adapter's slot use it. Those of a disabled one get the base's output, and
    /// it takes no part in training: it has no gradients, and is not among the trained weights.
    ///
    /// # Errors
    ///
    /// When no adapter has the name.
    fn set_enabled(&mut self, name: &str, enabled: bool) -> Result<(), AdapterError> {
        self.slot(name)?;
        for set in sets_mut(self) {
            set.set_enabled(name, enabled);
        }
        Ok(())
    }

    /// Removes the adapter. Tokens of its slot get the base's output from then on.
    ///
    /// # Errors
    ///
    /// When no adapter has the name.
    fn remove(&mut self, name: &str) -> Result<(), AdapterError> {
        self.slot(name)?;
        for set in sets_mut(self) {
            set.remove(name);
        }
        Ok(())
    }

    /// Adds an adapter whose delta is `sum_i w_i * s_i B_i A_i x` over these adapters `i`, as they are
    /// now. It is an adapter as any other: its rank is the sum of theirs, its scale is 1, and it trains
    /// by itself.
    ///
    /// # Errors
    ///
    /// When no adapter has a name among the sources, when one of them has DoRA, when a weight is not
    /// finite, when there are no sources, or when the new name is unusable or taken; nothing is changed
    /// then.
    fn combine(&mut self, name: &str, sources: &[(&str, f64)]) -> Result<(), AdapterError> {
        let weights: Vec<f64> = sources.iter().map(|(_, weight)| *weight).collect();
        if weights.is_empty() || !weights.iter().all(|weight| weight.is_finite()) {
            return Err(AdapterError::Weights {
                name: name.into(),
                weights,
            });
        }
        for (source, _) in sources {
            self.slot(source)?;
        }
        for set in sets(self) {
            set.check_combine(name, sources)?;
        }
        for set in sets_mut(self) {
            set.combine(name, sources)?;
        }
        Ok(())
    }
}

fn add<B: Backend, M: Adaptable<B>>(
    module: &mut M,
    targets: &Targets,
    name: Option<&str>,
    config: &LoraConfig,
    device: &B::Device,
) -> Result<AdapterReport, AdapterError> {
    let linears = module.linears();
    let known: Vec<_> = linears.iter().map(|linear| linear.targets()).collect();
    let chosen = targets.resolve_linears(&known, config)?;
    for target in &chosen {
        let mut linears = module.linears_mut();
        let known: Vec<String> = linears
            .iter()
            .flat_map(|linear| linear.targets())
            .map(String::from)
            .collect();
        let of =
            |linear: &&mut &mut dyn AnyLinear<B>| linear.targets().contains(&target.path.as_str());
        // A module of one's own may list other linears here.
        let Some(linear) = linears.iter_mut().find(of) else {
            return Err(AdapterError::unknown_target(&target.path, &known));
        };
        match name {
            None => linear.adapt(&target.path, &target.config, device)?,
            Some(name) => linear.adapt_named(&target.path, name, &target.config, device)?,
        }
    }
    Ok(AdapterReport::of(module, targets, &chosen, name))
}

fn sets<B: Backend, M: Adaptable<B>>(module: &M) -> Vec<&dyn NamedSet> {
    let linears = module.linears().into_iter();
    linears.flat_map(|linear| linear.sets()).collect()
}

fn sets_mut<B: Backend, M: Adaptable<B>>(module: &mut M) -> Vec<&mut dyn NamedSet> {
    let linears = module.linears_mut().into_iter();
    linears.flat_map(|linear| linear.sets_mut()).collect()
}

impl<B: Backend, G: GroupKind, P: Placement> Adaptable<B> for Linear<B, G, P> {
    fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
        vec![self]
    }

    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
        vec![self]
    }
}

impl<B: Backend, M: Adaptable<B>> Adaptable<B> for Vec<M> {
    fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
        self.iter().flat_map(Adaptable::linears).collect()
    }

    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
        self.iter_mut().flat_map(Adaptable::linears_mut).collect()
    }
}

impl<B: Backend, M: Adaptable<B>> Adaptable<B> for Option<M> {
    fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
        self.iter().flat_map(Adaptable::linears).collect()
    }

    fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
        self.iter_mut().flat_map(Adaptable::linears_mut).collect()
    }
}

#[cfg(test)]
mod tests {
    use burn::backend::{Autodiff, Flex};
    use burn::optim::GradientsParams;
    use burn::tensor::Tensor;
    use insta::assert_snapshot;
    use moe_lora_kernels::RowGroups;
    use moe_lora_parallel::{ExpertTp, Group, Mesh, Tp};

    use super::*;
    use crate::{ColumnLinear, LinearConfig, ReplicatedLinear, check_gradients, sync_gradients};

    type B = Autodiff<Flex>;

    /// Gate and up in one of two experts, and a dense linear.
    #[derive(Module, Debug)]
    struct Block<B: Backend> {
        gate_up: ColumnLinear<B, ExpertTp>,
        output: Option<ReplicatedLinear<B, Tp>>,
    }

    impl<B: Backend> Adaptable<B> for Block<B> {
        fn linears(&self) -> Vec<&dyn AnyLinear<B>> {
            [self.gate_up.linears(), self.output.linears()].concat()
        }

        fn linears_mut(&mut self) -> Vec<&mut dyn AnyLinear<B>> {
            let mut linears = self.gate_up.linears_mut();
            linears.extend(self.output.linears_mut());
            linears
        }
    }

    fn block(layer: usize) -> Block<B> {
        let device = Default::default();
        let value = |e: usize, row: usize, column: usize| (e + row * 3 + column) as f32 * 0.1;
        let path = |name: &str| format!("layers.{layer}.{name}");
        let gate_up = LinearConfig::new(path("experts.gate_up_proj"), 4, 6)
            .with_experts(0..2)
            .with_fragments(["gate_proj", "up_proj"].map(|name| path(&format!("experts.{name}"))))
            .init(&Group::solo(), value, &device);
        let output = LinearConfig::new(path("o_proj"), 4, 4).init(&Group::solo(), value, &device);
        Block {
            gate_up: gate_up.unwrap(),
            output: Some(output.unwrap()),
        }
    }

    /// The paths that have adapters, and what adding them gives.
    fn adapted(targets: Targets) -> Result<Vec<String>, AdapterError> {
        let mut block = block(0);
        let config = LoraConfig::new(2, 4.0);
        block.add_adapters(&targets, &config, &Default::default())?;
        let weights = block.trained_weights();
        let mut paths: Vec<_> = weights.iter().map(|w| w.linear[9..].to_owned()).collect();
        paths.dedup();
        Ok(paths)
    }

    #[test]
    fn a_wildcard_takes_the_whole_and_what_is_left_where_a_part_is_excluded() {
        let whole = adapted(Targets::new(["*.experts.*"])).unwrap();
        assert_eq!(whole, ["experts.gate_up_proj"]);
        let parts = Targets::new(["*.experts.*"]).without(["gate_up_proj"]);
        let parts = adapted(parts).unwrap();
        assert_eq!(parts, ["experts.gate_proj", "experts.up_proj"]);
        let up = adapted(Targets::new(["*"]).without(["gate_proj"])).unwrap();
        assert_eq!(up, ["experts.up_proj", "o_proj"]);
        let named = adapted(Targets::new(["up_proj", "o_proj"])).unwrap();
        assert_eq!(named, ["experts.up_proj", "o_proj"]);
    }

    #[test]
    fn a_whole_and_its_part_both_given_by_name_are_refused() {
        let both = adapted(Targets::new(["*", "gate_proj"]));
        assert_snapshot!(both.unwrap_err(), @"layers.0.experts.gate_proj: layers.0.experts.gate_up_proj already has an adapter (merge it or leave one of the two out)");
        let rank = adapted(Targets::new(["*"]).with_rank("gate_proj", 1));
        assert_snapshot!(rank.unwrap_err(), @r#"target "gate_proj" matches no linear, did you mean "gate_up_proj"? (known: layers.0.experts.gate_up_proj, layers.0.o_proj)"#);
        let typo = adapted(Targets::new(["o_prj"]));
        assert_snapshot!(typo.unwrap_err(), @r#"target "o_prj" matches no linear, did you mean "o_proj"? (known: layers.0.experts.gate_up_proj, layers.0.experts.gate_proj, layers.0.experts.up_proj, layers.0.o_proj)"#);
    }

    #[test]
    fn the_report_counts_each_parameter_once_for_its_first_pattern() {
        let mut blocks = vec![block(0), block(10)];
        let targets = Targets::new(["*.layers.0.*", "experts.gate_proj", "layers.0.*"]);
        let device = Default::default();
        let found = blocks.add_adapters(&targets, &LoraConfig::new(2, 4.0), &device);
        assert!(found.is_err(), "no path begins before layers");

        let targets = Targets::new(["layers.0.*", "experts.gate_proj", "*.o_proj"])
            .without(["layers.0.experts.gate_up_proj"])
            .with_rank("up_proj", 1);
        let report = blocks.add_adapters(&targets, &LoraConfig::new(2, 4.0), &device);
        let report = report.unwrap();
        assert_snapshot!(report, @r"
        pattern            linears  trained  frozen  bytes
        layers.0.*               3       58      64    488
        experts.gate_proj        1       28      24    208
        *.o_proj                 1       16      16    128
        (none)                   0        0      24     96
        total                    5      102     128    920
        ");
        assert_eq!(
            report.total.trained + report.total.frozen,
            blocks.num_params()
        );
        let trained = blocks.trained_weights();
        let trained: usize = trained.iter().map(|trained| trained.weight.len()).sum();
        assert_eq!(report.total.trained, trained);
    }

    #[test]
    fn parameters_that_were_not_frozen_are_reported_as_trained() {
        let mut block = block(0);
        let bias = block.output.take().unwrap();
        let mut output = bias.with_bias(|_, _| 0.0, &Default::default()).unwrap();
        let bias = output.bias.as_mut().unwrap();
        let crate::Weight::One(param) = &mut bias.weight else {
            unreachable!()
        };
        *param = param.clone().set_require_grad(true);
        block.output = Some(output);
        let report = block.add_adapters(
            &Targets::new(["gate_up_proj"]),
            &LoraConfig::new(2, 4.0),
            &Default::default(),
        );
        assert_eq!(report.unwrap().rest.trained, 4);
    }

    #[test]
    fn named_adapters_of_a_module_are_reported_and_found_by_name() {
        let mut block = block(0);
        let (config, device) = (LoraConfig::new(2, 4.0), Default::default());
        let targets = Targets::new(["*"]);
        for (name, earlier) in [("first", 0), ("second", 56)] {
            let report = block.add_named_adapters(name, &targets, &config, &device);
            let report = report.unwrap();
            assert_eq!(
                [report.patterns[0].trained, report.rest.trained],
                [56, earlier]
            );
            assert_eq!(report.patterns[0].linears, 2);
        }
        assert_eq!(block.adapter_names(), ["first", "second"]);
        block.remove("first").unwrap();
        assert_eq!(block.trained_weights().len(), 4);
    }

    #[test]
    fn adapters_that_no_gradient_reaches_are_named() {
        let mut block = block(0);
        let device = Default::default();
        let targets = Targets::new(["gate_proj", "up_proj", "o_proj"]);
        let config = LoraConfig::new(2, 4.0);
        block.add_adapters(&targets, &config, &device).unwrap();
        // The output projection is left out, and up is multiplied by zero.
        let run = |up: f32, output: bool| {
            let x = Tensor::<B, 2>::ones([3, 4], &device);
            let rows = RowGroups::new(&[1, 2], 3).unwrap();
            let tp = Group::<B, ExpertTp>::solo();
            let [gate, of_up] = block.gate_up.forward_fragments(tp.fanout(x.clone()), &rows);
            let mut loss = gate.into_tensor().sum() + of_up.into_tensor().sum() * up;
            if let (true, Some(linear)) = (output, &block.output) {
                let y = linear.forward(Group::solo().replicated(x), &RowGroups::whole(3));
                loss = loss + y.into_tensor().sum();
            }
            let grads = GradientsParams::from_grads(loss.backward(), &block);
            let weights = block.trained_weights();
            let alone = check_gradients(&weights, &grads);
            // Zeros have taken the place of those that were missing.
            let grads = sync_gradients(&weights, grads, &Mesh::solo());
            assert_eq!(check_gradients(&weights, &grads), alone);
            alone
        };
        let none = check_gradients::<B>(&[], &GradientsParams::new()).unwrap_err();
        assert_snapshot!(none, @"there are no adapters to train (call add_adapters first)");
        run(1.0, true).unwrap();
        assert_snapshot!(run(0.0, false).unwrap_err(), @"no gradient reached the adapters of layers.0.experts.up_proj, layers.0.o_proj (pass what their linears give on to the loss, and tokens to their experts; freeze the rest before add_adapters, not after)");
    }
}
