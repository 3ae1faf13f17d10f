//! The job from flags to files.

use std::io::{Write, stdout};
use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{AdamWConfig, SgdConfig};
use burn_moe_lora::adapters::{Dropout, LoraConfig, ResumableOptimizer, Sharing, TrainBackend};
use burn_moe_lora::checkpoint::{Checkpoint, Manifest};
use burn_moe_lora::experts::ExpertLoad;
use burn_moe_lora::interchange::{HubModel, PeftAdapter};
use burn_moe_lora::parallel::{Topology, TopologyConfig};

use crate::adapter::{AdapterPlan, trained_parameters};
use crate::args::{Args, OptimizerKind, RankLayout};
use crate::merge::check_merged;
use crate::metrics::{MetricsFile, StepMetrics, read_metrics};
use crate::moe::MoeBlocks;
use crate::output::{Output, same_folder};
use crate::picture::{LayerExperts, draw_experts, draw_loss};
use crate::rank_model::RankModel;
use crate::ranks::{self, Rank};
use crate::report::{Banner, Progress, Summary};
use crate::text::TextDataset;
use crate::trainer::{StepReport, Trainer};

/// A job whose flags and files have been checked.
pub struct Job {
    pub(crate) args: Args,
    pub(crate) layout: RankLayout,
    pub(crate) topology: Topology,
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
        args.backend.check(args.transport())?;
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
        let mut plan = match (&resumed, &args.adapter) {
            (Some(checkpoint), _) => AdapterPlan::stored(checkpoint)?,
            (None, Some(folder)) => AdapterPlan::given(PeftAdapter::read(folder, config)?),
            (None, None) => AdapterPlan::New {
                config: LoraConfig::new(args.rank, args.alpha)
                    .with_seed(args.seed)
                    .with_rslora(args.rslora)
                    .with_dora(args.dora)
                    .with_pissa(args.pissa)
                    .with_sharing(match args.shared_outer {
                        true => Sharing::SharedOuter,
                        false => Sharing::PerExpert,
                    }),
                targets: args.targets(),
            },
        };
        if args.dropout > 0.0 {
            plan = plan.with_dropout(Dropout::before_a(args.dropout), args.seed);
        }
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

    /// Trains on every rank; writes the adapter, and the merged model if a folder was given for it. Only the process of
    /// rank 0 has a summary.
    ///
    /// # Errors
    /// Sizes that the topology does not divide, targets that match nothing, files that cannot be written, a merged model
    /// that differs from the adapted one, or a rank that failed.
    pub fn run(&self) -> Result<Option<Summary>> {
        ranks::run(self)
    }

    /// The part of one rank; every rank of the world does it.
    ///
    /// # Panics
    /// If a collective fails.
    pub(crate) fn train_on<B: TrainBackend>(&self, rank: &Rank<B>) -> Result<Option<Summary>> {
        let plan = Some(&self.plan);
        let model = RankModel::load(&self.hub, plan, rank.mesh.clone(), &rank.device);
        let model = model.and_then(|model| {
            // Before the training is found out that nothing could be written after it.
            if rank.is_first() {
                self.output().prepare()?;
            }
            Ok(model)
        });
        let model = rank.agree(model)?;
        match self.args.optimizer {
            OptimizerKind::Sgd => self.train_with(rank, model, SgdConfig::new().init()),
            OptimizerKind::Adamw => self.train_with(rank, model, AdamWConfig::new().init()),
        }
    }

    fn train_with<B: TrainBackend, O: ResumableOptimizer<B::Inner>>(
        &self,
        rank: &Rank<B>,
        model: RankModel<B>,
        optimizer: OptimizerAdaptor<O, MoeBlocks<B>, B>,
    ) -> Result<Option<Summary>> {
        let device = &rank.device;
        let Args { steps, batch, .. } = self.args;
        let first = rank.is_first();
        let trained = trained_parameters(&model.blocks, &model.mesh);
        let mut trainer = Trainer::new(model, optimizer, self.args.learning_rate(), device.clone())
            .with_lora_plus(self.args.lora_plus)?;
        if let Some(max_norm) = self.args.max_norm {
            trainer = trainer.with_max_norm(max_norm);
        }
        if let Some(checkpoint) = &self.resumed {
            trainer.resume(checkpoint)?;
        }
        let done = trainer.steps();
        if first {
            // A closed pipe must not end the training.
            let _ = writeln!(stdout(), "{}", self.banner(trained, done));
        }
        let held_out = self.text.eval_batches(batch, self.layout.world);
        let eval_before = trainer.model.valid().evaluate(&held_out, device)?;
        rank.check();
        ensure!(
            eval_before.is_finite(),
            "the loss before training is {eval_before} (the model or the adapter holds values that are no finite \
             numbers, or --alpha is far off: fetch the files again or change --alpha)"
        );

        let left = steps - done;
        let metrics = first.then(|| MetricsFile::create(&self.args.out, done));
        let mut metrics = rank.agree(metrics.transpose())?;
        let mut progress = first.then(|| Progress::stderr(left, left.div_ceil(10)));
        let mut experts = LayerExperts::of(&trainer.model.blocks.numbers);
        for step in done..steps {
            let start = Instant::now();
            let batch = self.text.train_batch(step, batch);
            let StepReport {
                loss,
                gradient_norm,
                loads,
            } = trainer.step(&batch)?;
            rank.check();
            ensure!(
                loss.is_finite(),
                "the loss of step {} is {loss} (lower --lr, --alpha or --lora-plus)",
                step + 1
            );
            ensure!(
                gradient_norm.is_finite(),
                "the norm of the gradients of step {} is {gradient_norm} (lower --lr, --alpha or --lora-plus)",
                step + 1
            );
            for (experts, load) in experts.iter_mut().zip(&loads) {
                experts.add(load);
            }
            let tokens = batch.rows() * batch.length();
            if let Some(progress) = &mut progress {
                progress.step(loss, tokens);
            }
            if let Some(metrics) = &mut metrics {
                metrics.push(&StepMetrics {
                    step: step + 1,
                    loss,
                    gradient_norm,
                    idle_experts: loads.iter().map(ExpertLoad::idle).sum(),
                    imbalance: loads.iter().map(ExpertLoad::imbalance).fold(1.0, f64::max),
                    tokens,
                    seconds: start.elapsed().as_secs_f64(),
                });
            }
            let between = step + 1 < steps && self.saves_after(step + 1);
            if let (Some(folder), true) = (&self.args.checkpoint, between) {
                trainer.save(folder)?;
            }
        }
        let (tokens, elapsed) = progress.map(Progress::finish).unwrap_or_default();

        let adapted = trainer.model.valid();
        let eval_after = adapted.evaluate(&held_out, device)?;
        rank.check();
        ensure!(
            eval_after.is_finite(),
            "the loss after training is {eval_after}, so no adapter is written (lower --lr, --alpha or --lora-plus)"
        );
        self.output().write_adapter(&adapted, rank)?;
        if let Some(folder) = &self.args.checkpoint {
            trainer.save(folder)?;
        }
        let mut merged = adapted.clone();
        merged.blocks.merge(&merged.mesh)?;
        let merge = check_merged(&adapted, &merged, &held_out, device);
        rank.check();
        let merge = merge?;
        self.output().write_merged(&merged, rank)?;
        let norms = adapted.blocks.expert_norms(&adapted.mesh);
        for (experts, norms) in experts.iter_mut().zip(norms) {
            experts.norms = norms;
        }
        let written = metrics.map_or(Ok(()), |metrics| {
            metrics.finish()?;
            let evals = [(done, eval_before), (steps, eval_after)];
            draw_loss(&self.args.out, &read_metrics(&self.args.out)?, evals)?;
            draw_experts(&self.args.out, &experts)
        });
        rank.agree(written)?;
        Ok(first.then(|| Summary {
            steps: left,
            tokens,
            elapsed,
            eval_before,
            eval_after,
            merge,
            out: self.args.out.clone(),
            merged: self.args.merged.clone(),
        }))
    }

    fn output(&self) -> Output<'_> {
        Output {
            args: &self.args,
            hub: &self.hub,
        }
    }

    fn saves_after(&self, steps: usize) -> bool {
        let every = self.args.save_every;
        every.is_some_and(|every| steps.is_multiple_of(every))
    }

    fn banner(&self, trained: usize, done: usize) -> Banner {
        let args = &self.args;
        let shapes = self
            .hub
            .names()
            .filter_map(|name| self.hub.shape(name).ok());
        Banner {
            model: args.model.clone(),
            text: args.text.clone(),
            backend: args.backend,
            transport: args.transport(),
            layout: self.layout,
            trained,
            frozen: shapes.map(|shape| shape.iter().product::<usize>()).sum(),
            ranks: self.plan.ranks(),
            kinds: self.plan.kinds(),
            optimizer: args.optimizer,
            lr: args.learning_rate(),
            lora_plus: args.lora_plus,
            max_norm: args.max_norm,
            done,
            steps: args.steps,
            batch: args.batch,
            length: args.length,
        }
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
