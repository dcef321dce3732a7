//! Text for people: file content made safe to print, numbers with units, columns that line up.

use std::{borrow::Cow, fmt::Write as _};

/// `text` with control and bidirectional characters escaped: a name from a file must not drive the terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let unsafe_to_print =
        |c: char| c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(unsafe_to_print) {
        return Cow::Borrowed(text);
    }
    text.chars().map(|c| if unsafe_to_print(c) { c.escape_unicode().to_string() } else { c.to_string() }).collect::<String>().into()
}

/// At most so many characters, the last an ellipsis if there were more.
pub fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.into(),
        Some(_) => text.chars().take(most - 1).chain(['…']).collect(),
    }
}

/// Text as XML takes it.
pub fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            // No XML document may hold them, in whatever form.
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => {
                let _ = write!(escaped, "\\u{{{:x}}}", u32::from(c));
            }
            c => escaped.push(c),
        }
    }
    escaped
}

/// A shape as `30522x384`; a tensor of no dimension is a `scalar`.
pub fn shape(dimensions: &[u64]) -> String {
    if dimensions.is_empty() {
        return "scalar".into();
    }
    dimensions.iter().map(u64::to_string).collect::<Vec<_>>().join("x")
}

/// A size in bytes with a decimal unit: `999 B`, `90.9 MB`.
pub fn bytes(count: u64) -> String {
    scaled(count as f64, &["B", "kB", "MB", "GB", "TB"])
}

/// A count with a decimal unit: `512`, `22.7 M`.
pub fn count(count: u64) -> String {
    scaled(count as f64, &["", "k", "M", "G", "T"]).trim_end().to_string()
}

fn scaled(value: f64, units: &[&str]) -> String {
    // 999.95 would print as 1000.0 of the smaller unit.
    let step = (0..units.len() - 1).find(|&i| value / 1000f64.powi(i as i32) < 999.95).unwrap_or(units.len() - 1);
    let digits = if step == 0 { 0 } else { 1 };
    format!("{:.digits$} {}", value / 1000f64.powi(step as i32), units[step])
}

/// A duration: `0.42 ms`, `812 ms`, `7.31 s`, `3 min 20 s`.
pub fn seconds(seconds: f64) -> String {
    match seconds {
        s if s < 0.00995 => format!("{:.2} ms", s * 1e3),
        s if s < 0.9995 => format!("{:.0} ms", s * 1e3),
        s if s < 99.95 => format!("{s:.2} s"),
        s => format!("{} min {:02} s", s.round() as u64 / 60, s.round() as u64 % 60),
    }
}

/// A share as a percentage. What is not zero does not print as zero.
pub fn percent(part: u64, whole: u64) -> String {
    match part as f64 / whole as f64 * 100.0 {
        _ if whole == 0 || part == 0 => "0".into(),
        p if p < 0.001 => "<0.001".into(),
        p => format!("{p:.3}"),
    }
}

/// A tensor value: four significant digits, exponent where it helps.
pub fn value(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => value.to_string(),
        0.0 => "0".into(),
        magnitude if (1e-3..1e5).contains(&magnitude) => {
            let before_point = magnitude.log10().floor() as i32;
            format!("{value:.*}", (3 - before_point).max(0) as usize)
        }
        _ => format!("{value:.3e}"),
    }
}

/// Which way a column is aligned.
#[derive(Clone, Copy)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows of cells under a heading, printed with two spaces between columns.
pub struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these headings.
    pub fn new(columns: &[(&'static str, Align)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds one row, a cell a column.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.columns.len(), "a cell for each column");
        self.rows.push(cells.into());
    }

    /// Whether no row was added.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.to_string()).collect();
        let width = |i: usize| {
            let cells = self.rows.iter().chain([&heading]).map(|row| row[i].chars().count());
            cells.max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for row in [&heading].into_iter().chain(&self.rows) {
            let mut line = String::new();
            for ((cell, width), (_, align)) in row.iter().zip(&widths).zip(&self.columns) {
                let cell = match align {
                    Align::Left => format!("{cell:<width$}  "),
                    Align::Right => format!("{cell:>width$}  "),
                };
                line.push_str(&cell);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_carry_their_unit() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(90_869_912), "90.9 MB");
        assert_eq!(bytes(999_960), "1.0 MB");
        assert_eq!(count(512), "512");
        assert_eq!(count(22_713_216), "22.7 M");
        assert_eq!(seconds(0.000_42), "0.42 ms");
        assert_eq!(seconds(0.812), "812 ms");
        assert_eq!(seconds(7.31), "7.31 s");
        assert_eq!(seconds(200.0), "3 min 20 s");
        assert_eq!(percent(0, 10), "0");
        assert_eq!(percent(1, 10_000_000), "<0.001");
        assert_eq!(percent(0, 0), "0");
        assert_eq!(percent(1, 2), "50.000");
        assert_eq!(value(0.123_456), "0.1235");
        assert_eq!(value(448.0), "448.0");
        assert_eq!(value(-3.4e38), "-3.400e38");
        assert_eq!(value(f64::INFINITY), "inf");
    }

    #[test]
    fn texts_of_pictures_are_safe_and_short() {
        assert_eq!(escaped("a<b>&\"\u{1b}"), "a&lt;b&gt;&amp;&quot;\\u{1b}");
        assert_eq!(shortened("abcdef", 4), "abc…");
        assert_eq!(shortened("abcd", 4), "abcd");
    }

    #[test]
    fn names_cannot_drive_the_terminal() {
        assert_eq!(printable("encoder.weight"), "encoder.weight");
        assert_eq!(printable("a\u{1b}[2Jb\u{202e}"), "a\\u{1b}[2Jb\\u{202e}");
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[("tensor", Align::Left), ("SNR dB", Align::Right)]);
        table.row(["a".into(), "31.5".into()]);
        table.row(["longer name".into(), "-".into()]);
        assert_eq!(table.to_string(), "tensor       SNR dB\na              31.5\nlonger name       -\n");
    }
}
