//! Patterns over the paths of linears.

/// A pattern over paths such as `model.layers.0.mlp.experts.down_proj`.
///
/// A plain name matches the paths that end with it, at a dot: `down_proj`, `experts.down_proj`. With
/// `*` it matches whole paths, `*` standing for any run of characters. Dots are literal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pattern(pub(crate) String);

impl Pattern {
    /// Whether the path is one of those that are meant.
    pub(crate) fn matches(&self, path: &str) -> bool {
        let Self(pattern) = self;
        let mut parts = pattern.split('*');
        let first = parts.next().unwrap_or_default();
        let Some(last) = parts.next_back() else {
            return path == pattern
                || path
                    .strip_suffix(pattern.as_str())
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
}

/// Whether the path is one of routed experts' linears: below a component `experts`, which
/// `shared_experts` is not.
pub(crate) fn is_routed_expert(path: &str) -> bool {
    path.split('.').any(|component| component == "experts")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, path: &str) -> bool {
        Pattern(pattern.into()).matches(path)
    }

    #[test]
    fn dots_are_literal_and_a_wildcard_layer_is_that_layer_alone() {
        let path = "model.layers.0.mlp.experts.gate_up_proj";
        assert!(matches("*.layers.0.*", path));
        assert!(!matches("*.layers.0.*", "model.layers.10.mlp"));
        assert!(!matches("*.layers.0.*", "model.layers.00.mlp"));
        // As a regular expression it would match: a dot for any character.
        assert!(!matches("*.layers.0.*", "model.layers_0_mlp.x"));
        assert!(!matches("*xlayers.0.*", path));
        assert!(!matches("layers?0*", path));
        assert!(!matches("ab*ba", "aba"));
    }

    #[test]
    fn shared_experts_are_no_experts() {
        for (path, routed) in [
            ("model.layers.0.mlp.experts.down_proj", true),
            ("model.layers.0.mlp.experts.3.down_proj", true),
            ("model.layers.0.mlp.shared_expert.down_proj", false),
            ("model.layers.0.mlp.shared_experts.down_proj", false),
        ] {
            assert_eq!(is_routed_expert(path), routed, "{path}");
            assert_eq!(matches("*.experts.*", path), routed, "{path}");
            assert_eq!(
                matches("experts.down_proj", path),
                path.contains(".experts.down"),
                "{path}"
            );
        }
    }
}
