//! LaTeX to MathML, in the notation that code hosts render as well: $`...`$ in a line, and fenced
//! blocks of the language `math`.

use std::sync::LazyLock;

use anyhow::{Context, Result, ensure};
use mdbook_driver::book::{Book, BookItem};
use mdbook_preprocessor::{Preprocessor, PreprocessorContext};
use pulldown_latex::config::DisplayMode;
use pulldown_latex::{Parser, RenderConfig, Storage, push_mathml};
use regex::{Captures, Regex};

static FORMULA: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?s)```math\n(?P<block>.*?)\n```|\$`(?P<inline>[^`]+)`\$").expect("it is a regex")
});

pub(crate) struct Formulas;

impl Preprocessor for Formulas {
    fn name(&self) -> &str {
        "formulas"
    }

    fn run(&self, _: &PreprocessorContext, mut book: Book) -> Result<Book> {
        let mut outcome = Ok(());
        book.for_each_mut(|item| {
            if let BookItem::Chapter(chapter) = item
                && outcome.is_ok()
            {
                let rendered = render(&chapter.content);
                outcome = rendered
                    .map(|content| chapter.content = content)
                    .with_context(|| format!("chapter {:?}", chapter.name));
            }
        });
        outcome.map(|()| book)
    }
}

/// The page with its formulas as MathML.
fn render(page: &str) -> Result<String> {
    let mut outcome = Ok(());
    let rendered = FORMULA.replace_all(page, |found: &Captures<'_>| {
        let (latex, mode) = match (found.name("block"), found.name("inline")) {
            (Some(block), _) => (block.as_str(), DisplayMode::Block),
            (None, inline) => (inline.map_or("", |at| at.as_str()), DisplayMode::Inline),
        };
        mathml(latex, mode).unwrap_or_else(|error| {
            outcome = Err(error);
            String::new()
        })
    });
    outcome.map(|()| rendered.into_owned())
}

fn mathml(latex: &str, display_mode: DisplayMode) -> Result<String> {
    let storage = Storage::new();
    let events: Vec<_> = Parser::new(latex, &storage).collect();
    for event in &events {
        ensure!(event.is_ok(), "formula {latex:?}: {event:?}");
    }
    let config = RenderConfig {
        display_mode,
        ..Default::default()
    };
    let mut mathml = String::new();
    push_mathml(&mut mathml, events.into_iter(), config)?;
    // An empty line would end the HTML block.
    Ok(mathml.replace('\n', " "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formulas_become_mathml_and_code_stays() {
        let page =
            render("Scale $`s = \\alpha / r`$, not `$x`.\n\n```math\nW + s B A\n```\n").unwrap();
        assert_eq!(page.matches("<math").count(), 2);
        assert_eq!(page.matches("display=\"block\"").count(), 1);
        assert!(page.contains("not `$x`"), "{page}");
        assert!(!page.contains("```"), "{page}");
    }

    #[test]
    fn a_formula_with_a_fault_stops_the_build() {
        let error = render("$`\\frac{1}`$").unwrap_err();
        assert!(error.to_string().contains("\\\\frac{1}"), "{error}");
    }
}
