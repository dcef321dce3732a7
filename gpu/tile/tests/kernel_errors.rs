//! What the compiler says when a kernel is written or called wrongly. `TRYBUILD=overwrite` renews the texts.

#[test]
fn error_texts() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
