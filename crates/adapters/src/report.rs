//! What adapting a module came to, as a table.

use std::fmt;

use burn::module::{ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

use crate::{Adaptable, Target, Targets};

/// What one pattern matched, as this rank holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReportRow {
    /// The pattern. `(none)`: all that no pattern matched.
    pub pattern: String,
    /// Linears and fragments; each counts for the first pattern that matches it.
    pub linears: usize,
    /// Trained parameters. Where there is no pattern these are parameters of the module that were
    /// not frozen, or earlier adapters.
    pub trained: usize,
    /// Frozen parameters.
    pub frozen: usize,
    /// Bytes of both, without gradients and the optimizer's state.
    pub bytes: usize,
}

/// What [`add_adapters`](Adaptable::add_adapters) came to: a row a pattern, a row of the rest, and
/// the total, which is all of the module. [`Display`](fmt::Display) prints the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterReport {
    /// A row a pattern, in their order.
    pub patterns: Vec<ReportRow>,
    /// The rest of the module.
    pub rest: ReportRow,
    /// The whole module.
    pub total: ReportRow,
}

impl AdapterReport {
    pub(crate) fn of<B: Backend, M: Adaptable<B>>(
        module: &M,
        targets: &Targets,
        chosen: &[Target],
        name: Option<&str>,
    ) -> Self {
        let row = |pattern: &str| ReportRow {
            pattern: pattern.into(),
            ..ReportRow::default()
        };
        let included = targets.patterns();
        let mut patterns: Vec<_> = included.iter().map(|pattern| row(&pattern.0)).collect();
        let linears = module.linears();
        for Target { path, .. } in chosen {
            let first = included.iter().position(|pattern| pattern.matches(path));
            let of = linears
                .iter()
                .find(|l| l.targets().contains(&path.as_str()));
            let (Some(first), Some(linear)) = (first, of) else {
                continue;
            };
            let row = &mut patterns[first];
            let [elements, bytes] = linear.frozen(path);
            row.linears += 1;
            row.frozen += elements;
            row.bytes += bytes;
            let adapter = match name {
                None => path.clone(),
                Some(name) => format!("{path}.{name}"),
            };
            for factor in linear.trained_weights() {
                if factor.linear == adapter {
                    row.trained += factor.weight.len();
                    row.bytes += factor.weight.len() * factor.weight.dtype().size();
                }
            }
        }
        let mut all = Count::default();
        module.visit(&mut all);
        let sum = |of: fn(&ReportRow) -> usize| patterns.iter().map(of).sum::<usize>();
        let trained = sum(|row| row.trained);
        let adapted = sum(|row| row.frozen);
        let other_trained = all.trained.saturating_sub(trained);
        let untouched = |linear: &&&dyn crate::AnyLinear<B>| {
            let targets = linear.targets();
            !chosen
                .iter()
                .any(|target| targets.contains(&target.path.as_str()))
        };
        let rest = ReportRow {
            linears: linears.iter().filter(untouched).count(),
            trained: other_trained,
            frozen: all
                .elements
                .saturating_sub(trained + adapted + other_trained),
            bytes: all.bytes.saturating_sub(sum(|row| row.bytes)),
            ..row("(none)")
        };
        let total = ReportRow {
            linears: sum(|row| row.linears) + rest.linears,
            trained: trained + rest.trained,
            frozen: adapted + rest.frozen,
            bytes: all.bytes,
            ..row("total")
        };
        Self {
            patterns,
            rest,
            total,
        }
    }
}

impl fmt::Display for AdapterReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = ["pattern", "linears", "trained", "frozen", "bytes"].map(String::from);
        let rows = self.patterns.iter().chain([&self.rest, &self.total]);
        let rows = rows.map(|row| {
            let [linears, trained, frozen, bytes] =
                [row.linears, row.trained, row.frozen, row.bytes].map(|n| n.to_string());
            [row.pattern.clone(), linears, trained, frozen, bytes]
        });
        let lines: Vec<_> = std::iter::once(header).chain(rows).collect();
        let width = |column: usize| lines.iter().map(|line| line[column].len()).max();
        let [first, others @ ..] =
            std::array::from_fn::<_, 5, _>(|column| width(column).unwrap_or(0));
        for [pattern, numbers @ ..] in &lines {
            write!(f, "{pattern:first$}")?;
            for (number, width) in numbers.iter().zip(others) {
                write!(f, "  {number:>width$}")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// The parameters of a module.
#[derive(Default)]
struct Count {
    elements: usize,
    trained: usize,
    bytes: usize,
}

impl<B: Backend> ModuleVisitor<B> for Count {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let (elements, value) = (param.shape().num_elements(), param.val());
        self.elements += elements;
        self.bytes += elements * value.dtype().size();
        if value.is_require_grad() {
            self.trained += elements;
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.elements += param.shape().num_elements();
        self.bytes += param.shape().num_elements() * param.val().dtype().size();
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.elements += param.shape().num_elements();
        self.bytes += param.shape().num_elements() * param.val().dtype().size();
    }
}
