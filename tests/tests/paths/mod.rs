//! The paths that Rust sources name, for the tests that hold their order.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

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
pub type Found = (Vec<String>, usize);

/// Whether a `::` after these two words begins a path, as in `use ::name`: the last of them is no part of one.
fn begins(before: [&str; 2]) -> bool {
    const WORDS: [&str; 10] = ["use", "in", "as", "return", "dyn", "impl", "mut", "else", "match", "if"];
    let in_path = |c: char| c.is_alphanumeric() || matches!(c, '_' | '>');
    WORDS.contains(&before[1]) || before == ["-", ">"] || !before[1].ends_with(in_path)
}

/// All paths of a file of `module` that begin with `crate`, `self`, `super` or a name in `also`, and those of them that get another name by `as`.
pub fn paths(module: &[&str], source: &str, also: &[&str]) -> Vec<Found> {
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
            start if matches!(word(at + 1), "::" | "as") => {
                let before = |count: usize| at.checked_sub(count).map_or("", word);
                if before(1) == "::" && !(also.contains(&start) && begins([before(3), before(2)])) {
                    continue;
                }
                let mut base: Vec<_> = module.iter().copied().chain(inside.iter().map(|(name, _)| *name)).collect();
                match start {
                    "crate" => base.clear(),
                    "self" => {}
                    "super" => drop(base.pop()),
                    name if also.contains(&name) => base = vec![name],
                    _ => continue,
                }
                if word(at + 1) == "as" {
                    found.push((base.into_iter().map(str::to_owned).collect(), tokens[at].1));
                } else {
                    branches(&tokens, at + 2, &base, &mut found);
                }
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

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder").flatten() {
        let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
        if path.is_dir() && name != "target" {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

/// Every Rust file of a folder of the workspace, by its path from there.
pub fn files_of(folder: &str) -> BTreeMap<String, String> {
    let folder = root().join(folder);
    let mut files = Vec::new();
    sources(&folder, &mut files);
    let name = |path: &Path| path.strip_prefix(&folder).expect("below it").to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), fs::read_to_string(path).expect("a readable source file"))).collect()
}

/// The folder of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace").to_owned()
}
