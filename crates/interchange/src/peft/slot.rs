//! One factor pair's place in an adapter file.

use super::PeftLayout;
use crate::ModelConfig;
use crate::projection::{Projection, expert_module, experts_module};
use moe_lora_files::TensorFile;

/// What PEFT puts before the name of a module in the file.
const MODEL: &str = "base_model.model";

/// A tensor of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    A,
    B,
    Magnitude,
}

impl Part {
    fn suffix(self) -> &'static str {
        match self {
            Part::A => "lora_A.weight",
            Part::B => "lora_B.weight",
            Part::Magnitude => "lora_magnitude_vector",
        }
    }

    /// The shape for one expert.
    pub(crate) fn shape(self, [d_out, d_in]: [usize; 2], rank: usize) -> Vec<usize> {
        match self {
            Part::A => vec![rank, d_in],
            Part::B => vec![d_out, rank],
            Part::Magnitude => vec![d_out],
        }
    }
}

/// How the tensors of a pair lie in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// All experts in two axes; `wrapped` when another wrapper lies around this one.
    Stacked { wrapped: bool },
    /// A tensor for every expert.
    PerExpert,
    /// A leading axis of 1 on the shared factor. The other one has a leading axis of `E`, or is a
    /// tensor for every expert when `numbered`.
    SharedOuter { numbered: bool },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    pub(crate) layer: usize,
    pub(crate) projection: Projection,
    place: Place,
}

impl Slot {
    /// The slots of a layout for which `adapted` holds, by layer, then gate before up before down.
    pub(crate) fn all(
        layout: PeftLayout,
        config: &ModelConfig,
        adapted: impl Fn(Slot) -> bool,
    ) -> Vec<Slot> {
        let (place, projections): (_, &[Projection]) = match layout {
            PeftLayout::Stacked => (
                Place::Stacked { wrapped: false },
                &[Projection::GateUp, Projection::Down],
            ),
            PeftLayout::PerExpert => (
                Place::PerExpert,
                &[Projection::Gate, Projection::Up, Projection::Down],
            ),
            PeftLayout::SharedOuter => (
                Place::SharedOuter { numbered: false },
                &[
                    Projection::GateUp,
                    Projection::Gate,
                    Projection::Up,
                    Projection::Down,
                ],
            ),
        };
        let mut slots = Vec::new();
        for layer in config.moe_layers() {
            let own = projections.iter().map(|&projection| Slot {
                layer,
                projection,
                place,
            });
            let first = slots.len();
            slots.extend(own.filter(|&slot| adapted(slot)));
            if let ([outer, _], Place::Stacked { .. }) = (&mut slots[first..], place) {
                outer.place = Place::Stacked { wrapped: true };
            }
        }
        slots
    }

    /// The slot with the per-expert factor where it is in `file`.
    pub(crate) fn found_in(mut self, file: &TensorFile, config: &ModelConfig) -> Self {
        if let Place::SharedOuter { .. } = self.place {
            let numbered = Place::SharedOuter { numbered: true };
            let per_expert = match self.shared() {
                Part::A => Part::B,
                _ => Part::A,
            };
            let moved = Slot {
                place: numbered,
                ..self
            };
            if !file.contains(&self.tensor(0, per_expert, config))
                && file.contains(&moved.tensor(0, per_expert, config))
            {
                self.place = numbered;
            }
        }
        self
    }

    pub(crate) fn is_stacked(self) -> bool {
        matches!(self.place, Place::Stacked { .. })
    }

    /// `gate_up`, `gate`, `up` or `down`.
    pub(crate) fn label(self) -> &'static str {
        match self.projection {
            Projection::GateUp => "gate_up",
            Projection::Gate => "gate",
            Projection::Up => "up",
            Projection::Down => "down",
        }
    }

    /// The name that PEFT's targets and patterns are matched with: a parameter of the stacked
    /// experts, or the linear of one of them.
    pub(crate) fn module(self, expert: usize, config: &ModelConfig) -> String {
        match self.place {
            Place::PerExpert => expert_module(config, self.layer, expert, self.projection),
            _ => format!("{}.{}", experts_module(self.layer), self.leaf(config)),
        }
    }

    /// Whether every expert has a module of its own.
    pub(crate) fn is_per_expert(self) -> bool {
        self.place == Place::PerExpert
    }

    /// The last step of the name.
    pub(crate) fn leaf(self, config: &ModelConfig) -> &'static str {
        match self.place {
            Place::PerExpert => config.family.one_by_one(self.projection).1,
            _ => self.projection.name(),
        }
    }

    /// The path from a layer to its experts, `mlp.experts` in most families.
    pub(crate) fn experts_below_layer(self, config: &ModelConfig) -> String {
        let block = match self.place {
            Place::PerExpert => config.family.one_by_one(self.projection).0,
            _ => "mlp",
        };
        format!("{block}.experts")
    }

    /// `[d_out, d_in]` of one expert.
    pub(crate) fn weight(self, config: &ModelConfig) -> [usize; 2] {
        self.projection.shape(config)
    }

    /// The names of the slot's tensors in the file.
    pub(crate) fn tensors(
        self,
        dora: bool,
        config: &ModelConfig,
    ) -> impl Iterator<Item = String> + '_ {
        const PARTS: [Part; 3] = [Part::A, Part::B, Part::Magnitude];
        let parts = if dora { &PARTS[..] } else { &PARTS[..2] };
        parts.iter().flat_map(move |&part| {
            let count = if self.is_numbered(part) {
                config.num_experts
            } else {
                1
            };
            (0..count).map(move |expert| self.tensor(expert, part, config))
        })
    }

    /// The factor that the shared-outer layout has once: the one on the hidden side.
    fn shared(self) -> Part {
        match self.projection {
            Projection::Down => Part::B,
            Projection::GateUp | Projection::Gate | Projection::Up => Part::A,
        }
    }

    /// The leading axis that a factor has in memory.
    pub(crate) fn experts(self, part: Part, config: &ModelConfig) -> usize {
        match self.place {
            Place::SharedOuter { .. } if part == self.shared() => 1,
            _ => config.num_experts,
        }
    }

    /// Whether there is a tensor for every expert.
    pub(crate) fn is_numbered(self, part: Part) -> bool {
        match self.place {
            Place::Stacked { .. } => false,
            Place::PerExpert => true,
            Place::SharedOuter { numbered } => numbered && part != self.shared(),
        }
    }

    /// The name of a tensor, of all experts or of this one.
    pub(crate) fn tensor(self, expert: usize, part: Part, config: &ModelConfig) -> String {
        let module = match self.place {
            Place::Stacked { wrapped: true } => {
                format!("{}.base_layer", experts_module(self.layer))
            }
            Place::Stacked { wrapped: false } => experts_module(self.layer),
            _ if self.is_numbered(part) => {
                expert_module(config, self.layer, expert, self.projection)
            }
            _ => format!("{}.{}", experts_module(self.layer), self.leaf(config)),
        };
        format!("{MODEL}.{module}.{}", part.suffix())
    }
}
