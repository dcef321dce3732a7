//! Words of docs/style.md that have no right use, in sources, scripts, manifests and pages.

use std::fs;
use std::path::{Path, PathBuf};

/// A phrase that is not written, and what says the same.
const BANNED: [(&str, &str); 39] = [
    ("whoever", "the one that, the rank that; of people: anyone who"),
    ("for who", "for code that, for a caller that"),
    ("whom", "the one that, the rank that"),
    ("somebody", "a thread, a rank, a program"),
    ("anybody", "any thread, any rank"),
    ("everybody", "all threads, all ranks"),
    ("nobody", "nothing, no thread, no rank, is never written"),
    ("nobody's", "no thread's, no rank's, none"),
    ("is no number", "is NaN"),
    ("are no numbers", "are NaN"),
    ("of no account", "garbage, meaningless, does not matter"),
    ("heads of keys", "key heads"),
    ("head of keys", "key head"),
    ("heads of queries", "query heads"),
    ("head of queries", "query head"),
    ("pass forward", "forward pass"),
    ("pass backward", "backward pass"),
    ("make do with", "have only"),
    ("makes do with", "has only"),
    ("one behind another", "one after another"),
    ("one behind the other", "one after another"),
    ("behind each other", "one after another"),
    ("comes behind", "comes after"),
    ("come behind", "come after"),
    ("behind the first", "after the first"),
    ("behind the last", "after the last"),
    ("before it or behind it", "before it or after it"),
    ("rounding by chance", "stochastic rounding"),
    ("rounded by chance", "with stochastic rounding"),
    ("say so", "state it, report it, signal"),
    ("says so", "states it, reports it, prints it"),
    ("saying so", "name what is written, and what it saves"),
    ("hold up", "delay, wait for"),
    ("holds up", "delays, waits for"),
    ("held up", "delayed, waits for"),
    ("none but", "only"),
    ("for want of", "without"),
    ("in its stead", "in its place"),
    ("while this view rests", "this view cannot be used meanwhile"),
];

/// The ends of the names of files that are read.
const SCANNED: [&str; 4] = [".rs", ".md", ".py", ".toml"];
/// The list, and the page that explains it.
const LISTS: [&str; 2] = ["tests/tests/words.rs", "docs/style.md"];
/// What was decided or released stays as it was written.
const HISTORY: [&str; 2] = ["CHANGELOG.md", "docs/adr"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ is in the workspace").to_owned()
}

/// Every Rust and Python file, manifest and page of the workspace, by its path from the root.
fn texts() -> Vec<(String, String)> {
    fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if path.is_dir() && !name.starts_with('.') && name != "target" {
                walk(&path, found);
            } else if SCANNED.iter().any(|end| name.ends_with(end)) {
                found.push(path);
            }
        }
    }
    let mut files = Vec::new();
    walk(&root(), &mut files);
    let name = |path: &Path| path.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned();
    let is_scanned = |name: &str| !LISTS.contains(&name) && !HISTORY.iter().any(|place| name.starts_with(place));
    let named = files.into_iter().map(|path| (name(&path), path)).filter(|(name, _)| is_scanned(name));
    named.map(|(name, path)| (name, fs::read_to_string(path).expect("a readable file"))).collect()
}

/// The words of a text in lower case, each with its line. What is no letter parts words, so that a comment goes on in its next line.
fn words(text: &str) -> Vec<(usize, String)> {
    let in_word = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '\'');
    let of_line = |line: &str| line.split(|letter| !in_word(letter)).filter(|word| !word.is_empty()).map(str::to_lowercase).collect();
    let lines = text.lines().map(of_line).enumerate();
    lines.flat_map(|(at, words): (_, Vec<_>)| words.into_iter().map(move |word| (at + 1, word))).collect()
}

/// The banned phrases of a text, each with the line that it begins in, and what to write instead.
fn banned(text: &str) -> Vec<(usize, &'static str, &'static str)> {
    let words = words(text);
    let phrases = BANNED.map(|(phrase, better)| (phrase.split(' ').collect::<Vec<_>>(), phrase, better));
    let mut found = Vec::new();
    for (start, (line, word)) in words.iter().enumerate() {
        for (wanted, phrase, better) in phrases.iter().filter(|(wanted, ..)| word == wanted[0]) {
            if words[start..].iter().map(|(_, word)| word).take(wanted.len()).eq(wanted) {
                found.push((*line, *phrase, *better));
            }
        }
    }
    found
}

#[test]
fn words_without_a_right_use_are_not_written() {
    let texts = texts();
    let counts = SCANNED.map(|end| texts.iter().filter(|(name, _)| name.ends_with(end)).count());
    assert!(
        counts.iter().zip([500, 20, 10, 10]).all(|(found, fewest)| *found > fewest),
        "{SCANNED:?}: {counts:?} files: the walk looks in the wrong place"
    );
    let mut lines = Vec::new();
    for (name, text) in &texts {
        lines.extend(banned(text).iter().map(|(line, phrase, better)| format!("{name}:{line}: `{phrase}`; better: {better}")));
    }
    assert!(lines.is_empty(), "{} phrases that docs/style.md bans:\n{}", lines.len(), lines.join("\n"));
}

#[test]
fn a_phrase_is_found_across_lines_and_in_either_case() {
    let text = "/// Heads\n/// of keys; a row that\n/// is no\n/// number. `is_no_number`, and no numbers at all.\n";
    let found: Vec<_> = banned(text).into_iter().map(|(line, phrase, _)| (line, phrase)).collect();
    assert_eq!(found, [(1, "heads of keys"), (3, "is no number")]);
}
