//! `oxtile new`: a crate with a kernel and its test, which builds and passes as it is.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
};

use crate::{arguments, text::path};

/// The files of the crate: place, text. `NAME` and what else is in capitals is filled in.
const FILES: [(&str, &str); 6] = [
    ("Cargo.toml", include_str!("new/Cargo.toml.in")),
    (".gitignore", "/target\n"),
    ("build.rs", include_str!("new/build.rs.in")),
    ("src/lib.rs", include_str!("new/lib.rs.in")),
    ("src/scale.rs", include_str!("new/kernel.rs.in")),
    ("tests/scale.rs", include_str!("new/test.rs.in")),
];

/// The version of this program and of the crates that it was made with.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Names that no crate of kernels can have: it depends on crates with these, or the language has them.
const TAKEN: [&str; 8] = ["oxtile", "oxtile-tile", "oxtile-build", "core", "std", "alloc", "test", "proc-macro"];

/// The words of Rust, which no crate is named by.
const KEYWORDS: &str = "abstract as async await become box break const continue crate do dyn else enum extern false final fn for gen if impl in \
                        let loop macro match mod move mut override priv pub ref return self static struct super trait true try type typeof \
                        unsafe unsized use virtual where while yield";

/// A crate that cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum NewError {
    /// A name that cargo or Rust refuses.
    #[error(
        "no crate can be named {0:?}: take small letters, digits, `-` and `_`, a letter first, and no word of Rust or crate of Oxtile's"
    )]
    Name(String),
    /// There is something already.
    #[error("{} is there already: name another folder with --path", path(.0))]
    Exists(PathBuf),
    /// `--oxtile` names something else.
    #[error("{} is no checkout of Oxtile: it has no gpu/tile/Cargo.toml", path(.0))]
    NoCheckout(PathBuf),
    /// A file cannot be written.
    #[error("cannot write {}: {source}", crate::text::path(.path))]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A crate to be written, for people.
#[derive(Debug)]
pub struct Report {
    folder: PathBuf,
    checkout: Option<PathBuf>,
    /// Its files.
    files: Vec<(PathBuf, String)>,
}

impl Report {
    /// Writes the crate, whole or not at all.
    ///
    /// # Errors
    /// [`NewError::Write`]; [`NewError::Exists`] where the folder appeared meanwhile.
    pub fn publish(self) -> Result<(), NewError> {
        let folder = &self.folder;
        let error = |source| NewError::Write { path: folder.clone(), source };
        fs::create_dir_all(folder.parent().unwrap_or(folder)).map_err(error)?;
        // Made here, so that nothing else is removed after an error.
        fs::create_dir(folder).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => NewError::Exists(folder.clone()),
            _ => error(source),
        })?;
        self.files.iter().try_for_each(|(path, text)| write(path, text)).inspect_err(|_| _ = fs::remove_dir_all(folder))
    }
}

/// Makes the crate, but writes nothing yet.
///
/// # Errors
/// A [`NewError`]; nothing is overwritten.
pub fn run(request: &arguments::New) -> Result<Report, NewError> {
    let name = request.name.as_str();
    let is_plain = name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_'));
    if !is_plain || TAKEN.contains(&name.replace('_', "-").as_str()) || KEYWORDS.split_whitespace().any(|word| word == name) {
        return Err(NewError::Name(name.into()));
    }
    let folder = request.path.clone().unwrap_or_else(|| name.into());
    if folder.exists() {
        return Err(NewError::Exists(folder));
    }
    let checkout = checkout(request.oxtile.as_deref())?;
    let words = [
        ("CRATE", name.replace('-', "_")),
        ("NAME", name.to_owned()),
        ("TILE", dependency(checkout.as_deref(), "gpu/tile", "")),
        ("HOST", dependency(checkout.as_deref(), "host", ", default-features = false, features = [\"cuda-13000\", \"emulator\"]")),
        ("BUILD", dependency(checkout.as_deref(), "gpu/build", ", default-features = false")),
    ];
    let mut files: Vec<_> = FILES.iter().map(|(place, text)| (folder.join(place), filled(text, &words))).collect();
    // The versions that Oxtile is tested with; those that the crate does not use cargo leaves out.
    let lock = checkout.as_ref().and_then(|checkout| fs::read_to_string(checkout.join("Cargo.lock")).ok());
    files.extend(lock.map(|lock| (folder.join("Cargo.lock"), lock)));
    Ok(Report { folder, checkout, files })
}

/// A text with values in place of words, in one pass: a value may have a word in it.
fn filled(mut text: &str, words: &[(&str, String)]) -> String {
    let mut filled = String::new();
    while let Some((at, word, value)) =
        words.iter().filter_map(|(word, value)| Some((text.find(word)?, word, value))).min_by_key(|(at, ..)| *at)
    {
        filled.push_str(&text[..at]);
        filled.push_str(value);
        text = &text[at + word.len()..];
    }
    filled + text
}

/// The checkout that the crate depends on by path: the one named, else that of this program. `None` where there is none, or cargo keeps it
/// for itself.
fn checkout(named: Option<&Path>) -> Result<Option<PathBuf>, NewError> {
    if let Some(named) = named {
        let whole = named.canonicalize().ok().filter(|folder| is_checkout(folder));
        return whole.map(Some).ok_or_else(|| NewError::NoCheckout(named.into()));
    }
    let program = std::env::current_exe().and_then(|program| program.canonicalize()).unwrap_or_default();
    Ok(checkout_of(&program, Path::new(env!("CARGO_MANIFEST_DIR"))))
}

/// The checkout in whose target folder a program lies, else the one in which it was compiled: that may have been moved or copied since.
fn checkout_of(program: &Path, built: &Path) -> Option<PathBuf> {
    let kept_by_cargo = |folder: &Path| folder.to_string_lossy().replace('\\', "/").contains("/git/checkouts/");
    let mut folders = program.ancestors().skip(1).chain(built.ancestors().nth(2));
    folders.find(|folder| is_checkout(folder) && !kept_by_cargo(folder)).map(Path::to_owned)
}

fn is_checkout(folder: &Path) -> bool {
    ["gpu/tile", "gpu/build", "host"].iter().all(|package| folder.join(package).join("Cargo.toml").is_file())
}

/// A dependency on a package of the checkout, or on the version of this program in the registry.
fn dependency(checkout: Option<&Path>, package: &str, options: &str) -> String {
    match checkout {
        // Debug escapes as TOML's basic strings do.
        Some(checkout) => format!("{{ path = {:?}{options} }}", checkout.join(package)),
        None => format!("{{ version = \"={VERSION}\"{options} }}"),
    }
}

fn write(path: &Path, text: &str) -> Result<(), NewError> {
    let error = |source| NewError::Write { path: path.into(), source };
    fs::create_dir_all(path.parent().unwrap_or(path)).and_then(|()| fs::write(path, text)).map_err(error)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let folder = path(&self.folder);
        match &self.checkout {
            Some(checkout) => writeln!(f, "crate   {folder}, on the checkout in {}", path(checkout))?,
            None => writeln!(f, "crate   {folder}, on Oxtile {VERSION} of the registry")?,
        }
        writeln!(f, "\ncd {folder}")?;
        writeln!(f, "cargo test      # the kernel on the emulator, every access checked")?;
        writeln!(f, "oxtile build    # the kernel for a GPU: PTX, cubin, registers")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(request: &arguments::New) -> String {
        run(request).and_then(Report::publish).expect("a crate");
        fs::read_to_string(request.path.as_ref().expect("a path").join("Cargo.toml")).expect("a manifest")
    }

    #[test]
    fn a_checkout_that_is_named_is_taken_and_nothing_is_overwritten() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("this checkout");
        let path = Some(root.path().join("kernels"));
        let request = arguments::New { name: "some-kernels".into(), path: path.clone(), oxtile: Some(checkout.clone()) };
        let manifest = made(&request);
        assert!(manifest.contains(&format!("oxtile-tile = {{ path = {:?} }}\n", checkout.join("gpu/tile"))), "{manifest}");
        assert!(manifest.contains("name = \"some-kernels\"\n"), "{manifest}");
        let test = fs::read_to_string(root.path().join("kernels/tests/scale.rs")).expect("a test");
        assert!(test.contains("use some_kernels::scale::"), "{test}");
        assert!(run(&request).expect_err("it exists").to_string().ends_with("is there already: name another folder with --path"));
        let elsewhere = arguments::New { path: Some(root.path().join("other")), oxtile: Some(root.path().into()), ..request };
        assert!(matches!(run(&elsewhere), Err(NewError::NoCheckout(_))));
    }

    #[test]
    fn a_checkout_may_lie_below_any_folder() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let checkout = root.path().canonicalize().expect("an absolute path").join("CRATE/HOST/BUILD/NAME");
        for package in ["gpu/tile", "gpu/build", "host"] {
            write(&checkout.join(package).join("Cargo.toml"), "").expect("a writable folder");
        }
        let path = Some(root.path().join("kernels"));
        let manifest = made(&arguments::New { name: "kernels".into(), path, oxtile: Some(checkout.clone()) });
        for (name, package) in [("oxtile-tile", "gpu/tile"), ("oxtile", "host"), ("oxtile-build", "gpu/build")] {
            assert!(manifest.contains(&format!("{name} = {{ path = {:?}", checkout.join(package))), "{manifest}");
        }
    }

    #[test]
    fn a_crate_that_cannot_be_written_is_removed() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let folder = root.path().join("new/kernels");
        let report = |second: &str| {
            // A file is no folder, so that the second cannot be written.
            let files = ["Cargo.toml", second].map(|place| (folder.join(place), String::new()));
            Report { folder: folder.clone(), checkout: None, files: files.into() }
        };
        assert!(matches!(report("Cargo.toml/second").publish(), Err(NewError::Write { .. })));
        assert!(!folder.exists(), "half a crate is left");
        // What another made meanwhile is not.
        fs::create_dir(&folder).expect("a writable folder");
        assert!(matches!(report("second").publish(), Err(NewError::Exists(_))));
        fs::remove_dir(&folder).expect("an empty folder");
        // A file stands where the folder above belongs.
        fs::remove_dir(root.path().join("new")).expect("an empty folder");
        fs::write(root.path().join("new"), "").expect("a writable folder");
        assert!(matches!(report("second").publish(), Err(NewError::Write { .. })));
        fs::remove_file(root.path().join("new")).expect("a file");
        report("second").publish().expect("a crate");
        assert!(folder.join("second").is_file());
    }

    #[test]
    fn the_checkout_is_that_of_the_program_and_none_of_cargos() {
        let root = tempfile::tempdir().expect("a temporary folder");
        let checkout = |place: &str| {
            for package in ["gpu/tile", "gpu/build", "host"] {
                write(&root.path().join(place).join(package).join("Cargo.toml"), "").expect("a writable folder");
            }
            root.path().join(place)
        };
        let [first, copy, cargos] = ["first", "copy", "git/checkouts/oxtile-0123/abc"].map(checkout);
        let built = first.join("host/cli");
        assert_eq!(checkout_of(&copy.join("target/debug/oxtile"), &built), Some(copy));
        assert_eq!(checkout_of(&root.path().join("bin/oxtile"), &built), Some(first));
        assert_eq!(checkout_of(&root.path().join("bin/oxtile"), &cargos.join("host/cli")), None);
        let published = dependency(None, "host", ", default-features = false");
        assert_eq!(published, format!("{{ version = \"={VERSION}\", default-features = false }}"));
    }

    #[test]
    fn names_that_cargo_refuses_are_refused_first() {
        for name in ["", "1st", "Kernels", "a b", "../a", "match", "oxtile", "-a"] {
            let request = arguments::New { name: name.into(), path: None, oxtile: None };
            assert!(matches!(run(&request), Err(NewError::Name(_))), "{name}");
        }
    }
}
