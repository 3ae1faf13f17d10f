//! What variants of an adapter take on a whole linear, in wall time: bare, with LoRA, with DoRA, and
//! named adapters at equal tokens.
//!
//! Whole linears, since DoRA needs the base's weight and scales its output.

use burn::backend::Autodiff;
use burn::tensor::{DType, Distribution, Tensor};
use burn_cubecl::cubecl::cuda::CudaDevice;
use burn_moe_lora::adapters::{Linear, Placement, Weight};
use burn_moe_lora::prelude::*;
use serde_json::json;

use crate::Args;
use crate::calls::{Cuda, Fused, Plain};
use crate::case::{CASES, Case, EXPERTS, FFN, HIDDEN, RANK, TOKENS};
use crate::cotangent::from_cotangent;
use crate::gpu::Gpu;
use crate::ranks;
use crate::report::Report;
use crate::times::{Times, wall};

/// What a linear carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variant {
    Bare,
    Lora,
    Dora,
    /// Named adapters, each with equal rows of every expert.
    Named(usize),
}

const VARIANTS: [Variant; 5] = [
    Variant::Bare,
    Variant::Lora,
    Variant::Dora,
    Variant::Named(1),
    Variant::Named(8),
];

enum AnyPlacement<B: Cuda> {
    Column(ColumnLinear<Autodiff<B>, ExpertTp>),
    Row(RowLinear<Autodiff<B>, ExpertTp>),
}

/// One rank's linear, its rows and its inputs.
struct Subject<B: Cuda> {
    linear: AnyPlacement<B>,
    group: Group<Autodiff<B>, ExpertTp>,
    rows: RowGroups,
    inputs: Vec<Tensor<Autodiff<B>, 2>>,
    cotangents: Vec<Tensor<B, 2>>,
    scalar: Tensor<B, 1>,
}

impl<B: Cuda> Subject<B> {
    fn new(
        case: &Case,
        variant: Variant,
        group: Group<Autodiff<B>, ExpertTp>,
        inputs: usize,
        device: &CudaDevice,
    ) -> Self {
        let linear = match case.down {
            true => AnyPlacement::Row(adapted((FFN, HIDDEN), variant, &group, device)),
            false => AnyPlacement::Column(adapted((HIDDEN, FFN), variant, &group, device)),
        };
        let rows = RowGroups::new(&[TOKENS / EXPERTS; EXPERTS], TOKENS);
        let mut rows = rows.expect("the counts sum to the tokens");
        if let Variant::Named(adapters) = variant {
            let rows_of_slot = TOKENS / EXPERTS / adapters;
            let mut slots: Vec<Slot> = (0..adapters).map(|k| Slot::named(&name(k))).collect();
            // Rows of an expert lie by slot.
            slots.sort();
            let of_expert: Vec<Slot> = slots
                .into_iter()
                .flat_map(|slot| std::iter::repeat_n(slot, rows_of_slot))
                .collect();
            let tokens = TokenIds::new(0, 0..TOKENS as u64).with_slots(of_expert.repeat(EXPERTS));
            rows = rows.with_tokens(tokens);
        }
        let [input, _, output] = case.widths(group.size());
        let random = |width| -> Vec<Tensor<B, 2>> {
            let one = |_| Tensor::random([TOKENS, width], Distribution::Normal(0.0, 1.0), device);
            (0..inputs).map(one).collect()
        };
        let tracked = |x| Tensor::from_inner(x).require_grad();
        Self {
            linear,
            group,
            rows,
            inputs: random(input).into_iter().map(tracked).collect(),
            cotangents: random(output),
            scalar: Tensor::ones([1], device),
        }
    }

    fn forward(&self, call: usize) -> Tensor<Autodiff<B>, 2> {
        let x = self.inputs[call % self.inputs.len()].clone();
        let (group, rows) = (&self.group, &self.rows);
        match &self.linear {
            AnyPlacement::Row(linear) => {
                let y = linear.forward_suppressed(group.shard(x), rows);
                y.into_term()
            }
            AnyPlacement::Column(linear) => linear.forward(group.fanout(x), rows).into_tensor(),
        }
    }

    /// Gradients are let go of in order, as an optimizer takes them. In the order of burn's hash map every
    /// call is another sequence of operations to `Fusion`, which then finds no plan for it.
    fn forward_backward(&self, call: usize) {
        let (x, dy) = (
            &self.inputs[call % self.inputs.len()],
            &self.cotangents[call % self.cotangents.len()],
        );
        let root = from_cotangent(self.forward(call), dy.clone(), self.scalar.clone());
        let mut grads = root.backward();
        drop(x.grad_remove(&mut grads));
        let trained = match &self.linear {
            AnyPlacement::Row(linear) => linear.trained_weights(),
            AnyPlacement::Column(linear) => linear.trained_weights(),
        };
        for trained in trained {
            match trained.weight {
                Weight::One(weight) => drop(weight.val().grad_remove(&mut grads)),
                Weight::PerExpert(weight) => drop(weight.val().grad_remove(&mut grads)),
            }
        }
    }
}

fn name(adapter: usize) -> String {
    format!("adapter-{adapter}")
}

/// A linear of experts, from `d_in` to `d_out`.
fn adapted<B: Cuda, P: Placement>(
    (d_in, d_out): (usize, usize),
    variant: Variant,
    group: &Group<Autodiff<B>, ExpertTp>,
    device: &CudaDevice,
) -> Linear<Autodiff<B>, ExpertTp, P> {
    let fits = "the shapes of the bench fit";
    // Of no interest, but for row norms that are not zero.
    let weight = |expert, row, column| ((expert + 3 * row + 7 * column) % 64) as f32 / 1024.0;
    let mut linear: Linear<_, _, P> = LinearConfig::new("fc", d_in, d_out)
        .with_experts(0..EXPERTS)
        .with_dtype(DType::BF16)
        .init(group, weight, device)
        .expect(fits);
    let config = LoraConfig::new(RANK, RANK as f64)
        .with_init_b(Init::Kaiming)
        .with_dtype(DType::BF16);
    match variant {
        Variant::Bare => {}
        Variant::Lora => {
            linear.adapt("fc", &config, device).expect(fits);
        }
        Variant::Dora => {
            let config = config.with_dora(true);
            linear.adapt("fc", &config, device).expect(fits);
            linear.start_magnitudes(group);
        }
        Variant::Named(adapters) => {
            for k in 0..adapters {
                let added = linear.adapt_named("fc", &name(k), &config, device);
                added.expect(fits);
            }
        }
    }
    linear
}

/// Prints the times of every variant on the grouped linears, without and with fusion.
pub fn run(args: &Args, rank: &Nccl, report: &mut Report) {
    let gpu = Gpu::open(rank.device());
    report.text(format!(
        "wall time of a whole linear in us, {TOKENS} tokens, {EXPERTS} experts, rank {RANK}, bf16, EP = {}, ETP = {}; \
         median of {} windows of {} calls over {} sets of inputs",
        args.ep, args.etp, args.windows, args.calls, args.inputs
    ));
    report.text(format!(
        "{:<13}{:<8}{:>8}{:>10}{:>10}{:>10}{:>10}{:>10}{:>14}{:>14}{:>12}",
        "case",
        "backend",
        "pass",
        "bare",
        "LoRA",
        "DoRA",
        "1 named",
        "8 named",
        "DoRA of LoRA",
        "of its own",
        "8 of 1"
    ));
    time::<Plain>(args, rank, report, &gpu, "plain");
    time::<Fused>(args, rank, report, &gpu, "fusion");
}

fn time<B: Cuda>(args: &Args, rank: &Nccl, report: &mut Report, gpu: &Gpu, backend: &str) {
    let group = Group::<Autodiff<B>, ExpertTp>::new(ranks::expert_tp::<B>(args, rank));
    let world = ranks::world::<B>(rank);
    let begin = || world.barrier().unwrap_or_else(|error| panic!("{error}"));
    let wait = || {
        B::sync(rank.device()).expect("the GPU's work ends well");
        gpu.wait();
    };
    for case in CASES.iter().filter(|case| case.grouped) {
        let times = VARIANTS.map(|variant| {
            let mut subject =
                Subject::<B>::new(case, variant, group.clone(), args.inputs, rank.device());
            // burn lets go of what a forward pass saved at the end of the next backward pass.
            let clear = |subject: &mut Subject<B>| subject.forward_backward(0);
            let forward = wall(
                args.windows,
                args.calls,
                begin,
                wait,
                &mut subject,
                |subject, call| drop(subject.forward(call)),
                clear,
            );
            let both = wall(
                args.windows,
                args.calls,
                begin,
                wait,
                &mut subject,
                |subject, call| subject.forward_backward(call),
                |_| (),
            );
            [forward, both]
        });
        for (at, pass) in ["fwd", "fwd+bwd"].into_iter().enumerate() {
            let [bare, lora, dora, one, eight] = times.map(|times: [Times; 2]| times[at].median);
            // Of the time of the linear with LoRA, and of what LoRA adds to it.
            let (of_lora, of_own) = ((dora - lora) / lora, (dora - lora) / (lora - bare));
            report.row(
                format!(
                    "{:<13}{backend:<8}{pass:>8}{bare:>10.1}{lora:>10.1}{dora:>10.1}{one:>10.1}{eight:>10.1}\
                     {of_lora:>14.3}{of_own:>14.3}{:>12.3}",
                    case.name,
                    eight / one
                ),
                &json!({
                    "part": "variants", "case": case.name, "backend": backend, "pass": pass,
                    "ep": args.ep, "etp": args.etp, "gpus": rank.world_size(),
                    "inputs": args.inputs, "bare_us": bare, "lora_us": lora, "dora_us": dora,
                    "dora_of_lora": of_lora, "dora_of_own": of_own, "named_1_us": one,
                    "named_8_us": eight, "named_8_of_1": eight / one,
                }),
            );
        }
    }
}
