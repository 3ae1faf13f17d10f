//! Which way round the factors of a stacked parameter lie in the file.
//!
//! PEFT wraps a parameter of three axes and takes them for `[E, d_in, d_out]`. Up to release 0.18 it
//! computes the delta `[e, i, o] = sum_r B[o, (r, e)] A[(e, r), i]` over the parameter's second and
//! third axis as they come, so that `A` lies on the outputs of a weight `[E, d_out, d_in]`. 0.19.0
//! exchanges the two for modules that declare `is_transposed`, which are those whose weight really
//! is `[E, d_in, d_out]`; 0.19.1 does so for all others instead. From then on `A` is on the inputs
//! always.

use super::slot::{Part, Slot};
use crate::ModelConfig;
use moe_lora_files::{FileError, JsonFile, TensorFile};

/// The side of the weight that `lora_A` is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// `lora_A` is `[E*r, d_in]` and `lora_B` `[d_out, E*r]`.
    Upright,
    /// `lora_A` is `[E*r, d_out]` and holds `B`, `lora_B` is `[d_in, E*r]` and holds `A`.
    Exchanged,
}

impl Dialect {
    /// The dialect of a file: that of the release in its configuration, which the shapes must
    /// confirm, or without one the only dialect that the shapes allow.
    ///
    /// One release wrote all of the file, so a parameter that is not square settles it for the
    /// square ones too.
    pub(crate) fn of_file(
        settings: &JsonFile,
        tensors: &TensorFile,
        slots: &[(Slot, usize)],
        config: &ModelConfig,
    ) -> Result<Self, FileError> {
        const FIELD: &str = "peft_version";
        let fits = |dialect: Self| {
            let mut slots = slots.iter();
            slots.all(|&(slot, rank)| dialect.fits(slot, rank, tensors, config))
        };
        let (upright, exchanged) = (fits(Self::Upright), fits(Self::Exchanged));
        let Some(version) = settings.get::<String>(FIELD)? else {
            return match (upright, exchanged) {
                (true, true) => Err(settings.unsupported(
                    FIELD,
                    "null",
                    "the release that wrote the file, as square parameters lie transposed before 0.19.1 (set peft_version)",
                )),
                (false, true) => Ok(Self::Exchanged),
                // Where neither fits, reading it says which tensor does not.
                (_, false) => Ok(Self::Upright),
            };
        };
        let dialect = Self::of_release(release(&version), config.family.stacked().transposed);
        let (found, other) = match dialect {
            Self::Upright => (upright, exchanged),
            Self::Exchanged => (exchanged, upright),
        };
        if !found && other {
            let expected = match dialect {
                Self::Upright => "a release before 0.19.1 for factors that lie transposed",
                Self::Exchanged => "0.19.1 or later for factors that do not lie transposed",
            };
            return Err(settings.invalid(FIELD, version, expected));
        }
        Ok(dialect)
    }

    fn of_release(release: [u64; 3], transposed: bool) -> Self {
        match (release, transposed) {
            ([0, 0..=18, _], true) => Self::Upright,
            ([0, 0..=18, _] | [0, 19, 0], _) => Self::Exchanged,
            _ => Self::Upright,
        }
    }

    /// Whether the stored shapes of both factors are those of this dialect.
    fn fits(self, slot: Slot, rank: usize, tensors: &TensorFile, config: &ModelConfig) -> bool {
        let shapes = self.shapes(slot.weight(config), config.num_experts * rank);
        let mut expected = [Part::A, Part::B].into_iter().zip(shapes);
        expected.all(|(part, shape)| {
            let stored = tensors.info(&slot.tensor(0, part, config));
            stored.is_ok_and(|info| info.shape == shape)
        })
    }

    /// The shapes of `lora_A` and `lora_B` for a weight `[d_out, d_in]` and `E*r` columns.
    pub(crate) fn shapes(self, [d_out, d_in]: [usize; 2], columns: usize) -> [[usize; 2]; 2] {
        match self {
            Self::Upright => [[columns, d_in], [d_out, columns]],
            Self::Exchanged => [[columns, d_out], [d_in, columns]],
        }
    }
}

/// `0.18.2.dev0@unknown` is `[0, 18, 2]`.
fn release(version: &str) -> [u64; 3] {
    let mut numbers = version
        .split(|c: char| !c.is_ascii_digit())
        .map(|digits| digits.parse().unwrap_or(0));
    std::array::from_fn(|_| numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_compare_by_number() {
        let of = |version, transposed| Dialect::of_release(release(version), transposed);
        for version in ["0.17.1", "0.18.2.dev0@UNKNOWN", "0.19.0", "0.9.0"] {
            assert_eq!(of(version, false), Dialect::Exchanged, "{version}");
        }
        for version in ["0.19.1", "0.21", "0.100.0", "1"] {
            assert_eq!(of(version, false), Dialect::Upright, "{version}");
        }
    }

    #[test]
    fn transposed_parameters_are_exchanged_by_one_release_alone() {
        let of = |version| Dialect::of_release(release(version), true);
        assert_eq!(of("0.18.0"), Dialect::Upright);
        assert_eq!(of("0.19.0"), Dialect::Exchanged);
        assert_eq!(of("0.19.1"), Dialect::Upright);
    }
}
