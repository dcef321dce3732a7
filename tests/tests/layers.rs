//! The order of `host/src`: a module imports what is below it alone (docs/architecture.md, "The host library"). A large folder of the library,
//! the kernels, the DSL and the emulator says what its files hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of `host/src` from the bottom up. `kernels` is the crate `oxtile_kernels`: what is below it knows of no kernel.
const LAYERS: [&str; 14] = [
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
    "gemm",
    "quantize",
    "attention",
];

fn height(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| *layer == module)
}

/// A word or a sign of a source, and its line. Comments are left out; a string or a character is one empty sign.
type Token<'a> = (&'a str, usize);

fn tokens(source: &str) -> Vec<Token<'_>> {
    let (mut found, mut line, mut rest) = (Vec::new(), 1, source);
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let (length, is_kept) = match first {
            _ if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), false),
            _ if rest.starts_with("/*") => (end_of_comment(rest), false),
            'r' | 'b' | 'c' | '"' if literal(rest).is_some() => (literal(rest).unwrap_or(1), false),
            '\'' => (end_of_character(rest), false),
            _ if is_word(first) => (rest.find(|c| !is_word(c)).unwrap_or(rest.len()), true),
            _ if rest.starts_with("::") => (2, true),
            _ => (first.len_utf8(), !first.is_whitespace()),
        };
        let (token, after) = rest.split_at(length);
        if is_kept {
            found.push((token, line));
        }
        line += token.matches('\n').count();
        rest = after;
    }
    found
}

/// Comments nest.
fn end_of_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while let Some(next) = text[at..].find(['/', '*']).map(|next| next + at) {
        let sign = text.get(next..next + 2).unwrap_or_default();
        depth += i32::from(sign == "/*") - i32::from(sign == "*/");
        at = next + if sign == "/*" || sign == "*/" { 2 } else { 1 };
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

/// The length of the string that the text begins with, raw ones too.
fn literal(text: &str) -> Option<usize> {
    let open = text.find('"').filter(|at| text[..*at].chars().all(|c| "rbc#".contains(c)))?;
    let (prefix, body) = (&text[..open], &text[open + 1..]);
    if prefix.contains('r') {
        let close = format!("\"{}", "#".repeat(prefix.matches('#').count()));
        return Some(open + 1 + body.find(&close)? + close.len());
    }
    let mut is_escaped = false;
    let end = body.char_indices().find(|(_, c)| {
        let ends = *c == '"' && !is_escaped;
        is_escaped = *c == '\\' && !is_escaped;
        ends
    })?;
    Some(open + 1 + end.0 + 1).filter(|_| prefix.len() <= 1 && !prefix.contains('#'))
}

/// `'x'` and `'\u{1}'`; of a lifetime the quote alone.
fn end_of_character(text: &str) -> usize {
    let mut signs = text.char_indices().skip(1);
    match signs.next() {
        Some((_, '\\')) => signs.skip(1).find(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 1),
        Some(_) => signs.next().filter(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 1),
        None => 1,
    }
}

/// A path from the crate's root on, or from another crate's, and its line.
type Found = (Vec<String>, usize);

/// All paths of a file of `module` that begin with `crate`, `self`, `super` or a name in `also`.
fn paths(module: &[&str], source: &str, also: &[&str]) -> Vec<Found> {
    let tokens = tokens(source);
    let word = |at: usize| tokens.get(at).map_or("", |(word, _)| *word);
    let (mut found, mut inside, mut depth) = (Vec::new(), Vec::new(), 0);
    for at in 0..tokens.len() {
        match word(at) {
            // `mod tests {`: `super` is this file in it.
            "{" => {
                if at >= 2 && word(at - 2) == "mod" {
                    inside.push((word(at - 1), depth));
                }
                depth += 1;
            }
            "}" => {
                depth -= 1;
                inside.pop_if(|(_, opened)| *opened == depth);
            }
            start if word(at + 1) == "::" && (at == 0 || word(at - 1) != "::") => {
                let mut base: Vec<_> = module.iter().copied().chain(inside.iter().map(|(name, _)| *name)).collect();
                match start {
                    "crate" => base.clear(),
                    "self" => {}
                    "super" => drop(base.pop()),
                    name if also.contains(&name) => base = vec![name],
                    _ => continue,
                }
                branches(&tokens, at + 2, &base, &mut found);
            }
            _ => {}
        }
    }
    found
}

/// Adds the paths of the tree at a token, after a `::`; where it ends.
fn branches(tokens: &[Token<'_>], at: usize, base: &[&str], found: &mut Vec<Found>) -> usize {
    let Some((word, line)) = tokens.get(at) else { return at };
    let next = |at: usize| tokens.get(at).map_or("", |(word, _)| *word);
    if *word == "{" {
        let mut at = at + 1;
        while !matches!(next(at), "}" | "") {
            at = if next(at) == "," { at + 1 } else { branches(tokens, at, base, found) };
        }
        return at + 1;
    }
    let mut path = base.to_vec();
    match *word {
        "super" => drop(path.pop()),
        "self" => {}
        name => path.push(name),
    }
    if next(at + 1) == "::" {
        return branches(tokens, at + 2, &path, found);
    }
    found.push((path.into_iter().map(str::to_owned).collect(), *line));
    if next(at + 1) == "as" { at + 3 } else { at + 1 }
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

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let path = entry.path();
        if path.is_dir() { sources(&path, found) } else { found.push(path) }
    }
}

/// Every file of a folder of the workspace, by its path from there.
fn files_of(folder: &str) -> BTreeMap<String, String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace").join(folder);
    let mut files = Vec::new();
    sources(&folder, &mut files);
    let name = |path: &Path| path.strip_prefix(&folder).expect("below it").to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), fs::read_to_string(path).expect("a readable source file"))).collect()
}

/// The files that the table `file | what it holds` of a `mod.rs` names.
fn listed(source: &str) -> BTreeSet<&str> {
    let rows = source.lines().skip_while(|line| !line.starts_with("//! | file |")).take_while(|line| line.starts_with("//! |"));
    rows.filter_map(|row| row.split('|').nth(1)).flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn large_folders_list_their_files() {
    let mut problems = Vec::new();
    for root in ["host/src", "gpu/src", "gpu/tile/src", "gpu/emulator/src"] {
        let files = files_of(root);
        for (name, source) in files.iter().filter(|(name, _)| name.ends_with("/mod.rs")) {
            let folder = name.trim_end_matches("mod.rs");
            let inside = files.keys().filter_map(|file| file.strip_prefix(folder)).filter(|file| *file != "mod.rs");
            let inside: BTreeSet<_> = inside.filter_map(|file| file.split(['/', '.']).next()).collect();
            let listed = listed(source);
            if (inside.len() > 4 || !listed.is_empty()) && inside != listed {
                let differ: Vec<_> = inside.symmetric_difference(&listed).collect();
                problems.push(format!("{root}/{name}: the table of files and the folder differ in {differ:?}"));
            }
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
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
    assert_eq!(seen("use crate::*;"), ["runtime/cuda/copy.rs:1: `*` names no layer"]);
    assert!(upward("utils/mod.rs", "", &root)[0].contains("is no layer yet"));

    let down =
        "//! [`crate::comm::Team`]\n/// [`crate::comm`]\nuse crate::rank::Rank; // crate::comm\n/* crate::comm /* */ crate::gemm::x */\n";
    assert_eq!(seen(down), [""; 0]);
    assert_eq!(seen("use crate::{Buffer, num};\nuse super::super::buffer;\nuse self::tensor::x;\nlet a = \"crate::comm::x\";"), [""; 0]);
    assert_eq!(lines("symmetric/push.rs", "use oxtile_kernels::exchange;\nuse crate::{Team, kernels::copy};"), [""; 0]);
}
