//! Adapters on the experts: which linears get one, where they start, and how they leave again.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_moe_lora::adapters::{
    Activation, Adaptable, AdapterBackend, Dropout, Lora, LoraConfig, Placement, Sharing, Targets,
    stored_adapters,
};
use burn_moe_lora::checkpoint::Checkpoint;
use burn_moe_lora::experts::MoeLayer;
use burn_moe_lora::interchange::{ExpertAdapter, FactorPair, GateUp, HostTensor, PeftAdapter};
use burn_moe_lora::parallel::{ExpertTp, Mesh, ParallelBackend};

use crate::moe::MoeBlocks;

/// The adapters that a job trains.
#[derive(Clone, Debug)]
pub enum AdapterPlan {
    /// New ones.
    New {
        /// Rank, scale and start values.
        config: LoraConfig,
        /// The linears of routed experts that get one.
        targets: Targets,
    },
    /// Those of a file.
    Given {
        /// The file's.
        adapter: PeftAdapter,
        /// What all of them have in common, dropout too, which no file has.
        common: LoraConfig,
    },
    /// Those of a checkpoint, by linear; their values are loaded later.
    Stored(BTreeMap<String, LoraConfig>),
}

impl AdapterPlan {
    /// The adapters of a checkpoint.
    ///
    /// # Errors
    /// Settings that are not those of the stored factors, or a function between the factors, which the PEFT files that
    /// the job writes cannot hold.
    pub fn stored(checkpoint: &Checkpoint) -> Result<Self> {
        let adapters = stored_adapters(checkpoint)?;
        for (linear, config) in &adapters {
            ensure!(
                config.activation == Activation::Identity,
                "{linear} has {:?} between A and B, which PEFT files cannot hold (resume a checkpoint without it)",
                config.activation
            );
        }
        Ok(Self::Stored(adapters))
    }

    /// The adapters of PEFT files.
    pub fn given(adapter: PeftAdapter) -> Self {
        let common = LoraConfig::new(1, 1.0).with_rslora(adapter.rslora);
        Self::Given { adapter, common }
    }

    /// The same adapters with dropout in training.
    pub fn with_dropout(mut self, drop: Dropout, seed: u64) -> Self {
        let put = |config: &mut LoraConfig| *config = config.with_dropout(drop).with_seed(seed);
        match &mut self {
            Self::New { config, .. } => put(config),
            Self::Given { common, .. } => put(common),
            Self::Stored(adapters) => adapters.values_mut().for_each(put),
        }
        self
    }

    fn configs(&self) -> Vec<LoraConfig> {
        match self {
            Self::New { config, .. } => vec![*config],
            Self::Given { adapter, common } => {
                let pairs = adapter.layers.values().flat_map(ExpertAdapter::pairs);
                pairs.map(|(_, pair)| of_pair(pair, common)).collect()
            }
            Self::Stored(adapters) => adapters.values().copied().collect(),
        }
    }

    /// Rank and alpha of the adapters, each combination once.
    pub fn ranks(&self) -> Vec<(usize, f64)> {
        let mut ranks = Vec::new();
        for rank in self
            .configs()
            .iter()
            .map(|config| (config.rank, config.alpha))
        {
            if !ranks.contains(&rank) {
                ranks.push(rank);
            }
        }
        ranks
    }

    /// What the adapters are beside plain LoRA.
    pub fn kinds(&self) -> Vec<String> {
        let configs = self.configs();
        let any = |of: fn(&LoraConfig) -> bool| configs.iter().any(of);
        let named = [
            (any(|config| config.rslora), "rsLoRA"),
            (any(|config| config.pissa), "PiSSA"),
            (any(|config| config.dora), "DoRA"),
            (
                any(|config| config.sharing == Sharing::SharedOuter),
                "shared outer factors",
            ),
        ];
        let named = named.iter().filter(|(is, _)| *is);
        let mut kinds: Vec<String> = named.map(|(_, name)| name.to_string()).collect();
        let dropout = configs.iter().find_map(|config| config.dropout);
        kinds.extend(dropout.map(|dropout| format!("dropout {dropout}")));
        kinds
    }

    /// Puts the adapters on the blocks.
    ///
    /// # Errors
    /// A pattern that matches no linear, a gate without its up projection, a rank that the topology does not divide,
    /// factors that do not fit the model, or a factor that the experts share on the other side than the hidden one. Every
    /// rank gets the same error.
    ///
    /// # Panics
    /// If a collective fails, which DoRA's magnitudes take to start.
    pub fn put_on<B: AdapterBackend>(
        &self,
        blocks: &mut MoeBlocks<B>,
        mesh: &Mesh<B>,
        device: &B::Device,
    ) -> Result<()> {
        match self {
            Self::New { config, targets } => {
                blocks.add_adapters(targets, config, device)?;
                blocks.layers.iter().try_for_each(check_pair)?;
            }
            Self::Stored(adapters) => {
                for (path, config) in adapters {
                    let mut linears = blocks.linears_mut().into_iter();
                    let linear = linears.find(|linear| linear.targets().contains(&path.as_str()));
                    let linear = linear.with_context(|| {
                        format!(
                            "the checkpoint has an adapter on {path}, which this model has not (give the model it was \
                             trained on)"
                        )
                    })?;
                    linear.adapt(path, config, device)?;
                }
            }
            Self::Given { adapter, common } => {
                for (&number, factors) in &adapter.layers {
                    let index = blocks.numbers.iter().position(|known| *known == number);
                    let index = index.with_context(|| {
                        format!("layer {number} has no experts (use an adapter of this model)")
                    })?;
                    let layer = &mut blocks.layers[index];
                    let local = layer.experts.down.weight.layout().experts.as_ref();
                    let experts = local.map_or(1, |local| local.len() * mesh.ep().size());
                    let sharing =
                        |name: &str, pair: &FactorPair| sharing(number, name, pair, experts);
                    load_layer(layer, factors, sharing, common, device)?;
                }
            }
        }
        for layer in &mut blocks.layers {
            if !matches!(self, Self::Stored(_)) {
                // What is stored says where it started.
                layer.start_pissa(mesh)?;
            }
            layer.start_magnitudes(mesh);
        }
        Ok(())
    }
}

/// Number of trained parameters over all ranks, each counted once.
pub fn trained_parameters<B: ParallelBackend>(blocks: &MoeBlocks<B>, mesh: &Mesh<B>) -> usize {
    let weights = blocks.trained_weights();
    let counts = weights.iter().map(|weight| {
        let layout = weight.layout;
        let experts = layout
            .experts
            .as_ref()
            .map_or(1, |local| local.len() * mesh.ep().size());
        experts * layout.d_out * layout.d_in
    });
    counts.sum()
}

/// Gathers the adapters of all ranks. Every rank calls it and gets the same.
///
/// # Errors
/// Factors that do not belong together, or scales of both kinds.
///
/// # Panics
/// If a collective fails.
pub fn gather_adapter<B: ParallelBackend>(
    blocks: &MoeBlocks<B>,
    mesh: &Mesh<B>,
) -> Result<PeftAdapter> {
    let weights = blocks.trained_weights();
    let rslora = weights.iter().any(|weight| weight.config.rslora);
    if let Some(other) = weights.iter().find(|weight| weight.config.rslora != rslora) {
        bail!(
            "the scale of {} has alpha / rank, that of others alpha / sqrt(rank), and PEFT files have one kind for all \
             (give all adapters the same)",
            other.linear
        );
    }
    let mut adapter = PeftAdapter {
        rslora,
        layers: Default::default(),
    };
    for (&index, layer) in blocks.numbers.iter().zip(&blocks.layers) {
        let factors = gather_layer(layer, mesh)?;
        if factors.gate_up.is_some() || factors.down.is_some() {
            adapter.layers.insert(index, factors);
        }
    }
    Ok(adapter)
}

/// A full tensor on the host.
pub fn to_host<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Result<HostTensor> {
    let shape = tensor.dims();
    let values = tensor.into_data().convert::<f32>().into_vec::<f32>();
    let values = values.expect("the data was converted to f32");
    Ok(HostTensor::new(shape, values)?)
}

/// A gate with an adapter of its own needs one on up too: the files hold both or neither.
fn check_pair<B: Backend>(layer: &MoeLayer<B>) -> Result<()> {
    let gate_up = &layer.experts.gate_up;
    if let ([lora], [whole, gate, up]) = (&gate_up.adapters[..], &gate_up.targets()[..]) {
        let (with, without) = match lora.path() == *gate {
            true => (gate, up),
            false => (up, gate),
        };
        ensure!(
            lora.path() == *whole,
            "the targets choose {with} without {without}, which no adapter file can hold (choose both or neither)"
        );
    }
    Ok(())
}

/// The settings of a pair of factors. Whether the shared one is that on the hidden side is told by [`sharing`].
fn of_pair(pair: &FactorPair, common: &LoraConfig) -> LoraConfig {
    LoraConfig {
        rank: pair.rank(),
        alpha: pair.alpha,
        sharing: match pair.a.shape()[0] == pair.b.shape()[0] {
            true => Sharing::PerExpert,
            false => Sharing::SharedOuter,
        },
        dora: pair.magnitude.is_some(),
        ..*common
    }
}

/// Which factors of a pair the experts share.
fn sharing(number: usize, name: &str, pair: &FactorPair, experts: usize) -> Result<Sharing> {
    let outer = match name {
        ".down_proj" => [false, true],
        _ => [true, false],
    };
    match pair.shared(experts)? {
        [false, false] => Ok(Sharing::PerExpert),
        [true, true] => Ok(Sharing::Shared),
        shared if shared == outer => Ok(Sharing::SharedOuter),
        _ => bail!(
            "layer {number} of the adapter shares the factor of {} on the side of the intermediate extent alone, which \
             is not trained here (give each expert a copy of it first)",
            &name[1..]
        ),
    }
}

fn load_layer<B: Backend>(
    layer: &mut MoeLayer<B>,
    factors: &ExpertAdapter,
    sharing: impl Fn(&str, &FactorPair) -> Result<Sharing>,
    common: &LoraConfig,
    device: &B::Device,
) -> Result<()> {
    let config = |name: &str, pair: &FactorPair| -> Result<LoraConfig> {
        Ok(of_pair(pair, common).with_sharing(sharing(name, pair)?))
    };
    let mlp = &mut layer.experts;
    let path = |linear: &[&str], name: &str| {
        let path = linear.iter().find(|path| path.ends_with(name));
        path.map(|path| path.to_string()).unwrap_or_default()
    };
    let fc1 = match &factors.gate_up {
        None => vec![],
        Some(GateUp::Fused(pair)) => vec![(".gate_up_proj", pair)],
        Some(GateUp::Separate { gate, up }) => vec![(".gate_proj", gate), (".up_proj", up)],
    };
    for (name, pair) in fc1 {
        let path = path(&mlp.gate_up.targets(), name);
        load(
            mlp.gate_up.adapt(&path, &config(name, pair)?, device)?,
            pair,
            device,
        )?;
    }
    if let Some(pair) = &factors.down {
        let path = path(&mlp.down.targets(), ".down_proj");
        load(
            mlp.down
                .adapt(&path, &config(".down_proj", pair)?, device)?,
            pair,
            device,
        )?;
    }
    Ok(())
}

fn load<B: Backend, P: Placement>(
    lora: &mut Lora<B, ExpertTp, P>,
    pair: &FactorPair,
    device: &B::Device,
) -> Result<()> {
    lora.load(pair.a.data(), pair.b.data(), device)?;
    if let Some(magnitude) = &pair.magnitude {
        lora.load_magnitude(magnitude.data(), device)?;
    }
    Ok(())
}

fn gather_layer<B: ParallelBackend>(layer: &MoeLayer<B>, mesh: &Mesh<B>) -> Result<ExpertAdapter> {
    let fc1 = &layer.experts.gate_up.adapters;
    let gate_up = match fc1.as_slice() {
        [] => None,
        [fused] => Some(GateUp::Fused(gather(fused, mesh)?)),
        [first, second] => {
            // The two lie in the order in which they were put there.
            let (gate, up) = match first.path().ends_with(".gate_proj") {
                true => (first, second),
                false => (second, first),
            };
            Some(GateUp::Separate {
                gate: gather(gate, mesh)?,
                up: gather(up, mesh)?,
            })
        }
        more => unreachable!("{} adapters on a linear of two fragments", more.len()),
    };
    let down = layer.experts.down.adapters.first();
    Ok(ExpertAdapter {
        gate_up,
        down: down.map(|lora| gather(lora, mesh)).transpose()?,
    })
}

fn gather<B: ParallelBackend, P: Placement>(
    lora: &Lora<B, ExpertTp, P>,
    mesh: &Mesh<B>,
) -> Result<FactorPair> {
    let (etp, ep) = (mesh.expert_tp(), mesh.ep());
    let a = to_host(lora.a.gather_all(etp, ep))?;
    let b = to_host(lora.b.gather_all(etp, ep))?;
    let LoraConfig { alpha, rslora, .. } = *lora.config();
    let mut pair = FactorPair::new(a, b, alpha)?;
    if let Some(start) = &lora.pissa {
        let a = to_host(start.a.gather_all(etp, ep))?;
        let b = to_host(start.b.gather_all(etp, ep))?;
        pair = pair.since(&FactorPair::new(a, b, alpha)?, rslora)?;
    }
    let Some(magnitude) = &lora.magnitude else {
        return Ok(pair);
    };
    let magnitude = to_host(magnitude.gather_all(etp, ep).squeeze_dim::<2>(2))?;
    Ok(pair.with_magnitude(magnitude)?)
}
