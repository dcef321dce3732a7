//! The order of `host/src`: a module imports what is below it alone (docs/architecture.md, "The host library"). A large folder says what its
//! files hold.

mod paths;

use std::collections::{BTreeMap, BTreeSet};

use paths::{Found, files_of, paths};

/// The modules of `host/src` from the bottom up. `kernels` is the crate `oxtile_kernels`: what is below it knows of no kernel.
const LAYERS: [&str; 24] = [
    "rank",
    "recording",
    "runtime",
    "testing",
    "choice",
    "timeline",
    "tensor",
    "bootstrap",
    "comm",
    "kernels",
    "symmetric",
    "rms_norm",
    "rotary",
    "embedding",
    "cross_entropy",
    "adamw",
    "sum_parts",
    "thd",
    "gemm",
    "quantize",
    "attention",
    "context_parallel",
    "overlap",
    "sharded",
];

fn height(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == module)
}

/// The names that `lib.rs` gives out of a layer, by the layer; those of other crates by nothing.
fn names_of_root(lib: &str) -> BTreeMap<String, Option<usize>> {
    let crates = ["oxtile_kernels", "oxtile_tile"];
    let given = paths(&[], lib, &[&LAYERS as &[&str], &crates].concat());
    given.into_iter().filter_map(|(path, _)| Some((path.last()?.clone(), height(path.first()?)))).collect()
}

/// What a file of `host/src` imports of layers above its own, a line each.
fn upward(file: &str, source: &str, root: &BTreeMap<String, Option<usize>>) -> Vec<String> {
    let module: Vec<_> = file.trim_end_matches(".rs").trim_end_matches("/mod").split('/').collect();
    let Some(own) = height(module[0]) else {
        return vec![format!("host/src/{file}: `{}` is no layer yet: give it a place in LAYERS (tests/tests/layers.rs)", module[0])];
    };
    let problem = |(path, line): Found| {
        let first = path.first().map_or("*", String::as_str);
        let first = if first == "oxtile_kernels" { "kernels" } else { first };
        let height = match (height(first), root.get(first).copied()) {
            (Some(height), _) | (None, Some(Some(height))) => height,
            (None, Some(None)) => return None,
            (None, None) => return Some(format!("host/src/{file}:{line}: `{}` names no layer", path.join("::"))),
        };
        let (from, to) = (LAYERS[own], LAYERS[height]);
        (height > own).then(|| format!("host/src/{file}:{line}: {from} -> {to} (`{}`), and {to} is above {from}", path.join("::")))
    };
    paths(&module, source, &["oxtile_kernels"]).into_iter().filter_map(problem).collect()
}

/// The files that the table of a folder names: `file | what it holds`, or `noun | module` of a public crate, whose links rustdoc checks.
fn listed<'a>(source: &'a str, inside: &BTreeSet<&str>) -> BTreeSet<&'a str> {
    let row_of = |header: &'static str| {
        source.lines().skip_while(move |line| !line.starts_with(header)).take_while(|line| line.starts_with("//! |"))
    };
    let named = |row: &'a str, column: usize| row.split('|').nth(column).into_iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
    let files = row_of("//! | file |").flat_map(|row| named(row, 1));
    files.chain(row_of("//! | noun |").flat_map(|row| named(row, 2)).filter(|name| inside.contains(name))).collect()
}

/// The file that says what a folder of Rust files holds, if it is one of a module or a crate.
fn head<'a>(folder: &str, files: &'a BTreeMap<String, String>) -> Option<(&'a String, &'a String)> {
    let heads = ["mod.rs", "lib.rs", "main.rs"].map(|name| format!("{folder}/{name}"));
    heads.iter().find_map(|name| files.get_key_value(name)).or_else(|| files.get_key_value(&format!("{folder}.rs")))
}

#[test]
fn large_folders_list_their_files() {
    let (mut problems, mut tables) = (Vec::new(), 0);
    for root in ["host", "gpu", "benches", "tests", "xtask"] {
        let files = files_of(root);
        let folders: BTreeSet<_> = files.keys().filter_map(|name| name.rsplit_once('/')).map(|(folder, _)| folder.to_owned()).collect();
        for folder in &folders {
            let Some((name, source)) = head(folder, &files) else { continue };
            let inside = files.keys().filter_map(|file| file.strip_prefix(folder)?.strip_prefix('/')?.split(['/', '.']).next());
            let inside: BTreeSet<_> = inside.filter(|file| !["mod", "lib", "main"].contains(file)).collect();
            let listed = listed(source, &inside);
            tables += usize::from(!listed.is_empty());
            if (inside.len() > 4 || !listed.is_empty()) && inside != listed {
                let differ: Vec<_> = inside.symmetric_difference(&listed).collect();
                problems.push(format!("{root}/{name}: the table of files and the folder differ in {differ:?}"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(tables > 50, "{tables} tables: the walk looks in the wrong place");
}

#[test]
fn arrows_point_down() {
    let files = files_of("host/src");
    let root = names_of_root(&files["lib.rs"]);
    let (mut seen, mut problems) = ([false; LAYERS.len()], Vec::new());
    for (name, source) in files.iter().filter(|(name, _)| *name != "lib.rs") {
        problems.extend(upward(name, source, &root));
        height(name.split(['/', '.']).next().unwrap_or_default()).into_iter().for_each(|layer| seen[layer] = true);
    }
    let mend = "move what is needed down, or let the lower layer have a trait that the upper one implements";
    assert!(problems.is_empty(), "{mend}:\n{}", problems.join("\n"));
    let unseen: Vec<_> = LAYERS.iter().zip(seen).filter(|(layer, seen)| !seen && **layer != "kernels").collect();
    assert!(unseen.is_empty(), "no such module in host/src: {unseen:?}");
}

#[test]
fn an_arrow_that_points_up_is_seen() {
    let root =
        names_of_root("pub mod comm;\npub use oxtile_tile::num;\npub use runtime::{Buffer, Error};\npub use comm::{\n    Team,\n};\n");
    let lines = |file: &str, source: &str| -> Vec<String> {
        let problems = upward(file, source, &root);
        problems.iter().filter_map(|problem| Some(problem.strip_prefix("host/src/")?.split(" (").next()?.to_owned())).collect()
    };
    let seen = |source: &str| lines("runtime/cuda/copy.rs", source);

    assert_eq!(seen("use crate::comm::Rank;"), ["runtime/cuda/copy.rs:1: runtime -> comm"]);
    assert_eq!(seen("use crate::{\n    rank::Rank,\n    comm::{Team, nccl as n},\n};"), ["runtime/cuda/copy.rs:3: runtime -> comm"; 2]);
    assert_eq!(seen("use super::super::super::tensor::Shape;"), ["runtime/cuda/copy.rs:1: runtime -> tensor"]);
    assert_eq!(seen("use super::{super::super::{tensor::Shape, rank::Rank}, word};"), ["runtime/cuda/copy.rs:1: runtime -> tensor"]);
    assert_eq!(seen("fn f(x: &'a u8) -> crate::gemm::Gemm {}"), ["runtime/cuda/copy.rs:1: runtime -> gemm"]);
    assert_eq!(seen("use crate::Team;"), ["runtime/cuda/copy.rs:1: runtime -> comm"], "by way of lib.rs");
    assert_eq!(seen("let a = '\"';\nuse oxtile_kernels::copy;"), ["runtime/cuda/copy.rs:2: runtime -> kernels"]);
    assert_eq!(seen("let a = \"\\\"\\\\\";\nlet b = r#\"\"\"#;\n$crate::comm::x!()"), ["runtime/cuda/copy.rs:3: runtime -> comm"]);
    let in_tests =
        "mod tests {\n    use super::super::super::tensor::Shape;\n    fn f() { use super::super::super::super::tensor::Map; }\n}";
    assert_eq!(seen(in_tests), ["runtime/cuda/copy.rs:3: runtime -> tensor"], "`super` is one more in `mod tests`");
    assert_eq!(lines("gemm.rs", "use super::attention::X;"), ["gemm.rs:1: gemm -> attention"]);
    assert_eq!(
        seen("use ::oxtile_kernels::copy;\nfn f() -> ::oxtile_kernels::X {}"),
        [1, 2].map(|line| format!("runtime/cuda/copy.rs:{line}: runtime -> kernels"))
    );
    assert_eq!(
        seen("use oxtile_kernels as k;\nextern crate oxtile_kernels as l;"),
        [1, 2].map(|line| format!("runtime/cuda/copy.rs:{line}: runtime -> kernels"))
    );
    assert_eq!(seen("use crate as c;"), ["runtime/cuda/copy.rs:1: `` names no layer"]);
    assert_eq!(lines("gemm.rs", "use super as all;"), ["gemm.rs:1: `` names no layer"]);
    assert_eq!(lines("attention/rows.rs", "use crate::context_parallel::Ring;"), ["attention/rows.rs:1: attention -> context_parallel"]);
    assert_eq!(seen("use crate::*;"), ["runtime/cuda/copy.rs:1: `*` names no layer"]);
    assert!(upward("utils/mod.rs", "", &root)[0].contains("is no layer yet"));

    let down =
        "//! [`crate::comm::Team`]\n/// [`crate::comm`]\nuse crate::rank::Rank; // crate::comm\n/* crate::comm /* */ crate::gemm::x */\n";
    assert_eq!(seen(down), [""; 0]);
    assert_eq!(
        lines("sharded/weights.rs", "use crate::{overlap::x, attention as a, context_parallel};\nlet a = b::oxtile_kernels::c;"),
        [""; 0]
    );
    assert_eq!(seen("use crate::{Buffer, num};\nuse super::super::buffer;\nuse self::tensor::x;\nlet a = \"crate::comm::x\";"), [""; 0]);
    assert_eq!(lines("symmetric/push.rs", "use oxtile_kernels::exchange;\nuse crate::{Team, kernels::copy};"), [""; 0]);
}
