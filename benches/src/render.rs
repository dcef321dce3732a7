//! Markdown tables of a results file, so that the numbers in docs/performance are those that were measured.

use std::{fmt::Write, iter};

use crate::{
    choices,
    results::{Clock, Document, RanksAre, RanksRecord, Record, SideRecord},
    statistics::{Interval, Quartiles},
};

/// The tables of a document, with where and how they were measured.
pub fn markdown(document: &Document) -> String {
    let mut text = heading(document);
    // What moves bytes is drawn in one table, by whichever clock.
    let is_timed = |record: &&Record| record.clock == Clock::DeviceEvents || record.bytes > 0;
    let (device, host): (Vec<_>, Vec<_>) = document.records.iter().partition(is_timed);
    let (held, device): (Vec<_>, Vec<_>) = device.into_iter().partition(|record| record.family == choices::FAMILY);
    let (divided, device): (Vec<_>, Vec<_>) = device.into_iter().partition(|record| record.divided.is_some());
    let (limited, device): (Vec<_>, Vec<_>) = device.into_iter().partition(|record| !record.limit.is_empty());
    let (chosen, device): (Vec<_>, Vec<_>) = device.into_iter().partition(|record| record.chosen.is_some());
    let (products, device): (Vec<_>, Vec<_>) = device.into_iter().partition(|record| record.flops > 0);
    if !products.is_empty() {
        text += "\n| kernel | shape | us, median [quartiles] | TFLOP/s | peer | peer's us | peer's time / ours, by pairs [95 %] |\n";
        text += "|---|---|---|---|---|---|---|\n";
        products.iter().for_each(|record| product_rows(&mut text, record));
    }
    if !limited.is_empty() {
        text += "\n| kernel | shape | how | us, median [quartiles] | TFLOP/s | of the limit | its time / the first's, by pairs [95 %] |\n";
        text += "|---|---|---|---|---|---|---|\n";
        limited.iter().for_each(|record| limited_rows(&mut text, record));
    }
    if !divided.is_empty() {
        text += "\n| pass | shape | how | ms, median [quartiles] | TFLOP/s a GPU | efficiency, by pairs [95 %] | the same of the slowest GPU | of the limit | idle ms of each rank | MB received | MB taken | schedules |\n";
        text += "|---|---|---|---|---|---|---|---|---|---|---|---|\n";
        divided.iter().for_each(|record| divided_rows(&mut text, record));
        text += &best(&divided);
    }
    if !held.is_empty() {
        text += &choices::markdown(&held);
    }
    if !chosen.is_empty() {
        text += "\n| kernel | shape | chosen | us, medians | its time / the others', by pairs [95 %] | its time / the fastest's |\n";
        text += "|---|---|---|---|---|---|\n";
        chosen.iter().for_each(|record| chosen_row(&mut text, record));
        text += &most(&chosen);
    }
    if !device.is_empty() {
        text += "\n| kernel | shape | us, median [quartiles] | TB/s | of the copy rate | peer | peer's us | peer's time / ours, by pairs [95 %] |\n";
        text += "|---|---|---|---|---|---|---|---|\n";
        device.iter().for_each(|record| device_rows(&mut text, document, record));
    }
    if !host.is_empty() {
        text += "\n| path | ns a launch, median [quartiles] | over it, ns, by pairs [95 %] |\n|---|---|---|\n";
        host.iter().for_each(|record| host_rows(&mut text, record));
    }
    text + &notes(document)
}

fn heading(document: &Document) -> String {
    let machine = &document.machine;
    let peers = match &machine.peers {
        Ok(versions) => {
            let torch = format!("torch {} (CUDA {})", versions.torch, versions.cuda);
            let libraries = versions.libraries.iter().map(|(name, version)| format!("{name} {version}"));
            iter::once(torch).chain(libraries).collect::<Vec<_>>().join(", ")
        }
        Err(why) => format!("no peers: {why}"),
    };
    let reading = |query: &str| {
        let values = [&machine.before, &machine.after].map(|readings| readings.get(query).map_or("?", String::as_str));
        if values[0] == values[1] { values[0].to_owned() } else { values.join(" -> ") }
    };
    let rounds = document.records.iter().map(|record| record.order.len()).max().unwrap_or(0);
    let mut text = format!("{}, commit {}, {peers}, {rounds} rounds, seed {}.\n", machine.device, machine.commit, document.seed);
    if let Some(ranks) = document.ranks {
        let are = match ranks {
            RanksAre::Threads => "threads of one process",
            RanksAre::Processes => "processes",
        };
        _ = writeln!(text, "Ranks are {are}.");
    }
    if !machine.before.is_empty() {
        let (driver, sm, power) = (reading("driver_version"), reading("clocks.sm"), reading("power.draw"));
        _ = writeln!(text, "Driver {driver}; SM clock {sm}, power {power} (before -> after).");
    }
    text
}

fn device_rows(text: &mut String, document: &Document, record: &Record) {
    let rate = record.rate(0).map_or_else(none, |rate| format!("{:.2}", rate * 1e-12));
    let share = document.share(record, 0).map_or_else(none, percent);
    rows(text, record, &format!("{rate} | {share}"));
}

/// Rows of what the tensor cores bound.
fn product_rows(text: &mut String, record: &Record) {
    rows(text, record, &record.flop_rate(0).map_or_else(none, |rate| format!("{:.0}", rate * 1e-12)));
}

/// A row for each peer, with these cells between our time and its.
fn rows(text: &mut String, record: &Record, rates: &str) {
    let ours = record.seconds(0).map_or_else(none, |time| spread(time, 1e6, 1));
    let mut row = |peer: &str, time: String, ratio: String| {
        _ = writeln!(text, "| {} | {} | {ours} | {rates} | {peer} | {time} | {ratio} |", record.kernel, record.shape);
    };
    if record.sides.len() < 2 {
        row("none ran", none(), none());
    }
    for side in 1..record.sides.len() {
        let time = record.seconds(side).map_or_else(none, |time| spread(time, 1e6, 1));
        let ratio = record.ratio(side).map_or_else(none, |ratio| sure(ratio, 1.0, 3));
        row(&record.sides[side].label, time, ratio);
    }
}

/// A row for each side of what a slowest part limits.
fn limited_rows(text: &mut String, record: &Record) {
    for (side, of) in record.sides.iter().enumerate() {
        let chosen = if record.chosen.as_ref() == Some(&of.label) { ", chosen" } else { "" };
        let time = record.seconds(side).map_or_else(none, |time| spread(time, 1e6, 1));
        let rate = record.flop_rate(side).filter(|rate| *rate > 0.0).map_or_else(none, |rate| format!("{:.0}", rate * 1e-12));
        let share = record.of_limit(side).map_or_else(none, percent);
        let ratio = record.ratio(side).map_or_else(none, |ratio| sure(ratio, 1.0, 3));
        _ = writeln!(text, "| {} | {} | {}{chosen} | {time} | {rate} | {share} | {ratio} |", record.kernel, record.shape, of.label);
    }
}

/// A row for each side of what ranks share.
fn divided_rows(text: &mut String, record: &Record) {
    for (side, of) in record.sides.iter().enumerate() {
        let time = record.seconds(side).map_or_else(none, |time| spread(time, 1e3, 3));
        let rate = record.flop_rate_of_gpu(side).filter(|rate| *rate > 0.0).map_or_else(none, |rate| format!("{:.0}", rate * 1e-12));
        let efficiency = record.efficiency(side).filter(|_| record.is_work(side)).map_or_else(none, |of| sure(of, 100.0, 1) + " %");
        let slowest = record.efficiency_of_slowest(side).filter(|_| record.is_work(side)).map_or_else(none, |of| sure(of, 100.0, 1) + " %");
        let share = record.of_limit(side).map_or_else(none, percent);
        let idle: Vec<_> = of.ranks.iter().flat_map(RanksRecord::idle_medians).map(|idle| format!("{idle:.3}")).collect();
        let [received, taken] = match of.ranks.as_ref().filter(|ranks| !ranks.passes.is_empty()) {
            Some(ranks) => [ranks.received(), ranks.memory].map(|bytes| format!("{:.1}", bytes as f64 * 1e-6)),
            None => [none(), none()],
        };
        let schedules: Vec<_> = of.ranks.iter().flat_map(|ranks| &ranks.passes).map(|pass| pass.schedule.as_str()).collect();
        let [idle, schedules] = [idle.join(", "), schedules.join(", ")].map(|cell| if cell.is_empty() { none() } else { cell });
        _ = writeln!(
            text,
            "| {} | {} | {} | {time} | {rate} | {efficiency} | {slowest} | {share} | {idle} | {received} | {taken} | {schedules} |",
            record.kernel, record.shape, of.label
        );
    }
}

/// The fastest schedules by medians: of each record and, of the last pass of a shape, by the difference of two of its records.
fn best(records: &[&Record]) -> String {
    let mut text = String::from("\n");
    let planned = |record: &Record| -> Vec<(String, f64)> {
        let sides = record.sides.iter().enumerate();
        let of = |(side, of): (usize, &SideRecord)| {
            let ranks = of.ranks.as_ref().filter(|ranks| !ranks.passes.is_empty())?;
            // What multiplies 8 bits is faster than any schedule of 16.
            let is_fp8 = ranks.passes.iter().flat_map(|pass| &pass.kernels).any(|kernel| kernel.contains("fp8"));
            (!is_fp8).then_some(())?;
            Some((of.label.clone(), record.seconds(side)?.median * 1e3))
        };
        sides.filter_map(of).collect()
    };
    let mut line = |record: &Record, what: &str, times: Vec<(String, f64)>| {
        if let Some((label, time)) = times.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)) {
            _ = writeln!(text, "- {}: {what} fastest by {label}, {time:.3} ms", record.shape);
        }
    };
    for record in records {
        line(record, &record.kernel, planned(record));
        let passes = |record: &Record| record.sides.iter().filter_map(|side| Some(side.ranks.as_ref()?.passes.len())).max();
        let before = records.iter().find(|other| other.shape == record.shape && passes(other) < passes(record));
        if let Some(before) = before {
            let less = |(label, time): (String, f64)| {
                let (_, first) = planned(before).into_iter().find(|(of, _)| *of == label)?;
                Some((label, time - first))
            };
            line(record, "the backward pass, by the difference,", planned(record).into_iter().filter_map(less).collect());
        }
    }
    text
}

/// A row of what a model has chosen among.
fn chosen_row(text: &mut String, record: &Record) {
    let times: Vec<_> = (0..record.sides.len()).filter_map(|side| Some((side, record.seconds(side)?.median))).collect();
    let text_of = |(side, time): &(usize, f64)| format!("{} {:.1}", record.sides[*side].label, time * 1e6);
    let ratio_of = |side: usize| Some(format!("{} {:.3}", record.sides[side].label, record.chosen_over(side)?.median));
    let others = times.iter().filter(|(side, _)| Some(&record.sides[*side].label) != record.chosen.as_ref());
    let ratios: Vec<_> = others.filter_map(|(side, _)| ratio_of(*side)).collect();
    let chosen = record.chosen.as_deref().unwrap_or("none");
    let fastest = record.chosen_over_fastest().map_or_else(none, |ratio| format!("{ratio:.3}"));
    let times: Vec<_> = times.iter().map(text_of).collect();
    _ = writeln!(text, "| {} | {} | {chosen} | {} | {} | {fastest} |", record.kernel, record.shape, times.join(", "), ratios.join(", "));
}

/// The largest ratios of all shapes.
fn most(records: &[&Record]) -> String {
    let mut most: Vec<(String, f64)> = Vec::new();
    let mut add = |label: &str, ratio: f64| match most.iter_mut().find(|(of, _)| of == label) {
        Some((_, largest)) => *largest = largest.max(ratio),
        None => most.push((label.to_owned(), ratio)),
    };
    for record in records {
        let others = (0..record.sides.len()).filter(|side| Some(&record.sides[*side].label) != record.chosen.as_ref());
        others
            .filter_map(|side| Some((side, record.chosen_over(side)?)))
            .for_each(|(side, ratio)| add(&record.sides[side].label, ratio.median));
    }
    records.iter().filter_map(|record| record.chosen_over_fastest()).for_each(|ratio| add("the fastest", ratio));
    let most: Vec<_> = most.iter().map(|(label, ratio)| format!("{ratio:.3} of {label}")).collect();
    format!("\nThe chosen one takes at most {}.\n", most.join(", "))
}

fn host_rows(text: &mut String, record: &Record) {
    for (side, names) in record.sides.iter().enumerate() {
        let time = record.seconds(side).map_or_else(none, |time| spread(time, 1e9, 0));
        let excess = if side == 0 { none() } else { record.excess(side).map_or_else(none, |excess| sure(excess, 1e9, 0)) };
        _ = writeln!(text, "| {} | {time} | {excess} |", names.label);
    }
}

/// What did not run, and what ran but computes something else.
fn notes(document: &Document) -> String {
    let mut notes = String::new();
    for record in &document.records {
        for missing in &record.missing {
            _ = writeln!(notes, "- {}: peer {} did not run: {}", record.name(), missing.peer, missing.why);
        }
        for side in &record.sides {
            if let Some(check) = side.check.as_ref().filter(|check| !check.equal) {
                _ = writeln!(notes, "- {}: {} computes something else: {}", record.name(), side.label, check.detail);
            }
        }
    }
    if notes.is_empty() { notes } else { format!("\n{notes}") }
}

/// A median and its quartiles.
fn spread(of: Quartiles, scale: f64, digits: usize) -> String {
    between([of.lower, of.median, of.upper], scale, digits)
}

/// A median and its interval.
fn sure(of: Interval, scale: f64, digits: usize) -> String {
    between([of.lower, of.median, of.upper], scale, digits)
}

fn between(values: [f64; 3], scale: f64, digits: usize) -> String {
    let [lower, median, upper] = values.map(|value| format!("{:.digits$}", value * scale));
    format!("{median} [{lower}, {upper}]")
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn none() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        peers::Check,
        results::{Divided, PassRecord, tests::document},
    };

    #[test]
    fn tables_of_a_document() {
        let mut document = document();
        document.records[1].sides[1].check = Some(Check { equal: false, detail: "amax: 4 of 4 bytes differ".into() });
        let text = markdown(&document);
        assert!(text.starts_with("test device, commit unknown, no peers: not started, 3 rounds, seed 1.\n"), "{text}");
        let row = "| amax | shape | 200.0 [150.0, 250.0] | 0.00 | 25.0 % | peer | 400.0 [300.0, 500.0] | 2.000 [2.000, 2.000] |\n";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("- amax shape: peer computes something else: amax: 4 of 4 bytes differ\n"), "{text}");
        document.records[1].flops = 50_000_000_000;
        let text = markdown(&document);
        assert!(
            text.contains("| amax | shape | 200.0 [150.0, 250.0] | 250 | peer | 400.0 [300.0, 500.0] | 2.000 [2.000, 2.000] |\n"),
            "{text}"
        );
        assert!(text.contains("| us, median [quartiles] | TFLOP/s | peer |") && text.contains("| TB/s | of the copy rate |"), "{text}");
        document.records.iter_mut().for_each(|record| record.clock = Clock::Host);
        assert_eq!(markdown(&document), text, "what moves bytes is in one table by either clock");
        document.records.iter_mut().for_each(|record| (record.bytes, record.flops) = (0, 0));
        assert!(markdown(&document).contains("| peer | 400000 [300000, 500000] | -200000 [-300000, -100000] |\n"));
    }
    #[test]
    fn limits_and_choices_have_tables_of_their_own() {
        let mut document = document();
        document.records.remove(0);
        let record = &mut document.records[0];
        record.flops = 50_000_000_000;
        record.limit = vec!["oxtile".into(), "wire".into()];
        record.chosen = Some("peer".into());
        record.sides.push(SideRecord { milliseconds: vec![1.5, 3.0, 4.5], flops: Some(0), ..SideRecord::new("wire") });
        let text = markdown(&document);
        assert!(text.contains("| amax | shape | peer, chosen | 400.0 [300.0, 500.0] | 125 | 75.0 % | 2.000 [2.000, 2.000] |\n"), "{text}");
        assert!(text.contains("| amax | shape | wire | 300.0 [225.0, 375.0] | - | 100.0 % | 1.500 [1.500, 1.500] |\n"), "{text}");
        document.records[0].limit.clear();
        let text = markdown(&document);
        let row = "| amax | shape | peer | oxtile 200.0, peer 400.0, wire 300.0 | oxtile 2.000, wire 1.333 | 2.000 |\n";
        assert!(text.contains(row) && !text.contains("of the limit"), "{text}");
        assert!(text.contains("The chosen one takes at most 2.000 of oxtile, 1.333 of wire, 2.000 of the fastest.\n"), "{text}");
    }

    #[test]
    fn shared_work_is_held_against_one_gpu() {
        let mut document = document();
        let forward = &mut document.records[1];
        // 0.2 ms of two ranks and 0.4 ms of one GPU: all of its rate.
        forward.flops = 50_000_000_000;
        forward.divided = Some(Divided { ranks: 2, alone: "peer".into(), each: Some("each".into()) });
        forward.limit = vec!["peer".into(), "wire".into()];
        let pass = PassRecord { schedule: "ring".into(), kernels: Vec::new(), launches: 2, received: 3_000_000, why: String::new() };
        let ranks =
            RanksRecord { idle: vec![vec![0.0, 0.5], vec![0.0, 0.7], vec![0.0, 0.6]], passes: vec![pass.clone()], memory: 5_000_000 };
        forward.sides[0].ranks = Some(ranks.clone());
        forward.sides.push(SideRecord { milliseconds: vec![3.0, 3.0, 3.0], flops: Some(0), ..SideRecord::new("wire") });
        forward.sides.push(SideRecord { milliseconds: vec![3.3, 4.4, 5.5], ..SideRecord::new("each") });
        let mut both = Record { kernel: "both".into(), ..forward.clone() };
        both.sides[0].milliseconds = vec![4.0, 5.0, 6.0];
        both.sides[0].ranks = Some(RanksRecord { passes: vec![pass.clone(), pass], ..ranks });
        document.records.push(both);
        let text = markdown(&document);
        let ours = "| amax | shape | oxtile | 0.200 [0.150, 0.250] | 125 | 100.0 [100.0, 100.0] % | 110.0 [91.7, 165.0] % | 150.0 % | 0.000, 0.600 | 3.0 | 5.0 | ring |\n";
        assert!(text.contains(ours), "{text}");
        assert!(text.contains("| amax | shape | peer | 0.400 [0.300, 0.500] | 125 | - | - | 150.0 % | - | - | - | - |\n"), "{text}");
        assert!(text.contains("| amax | shape | wire | 0.300 [0.300, 0.300] | - | - | - | 100.0 % | - | - | - | - |\n"), "{text}");
        assert!(text.contains("- shape: amax fastest by oxtile, 0.200 ms\n- shape: both fastest by oxtile, 0.500 ms\n"), "{text}");
        assert!(text.contains("- shape: the backward pass, by the difference, fastest by oxtile, 0.300 ms\n"), "{text}");
        let json = serde_json::to_string(&document).unwrap();
        assert_eq!(serde_json::from_str::<Document>(&json).unwrap(), document);
    }
}
