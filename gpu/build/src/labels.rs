//! Labels of an entry as if it were alone in its module.
//!
//! LLVM numbers functions through the whole module, and names blocks (`$L__BB7_2`) and stack frames (`__local_depot7`) by these numbers: one kernel
//! more would change the text of every one after it, and ptxas would have to assemble what it has assembled before.

use std::collections::BTreeMap;

/// What is followed by a function's number.
const NUMBERED: [&str; 2] = ["BB", "__local_depot"];

/// The text of an entry with its functions numbered in the order in which they occur in it, comments included.
pub(crate) fn renumber(entry: &str) -> String {
    let (mut numbers, mut text, mut copied) = (BTreeMap::new(), String::with_capacity(entry.len()), 0);
    for (at, digits) in places(entry) {
        let next = numbers.len();
        let number = numbers.entry(&entry[at..at + digits]).or_insert(next);
        text.push_str(&entry[copied..at]);
        text.push_str(&number.to_string());
        copied = at + digits;
    }
    text + &entry[copied..]
}

/// Where functions' numbers stand, and how many digits they have.
fn places(entry: &str) -> Vec<(usize, usize)> {
    let of_word = |word: &'static str| entry.match_indices(word).filter_map(move |(at, _)| number(entry, at, word));
    let mut places: Vec<_> = NUMBERED.into_iter().flat_map(of_word).collect();
    places.sort_unstable();
    places
}

fn number(entry: &str, at: usize, word: &str) -> Option<(usize, usize)> {
    let (before, after) = (&entry[..at], &entry[at + word.len()..]);
    // A word of a longer name is no label, but for LLVM's own prefix.
    let begins = before.ends_with("$L__") || !before.ends_with(|c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%'));
    let digits = after.bytes().take_while(u8::is_ascii_digit).count();
    (begins && digits > 0).then_some((at + word.len(), digits))
}

#[cfg(test)]
mod tests {
    use super::renumber;

    /// A function as LLVM writes it, third in its module or first.
    fn text(helper: u32, entry: u32) -> String {
        format!(
            ".func _ZN4BB96helperE()\n{{\n$L__BB{helper}_1:\n\tret;\n}}\n\
             .visible .entry kernel()\n{{\n\t.local .align 8 .b8 \t__local_depot{entry}[16];\n// %bb.0:\n\tmov.u64 %SPL, __local_depot{entry};\n\
             $L__BB{entry}_1:\t// =>This Inner Loop Header: Depth=1\n\t@%p1 bra $L__BB{entry}_12;\n\t// in Loop: Header=BB{entry}_1 Depth=1\n\
             \tcall _ZN4BB96helperE;\n$L__BB{entry}_12:\n\tret;\n}}\n"
        )
    }

    #[test]
    fn the_place_in_the_module_leaves_no_trace() {
        assert_eq!(renumber(&text(7, 31)), text(0, 1));
        assert_eq!(renumber(&text(2, 100)), text(0, 1));
        // Functions stay apart.
        assert_eq!(renumber(&text(31, 7)), text(0, 1));
    }

    #[test]
    fn nothing_else_is_changed() {
        for other in ["mov.u32 %rBB3, 1;", "_ZN3BB3fooE", "$my_BB3_1", "BB_3", ".b8 x__local_depot4[1];", ""] {
            assert_eq!(renumber(other), other);
        }
    }
}
