//! The book. Its formulas become MathML when it is built: they need no network, font or script.

mod formulas;

use std::path::Path;

use anyhow::{Context, Result};
use mdbook_driver::MDBook;

/// The book in `book/` of the repository.
///
/// # Errors
///
/// When `book.toml` or `SUMMARY.md` is not sound, or a chapter is missing.
pub fn load() -> Result<MDBook> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut book = MDBook::load(root).context("cannot load the book")?;
    book.with_preprocessor(formulas::Formulas);
    Ok(book)
}
