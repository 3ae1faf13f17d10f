//! What the job prints: a banner, its progress and a summary.

use std::fmt;
use std::io::{IsTerminal, Write, stderr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::args::{OptimizerKind, RankLayout};
use crate::backend::{BackendKind, TransportKind};
use crate::merge::MergeReport;

/// What the job is about to do.
#[derive(Clone, Debug)]
pub struct Banner {
    /// Model directory.
    pub model: PathBuf,
    /// Text file.
    pub text: PathBuf,
    /// What the ranks compute on.
    pub backend: BackendKind,
    /// What they communicate over.
    pub transport: TransportKind,
    /// How the ranks are laid out.
    pub layout: RankLayout,
    /// Parameters of the adapters, over all ranks and each counted once.
    pub trained: usize,
    /// Parameters of the model, each counted once.
    pub frozen: usize,
    /// Rank of the adapters and numerator of their scale, each combination once.
    pub ranks: Vec<(usize, f64)>,
    /// What they are beside plain LoRA.
    pub kinds: Vec<String>,
    /// How the adapters are updated.
    pub optimizer: OptimizerKind,
    /// Learning rate.
    pub lr: f64,
    /// How many times as fast as `A` the factor `B` learns.
    pub lora_plus: f64,
    /// Norm that gradients are scaled down to.
    pub max_norm: Option<f64>,
    /// Training steps done before.
    pub done: usize,
    /// Training steps, those done before included.
    pub steps: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Bytes of a sequence.
    pub length: usize,
}

impl fmt::Display for Banner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.trained + self.frozen;
        let share = 100.0 * self.trained as f64 / all.max(1) as f64;
        writeln!(f, "model     {}", self.model.display())?;
        writeln!(f, "text      {}", self.text.display())?;
        writeln!(f, "backend   {} over {}", self.backend, self.transport)?;
        writeln!(f, "topology  {}", self.layout)?;
        let ranks = self.ranks.iter();
        let ranks: Vec<String> = ranks
            .map(|(r, alpha)| format!("rank {r}, alpha {alpha}"))
            .collect();
        write!(f, "adapters  {}", ranks.join("; "))?;
        for kind in &self.kinds {
            write!(f, ", {kind}")?;
        }
        writeln!(f)?;
        writeln!(
            f,
            "trained   {} of {} parameters ({share:.2}%)",
            grouped(self.trained),
            grouped(all)
        )?;
        match self.done {
            0 => write!(f, "training  {} steps", self.steps)?,
            done => write!(f, "training  steps {} to {}", done + 1, self.steps)?,
        }
        write!(
            f,
            " of {} x {} bytes, {} with learning rate {}",
            self.batch, self.length, self.optimizer, self.lr
        )?;
        if self.lora_plus != 1.0 {
            write!(f, ", {} times that for B", self.lora_plus)?;
        }
        match self.max_norm {
            Some(max_norm) => write!(f, ", gradients clipped to a norm of {max_norm}"),
            None => Ok(()),
        }
    }
}

/// What the job has done.
#[derive(Clone, Debug)]
pub struct Summary {
    /// Training steps done.
    pub steps: usize,
    /// Bytes trained on.
    pub tokens: usize,
    /// Time that the steps took.
    pub elapsed: Duration,
    /// Mean loss of the evaluation part before training, in nats a byte.
    pub eval_before: f64,
    /// Mean loss of the evaluation part after training, in nats a byte.
    pub eval_after: f64,
    /// How far the merged model's logits are from the adapted model's.
    pub merge: MergeReport,
    /// Directory that holds the adapter.
    pub out: PathBuf,
    /// Directory that holds the merged model, if it was asked for.
    pub merged: Option<PathBuf>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "trained   {} steps, {} bytes in {:.1} s ({} tokens/s)",
            self.steps,
            grouped(self.tokens),
            self.elapsed.as_secs_f64(),
            speed(self.tokens, self.elapsed)
        )?;
        writeln!(
            f,
            "eval      loss {:.4} before, {:.4} after",
            self.eval_before, self.eval_after
        )?;
        let MergeReport {
            error, left_out, ..
        } = self.merge;
        write!(
            f,
            "merged    logits within {error:.1e} of the adapted model's"
        )?;
        if left_out > 0 {
            write!(
                f,
                ", {} positions behind a tie in routing left out",
                grouped(left_out)
            )?;
        }
        write!(f, "\nadapter   {}", self.out.display())?;
        match &self.merged {
            Some(folder) => write!(f, "\nmodel     {}", folder.display()),
            None => Ok(()),
        }
    }
}

/// Shows the loss and the speed of every step: a bar on a terminal, a plain line every few steps elsewhere.
pub struct Progress {
    steps: usize,
    done: usize,
    tokens: usize,
    start: Instant,
    output: Output,
}

enum Output {
    Bar(ProgressBar),
    Lines {
        every: usize,
        writer: Box<dyn Write + Send>,
    },
}

impl Progress {
    /// Reports `steps` steps on standard error; without a terminal it writes a line every `every` steps.
    pub fn stderr(steps: usize, every: usize) -> Self {
        match stderr().is_terminal() {
            true => {
                let bar = ProgressBar::new(steps as u64);
                let template = "{bar:30} {pos}/{len}  {msg}";
                if let Ok(style) = ProgressStyle::with_template(template) {
                    bar.set_style(style);
                }
                Self::with_output(steps, Output::Bar(bar))
            }
            false => Self::lines(steps, every, stderr()),
        }
    }

    /// Reports `steps` steps as lines: the first, the last and every `every`-th in between.
    pub fn lines(steps: usize, every: usize, writer: impl Write + Send + 'static) -> Self {
        let (every, writer) = (every.max(1), Box::new(writer));
        Self::with_output(steps, Output::Lines { every, writer })
    }

    fn with_output(steps: usize, output: Output) -> Self {
        Self {
            steps,
            done: 0,
            tokens: 0,
            start: Instant::now(),
            output,
        }
    }

    /// Counts one step, its mean loss over all ranks and the number of bytes of its batch.
    pub fn step(&mut self, loss: f64, tokens: usize) {
        self.done += 1;
        self.tokens += tokens;
        let (done, steps) = (self.done, self.steps);
        let speed = speed(self.tokens, self.start.elapsed());
        let message = format!("loss {loss:.4}  {speed} tokens/s");
        match &mut self.output {
            Output::Bar(bar) => {
                bar.set_message(message);
                bar.inc(1);
            }
            Output::Lines { every, writer } => {
                if done == 1 || done == steps || done.is_multiple_of(*every) {
                    // A closed pipe must not end the training.
                    let _ = writeln!(writer, "step {done}/{steps}  {message}");
                }
            }
        }
    }

    /// Ends the report and tells how many bytes the steps had and how long they took.
    pub fn finish(self) -> (usize, Duration) {
        if let Output::Bar(bar) = &self.output {
            bar.abandon();
        }
        (self.tokens, self.start.elapsed())
    }
}

/// The error and its causes in one line; a cause that a message names itself is not repeated.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Bytes a second, rounded.
fn speed(tokens: usize, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-9);
    grouped((tokens as f64 / seconds).round() as usize)
}

/// The number with a comma between every three digits.
fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn numbers_are_grouped_by_three() {
        let texts = [0, 12, 999, 1000, 206_208, 1_234_567].map(grouped);
        assert_eq!(
            texts,
            ["0", "12", "999", "1,000", "206,208", "1,234,567"].map(String::from)
        );
    }

    #[test]
    fn lines_come_first_last_and_every_few_steps() {
        let writer = Shared::default();
        let mut progress = Progress::lines(7, 3, writer.clone());
        for step in 0..7 {
            progress.step(3.0 - f64::from(step), 256);
        }
        let (tokens, _) = progress.finish();
        assert_eq!(tokens, 7 * 256);
        let text = String::from_utf8(writer.0.lock().unwrap().clone()).unwrap();
        let steps: Vec<&str> = text
            .lines()
            .filter_map(|line| line.split("  ").next())
            .collect();
        assert_eq!(steps, ["step 1/7", "step 3/7", "step 6/7", "step 7/7"]);
        assert!(text.lines().next().unwrap().contains("loss 3.0000"));
        assert!(text.lines().all(|line| line.ends_with(" tokens/s")));
    }

    #[test]
    fn the_banner_names_what_is_trained_and_where() {
        let mut banner = Banner {
            model: "model".into(),
            text: "text".into(),
            backend: BackendKind::Cuda,
            transport: TransportKind::Nccl,
            layout: RankLayout {
                world: 4,
                ep: 2,
                etp: 2,
                expert_dp: 1,
            },
            trained: 10_000,
            frozen: 190_000,
            ranks: vec![(8, 16.0), (2, 0.5)],
            kinds: vec![],
            optimizer: OptimizerKind::Adamw,
            lr: 0.005,
            lora_plus: 1.0,
            max_norm: None,
            done: 0,
            steps: 40,
            batch: 4,
            length: 64,
        };
        assert_eq!(
            banner.to_string(),
            "model     model\n\
             text      text\n\
             backend   cuda over nccl\n\
             topology  4 ranks: ep 2 x etp 2 x expert dp 1\n\
             adapters  rank 8, alpha 16; rank 2, alpha 0.5\n\
             trained   10,000 of 200,000 parameters (5.00%)\n\
             training  40 steps of 4 x 64 bytes, adamw with learning rate 0.005"
        );
        banner.kinds = vec!["DoRA".into(), "dropout 0.1 before A".into()];
        banner.lora_plus = 16.0;
        banner.max_norm = Some(0.5);
        banner.done = 6;
        let lines = banner.to_string();
        let lines: Vec<&str> = lines.lines().collect();
        assert_eq!(
            lines[4],
            "adapters  rank 8, alpha 16; rank 2, alpha 0.5, DoRA, dropout 0.1 before A"
        );
        assert_eq!(
            lines[6],
            "training  steps 7 to 40 of 4 x 64 bytes, adamw with learning rate 0.005, 16 times that for B, gradients \
             clipped to a norm of 0.5"
        );
    }

    #[test]
    fn causes_are_told_once() {
        let inner = anyhow::anyhow!("no space (free some)");
        let outer = inner.context("cannot write x: no space (free some)");
        assert_eq!(describe(&outer), "cannot write x: no space (free some)");
        let top = outer.context("text 'x'");
        assert_eq!(
            describe(&top),
            "text 'x': cannot write x: no space (free some)"
        );
    }

    #[test]
    fn the_summary_tells_what_became_of_the_loss() {
        let mut summary = Summary {
            steps: 40,
            tokens: 10_240,
            elapsed: Duration::from_secs(4),
            eval_before: 3.5,
            eval_after: 2.25,
            merge: MergeReport {
                error: 1.5e-6,
                compared: 1024,
                left_out: 0,
            },
            out: "out".into(),
            merged: None,
        };
        assert_eq!(
            summary.to_string(),
            "trained   40 steps, 10,240 bytes in 4.0 s (2,560 tokens/s)\n\
             eval      loss 3.5000 before, 2.2500 after\n\
             merged    logits within 1.5e-6 of the adapted model's\n\
             adapter   out"
        );
        summary.merge.left_out = 3;
        summary.merged = Some("merged".into());
        assert!(summary.to_string().ends_with(
            "merged    logits within 1.5e-6 of the adapted model's, 3 positions behind a tie in routing left out\n\
             adapter   out\n\
             model     merged"
        ));
    }
}
