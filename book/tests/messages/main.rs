//! The index of messages, `book/src/messages.md`: generated from one example of every variant of
//! every error enum, and from the sources. `UPDATE_BOOK=1` rewrites it.

mod examples;
mod sources;

use std::fs;
use std::path::{Path, PathBuf};

use sources::{Enum, repository};

/// What an enum's examples say: name of the variant and message.
struct Examples {
    /// Where the enum is.
    source: &'static str,
    name: &'static str,
    /// The heading of its messages.
    heading: &'static str,
    messages: Vec<(String, String)>,
}

fn examples<E: std::error::Error>(
    source: &'static str,
    name: &'static str,
    heading: &'static str,
    errors: impl IntoIterator<Item = E>,
) -> Examples {
    let of = |error: E| {
        let debug = format!("{error:?}");
        let variant: String = debug.chars().take_while(|c| c.is_alphanumeric()).collect();
        (variant, error.to_string())
    };
    Examples {
        source,
        name,
        heading,
        messages: errors.into_iter().map(of).collect(),
    }
}

#[test]
fn the_index_has_every_message() {
    let page = page();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/messages.md");
    if std::env::var_os("UPDATE_BOOK").is_some() {
        fs::write(&path, page).unwrap();
        return;
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    for (line, (new, old)) in page.lines().zip(committed.lines()).enumerate() {
        assert_eq!(
            new,
            old,
            "line {} of {} (UPDATE_BOOK=1)",
            line + 1,
            path.display()
        );
    }
    assert!(
        page == committed,
        "{} has another length (UPDATE_BOOK=1)",
        path.display()
    );
}

#[test]
fn every_error_enum_has_its_examples() {
    let known = examples::all();
    for Enum { source, name, .. } in sources::error_enums() {
        let found = known
            .iter()
            .any(|these| these.source == source && these.name == name);
        assert!(
            found,
            "{source}: add examples of {name} to book/tests/messages/examples"
        );
    }
}

fn page() -> String {
    let mut page = String::from(
        "# Every message\n\n\
         <!-- Generated: UPDATE_BOOK=1 cargo test -p moe-lora-book --test messages -->\n\n\
         Errors with example values, what they mean and, after the arrow, what their brackets say of the way out.
\
         Search for words of yours without its numbers and names.
",
    );
    for these in examples::all() {
        page += &section(&these);
    }
    page += "\n## Panics of a forward or backward pass\n\n\
             Shapes and uses that do not fit. Braces stand for values.\n\n";
    page += &templates(&sources::panics());
    page += "\n## Messages of the commands\n\n\
             Of `finetune` and `moe-lora`, beside the errors above. Braces stand for values.\n\n";
    page += &templates(&sources::commands());
    page
}

fn section(these: &Examples) -> String {
    let of_source = sources::parse(these.source);
    let variants = of_source.into_iter().find(|found| found.name == these.name);
    let variants = variants.unwrap_or_else(|| panic!("{} has no {}", these.source, these.name));
    let mut text = format!("\n## {}\n\n", these.heading);
    for variant in variants
        .variants
        .iter()
        .filter(|variant| !variant.transparent)
    {
        let mut messages = these
            .messages
            .iter()
            .filter(|(name, _)| *name == variant.name);
        let (_, message) = messages.next().unwrap_or_else(|| {
            panic!(
                "no example of {}::{} (add one to book/tests/messages/examples)",
                these.name, variant.name
            )
        });
        let (what, remedy) = split_remedy(message);
        text += &format!("- {}  \n  {}", code(what), variant.doc);
        if let Some(remedy) = remedy {
            text += &format!(" → {}", plain(remedy));
        }
        text += "\n";
    }
    text
}

/// The message without the remedy in its last brackets, and the remedy.
fn split_remedy(message: &str) -> (&str, Option<&str>) {
    let mut depth = 0;
    if !message.ends_with(')') {
        return (message, None);
    }
    for (at, c) in message.char_indices().rev() {
        match c {
            ')' => depth += 1,
            '(' => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            let remedy = &message[at + 1..message.len() - 1];
            // That of the operating system is no remedy.
            return match remedy.starts_with("os error") {
                true => (message, None),
                false => (message[..at].trim_end(), Some(remedy)),
            };
        }
    }
    (message, None)
}

fn templates(messages: &[String]) -> String {
    let line = |message: &String| {
        let (what, remedy) = split_remedy(message);
        match remedy {
            Some(remedy) => format!("- {}  \n  → {}\n", code(what), plain(remedy)),
            None => format!("- {}\n", code(what)),
        }
    };
    messages
        .iter()
        .filter(|message| says_something(message))
        .map(line)
        .collect()
}

/// Whether there are words to search for beside the values.
fn says_something(message: &str) -> bool {
    let words = split_remedy(message).0.split_whitespace();
    words.filter(|word| !word.contains('{')).count() > 2
}

/// A remedy with its backticks, and without what Markdown would take for markup.
fn plain(text: &str) -> String {
    text.replace('*', "\\*").replace('<', "&lt;")
}

fn code(message: &str) -> String {
    let message = message.replace('\n', " ");
    match message.contains('`') {
        true => format!("`` {message} ``"),
        false => format!("`{message}`"),
    }
}

/// A file of the repository.
fn path(relative: &str) -> PathBuf {
    repository().join(relative)
}
