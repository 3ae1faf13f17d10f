//! Which linears get an adapter, by pattern.

use crate::AdapterError;

/// Patterns over the paths of linears.
///
/// A plain name matches the linears whose path ends with it: `down_proj`, `experts.down_proj`. A
/// pattern with `*` matches whole paths, `*` standing for any run of characters. Dots are
/// literal.
///
/// ```
/// use moe_lora_adapters::Targets;
///
/// let known = ["layers.0.mlp.experts.down_proj", "layers.10.mlp.experts.down_proj"];
/// let chosen = Targets::new(["*.0.*"]).select(&["model.layers.0.x", "model.layers.10.x"])?;
/// assert_eq!(chosen, ["model.layers.0.x"]);
/// assert_eq!(Targets::new(["down_proj"]).select(&known)?.len(), 2);
/// # Ok::<(), moe_lora_adapters::AdapterError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Targets {
    patterns: Vec<String>,
}

impl Targets {
    /// These patterns.
    pub fn new<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Self {
        Self {
            patterns: patterns.into_iter().map(Into::into).collect(),
        }
    }

    /// The known paths that a pattern matches, in their order.
    ///
    /// # Errors
    ///
    /// When there are no patterns, or when one of them matches nothing.
    pub fn select<S: AsRef<str>>(&self, known: &[S]) -> Result<Vec<String>, AdapterError> {
        if self.patterns.is_empty() {
            return Err(AdapterError::NoTargets);
        }
        for pattern in &self.patterns {
            if !known.iter().any(|path| matches(pattern, path.as_ref())) {
                return Err(AdapterError::unknown_target(pattern, known));
            }
        }
        Ok(known
            .iter()
            .map(AsRef::as_ref)
            .filter(|path| self.patterns.iter().any(|pattern| matches(pattern, path)))
            .map(String::from)
            .collect())
    }
}

fn matches(pattern: &str, path: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(last) = parts.next_back() else {
        return path == pattern
            || path
                .strip_suffix(pattern)
                .is_some_and(|before| before.ends_with('.'));
    };
    let Some(mut rest) = path
        .strip_prefix(first)
        .and_then(|rest| rest.strip_suffix(last))
    else {
        return false;
    };
    parts.all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

impl AdapterError {
    /// A pattern or path that matches none of the known ones, with a near name among them.
    pub fn unknown_target<S: AsRef<str>>(pattern: &str, known: &[S]) -> Self {
        Self::UnknownTarget {
            pattern: pattern.into(),
            hint: hint(pattern, known),
            known: known.iter().map(|path| path.as_ref().into()).collect(),
        }
    }

    pub(crate) fn unknown_name(name: &str, known: Vec<String>) -> Self {
        Self::UnknownName {
            name: name.into(),
            hint: hint(name, &known),
            known,
        }
    }
}

/// The nearest last component among the known paths.
fn hint<S: AsRef<str>>(pattern: &str, known: &[S]) -> String {
    let last = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
    let wanted = last(pattern);
    known
        .iter()
        .map(|path| last(path.as_ref()))
        .map(|name| (strsim::jaro_winkler(&wanted, &name), name))
        .filter(|(near, _)| *near > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| format!(", did you mean {name:?}?"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [&str; 4] = [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.10.mlp.experts.gate_up_proj",
        "model.layers.10.mlp.experts.down_proj",
    ];

    fn select(pattern: &str) -> Vec<String> {
        Targets::new([pattern]).select(&KNOWN).unwrap()
    }

    #[test]
    fn a_wildcard_layer_hits_that_layer_only_and_dots_are_literal() {
        assert_eq!(select("*.layers.0.*"), KNOWN[..2]);
        assert_eq!(select("model.layers.1*down_proj"), KNOWN[3..]);
        assert!(!matches("*.layers.0.*", "model.layers.00.mlp"));
        assert!(!matches("*xlayers.0.*", KNOWN[0]));
        assert!(!matches("layers?0*", KNOWN[0]));
        assert!(!matches("ab*ba", "aba"));
    }

    #[test]
    fn a_plain_name_matches_whole_components_at_the_end() {
        assert_eq!(select("down_proj").len(), 2);
        assert_eq!(select("experts.down_proj").len(), 2);
        assert!(Targets::new(["proj"]).select(&KNOWN).is_err());
    }

    #[test]
    fn a_typo_names_the_pattern_and_a_near_name() {
        let message = Targets::new(["down_prj"]).select(&KNOWN[..2]).unwrap_err();
        assert_eq!(
            message.to_string(),
            "target \"down_prj\" matches no linear, did you mean \"down_proj\"? (known: model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj)"
        );
        assert_eq!(
            Targets::new(Vec::<String>::new()).select(&KNOWN),
            Err(AdapterError::NoTargets)
        );
    }
}
