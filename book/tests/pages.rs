//! The book builds, and what its pages point at is there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

use clap::Parser;
use finetune::args::Args;
use regex::Regex;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The pages as they are written, and the README and CONTRIBUTING.md.
fn pages() -> Vec<(PathBuf, String)> {
    let source = repository().join("book/src");
    let files = fs::read_dir(&source)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let top = ["README.md", "CONTRIBUTING.md"].map(|name| repository().join(name));
    let markdown = files.filter(|path| path.extension().is_some_and(|found| found == "md"));
    let read = |path: PathBuf| (path.clone(), fs::read_to_string(path).unwrap());
    markdown.chain(top).map(read).collect()
}

fn matches<'a>(pattern: &str, text: &'a str) -> Vec<[&'a str; 2]> {
    let pattern = Regex::new(pattern).unwrap();
    let found = pattern.captures_iter(text).map(|found| {
        let group = |at| found.get(at).map_or("", |found| found.as_str());
        [group(1), group(2)]
    });
    found.collect()
}

/// Every page of the built book, by its path in it.
static BUILT: LazyLock<BTreeMap<PathBuf, String>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let mut book = moe_lora_book::load().unwrap();
    book.config.build.build_dir = folder.path().to_owned();
    book.build().unwrap();
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.path().to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder.path()).unwrap().to_owned();
            let html = name.extension().is_some_and(|found| found == "html");
            let text = if html {
                fs::read_to_string(path).unwrap()
            } else {
                String::new()
            };
            found.insert(name, text);
        }
    }
    found
});

#[test]
fn every_link_and_figure_of_the_built_book_is_there() {
    let mut links = 0;
    for (page, html) in BUILT.iter().filter(|(page, _)| !page.ends_with("404.html")) {
        for [target, _] in matches(r#"(?:href|src)="([^"]*)""#, html) {
            if target.contains("://") || target.starts_with("data:") {
                continue;
            }
            links += 1;
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => page.clone(),
                _ => normal(&page.parent().unwrap().join(file)),
            };
            let Some(html) = BUILT.get(&path) else {
                panic!("{}: {target} is not there", page.display());
            };
            let id = anchor.is_empty() || html.contains(&format!("id=\"{anchor}\""));
            assert!(id, "{}: {target} has no such place", page.display());
        }
    }
    assert!(links > 100, "{links} links");
}

#[test]
fn nothing_is_left_of_includes_and_formulas() {
    for (page, html) in BUILT.iter() {
        assert!(!html.contains("{{#"), "{}", page.display());
        assert!(
            !html.contains("$<code>") && !html.contains("language-math"),
            "{}",
            page.display()
        );
    }
    assert!(BUILT[Path::new("notation.html")].contains("<math"));
}

#[test]
fn every_rust_block_is_included_from_code_that_is_compiled() {
    let mut blocks = 0;
    for (page, text) in pages()
        .iter()
        .filter(|(page, _)| page.components().any(|at| at.as_os_str() == "src"))
    {
        for [language, block] in matches(r"(?ms)^```(rust[^\n]*)\n(.*?)^```", text) {
            let include = matches(r"\A\{\{#include (\S+)\}\}\n\z", block);
            let [[target, _]] = include[..] else {
                panic!(
                    "{}: {language} block without an include: {block}",
                    page.display()
                );
            };
            assert!(
                target.starts_with("../../examples/") || target.starts_with("../../tests/"),
                "{}: {target}",
                page.display()
            );
            blocks += 1;
        }
        for [target, _] in matches(r"\{\{#include (\S+)\}\}", text) {
            let (file, anchor) = target.split_once(':').unwrap_or((target, ""));
            let code = fs::read_to_string(page.parent().unwrap().join(file));
            let code = code.unwrap_or_else(|error| panic!("{}: {file}: {error}", page.display()));
            let within = |line: &str| {
                let last = code.lines().count();
                line.parse()
                    .is_ok_and(|line: usize| (1..=last).contains(&line))
            };
            let lines = anchor.is_empty() || anchor.split(':').all(within);
            let ends = ["ANCHOR", "ANCHOR_END"].map(|end| format!("{end}: {anchor}\n"));
            let marked = ends.iter().all(|end| code.contains(end));
            let place = page.display();
            assert!(lines || marked, "{place}: {target} is not there");
        }
    }
    assert!(blocks > 10, "{blocks} blocks");
}

#[test]
fn paths_that_are_named_exist() {
    let root = r"(?:crates|kernels-cubecl|tests|benches|examples|book)/";
    for (page, text) in pages() {
        let generated = page.ends_with("messages.md");
        for [path, _] in matches(&format!(r"[`(]({root}[\w./-]*)[`)#]"), &text) {
            assert!(
                generated || repository().join(path).exists(),
                "{}: {path}",
                page.display()
            );
        }
    }
}

#[test]
fn commands_name_what_there_is() {
    let manifest = fs::read_to_string(repository().join("Cargo.lock")).unwrap();
    let packages: BTreeSet<&str> = matches(r#"name = "([^"]+)""#, &manifest)
        .into_iter()
        .map(|[name, _]| name)
        .collect();
    let mut jobs = 0;
    for (page, text) in pages() {
        for [block, _] in matches(r"(?ms)^```sh\n(.*?)^```", &text) {
            let block = block.replace("\\\n", " ");
            for line in block.lines().filter_map(|line| line.split('#').next()) {
                let place = format!("{}: {line}", page.display());
                for [kind, name] in matches(r" (-p|--example|--test) ([\w-]+)", line) {
                    let tests = repository().join("tests/tests");
                    let examples = repository().join("examples/ideas");
                    assert!(
                        match kind {
                            "-p" => packages.contains(name),
                            "--example" => examples.join(format!("{name}.rs")).exists(),
                            _ => {
                                [".rs", "/main.rs"]
                                    .iter()
                                    .any(|end| tests.join(format!("{name}{end}")).exists())
                                    || line.contains("-p finetune")
                                    || line.contains("-p moe-lora-book")
                            }
                        },
                        "{place}"
                    );
                }
                let run = line
                    .split_once("run -p finetune --")
                    .or(line.split_once("release/finetune "));
                if let Some((_, flags)) = run {
                    let words = std::iter::once("finetune").chain(flags.split_whitespace());
                    let parsed = Args::try_parse_from(words);
                    let help = line.contains("--help");
                    assert!(help || parsed.is_ok(), "{place}: {:?}", parsed.err());
                    jobs += 1;
                }
            }
        }
    }
    assert!(jobs > 8, "{jobs} jobs");
}

/// The path with its `..` resolved.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                normal.pop();
            }
            Component::CurDir => {}
            other => normal.push(other),
        }
    }
    normal
}
