//! What several named adapters cost on the CPU beside one at equal tokens, forward and backward.
//!
//! Both at the shapes of `adapter`, in alternation; prints the fastest round of each and their ratio.
//!
//! ```text
//! cargo bench -p moe-lora-benches --profile dev --bench multi
//! ```

use std::time::{Duration, Instant};

use burn::backend::{Autodiff, Flex, flex::FlexDevice};
use burn::tensor::{Distribution, Tensor};
use burn_moe_lora::adapters::{MultiLora, Row, RowLora, ShardAxis, Slot, WeightLayout};
use burn_moe_lora::parallel::ExpertTp;
use burn_moe_lora::prelude::*;

type B = Autodiff<Flex>;
type Adapters = MultiLora<B, ExpertTp, Row>;

const TOKENS: usize = 4096;
const RANK: usize = 32;
const EXPERTS: usize = 4;
const D_IN: usize = 2688;
const D_OUT: usize = 2048;
const ROUNDS: usize = 9;

fn main() {
    // `cargo bench` passes flags of the usual harness; a test run only compiles this.
    if std::env::args().any(|arg| arg == "--test") {
        return;
    }
    println!(
        "fc2, {TOKENS} tokens, {EXPERTS} experts, rank {RANK}, f32, fastest of {ROUNDS} rounds"
    );
    println!(
        "{:>8}{:>12}{:>12}{:>8}",
        "slots", "one ms", "slots ms", "ratio"
    );
    for slots in [2, 8] {
        let sides = [case(1), case(slots)];
        let mut fastest = [Duration::MAX; 2];
        for round in 0..2 * (ROUNDS + 1) {
            let side = (round + round / 2) % 2;
            let time = pass(&sides[side]);
            // The first rounds warm up.
            if round >= 2 {
                fastest[side] = fastest[side].min(time);
            }
        }
        let [one, all] = fastest.map(|time| time.as_secs_f64() * 1e3);
        println!("{slots:>8}{one:>12.2}{all:>12.2}{:>8.3}", all / one);
    }
}

/// Adapters with as many slots, and the rows of all of them.
fn case(slots: usize) -> (Adapters, RowGroups) {
    let base = WeightLayout {
        experts: Some(0..EXPERTS),
        d_out: D_OUT,
        d_in: D_IN,
        fragments: 1,
        axis: ShardAxis::In,
        rank: 0,
        ranks: 1,
    };
    let mut adapters = Adapters::new("bench");
    for slot in 0..slots {
        let config = LoraConfig::new(RANK, 32.0).with_init_b(Init::Kaiming);
        let name = format!("adapter-{slot}");
        adapters
            .add(&name, &config, &base, &FlexDevice)
            .expect("the shapes of the bench fit");
    }
    let names = adapters.adapters.iter();
    let of_slot = names.map(|named| Slot::named(named.name()));
    let rows_of_slot = TOKENS / EXPERTS / slots;
    let of_expert: Vec<Slot> = of_slot
        .flat_map(|slot| std::iter::repeat_n(slot, rows_of_slot))
        .collect();
    let tokens = TokenIds::new(0, 0..TOKENS as u64).with_slots(of_expert.repeat(EXPERTS));
    let rows = RowGroups::new(&[TOKENS / EXPERTS; EXPERTS], TOKENS);
    let rows = rows
        .expect("the counts sum to the tokens")
        .with_tokens(tokens);
    (adapters, rows)
}

fn pass((adapters, rows): &(Adapters, RowGroups)) -> Duration {
    let normal = Distribution::Normal(0.0, 1.0);
    let x = Tensor::<B, 2>::random([TOKENS, D_IN], normal, &FlexDevice).require_grad();
    let start = Instant::now();
    let (lora, groups): (RowLora<B, ExpertTp>, RowGroups) =
        adapters.stacked(rows).expect("all are enabled");
    let y = lora.forward(Group::solo().shard(x.clone()), &groups);
    let grads = y.into_tensor().backward();
    let whole = start.elapsed();
    assert!(x.grad(&grads).is_some(), "the adapters reached their input");
    whole
}
