//! What the pictures of `oxtile explain` share: no scripts, no external fonts, readable on light and on dark ground.

use std::fmt;

use crate::text::{escaped, shortened};

/// Width of a picture in pixels.
pub const WIDTH: f64 = 1200.0;
/// Height of its title with the line under it.
pub const HEAD: f64 = 74.0;
/// Colours that boxes have by their number.
pub const COLOURS: usize = 8;

const STYLE: &str = "\
svg{--ground:#fff;--ink:#1f2328;--soft:#59636e;--line:#d8dee4}
@media(prefers-color-scheme:dark){svg{--ground:#0d1117;--ink:#e6edf3;--soft:#9198a1;--line:#30363d}}
text{font-family:system-ui,sans-serif;font-size:12px;fill:var(--soft)}
.title{font-size:19px;font-weight:600;fill:var(--ink)}
.label{fill:var(--ink)}
.in{fill:#fff;text-anchor:middle}
.grid{stroke:var(--line);stroke-width:1}
.wait{fill-opacity:.35}
.odd{fill-opacity:.6}
.tick{stroke:var(--ink);stroke-width:1.5}
.c0{fill:#0969da}.c1{fill:#1a7f37}.c2{fill:#8250df}.c3{fill:#bc4c00}.c4{fill:#0a7ea4}.c5{fill:#bf3989}.c6{fill:#7d6b00}.c7{fill:#57606a}
";

/// The beginning of a picture of this height: its title and a line that explains it.
pub fn begin(f: &mut fmt::Formatter<'_>, height: f64, title: &str, words: &str) -> fmt::Result {
    writeln!(
        f,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" aria-labelledby="title">"#
    )?;
    writeln!(f, "<title id=\"title\">{}</title>", escaped(title))?;
    writeln!(f, "<style>\n{STYLE}</style>")?;
    writeln!(f, r#"<rect width="{WIDTH}" height="{height}" style="fill:var(--ground)"/>"#)?;
    writeln!(f, r#"<text class="title" x="24" y="34">{}</text>"#, escaped(&shortened(title, 100)))?;
    writeln!(f, r#"<text x="24" y="56">{}</text>"#, escaped(words))
}
