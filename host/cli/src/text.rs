//! Text for people: file content made safe to print, numbers with units, columns that line up.

use std::{borrow::Cow, fmt::Write as _, path::Path};

/// The most characters of a table's cell.
const CELL: usize = 120;

/// `text` with control and bidirectional characters escaped: a name from a file must not drive the terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    escaped_where(text, drives_the_terminal)
}

/// The same of a text of several lines, which it stays.
pub fn printable_lines(text: &str) -> Cow<'_, str> {
    escaped_where(text, |c| c != '\n' && drives_the_terminal(c))
}

/// A path for people.
pub fn path(path: impl AsRef<Path>) -> String {
    printable(&path.as_ref().to_string_lossy()).into()
}

/// Control characters, ends of lines and paragraphs, and marks of the direction of writing.
fn drives_the_terminal(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escaped_where(text: &str, is_unsafe: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    text.chars().map(|c| if is_unsafe(c) { c.escape_unicode().to_string() } else { c.to_string() }).collect::<String>().into()
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

    /// Adds one row, a cell a column. Cells come from files: they are shortened, and what would drive the terminal is escaped.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        assert_eq!(N, self.columns.len(), "a cell for each column");
        // Shortened before too: a name may have megabytes.
        self.rows.push(cells.map(|cell| shortened(&printable(&shortened(&cell, CELL)), CELL)).into());
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
                let padding = " ".repeat(width - cell.chars().count());
                match align {
                    Align::Left => line.extend([cell, &*padding, "  "]),
                    Align::Right => line.extend([&*padding, cell, "  "]),
                }
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
        assert_eq!(printable("\u{61c}\u{2028}\u{2029}\u{9b}\n"), "\\u{61c}\\u{2028}\\u{2029}\\u{9b}\\u{a}");
        assert_eq!(printable_lines("a\n\u{7}\n"), "a\n\\u{7}\n");
        assert_eq!(path("a\n\u{1b}"), "a\\u{a}\\u{1b}");
    }

    /// However long and hostile cells are, lines are short and have no control characters.
    #[test]
    fn tables_hold_any_text() {
        let mut table = Table::new(&[("a", Align::Left), ("b", Align::Right)]);
        table.row(["x".repeat(70_000), "\u{1b}[2J\n".repeat(70_000)]);
        table.row(["\u{202e}é".repeat(100), String::new()]);
        let text = table.to_string();
        assert_eq!(text.lines().count(), 3);
        assert!(text.lines().all(|line| line.chars().count() <= 2 * (CELL + 2) && !line.contains(drives_the_terminal)), "{text}");
    }

    /// Errors show paths by [`path`], which escapes what would drive the terminal.
    #[test]
    fn no_error_shows_a_path_as_it_is() {
        let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        let mut files = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).expect("the sources") {
                let entry = entry.expect("an entry").path();
                if entry.is_dir() {
                    folders.push(entry);
                    continue;
                }
                files += 1;
                let text = std::fs::read_to_string(&entry).expect("text");
                for attribute in text.split("#[error(").skip(1).filter_map(|rest| rest.split(")]").next()) {
                    assert!(!attribute.contains(concat!(".display", "()")), "{}: {attribute}", entry.display());
                }
            }
        }
        assert!(files > 80, "{files} files");
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&[("tensor", Align::Left), ("SNR dB", Align::Right)]);
        table.row(["a".into(), "31.5".into()]);
        table.row(["longer name".into(), "-".into()]);
        assert_eq!(table.to_string(), "tensor       SNR dB\na              31.5\nlonger name       -\n");
    }
}
