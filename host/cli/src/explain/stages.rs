//! A picture of a pipeline over time: the phases of a block's mbarriers, and the waits and arrivals of its warps.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use oxtile::timeline::{KernelRecord, PhaseRecord};

use super::svg::{self, COLOURS, HEAD, WIDTH};
use crate::text::{escaped, shortened};

/// The edges of the rows, their height and that of their boxes.
const LEFT: f64 = 200.0;
const RIGHT: f64 = WIDTH - 24.0;
const ROW: f64 = 24.0;
const BOX: f64 = 18.0;
/// Room for a title between rows.
const GAP: f64 = 26.0;

/// The picture of a record's phases.
#[derive(Debug)]
pub struct Picture<'a>(pub &'a KernelRecord);

impl Picture<'_> {
    fn end(&self) -> f64 {
        let last = |phase: &PhaseRecord| {
            let spans = phase.arrivals.values().chain(phase.waits.values()).chain(&phase.copies).map(|span| span[1]);
            spans.chain(phase.ended).max().unwrap_or(0)
        };
        self.0.phases.iter().map(last).max().unwrap_or(0).max(1) as f64
    }

    fn x(&self, step: u64) -> f64 {
        LEFT + step as f64 / self.end() * (RIGHT - LEFT)
    }

    fn span(&self, f: &mut fmt::Formatter<'_>, y: f64, class: &str, [from, to]: [u64; 2], words: &str) -> fmt::Result {
        let (x, width) = (self.x(from), (self.x(to) - self.x(from)).max(1.0));
        writeln!(
            f,
            r#"<rect class="{class}" x="{x:.1}" y="{y}" width="{width:.1}" height="{BOX}"><title>{}</title></rect>"#,
            escaped(words)
        )
    }

    fn tick(&self, f: &mut fmt::Formatter<'_>, y: f64, step: u64, words: &str) -> fmt::Result {
        let (x, below) = (self.x(step), y + BOX);
        writeln!(f, r#"<line class="tick" x1="{x:.1}" y1="{y}" x2="{x:.1}" y2="{below}"><title>{}</title></line>"#, escaped(words))
    }
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phases = &self.0.phases;
        let mut mbarriers: BTreeMap<u32, Vec<&PhaseRecord>> = BTreeMap::new();
        phases.iter().for_each(|phase| mbarriers.entry(phase.offset).or_default().push(phase));
        let warps: BTreeSet<u32> = phases.iter().flat_map(|phase| phase.arrivals.keys().chain(phase.waits.keys())).copied().collect();
        let height = HEAD + 2.0 * GAP + ROW * (mbarriers.len() + warps.len()) as f64 + 40.0;
        let title = format!("{}: phases of the first block's mbarriers", self.0.kernel);
        let words =
            "Times are steps of the emulator's scheduler, whose seed draws the order: they show what waits for what, and measure nothing.";
        svg::begin(f, height, &title, words)?;
        let mut y = HEAD + GAP;
        writeln!(f, r#"<text class="label" x="24" y="{}">mbarriers: a box a phase, a tick where copies came</text>"#, y - 8.0)?;
        for (number, of_one) in mbarriers.values().enumerate() {
            let name = of_one[0].mbarrier.trim_start_matches("the mbarrier ");
            writeln!(f, r#"<text x="24" y="{}">{}</text>"#, y + 13.0, escaped(&shortened(name, 28)))?;
            let mut from = 0;
            for phase in of_one {
                let parity = if phase.phase % 2 == 1 { " odd" } else { "" };
                let to = phase.ended.unwrap_or(self.end() as u64);
                self.span(f, y, &format!("c{}{parity}", number % COLOURS), [from, to], &format!("phase {}: {from} to {to}", phase.phase))?;
                if let Some([first, last]) = phase.copies {
                    self.tick(f, y, last, &format!("copies of phase {}: {first} to {last}", phase.phase))?;
                }
                from = to;
            }
            y += ROW;
        }
        y += GAP;
        writeln!(
            f,
            r#"<text class="label" x="24" y="{}">warps: pale where they wait, in the mbarrier's colour, a tick where they arrive</text>"#,
            y - 8.0
        )?;
        for warp in warps {
            writeln!(f, r#"<text x="24" y="{}">warp {warp}</text>"#, y + 13.0)?;
            for (number, of_one) in mbarriers.values().enumerate() {
                for phase in of_one {
                    let what = || format!("phase {} of {}", phase.phase, phase.mbarrier);
                    if let Some(&[from, to]) = phase.waits.get(&warp) {
                        let class = format!("c{} wait", number % COLOURS);
                        self.span(f, y, &class, [from, to], &format!("waits for {}: {from} to {to}", what()))?;
                    }
                    if let Some(&[first, last]) = phase.arrivals.get(&warp) {
                        self.tick(f, y, last, &format!("arrives at {}: {first} to {last}", what()))?;
                    }
                }
            }
            y += ROW;
        }
        let end = self.end();
        writeln!(f, r#"<text x="{LEFT}" y="{}">0</text>"#, y + 20.0)?;
        writeln!(f, r#"<text x="{RIGHT}" y="{}" text-anchor="end">{end:.0} steps</text>"#, y + 20.0)?;
        writeln!(f, "</svg>")
    }
}
