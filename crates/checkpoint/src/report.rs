//! What a load did with each tensor, and what it is allowed to leave undone.

use safetensors::Dtype;
use std::fmt;

/// Which differences between what is stored and what is wanted a load accepts. A tensor whose type
/// or whole shape differs is refused by all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// None.
    Exact,
    /// Wanted tensors that are not stored; they keep their values.
    AllowMissing,
    /// Stored tensors that are not wanted.
    AllowUnexpected,
    /// Both.
    AllowBoth,
}

/// What became of each tensor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Tensors that were loaded.
    pub applied: Vec<String>,
    /// Those of them that were put together from other shards than the rank's own.
    pub resharded: Vec<String>,
    /// Tensors that are wanted and not stored.
    pub missing: Vec<MissingTensor>,
    /// Tensors that are stored and not wanted.
    pub unexpected: Vec<String>,
    /// Tensors of another type or whole shape than is wanted.
    pub mismatched: Vec<MismatchedTensor>,
}

/// A tensor that is not stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingTensor {
    /// The key asked for.
    pub key: String,
    /// The most similar key that is stored and not wanted, if one is similar.
    pub near: Option<String>,
}

/// A tensor that is stored in another form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MismatchedTensor {
    /// The key.
    pub key: String,
    /// Type and whole shape in the checkpoint.
    pub found: (Dtype, Vec<usize>),
    /// Type and whole shape asked for.
    pub expected: (Dtype, Vec<usize>),
}

impl LoadReport {
    /// Whether a load of this outcome is accepted.
    pub fn is_accepted(&self, strictness: Strictness) -> bool {
        use Strictness::*;
        let missing = matches!(strictness, AllowMissing | AllowBoth);
        let unexpected = matches!(strictness, AllowUnexpected | AllowBoth);
        self.mismatched.is_empty()
            && (missing || self.missing.is_empty())
            && (unexpected || self.unexpected.is_empty())
    }
}

/// A line for each kind of outcome there is, with the first few tensors of it.
impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "applied {}", self.applied.len())?;
        if !self.resharded.is_empty() {
            write!(f, ", {} of them resharded", self.resharded.len())?;
        }
        list(f, "missing", &self.missing)?;
        let unexpected: Vec<_> = self.unexpected.iter().map(Quoted).collect();
        list(f, "unexpected", &unexpected)?;
        list(f, "mismatched", &self.mismatched)
    }
}

impl fmt::Display for MissingTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.key)?;
        match &self.near {
            Some(near) => write!(f, " (did you mean {near:?}?)"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for MismatchedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((found, shape), (expected, wanted)) = (&self.found, &self.expected);
        let key = &self.key;
        write!(
            f,
            "{key:?} has {found} {shape:?}, expected {expected} {wanted:?}"
        )
    }
}

struct Quoted<'a>(&'a String);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

fn list(f: &mut fmt::Formatter<'_>, what: &str, items: &[impl fmt::Display]) -> fmt::Result {
    const SHOWN: usize = 3;
    if items.is_empty() {
        return Ok(());
    }
    write!(f, "\n{what} {}: ", items.len())?;
    for (index, item) in items.iter().take(SHOWN).enumerate() {
        let separator = if index == 0 { "" } else { ", " };
        write!(f, "{separator}{item}")?;
    }
    if items.len() > SHOWN {
        write!(f, " and more")
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_reads_as_a_few_lines() {
        let keys = |names: &[&str]| {
            names
                .iter()
                .map(|name| name.to_string())
                .collect::<Vec<_>>()
        };
        let report = LoadReport {
            applied: keys(&["a", "b"]),
            resharded: keys(&["b"]),
            missing: vec![MissingTensor {
                key: "lora_a".into(),
                near: Some("lora_A".into()),
            }],
            unexpected: keys(&["lora_A", "x", "y", "z"]),
            mismatched: vec![MismatchedTensor {
                key: "c".into(),
                found: (Dtype::F32, vec![2]),
                expected: (Dtype::BF16, vec![2, 1]),
            }],
        };
        insta::assert_snapshot!(report, @r#"
        applied 2, 1 of them resharded
        missing 1: "lora_a" (did you mean "lora_A"?)
        unexpected 4: "lora_A", "x", "y" and more
        mismatched 1: "c" has F32 [2], expected BF16 [2, 1]
        "#);
    }

    #[test]
    fn each_strictness_accepts_what_its_name_says() {
        let missing = LoadReport {
            missing: vec![MissingTensor {
                key: "a".into(),
                near: None,
            }],
            ..LoadReport::default()
        };
        let unexpected = LoadReport {
            unexpected: vec!["a".into()],
            ..LoadReport::default()
        };
        let mismatched = LoadReport {
            mismatched: vec![MismatchedTensor {
                key: "c".into(),
                found: (Dtype::F32, vec![2]),
                expected: (Dtype::F32, vec![1]),
            }],
            ..LoadReport::default()
        };
        use Strictness::*;
        for (strictness, accepted) in [
            (Exact, [false, false]),
            (AllowMissing, [true, false]),
            (AllowUnexpected, [false, true]),
            (AllowBoth, [true, true]),
        ] {
            let found = [&missing, &unexpected].map(|report| report.is_accepted(strictness));
            assert_eq!(found, accepted, "{strictness:?}");
            assert!(!mismatched.is_accepted(strictness));
            assert!(LoadReport::default().is_accepted(strictness));
        }
    }
}
