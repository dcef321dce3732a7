//! The part of docs/status.md that is made from the registry of kernels and from the results that are committed.

use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use oxtile_kernels::KERNELS;

use crate::results::{Document, Record};

/// What stands before and after that part in the page.
pub const MARKS: [&str; 2] = ["<!-- made by `oxtile-benches --status` -->", "<!-- end -->"];

/// The tables of the kernels of each family and of the results in a folder.
///
/// # Errors
/// A result cannot be read, or there is none.
pub fn markdown(results: &Path) -> Result<String> {
    Ok(kernels() + "\n" + &measured(results)?)
}

/// Puts the text between the marks of a page.
///
/// # Errors
/// The page has no marks.
pub fn put(page: &str, text: &str) -> Result<String> {
    let [begin, end] = MARKS;
    let (before, rest) = page.split_once(begin).with_context(|| format!("the page has no `{begin}`"))?;
    let (_, after) = rest.split_once(end).with_context(|| format!("the page has no `{end}` after `{begin}`"))?;
    Ok(format!("{before}{begin}\n\n{text}\n{end}{after}"))
}

/// How many kernels each family has, and where they run.
fn kernels() -> String {
    let mut families: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for info in KERNELS.iter().flat_map(|family| family.instances) {
        let counts = families.entry(info.family).or_default();
        counts[usize::from(info.requires.is_empty())] += 1;
    }
    let mut text = String::from("| family | kernels for sm_90a alone | kernels for every GPU from sm_80 on |\n|---|---|---|\n");
    for (family, [hopper, every]) in &families {
        _ = writeln!(text, "| {family} | {hopper} | {every} |");
    }
    let [hopper, every] = families.values().fold([0, 0], |[a, b], [hopper, every]| [a + hopper, b + every]);
    _ = writeln!(text, "| all | {hopper} | {every} |");
    text
}

/// What each results file holds, and how our times stand beside the fastest peer of each row.
fn measured(folder: &Path) -> Result<String> {
    let mut text = String::from(
        "| results | device | commit | rows | with a peer | time of the fastest peer / ours: median, least |\n|---|---|---|---|---|---|\n",
    );
    let files = files(folder)?;
    ensure!(!files.is_empty(), "{} has no results", folder.display());
    for path in files {
        let document = Document::read(&path)?;
        let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        // What a family is compared with, copies, is no row of it.
        let is_copy = |record: &&Record| record.family == "copy" && name != "copy";
        let records: Vec<&Record> = document.records.iter().filter(|record| !is_copy(record)).collect();
        let mut ratios: Vec<f64> = records.iter().filter_map(|record| over_fastest(record)).collect();
        ratios.sort_by(f64::total_cmp);
        let [median, least] = [ratios.get(ratios.len() / 2), ratios.first()].map(|ratio| ratio.map_or("-".into(), |of| format!("{of:.2}")));
        let commit = document.machine.commit.get(..7).unwrap_or("?");
        let (device, rows, compared) = (&document.machine.device, records.len(), ratios.len());
        _ = writeln!(text, "| [{name}](../benches/results/{name}.json) | {device} | {commit} | {rows} | {compared} | {median}, {least} |");
    }
    Ok(text)
}

/// The results files of a folder, by name.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<Vec<_>>>()?;
    let mut files: Vec<_> = paths.into_iter().filter(|path| path.extension().is_some_and(|extension| extension == "json")).collect();
    files.sort();
    Ok(files)
}

/// The median ratio of the peer that is fastest. Sides that are a limit or a part of the work are no peers, nor are methods of our own beside a
/// chosen one; of weights in shards, where one method of ours stands beside another, NCCL's sides alone are.
fn over_fastest(record: &Record) -> Option<f64> {
    if record.divided.is_some() || !record.limit.is_empty() || record.chosen.is_some() {
        return None;
    }
    let is_peer = |side: &usize| record.family != "sharded" || record.sides[*side].label.contains("NCCL");
    (1..record.sides.len()).filter(is_peer).filter_map(|side| Some(record.ratio(side)?.median)).min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_takes_the_place_of_the_old_one() {
        let page = format!("a\n{}\nold\n{}\nb\n", MARKS[0], MARKS[1]);
        let put_once = put(&page, "new\n").unwrap();
        assert_eq!(put_once, format!("a\n{}\n\nnew\n\n{}\nb\n", MARKS[0], MARKS[1]));
        assert_eq!(put(&put_once, "new\n").unwrap(), put_once);
        assert!(put("a", "new").unwrap_err().to_string().contains("has no `<!-- made by"));
    }
}
