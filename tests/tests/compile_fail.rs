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
    cases.compile_fail("tests/compile_fail/partial_read_as_value.rs");
}

#[test]
fn each_message_names_the_operation_to_use_and_no_place_of_one_machine() {
    for (name, remedy) in [
        ("partial_into_b", "`.reduce_fanout()`"),
        ("replicated_sum_into_b", "`.reduce_fanout()`"),
        ("replicated_gather_into_b", "`.gather_fanout()`"),
        ("gathered_delta_on_partial_base", "`.embed()`"),
        ("dense_group_into_expert", "`mesh.expert_tp()`"),
        ("partial_read_as_value", "`.reduce_from()`"),
    ] {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/compile_fail");
        let path = format!("{folder}/{name}.stderr");
        let message = std::fs::read_to_string(&path).unwrap();
        assert!(message.contains(remedy), "{name} does not name {remedy}");
        let places = message
            .lines()
            .filter_map(|line| line.trim().strip_prefix("-->"));
        for place in places {
            let place = place.trim();
            assert!(
                place.starts_with("tests/compile_fail/") || place.starts_with("$WORKSPACE/"),
                "{name} points at {place}"
            );
        }
    }
}
