//! What a model chose, held against the fastest of all else that could have been taken.

use std::{collections::BTreeSet, fmt::Write};

use crate::{results::Record, statistics::Interval};

/// The family of what context parallelism chooses.
pub const FAMILY: &str = "context_parallel_auto";

/// The fastest other takes at least this share of the chosen one's time: what is asked for.
const LEAST: f64 = 0.98;

/// A choice. Times are milliseconds of a call, medians of the rounds.
struct Choice<'r> {
    chosen: &'r str,
    time: f64,
    /// The fastest other, its time, and its time over the chosen one's, round by round. None where nothing else could be taken.
    other: Option<(&'r str, f64, Interval)>,
}

impl<'r> Choice<'r> {
    /// That of a record, if it was measured.
    fn of(record: &'r Record) -> Option<Self> {
        let time = |side: usize| Some(record.seconds(side)?.median * 1e3);
        let chosen = record.sides.iter().position(|side| Some(&side.label) == record.chosen.as_ref())?;
        let others = (0..record.sides.len()).filter(|side| *side != chosen);
        let fastest = others.filter_map(|side| Some((side, time(side)?))).min_by(|a, b| a.1.total_cmp(&b.1));
        let other = fastest.and_then(|(side, time)| {
            let (other, chosen) = (&record.sides[side], &record.sides[chosen]);
            let ratios = other.milliseconds.iter().zip(&chosen.milliseconds).map(|(other, chosen)| other / chosen);
            Some((other.label.as_str(), time, Interval::of(ratios)?))
        });
        Some(Self { chosen: &record.sides[chosen].label, time: time(chosen)?, other })
    }
}

/// A table of choices, and a line on all of them.
pub fn markdown(records: &[&Record]) -> String {
    let mut text =
        String::from("\n| pass | configuration | chosen | ms | fastest other | its ms | its time / the chosen one's, by pairs [95 %] |\n");
    text += "|---|---|---|---|---|---|---|\n";
    let mut ratios: Vec<(f64, &Record)> = Vec::new();
    for &record in records {
        let cells = match Choice::of(record) {
            None => "not measured | - | - | - | -".to_owned(),
            Some(Choice { chosen, time, other: None }) => format!("{chosen} | {time:.3} | none | - | -"),
            Some(Choice { chosen, time, other: Some((other, other_time, ratio)) }) => {
                ratios.push((ratio.median, record));
                let Interval { lower, median, upper } = ratio;
                format!("{chosen} | {time:.3} | {other} | {other_time:.3} | {median:.3} [{lower:.3}, {upper:.3}]")
            }
        };
        _ = writeln!(text, "| {} | {} | {cells} |", record.kernel, record.shape);
    }
    text + &summary(&ratios)
}

/// How many there are, how many are below what is asked for, the least and the geometric mean.
fn summary(ratios: &[(f64, &Record)]) -> String {
    let Some((least, record)) = ratios.iter().min_by(|a, b| a.0.total_cmp(&b.0)) else { return String::new() };
    let configurations: BTreeSet<&str> = ratios.iter().map(|(_, record)| record.shape.as_str()).collect();
    let below = ratios.iter().filter(|(ratio, _)| *ratio < LEAST).count();
    let mean = (ratios.iter().map(|(ratio, _)| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
    format!(
        "\n{} passes of {} configurations: {below} of them below {LEAST}, at least {least:.3} ({}), geometric mean {mean:.3}.\n",
        ratios.len(),
        configurations.len(),
        record.name()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{SideRecord, tests::document};

    #[test]
    fn a_choice_is_held_against_the_fastest_other() {
        let measured = Record { family: FAMILY.into(), chosen: Some("oxtile".into()), ..document().records[1].clone() };
        let mut slower = Record { kernel: "slower".into(), ..measured.clone() };
        slower.sides.push(SideRecord { milliseconds: vec![0.9, 1.8, 2.7], ..SideRecord::new("third") });
        let mut alone = measured.clone();
        alone.sides.truncate(1);
        let failed = Record { sides: Vec::new(), chosen: None, ..measured.clone() };
        let text = markdown(&[&measured, &slower, &alone, &failed]);
        // 10 launches a round.
        assert!(text.contains("\n| amax | shape | oxtile | 0.200 | peer | 0.400 | 2.000 [2.000, 2.000] |\n"), "{text}");
        assert!(text.contains("\n| slower | shape | oxtile | 0.200 | third | 0.180 | 0.900 [0.900, 0.900] |\n"), "{text}");
        assert!(
            text.contains("\n| amax | shape | oxtile | 0.200 | none | - | - |\n| amax | shape | not measured | - | - | - | - |\n"),
            "{text}"
        );
        let summary = "\n2 passes of 1 configurations: 1 of them below 0.98, at least 0.900 (slower shape), geometric mean 1.342.\n";
        assert!(text.ends_with(summary), "{text}");
        assert!(!markdown(&[&failed]).contains("geometric"));
    }
}
