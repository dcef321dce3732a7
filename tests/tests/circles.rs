//! The files of the emulator are in the order that docs/architecture.md gives, and files of kernels and of the emulator that import one another
//! in a circle are those that the page explains.

mod paths;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use paths::{files_of, paths, root};

/// Files by their paths from a folder, without `.rs`, each with the files that it imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// The sources of a crate or of a folder of it.
struct Sources {
    files: BTreeMap<String, String>,
}

impl Sources {
    /// The module that a file is, from the folder on.
    fn module(file: &str) -> Vec<&str> {
        let module = file.trim_end_matches(".rs");
        let module = module.strip_suffix("/mod").unwrap_or(if matches!(module, "mod" | "lib") { "" } else { module });
        module.split('/').filter(|name| !name.is_empty()).collect()
    }

    /// The file in which a path ends, also by way of a name that a `mod.rs` or `lib.rs` gives out. None if it is one of those itself.
    fn file(&self, path: &[String]) -> Option<String> {
        for length in (0..=path.len()).rev() {
            let (folder, rest) = (path[..length].join("/"), &path[length..]);
            if self.files.contains_key(&format!("{folder}.rs")) && !folder.ends_with("lib") {
                return Some(folder);
            }
            let heads = if length == 0 { ["lib.rs".to_owned(), "mod.rs".to_owned()] } else { [format!("{folder}/mod.rs"), String::new()] };
            if rest.first().is_some_and(|name| name == "*") {
                return None;
            }
            if let Some((head, name)) = heads.iter().find(|head| self.files.contains_key(*head)).zip(rest.first()) {
                let given = self.given(head).into_iter().find(|given| given.last() == Some(name));
                return given.and_then(|given| self.file(&given));
            }
        }
        None
    }

    /// The paths that the head of a folder imports and gives out, of files in the folder.
    fn given(&self, head: &str) -> Vec<Vec<String>> {
        let folder = head.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/"));
        let children = self.files.keys().filter_map(|file| file.strip_prefix(&folder)?.split(['/', '.']).next());
        let children: Vec<_> = children.filter(|name| !matches!(*name, "mod" | "lib")).collect();
        let found = paths(&Self::module(head), &self.files[head], &children).into_iter().map(|(path, _)| path);
        let of_child = |path: &Vec<String>| path.len() > 1 && children.contains(&path[0].as_str());
        let own = |path: Vec<String>| folder.split('/').filter(|name| !name.is_empty()).map(str::to_owned).chain(path).collect();
        found.filter(of_child).map(own).collect()
    }

    /// What each file imports of the others. Heads of folders, which give names out, are left out.
    fn imports(&self) -> Imports {
        let files = self.files.iter().filter(|(file, _)| !["mod.rs", "lib.rs"].iter().any(|head| file.ends_with(head)));
        let of_file = |(file, source): (&String, &String)| {
            let own = file.trim_end_matches(".rs");
            let found = paths(&Self::module(file), source, &[]).into_iter().filter_map(|(path, _)| self.file(&path));
            (own.to_owned(), found.filter(|other| other != own).collect())
        };
        files.map(of_file).collect()
    }
}

/// Whether one file imports another, also by way of others.
fn reaches(imports: &Imports, from: &str, to: &str) -> bool {
    let (mut seen, mut open) = (BTreeSet::new(), vec![from]);
    while let Some(file) = open.pop() {
        for next in imports.get(file).into_iter().flatten() {
            if next == to {
                return true;
            }
            if seen.insert(next) {
                open.push(next);
            }
        }
    }
    false
}

/// The files that import one another, circle by circle.
fn circles(imports: &Imports) -> BTreeSet<BTreeSet<&str>> {
    let circle = |file: &String| -> BTreeSet<_> {
        let others = imports.keys().filter(|other| reaches(imports, file, other) && reaches(imports, other, file));
        others.map(String::as_str).collect()
    };
    imports.keys().map(circle).filter(|circle| !circle.is_empty()).collect()
}

/// The rows of the table of a page's section, each with the files that its first cell names.
fn rows<'a>(page: &'a str, section: &str) -> Vec<Vec<&'a str>> {
    let section = page.split("\n## ").find(|text| text.starts_with(section)).unwrap_or_else(|| panic!("a section {section}"));
    let rows = section.lines().skip_while(|line| !line.starts_with("| files |")).skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2).collect()).collect()
}

/// What is wrong with the order of files: those that the table has not or has twice, and imports of what is in a row above.
fn disorder(rows: &[Vec<&str>], imports: &Imports) -> Vec<String> {
    let covers = |name: &str, file: &str| if name.ends_with('/') { file.starts_with(name) } else { file == name };
    let places = |file: &str| -> Vec<usize> {
        let count = |names: &Vec<&str>| names.iter().filter(|name| covers(name, file)).count();
        rows.iter().enumerate().flat_map(|(row, names)| vec![row; count(names)]).collect()
    };
    let mut problems = Vec::new();
    for name in rows.iter().flatten().filter(|name| !imports.keys().any(|file| covers(name, file))) {
        problems.push(format!("the table has `{name}`, which is no file"));
    }
    for (file, others) in imports {
        let [own] = places(file)[..] else {
            problems.push(format!("`{file}` is not in one row of the table"));
            continue;
        };
        let above = others.iter().filter(|other| places(other).iter().any(|row| *row > own));
        problems.extend(above.map(|other| format!("`{file}` imports `{other}`, which is in a row after its own")));
    }
    problems
}

fn imports_of(folder: &str) -> Imports {
    Sources { files: files_of(folder) }.imports()
}

fn architecture() -> String {
    fs::read_to_string(root().join("docs/architecture.md")).expect("a page")
}

#[test]
fn the_emulator_is_in_order() {
    let (page, imports) = (architecture(), imports_of("gpu/emulator/src"));
    let rows = rows(&page, "The emulator");
    assert!(rows.len() > 5 && imports.values().map(BTreeSet::len).sum::<usize>() > 100, "the scan looks in the wrong place");
    let problems = disorder(&rows, &imports);
    assert!(problems.is_empty(), "docs/architecture.md, \"The emulator\":\n{}", problems.join("\n"));
}

/// The circles that docs/architecture.md gives a reason for.
const KNOWN: [(&str, &[&[&str]]); 3] = [
    (
        "gpu/emulator/src",
        &[&["async_copy", "barrier", "block", "cluster", "collective", "copy_group", "mbarrier", "meeting", "thread", "warp", "wgmma"]],
    ),
    (
        "gpu/src",
        &[
            &[
                "attention/arriving",
                "attention/arriving_options",
                "attention/arriving_packed",
                "attention/chunk_schedule",
                "attention/dense",
                "attention/options",
                "attention/packed",
                "attention/problem",
                "attention/ring_step",
                "attention/running",
                "attention/target",
            ],
            &["attention/mask", "attention/sequence"],
            &["mxfp8/cast_fused", "mxfp8/computed", "mxfp8/fused_tile"],
        ],
    ),
    ("gpu/tile/src", &[&["shared", "shared_tile"]]),
];

#[test]
fn circles_of_files_are_explained() {
    let page = architecture();
    for (folder, known) in KNOWN {
        let imports = imports_of(folder);
        let known: BTreeSet<BTreeSet<_>> = known.iter().map(|circle| circle.iter().copied().collect()).collect();
        let found = circles(&imports);
        let mend = "cut the circle, or explain it in docs/architecture.md and list it here; a circle that is gone leaves both";
        assert_eq!(found, known, "{folder}: {mend}");
        for file in known.iter().flatten() {
            let name = file.rsplit('/').next().unwrap_or_default();
            assert!(page.contains(&format!("`{name}`")), "docs/architecture.md does not name `{name}` of {folder}");
        }
    }
}

#[test]
fn imports_and_circles_are_found() {
    let file = |name: &str, source: &str| (name.to_owned(), source.to_owned());
    let sources = |last: &str| Sources {
        files: BTreeMap::from([
            file("lib.rs", "mod a;\nmod b;\nmod c;\npub use b::{Shape, low};"),
            file("a.rs", "use crate::{Shape, c::deep::Deep};\nuse super::c::Given;"),
            file("b.rs", ""),
            file("c/mod.rs", "mod deep;\nmod other;\npub use other::Given;\npub use crate::a::X;"),
            file("c/deep.rs", last),
            file("c/other.rs", "use super::*;\nuse crate::*;"),
        ]),
    };
    let straight = sources("use super::super::b;").imports();
    let of = |imports: &Imports, file: &str| imports[file].iter().cloned().collect::<Vec<_>>();
    assert_eq!(of(&straight, "a"), ["b", "c/deep", "c/other"]);
    assert_eq!(of(&straight, "c/deep"), ["b"]);
    assert_eq!(of(&straight, "c/other"), [""; 0]);
    assert!(circles(&straight).is_empty());
    assert_eq!(circles(&sources("use crate::a::A;").imports()), BTreeSet::from([BTreeSet::from(["a", "c/deep"])]));

    assert_eq!(disorder(&[vec!["b"], vec!["c/"], vec!["a"]], &straight), [""; 0]);
    let wrong = disorder(&[vec!["c/deep", "gone"], vec!["b", "a"], vec!["c/other", "a"]], &straight);
    let wanted = [
        "the table has `gone`, which is no file",
        "`a` is not in one row of the table",
        "`c/deep` imports `b`, which is in a row after its own",
    ];
    assert_eq!(wrong, wanted);
}
