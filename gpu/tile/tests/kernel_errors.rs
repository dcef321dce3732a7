//! What the compiler says when a kernel is written or called wrongly, and what it must take.
//! `TRYBUILD=overwrite` renews the texts.

#[test]
fn error_texts() {
    let cases = trybuild::TestCases::new();
    // One case that passes makes all of them be built, not checked: some limits show for used functions alone.
    cases.pass("tests/ui/pass/*.rs");
    cases.compile_fail("tests/ui/*.rs");
}
