//! What the sources say of their errors: variants with their documentation, and messages of panics.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, ExprLit, Item, ItemFn, ItemMod, Lit, Macro, Meta, Token};

pub struct Enum {
    /// Its file, from the root of the repository.
    pub source: String,
    pub name: String,
    pub variants: Vec<Variant>,
}

pub struct Variant {
    pub name: String,
    /// Its documentation, on one line.
    pub doc: String,
    /// Whether its message is that of the error inside.
    pub transparent: bool,
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The error enums of the published crates.
pub fn error_enums() -> Vec<Enum> {
    let crates = ["crates", "kernels-cubecl"];
    let files = crates.iter().flat_map(|folder| rust_files(folder));
    files.flat_map(|file| parse(&file)).collect()
}

/// The public error enums of one file.
pub fn parse(source: &str) -> Vec<Enum> {
    let items = syntax(source).items.into_iter();
    let enums = items.filter_map(|item| match item {
        Item::Enum(found) => Some(found),
        _ => None,
    });
    let errors = enums.filter(|found| {
        let public = matches!(found.vis, syn::Visibility::Public(_));
        public && found.ident.to_string().ends_with("Error")
    });
    let variant = |variant: syn::Variant| Variant {
        name: variant.ident.to_string(),
        doc: doc(&variant.attrs),
        transparent: variant.attrs.iter().any(is_transparent),
    };
    let of = |found: syn::ItemEnum| Enum {
        source: source.into(),
        name: found.ident.to_string(),
        variants: found.variants.into_iter().map(variant).collect(),
    };
    errors.map(of).collect()
}

/// Messages with which the crates panic, each once.
pub fn panics() -> Vec<String> {
    let folders = [
        "crates/parallel/src",
        "crates/adapters/src",
        "crates/experts/src",
    ];
    messages(
        &[&folders[..], &["kernels-cubecl/src", "crates/nccl/src"]].concat(),
        &["panic", "assert", "assert_eq"],
    )
}

/// Messages of the commands, each once.
pub fn commands() -> Vec<String> {
    let macros = ["ensure", "bail", "anyhow", "format"];
    messages(&["examples/finetune/src", "crates/cli/src"], &macros)
}

fn messages(folders: &[&str], macros: &[&str]) -> Vec<String> {
    let mut found = Messages {
        macros,
        messages: BTreeSet::new(),
    };
    for file in folders.iter().flat_map(|folder| rust_files(folder)) {
        found.visit_file(&syntax(&file));
    }
    found.messages.into_iter().collect()
}

struct Messages<'a> {
    macros: &'a [&'a str],
    messages: BTreeSet<String>,
}

impl<'ast> Visit<'ast> for Messages<'_> {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_test(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast ItemFn) {
        if !is_test(&function.attrs) {
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_macro(&mut self, found: &'ast Macro) {
        let arguments = found.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated);
        let Ok(arguments) = arguments else { return };
        // Messages inside of closures that a macro takes.
        arguments
            .iter()
            .for_each(|argument| self.visit_expr(argument));
        let name = found
            .path
            .segments
            .last()
            .map(|name| name.ident.to_string());
        let name = name.unwrap_or_default();
        let message = arguments.iter().find_map(text);
        if let Some(message) = message.filter(|_| self.macros.contains(&name.as_str()))
            && (name != "format" || message.ends_with(')') && message.contains(" ("))
        {
            self.messages.insert(message);
        }
    }
}

fn text(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Lit(ExprLit {
            lit: Lit::Str(text),
            ..
        }) => Some(text.value()),
        _ => None,
    }
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        Meta::Path(path) => path.is_ident("test"),
        Meta::NameValue(_) => false,
    })
}

fn is_transparent(attribute: &Attribute) -> bool {
    match &attribute.meta {
        Meta::List(list) => list.path.is_ident("error") && list.tokens.to_string() == "transparent",
        _ => false,
    }
}

fn doc(attributes: &[Attribute]) -> String {
    let lines = attributes
        .iter()
        .filter_map(|attribute| match &attribute.meta {
            Meta::NameValue(doc) if doc.path.is_ident("doc") => text(&doc.value),
            _ => None,
        });
    let lines: Vec<String> = lines.map(|line| line.trim().to_owned()).collect();
    // Links of the API documentation lead nowhere here.
    let link = Regex::new(r"\[([^\]]+)\](\([^)]*\))?").expect("it is a regex");
    link.replace_all(&lines.join(" "), "$1").into_owned()
}

fn syntax(source: &str) -> syn::File {
    let text = fs::read_to_string(super::path(source)).unwrap();
    syn::parse_file(&text).unwrap_or_else(|error| panic!("{source}: {error}"))
}

/// Rust files under a folder's `src`, in order.
fn rust_files(folder: &str) -> Vec<String> {
    let mut files = Vec::new();
    let mut folders = vec![super::path(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && !path.ends_with("testkit") {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let relative = path.strip_prefix(repository()).unwrap();
                files.push(relative.to_str().unwrap().to_owned());
            }
        }
    }
    files.retain(|file| file.contains("/src/"));
    files.sort();
    files
}
