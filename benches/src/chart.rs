//! Results as a drawing: for each comparison a bar of how many times our time its peer takes, in plain SVG.

use std::fmt::Write;

use crate::results::{Document, Record};

/// Pixels of a row, of the space above the rows, and of that left of the bars.
const ROW: usize = 18;
const TOP: usize = 56;
const LEFT: usize = 400;
/// Pixels of a ratio of 1, and the largest ratio that is drawn to scale.
const UNIT: f64 = 300.0;
const LARGEST: f64 = 2.0;
/// Pixels of the whole.
const WIDTH: usize = LEFT + (UNIT * LARGEST) as usize + 210;
/// The ratios that have a line: as fast as the peer, and the least that every shape should reach.
const LINES: [f64; 2] = [0.9, 1.0];

/// The comparisons of a document, one below the other, each with the first of its peers.
pub fn svg(document: &Document) -> String {
    let rows = document.records.len();
    let (bottom, height) = (TOP + rows * ROW, TOP + rows * ROW + 12);
    let mut text =
        format!("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" viewBox=\"0 0 {WIDTH} {height}\" ");
    text += "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
    let machine = &document.machine;
    let title = format!("Time of the peer over ours (longer is better), {}, commit {:.12}", machine.device, machine.commit);
    label(&mut text, 8, 20, "start", &title);
    for (number, record) in document.records.iter().enumerate() {
        bar(&mut text, record, TOP + number * ROW);
    }
    for ratio in LINES {
        let x = place(ratio);
        _ = writeln!(text, "<path d=\"M{x:.1} {}V{bottom}\" stroke=\"black\" stroke-dasharray=\"3 3\"/>", TOP - 6);
        // The two are near: each stands on its side.
        let (anchor, aside) = if ratio < 1.0 { ("end", -2) } else { ("start", 2) };
        label(&mut text, (x as usize).saturating_add_signed(aside), TOP - 10, anchor, &ratio.to_string());
    }
    text + "</svg>\n"
}

/// A record's name, its bar and its numbers.
fn bar(text: &mut String, record: &Record, y: usize) {
    label(text, LEFT - 8, y + 13, "end", &record.name());
    let rate = |side: usize| record.flop_rate(side).map_or_else(|| "-".to_owned(), |rate| format!("{:.0}", rate * 1e-12));
    let Some(ratio) = record.ratio(1).map(|ratio| ratio.median) else {
        let numbers = if record.seconds(0).is_some() { format!("no peer; {} TFLOP/s", rate(0)) } else { "not measured".to_owned() };
        return label(text, LEFT + 6, y + 13, "start", &numbers);
    };
    let colour = if ratio < LINES[0] {
        "#d9534f"
    } else if ratio < LINES[1] {
        "#f0ad4e"
    } else {
        "#5b9bd5"
    };
    let end = place(ratio);
    _ = writeln!(text, "<rect x=\"{LEFT}\" y=\"{}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>", y + 2, end - LEFT as f64, ROW - 4);
    let numbers = format!("{ratio:.2} ({} : {} TFLOP/s)", rate(0), rate(1));
    label(text, end as usize + 6, y + 13, "start", &numbers);
}

/// Where a ratio ends; one that is too large to be drawn ends at the largest.
fn place(ratio: f64) -> f64 {
    LEFT as f64 + UNIT * ratio.min(LARGEST)
}

fn label(text: &mut String, x: usize, y: usize, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    _ = writeln!(text, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{words}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::tests::document;

    #[test]
    fn a_drawing_of_a_document() {
        let mut document = document();
        document.records[1].flops = 50_000_000_000;
        document.records[0].kernel = "a < b".into();
        document.records[0].sides[1].milliseconds = vec![0.8; 3];
        let drawing = svg(&document);
        assert!(drawing.starts_with("<svg xmlns=") && drawing.ends_with("</svg>\n"));
        assert!(drawing.contains(">a &lt; b shape</text>"), "{drawing}");
        // 0.8 of the unit, below the lower line; the double, whose rates are 250 and 125.
        assert!(drawing.contains("width=\"240.0\" height=\"14\" fill=\"#d9534f\""), "{drawing}");
        assert!(drawing.contains("width=\"600.0\" height=\"14\" fill=\"#5b9bd5\""), "{drawing}");
        assert!(drawing.contains(">2.00 (250 : 125 TFLOP/s)</text>"), "{drawing}");
        for (ratio, x) in [("0.9", "670.0"), ("1", "700.0")] {
            assert!(drawing.contains(&format!("<path d=\"M{x} 50V92\"")) && drawing.contains(&format!(">{ratio}</text>")), "{drawing}");
        }
    }

    #[test]
    fn what_was_not_compared_says_so() {
        let mut document = document();
        document.records[0].sides.truncate(1);
        document.records[1].sides.iter_mut().for_each(|side| side.milliseconds.clear());
        let drawing = svg(&document);
        assert!(drawing.contains(">no peer; - TFLOP/s</text>") && drawing.contains(">not measured</text>"), "{drawing}");
        assert!(!drawing.contains("height=\"14\""));
    }
}
