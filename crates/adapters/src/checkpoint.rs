//! Adapters and the state of their optimizer, to and from sharded checkpoints.
//!
//! ```text
//! {linear}.lora_A                    factor, sharded as its linear is
//! {linear}.lora_A.adamw.moment_1     what the optimizer keeps of it, sharded as the factor is
//! {linear}.lora_A.adamw.time         a count, the same on every rank
//! {linear}.lora_A.start              with PiSSA, where it started
//! ```

mod content;
mod factor;
mod settings;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{AutodiffModule, Module};
use burn::optim::Optimizer;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use moe_lora_checkpoint::{
    Checkpoint, CheckpointError, Dtype, GroupSizes, LoadReport, Place, Save, Strictness,
    TensorLayout,
};
use moe_lora_parallel::{Mesh, ParallelBackend};

use crate::{LoraConfig, ResumableOptimizer, ResumeError, TrainedWeight, Weight};
use content::{Contents, Values};
use factor::Factor;
use settings::{check_entry, check_settings, config_of, entry_of};

/// Settings that rebuild the adapters of a checkpoint, by linear.
///
/// # Errors
///
/// When a rank is not that of the stored factors, or an alpha is no finite number.
pub fn stored_adapters(
    checkpoint: &Checkpoint,
) -> Result<BTreeMap<String, LoraConfig>, ResumeError> {
    let entries = checkpoint.manifest().adapters.iter();
    entries
        .map(|(linear, entry)| {
            check_entry(checkpoint, linear, entry)?;
            Ok((linear.clone(), config_of(entry)))
        })
        .collect()
}

/// Saves factors and optimizer state after `step` steps into a folder that all ranks share. Every
/// rank calls it.
///
/// The folder's earlier checkpoint stays whole until this one is, and is removed then.
///
/// # Errors
///
/// When a file cannot be written or replicas differ; every rank gets an error then.
///
/// # Panics
///
/// When a collective fails.
pub fn save_checkpoint<B, I, O, M>(
    folder: &Path,
    step: u64,
    weights: &[TrainedWeight<'_, B>],
    optimizer: &OptimizerAdaptor<O, M, B>,
    mesh: &Mesh<B>,
) -> Result<(), ResumeError>
where
    B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
    I: Backend<Device = B::Device>,
    O: ResumableOptimizer<I>,
    M: AutodiffModule<B>,
{
    let written = write(folder, step, weights, optimizer, mesh);
    let save = together(written, mesh)?;
    let adapters = weights
        .iter()
        .map(|trained| (trained.linear.to_owned(), entry_of(trained.config)));
    let committed = match mesh.rank() {
        0 => save.commit(adapters.collect()).map(|_| ()),
        _ => Ok(()),
    };
    together(committed.map_err(ResumeError::from), mesh)
}

/// Loads factors and optimizer state, saved at any topology. Every rank calls it.
///
/// `weights` lists the factors of the module. Without an error every factor has been replaced, or
/// kept where `strictness` allows it to be missing; with one, nothing was changed.
///
/// # Errors
///
/// When the checkpoint is damaged, does not have the factors of the module as `strictness` asks, or
/// holds the state of another optimizer; every rank gets an error then.
///
/// # Panics
///
/// When a collective fails.
pub fn load_checkpoint<B, I, O, M>(
    checkpoint: &Checkpoint,
    module: M,
    weights: impl FnOnce(&M) -> Vec<TrainedWeight<'_, B>>,
    optimizer: &mut OptimizerAdaptor<O, M, B>,
    mesh: &Mesh<B>,
    strictness: Strictness,
) -> Result<(M, LoadReport), ResumeError>
where
    B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
    I: Backend<Device = B::Device>,
    O: ResumableOptimizer<I>,
    M: AutodiffModule<B>,
{
    let weights = with_starts(&weights(&module));
    let loaded = plan(&weights, mesh).and_then(|(factors, place)| {
        check_settings(checkpoint, &weights)?;
        check_optimizer(checkpoint, &factors, O::NAME, strictness)?;
        let (mut values, report) = read(checkpoint, &factors, Some(O::NAME), &place, strictness)?;
        values.expect_starts(&factors, &weights)?;
        let mut records = <OptimizerAdaptor<O, M, B> as Optimizer<M, B>>::Record::new();
        for factor in &factors {
            if let Some(record) = values.record::<B, I, O>(factor)? {
                records.insert(factor.id, record);
            }
        }
        Ok((values.factors(&factors), records, report))
    });
    let (mut replacement, records, report) = together(loaded, mesh)?;
    let module = module.map(&mut replacement);
    *optimizer = optimizer.clone().load_record(records);
    Ok((module, report))
}

/// Loads factors alone, saved at any topology, and leaves the state of optimizers where it is. Every
/// rank calls it.
///
/// # Errors
///
/// As [`load_checkpoint`].
///
/// # Panics
///
/// When a collective fails.
pub fn load_adapters<B: ParallelBackend, M: Module<B>>(
    checkpoint: &Checkpoint,
    module: M,
    weights: impl FnOnce(&M) -> Vec<TrainedWeight<'_, B>>,
    mesh: &Mesh<B>,
    strictness: Strictness,
) -> Result<(M, LoadReport), ResumeError> {
    let weights = with_starts(&weights(&module));
    let loaded = plan(&weights, mesh).and_then(|(factors, place)| {
        check_settings(checkpoint, &weights)?;
        let (values, report) = read(checkpoint, &factors, None, &place, strictness)?;
        values.expect_starts(&factors, &weights)?;
        Ok((values.factors(&factors), report))
    });
    let (mut replacement, report) = together(loaded, mesh)?;
    Ok((module.map(&mut replacement), report))
}

fn write<B, I, O, M>(
    folder: &Path,
    step: u64,
    weights: &[TrainedWeight<'_, B>],
    optimizer: &OptimizerAdaptor<O, M, B>,
    mesh: &Mesh<B>,
) -> Result<Save, ResumeError>
where
    B: AutodiffBackend<InnerBackend = I> + ParallelBackend,
    I: Backend<Device = B::Device>,
    O: ResumableOptimizer<I>,
    M: AutodiffModule<B>,
{
    let weights = with_starts(weights);
    let (factors, place) = plan(&weights, mesh)?;
    let mut records = optimizer.to_record();
    let mut contents = Contents::default();
    for (factor, trained) in factors.iter().zip(&weights) {
        let record = records.remove(&factor.id);
        match trained.weight {
            Weight::One(param) => {
                contents.add::<B, I, O, 2>(factor, param.val().inner(), record)?;
            }
            Weight::PerExpert(param) => {
                contents.add::<B, I, O, 3>(factor, param.val().inner(), record)?;
            }
        }
    }
    let save = Save::begin(folder, place, step)?;
    save.write(&contents.layouts, |shard| {
        let data = (contents.values[&shard.key])();
        Ok(Cow::Owned(data.bytes.to_vec()))
    })?;
    Ok(save)
}

/// The rank's own outcome, or an error when another rank has one.
fn together<B: ParallelBackend, T>(
    outcome: Result<T, ResumeError>,
    mesh: &Mesh<B>,
) -> Result<T, ResumeError> {
    let all = mesh.all(outcome.is_ok());
    let rank = mesh.rank();
    outcome.and_then(|value| all.then_some(value).ok_or(ResumeError::OtherRank { rank }))
}

/// The factors, each followed by where it started, if PiSSA says so: files hold both alike.
fn with_starts<'a, B: Backend>(weights: &[TrainedWeight<'a, B>]) -> Vec<TrainedWeight<'a, B>> {
    let of = |trained: &TrainedWeight<'a, B>| {
        let start = trained.start.map(|weight| TrainedWeight {
            path: format!("{}.start", trained.path),
            weight,
            start: None,
            ..trained.clone()
        });
        std::iter::once(trained.clone()).chain(start)
    };
    weights.iter().flat_map(of).collect()
}

/// What the files call the factors, and where this rank is among those that hold them.
fn plan<B: ParallelBackend>(
    weights: &[TrainedWeight<'_, B>],
    mesh: &Mesh<B>,
) -> Result<(Vec<Factor<B>>, Place), ResumeError> {
    let topology = mesh.topology();
    let place = GroupSizes::new(topology.ep(), topology.etp())
        .with_tp(topology.tp())
        .with_world(topology.world_size())
        .place(mesh.rank())?;
    let factors = weights
        .iter()
        .map(|trained| Factor::of(trained, topology.ep()))
        .collect::<Result<_, _>>()?;
    Ok((factors, place))
}

/// State of another optimizer is not silently left behind.
fn check_optimizer<B: Backend>(
    checkpoint: &Checkpoint,
    factors: &[Factor<B>],
    optimizer: &'static str,
    strictness: Strictness,
) -> Result<(), ResumeError> {
    if matches!(
        strictness,
        Strictness::AllowUnexpected | Strictness::AllowBoth
    ) {
        return Ok(());
    }
    for factor in factors {
        let stored = checkpoint.manifest().tensors.iter().find_map(|entry| {
            let part = entry.layout.key.strip_prefix(&factor.path)?;
            let (stored, _) = part.strip_prefix('.')?.split_once('.')?;
            (stored != optimizer).then(|| stored.to_owned())
        });
        if let Some(stored) = stored {
            let path = factor.path.clone();
            return Err(ResumeError::OtherOptimizer {
                path,
                stored,
                optimizer,
            });
        }
    }
    Ok(())
}

/// Reads the factors, and what is stored of them under the name of an optimizer.
fn read<B: Backend>(
    checkpoint: &Checkpoint,
    factors: &[Factor<B>],
    optimizer: Option<&str>,
    place: &Place,
    strictness: Strictness,
) -> Result<(Values, LoadReport), ResumeError> {
    let mut wanted = Vec::new();
    for factor in factors {
        wanted.push(factor.layout.shard(place)?);
        let Some(optimizer) = optimizer else { continue };
        let prefix = factor.part_prefix(optimizer);
        for entry in &checkpoint.manifest().tensors {
            let key = &entry.layout.key;
            if !key.starts_with(&prefix) {
                continue;
            }
            let layout = match entry.layout.shape.is_empty() {
                true => TensorLayout::new(key, Dtype::I64, []),
                false => TensorLayout {
                    key: key.clone(),
                    ..factor.layout.clone()
                },
            };
            wanted.push(layout.shard(place)?);
        }
    }
    let allowed = match (optimizer, strictness) {
        (None, Strictness::Exact) => Strictness::AllowUnexpected,
        (None, Strictness::AllowMissing) => Strictness::AllowBoth,
        _ => strictness,
    };
    let (loaded, mut report) = checkpoint.load(&wanted, allowed)?;
    if optimizer.is_none() {
        // The state of an optimizer, `{factor}.{optimizer}.{part}`, is left out and not left over.
        let of = |factor: &Factor<B>, key: &str| {
            let part = key.strip_prefix(&factor.path).unwrap_or_default();
            part.starts_with('.') && part[1..].contains('.')
        };
        let state = |key: &String| factors.iter().any(|factor| of(factor, key));
        report.unexpected.retain(|key| !state(key));
    }
    match report.is_accepted(strictness) {
        true => Ok((Values(loaded), report)),
        false => Err(CheckpointError::Refused {
            report: Box::new(report),
        }
        .into()),
    }
}
