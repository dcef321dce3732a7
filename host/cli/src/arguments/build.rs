//! `oxtile build`.

use std::path::PathBuf;

use oxtile_build::Arch;

use super::{
    Request, UsageError,
    help::BUILD_HELP,
    words::{Word, Words},
};

/// `oxtile build`.
#[derive(Debug, PartialEq)]
pub struct Build {
    /// `Cargo.toml` of the crate that holds the kernels.
    pub manifest: PathBuf,
    /// Architectures; none is the default one.
    pub archs: Vec<Arch>,
    /// The only family to build.
    pub family: Option<String>,
    /// Where the kernels go.
    pub out_dir: Option<PathBuf>,
    /// With bounds checks.
    pub checked: bool,
    /// Whether line tables are kept.
    pub line_tables: bool,
    /// Whether the figures are written into the ratchet.
    pub accept: bool,
}

pub(super) fn parse(words: &mut Words<'_>) -> Result<Request, UsageError> {
    let (mut manifest, mut archs, mut family, mut out_dir) = (None, Vec::new(), None, None);
    let (mut checked, mut line_tables, mut accept) = (false, false, false);
    while let Some(word) = words.next()? {
        match &word {
            Word::Help => return Ok(Request::Help(BUILD_HELP)),
            Word::Value(_) => return Err(words.unexpected(&word)),
            Word::Flag(flag) => match flag.as_str() {
                "manifest-path" => manifest = Some(words.path("--manifest-path")?),
                "arch" => {
                    for name in words.text()?.split(',') {
                        archs.push(name.trim().parse::<Arch>().map_err(|error| words.error(error.to_string()))?);
                    }
                }
                "family" => family = Some(words.text()?),
                "out-dir" => out_dir = Some(words.path("--out-dir")?),
                "checked" => checked = true,
                "line-tables" => line_tables = true,
                "accept" => accept = true,
                _ => return Err(words.unexpected(&word)),
            },
        }
    }
    let manifest = manifest.unwrap_or_else(|| "Cargo.toml".into());
    Ok(Request::Build(Build { manifest, archs, family, out_dir, checked, line_tables, accept }))
}
