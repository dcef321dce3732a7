//! The files of all ranks, held against one another.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
};

use super::JoinError;
use crate::{
    safetensors::{Checkpoint, Header, Tensor, TensorSpec, filled},
    shard::{
        By, Cuts, Division, files,
        metadata::{self, Part, Stated},
    },
    text::{path, shape},
};

/// The files of one model, by rank.
#[derive(Debug)]
pub struct Shards {
    files: Vec<(Checkpoint, Stated)>,
}

/// A tensor of the joined file.
#[derive(Debug)]
pub struct Joined<'a> {
    /// What it is to be.
    pub spec: TensorSpec,
    /// How its bytes are divided.
    pub cuts: Cuts,
    /// The part of each rank.
    pub parts: Vec<&'a Tensor>,
}

impl Shards {
    /// Opens the files of all ranks.
    ///
    /// # Errors
    /// If a file cannot be read or is no shard, or there is not one of each rank of one model.
    pub fn open(paths: &[PathBuf]) -> Result<Self, JoinError> {
        let mut files: Vec<(Checkpoint, Stated)> = Vec::new();
        for path in paths {
            let file = Checkpoint::open(path)?;
            let stated = Stated::read(file.metadata()).map_err(|error| JoinError::Stated { file: path.clone(), error })?;
            if files.iter().any(|(other, _)| other.path() == path) {
                return Err(JoinError::Twice(path.clone()));
            }
            if let Some((first, expected)) = files.first() {
                check_model(path, &stated, first.path(), expected)?;
            }
            if let Some((same, _)) = files.iter().find(|(_, other)| other.rank == stated.rank) {
                return Err(JoinError::SameRank { file: path.clone(), first: same.path().into(), rank: stated.rank });
            }
            files.push((file, stated));
        }
        if let Some((first, stated)) = files.first() {
            let is_there = |rank: &u32| files.iter().any(|(_, stated)| stated.rank == *rank);
            let missing: Vec<u32> = (0..stated.ranks.get()).filter(|rank| !is_there(rank)).collect();
            if !missing.is_empty() {
                return Err(JoinError::Missing {
                    first: first.path().into(),
                    ranks: stated.ranks.get(),
                    missing: named(&missing, first.path(), stated),
                });
            }
        }
        files.sort_by_key(|(_, stated)| stated.rank);
        Ok(Self { files })
    }

    /// The files, by rank.
    pub fn files(&self) -> impl Iterator<Item = &Checkpoint> {
        self.files.iter().map(|(file, _)| file)
    }

    /// The files and what they state, by rank.
    pub fn pairs(&self) -> impl Iterator<Item = (&Checkpoint, &Stated)> {
        self.files.iter().map(|(file, stated)| (file, stated))
    }

    /// The header of the joined file, where that is not the one that a [`Writer`](crate::safetensors::Writer) makes: its text, and what it says.
    ///
    /// # Errors
    /// If it is of other tensors or strings than the joined ones.
    pub fn header(&self, joined: &[Joined<'_>]) -> Result<Option<(String, Header)>, JoinError> {
        let (file, stated) = &self.files[0];
        let Some(frame) = &stated.header else { return Ok(None) };
        let damaged = |reason: String| JoinError::Stated { file: file.path().into(), error: metadata::damaged_header(reason) };
        let text = filled(frame, &stated.joined).map_err(|error| damaged(error.to_string()))?;
        let whole = |joined: &Joined<'_>| {
            if joined.cuts.is_whole() { joined.parts[0].bytes() } else { joined.parts.iter().map(|part| part.bytes()).sum() }
        };
        let header = Header::parse(text.as_bytes(), joined.iter().map(whole).sum()).map_err(|fault| damaged(fault.to_string()))?;
        let mut found: Vec<TensorSpec> = header.tensors.iter().map(TensorSpec::of).collect();
        let mut expected: Vec<TensorSpec> = joined.iter().map(|joined| joined.spec.clone()).collect();
        for specs in [&mut found, &mut expected] {
            specs.sort_by(|a, b| a.name.cmp(&b.name));
        }
        if found != expected || header.metadata != stated.joined {
            return Err(damaged("it is of other tensors or strings".to_owned()));
        }
        Ok(Some((text, header)))
    }

    /// What the first rank's file states.
    pub fn stated(&self) -> &Stated {
        &self.files[0].1
    }

    /// The free-form strings of the joined file.
    pub fn strings(&self) -> &BTreeMap<String, String> {
        &self.stated().joined
    }

    /// Holds the tensors of all files against one another, in the order in which the joined file has them.
    ///
    /// # Errors
    /// The first tensor that does not fit.
    pub fn check(&self) -> Result<Vec<Joined<'_>>, JoinError> {
        let tables: Vec<HashMap<&str, &Tensor>> =
            self.files().map(|file| file.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()).collect();
        let (first, _) = &self.files[0];
        for ((file, stated), table) in self.files.iter().zip(&tables) {
            let extra = file.tensors().iter().find(|tensor| !tables[0].contains_key(tensor.name.as_str()));
            if let Some(extra) = extra {
                return Err(tensor_error(file, &extra.name, format!("is not in {}", first.path().display())));
            }
            if let Some(name) = stated.tensors.keys().find(|name| !table.contains_key(name.as_str())) {
                return Err(tensor_error(file, name, "is named in its metadata, and is missing".into()));
            }
        }
        first.tensors().iter().map(|tensor| self.joined(&tensor.name, &tables)).collect()
    }

    fn joined<'a>(&'a self, name: &str, tables: &[HashMap<&str, &'a Tensor>]) -> Result<Joined<'a>, JoinError> {
        let mut parts: Vec<&Tensor> = Vec::new();
        let mut whole: Option<(&Part, Division)> = None;
        for ((file, stated), table) in self.files.iter().zip(tables) {
            let failed = |reason: String| tensor_error(file, name, reason);
            let other = |other: &str| format!("{other} in {}", self.files[0].0.path().display());
            let part = stated.tensors.get(name).ok_or_else(|| failed("is not named in its metadata".into()))?;
            let tensor = *table.get(name).ok_or_else(|| failed(other("is missing, and is")))?;
            let (expected, division) = match &mut whole {
                Some(whole) => whole,
                None => {
                    let view = view(part, &tensor.shape).ok_or_else(|| {
                        failed(format!("is {}, which is no part of {} by {}", shape(&tensor.shape), shape(&part.shape), part.by.name()))
                    })?;
                    whole.insert((part, Division { by: part.by, view, ranges: Vec::new() }))
                }
            };
            if tensor.dtype != parts.first().map_or(tensor.dtype, |first| first.dtype) {
                return Err(failed(format!("is {}, and {}", tensor.dtype, other(parts[0].dtype.name()))));
            }
            if (&part.shape, part.by) != (&expected.shape, expected.by) {
                let said = |part: &Part| format!("of {} by {}", shape(&part.shape), part.by.name());
                return Err(failed(format!("is a part {}, and {}", said(part), other(&said(expected)))));
            }
            let Some(dimension) = dimension(part.by) else {
                if tensor.shape != division.view {
                    return Err(failed(format!("is {}, where every rank has all of {}", shape(&tensor.shape), shape(&division.view))));
                }
                parts.push(tensor);
                continue;
            };
            let start = division.ranges.last().map_or(0, |range| range.end);
            let mut wanted = division.view.clone();
            wanted[dimension] = tensor.shape.get(dimension).copied().unwrap_or(0);
            let unit = part.by.name();
            if tensor.shape != wanted {
                return Err(failed(format!("is {}, which is no part of {} by {unit}", shape(&tensor.shape), shape(&division.view))));
            }
            if part.first != start {
                return Err(failed(format!(
                    "begins at {} {}, and the {unit} before it end at {start}",
                    &unit[..unit.len() - 1],
                    part.first
                )));
            }
            division.ranges.push(start..start.saturating_add(wanted[dimension]));
            parts.push(tensor);
        }
        let (file, _) = self.files.last().expect("a file of each rank");
        let Some((part, division)) = whole else { return Err(tensor_error(file, name, "has no part".into())) };
        if let (Some(dimension), Some(last)) = (dimension(part.by), division.ranges.last())
            && last.end != division.view[dimension]
        {
            let reason = format!("ends at {} of {} {}", last.end, division.view[dimension], part.by.name());
            return Err(tensor_error(file, name, reason));
        }
        let dtype = parts[0].dtype;
        Ok(Joined { cuts: division.cuts(dtype), spec: TensorSpec { name: name.into(), dtype, shape: part.shape.clone() }, parts })
    }
}

/// The dimension that a tensor is divided along.
fn dimension(by: By) -> Option<usize> {
    match by {
        By::None => None,
        By::Rows => Some(0),
        By::Columns => Some(1),
    }
}

/// The dimensions of a whole as it was divided: its own, or where the part is a matrix, those of the matrix that it is.
fn view(part: &Part, shape: &[u64]) -> Option<Vec<u64>> {
    let view = match part.shape.as_slice() {
        [outer @ .., columns] if part.by == By::Rows && shape.len() == 2 && outer.len() > 1 => {
            let rows = outer.iter().try_fold(1u64, |product, &size| product.checked_mul(size))?;
            vec![rows, *columns]
        }
        whole => whole.to_vec(),
    };
    let has_dimension = dimension(part.by).is_none_or(|dimension| dimension < view.len());
    // A whole whose bytes pass 64 bits has no parts.
    let bits = view.iter().try_fold(64u64, |product, &size| product.checked_mul(size));
    let fits = bits.is_some() || view.contains(&0);
    (has_dimension && view.len() == shape.len() && fits).then_some(view)
}

/// Fails unless a file is of the same model, divided the same way.
fn check_model(file: &Path, stated: &Stated, first: &Path, expected: &Stated) -> Result<(), JoinError> {
    let other = |found, expected| Err(JoinError::Other { file: file.into(), first: first.into(), found, expected });
    if stated.ranks != expected.ranks {
        return other(stated.ranks.to_string(), expected.ranks.to_string());
    }
    if stated.recipe() != expected.recipe() {
        return other(format!("format {}", stated.recipe()), format!("format {}", expected.recipe()));
    }
    if stated.model != expected.model || stated.joined != expected.joined {
        let model = |stated: &Stated| format!("the model {}", crate::text::shortened(&crate::text::printable(&stated.model), 13));
        let (found, expected) = (model(stated), model(expected));
        // The same tensors, and other strings beside them.
        let strings = if found == expected { " with other metadata" } else { "" };
        return other(format!("{found}{strings}"), expected);
    }
    Ok(())
}

/// How many ranks an error names.
const MOST: usize = 8;

/// `that of rank 1 is missing`, with the name that its file was given.
fn named(ranks: &[u32], first: &Path, stated: &Stated) -> String {
    let missing = in_words(ranks);
    let name = |rank: u32| files::path(Path::new(""), rank, stated.ranks.get()).display().to_string();
    let Some(prefix) = first.to_str().and_then(|first| first.strip_suffix(&name(stated.rank))) else { return format!("{missing} missing") };
    let named: Vec<_> = ranks.iter().take(MOST).map(|rank| path(format!("{prefix}{}", name(*rank)))).collect();
    format!("{missing} missing ({}{})", named.join(", "), if ranks.len() > MOST { ", ..." } else { "" })
}

/// `that of rank 1 is`, `those of ranks 1, 2 and 3 are`.
fn in_words(ranks: &[u32]) -> String {
    let words: Vec<String> = ranks.iter().take(MOST).map(u32::to_string).collect();
    match (words.as_slice(), ranks.len()) {
        ([rank], _) => format!("that of rank {rank} is"),
        (words, count) if count > MOST => format!("those of ranks {} and {} more are", words.join(", "), count - MOST),
        ([words @ .., last], _) => format!("those of ranks {} and {last} are", words.join(", ")),
        ([], _) => "none is".into(),
    }
}

/// The error about a tensor of a file.
pub fn tensor_error(file: &Checkpoint, name: &str, reason: String) -> JoinError {
    JoinError::Tensor { file: file.path().into(), name: name.into(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_ranks_are_named() {
        assert_eq!(in_words(&[2]), "that of rank 2 is");
        assert_eq!(in_words(&[0, 3]), "those of ranks 0 and 3 are");
        assert_eq!(in_words(&[0, 1, 3]), "those of ranks 0, 1 and 3 are");
        let most: Vec<u32> = (1..12).collect();
        assert_eq!(in_words(&most), "those of ranks 1, 2, 3, 4, 5, 6, 7, 8 and 3 more are");
    }

    #[test]
    fn wholes_as_they_were_divided() {
        let part = |shape: &[u64], by| Part { shape: shape.into(), by, first: 0 };
        assert_eq!(view(&part(&[2, 5, 32], By::Rows), &[4, 32]), Some(vec![10, 32]));
        assert_eq!(view(&part(&[2, 5, 32], By::Rows), &[1, 5, 32]), Some(vec![2, 5, 32]));
        assert_eq!(view(&part(&[4, 6], By::Columns), &[4, 2]), Some(vec![4, 6]));
        assert_eq!(view(&part(&[6], By::Columns), &[2]), None);
        assert_eq!(view(&part(&[], By::Rows), &[]), None);
        assert_eq!(view(&part(&[u64::MAX, u64::MAX, 2], By::Rows), &[1, 2]), None);
        assert_eq!(view(&part(&[1 << 60], By::Rows), &[1]), None);
        assert_eq!(view(&part(&[1 << 60, 0], By::Rows), &[1, 0]), Some(vec![1 << 60, 0]));
    }
}
