//! `oxtile compare`: how far the tensors of two files are apart.

mod sums;

use std::{
    collections::{HashMap, HashSet},
    fmt,
    path::Path,
};

use serde::Serialize;
use sums::Sums;

use crate::{
    inspect::Statistics,
    progress::Progress,
    safetensors::{Checkpoint, ReadError, Tensor},
    text::{Align, Table, count, printable, shape, shortened, value},
};

/// Elements of a tensor that are looked at at a time; a multiple of 4, for the types of 4 and 6 bits.
const WINDOW_ELEMENTS: u64 = 1 << 20;

/// Names that are listed at most of tensors that one file alone has, and their longest.
const MOST_NAMES: usize = 100;
const LONGEST_NAME: usize = 120;

/// Two files, tensor by tensor. Serialized, it is the document that `--json` prints; `schema` counts its incompatible changes.
#[derive(Debug, Serialize)]
pub struct Comparison {
    command: &'static str,
    schema: u32,
    version: &'static str,
    reference: String,
    other: String,
    /// In the order of the reference.
    tensors: Vec<Pair>,
    only_in_reference: Vec<String>,
    only_in_other: Vec<String>,
}

/// Two tensors of one name.
#[derive(Debug, Serialize)]
struct Pair {
    name: String,
    dtypes: [&'static str; 2],
    shapes: [Vec<u64>; 2],
    /// `null` where the shapes or the types forbid it.
    difference: Option<Difference>,
}

/// How far two tensors are apart. In JSON an infinite number is `null`; `equal` says that nothing differs.
#[derive(Debug, Serialize)]
struct Difference {
    equal: bool,
    max_error: f64,
    /// Norm of the difference over that of the reference.
    relative: f64,
    snr_db: f64,
    cosine: f64,
    /// Elements that are NaN or infinite in one of the two and not the same in both.
    special: u64,
}

impl Comparison {
    /// Reads both files through.
    ///
    /// # Errors
    /// If one is not a valid safetensors file, or changes while it is read.
    pub fn of(reference: &Path, other: &Path, progress: &mut Progress) -> Result<Self, ReadError> {
        let files = [Checkpoint::open(reference)?, Checkpoint::open(other)?];
        let [left, right] = &files;
        let others: HashMap<_, _> = right.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        let matched = || left.tensors().iter().filter_map(|tensor| Some((tensor, *others.get(tensor.name.as_str())?)));
        progress.expect(matched().map(|(tensor, _)| tensor.bytes()).sum());
        let tensors = matched().map(|pair| {
            progress.start(&pair.0.name);
            Pair::of([left, right], pair, progress)
        });
        let tensors: Vec<_> = tensors.collect::<Result<_, _>>()?;
        progress.clear();
        files.iter().try_for_each(Checkpoint::verify_unchanged)?;
        let names: HashSet<_> = left.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        let missing = |tensors: &[Tensor], has: &dyn Fn(&str) -> bool| -> Vec<String> {
            tensors.iter().filter(|tensor| !has(&tensor.name)).map(|tensor| tensor.name.clone()).collect()
        };
        Ok(Self {
            command: "compare",
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            reference: reference.display().to_string(),
            other: other.display().to_string(),
            tensors,
            only_in_reference: missing(left.tensors(), &|name| others.contains_key(name)),
            only_in_other: missing(right.tensors(), &|name| names.contains(name)),
        })
    }
}

/// Files further apart than allowed.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{other} is not within a relative error of {bound} of {reference}: {reason}")]
pub struct TooFar {
    reference: String,
    other: String,
    bound: f64,
    /// The first reason, and how many more tensors have one.
    reason: String,
}

impl Comparison {
    /// Holds the comparison against a bound for the relative error of every tensor.
    ///
    /// # Errors
    /// [`TooFar`] unless every tensor of either file is in both and comparable, NaN and infinite elements are the same in both, and no
    /// relative error is above the bound.
    pub fn check(&self, bound: f64) -> Result<(), TooFar> {
        let missing = [(&self.only_in_reference, "the reference"), (&self.only_in_other, "the other")];
        let missing = missing
            .into_iter()
            .flat_map(|(names, file)| names.iter().map(move |name| format!("tensor `{}` is only in {file}", printable(name))));
        let apart = self.tensors.iter().filter_map(|pair| {
            let name = printable(&pair.name);
            match &pair.difference {
                None => Some(format!("tensor `{name}` is not comparable")),
                Some(difference) if difference.special > 0 => {
                    Some(format!("tensor `{name}` has {} other NaN or infinite elements", difference.special))
                }
                Some(difference) if difference.relative.is_nan() || difference.relative > bound => {
                    Some(format!("tensor `{name}` has one of {}", value(difference.relative)))
                }
                Some(_) => None,
            }
        });
        let mut reasons = missing.chain(apart);
        let Some(mut reason) = reasons.next() else { return Ok(()) };
        match reasons.count() {
            0 => {}
            more => reason.push_str(&format!(", and {more} more")),
        }
        Err(TooFar { reference: self.reference.clone(), other: self.other.clone(), bound, reason })
    }
}

impl Pair {
    fn of(files: [&Checkpoint; 2], (left, right): (&Tensor, &Tensor), progress: &mut Progress) -> Result<Self, ReadError> {
        let tensors = [left, right];
        let difference = match left.shape == right.shape {
            true => difference(files, tensors, progress)?,
            false => None,
        };
        Ok(Self {
            name: left.name.clone(),
            dtypes: tensors.map(|tensor| tensor.dtype.name()),
            shapes: tensors.map(|tensor| tensor.shape.clone()),
            difference,
        })
    }
}

/// How far two tensors of one shape are apart; `None` where their elements are not numbers, but for the same bytes.
fn difference(files: [&Checkpoint; 2], tensors: [&Tensor; 2], progress: &mut Progress) -> Result<Option<Difference>, ReadError> {
    let [left, right] = tensors;
    let same_type = left.dtype == right.dtype;
    let numbers = tensors.iter().all(|tensor| Statistics::covers(tensor.dtype));
    let [left_integer, right_integer] = tensors.map(|tensor| Statistics::is_integer(tensor.dtype));
    if !numbers && !same_type {
        return Ok(None);
    }
    let mut sums = Sums::default();
    let mut element = 0;
    while element < left.elements() {
        let end = (element + WINDOW_ELEMENTS).min(left.elements());
        let window = |side: usize| {
            let at = |element: u64| element * tensors[side].dtype.bits() / 8;
            files[side].window(tensors[side], at(element)..at(end))
        };
        let windows = [window(0)?, window(1)?];
        let floats = |side: usize| {
            let mut values = Vec::new();
            Statistics::visit(tensors[side].dtype, &windows[side], |value| values.push(value));
            values
        };
        let integers = |side: usize| {
            let mut values = Vec::new();
            Statistics::visit_integers(tensors[side].dtype, &windows[side], |value| values.push(value));
            values
        };
        match (numbers, left_integer, right_integer) {
            // Numbers or not: the same bytes are the same.
            (false, ..) if *windows[0] != *windows[1] => return Ok(None),
            (false, ..) => {}
            (true, true, true) => sums.add_integers(&[integers(0), integers(1)]),
            (true, true, false) => sums.add_mixed(&integers(0), &floats(1), true),
            (true, false, true) => sums.add_mixed(&integers(1), &floats(0), false),
            (true, false, false) => sums.add_floats(&[floats(0), floats(1)]),
        }
        progress.advance((end - element) * left.dtype.bits() / 8);
        element = end;
    }
    Ok(Some(sums.difference()))
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use Align::{Left, Right};
        writeln!(f, "reference  {}", printable(&self.reference))?;
        writeln!(f, "other      {}", printable(&self.other))?;
        let columns = [
            ("tensor", Left),
            ("dtypes", Left),
            ("shape", Right),
            ("max error", Right),
            ("relative", Right),
            ("SNR dB", Right),
            ("cosine", Right),
        ];
        let mut table = Table::new(&columns);
        let mut incomparable = Table::new(&[("tensor", Left), ("reference", Left), ("other", Left)]);
        for pair in &self.tensors {
            let Some(difference) = &pair.difference else {
                let side = |i: usize| format!("{} {}", pair.dtypes[i], shape(&pair.shapes[i]));
                incomparable.row([printable(&pair.name).into(), side(0), side(1)]);
                continue;
            };
            table.row([
                printable(&pair.name).into(),
                if pair.dtypes[0] == pair.dtypes[1] { pair.dtypes[0].into() } else { pair.dtypes.join(", ") },
                shape(&pair.shapes[0]),
                value(difference.max_error),
                value(difference.relative),
                if difference.equal { "equal".into() } else { format!("{:.2}", difference.snr_db) },
                format!("{:.6}", difference.cosine),
            ]);
        }
        if !table.is_empty() {
            write!(f, "\n{table}")?;
        }
        if !incomparable.is_empty() {
            write!(f, "\nNot comparable: other shapes, or elements that are not single numbers and differ\n{incomparable}")?;
        }
        for (names, file) in [(&self.only_in_reference, "reference"), (&self.only_in_other, "other")] {
            if !names.is_empty() {
                let shown: Vec<_> = names.iter().take(MOST_NAMES).map(|name| shortened(&printable(name), LONGEST_NAME)).collect();
                let more = match names.len().saturating_sub(MOST_NAMES) {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                writeln!(f, "\nOnly in the {file}: {}{more}", shown.join(", "))?;
            }
        }
        let differences = || self.tensors.iter().filter_map(|pair| pair.difference.as_ref());
        let special: u64 = differences().map(|difference| difference.special).sum();
        writeln!(f, "\ntensors {} compared, {} equal", differences().count(), differences().filter(|d| d.equal).count())?;
        if special > 0 {
            writeln!(f, "special {} elements are NaN or infinite in one of the two", count(special))?;
        }
        Ok(())
    }
}
