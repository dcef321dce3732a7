//! Which functions of kernels host code runs.

use std::collections::{BTreeMap, BTreeSet};

use super::functions::{Call, Function, Outline};

/// What another crate names.
#[derive(Debug, Default)]
pub struct Names {
    calls: BTreeSet<Call>,
    /// Every word.
    words: BTreeSet<String>,
}

impl Names {
    /// Adds those of a source; what stands after `//` is left out. A name alone is a call where the file names the kernels' crate.
    pub fn add(&mut self, text: &str) {
        let has_kernels = text.contains("oxtile_kernels");
        for line in text.lines().map(|line| line.split("//").next().unwrap_or(line)) {
            let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
            let bytes = line.as_bytes();
            let (mut at, mut of) = (0, "");
            while at < bytes.len() {
                let length = bytes[at..].iter().take_while(|&&byte| is_word(byte)).count();
                let (before, after) = (at.checked_sub(1).map(|before| bytes[before]), bytes.get(at + length));
                if length > 0 && !bytes[at].is_ascii_digit() {
                    let name = line[at..at + length].to_owned();
                    self.words.insert(name.clone());
                    match before {
                        Some(b'.') if matches!(after, Some(b'(' | b':')) => drop(self.calls.insert(Call::Method(name))),
                        Some(b'.') => {}
                        Some(b':') => drop(self.calls.insert(Call::Path { of: of.to_owned(), name })),
                        _ if has_kernels => drop(self.calls.insert(Call::Free(name))),
                        _ => {}
                    }
                    of = &line[at..at + length];
                }
                // After generics, `Type::<..>::name`, it may be of any type.
                if bytes.get(at) == Some(&b'>') {
                    of = "";
                }
                at += length.max(1);
            }
        }
    }

    /// Whether it may call a function: one that is open, and if it belongs to a type or a trait, one of those is named.
    fn may_call(&self, function: &Function) -> bool {
        function.is_open && (function.owners.is_empty() || function.owners.iter().any(|owner| self.words.contains(owner)))
    }
}

/// The paths of the functions that host code runs, told by names and so rather too many: those that other crates call, those that are named outside
/// of bodies (grids, constants), and what their bodies call.
pub fn functions<'a>(files: impl Iterator<Item = &'a Outline> + Clone, names: &Names) -> BTreeSet<String> {
    let aliases = files.clone().flat_map(|file| &file.aliases).cloned().collect();
    let mut of_name: BTreeMap<&str, Vec<&Function>> = BTreeMap::new();
    for function in files.clone().flat_map(|file| &file.functions).filter(|function| !function.is_of_devices) {
        of_name.entry(&function.name).or_default().push(function);
    }
    let called = |call: &Call| {
        let functions = of_name.get(call.name()).map_or(&[][..], Vec::as_slice);
        functions.iter().copied().filter(|function| call.may_be(function, &aliases)).collect::<Vec<_>>()
    };
    let outside = files.flat_map(|file| &file.calls).flat_map(called);
    let mut open: Vec<_> = outside.chain(names.calls.iter().flat_map(called).filter(|function| names.may_call(function))).collect();
    let mut found = BTreeSet::new();
    let mut seen = BTreeSet::new();
    while let Some(function) = open.pop() {
        if seen.insert(std::ptr::from_ref(function)) {
            found.insert(function.path());
            open.extend(function.calls.iter().flat_map(called));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(words: &[&str]) -> BTreeSet<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    /// A kernel with two device functions, a grid with what it calls, and what the host may ask.
    const FILE: &str = "
        //! Of the family.
        use crate::row::device;
        pub struct Rows<const N: usize>(u32);
        /// One block a row.
        #[kernel(threads = 32, grid = rows_grid)]
        pub fn copy(rows: u32) { device(rows); inner::<2>(rows) }
        fn device(rows: u32) -> Rows<{ 2 }> { let at = rows; Rows(at) }
        pub(crate) fn inner<const N: usize>(_: u32) where Rows<{ N }>: Sized, { () }
        fn rows_grid(args: &CopyArgs) -> u32 { rounded(args.device) }
        pub fn of_devices(rows: u32) -> u32 { rows + thread::index() }
        fn rounded(rows: u32) -> u32 { Rows::count(rows) + SIZE }
        pub const SIZE: u32 = size();
        const fn size() -> u32 { 4 }
        impl<const N: usize> Rows<N> { pub fn of(n: u32) -> Self { Self(n) } fn hidden(&self) { 1 } fn count(n: u32) -> u32 { n } }
        impl Policy for Rows<{ 3 }> { fn policy(&self) -> u32 { 3 } }
        impl<T: Copy> Other<T> { pub fn count(n: u32) -> u32 { n + 2 } }
    ";

    fn found(text: &str) -> BTreeSet<String> {
        let mut host = Names::default();
        host.add(&format!("use oxtile_kernels::x; {text}"));
        functions([&Outline::of(FILE).unwrap()].into_iter(), &host)
    }

    #[test]
    fn the_host_runs_grids_and_what_it_names() {
        let of_grids = names(&["Rows::count", "rounded", "rows_grid"]);
        assert_eq!(found("copy(); device(1); inner::<2>(1); of_devices(1); row.of(1); row.policy()"), of_grids);
        let more = |name| of_grids.iter().cloned().chain([String::from(name)]).collect::<BTreeSet<_>>();
        assert_eq!(found("Rows::of(1)"), more("Rows::of"));
        assert_eq!(found("x: Rows; x.policy()"), more("Policy+Rows::policy"));
        assert_eq!(found("Policy; x.policy()"), more("Policy+Rows::policy"));
        assert_eq!(found("Other::of(1)"), of_grids);
    }

    #[test]
    fn bodies_of_device_functions_alone_may_change() {
        let host = found("Rows::of(1)");
        let outline = |from, to| {
            let changed = FILE.replacen(from, to, 1);
            assert_ne!(changed, FILE, "{from}");
            Outline::of(&changed).unwrap().with_bodies(&host)
        };
        let whole = Outline::of(FILE).unwrap().with_bodies(&host);
        for (from, to) in [
            ("Of the family", "Of it"),
            ("One block", "Two blocks"),
            ("device(rows);", "device(2 * rows);"),
            ("let at = rows", "let at = 1"),
            ("{ () }", "{ panic!() }"),
            ("{ 1 }", "{ 2 }"),
            ("rows + thread", "thread"),
            ("fn policy(&self) -> u32 { 3 }", "fn policy(&self) -> u32 { 4 }"),
        ] {
            assert_eq!(outline(from, to), whole, "{from}");
        }
        for (from, to) in [
            ("rounded(args", "2 * rounded(args"),
            ("(rows) + SIZE", "(rows) - SIZE"),
            ("u32 { n }", "u32 { n + 1 }"),
            ("{ 4 }", "{ 8 }"),
            ("threads = 32", "threads = 64"),
            ("fn device(rows: u32)", "fn device(rows: u64)"),
            ("Self(n)", "Self(2 * n)"),
            ("Rows<{ 3 }>", "Rows<{ 4 }>"),
            ("Rows<const N: usize>(u32)", "Rows<const N: usize>(u64)"),
            ("fn hidden", "fn other"),
            ("use crate::row::device", "use crate::row::other as device"),
        ] {
            assert_ne!(outline(from, to), whole, "{from}");
        }
    }

    #[test]
    fn calls_of_a_host() {
        let line = "let a2 = x.rows + y.count() + z.map::<u8>(Row::of); // of comments";
        let found = |text: &str| {
            let mut names = Names::default();
            names.add(text);
            names.calls
        };
        let methods = ["count", "map"].map(|name| Call::Method(name.into()));
        let of = Call::Path { of: "Row".into(), name: "of".into() };
        assert_eq!(found(line), methods.into_iter().chain([of]).collect());
        assert!(found(&format!("use oxtile_kernels::x;\n{line}")).contains(&Call::Free("z".into())));
    }
}
