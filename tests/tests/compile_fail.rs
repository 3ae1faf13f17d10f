//! The known defects of expert LoRA are type errors whose messages name the operation to use.

/// The same functions written right. An ordinary module rather than a `pass` file of trybuild, which
/// would build and link every dependency once more.
#[path = "compile_fail/right_algebra.rs"]
pub mod right_algebra;

#[test]
fn the_defects_do_not_compile() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/compile_fail/partial_into_b.rs");
    cases.compile_fail("tests/compile_fail/replicated_sum_into_b.rs");
    cases.compile_fail("tests/compile_fail/replicated_gather_into_b.rs");
    cases.compile_fail("tests/compile_fail/gathered_delta_on_partial_base.rs");
    cases.compile_fail("tests/compile_fail/dense_group_into_expert.rs");
}
