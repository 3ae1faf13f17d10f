//! `cargo run -p moe-lora-book` builds the book into `target/book`.

fn main() -> anyhow::Result<()> {
    let book = moe_lora_book::load()?;
    book.build()?;
    let page = book.build_dir_for("html").join("index.html");
    println!("{}", page.canonicalize()?.display());
    Ok(())
}
