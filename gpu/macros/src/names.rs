//! Names: of types, of families, of architectures.

use syn::{Error, Ident, Result};

/// `Amax` of `amax`, `GemmAny` of `gemm_any`.
pub fn camel_case(snake: &str) -> String {
    let capitalised = |word: &str| {
        let mut letters = word.chars();
        letters.next().into_iter().flat_map(char::to_uppercase).chain(letters).collect::<String>()
    };
    snake.split('_').map(capitalised).collect()
}

/// The family of a file: its name (`src/amax.rs`), or the folder under `src` (`src/attention/forward.rs`).
pub fn family_of(file: &str) -> String {
    let components: Vec<&str> = file.split('/').collect();
    let below_src = components.iter().rposition(|component| *component == "src").map_or(0, |src| src + 1);
    let first = components.get(below_src).copied().unwrap_or_default();
    match first.trim_end_matches(".rs") {
        "lib" | "main" | "" => std::env::var("CARGO_PKG_NAME").unwrap_or_default().replace('-', "_"),
        family => family.to_owned(),
    }
}

/// An architecture as ptxas writes it. A kernel that requires another word would be in no build.
pub fn architecture(name: Ident) -> Result<Ident> {
    let word = name.to_string();
    let digits = word.strip_prefix("sm_").map(|rest| rest.strip_suffix(['a', 'f']).unwrap_or(rest)).unwrap_or_default();
    if (2..=3).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(name);
    }
    Err(Error::new(name.span(), format!("`{word}` is no architecture: write it as ptxas does, such as sm_80, sm_90a or sm_100f")))
}

#[cfg(test)]
mod tests {
    use proc_macro2::Span;

    use super::*;

    #[test]
    fn families_are_of_whole_components() {
        for (file, family) in [
            ("src/amax.rs", "amax"),
            ("gpu/src/attention/forward.rs", "attention"),
            ("/work/datasrc/kernels/src/amax.rs", "amax"),
            ("kernels/src/datasrc/amax.rs", "datasrc"),
            ("/usr/src/kernels/src/gemm.rs", "gemm"),
            ("tests/cases.rs", "tests"),
            ("src/lib.rs", "oxtile_macros"),
        ] {
            assert_eq!(family_of(file), family, "{file}");
        }
    }

    #[test]
    fn words_of_any_letters_are_capitalised() {
        let cases = [("amax", "Amax"), ("gemm__any_8", "GemmAny8"), ("_öl_größe", "ÖlGröße"), ("ß", "SS")];
        cases.iter().for_each(|(snake, camel)| assert_eq!(camel_case(snake), *camel));
    }

    #[test]
    fn an_architecture_is_written_as_ptxas_does() {
        let checked = |word: &str| architecture(Ident::new(word, Span::call_site()));
        ["sm_80", "sm_90a", "sm_100", "sm_120f"].iter().for_each(|word| assert!(checked(word).is_ok(), "{word}"));
        for word in ["sm90a", "sm_9", "sm_90b", "sm_90aa", "sm_1000", "sm_", "hopper", "SM_90a"] {
            let error = checked(word).unwrap_err().to_string();
            assert_eq!(error, format!("`{word}` is no architecture: write it as ptxas does, such as sm_80, sm_90a or sm_100f"));
        }
    }

    #[test]
    fn requires_is_checked_where_it_is_parsed() {
        let parsed =
            |requires: &str| syn::parse_str::<crate::kernel::Options>(&format!("threads = 32, grid = grid, requires = {requires}"));
        assert!(parsed("sm_90a").is_ok());
        assert!(parsed("sm90a").err().expect("misspelt").to_string().starts_with("`sm90a` is no architecture"));
    }
}
