//! What a package must hold and may not, and how large it may be.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};

/// What crates.io takes.
const LIMIT: u64 = 10_000_000;

/// What every package holds.
const ALWAYS: [&str; 3] = ["Cargo.toml", "LICENSE-MIT", "LICENSE-APACHE"];

/// Folders that no package holds: what is in them needs the workspace, or is another package's.
const NEVER: [&str; 5] = ["tests", "benches", "examples", "ratchet", "cubins"];

/// What a package holds.
#[derive(Debug)]
pub struct Contents {
    /// How many files.
    pub files: usize,
    /// What they take together.
    pub bytes: u64,
}

/// Checks an unpacked package of `packed_bytes` in the registry.
pub fn check(name: &str, folder: &Path, packed_bytes: u64) -> Result<Contents> {
    let files = files(folder)?;
    let place = |file: &PathBuf| file.strip_prefix(folder).unwrap_or(file).to_owned();
    let places: Vec<_> = files.iter().map(|(file, _)| place(file)).collect();
    let sized: Vec<_> = files.iter().map(|(_, bytes)| *bytes).zip(places.iter()).collect();
    if packed_bytes > LIMIT {
        let largest = sized.iter().max().map_or_else(String::new, |(bytes, place)| format!("{} has {bytes}", place.display()));
        bail!("{name} takes {packed_bytes} bytes, {LIMIT} are allowed; the largest file: {largest}");
    }
    let special: &[&str] = match name {
        "oxtile-kernels" => &["build.rs", "SOURCE_HASH"],
        "oxtile" | "oxtile-cli" => &["README.md"],
        _ if name.starts_with("oxtile-cubins-") => &["build.rs", "kernels.pack"],
        _ => &[],
    };
    for wanted in ALWAYS.iter().chain(special) {
        let bytes = sized.iter().find(|(_, place)| *place == Path::new(wanted)).map(|(bytes, _)| *bytes);
        ensure!(bytes.is_some_and(|bytes| bytes > 0), "{name} holds no {wanted}: see `include` in its Cargo.toml");
    }
    ensure!(places.iter().any(|place| place.starts_with("src")), "{name} holds no sources");
    let is_stray = |place: &&PathBuf| NEVER.iter().any(|never| place.components().next().is_some_and(|first| first.as_os_str() == *never));
    if let Some(stray) = places.iter().find(is_stray) {
        bail!("{name} holds {}: see `include` in its Cargo.toml", stray.display());
    }
    let manifest = fs::read_to_string(folder.join("Cargo.toml")).with_context(|| format!("cannot read the manifest of {name}"))?;
    ensure!(!manifest.contains("repository ="), "{name} names a repository: the place does not exist");
    for line in ["license = ", "description = ", "documentation = \"https://docs.rs/"] {
        ensure!(manifest.contains(line), "the manifest of {name} has no `{line}`");
    }
    Ok(Contents { files: places.len(), bytes: sized.iter().map(|(bytes, _)| bytes).sum() })
}

/// All files below a folder with their sizes.
fn files(folder: &Path) -> Result<Vec<(PathBuf, u64)>> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = entry?.path();
            match path.is_dir() {
                true => folders.push(path),
                false => files.push((path.clone(), fs::metadata(&path)?.len())),
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A package with these files beside those that every one has.
    fn package(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let manifest = "license = \"MIT\"\ndescription = \"A crate\"\ndocumentation = \"https://docs.rs/x\"\n";
        for (file, text) in [("Cargo.toml", manifest), ("LICENSE-MIT", "text"), ("LICENSE-APACHE", "text"), ("src/lib.rs", "//! Doc")] {
            write(folder.path(), file, text);
        }
        files.iter().for_each(|file| write(folder.path(), file, "content"));
        folder
    }

    fn write(folder: &Path, file: &str, text: &str) {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn refused(name: &str, folder: &Path, bytes: u64) -> String {
        check(name, folder, bytes).unwrap_err().to_string()
    }

    #[test]
    fn a_whole_package_passes() {
        let folder = package(&["README.md"]);
        let contents = check("oxtile", folder.path(), LIMIT).unwrap();
        assert_eq!((contents.files, contents.bytes > 20), (5, true));
    }

    #[test]
    fn what_is_missing_too_much_or_too_large_is_named() {
        let whole = package(&["build.rs", "kernels.pack"]);
        check("oxtile-cubins-sm80", whole.path(), 1).unwrap();
        let text = refused("oxtile-cubins-sm80", whole.path(), LIMIT + 1);
        assert!(
            text.starts_with("oxtile-cubins-sm80 takes 10000001 bytes, 10000000 are allowed; the largest file: Cargo.toml has "),
            "{text}"
        );
        // A checkout's pack that was not built.
        write(whole.path(), "kernels.pack", "");
        assert!(refused("oxtile-cubins-sm80", whole.path(), 1).contains("holds no kernels.pack"));
        for file in ["LICENSE-MIT", "LICENSE-APACHE", "Cargo.toml"] {
            let folder = package(&[]);
            fs::remove_file(folder.path().join(file)).unwrap();
            assert!(refused("oxtile-tile", folder.path(), 1).contains(&format!("oxtile-tile holds no {file}")), "{file}");
        }
        assert!(refused("oxtile-kernels", package(&["build.rs"]).path(), 1).contains("oxtile-kernels holds no SOURCE_HASH"));
        assert!(refused("oxtile-tile", package(&["tests/one.rs"]).path(), 1).contains("oxtile-tile holds tests/one.rs"));
        let folder = package(&[]);
        write(folder.path(), "Cargo.toml", "repository = \"https://example.com\"");
        assert!(refused("oxtile-tile", folder.path(), 1).contains("names a repository"));
    }
}
