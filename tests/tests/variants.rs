//! The book's table of variants: every cell is run or refused here. `UPDATE_BOOK=1` writes the page.

use std::fs;
use std::path::Path;
use std::thread;

use moe_lora_tests::refusals::refusals;
use moe_lora_tests::variants::{Base, Cell, Variant};

const INTRODUCTION: &str = "\
# Variants

<!-- Generated: UPDATE_BOOK=1 cargo test -p moe-lora-tests --test variants -->

What [adapters](adapters.md) can be, and on what. A cell of the table is a test: output, gradient of the input and
gradients of all factors are compared with those of one device with the adapters folded into its weights, within
1e-5 in f32 and within 1e-2 of the norm in bf16.

- `column`, `row`, `whole`: dense linears, sharded on `d_out`, on `d_in`, or held by every rank; tokens sharded too.
- `burn`: burn's own `Linear`.
- `fc1`, `fc2`: gate and up of experts, and down, one weight an expert; `experts, whole`: held by every rank of the
  group.
- `shared`, `overlapped`: shared experts, their sum in place (sequence parallel too) or after that of the others.
- `layer`: all linears of an MoE layer, through router, dispatcher and gradient synchronisation, without shared
  experts and with either kind.

Where there are no experts there is nothing to share, and a rank per expert is the common rank.
";

/// A code span, of text with backticks too.
fn code(text: &str) -> String {
    match text.contains('`') {
        true => format!("`` {text} ``"),
        false => format!("`{text}`"),
    }
}

/// Each variant on each base, the variants at once.
fn cells() -> Vec<[Cell; Base::ALL.len()]> {
    thread::scope(|scope| {
        let row = |variant| move || Base::ALL.map(|base| Cell::of(variant, base));
        let rows = Variant::ALL.map(|variant| scope.spawn(row(variant)));
        let rows = rows.map(|row| row.join().expect("a cell is neither exact nor refused"));
        rows.into()
    })
}

fn page() -> String {
    let mut footnotes = Vec::new();
    let headings = Base::ALL.map(Base::name).join(" | ");
    let mut table = format!(
        "| | {headings} |\n|---|{}\n",
        "---|".repeat(Base::ALL.len())
    );
    for (variant, cells) in Variant::ALL.into_iter().zip(cells()) {
        let cells = cells.map(|cell| match cell {
            Cell::Exact => "all".into(),
            Cell::Refused(error) => {
                footnotes.push(error);
                format!("refused<sup>{}</sup>", footnotes.len())
            }
        });
        table += &format!("| {} | {} |\n", variant.name(), cells.join(" | "));
    }
    let footnotes = footnotes.iter().enumerate();
    let footnotes = footnotes.map(|(k, error)| format!("{}. {}\n", k + 1, code(error)));
    let refused = refusals().into_iter();
    let refused = refused.map(|[asked, error]| format!("- {asked}  \n  {}\n", code(&error)));
    let layers = Base::Layer.topologies().into_iter().map(|place| {
        let t = place.topology;
        let [ranks, ep, etp, tp] = [t.world_size(), t.ep(), t.etp(), t.tp()];
        format!("| {ranks} | {ep} | {etp} | {tp} | {} |\n", t.expert_dp())
    });
    [
        INTRODUCTION,
        "\n## Variant by base\n\n",
        &table,
        "\n",
        &footnotes.collect::<String>(),
        "\n`all` is TP = 1, 2 and 4 for dense linears and shared experts, ETP = 1, 2 and 4 for linears of experts, and for\n\
         layers:\n\n| ranks | EP | ETP | TP | expert DP |\n|---|---|---|---|---|\n",
        &layers.collect::<String>(),
        "\n## Refused together\n\nNothing is silently ignored: what makes no sense is an error where it is asked for.\n\n",
        &refused.collect::<String>(),
    ]
    .concat()
}

#[test]
fn every_variant_is_exact_or_refused_on_every_base_and_the_book_says_so() {
    let page = page();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../book/src/variants.md");
    if std::env::var_os("UPDATE_BOOK").is_some() {
        fs::write(&path, page).unwrap();
        return;
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(page, committed, "{} (UPDATE_BOOK=1)", path.display());
}
