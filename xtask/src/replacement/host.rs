//! Which functions of kernels host code runs.

use std::collections::{BTreeMap, BTreeSet};

use super::functions::{Call, Function, Outline, Owner};

/// What another crate names.
#[derive(Debug, Default)]
pub struct Names {
    calls: BTreeSet<Call>,
    /// Every word.
    words: BTreeSet<String>,
}

impl Names {
    /// Adds those of a source but for lines of comments. A name alone is a call where the file names the kernels' crate.
    pub fn add(&mut self, text: &str) {
        let has_kernels = text.contains("oxtile_kernels");
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            // `name as other`, in a `use` of one line or more.
            let of_use = line.starts_with("use ")
                || line.starts_with("pub use ")
                || line.bytes().all(|byte| b"_:, {}*".contains(&byte) || byte.is_ascii_alphanumeric());
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
                        _ if of_use && line[at + length..].starts_with(" as ") => {
                            _ = self.calls.insert(Call::Path { of: String::new(), name })
                        }
                        Some(b'.') if at > 1 && bytes[at - 2] == b'.' => drop(self.calls.insert(Call::Free(name))),
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

    /// Whether it may call a function: one that is open, of a type or a trait that is named, if it belongs to any.
    fn may_call(&self, function: &Function) -> bool {
        function.is_open && (function.owner.is_none() || self.name(&function.owner))
    }

    fn name(&self, owner: &Owner) -> bool {
        owner.words().any(|word| self.words.contains(word))
    }
}

/// The paths of the functions that host code runs, told by names and so rather too many: those that other crates call, those that are named outside
/// of bodies (grids, constants), those that check arguments, those of traits of other crates, which no call has to name, and what the bodies of these call: of methods, those of
/// types and traits that the file or another crate names.
///
/// Those of each file, in the order of the files.
pub fn functions<'a>(files: impl Iterator<Item = &'a Outline> + Clone, names: &Names) -> Vec<BTreeSet<String>> {
    let all = || files.clone().flat_map(|file| file.functions.iter().map(move |function| (file, function)));
    let known = all().flat_map(|(_, function)| function.owner.words()).cloned().collect();
    let mut of_name: BTreeMap<&str, Vec<(&Outline, &Function)>> = BTreeMap::new();
    all().for_each(|(file, function)| of_name.entry(&function.name).or_default().push((file, function)));
    let called = |call: &Call| {
        let functions = of_name.get(call.name()).map_or(&[][..], Vec::as_slice);
        functions.iter().copied().filter(|(_, function)| !function.is_kernel && call.may_be(function, &known)).collect::<Vec<_>>()
    };
    let called_in = |file: &Outline, call: &Call| {
        let is_named = |owner: &Owner| owner.is_none() || owner.words().any(|word| file.words.contains(word)) || names.name(owner);
        called(call).into_iter().filter(|(_, function)| is_named(&function.owner)).collect::<Vec<_>>()
    };
    let is_foreign = |function: &Function| {
        let of_trait = function.owner.of_trait.as_ref();
        of_trait.is_some_and(|of_trait| !files.clone().any(|file| file.traits.contains(of_trait))) && names.name(&function.owner)
    };
    let of_hosts = names.calls.iter().flat_map(called).filter(|(_, function)| names.may_call(function));
    let foreign = all().filter(|(_, function)| is_foreign(function));
    let outside = files.clone().flat_map(|file| file.calls.iter().flat_map(|call| called_in(file, call)).collect::<Vec<_>>());
    let checks = all().filter(|(_, function)| function.is_of_hosts);
    let mut open: Vec<_> = of_hosts.chain(checks).chain(foreign).chain(outside).filter(|(_, function)| !function.is_of_devices).collect();
    // A grid is the host's, whatever its words are.
    open.extend(files.clone().flat_map(|file| file.of_kernels.iter().flat_map(|call| called_in(file, call)).collect::<Vec<_>>()));
    let mut seen = BTreeSet::new();
    while let Some((file, function)) = open.pop() {
        if seen.insert(std::ptr::from_ref(function)) {
            let calls = function.calls.iter().flat_map(|call| called_in(file, call));
            open.extend(calls.filter(|(_, function)| !function.is_of_devices));
        }
    }
    let of_file = |file: &Outline| {
        let found = file.functions.iter().filter(|function| seen.contains(&std::ptr::from_ref(*function)));
        found.map(Function::path).collect()
    };
    files.map(of_file).collect()
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
        fn rows_grid(args: &CopyArgs) -> u32 { (0..whole(3)).len() + rounded(args.device) / warp::LANES }
        fn whole(rows: u32) -> u32 { rows }
        use crate::other::{renamed as another};
        pub fn renamed() { 9 }
        pub trait Policy { fn policy(&self) -> u32; }
        impl Add for Rows<2> { fn add(self, other: Self) -> Self { Rows(self.0 + other.0) } }
        impl ManyArgument<'_> { fn blocks(&self) -> u32 { 5 } }
        impl Inner { fn checked(&self, thread: SharedArray<u32, 1>) -> Result<(), LaunchError> { warp::sync(6) } }
        impl Policy for f32 { fn policy(&self) -> u32 { 7 } }
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
        functions([&Outline::of(FILE).unwrap()].into_iter(), &host).remove(0)
    }

    #[test]
    fn the_host_runs_grids_and_what_it_names() {
        let of_grids = names(&["Inner::checked", "ManyArgument::blocks", "Rows::count", "renamed", "rounded", "rows_grid", "whole"]);
        assert_eq!(found("copy(); device(1); inner::<2>(1); of_devices(1); row.of(1); row.policy()"), of_grids);
        let of_rows = |more: &[&str]| of_grids.iter().cloned().chain(names(&["Add+Rows::add"])).chain(names(more)).collect::<BTreeSet<_>>();
        assert_eq!(found("Rows::of(1)"), of_rows(&["Rows::of"]));
        assert_eq!(found("use oxtile_kernels::Rows as Many; Many::of(1)"), of_rows(&["Rows::of"]));
        assert_eq!(found("x: Rows; x.policy()"), of_rows(&["Policy+Rows::policy"]));
        let policies = of_grids.iter().cloned().chain(names(&["Policy::policy", "Policy+Rows::policy"])).collect();
        assert_eq!(found("Policy; x.policy()"), policies);
        assert_eq!(found("x.len(0..device(1))"), of_grids);
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
            ("/ warp::LANES", "/ 2 * warp::LANES"),
            ("self.0 + other.0", "self.0 - other.0"),
            ("{ 5 }", "{ 6 }"),
            ("warp::sync(6)", "warp::sync(7)"),
            ("{ rows }", "{ rows + 1 }"),
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
