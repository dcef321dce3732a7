//! A timeline as an SVG picture: a band a rank, a lane a stream, a box a piece of work. No scripts, no external fonts, the same bytes for
//! the same recording, readable on light and on dark ground.

use std::fmt::{self, Write as _};

use oxtile::timeline::{Activity, Clock, Lane, Recording, Span};

use crate::text::{escaped, shortened};

/// Width of the picture, and the edges of its lanes, in pixels.
const WIDTH: f64 = 1200.0;
const LEFT: f64 = 120.0;
const RIGHT: f64 = 1176.0;
/// Height of the title with the legend, of a rank's title, of a lane, of a box, and of the axis.
const HEAD: f64 = 84.0;
const RANK: f64 = 30.0;
const LANE: f64 = 30.0;
const BOX: f64 = 22.0;
const AXIS: f64 = 52.0;
/// A letter of a box's name, about, and the space beside the name.
const LETTER: f64 = 6.4;
const MARGIN: f64 = 8.0;
/// Boxes narrower than this become one with their neighbours of the same sort.
const NARROW: f64 = 0.75;

const STYLE: &str = "\
svg{--ground:#fff;--ink:#1f2328;--soft:#59636e;--line:#d8dee4;--kernel:#0969da;--copy:#1a7f37;--fill:#8c959f;--collective:#8250df;--signal:#bc4c00;--graph:#0a7ea4}
@media(prefers-color-scheme:dark){svg{--ground:#0d1117;--ink:#e6edf3;--soft:#9198a1;--line:#30363d;--kernel:#316dca;--copy:#347d39;--fill:#545d68;--collective:#8256d0;--signal:#ae5622;--graph:#1b7c99}}
text{font-family:system-ui,sans-serif;font-size:12px;fill:var(--soft)}
.title{font-size:19px;font-weight:600;fill:var(--ink)}
.rank{font-size:14px;font-weight:600;fill:var(--ink)}
.label{fill:var(--ink)}
.grid{stroke:var(--line);stroke-width:1}
.name{font-size:11px;fill:#fff}
.wait+.name,.unfinished+.name{fill:var(--soft)}
.kernel{fill:var(--kernel)}
.copy{fill:var(--copy)}
.fill{fill:var(--fill)}
.collective{fill:var(--collective)}
.signal{fill:var(--signal)}
.graph{fill:var(--graph)}
.wait{fill:var(--line);fill-opacity:.45;stroke:var(--soft);stroke-opacity:.6;stroke-dasharray:3 3}
.unfinished{fill-opacity:.25;stroke:var(--ink);stroke-dasharray:6 3}
";

/// The picture of a recording.
#[derive(Debug)]
pub struct Picture<'a> {
    recording: &'a Recording,
    start: f64,
    end: f64,
}

/// What is drawn as one box.
struct Drawn<'a> {
    first: &'a Span,
    end: f64,
    count: u64,
}

impl<'a> Picture<'a> {
    /// From the first span's begin to the last one's end.
    pub fn of(recording: &'a Recording) -> Self {
        let start = recording.spans.iter().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let start = if start.is_finite() { start } else { 0.0 };
        Self { recording, start, end: recording.end().max(start + (start.abs() * 1e-12).max(1e-3)) }
    }

    fn x(&self, time: f64) -> f64 {
        LEFT + (time - self.start) / (self.end - self.start) * (RIGHT - LEFT)
    }

    fn height(&self) -> f64 {
        HEAD + RANK * self.recording.ranks().len() as f64 + LANE * self.recording.lanes().len() as f64 + AXIS
    }

    /// What one unit of the axis is called, and how many units of the clock it has.
    fn unit(&self) -> (&'static str, f64) {
        match (self.recording.clock, self.end - self.start) {
            (Clock::Steps, _) => ("steps of the scheduler", 1.0),
            (Clock::Device, length) if length >= 5e6 => ("seconds", 1e6),
            (Clock::Device, length) if length >= 5e3 => ("milliseconds", 1e3),
            (Clock::Device, _) => ("microseconds", 1.0),
        }
    }

    fn head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let height = self.height();
        let title = match self.recording.ranks().len() {
            1 => "Timeline of one rank".to_owned(),
            ranks => format!("Timeline of {ranks} ranks"),
        };
        writeln!(
            f,
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="title">"#
        )?;
        writeln!(f, "<title id=\"title\">{title}</title>")?;
        writeln!(f, "<style>\n{STYLE}</style>")?;
        writeln!(f, r#"<rect width="{WIDTH}" height="{height}" style="fill:var(--ground)"/>"#)?;
        writeln!(f, r#"<text class="title" x="24" y="34">{title}</text>"#)?;
        let mut x = 24.0;
        let is_drawn = |activity: &Activity| self.recording.spans.iter().any(|span| span.activity == *activity);
        let is_unfinished = self.recording.spans.iter().any(|span| !span.is_finished);
        let activities = Activity::ALL.into_iter().filter(is_drawn).map(Activity::name);
        for class in activities.chain(is_unfinished.then_some("unfinished")) {
            writeln!(f, r#"<rect class="{class}" x="{x}" y="52" width="14" height="12"/>"#)?;
            writeln!(f, r#"<text class="label" x="{}" y="62">{class}</text>"#, x + 20.0)?;
            x += 44.0 + 7.0 * class.len() as f64;
        }
        Ok(())
    }

    /// Vertical lines at round times, and what they mean.
    fn axis(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((name, unit), bottom) = (self.unit(), self.height() - AXIS);
        let step = round_step((self.end - self.start) / unit / 10.0);
        let first = (self.start / unit / step).ceil() as i64;
        let last = (self.end / unit / step).floor() as i64;
        for tick in first..=last {
            let (time, x) = (tick as f64 * step, self.x(tick as f64 * step * unit));
            writeln!(f, r#"<line class="grid" x1="{x:.1}" y1="{HEAD}" x2="{x:.1}" y2="{bottom}"/>"#)?;
            let digits = (-step.log10().floor()).max(0.0) as usize;
            writeln!(f, r#"<text x="{x:.1}" y="{}" text-anchor="middle">{time:.digits$}</text>"#, bottom + 17.0)?;
        }
        let middle = f64::midpoint(LEFT, RIGHT);
        writeln!(f, r#"<text x="{middle}" y="{}" text-anchor="middle">{name}</text>"#, bottom + 38.0)
    }

    fn lane(&self, f: &mut fmt::Formatter<'_>, lane: Lane, spans: &[&Span], top: f64) -> fmt::Result {
        writeln!(f, r#"<text x="{}" y="{}" text-anchor="end">stream {}</text>"#, LEFT - 10.0, top + 19.0, lane.stream)?;
        writeln!(f, r#"<line class="grid" x1="{LEFT}" y1="{0}" x2="{RIGHT}" y2="{0}"/>"#, top + LANE)?;
        self.boxes(spans).iter().try_for_each(|drawn| self.one(f, drawn, top + f64::midpoint(LANE, -BOX)))
    }

    /// Neighbours that cannot be told apart are one box.
    fn boxes(&self, spans: &[&'a Span]) -> Vec<Drawn<'a>> {
        let mut boxes: Vec<Drawn<'a>> = Vec::new();
        let width = |start, end| self.x(end) - self.x(start);
        for span in spans {
            match boxes.last_mut() {
                Some(last)
                    if last.first.activity == span.activity
                        && last.first.is_finished == span.is_finished
                        && width(last.first.start, last.end) < NARROW
                        && width(last.end, span.end) < NARROW =>
                {
                    last.end = span.end;
                    last.count += 1;
                }
                _ => boxes.push(Drawn { first: span, end: span.end, count: 1 }),
            }
        }
        boxes
    }

    fn one(&self, f: &mut fmt::Formatter<'_>, drawn: &Drawn<'_>, y: f64) -> fmt::Result {
        let (span, x) = (drawn.first, self.x(drawn.first.start));
        let width = (self.x(drawn.end) - x).max(0.5);
        let class = if span.is_finished { span.activity.name().to_owned() } else { format!("{} unfinished", span.activity) };
        let words = escaped(&self.words(drawn));
        writeln!(f, r#"<rect class="{class}" x="{x:.1}" y="{y}" width="{width:.1}" height="{BOX}" rx="2"><title>{words}</title></rect>"#)?;
        let letters = ((width - MARGIN) / LETTER) as usize;
        if letters >= 3 && drawn.count == 1 {
            let name = escaped(&shortened(&span.name, letters));
            writeln!(f, r#"<text class="name" x="{:.1}" y="{}">{name}</text>"#, x + MARGIN / 2.0, y + 15.0)?;
        }
        Ok(())
    }

    /// The text of a box under the pointer.
    fn words(&self, drawn: &Drawn<'_>) -> String {
        let (span, (unit_name, unit)) = (drawn.first, self.unit());
        let (start, end) = (span.start / unit, drawn.end / unit);
        let digits = if unit > 1.0 || self.recording.clock == Clock::Device { 3 } else { 0 };
        let mut words = match drawn.count {
            1 => span.name.clone(),
            count => format!("{count} of {}", span.activity),
        };
        let _ = write!(words, ", {unit_name} {start:.digits$} to {end:.digits$}");
        if drawn.count == 1 {
            let _ = span.bytes.map_or(Ok(()), |bytes| write!(words, ", {bytes} bytes"));
            let _ = span.at.as_ref().map_or(Ok(()), |at| write!(words, ", enqueued at {}", file_name(at)));
        }
        if !span.is_finished {
            words.push_str(", not done when the recording ended");
        }
        words
    }
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.head(f)?;
        self.axis(f)?;
        let (mut top, mut rank) = (HEAD, None);
        for (lane, spans) in self.recording.lanes() {
            if rank.replace(lane.rank) != Some(lane.rank) {
                writeln!(f, r#"<text class="rank" x="24" y="{}">rank {}</text>"#, top + 20.0, lane.rank)?;
                top += RANK;
            }
            self.lane(f, lane, &spans, top)?;
            top += LANE;
        }
        writeln!(f, "</svg>")
    }
}

/// The next of 1, 2 and 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|digit| digit * power).find(|step| *step >= least * 0.999).unwrap_or(10.0 * power).max(1e-3)
}

/// A place in the source without its folders, which differ from machine to machine.
fn file_name(at: &str) -> &str {
    at.rsplit(['/', '\\']).next().unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(clock: Clock, spans: &[(u64, Activity, f64, f64)]) -> Recording {
        let empty = r#"{"otherData":{"clock":"steps","start_ns":0,"dropped":0},"traceEvents":[]}"#;
        let span = |&(stream, activity, start, end): &(u64, Activity, f64, f64)| {
            let (name, at) = ("a<b".to_owned(), Some("/home/me/a.rs:1:2".to_owned()));
            Span { rank: 0, device: 0, stream, activity, name, start, end, bytes: Some(8), at, is_finished: start < 90.0 }
        };
        Recording { clock, spans: spans.iter().map(span).collect(), ..Recording::from_json(empty).unwrap() }
    }

    #[test]
    fn boxes_lie_where_their_times_are() {
        let recording = recording(Clock::Steps, &[(1, Activity::Kernel, 0.0, 50.0), (1, Activity::Wait, 50.0, 100.0)]);
        let picture = Picture::of(&recording);
        assert_eq!([0.0, 50.0, 100.0].map(|time| picture.x(time)), [LEFT, f64::midpoint(LEFT, RIGHT), RIGHT]);
        let drawn = picture.to_string();
        assert!(drawn.contains(r#"<rect class="kernel" x="120.0" y="118" width="528.0" height="22" rx="2">"#), "{drawn}");
        assert!(drawn.contains("<title>a&lt;b, steps of the scheduler 0 to 50, 8 bytes, enqueued at a.rs:1:2</title>"), "{drawn}");
        assert!(drawn.contains(r#"<rect class="wait" x="648.0""#), "{drawn}");
    }

    #[test]
    fn what_nobody_could_tell_apart_is_one_box() {
        let spans: Vec<_> = (0..10_000).map(|i| (1, Activity::Kernel, f64::from(i), f64::from(i) + 0.5)).collect();
        let recording = recording(Clock::Device, &spans);
        let drawn = Picture::of(&recording).boxes(&recording.spans.iter().collect::<Vec<_>>());
        assert!((500..2000).contains(&drawn.len()), "{}", drawn.len());
        assert_eq!(drawn.iter().map(|drawn| drawn.count).sum::<u64>(), 10_000);
    }

    #[test]
    fn axes_have_round_steps_and_fitting_units() {
        assert_eq!([0.7, 1.0, 1.2, 30.0, 99.0].map(round_step), [1.0, 1.0, 2.0, 50.0, 100.0]);
        let unit = |end| Picture::of(&recording(Clock::Device, &[(1, Activity::Kernel, 0.0, end)])).unit().0;
        assert_eq!([40.0, 2e4, 1e7].map(unit), ["microseconds", "milliseconds", "seconds"]);
        assert_eq!(file_name("C:\\a\\b.rs:1:2"), "b.rs:1:2");
    }
}
