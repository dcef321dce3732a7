//! A parameter's name in reports and errors.

use core::fmt;

/// The name of a parameter, or of a field of one: `sequences.query_ends`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ParameterName {
    /// The name, then the fields; empty beyond the last.
    path: [&'static str; Self::DEPTH],
}

impl ParameterName {
    /// A parameter, a field of it, and so on: four fields.
    const DEPTH: usize = 5;

    /// A parameter of a kernel.
    pub const fn new(name: &'static str) -> Self {
        Self { path: [name, "", "", "", ""] }
    }

    /// A field of this parameter.
    ///
    /// # Panics
    /// Where structs are nested deeper than that.
    #[must_use]
    pub fn field(mut self, name: &'static str) -> Self {
        let free = self.path.iter_mut().find(|part| part.is_empty());
        *free.expect("structs of kernel parameters are nested at most four deep") = name;
        self
    }
}

impl fmt::Display for ParameterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.path[0])?;
        self.path[1..].iter().filter(|part| !part.is_empty()).try_for_each(|part| write!(f, ".{part}"))
    }
}

impl fmt::Debug for ParameterName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::string::ToString;

    use super::*;

    #[test]
    fn fields_follow_the_parameter() {
        let name = ParameterName::new("batch");
        assert_eq!(name.to_string(), "batch");
        assert_eq!(name.field("sequences").to_string(), "batch.sequences");
        let of_field = name.field("sequences").field("query_ends");
        assert_eq!(of_field.to_string(), "batch.sequences.query_ends");
        assert_ne!(of_field, name.field("sequences").field("key_ends"));
    }

    #[test]
    #[should_panic(expected = "structs of kernel parameters are nested at most four deep")]
    fn the_fifth_struct_has_no_room() {
        let _ = ["a", "b", "c", "d", "e"].into_iter().fold(ParameterName::new("batch"), ParameterName::field);
    }
}
