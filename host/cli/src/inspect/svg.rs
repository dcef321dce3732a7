//! Histograms of magnitudes as an SVG picture: no scripts, no external fonts, the same bytes for the same numbers, readable on light
//! and on dark ground.

use std::fmt;

use super::Magnitudes;
use crate::text::{escaped, shortened};

/// Width of the picture, and the edges of its plots, in pixels.
const WIDTH: u32 = 960;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 936.0;
/// Height of a plot's area, and of a panel with its title, legend and axis.
const PLOT: f64 = 220.0;
const PANEL: f64 = 356.0;
/// Height of the picture's title.
const HEAD: f64 = 56.0;
/// Octaves that are drawn one by one; smaller numbers are one more bar.
const OCTAVES: i32 = 64;
/// Decades of the vertical axis at most.
const DECADES: i32 = 8;

/// A picture: panels under each other.
#[derive(Debug)]
pub struct Picture {
    /// What it is about.
    pub title: String,
    /// The panels.
    pub panels: Vec<Panel>,
}

/// One plot.
#[derive(Debug)]
pub struct Panel {
    /// Its title.
    pub title: String,
    /// What is on the horizontal axis.
    pub horizontal: String,
    /// What is on the vertical axis.
    pub vertical: String,
    /// What is drawn, the first one in the background.
    pub series: Vec<Series>,
}

/// One set of numbers.
#[derive(Debug)]
pub struct Series {
    /// Its colour: `before`, `after` or `scales`.
    pub class: &'static str,
    /// Its line in the legend.
    pub label: String,
    /// The numbers.
    pub magnitudes: Magnitudes,
}

/// Where shares and octaves of a panel are drawn.
struct Axes {
    top: f64,
    /// The octaves drawn one by one.
    octaves: [i32; 2],
    /// Whether there are smaller ones.
    has_smaller: bool,
    has_zeros: bool,
    /// Decades below 100 %.
    decades: i32,
    /// Width of a bar with its gap.
    step: f64,
}

/// A bar: its place from the left, in steps, and the share of the numbers.
struct Bar {
    place: f64,
    share: f64,
    words: String,
}

const STYLE: &str = "\
svg{--ground:#fff;--ink:#1f2328;--soft:#59636e;--line:#d8dee4;--before:#8c959f;--after:#0969da;--scales:#1a7f37}
@media(prefers-color-scheme:dark){svg{--ground:#0d1117;--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--before:#7d8590;--after:#58a6ff;--scales:#3fb950}}
text{font-family:system-ui,sans-serif;font-size:13px;fill:var(--soft)}
.title{font-size:19px;font-weight:600;fill:var(--ink)}
.panel{font-size:15px;font-weight:600;fill:var(--ink)}
.label{fill:var(--ink)}
.grid{stroke:var(--line);stroke-width:1}
.axis{stroke:var(--soft);stroke-width:1}
.before{fill:var(--before);fill-opacity:.45}
.after{fill:var(--after);fill-opacity:.8}
.scales{fill:var(--scales);fill-opacity:.8}
";

impl fmt::Display for Picture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let height = HEAD + PANEL * self.panels.len() as f64;
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="title">"#
        )?;
        writeln!(f, "<title id=\"title\">{}</title>", escaped(&self.title))?;
        writeln!(f, "<style>\n{STYLE}</style>")?;
        writeln!(f, r#"<rect width="{WIDTH}" height="{height}" style="fill:var(--ground)"/>"#)?;
        writeln!(f, r#"<text class="title" x="24" y="36">{}</text>"#, escaped(&shortened(&self.title, 88)))?;
        for (index, panel) in self.panels.iter().enumerate() {
            panel.draw(f, HEAD + PANEL * index as f64)?;
        }
        writeln!(f, "</svg>")
    }
}

impl Panel {
    fn draw(&self, f: &mut fmt::Formatter<'_>, top: f64) -> fmt::Result {
        writeln!(f, r#"<text class="panel" x="24" y="{}">{}</text>"#, top + 18.0, escaped(&self.title))?;
        for (index, series) in self.series.iter().enumerate() {
            let y = top + 40.0 + 20.0 * index as f64;
            writeln!(f, r#"<rect class="{}" x="{LEFT}" y="{}" width="14" height="12"/>"#, series.class, y - 11.0)?;
            let label = shortened(&series.label, 120);
            writeln!(f, r#"<text class="label" x="{}" y="{y}">{}</text>"#, LEFT + 22.0, escaped(&label))?;
        }
        let axes = Axes::of(&self.series, top + 74.0);
        axes.draw_vertical(f, &self.vertical)?;
        for (index, series) in self.series.iter().enumerate() {
            // The one in front is narrower, so that the one in the background shows.
            let width = axes.step * if index + 1 < self.series.len() { 0.92 } else { 0.56 };
            writeln!(f, r#"<g class="{}">"#, series.class)?;
            for bar in axes.bars(&series.magnitudes) {
                let (x, y) = (axes.x(bar.place) - width / 2.0, axes.y(bar.share));
                writeln!(
                    f,
                    r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{:.1}"><title>{}</title></rect>"#,
                    axes.bottom() - y,
                    bar.words
                )?;
            }
            writeln!(f, "</g>")?;
        }
        axes.draw_horizontal(f, &self.horizontal)
    }
}

impl Axes {
    fn of(series: &[Series], top: f64) -> Self {
        let ranges = series.iter().filter_map(|series| series.magnitudes.range());
        let [first, last] = ranges.reduce(|a, b| [a[0].min(b[0]), a[1].max(b[1])]).unwrap_or([0, 0]);
        let octaves = [first.max(last - OCTAVES + 1), last];
        let has_smaller = octaves[0] > first;
        let has_zeros = series.iter().any(|series| series.magnitudes.zeros > 0);
        let mut axes = Self { top, octaves, has_smaller, has_zeros, decades: 1, step: 0.0 };
        let shares = series.iter().flat_map(|series| axes.bars(&series.magnitudes)).map(|bar| bar.share);
        let least = shares.fold(1.0, f64::min);
        axes.decades = ((-least.log10()).floor() as i32 + 1).clamp(1, DECADES);
        axes.step = (RIGHT - LEFT) / axes.steps();
        axes
    }

    /// Steps of the horizontal axis: the octaves, one and a half for smaller numbers, one and a half for zeros.
    fn steps(&self) -> f64 {
        let [first, last] = self.octaves;
        f64::from(last - first + 1) + self.first_octave()
    }

    /// Steps before the octaves.
    fn first_octave(&self) -> f64 {
        1.5 * f64::from(u8::from(self.has_zeros) + u8::from(self.has_smaller))
    }

    fn x(&self, place: f64) -> f64 {
        LEFT + (place + 0.5) * self.step
    }

    /// Logarithmic: rare magnitudes are what a format is chosen for.
    fn y(&self, share: f64) -> f64 {
        let height = 1.0 + share.log10() / f64::from(self.decades);
        self.bottom() - PLOT * height.clamp(0.004, 1.0)
    }

    fn bottom(&self) -> f64 {
        self.top + PLOT
    }

    fn bars(&self, magnitudes: &Magnitudes) -> Vec<Bar> {
        let [first, last] = self.octaves;
        let mut bars = Vec::new();
        let mut bar = |place, count: u64, what: String| {
            if count > 0 {
                let share = count as f64 / magnitudes.total as f64;
                bars.push(Bar { place, share, words: format!("{what}: {count} of {}, {}", magnitudes.total, percent(share)) });
            }
        };
        bar(0.0, magnitudes.zeros, "zero".into());
        if self.has_smaller {
            bar(self.first_octave() - 1.5, magnitudes.below(first), format!("below 2^{first}"));
        }
        for octave in first..=last {
            let place = self.first_octave() + f64::from(octave - first);
            bar(place, magnitudes.count(octave), format!("2^{octave} to 2^{}", octave + 1));
        }
        bars
    }

    fn draw_vertical(&self, f: &mut fmt::Formatter<'_>, label: &str) -> fmt::Result {
        for decade in 0..=self.decades {
            let y = self.top + PLOT * f64::from(decade) / f64::from(self.decades);
            writeln!(f, r#"<line class="grid" x1="{LEFT}" y1="{y:.1}" x2="{RIGHT}" y2="{y:.1}"/>"#)?;
            let share = percent(10f64.powi(-decade));
            writeln!(f, r#"<text x="{}" y="{:.1}" text-anchor="end">{share}</text>"#, LEFT - 8.0, y + 4.0)?;
        }
        let middle = self.top + PLOT / 2.0;
        writeln!(f, r#"<text x="0" y="0" text-anchor="middle" transform="translate(16 {middle:.1}) rotate(-90)">{}</text>"#, escaped(label))
    }

    fn draw_horizontal(&self, f: &mut fmt::Formatter<'_>, label: &str) -> fmt::Result {
        let bottom = self.bottom();
        writeln!(f, r#"<line class="axis" x1="{LEFT}" y1="{bottom:.1}" x2="{RIGHT}" y2="{bottom:.1}"/>"#)?;
        let mut tick = |place: f64, words: String| {
            writeln!(f, r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">{words}</text>"#, self.x(place), bottom + 19.0)
        };
        if self.has_zeros {
            tick(0.0, "0".into())?;
        }
        let [first, last] = self.octaves;
        if self.has_smaller {
            tick(self.first_octave() - 1.5, "less".into())?;
        }
        // A label takes some forty pixels.
        let every = [1, 2, 4, 8, 16].into_iter().find(|&every| f64::from(every) * self.step >= 40.0).unwrap_or(16);
        for octave in (first..=last).filter(|octave| octave % every == 0 || last - first < every) {
            let place = self.first_octave() + f64::from(octave - first);
            tick(place, format!(r#"2<tspan dy="-5" font-size="10">{octave}</tspan>"#))?;
        }
        let middle = (LEFT + RIGHT) / 2.0;
        writeln!(f, r#"<text x="{middle}" y="{:.1}" text-anchor="middle">{}</text>"#, bottom + 44.0, escaped(label))
    }
}

/// A share as `100 %`, `0.0001 %`.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    let digits = if percent >= 1.0 { usize::from(percent < 10.0 && percent.fract() > 1e-9) } else { (-percent.log10()).ceil() as usize };
    format!("{percent:.digits$} %")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn magnitudes(numbers: &[f64]) -> Magnitudes {
        let mut magnitudes = Magnitudes::default();
        numbers.iter().for_each(|&number| magnitudes.add(number));
        magnitudes
    }

    fn axes(numbers: &[f64]) -> (Axes, Magnitudes) {
        let magnitudes = magnitudes(numbers);
        (Axes::of(&[Series { class: "after", label: String::new(), magnitudes: magnitudes.clone() }], 100.0), magnitudes)
    }

    #[test]
    fn bars_stand_for_shares() {
        let (axes, magnitudes) = axes(&[&[1.0; 90][..], &[4.0; 9], &[0.0]].concat());
        assert_eq!((axes.octaves, axes.decades, axes.has_zeros), ([0, 2], 3, true));
        let bars = axes.bars(&magnitudes);
        let found: Vec<_> = bars.iter().map(|bar| (bar.place, bar.share, bar.words.as_str())).collect();
        let expected =
            [(0.0, 0.01, "zero: 1 of 100, 1 %"), (1.5, 0.9, "2^0 to 2^1: 90 of 100, 90 %"), (3.5, 0.09, "2^2 to 2^3: 9 of 100, 9 %")];
        assert_eq!(found, expected);
        // 1 % is one of three decades up.
        assert!((axes.bottom() - axes.y(0.01) - PLOT / 3.0).abs() < 1e-9);
        assert_eq!(axes.y(1.0), axes.top);
        assert!((axes.x(3.5) + axes.step / 2.0 - RIGHT).abs() < 1e-9, "the last octave ends where the axis does");
    }

    #[test]
    fn far_octaves_are_one_bar() {
        let (axes, magnitudes) = axes(&[1e-30, 1e-29, 1.0, 1e5]);
        assert_eq!((axes.octaves, axes.has_smaller), ([-47, 16], true));
        assert!(axes.bars(&magnitudes)[0].words.starts_with("below 2^-47: 2 of 4"));
        let (axes, magnitudes) = axes_of_nothing();
        assert!(axes.bars(&magnitudes).is_empty());
    }

    fn axes_of_nothing() -> (Axes, Magnitudes) {
        axes(&[f64::NAN])
    }

    #[test]
    fn shares_are_percent() {
        assert_eq!([1.0, 0.1, 0.025, 0.000_01].map(percent), ["100 %", "10 %", "2.5 %", "0.001 %"]);
    }
}
