//! Compiled kernels inside the program: packs as `oxtile-build` writes them, and what is said of those that are not.

use std::borrow::Cow;
use std::fs;
use std::path::Path;

use oxtile::kernels::copy::CopyWords;
use oxtile::runtime::{KernelLibrary, KernelPlace};
use oxtile::{Error, Result};
use oxtile_build::{Arch, Build, ptx::Meta};
use oxtile_tile::launch::{Kernel, KernelInfo};

const HOPPER: (u32, u32) = (9, 0);

/// Names of kernels of two families, each with its launch facts.
const NAMES: [(&str, &str); 3] = [("copy_words", "copy"), ("copy_more", "copy"), ("sum_words", "sum")];

fn info(name: &'static str) -> KernelInfo {
    KernelInfo { name, package: "some-kernels", source_hash: &"abc", ..CopyWords::INFO }
}

/// What stands for the machine code of a kernel.
fn cubin(name: &str, arch: &str) -> Vec<u8> {
    format!("{name} for {arch};").repeat(100).into_bytes()
}

/// A pack of three kernels, for as long as the process lives, as those of features are.
fn pack(package: &str, source_hash: &str, arch: &str, facts: &KernelInfo) -> &'static [u8] {
    let folder = tempfile::tempdir().unwrap();
    let kernel = |(name, family): (&str, &str)| {
        let path = folder.path().join(name);
        fs::write(&path, cubin(name, arch)).unwrap();
        let meta = Meta {
            name: name.into(),
            family: family.into(),
            threads: [facts.threads, 1, 1],
            min_blocks: facts.min_blocks,
            cluster: facts.cluster,
            shared: facts.shared_bytes,
            requires: String::new(),
            params: facts.parameters.to_vec().into(),
            words: facts.words,
            hashed: 1,
        };
        let arch = arch.parse().unwrap();
        oxtile_build::Kernel {
            meta,
            arch,
            usage: Default::default(),
            operations: Default::default(),
            panics: vec![],
            ptx: path.clone(),
            cubin: path,
        }
    };
    let kernels = NAMES.map(kernel).to_vec();
    let build = Build { kernels, findings: vec![], notes: vec![], out_dir: folder.path().into(), source_hash: source_hash.into() };
    let arch: Arch = arch.parse().unwrap();
    let bytes = oxtile_build::pack::pack(package, &build, &arch).unwrap();
    assert_eq!(bytes, oxtile_build::pack::pack(package, &build, &arch).unwrap(), "the same kernels give the same bytes");
    assert_eq!(oxtile_build::pack::source_hash_of(&bytes).as_deref(), Some(source_hash));
    assert_eq!(oxtile_build::pack::source_hash_of(&bytes[..30]), None);
    bytes.leak()
}

fn good(arch: &str) -> &'static [u8] {
    pack("some-kernels", "abc", arch, &CopyWords::INFO)
}

fn found(library: &KernelLibrary, name: &'static str, capability: (u32, u32)) -> Result<Vec<u8>> {
    let images = library.find(&info(name), capability)?;
    let [image] = &images[..] else { panic!("{images:?}") };
    assert!(!image.is_ptx);
    Ok(image.bytes()?.into_owned())
}

#[test]
fn every_kernel_comes_back_as_it_was_packed() {
    let library = KernelLibrary::default().holding(&[good("sm_80"), good("sm_90a")]).unwrap();
    for (name, _) in NAMES {
        assert_eq!(found(&library, name, HOPPER).unwrap(), cubin(name, "sm_90a"));
        assert_eq!(found(&library, name, (8, 6)).unwrap(), cubin(name, "sm_80"));
    }
    library.check_any((8, 9)).unwrap();
    let Some(KernelPlace::Program(counts)) = library.locate("some-kernels").unwrap() else { panic!("they are inside") };
    assert_eq!(counts, [("sm_80".into(), 3), ("sm_90a".into(), 3)]);
    assert!(library.locate("other-kernels").unwrap().is_none());
}

#[test]
fn a_folder_that_is_named_comes_before_a_pack() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("some-kernels")).unwrap();
    let manifest = r#"{"package": "some-kernels", "source_hash": "of the folder", "kernels": {}}"#;
    fs::write(folder.path().join("some-kernels/manifest.json"), manifest).unwrap();
    let library = KernelLibrary::new(vec![folder.path().to_owned()]).holding(&[good("sm_90a")]).unwrap();
    let error = found(&library, "copy_words", HOPPER).unwrap_err();
    assert!(matches!(&error, Error::StaleKernels { found, .. } if found == "of the folder"), "{error}");
}

#[test]
fn kernels_of_other_sources_and_facts_are_refused_by_name() {
    let library = |pack| KernelLibrary::default().holding(&[pack]).unwrap();
    let stale = library(pack("some-kernels", "old", "sm_90a", &CopyWords::INFO));
    let text = found(&stale, "copy_words", HOPPER).unwrap_err().to_string();
    let expected = "the kernels in this program/some-kernels/sm_90a.pack are stale: they were built from sources old, this program from abc: take `oxtile` and the crates";
    assert!(text.starts_with(expected), "{text}");
    found(&stale.stale(), "copy_words", HOPPER).unwrap();

    let other = library(pack("some-kernels", "abc", "sm_90a", &KernelInfo { words: 5, ..CopyWords::INFO }));
    let error = found(&other, "copy_words", HOPPER).unwrap_err();
    assert!(matches!(error, Error::KernelMismatch { what: "words", .. }), "{error}");

    let unknown = found(&library(good("sm_90a")), "gone", HOPPER).unwrap_err().to_string();
    assert!(unknown.starts_with("this program/some-kernels/sm_90a.pack has no kernel `gone`: take `oxtile`"), "{unknown}");
}

#[test]
fn a_gpu_that_no_pack_is_for_names_what_would_be() {
    let library = KernelLibrary::default().holding(&[good("sm_90a")]).unwrap();
    let text = found(&library, "copy_words", (10, 0)).unwrap_err().to_string();
    let expected = "kernel `copy_words` is compiled for sm_90a, none of which runs on sm_100: name a folder with kernels for sm_100a in OXTILE_KERNELS";
    assert_eq!(text, expected);
    // Oxtile's own have features.
    let own = pack("oxtile-kernels", CopyWords::INFO.source_hash, "sm_90a", &CopyWords::INFO);
    let library = KernelLibrary::default().holding(&[own]).unwrap();
    for (capability, feature) in [((10, 0), "sm100a"), ((8, 9), "sm80")] {
        let text = library.find(&CopyWords::INFO, capability).unwrap_err().to_string();
        let mend = format!("enable the feature `{feature}` of `oxtile`, or name a folder with kernels for sm_");
        assert!(text.contains(&mend) && text.ends_with(" in OXTILE_KERNELS"), "{text}");
    }
    library.find(&CopyWords::INFO, HOPPER).unwrap();
    library.check_any(HOPPER).unwrap();
    // A GPU that no feature is for: nothing of a checkout is asked of a program that has packs.
    let text = library.find(&CopyWords::INFO, (12, 0)).unwrap_err().to_string();
    assert!(text.ends_with("none of which runs on sm_120: name a folder with kernels for sm_120a in OXTILE_KERNELS"), "{text}");
    // In the same words, and with what else there is for a crate of one's own.
    let why = library.check_any((7, 5)).unwrap_err();
    let mend =
        "name a folder with kernels for sm_75 in OXTILE_KERNELS, or run `oxtile build --arch sm_75` in the folder of a crate of your own";
    assert!(why.ends_with(&format!("none of which runs on sm_75: {mend}")), "{why}");
}

/// A program that makes many runtimes holds one copy of what its packs unpack to.
#[test]
fn a_pack_is_read_and_unpacked_once() {
    let (one, other) = (good("sm_90a"), good("sm_90a"));
    let place = |bytes: &'static [u8]| {
        let library = KernelLibrary::default().holding(&[bytes]).unwrap();
        match library.find(&info("copy_words"), HOPPER).unwrap()[0].bytes().unwrap() {
            Cow::Borrowed(code) => code.as_ptr(),
            Cow::Owned(_) => panic!("a copy"),
        }
    };
    assert_eq!(place(one), place(one));
    assert_ne!(place(one), place(other), "packs at other places are other packs");
}

/// The error of a pack that cannot be held, or of a kernel of it that cannot be found.
fn refused(bytes: Vec<u8>) -> String {
    let library = KernelLibrary::default().holding(&[bytes.leak()]);
    let error = library.and_then(|library| NAMES.into_iter().try_for_each(|(name, _)| found(&library, name, HOPPER).map(drop)));
    let error = error.expect_err("the pack is not as it was written");
    assert!(matches!(&error, Error::KernelFile { path, .. } if path.starts_with(Path::new("this program"))), "{error}");
    error.to_string()
}

#[test]
fn a_pack_that_is_cut_off_anywhere_is_refused() {
    let whole = good("sm_90a");
    for end in 0..whole.len() {
        let text = refused(whole[..end].to_vec());
        assert!(text.contains("the pack is truncated"), "{end} bytes: {text}");
    }
}

#[test]
fn a_pack_with_any_byte_changed_is_refused_or_gives_the_same() {
    let whole = good("sm_90a");
    let (mut refusals, library) = (0, |bytes: Vec<u8>| KernelLibrary::default().holding(&[bytes.leak()]));
    for at in 0..whole.len() {
        let mut bytes = whole.to_vec();
        bytes[at] ^= 0x10;
        for (name, _) in NAMES {
            match library(bytes.clone()).and_then(|library| found(&library, name, HOPPER)) {
                Ok(code) => assert_eq!(code, cubin(name, "sm_90a"), "byte {at}"),
                Err(_) => refusals += 1,
            }
        }
    }
    assert!(refusals > whole.len(), "{refusals} of {}", 3 * whole.len());
}

#[test]
fn other_files_and_versions_are_refused() {
    let text = refused(b"\x7fELF, a cubin".to_vec());
    assert!(text.contains("this is no pack of kernels: it does not begin with OXTPACK"), "{text}");
    let mut newer = good("sm_90a").to_vec();
    newer[8..12].copy_from_slice(&2_u32.to_le_bytes());
    let text = refused(newer);
    assert!(text.contains("the pack has version 2, this program reads version 1: take both of one release"), "{text}");
}

#[test]
fn an_architecture_that_was_not_built_is_an_error() {
    let build = Build { kernels: vec![], findings: vec![], notes: vec![], out_dir: "nowhere".into(), source_hash: "abc".into() };
    let error = oxtile_build::pack::pack("some-kernels", &build, &Arch::hopper()).unwrap_err().to_string();
    assert!(error.contains("`some-kernels` has no kernel for sm_90a") && error.contains("--arch sm_90a"), "{error}");
}
