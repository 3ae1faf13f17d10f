//! The job from flags to files.

use std::error::Error;
use std::io::{Write, stdout};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use burn::backend::{Autodiff, Flex};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::Device;
use burn_moe_lora::adapters::{LoraConfig, ResumableOptimizer};
use burn_moe_lora::checkpoint::{Checkpoint, Manifest};
use burn_moe_lora::experts::GateUpTargets;
use burn_moe_lora::interchange::{
    HubModel, InterchangeError, MAX_SHARD_BYTES, ModelWriter, PeftAdapter,
};
use burn_moe_lora::parallel::{Mesh, MockRank, MockWorld, Topology, TopologyConfig};
use tempfile::NamedTempFile;

use crate::adapter::{AdapterPlan, file_layout, gather_adapter, trained_parameters};
use crate::args::{Args, OptimizerKind, RankLayout};
use crate::merge::{check_merged, gather_experts};
use crate::moe::MoeBlocks;
use crate::rank_model::RankModel;
use crate::report::{Banner, Progress, Summary, describe};
use crate::text::TextDataset;
use crate::trainer::Trainer;

/// The backend that the job trains on.
pub type TrainBackend = Autodiff<Flex>;

/// How long a rank waits for the others, which may be writing a large model.
const TIMEOUT: Duration = Duration::from_secs(600);

/// A job whose flags and files have been checked.
pub struct Job {
    args: Args,
    layout: RankLayout,
    topology: Topology,
    hub: HubModel,
    text: TextDataset,
    plan: AdapterPlan,
    resumed: Option<Checkpoint>,
}

impl Job {
    /// Opens the files and checks them against the flags.
    ///
    /// # Errors
    /// Whatever can be told before the ranks start.
    pub fn new(args: Args) -> Result<Self> {
        let layout = args.layout()?;
        let topology = TopologyConfig::new(layout.world)
            .with_ep(layout.ep)
            .with_etp(layout.etp)
            .init()?;
        let hub = HubModel::open(&args.model)?;
        ensure!(
            !args
                .merged
                .as_ref()
                .is_some_and(|merged| same_folder(merged, &args.model)),
            "--merged '{}' is the folder of the --model, which it would overwrite (give another one with --merged)",
            args.model.display()
        );
        let config = hub.config();
        let longest = config.max_position_embeddings;
        ensure!(
            args.length <= longest,
            "length={} is more than max_position_embeddings={longest} (use a --length of at most {longest})",
            args.length
        );
        let text = TextDataset::open(&args.text, config.vocab_size, args.length, args.seed)?;
        check_kind(&args)?;
        let resumed = args.resume.as_deref().map(Checkpoint::open).transpose()?;
        if let Some(checkpoint) = &resumed {
            let step = checkpoint.manifest().step;
            ensure!(
                step < args.steps as u64,
                "the checkpoint has done {step} steps and --steps is {} (raise --steps)",
                args.steps
            );
        }
        let plan = match (&resumed, &args.adapter) {
            (Some(checkpoint), _) => AdapterPlan::stored(checkpoint)?,
            (None, Some(folder)) => AdapterPlan::Given(PeftAdapter::read(folder, config)?),
            (None, None) => AdapterPlan::New {
                config: LoraConfig::new(args.rank, args.alpha).with_seed(args.seed),
                gate_up: match args.separate {
                    true => GateUpTargets::Separate,
                    false => GateUpTargets::Fused,
                },
                targets: args.targets.clone(),
            },
        };
        Ok(Self {
            args,
            layout,
            topology,
            hub,
            text,
            plan,
            resumed,
        })
    }

    /// Trains on every rank, each a thread; writes the adapter, and the merged model if a folder was given for it.
    ///
    /// # Errors
    /// Sizes that the topology does not divide, targets that match nothing, files that cannot be written, a merged model
    /// that differs from the adapted one, or a rank that failed.
    pub fn run(&self) -> Result<Summary> {
        let world = MockWorld::new(self.layout.world).with_timeout(TIMEOUT);
        let output = OnceLock::new();
        let outcomes = world.run_result(|rank| {
            // Flags and files are the same on every rank, so all of them stop here or none.
            let model = match self.load(&rank, &output) {
                Ok(model) => model,
                Err(error) => return Ok(Err(error)),
            };
            match self.train(model) {
                // One rank alone writes files: the others, who wait for it, have to be told.
                Err(error) if error.is::<InterchangeError>() => Err(in_one_line(error)),
                outcome => Ok(outcome),
            }
        })?;
        let first = outcomes.into_iter().next();
        first.context("a world of no ranks (use --world 1 or more)")?
    }

    /// Loads the model of `rank`; the first rank to get there fills `output` for all of them.
    fn load(
        &self,
        rank: &MockRank,
        output: &OnceLock<Result<(), String>>,
    ) -> Result<RankModel<TrainBackend>> {
        let mesh = Mesh::new(self.topology, rank)?;
        let plan = Some(&self.plan);
        let model = RankModel::load(&self.hub, plan, mesh, &Default::default())?;
        let output = output.get_or_init(|| self.prepare_output().map_err(|e| describe(&e)));
        output.clone().map_err(anyhow::Error::msg)?;
        Ok(model)
    }

    fn train(&self, model: RankModel<TrainBackend>) -> Result<Summary> {
        match self.args.optimizer {
            OptimizerKind::Sgd => self.train_with(model, SgdConfig::new().init()),
            OptimizerKind::Adamw => self.train_with(model, AdamWConfig::new().init()),
        }
    }

    fn train_with<O>(
        &self,
        model: RankModel<TrainBackend>,
        optimizer: OptimizerAdaptor<O, MoeBlocks<TrainBackend>, TrainBackend>,
    ) -> Result<Summary>
    where
        O: ResumableOptimizer<Flex>,
    {
        let device = Device::<TrainBackend>::default();
        let Args { steps, batch, .. } = self.args;
        let first = model.mesh.rank() == 0;
        if first {
            let banner = self.banner(trained_parameters(&model.blocks, &model.mesh));
            // A closed pipe must not end the training.
            let _ = writeln!(stdout(), "{banner}");
        }
        let mut trainer = Trainer::new(model, optimizer, self.args.learning_rate(), device);
        let mut done = 0;
        if let Some(checkpoint) = &self.resumed {
            trainer.resume(checkpoint)?;
            done = checkpoint.manifest().step as usize;
        }
        let held_out = self.text.eval_batches(batch, self.layout.world);
        let eval_before = trainer.model.evaluate(&held_out, &device)?;
        ensure!(
            eval_before.is_finite(),
            "the loss before training is {eval_before} (the model or the adapter holds values that are no finite \
             numbers, or --alpha is too large: fetch the files again or lower --alpha)"
        );

        let left = steps - done;
        let mut progress = first.then(|| Progress::stderr(left, left.div_ceil(10)));
        for step in done..steps {
            let batch = self.text.train_batch(step, batch);
            let loss = trainer.step(&batch)?;
            ensure!(
                loss.is_finite(),
                "the loss of step {} is {loss} (lower --lr or --alpha)",
                step + 1
            );
            if let Some(progress) = &mut progress {
                progress.step(loss, batch.rows() * batch.length());
            }
            let between = step + 1 < steps && self.saves_after(step + 1);
            if let (Some(folder), true) = (&self.args.checkpoint, between) {
                trainer.save(folder, step + 1)?;
            }
        }
        let (tokens, elapsed) = progress.map(Progress::finish).unwrap_or_default();

        let adapted = trainer.model.frozen();
        let eval_after = adapted.evaluate(&held_out, &device)?;
        ensure!(
            eval_after.is_finite(),
            "the loss after training is {eval_after}, so no adapter is written (lower --lr or --alpha)"
        );
        self.write_adapter(&adapted)?;
        if let Some(folder) = &self.args.checkpoint {
            trainer.save(folder, steps)?;
        }
        let mut merged = adapted.clone();
        merged.blocks.merge(&merged.mesh)?;
        let merge = check_merged(&adapted, &merged, &held_out, &device)?;
        self.write_merged(&merged)?;
        Ok(Summary {
            steps: left,
            tokens,
            elapsed,
            eval_before,
            eval_after,
            merge,
            out: self.args.out.clone(),
            merged: self.args.merged.clone(),
        })
    }

    fn saves_after(&self, steps: usize) -> bool {
        let every = self.args.save_every;
        every.is_some_and(|every| steps.is_multiple_of(every))
    }

    fn banner(&self, trained: usize) -> Banner {
        let args = &self.args;
        let shapes = self
            .hub
            .names()
            .filter_map(|name| self.hub.shape(name).ok());
        Banner {
            model: args.model.clone(),
            text: args.text.clone(),
            layout: self.layout,
            trained,
            frozen: shapes.map(|shape| shape.iter().product::<usize>()).sum(),
            ranks: self.plan.ranks(),
            optimizer: args.optimizer,
            lr: args.learning_rate(),
            steps: args.steps,
            batch: args.batch,
            length: args.length,
        }
    }

    /// Finds out before the training that nothing could be written after it.
    fn prepare_output(&self) -> Result<()> {
        let adapter = ["adapter_model.safetensors", "adapter_config.json"];
        prepare(&self.args.out, adapter, "--out")?;
        if let Some(folder) = &self.args.checkpoint {
            prepare(folder, ["manifest.json"; 2], "--checkpoint")?;
            let resumed = self.args.resume.as_deref();
            ensure!(
                !Manifest::path(folder).exists()
                    || resumed.is_some_and(|own| same_folder(own, folder)),
                "folder '{}' holds a checkpoint already (give another one with --checkpoint, or go on from it with \
                 --resume)",
                folder.display()
            );
        }
        match &self.args.merged {
            Some(folder) => {
                prepare(folder, ["model.safetensors", "config.json"], "--merged")?;
                ModelWriter::new(&self.hub, folder, MAX_SHARD_BYTES)?;
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn write_adapter(&self, model: &RankModel<TrainBackend>) -> Result<()> {
        let adapter = gather_adapter(&model.blocks, &model.mesh)?;
        if model.mesh.rank() == 0 {
            let base = self.args.model.display().to_string();
            let layout = file_layout(&adapter);
            adapter.write(&self.args.out, self.hub.config(), layout, &base)?;
        }
        Ok(())
    }

    fn write_merged(&self, model: &RankModel<TrainBackend>) -> Result<()> {
        let Some(folder) = &self.args.merged else {
            return Ok(());
        };
        let first = model.mesh.rank() == 0;
        let experts = |layer| gather_experts(&model.blocks, layer, &self.hub, &model.mesh, first);
        if first {
            return ModelWriter::new(&self.hub, folder, MAX_SHARD_BYTES)?.write(experts);
        }
        for layer in 0..model.blocks.layers.len() {
            experts(layer)?;
        }
        Ok(())
    }
}

/// Tells a checkpoint from PEFT files before one is read as the other.
fn check_kind(args: &Args) -> Result<()> {
    let is_checkpoint = |folder: &Path| Manifest::path(folder).is_file();
    let is_peft = |folder: &Path| folder.join("adapter_config.json").is_file();
    if let Some(folder) = args.resume.as_deref() {
        ensure!(
            is_checkpoint(folder) || !is_peft(folder),
            "folder '{}' holds PEFT files and no checkpoint (start from them with --adapter)",
            folder.display()
        );
    }
    if let Some(folder) = args.adapter.as_deref() {
        ensure!(
            is_peft(folder) || !is_checkpoint(folder),
            "folder '{}' holds a checkpoint and no PEFT files (go on from it with --resume)",
            folder.display()
        );
    }
    Ok(())
}

/// Creates the folder if it is missing, and checks that files of these names can be written to it.
fn prepare(folder: &Path, names: [&str; 2], flag: &str) -> Result<()> {
    let failed = |action: &str, error: std::io::Error| {
        let folder = folder.display();
        anyhow!("cannot {action} folder '{folder}': {error} (give another one with {flag})")
    };
    std::fs::create_dir_all(folder).map_err(|error| failed("create", error))?;
    // Gone again when it is dropped here.
    NamedTempFile::new_in(folder).map_err(|error| failed("write to", error))?;
    for path in names.map(|name| folder.join(name)) {
        ensure!(
            !path.is_dir(),
            "'{}' is a folder where a file is to be written (move it or give another folder with {flag})",
            path.display()
        );
    }
    Ok(())
}

/// Whether both are there and are one folder.
fn same_folder(a: &Path, b: &Path) -> bool {
    let [a, b] = [a, b].map(|folder| folder.canonicalize().ok());
    a.is_some() && a == b
}

/// The whole chain as one message: who prints an error of a rank prints no causes.
fn in_one_line(error: anyhow::Error) -> Box<dyn Error + Send + Sync> {
    describe(&error).into()
}
