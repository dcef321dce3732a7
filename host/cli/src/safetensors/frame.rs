//! A header without its free-form strings: what a file has that keeps the strings, to give back the header byte by byte.

use std::{collections::BTreeMap, ops::Range};

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{METADATA_KEY, object::Object};

/// What stands in a frame for a string that is kept elsewhere.
const CUT: &str = r#""""#;

/// A header with `""` in the place of each string of `__metadata__` that is written as this program writes it.
///
/// # Errors
/// Text that is no header, as the parser says it.
pub fn frame(header: &str, strings: &BTreeMap<String, String>) -> Result<String, serde_json::Error> {
    replaced(header, |key, text| (written(strings, key)? == text).then(|| CUT.to_owned()))
}

/// The header of a frame and the strings that were cut out of it.
///
/// # Errors
/// As [`frame`].
pub fn filled(frame: &str, strings: &BTreeMap<String, String>) -> Result<String, serde_json::Error> {
    replaced(frame, |key, text| if text == CUT { written(strings, key) } else { None })
}

fn written(strings: &BTreeMap<String, String>, key: &str) -> Option<String> {
    strings.get(key).and_then(|text| serde_json::to_string(text).ok())
}

/// A header in which some strings have another text.
fn replaced(header: &str, other: impl Fn(&str, &str) -> Option<String>) -> Result<String, serde_json::Error> {
    let (mut out, mut end) = (String::with_capacity(header.len()), 0);
    for (key, range) in values(header)? {
        if let Some(text) = other(&key, &header[range.clone()]) {
            out.push_str(&header[end..range.start]);
            out.push_str(&text);
            end = range.end;
        }
    }
    out.push_str(&header[end..]);
    Ok(out)
}

/// The strings of `__metadata__` by key, and where the text of each lies in the header, in order.
fn values(header: &str) -> Result<Vec<(String, Range<usize>)>, serde_json::Error> {
    let members = |text| -> Result<Vec<(String, &RawValue)>, _> {
        Object::<&RawValue>::deserialize(&mut serde_json::Deserializer::from_str(text)).map(|object| object.0)
    };
    let Some((_, metadata)) = members(header)?.into_iter().find(|(key, _)| key == METADATA_KEY) else { return Ok(Vec::new()) };
    let place = |(key, value): (String, &RawValue)| {
        // A value of a text borrows from it.
        let start = value.get().as_ptr() as usize - header.as_ptr() as usize;
        (key, start..start + value.get().len())
    };
    Ok(members(metadata.get())?.into_iter().map(place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_cut_out_and_come_back() {
        let header = r#" {"w": {"shape": [1]}, "__metadata__" : {"b":"ü\"", "a" :"", "c": "\u0061", "\u0064":"x"} }  "#;
        let strings: BTreeMap<String, String> = [("a", ""), ("b", "ü\""), ("c", "a"), ("d", "x")].map(|(k, v)| (k.into(), v.into())).into();
        let frame = frame(header, &strings).expect("a header");
        assert_eq!(frame, r#" {"w": {"shape": [1]}, "__metadata__" : {"b":"", "a" :"", "c": "\u0061", "\u0064":""} }  "#);
        assert_eq!(filled(&frame, &strings).expect("a header"), header);
        assert_eq!(filled("{}", &strings).expect("a header"), "{}");
        assert!(filled("{", &strings).is_err());
    }
}
