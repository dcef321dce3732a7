//! `oxtile explain`.

use std::path::PathBuf;

use super::{
    Request, UsageError,
    help::EXPLAIN_HELP,
    words::{Word, Words},
};

/// `oxtile explain`.
#[derive(Debug, PartialEq)]
pub struct Explain {
    /// How the names of the kernels begin.
    pub kernel: String,
    /// The folder that `OXTILE_EXPLAIN` named.
    pub records: PathBuf,
    /// The folder of compiled kernels.
    pub kernels: PathBuf,
    /// The folder for pictures, if any are wanted.
    pub svg: Option<PathBuf>,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut kernel, mut records, mut kernels, mut svg) = (None, None, None, None);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(EXPLAIN_HELP)),
            Word::Value(value) if kernel.is_none() && !value.is_empty() => kernel = Some(value.to_string_lossy().into_owned()),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "records" => records = Some(words.path("--records")?),
                "kernels" => kernels = Some(words.path("--kernels")?),
                "svg" => svg = Some(words.path("--svg")?),
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let Some(kernel) = kernel else { return Err(words.error("KERNEL is missing")) };
    let records = records.unwrap_or_else(|| "target/oxtile/explain".into());
    let kernels = kernels.unwrap_or_else(|| "target/oxtile/kernels".into());
    Ok(Request::Explain(Explain { kernel, records, kernels, svg }))
}
