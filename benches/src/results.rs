//! The raw results, as they are committed in benches/results.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::{
    machine::Machine,
    peers::Check,
    rounds::Rounds,
    statistics::{Interval, Quartiles},
};

/// The version of the file's form.
const FORM: u32 = 1;

/// One run of the program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// The version of this form.
    pub form: u32,
    /// How the numbers were measured.
    pub method: String,
    /// The seed of the data and of the order of rounds.
    pub seed: u64,
    /// Where they were measured.
    pub machine: Machine,
    /// What ranks are, where there are any. Files before this was recorded are of threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RanksAre>,
    /// What was measured.
    pub records: Vec<Record>,
}

/// What runs a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RanksAre {
    /// A thread of the program.
    Threads,
    /// A process of its own.
    Processes,
}

/// One comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The kernel's family.
    pub family: String,
    /// The kernel with its instance.
    pub kernel: String,
    /// Its shape.
    pub shape: String,
    /// How the time was taken.
    pub clock: Clock,
    /// Bytes that one launch must move; 0 where bytes are not what counts.
    pub bytes: u64,
    /// Floating-point operations of one launch; 0 where they are not compared.
    #[serde(default)]
    pub flops: u64,
    /// Launches in the time of one round.
    pub launches: u64,
    /// The record whose rate is the ceiling, by [`Record::name`].
    pub ceiling: Option<String>,
    /// Labels of sides, of which the slowest is a limit of the others: what these are made of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub limit: Vec<String>,
    /// The label of the side that a model takes for the fastest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    /// The ranks that share the work of the other sides, and the label of the side that does all of it on one GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub divided: Option<Divided>,
    /// What was compared; the first is ours.
    pub sides: Vec<SideRecord>,
    /// The sides in the order they ran in, a list a round.
    pub order: Vec<Vec<usize>>,
    /// Peers that could not run, and why.
    pub missing: Vec<Missing>,
}

/// Work that ranks share.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Divided {
    /// How many ranks.
    pub ranks: u32,
    /// The label of the side that does it alone.
    pub alone: String,
    /// The label of the side of which each rank does it alone, all at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub each: Option<String>,
}

impl Divided {
    /// Whether a side's ranks share nothing.
    fn is_alone(&self, label: &str) -> bool {
        [Some(self.alone.as_str()), self.each.as_deref()].contains(&Some(label))
    }
}

/// How time is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// Between two events on the device.
    DeviceEvents,
    /// Around the calls, on the host.
    Host,
}

/// One side of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SideRecord {
    /// What it is.
    pub label: String,
    /// The time of each round.
    pub milliseconds: Vec<f64>,
    /// Whether a peer's outputs are the kernel's, byte for byte.
    pub check: Option<Check>,
    /// Floating-point operations of one of its launches, if their number differs from the record's: it is then compared by rates, or by times if there
    /// are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flops: Option<u64>,
    /// What its ranks did, each for itself, where that was recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<RanksRecord>,
}

/// A side of several ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RanksRecord {
    /// Milliseconds from the end of each rank to the end of the last one, a list a round.
    pub idle: Vec<Vec<f64>>,
    /// What was planned of each pass of a call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passes: Vec<PassRecord>,
    /// Bytes of device memory that the operation took of each rank, for both passes.
    #[serde(default)]
    pub memory: u64,
}

/// A pass of attention whose keys are spread over ranks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassRecord {
    /// How keys reach queries.
    pub schedule: String,
    /// The kernels of attention.
    pub kernels: Vec<String>,
    /// Their launches on rank 0.
    pub launches: u32,
    /// Bytes that a rank receives.
    pub received: u64,
    /// Why this schedule, with the time by the model.
    pub why: String,
}

impl RanksRecord {
    /// The median of each rank's idle time, in milliseconds.
    pub fn idle_medians(&self) -> Vec<f64> {
        let ranks = self.idle.first().map_or(0, Vec::len);
        let of = |rank: usize| Quartiles::of(self.idle.iter().filter_map(|round| round.get(rank).copied()));
        (0..ranks).filter_map(of).map(|idle| idle.median).collect()
    }

    /// Bytes that a rank receives in a call.
    pub fn received(&self) -> u64 {
        self.passes.iter().map(|pass| pass.received).sum()
    }
}

impl SideRecord {
    /// A side that has not been timed, of the record's amount of work.
    pub fn new(label: impl Into<String>) -> Self {
        Self { label: label.into(), milliseconds: Vec::new(), check: None, flops: None, ranks: None }
    }
}

/// A peer that could not run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Missing {
    /// The peer's name.
    pub peer: String,
    /// Why.
    pub why: String,
}

impl Record {
    /// Kernel and shape.
    pub fn name(&self) -> String {
        format!("{} {}", self.kernel, self.shape)
    }

    /// Takes the rounds in.
    pub fn fill(&mut self, rounds: Rounds) {
        self.order = rounds.order;
        for (side, milliseconds) in self.sides.iter_mut().zip(rounds.milliseconds) {
            side.milliseconds = milliseconds;
        }
    }

    /// Seconds of one launch of a side.
    pub fn seconds(&self, side: usize) -> Option<Quartiles> {
        Quartiles::of(self.sides.get(side)?.milliseconds.iter().map(|ms| ms * 1e-3 / self.launches as f64))
    }

    /// Bytes a second of a side, at its median time.
    pub fn rate(&self, side: usize) -> Option<f64> {
        self.seconds(side).map(|time| self.bytes as f64 / time.median)
    }

    /// Floating-point operations a second of a side, at its median time, where they are compared.
    pub fn flop_rate(&self, side: usize) -> Option<f64> {
        self.seconds(side).filter(|_| self.flops > 0).map(|time| self.flops_of(side) as f64 / time.median)
    }

    /// The time of a side over ours, round by round; for a side with other work, the time that it would take for ours at its rate.
    /// A side without floating-point operations, such as a copy, is compared by its time.
    pub fn ratio(&self, side: usize) -> Option<Interval> {
        let work = if self.flops > 0 && self.flops_of(side) > 0 { self.flops as f64 / self.flops_of(side) as f64 } else { 1.0 };
        self.pairs(side, |other, ours| work * other / ours)
    }

    /// The share of the limit that a side reaches, of median times: the slowest of the sides that are the limit, over the side. The time of one GPU counts
    /// divided by the ranks that share its work.
    pub fn of_limit(&self, side: usize) -> Option<f64> {
        let median = |side| self.seconds(side).map(|time| time.median);
        let part = |of: usize| Some(median(of)? / f64::from(self.ranks_beside(of)));
        let limits = (0..self.sides.len()).filter(|of| self.limit.contains(&self.sides[*of].label)).filter_map(part);
        Some(limits.max_by(f64::total_cmp)? / part(side)?)
    }

    /// The time of one GPU, divided by the ranks that share its work, over the time of a side, round by round.
    pub fn efficiency(&self, side: usize) -> Option<Interval> {
        self.efficiency_over(&self.divided.as_ref()?.alone, side)
    }

    /// The same of the slowest GPU, where each did all of the work: what ranks with equal parts can reach.
    pub fn efficiency_of_slowest(&self, side: usize) -> Option<Interval> {
        self.efficiency_over(self.divided.as_ref()?.each.as_ref()?, side)
    }

    fn efficiency_over(&self, alone: &str, side: usize) -> Option<Interval> {
        let ranks = f64::from(self.divided.as_ref()?.ranks);
        let (alone, side) = (self.sides.iter().find(|side| side.label == alone)?, self.sides.get(side)?);
        // One that ran once stands beside each round: the interval then leaves out how its time varies.
        let count = if alone.milliseconds.len() == 1 { side.milliseconds.len() } else { alone.milliseconds.len() };
        let alone = alone.milliseconds.iter().cycle().take(count);
        Interval::of(alone.zip(&side.milliseconds).map(|(alone, side)| alone / ranks / side))
    }

    /// Whether a side does the work that ranks share: not the one GPU, nor copies alone.
    pub fn is_work(&self, side: usize) -> bool {
        self.flops_of(side) > 0 && self.ranks_beside(side) == 1
    }

    /// Among how many more ranks the work of a side would be spread, were it that of the others.
    fn ranks_beside(&self, side: usize) -> u32 {
        self.divided.as_ref().filter(|divided| divided.is_alone(&self.sides[side].label)).map_or(1, |divided| divided.ranks)
    }

    /// Floating-point operations a second of one GPU of a side, at its median time.
    pub fn flop_rate_of_gpu(&self, side: usize) -> Option<f64> {
        let Divided { ranks, .. } = self.divided.as_ref()?;
        Some(self.flop_rate(side)? / f64::from(ranks / self.ranks_beside(side)))
    }

    /// The time of the side that a model chose over another side's, round by round.
    pub fn chosen_over(&self, other: usize) -> Option<Interval> {
        let chosen = self.sides.iter().find(|side| Some(&side.label) == self.chosen.as_ref())?;
        let other = self.sides.get(other)?;
        Interval::of(chosen.milliseconds.iter().zip(&other.milliseconds).map(|(chosen, other)| chosen / other))
    }

    /// The same over the fastest side, by medians.
    pub fn chosen_over_fastest(&self) -> Option<f64> {
        let fastest = (0..self.sides.len()).filter_map(|side| Some((side, self.seconds(side)?.median)));
        let (fastest, _) = fastest.min_by(|a, b| a.1.total_cmp(&b.1))?;
        Some(self.chosen_over(fastest)?.median)
    }

    fn flops_of(&self, side: usize) -> u64 {
        self.sides.get(side).and_then(|side| side.flops).unwrap_or(self.flops)
    }

    /// Our seconds a launch less a side's, round by round.
    pub fn excess(&self, side: usize) -> Option<Interval> {
        self.pairs(side, |other, ours| (ours - other) * 1e-3 / self.launches as f64)
    }

    fn pairs(&self, side: usize, of: impl Fn(f64, f64) -> f64) -> Option<Interval> {
        let (ours, other) = (self.sides.first()?, self.sides.get(side)?);
        Interval::of(other.milliseconds.iter().zip(&ours.milliseconds).map(|(other, ours)| of(*other, *ours)))
    }
}

impl Document {
    /// A document with nothing in it yet.
    pub fn new(method: String, seed: u64, machine: Machine) -> Self {
        Self { form: FORM, method, seed, machine, ranks: None, records: Vec::new() }
    }

    /// Our share of the ceiling's rate: the rate of the fastest side of the copy that the record names.
    pub fn share(&self, record: &Record, side: usize) -> Option<f64> {
        let ceiling = record.ceiling.as_ref()?;
        let copy = self.records.iter().find(|copy| copy.name() == *ceiling)?;
        let best = (0..copy.sides.len()).filter_map(|side| copy.rate(side)).max_by(f64::total_cmp)?;
        Some(record.rate(side)? / best)
    }

    /// Reads a document.
    ///
    /// # Errors
    /// The file cannot be read or has another form.
    pub fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let document: Self = serde_json::from_str(&text).with_context(|| format!("{} is no results file", path.display()))?;
        if document.form != FORM {
            bail!("{} has form {}, this program reads form {FORM}: measure again", path.display(), document.form);
        }
        Ok(document)
    }

    /// Writes one file, if the path ends in `.json`, else a folder with `<family>.json` for each family, which holds
    /// the copies that its shares refer to as well. Returns the files.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, path: &Path) -> Result<Vec<PathBuf>> {
        if path.extension().is_some_and(|extension| extension == "json") {
            return Ok(vec![self.write_file(path.to_owned())?]);
        }
        fs::create_dir_all(path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut families: Vec<&str> = Vec::new();
        for record in &self.records {
            if !families.contains(&record.family.as_str()) {
                families.push(&record.family);
            }
        }
        families.into_iter().map(|name| self.of_family(name).write_file(path.join(format!("{name}.json")))).collect()
    }

    fn of_family(&self, family: &str) -> Self {
        let own: Vec<&Record> = self.records.iter().filter(|record| record.family == family).collect();
        let is_ceiling = |record: &Record| own.iter().any(|own| own.ceiling.as_deref() == Some(&record.name()));
        let records = self.records.iter().filter(|record| record.family == family || is_ceiling(record)).cloned().collect();
        Self { records, ..self.clone() }
    }

    fn write_file(&self, path: PathBuf) -> Result<PathBuf> {
        let text = serde_json::to_string(self).context("the results are no JSON")?;
        fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::machine::Readings;

    /// A copy with two sides, and a kernel that takes half the time of its peer.
    pub fn document() -> Document {
        let machine = Machine {
            device: "test device".into(),
            commit: "unknown".into(),
            peers: Err("not started".into()),
            before: Readings::new(),
            after: Readings::new(),
        };
        let mut document = Document::new("method".into(), 1, machine);
        document.records = vec![
            record("copy", "copy_words", 2_000, None, [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]),
            record("amax", "amax", 1_000, Some("copy_words shape"), [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]),
        ];
        document
    }

    fn record(family: &str, kernel: &str, bytes: u64, ceiling: Option<&str>, times: [[f64; 3]; 2]) -> Record {
        let side = |label, times: [f64; 3]| SideRecord { milliseconds: times.into(), ..SideRecord::new(label) };
        Record {
            family: family.into(),
            kernel: kernel.into(),
            shape: "shape".into(),
            clock: Clock::DeviceEvents,
            bytes,
            flops: 0,
            launches: 10,
            ceiling: ceiling.map(str::to_owned),
            limit: Vec::new(),
            chosen: None,
            divided: None,
            sides: vec![side("oxtile", times[0]), side("peer", times[1])],
            order: vec![vec![0, 1]; 3],
            missing: Vec::new(),
        }
    }

    #[test]
    fn derived_numbers() {
        let document = document();
        let amax = &document.records[1];
        assert_eq!(amax.seconds(0).unwrap().median, 2e-4);
        assert_eq!(amax.rate(0).unwrap(), 5e6);
        assert_eq!(amax.ratio(1).unwrap().median, 2.0);
        assert_eq!(amax.excess(1).unwrap().median, -2e-4);
        // The copy's fastest side moves 2000 bytes in 0.1 ms.
        assert!((document.share(amax, 0).unwrap() - 0.25).abs() < 1e-12);
        assert_eq!(document.share(&document.records[0], 0), None);
        assert_eq!(amax.flop_rate(0), None);
        assert_eq!(Record { flops: 400, ..amax.clone() }.flop_rate(1), Some(1e6));
    }

    #[test]
    fn a_side_that_ran_once_stands_beside_every_round() {
        let divided = Some(Divided { ranks: 2, alone: "peer".into(), each: None });
        let mut record = Record { divided, ..document().records[1].clone() };
        (record.sides[0].milliseconds, record.sides[1].milliseconds) = (vec![4.0, 2.0, 2.0], vec![8.0]);
        assert_eq!(record.efficiency(0).unwrap().median, 2.0);
        record.sides[1].milliseconds = vec![8.0, 4.0, 2.0];
        assert_eq!(record.efficiency(0).unwrap().median, 1.0);
    }

    #[test]
    fn sides_of_other_work_are_compared_by_rates() {
        let mut record = Record { flops: 400, ..document().records[1].clone() };
        record.sides[1].flops = Some(1600);
        // Twice the time for four times the work.
        assert_eq!(record.ratio(1).unwrap().median, 0.5);
        assert_eq!([0, 1].map(|side| record.flop_rate(side)), [Some(2e6), Some(4e6)]);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(text.matches(r#""flops":"#).count(), 2, "a side of the record's work says nothing of it: {text}");
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    }

    #[test]
    fn documents_survive_the_file_and_split_by_family() {
        let folder = tempfile::tempdir().unwrap();
        let document = document();
        let file = document.write(&folder.path().join("all.json")).unwrap().remove(0);
        assert_eq!(Document::read(&file).unwrap(), document);
        let files = document.write(&folder.path().join("by_family")).unwrap();
        let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["copy.json", "amax.json"]);
        assert_eq!(Document::read(&files[0]).unwrap().records.len(), 1);
        assert_eq!(Document::read(&files[1]).unwrap().records.len(), 2);
    }
}
