//! Markdown tables of a results file, so that the numbers in docs/performance are those that were measured.

use std::fmt::Write;

use crate::{
    results::{Clock, Document, Record},
    statistics::Quartiles,
};

/// The tables of a document, with where and how they were measured.
pub fn markdown(document: &Document) -> String {
    let mut text = heading(document);
    // What moves bytes is drawn in one table, by whichever clock.
    let is_timed = |record: &&Record| record.clock == Clock::DeviceEvents || record.bytes > 0;
    let (device, host): (Vec<_>, Vec<_>) = document.records.iter().partition(is_timed);
    let (products, device): (Vec<_>, Vec<_>) = device.into_iter().partition(|record| record.flops > 0);
    if !products.is_empty() {
        text += "\n| kernel | shape | us, median [quartiles] | TFLOP/s | peer | peer's us | peer's time / ours, by pairs |\n";
        text += "|---|---|---|---|---|---|---|\n";
        products.iter().for_each(|record| product_rows(&mut text, record));
    }
    if !device.is_empty() {
        text +=
            "\n| kernel | shape | us, median [quartiles] | TB/s | of the copy rate | peer | peer's us | peer's time / ours, by pairs |\n";
        text += "|---|---|---|---|---|---|---|---|\n";
        device.iter().for_each(|record| device_rows(&mut text, document, record));
    }
    if !host.is_empty() {
        text += "\n| path | ns a launch, median [quartiles] | over it, ns, by pairs |\n|---|---|---|\n";
        host.iter().for_each(|record| host_rows(&mut text, record));
    }
    text + &notes(document)
}

fn heading(document: &Document) -> String {
    let machine = &document.machine;
    let peers = match &machine.peers {
        Ok(versions) => format!("torch {} (CUDA {})", versions.torch, versions.cuda),
        Err(why) => format!("no peers: {why}"),
    };
    let reading = |query: &str| {
        let values = [&machine.before, &machine.after].map(|readings| readings.get(query).map_or("?", String::as_str));
        if values[0] == values[1] { values[0].to_owned() } else { values.join(" -> ") }
    };
    let rounds = document.records.iter().map(|record| record.order.len()).max().unwrap_or(0);
    let mut text = format!("{}, commit {}, {peers}, {rounds} rounds, seed {}.\n", machine.device, machine.commit, document.seed);
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
        let ratio = record.ratio(side).map_or_else(none, |ratio| spread(ratio, 1.0, 3));
        row(&record.sides[side].label, time, ratio);
    }
}

fn host_rows(text: &mut String, record: &Record) {
    for (side, names) in record.sides.iter().enumerate() {
        let time = record.seconds(side).map_or_else(none, |time| spread(time, 1e9, 0));
        let excess = if side == 0 { none() } else { record.excess(side).map_or_else(none, |excess| spread(excess, 1e9, 0)) };
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

fn spread(of: Quartiles, scale: f64, digits: usize) -> String {
    let [lower, median, upper] = [of.lower, of.median, of.upper].map(|value| format!("{:.digits$}", value * scale));
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
    use crate::{peers::Check, results::tests::document};

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
        assert!(markdown(&document).contains("| peer | 400000 [300000, 500000] | -200000 [-250000, -150000] |\n"));
    }
}
