//! Linears with several named adapters: each row is that of one device with the adapter of its slot
//! folded into the weight, and one of no adapter that of the base.

use burn::tensor::{DType, Tensor};
use moe_lora_adapters::{
    Adaptable, Column, Linear, LinearConfig, LoraConfig, Placement, Row, Slot, TokenIds, Whole,
};
use moe_lora_experts::SlotOrder;
use moe_lora_kernels::RowGroups;
use moe_lora_parallel::{ExpertTp, Group, GroupKind, Tp};
use moe_lora_testkit::{
    Axis, Matrix, Ranks, TrainingBackend, assert_close, gradient, noise, oracle, shard, unshard,
};

use crate::dense::{self, COLUMN_AXES, D_IN, D_OUT, Sum, TOKENS, row_axes, tp};
use crate::grouped::etp;

/// The adapter of each row.
const SLOTS: [Option<usize>; TOKENS] = [Some(1), None, Some(0), Some(1), None, Some(0)];
/// Name, rank and alpha; no row uses the last.
const ADAPTERS: [(&str, usize, f64); 3] = [("fr", 8, 5.3), ("de", 4, 2.9), ("idle", 12, 7.1)];

/// Output, input gradient, and the factors' gradients by adapter, factor and expert.
type Found = (Matrix, Matrix, Vec<Vec<Vec<Matrix>>>);

/// A linear of as many rows for each of its experts, or one of all rows.
#[derive(Clone, Copy, Debug)]
struct Case {
    experts: usize,
}

impl Case {
    /// An expert's linear with one adapter, or with none.
    fn oracle(self, expert: usize, adapter: Option<usize>) -> oracle::Linear {
        let seed = |seed: usize| (100 * expert + seed) as u64;
        let lora = adapter.map(|k| {
            let (_, rank, alpha) = ADAPTERS[k];
            oracle::Lora {
                a: noise(seed(20 + k), rank, D_IN),
                b: noise(seed(30 + k), D_OUT, rank),
                scale: alpha / rank as f64,
                silu: false,
                first_row: 0,
                magnitude: None,
                start: None,
            }
        });
        let weight = noise(seed(5), D_OUT, D_IN);
        oracle::Linear::new(weight, Vec::from_iter(lora)).with_bias(noise(seed(6), 1, D_OUT))
    }

    /// A rank's part of the linear without adapters.
    fn base<B: TrainingBackend, G: GroupKind, P: Placement>(
        self,
        group: &Group<B, G>,
        device: &B::Device,
    ) -> Linear<B, G, P> {
        let base: Vec<_> = (0..self.experts).map(|e| self.oracle(e, None)).collect();
        let weight = |expert: usize, row, column| base[expert].weight().at(row, column) as f32;
        let bias = |expert: usize, row| base[expert].bias().unwrap().at(0, row) as f32;
        let config = LinearConfig::new("fc", D_IN, D_OUT);
        let config = match self.experts {
            1 => config,
            experts => config.with_experts(0..experts),
        };
        let linear = config.init(group, weight, device);
        let linear = linear.and_then(|linear| linear.with_bias(bias, device));
        linear.unwrap()
    }

    /// The linear with the adapters.
    fn adapted<B: TrainingBackend, G: GroupKind, P: Placement>(
        self,
        mut linear: Linear<B, G, P>,
        device: &B::Device,
    ) -> Linear<B, G, P> {
        for (k, (name, rank, alpha)) in ADAPTERS.into_iter().enumerate() {
            let config = LoraConfig::new(rank, alpha);
            let lora = linear.adapt_named("fc", name, &config, device).unwrap();
            let of_experts = |of: fn(&oracle::Lora) -> &Matrix| -> Vec<f32> {
                let experts = 0..self.experts;
                let factor = |e| of(&self.oracle(e, Some(k)).loras()[0]).to_f32();
                experts.flat_map(factor).collect()
            };
            let (a, b) = (of_experts(|lora| &lora.a), of_experts(|lora| &lora.b));
            lora.load(&a, &b, device).unwrap();
        }
        linear
    }

    /// Forward and backward with a rank's `x` and `g`, in the order of `SLOTS`.
    fn pass<B: TrainingBackend, G: GroupKind, P: Placement>(
        self,
        linear: &Linear<B, G, P>,
        [x, g]: [&Matrix; 2],
        device: &B::Device,
        run: impl Fn(Tensor<B, 2>, &RowGroups) -> Tensor<B, 2>,
    ) -> Found {
        let own = TOKENS / self.experts;
        let slot = |adapter: &Option<usize>| {
            adapter.map_or(Slot::BASE, |k| linear.slot(ADAPTERS[k].0).unwrap())
        };
        let of_expert = |slots: &[Option<usize>]| {
            let slots: Vec<Slot> = slots.iter().map(slot).collect();
            SlotOrder::of(Some(&TokenIds::new(0, 0..own as u64).with_slots(slots)))
        };
        let orders: Vec<SlotOrder> = SLOTS.chunks(own).map(of_expert).collect();
        let slots = orders
            .iter()
            .map(|order| order.tokens().unwrap().slots().unwrap());
        let slots = slots.collect::<Vec<_>>().concat();
        let rows = RowGroups::new(&vec![own; self.experts], TOKENS).unwrap();
        let rows = rows.with_tokens(TokenIds::new(0, 0..TOKENS as u64).with_slots(slots));
        let each = |x: Tensor<B, 2>, f: fn(&SlotOrder, Tensor<B, 2>) -> Tensor<B, 2>| {
            let experts = orders.iter().enumerate();
            let parts = experts.map(|(e, order)| f(order, x.clone().narrow(0, e * own, own)));
            Tensor::cat(parts.collect(), 0)
        };
        let x: Tensor<B, 2> = x.tensor_on(device, DType::F32).require_grad();
        let sorted = each(x.clone(), SlotOrder::sort);
        let y = each(run(sorted, &rows), SlotOrder::restore);
        let grads = (y.clone() * g.tensor_on(device, DType::F32))
            .sum()
            .backward();
        let weights = linear.trained_weights();
        let of_adapter = |(name, ..): (&str, usize, f64)| {
            let own = weights.iter().filter(|w| w.adapter == Some(name));
            own.map(|w| gradient(w.weight, &grads)).collect()
        };
        (
            Matrix::read(y),
            Matrix::read(x.grad(&grads).unwrap()),
            ADAPTERS.map(of_adapter).into(),
        )
    }

    /// Compares what the ranks found, brought together along the given axes.
    fn check(self, name: &str, found: &[Found], [y, dx, a, b]: [Axis; 4]) {
        let name = format!(
            "named {name} of {} experts, {} ranks",
            self.experts,
            found.len()
        );
        let join = |of: &dyn Fn(&Found) -> Matrix, axis| {
            unshard(&found.iter().map(of).collect::<Vec<_>>(), axis)
        };
        let close = |what: &str, found: &Matrix, expected: &Matrix| {
            assert_close(&format!("{name}: {what}"), found, expected, DType::F32, 60);
        };
        let expert_of = |token: usize| token * self.experts / TOKENS;
        let [x, g] = data();
        let (y, dx) = (join(&|f| f.0.clone(), y), join(&|f| f.1.clone(), dx));
        for (token, adapter) in SLOTS.into_iter().enumerate() {
            let linear = self.oracle(expert_of(token), adapter);
            let (x, g) = (x.pick_rows([token]), g.pick_rows([token]));
            close("y", &y.pick_rows([token]), &linear.forward(&x));
            close("dx", &dx.pick_rows([token]), &linear.backward(&x, &g).dx);
        }
        for (k, (adapter, ..)) in ADAPTERS.into_iter().enumerate() {
            for e in 0..self.experts {
                let own = |token: &usize| SLOTS[*token] == Some(k) && expert_of(*token) == e;
                let own = (0..TOKENS).filter(own);
                let (x, g) = (x.pick_rows(own.clone()), g.pick_rows(own));
                let expected = &self.oracle(e, Some(k)).backward(&x, &g).factors[0];
                for (f, axis) in [a, b].into_iter().enumerate() {
                    let found = join(&|found| found.2[k][f][e].clone(), axis);
                    let what = format!("factor {f} of {adapter} of expert {e}");
                    close(&what, &found, &expected[f]);
                }
            }
        }
    }
}

fn data() -> [Matrix; 2] {
    [noise(1, TOKENS, D_IN), noise(2, TOKENS, D_OUT)]
}

/// A column-parallel linear over `size` ranks.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn column<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize) {
    let (case, [x, g]) = (Case { experts: 1 }, data());
    let found = ranks.run(tp(size), |mesh, device| {
        let group = mesh.tp();
        let linear: Linear<B, Tp, Column> = case.adapted(case.base(group, device), device);
        let g = shard(&g, Axis::Columns, group.rank(), size);
        case.pass(&linear, [&x, &g], device, |x, rows| {
            let x = group.replicated(x).copy_to();
            linear.forward(x, rows).into_tensor()
        })
    });
    case.check("column", &found, COLUMN_AXES);
}

/// A row-parallel one, summed in the linear and by the caller.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn row<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize) {
    let (case, [x, g]) = (Case { experts: 1 }, data());
    for sum in [Sum::Here, Sum::ByTheCaller] {
        let found = ranks.run(tp(size), |mesh, device| {
            let group = mesh.tp();
            let linear: Linear<B, Tp, Row> = case.adapted(case.base(group, device), device);
            let x = shard(&x, Axis::Columns, group.rank(), size);
            case.pass(&linear, [&x, &g], device, |x, rows| match sum {
                Sum::Here => linear.forward(group.shard(x), rows).into_tensor(),
                _ => {
                    let term = linear.forward_suppressed(group.shard(x), rows);
                    term.reduce_from().into_tensor()
                }
            })
        });
        case.check(&format!("row {sum:?}"), &found, row_axes(sum));
    }
}

/// One that every rank holds whole.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn replicated<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize) {
    let case = Case { experts: 1 };
    let found = ranks.run(tp(size), |mesh, device| {
        let base = case.base(mesh.tp(), device);
        whole(case, base, mesh.tp(), device)
    });
    case.check("replicated", &found, [Axis::Whole; 4]);
}

/// One that was burn's.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn from_burn<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize) {
    let case = Case { experts: 1 };
    // The same weight and bias.
    let of_burn = dense::Case::new(LoraConfig::new(dense::RANK, dense::ALPHA));
    let found = ranks.run(tp(size), |mesh, device| {
        let base = of_burn.of_burn(mesh, device);
        whole(case, base, mesh.tp(), device)
    });
    case.check("burn's", &found, [Axis::Whole; 4]);
}

/// One of experts that every rank holds whole.
///
/// # Panics
///
/// When a result is not close to the oracle's.
pub fn whole_experts<B: TrainingBackend>(ranks: &impl Ranks<B>, size: usize) {
    let case = Case { experts: 2 };
    let found = ranks.run(etp(size), |mesh, device| {
        let base = case.base(mesh.expert_tp(), device);
        whole::<B, ExpertTp>(case, base, mesh.expert_tp(), device)
    });
    case.check("replicated", &found, [Axis::Whole; 4]);
}

fn whole<B: TrainingBackend, G: GroupKind>(
    case: Case,
    base: Linear<B, G, Whole>,
    group: &Group<B, G>,
    device: &B::Device,
) -> Found {
    let (linear, [x, g]) = (case.adapted(base, device), data());
    case.pass(&linear, [&x, &g], device, |x, rows| {
        linear.forward(group.replicated(x), rows).into_tensor()
    })
}
