//! A picture of where a box's chunks of 16 bytes lie in shared memory: a row a line of all 32 banks.

use std::fmt;

use oxtile::timeline::BoxRecord;

use super::svg::{self, COLOURS, HEAD};
use crate::text::escaped;

/// Bytes of a line of all banks, and of a chunk.
const LINE: u32 = 128;
const CHUNK: u32 = 16;
/// Lines that are drawn at most: every swizzle repeats after eight.
const MOST_LINES: u32 = 16;
/// The left edge, and the size of a chunk's cell.
const LEFT: f64 = 120.0;
const CELL: [f64; 2] = [130.0, 26.0];

/// The picture of a box.
#[derive(Debug)]
pub struct Picture<'a> {
    /// The kernel's entry.
    pub kernel: &'a str,
    /// The box.
    pub copy: &'a BoxRecord,
}

impl Picture<'_> {
    /// The row of the box and the chunk in that row that lie at a chunk of shared memory, by its offset from the box's start.
    fn logical(&self, offset: u32) -> [u32; 2] {
        let mask = match self.copy.swizzle {
            32 => 0x10,
            64 => 0x30,
            128 => 0x70,
            _ => 0,
        };
        // The permutation by the bits above the chunk's is its own inverse.
        let logical = offset ^ (offset >> 3 & mask);
        [logical / self.row_bytes(), logical % self.row_bytes() / CHUNK]
    }

    fn row_bytes(&self) -> u32 {
        (self.copy.dimensions.first().copied().unwrap_or(1) * self.copy.element_bytes).max(CHUNK)
    }

    fn bytes(&self) -> u32 {
        self.copy.dimensions.iter().product::<u32>() * self.copy.element_bytes
    }
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = self.bytes().div_ceil(LINE).clamp(1, MOST_LINES);
        let sizes: Vec<_> = self.copy.dimensions.iter().map(u32::to_string).collect();
        let swizzle = if self.copy.swizzle == 0 { "no swizzle".to_owned() } else { format!("a swizzle of {} bytes", self.copy.swizzle) };
        let title =
            format!("{}: {}, {} elements of {} bytes, {swizzle}", self.kernel, self.copy.place, sizes.join(" x "), self.copy.element_bytes);
        let words = "A row is 128 bytes of shared memory, all 32 banks. A cell is 16 bytes: the row of the box, and the chunk in it, by colour. \
                     Eight lanes that read one colour without conflicts find it in eight columns.";
        let height = HEAD + 30.0 + CELL[1] * f64::from(lines) + 24.0;
        svg::begin(f, height, &title, words)?;
        for chunk in 0..LINE / CHUNK {
            let x = LEFT + CELL[0] * f64::from(chunk);
            writeln!(f, r#"<text x="{x}" y="{}">banks {}..{}</text>"#, HEAD + 18.0, 4 * chunk, 4 * chunk + 4)?;
        }
        for line in 0..lines {
            let y = HEAD + 30.0 + CELL[1] * f64::from(line);
            writeln!(f, r#"<text class="label" x="24" y="{}">byte {}</text>"#, y + 16.0, line * LINE)?;
            for chunk in (0..LINE / CHUNK).filter(|chunk| line * LINE + chunk * CHUNK < self.bytes()) {
                let [row, column] = self.logical(line * LINE + chunk * CHUNK);
                let x = LEFT + CELL[0] * f64::from(chunk);
                let (width, tall, colour) = (CELL[0] - 2.0, CELL[1] - 2.0, column as usize % COLOURS);
                writeln!(f, r#"<rect class="c{colour}" x="{x}" y="{y}" width="{width}" height="{tall}" rx="2"/>"#)?;
                let (middle, base) = (x + width / 2.0, y + 16.0);
                writeln!(f, r#"<text class="in" x="{middle}" y="{base}">{}</text>"#, escaped(&format!("row {row}, chunk {column}")))?;
            }
        }
        writeln!(f, "</svg>")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_lie_where_the_swizzle_has_them() {
        let copy =
            |dimensions: &[u32], swizzle| BoxRecord { place: "`a`".into(), dimensions: dimensions.to_vec(), element_bytes: 2, swizzle };
        let wide = copy(&[64, 64], 128);
        let picture = Picture { kernel: "k", copy: &wide };
        assert_eq!([0, 16, 128, 144, 7 * 128].map(|at| picture.logical(at)), [[0, 0], [0, 1], [1, 1], [1, 0], [7, 7]]);
        // A column of chunks has all columns of banks: eight lanes meet no bank twice.
        let of_chunk = |chunk| (0..64).map(|at| at * 16).filter(move |&at| picture.logical(at)[1] == chunk).map(|at| at % 128 / 16);
        let mut columns: Vec<_> = of_chunk(3).collect();
        columns.sort_unstable();
        assert_eq!(columns, [0, 1, 2, 3, 4, 5, 6, 7]);
        let narrow = copy(&[16, 8], 0);
        let picture = Picture { kernel: "k", copy: &narrow };
        assert_eq!([0, 16, 32, 128].map(|at| picture.logical(at)), [[0, 0], [0, 1], [1, 0], [4, 0]]);
        let text = picture.to_string();
        assert!(text.contains("row 7, chunk 1") && !text.contains("row 8,") && text.ends_with("</svg>\n"), "{text}");
    }
}
