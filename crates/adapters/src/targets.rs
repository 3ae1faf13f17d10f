//! Which linears get an adapter, by pattern, and of which rank and alpha.

use crate::pattern::{Pattern, is_routed_expert};
use crate::{AdapterError, LoraConfig, Sharing};

/// Patterns over the paths of linears.
///
/// A plain name matches the linears whose path ends with it: `down_proj`, `experts.down_proj`. A
/// pattern with `*` matches whole paths, `*` standing for any run of characters. Dots are literal, and
/// `experts` is no part of `shared_experts`. A pattern that matches nothing is an error.
///
/// ```
/// use moe_lora_adapters::{LoraConfig, Targets};
///
/// let known = ["layers.0.experts.down_proj", "layers.10.experts.down_proj", "layers.0.q_proj"];
/// assert_eq!(Targets::new(["*.0.*"]).select(&known)?, [known[0], known[2]]);
/// assert_eq!(Targets::new(["down_proj"]).without(["*.0.*"]).select(&known)?, [known[1]]);
///
/// // Rank and alpha of some of them; two experts a token, so half of the rank for each.
/// let targets = Targets::new(["*"]).with_alpha("q_proj", 64.0).with_rank_per_expert(2);
/// let configs = targets.resolve(&known, &LoraConfig::new(16, 32.0))?;
/// assert_eq!([configs[0].config.rank, configs[2].config.rank], [8, 16]);
/// assert_eq!([configs[0].config.alpha, configs[2].config.alpha], [32.0, 64.0]);
/// # Ok::<(), moe_lora_adapters::AdapterError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Targets {
    included: Vec<Pattern>,
    excluded: Vec<Pattern>,
    ranks: Vec<(Pattern, usize)>,
    alphas: Vec<(Pattern, f64)>,
    top_k: Option<usize>,
}

/// A linear that is to be adapted, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    /// Its path.
    pub path: String,
    /// The settings of its adapter.
    pub config: LoraConfig,
}

impl Targets {
    /// The linears that any of these patterns matches.
    pub fn new<S: Into<String>>(patterns: impl IntoIterator<Item = S>) -> Self {
        Self {
            included: patterns.into_iter().map(|p| Pattern(p.into())).collect(),
            excluded: Vec::new(),
            ranks: Vec::new(),
            alphas: Vec::new(),
            top_k: None,
        }
    }

    /// Leaves out the linears that any of these patterns matches.
    pub fn without<S: Into<String>>(mut self, patterns: impl IntoIterator<Item = S>) -> Self {
        let patterns = patterns.into_iter().map(|p| Pattern(p.into()));
        self.excluded.extend(patterns);
        self
    }

    /// Rank of the targets that the pattern matches, whatever the common rank is. Of several such
    /// patterns the first counts, as in PEFT's `rank_pattern`.
    pub fn with_rank(mut self, pattern: impl Into<String>, rank: usize) -> Self {
        self.ranks.push((Pattern(pattern.into()), rank));
        self
    }

    /// Alpha of the targets that the pattern matches. Of several such patterns the first counts, as
    /// in PEFT's `alpha_pattern`.
    pub fn with_alpha(mut self, pattern: impl Into<String>, alpha: f64) -> Self {
        self.alphas.push((Pattern(pattern.into()), alpha));
        self
    }

    /// Divides the common rank by the `top_k` experts of a token for linears of routed experts, those
    /// below a component `experts`: [`LoraConfig::rank_per_expert`]. Shared experts and dense linears
    /// keep it, as do adapters that the experts share; and a rank from
    /// [`with_rank`](Self::with_rank) is one of the adapter itself.
    pub fn with_rank_per_expert(mut self, top_k: usize) -> Self {
        self.top_k = Some(top_k);
        self
    }

    /// The known paths that are targets, in their order.
    ///
    /// # Errors
    ///
    /// When there are no patterns, when one of them matches none of the known paths, or when none is
    /// left of those that match.
    pub fn select<S: AsRef<str>>(&self, known: &[S]) -> Result<Vec<String>, AdapterError> {
        if self.included.is_empty() {
            return Err(AdapterError::NoTargets);
        }
        let patterns = self.included.iter().chain(&self.excluded);
        expect_matches(patterns, known)?;
        let any = |patterns: &[Pattern], path| patterns.iter().any(|p| p.matches(path));
        let chosen: Vec<String> = known
            .iter()
            .map(AsRef::as_ref)
            .filter(|path| any(&self.included, path) && !any(&self.excluded, path))
            .map(String::from)
            .collect();
        match chosen.is_empty() {
            true => Err(AdapterError::AllExcluded {
                excluded: self.excluded.iter().map(|p| p.0.clone()).collect(),
            }),
            false => Ok(chosen),
        }
    }

    /// The known paths that are targets, in their order, each with its settings: those of `common` but
    /// for rank and alpha.
    ///
    /// # Errors
    ///
    /// As [`select`](Self::select); and when a pattern of a rank or an alpha matches no target, when
    /// the experts of a token do not divide the rank, or when the settings are unusable.
    pub fn resolve<S: AsRef<str>>(
        &self,
        known: &[S],
        common: &LoraConfig,
    ) -> Result<Vec<Target>, AdapterError> {
        let paths = self.select(known)?;
        let ranks = self.ranks.iter().map(|(pattern, _)| pattern);
        let alphas = self.alphas.iter().map(|(pattern, _)| pattern);
        expect_matches(ranks.chain(alphas), &paths)?;
        let target = |path: String| {
            let own = first_of(&self.ranks, &path);
            let shared = common.sharing != Sharing::PerExpert;
            let config = LoraConfig {
                rank: match (own, self.top_k) {
                    (Some(rank), _) => rank,
                    (None, Some(top_k)) if is_routed_expert(&path) && !shared => {
                        LoraConfig::rank_per_expert(common.rank, top_k)?
                    }
                    (None, _) => common.rank,
                },
                alpha: first_of(&self.alphas, &path).unwrap_or(common.alpha),
                ..*common
            };
            config.check()?;
            Ok(Target { path, config })
        };
        paths.into_iter().map(target).collect()
    }
}

impl Targets {
    /// As [`resolve`](Self::resolve), of linears given by their targets, the whole and its fragments.
    pub(crate) fn resolve_linears(
        &self,
        linears: &[Vec<&str>],
        common: &LoraConfig,
    ) -> Result<Vec<Target>, AdapterError> {
        let chosen = self.select(&linears.concat())?;
        let chosen = |path: &str| chosen.iter().any(|target| target == path);
        let mut known = Vec::new();
        for targets in linears {
            let (whole, fragments) = (targets[0], &targets[1..]);
            if !chosen(whole) {
                known.extend(targets);
            } else if fragments.iter().any(|path| self.excludes(path)) {
                known.extend(fragments);
            } else {
                // Fragments given by name are kept, for the error that both have an adapter.
                known.push(whole);
                known.extend(fragments.iter().filter(|path| self.names(path)));
            }
        }
        self.resolve(&known, common)
    }

    /// The patterns of targets.
    pub(crate) fn patterns(&self) -> &[Pattern] {
        &self.included
    }

    fn excludes(&self, path: &str) -> bool {
        self.excluded.iter().any(|pattern| pattern.matches(path))
    }

    fn names(&self, path: &str) -> bool {
        let mut names = self
            .included
            .iter()
            .filter(|pattern| !pattern.0.contains('*'));
        names.any(|name| name.matches(path))
    }
}

fn first_of<T: Copy>(values: &[(Pattern, T)], path: &str) -> Option<T> {
    let found = values.iter().find(|(pattern, _)| pattern.matches(path));
    found.map(|(_, value)| *value)
}

fn expect_matches<'a, S: AsRef<str>>(
    mut patterns: impl Iterator<Item = &'a Pattern>,
    known: &[S],
) -> Result<(), AdapterError> {
    let idle = patterns.find(|pattern| !known.iter().any(|path| pattern.matches(path.as_ref())));
    match idle {
        None => Ok(()),
        Some(pattern) => Err(AdapterError::unknown_target(&pattern.0, known)),
    }
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
    use insta::assert_snapshot;

    const KNOWN: [&str; 6] = [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj",
        "model.layers.0.mlp.shared_experts.down_proj",
        "model.layers.10.mlp.experts.gate_up_proj",
        "model.layers.10.mlp.experts.down_proj",
        "model.layers.10.self_attn.o_proj",
    ];

    fn select(pattern: &str) -> Vec<String> {
        Targets::new([pattern]).select(&KNOWN).unwrap()
    }

    /// Rank and alpha of every target by its place among the known paths.
    fn resolved(targets: &Targets, common: LoraConfig) -> Vec<(usize, usize, f64)> {
        let targets = targets.resolve(&KNOWN, &common).unwrap();
        let place = |path: &str| KNOWN.iter().position(|known| *known == path).unwrap();
        let row = |t: &Target| (place(&t.path), t.config.rank, t.config.alpha);
        targets.iter().map(row).collect()
    }

    #[test]
    fn a_wildcard_layer_hits_that_layer_only_and_not_layer_10() {
        assert_eq!(select("*.layers.0.*"), KNOWN[..3]);
        assert_eq!(select("model.layers.1*down_proj"), KNOWN[4..5]);
    }

    #[test]
    fn a_plain_name_matches_whole_components_at_the_end() {
        assert_eq!(select("down_proj").len(), 3);
        assert_eq!(select("experts.down_proj"), [KNOWN[1], KNOWN[4]]);
        assert_eq!(select("*.experts.*").len(), 4);
        assert!(Targets::new(["proj"]).select(&KNOWN).is_err());
    }

    #[test]
    fn excluded_linears_are_no_targets_though_a_pattern_matches_them() {
        let targets = Targets::new(["down_proj"]).without(["shared_experts.*", "*.10.*"]);
        assert!(
            targets.select(&KNOWN).is_err(),
            "a pattern with * is one of whole paths"
        );
        let targets = Targets::new(["down_proj"]).without(["*.shared_experts.*", "*.10.*"]);
        assert_eq!(targets.select(&KNOWN).unwrap(), [KNOWN[1]]);
        let none = Targets::new(["o_proj"]).without(["*"]).select(&KNOWN);
        assert_snapshot!(none.unwrap_err(), @r#"no linear is left to adapt: excluded [*] has all that the targets match (exclude fewer)"#);
    }

    #[test]
    fn the_first_pattern_that_matches_gives_rank_and_alpha() {
        let targets = Targets::new(["*.experts.*"])
            .with_rank("*.layers.0.*", 4)
            .with_rank("down_proj", 2)
            .with_alpha("down_proj", 1.5);
        let rows = resolved(&targets, LoraConfig::new(8, 16.0));
        assert_eq!(rows, [(0, 4, 16.0), (1, 4, 1.5), (3, 8, 16.0), (4, 2, 1.5)]);
    }

    #[test]
    fn ranks_of_routed_experts_alone_are_divided_by_the_experts_of_a_token() {
        let targets = Targets::new(["down_proj", "o_proj"]).with_rank_per_expert(4);
        let common = LoraConfig::new(8, 8.0);
        // Experts; shared experts and the dense linear as they are.
        let divided = [(1, 2, 8.0), (2, 8, 8.0), (4, 2, 8.0), (5, 8, 8.0)];
        assert_eq!(resolved(&targets, common), divided);
        // An adapter that the experts share is passed once by each token.
        let shared = common.with_sharing(Sharing::Shared);
        assert!(resolved(&targets, shared).iter().all(|row| row.1 == 8));
        // A rank of its own is one of the adapter.
        let own = targets.with_rank("*.0.mlp.experts.down_proj", 6);
        assert_eq!(resolved(&own, common)[0], (1, 6, 8.0));
    }

    #[test]
    fn a_rank_that_the_experts_of_a_token_do_not_divide_is_refused() {
        for top_k in [0, 3] {
            let targets = Targets::new(["down_proj"]).with_rank_per_expert(top_k);
            let error = targets.resolve(&KNOWN, &LoraConfig::new(8, 8.0));
            assert_eq!(error, Err(AdapterError::RankPerExpert { rank: 8, top_k }));
        }
    }

    #[test]
    fn a_typo_names_the_pattern_and_a_near_name() {
        let known = &KNOWN[..2];
        let message = |targets: Targets| {
            let error = targets.resolve(known, &LoraConfig::new(8, 8.0));
            error.unwrap_err().to_string()
        };
        assert_snapshot!(message(Targets::new(["down_prj"])), @r#"target "down_prj" matches no linear, did you mean "down_proj"? (known: model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj)"#);
        let down = || Targets::new(["down_proj"]);
        assert_snapshot!(message(down().without(["*.layers.3.*"])), @r#"target "*.layers.3.*" matches no linear (known: model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj)"#);
        // It matches a linear, but no target.
        assert_snapshot!(message(down().with_rank("gate_up_proj", 4)), @r#"target "gate_up_proj" matches no linear (known: model.layers.0.mlp.experts.down_proj)"#);
        assert_snapshot!(message(down().with_alpha("down_pro", 4.0)), @r#"target "down_pro" matches no linear, did you mean "down_proj"? (known: model.layers.0.mlp.experts.down_proj)"#);
        assert_snapshot!(message(Targets::new(Vec::<String>::new())), @r#"no targets given (name linears such as "*.experts.down_proj")"#);
    }

    #[test]
    fn unusable_ranks_and_alphas_of_patterns_are_refused() {
        let common = LoraConfig::new(8, 8.0);
        let zero = Targets::new(["*"]).with_rank("o_proj", 0);
        assert_eq!(zero.resolve(&KNOWN, &common), Err(AdapterError::ZeroRank));
        let endless = Targets::new(["*"]).with_alpha("o_proj", f64::INFINITY);
        assert!(endless.resolve(&KNOWN, &common).is_err());
    }
}
