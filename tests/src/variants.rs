//! Every variant of an adapter on every kind of base, at every topology: what a cell of the book's table
//! stands for.

use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::backend::{Autodiff, Flex};
use burn::tensor::DType;
use moe_lora_adapters::{Activation, Dropout, LoraConfig, Sharing};
use moe_lora_experts::SharedConfig;
use moe_lora_testkit::{
    Ad, Axis, GateUpTargets, Mocked, Ranks, TrainingBackend, assert_all_close, noise,
};

use crate::dense::{self, COLUMN_AXES, COLUMN_SEQUENCE_AXES, Sum, row_axes, tp};
use crate::grouped::{self, Kind};
use crate::moe::{self, Place, place};
use crate::shared_experts::{MLP_REDUCTION, Way, mlp_case, shared_oracle, shared_results};
use crate::{multi, named, refusals};

/// What an adapter is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Variant {
    /// `s B A`, `s = alpha / r`.
    Plain,
    /// `s = alpha / sqrt(r)`.
    RsLora,
    /// `s B silu(A x)`.
    Activation,
    /// A rank divided by the experts of a token.
    RankPerExpert,
    /// Base, factors and tokens in bf16.
    Half,
    /// Trained lengths of rows.
    Dora,
    /// A base without the product that the factors started from.
    Pissa,
    /// Dropout of the input.
    DropoutBeforeA,
    /// Dropout of the delta.
    DropoutAfterB,
    /// Both.
    DoraDropout,
    /// The factor on the hidden side is one for all experts.
    SharedOuter,
    /// Both factors are.
    Shared,
    /// Several with names, each token using one or none.
    Named,
    /// Dropout before `A` with activations computed again in backward.
    Recompute,
}

impl Variant {
    /// Each of them.
    pub const ALL: [Self; 14] = [
        Self::Plain,
        Self::RsLora,
        Self::Activation,
        Self::RankPerExpert,
        Self::Half,
        Self::Dora,
        Self::Pissa,
        Self::DropoutBeforeA,
        Self::DropoutAfterB,
        Self::DoraDropout,
        Self::SharedOuter,
        Self::Shared,
        Self::Named,
        Self::Recompute,
    ];

    /// For the book.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "LoRA",
            Self::RsLora => "rsLoRA",
            Self::Activation => "SiLU between A and B",
            Self::RankPerExpert => "rank per expert",
            Self::Half => "bf16",
            Self::Dora => "DoRA",
            Self::Pissa => "PiSSA",
            Self::DropoutBeforeA => "dropout before A",
            Self::DropoutAfterB => "dropout after B",
            Self::DoraDropout => "DoRA, dropout before A",
            Self::SharedOuter => "shared outer factors",
            Self::Shared => "one adapter for all experts",
            Self::Named => "named adapters",
            Self::Recompute => "recompute, dropout before A",
        }
    }

    /// The adapter of linears that are no routed experts.
    fn config(self) -> LoraConfig {
        let config = LoraConfig::new(dense::RANK, dense::ALPHA);
        let dropout = Dropout::before_a(0.4);
        match self {
            Self::Plain | Self::Named => config,
            Self::RsLora => config.with_rslora(true),
            Self::Activation => config.with_activation(Activation::Silu),
            Self::RankPerExpert => LoraConfig {
                rank: dense::RANK * moe::TOP_K,
                ..config
            },
            Self::Half => config.with_dtype(DType::BF16),
            Self::Dora => config.with_dora(true),
            Self::Pissa => config.with_pissa(true),
            Self::DropoutBeforeA | Self::Recompute => config.with_dropout(dropout),
            Self::DropoutAfterB => config.with_dropout(Dropout::after_b(0.4)),
            Self::DoraDropout => config.with_dora(true).with_dropout(dropout),
            Self::SharedOuter => config.with_sharing(Sharing::SharedOuter),
            Self::Shared => config.with_sharing(Sharing::Shared),
        }
    }

    /// The adapter of routed experts.
    fn of_experts(self) -> LoraConfig {
        let config = self.config();
        let rank = match self {
            Self::RankPerExpert => LoraConfig::rank_per_expert(config.rank, moe::TOP_K),
            _ => Ok(config.rank),
        };
        LoraConfig {
            rank: rank.expect("the experts of a token divide it"),
            ..config
        }
    }

    fn layer(self, gate_up: GateUpTargets, shared: Option<SharedConfig>) -> moe::Case {
        moe::Case {
            config: self.config(),
            rank_per_expert: self == Self::RankPerExpert,
            shared,
            ..moe::case(Sharing::PerExpert, gate_up, DType::F32)
        }
    }
}

/// What it is put on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Base {
    /// A column-parallel linear.
    Column,
    /// A row-parallel one.
    Row,
    /// One that every rank holds whole.
    Whole,
    /// burn's own.
    Burn,
    /// Gate and up of experts.
    Fc1,
    /// Down of experts.
    Fc2,
    /// A linear of experts that every rank holds whole.
    WholeExperts,
    /// Shared experts.
    Shared,
    /// Shared experts that are summed after the others.
    Overlapped,
    /// All linears of a layer.
    Layer,
}

impl Base {
    /// Each of them.
    pub const ALL: [Self; 10] = [
        Self::Column,
        Self::Row,
        Self::Whole,
        Self::Burn,
        Self::Fc1,
        Self::Fc2,
        Self::WholeExperts,
        Self::Shared,
        Self::Overlapped,
        Self::Layer,
    ];

    /// For the book: a heading.
    pub fn name(self) -> &'static str {
        match self {
            Self::Column => "column",
            Self::Row => "row",
            Self::Whole => "whole",
            Self::Burn => "burn",
            Self::Fc1 => "fc1",
            Self::Fc2 => "fc2",
            Self::WholeExperts => "experts, whole",
            Self::Shared => "shared",
            Self::Overlapped => "overlapped",
            Self::Layer => "layer",
        }
    }

    /// The topologies of its cells.
    pub fn topologies(self) -> Vec<Place> {
        let sizes = |tp: usize, etp: usize| {
            let dealt = [&[9][..], &[2, 7], &[0, 5, 1, 3]];
            let places = dealt.map(|dealt| {
                let of = |size: usize| size.min(dealt.len());
                place(of(tp), 1, of(etp), dealt)
            });
            places.to_vec()
        };
        match self {
            Self::Fc1 | Self::Fc2 | Self::WholeExperts => sizes(1, 4),
            Self::Layer => vec![
                place(1, 1, 1, &[9]),
                place(1, 2, 1, &[9, 0]),
                place(1, 1, 2, &[2, 7]),
                place(1, 2, 2, &[3, 0, 4, 2]),
                place(1, 1, 4, &[0, 5, 1, 3]),
                place(1, 4, 1, &[4, 1, 4, 0]),
                // Replicas of the experts.
                place(1, 1, 1, &[5, 4]),
                place(1, 2, 1, &[3, 0, 4, 2]),
                place(1, 2, 2, &[2, 1, 0, 1, 3, 0, 1, 1]),
                // Dense groups of another size than the experts'.
                place(2, 2, 1, &[3, 0, 4, 2]),
                place(2, 1, 4, &[3, 0, 4, 2]),
                place(4, 2, 2, &[3, 0, 4, 2]),
            ],
            _ => sizes(4, 1),
        }
    }
}

/// What became of a variant on a base.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Output and all gradients were those of one device at every topology of the base.
    Exact,
    /// It cannot be built, at any topology.
    Refused(String),
}

impl Cell {
    /// Runs or builds it.
    ///
    /// # Panics
    ///
    /// When a result is not close to the oracle's, or when what has to be refused is not.
    pub fn of(variant: Variant, base: Base) -> Self {
        if (variant, base) == (Variant::SharedOuter, Base::WholeExperts) {
            return Self::Refused(refusals::shared_outer_on_whole_experts());
        }
        for place in base.topologies() {
            match variant {
                Variant::Recompute => {
                    check::<Autodiff<Flex, BalancedCheckpointing>>(variant, base, &place);
                }
                _ => check::<Ad>(variant, base, &place),
            }
        }
        Self::Exact
    }
}

const FUSED: GateUpTargets = GateUpTargets::Fused;
const SEPARATE: GateUpTargets = GateUpTargets::Separate;

fn check<B: TrainingBackend>(variant: Variant, base: Base, place: &Place) {
    let (tp, etp) = (place.topology.tp(), place.topology.etp());
    match base {
        Base::Layer => {
            layer::<B>(variant, FUSED, None, place);
            layer::<B>(variant, SEPARATE, moe::shared(true, false), place);
            layer::<B>(variant, FUSED, moe::shared(false, true), place);
        }
        _ if variant == Variant::Named => several::<B>(base, place),
        Base::Column | Base::Row | Base::Whole | Base::Burn => dense::<B>(variant, base, tp),
        Base::Fc1 => experts::<B>(variant, &[Kind::Fused, Kind::Separate, Kind::Column], etp),
        Base::Fc2 => experts::<B>(variant, &[Kind::Row], etp),
        Base::WholeExperts => experts::<B>(variant, &[Kind::Whole], etp),
        Base::Shared => shared::<B>(variant, &[Way::Ordinary, Way::SequenceParallel], tp),
        Base::Overlapped => shared::<B>(variant, &[Way::Overlapped], tp),
    }
}

/// Named adapters. Rows of experts get their slots from the dispatcher, so those are of a layer.
fn several<B: TrainingBackend>(base: Base, place: &Place) {
    let (tp, etp) = (place.topology.tp(), place.topology.etp());
    let layer = |gate_up, shared| layer::<B>(Variant::Named, gate_up, shared, place);
    match base {
        Base::Column => named::column::<B>(&Mocked, tp),
        Base::Row => named::row::<B>(&Mocked, tp),
        Base::Whole => named::replicated::<B>(&Mocked, tp),
        Base::Burn => named::from_burn::<B>(&Mocked, tp),
        Base::WholeExperts => named::whole_experts::<B>(&Mocked, etp),
        Base::Fc1 => layer(SEPARATE, None),
        Base::Fc2 | Base::Layer => layer(FUSED, None),
        Base::Shared => layer(SEPARATE, moe::shared(true, false)),
        Base::Overlapped => layer(FUSED, moe::shared(false, true)),
    }
}

fn dense<B: TrainingBackend>(variant: Variant, base: Base, size: usize) {
    let case = dense::Case::new(variant.config());
    let name = format!("{variant:?} {base:?}");
    let check = |found: Vec<_>, axes| case.check(&name, &found, axes);
    let run = |body: &(dyn Fn(&_, &_) -> _ + Sync)| Ranks::<B>::run(&Mocked, tp(size), body);
    match base {
        Base::Column => {
            let found = run(&|mesh, device| case.column(mesh, device));
            check(found, COLUMN_AXES);
            let found = run(&|mesh, device| case.column_sequence(mesh, device));
            check(found, COLUMN_SEQUENCE_AXES);
        }
        Base::Row => {
            for sum in [Sum::Here, Sum::ByTheCaller, Sum::OverTokens] {
                let found = run(&|mesh, device| case.row(mesh, device, sum));
                check(found, row_axes(sum));
            }
        }
        Base::Whole => {
            let found = run(&|mesh, device| case.replicated(mesh, device));
            check(found, [Axis::Whole; 4]);
        }
        _ => {
            let found = run(&|mesh, device| case.from_burn(mesh, device));
            check(found, [Axis::Whole; 4]);
        }
    }
}

fn experts<B: TrainingBackend>(variant: Variant, kinds: &[Kind], size: usize) {
    let config = variant.of_experts();
    for kind in kinds {
        for counts in [&[5, 0, 3][..], &[1, 6, 0, 1]] {
            let case = grouped::Case::new(*kind, config, counts);
            let found = case.found::<B>(&Mocked, size);
            grouped::check(&case.name(size), config.dtype, &found, &case.expected());
        }
    }
}

fn shared<B: TrainingBackend>(variant: Variant, ways: &[Way], size: usize) {
    let config = variant.config();
    for gate_up in [FUSED, SEPARATE] {
        let case = mlp_case(gate_up, config);
        let (mlp, gate) = (case.oracle(9).remove(0), noise(10, 1, case.hidden));
        let gate = Some(&gate);
        let expected = shared_oracle(&case, &mlp, gate);
        for way in ways {
            let found = shared_results::<B>(&Mocked, &case, &mlp, gate, size, *way);
            assert_eq!(found.len(), expected.len());
            let results = found.iter().zip(&expected).enumerate();
            let results: Vec<_> = results
                .map(|(k, (found, expected))| (format!("result {k}"), found, expected))
                .collect();
            let name = format!("{variant:?} shared {way:?} tp={size} {gate_up:?}");
            assert_all_close(&name, &results, config.dtype, MLP_REDUCTION);
        }
    }
}

fn layer<B: TrainingBackend>(
    variant: Variant,
    gate_up: GateUpTargets,
    shared: Option<SharedConfig>,
    place: &Place,
) {
    let case = variant.layer(gate_up, shared);
    match variant {
        Variant::Named => multi::case(case).check::<B>(&Mocked, place),
        _ => case.check::<B>(&Mocked, place),
    }
}
