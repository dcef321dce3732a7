//! The functions of a kernel's source file, and what a program's host code sees of that file.

use std::{
    collections::{BTreeMap, BTreeSet},
    iter::Peekable,
};

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Group, Spacing, TokenStream, TokenTree};

/// A function with a body.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    /// Code of another crate may call it: it is `pub`, or a trait's.
    pub is_open: bool,
    /// It stands below `#[kernel]`: the host launches it and never calls it.
    pub is_kernel: bool,
    /// The words of its body.
    pub words: BTreeSet<String>,
}

/// A file without the bodies of its functions; bodies of `const` functions stay, which the compiler runs for the host.
#[derive(Debug, Default)]
pub struct Outline {
    pub functions: Vec<Function>,
    /// Words that stand outside of bodies, without names after `fn` and without what `use` names.
    pub words: BTreeSet<String>,
    /// The tokens, where `{}` stands for a body and its number in `functions` before it; no documentation.
    tokens: Vec<Token>,
}

#[derive(Debug)]
enum Token {
    Text(String),
    Body { function: usize, text: String },
}

impl Outline {
    /// # Errors
    /// The text is not made of Rust's tokens.
    pub fn of(text: &str) -> Result<Self> {
        let tokens: TokenStream = text.parse().map_err(|error| anyhow!("{error}"))?;
        let mut outline = Self::default();
        outline.items(tokens, false);
        Ok(outline)
    }

    /// The file with the bodies of the functions of these names alone: what code that calls no other function depends on.
    pub fn with_bodies(&self, names: &BTreeSet<String>) -> String {
        let text = |token: &Token| match token {
            Token::Text(text) => text.clone(),
            Token::Body { function, text } => {
                let Function { name, is_kernel, .. } = &self.functions[*function];
                if names.contains(name) && !is_kernel { text.clone() } else { "{}".to_owned() }
            }
        };
        self.tokens.iter().map(text).collect::<Vec<_>>().join(" ")
    }

    /// Items of a file, a module, an `impl` or a `trait`; `of_trait` where the functions are a trait's.
    fn items(&mut self, tokens: TokenStream, of_trait: bool) {
        let mut tokens = tokens.into_iter().peekable();
        let mut item = Item::default();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => self.attribute(&mut tokens, &mut item),
                TokenTree::Ident(ident) if ident == "fn" && matches!(tokens.peek(), Some(TokenTree::Ident(_))) => {
                    self.function(&mut tokens, &item, of_trait);
                    item = Item::default();
                }
                TokenTree::Group(group) => {
                    let whole = std::mem::take(&mut item);
                    match group.delimiter() {
                        // `impl Trait for Array<{ N }>`.
                        Delimiter::Brace if ends_generics(tokens.peek()) => {
                            self.seen(TokenTree::Group(group));
                            item = whole;
                        }
                        Delimiter::Brace if whole.has("mod") => self.nested(&group, false),
                        Delimiter::Brace if whole.has("impl") => self.nested(&group, whole.for_type),
                        Delimiter::Brace if whole.has("trait") => self.nested(&group, true),
                        Delimiter::Brace if whole.has("use") => self.text(&group),
                        Delimiter::Brace => self.seen(TokenTree::Group(group)),
                        _ => {
                            self.seen(TokenTree::Group(group));
                            // `pub(crate)` is not for other crates.
                            item = Item { is_public: whole.is_public && !whole.after_pub, ..whole };
                        }
                    }
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => {
                    self.text(&punct);
                    item = Item::default();
                }
                token => {
                    let generic = matches!(tokens.peek(), Some(TokenTree::Punct(next)) if next.as_char() == '<');
                    item.word(&token, generic);
                    // What `use` names is not called there.
                    if item.has("use") { self.text(&token) } else { self.seen(token) }
                }
            }
        }
    }

    /// Documentation is left out.
    fn attribute(&mut self, tokens: &mut Peekable<impl Iterator<Item = TokenTree>>, item: &mut Item) {
        // Of `#![..]`.
        let inner = tokens.next_if(|token| matches!(token, TokenTree::Punct(punct) if punct.as_char() == '!'));
        let Some(TokenTree::Group(group)) = tokens.next() else { return };
        let first = group.stream().into_iter().next().map(|token| token.to_string()).unwrap_or_default();
        if first != "doc" {
            item.is_kernel |= first == "kernel" && inner.is_none();
            self.seen(TokenTree::Group(group));
        }
    }

    fn nested(&mut self, group: &Group, of_trait: bool) {
        self.text(&"{");
        self.items(group.stream(), of_trait);
        self.text(&"}");
    }

    /// From the name on, to the body or the `;` of a function without one.
    fn function(&mut self, tokens: &mut Peekable<impl Iterator<Item = TokenTree>>, item: &Item, of_trait: bool) {
        let name = tokens.next().expect("a name was seen").to_string();
        self.text(&"fn");
        self.text(&name);
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Group(body) if body.delimiter() == Delimiter::Brace && !ends_generics(tokens.peek()) => {
                    if item.has("const") {
                        return self.seen(TokenTree::Group(body));
                    }
                    let mut words = BTreeSet::new();
                    collect(body.stream(), &mut words);
                    let is_open = item.is_public || of_trait;
                    self.tokens.push(Token::Body { function: self.functions.len(), text: body.to_string() });
                    self.functions.push(Function { name, is_open, is_kernel: item.is_kernel, words });
                    return;
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => return self.text(&punct),
                // What a signature computes with are `const` functions, whose bodies stay anyway.
                token => self.text(&without_documentation(token)),
            }
        }
    }

    fn text(&mut self, token: &dyn std::fmt::Display) {
        self.tokens.push(Token::Text(token.to_string()));
    }

    /// A token outside of bodies.
    fn seen(&mut self, token: TokenTree) {
        let token = without_documentation(token);
        self.text(&token);
        collect(TokenStream::from(token), &mut self.words);
    }
}

/// What was read of an item so far.
#[derive(Default)]
struct Item {
    words: BTreeSet<String>,
    is_public: bool,
    is_kernel: bool,
    /// `impl Trait for Type`.
    for_type: bool,
    after_pub: bool,
}

impl Item {
    fn word(&mut self, token: &TokenTree, generic: bool) {
        if let TokenTree::Ident(ident) = token {
            let word = ident.to_string();
            self.is_public |= word == "pub";
            // `for<'a>` names lifetimes.
            self.for_type |= word == "for" && !generic;
            self.after_pub = word == "pub";
            self.words.insert(word);
        }
    }

    fn has(&self, word: &str) -> bool {
        self.words.contains(word)
    }
}

fn without_documentation(token: TokenTree) -> TokenTree {
    let TokenTree::Group(group) = token else { return token };
    let mut kept = Vec::new();
    let mut tokens = group.stream().into_iter().peekable();
    while let Some(token) = tokens.next() {
        let documents = |next: &TokenTree| match next {
            TokenTree::Group(group) => group.stream().into_iter().next().is_some_and(|first| first.to_string() == "doc"),
            _ => false,
        };
        if matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '#') && tokens.next_if(documents).is_some() {
            continue;
        }
        kept.push(without_documentation(token));
    }
    Group::new(group.delimiter(), kept.into_iter().collect()).into()
}

/// Whether `{ .. }` before this token is an argument of generics: `Array<{ N }>`.
fn ends_generics(next: Option<&TokenTree>) -> bool {
    matches!(next, Some(TokenTree::Punct(punct)) if matches!(punct.as_char(), '>' | ','))
}

/// The words of tokens that may name a function, at any depth: no field that is read (`.rows`) or given (`rows: 1`).
fn collect(tokens: TokenStream, words: &mut BTreeSet<String>) {
    let mut tokens = tokens.into_iter().peekable();
    let mut after_dot = false;
    while let Some(token) = tokens.next() {
        match &token {
            TokenTree::Ident(ident) => {
                let is_field = match tokens.peek() {
                    Some(TokenTree::Punct(next)) if next.as_char() == ':' => next.spacing() == Spacing::Alone,
                    Some(TokenTree::Group(next)) => after_dot && next.delimiter() != Delimiter::Parenthesis,
                    _ => after_dot,
                };
                if !is_field {
                    words.insert(ident.to_string());
                }
            }
            TokenTree::Group(group) => collect(group.stream(), words),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        after_dot = matches!(&token, TokenTree::Punct(punct) if punct.as_char() == '.');
    }
}

/// The names of the functions that host code runs, by name alone and so rather too many: those that other crates' `words` name, those that stand outside
/// of bodies (grids, constants), and what their bodies name.
pub fn of_the_host<'a>(files: impl Iterator<Item = &'a Outline> + Clone, words: &BTreeSet<String>) -> BTreeSet<String> {
    let mut bodies: BTreeMap<&str, Vec<&Function>> = BTreeMap::new();
    for function in files.clone().flat_map(|file| &file.functions).filter(|function| !function.is_kernel) {
        bodies.entry(&function.name).or_default().push(function);
    }
    let outside: BTreeSet<_> = files.flat_map(|file| &file.words).map(String::as_str).collect();
    let called = |(name, functions): (&&'a str, &Vec<&Function>)| {
        outside.contains(name) || words.contains(*name) && functions.iter().any(|function| function.is_open)
    };
    let mut open: Vec<&str> = bodies.iter().filter(|&(name, functions)| called((name, functions))).map(|(&name, _)| name).collect();
    let mut found = BTreeSet::new();
    while let Some(name) = open.pop() {
        if found.insert(name.to_owned()) {
            let named = bodies[name].iter().flat_map(|function| &function.words);
            open.extend(named.map(String::as_str).filter(|word| bodies.contains_key(word) && !found.contains(*word)));
        }
    }
    found
}

/// The words of another crate's source that may name a function; what stands after `//` is left out.
pub fn words_of(text: &str, words: &mut BTreeSet<String>) {
    for line in text.lines().map(|line| line.split("//").next().unwrap_or(line)) {
        let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        let bytes = line.as_bytes();
        let mut at = 0;
        while at < bytes.len() {
            let length = bytes[at..].iter().take_while(|&&byte| is_word(byte)).count();
            let (before, after) = (at.checked_sub(1).map(|before| bytes[before]), bytes.get(at + length));
            let is_field = before == Some(b'.') && !matches!(after, Some(b'(' | b':'));
            if length > 0 && !bytes[at].is_ascii_digit() && !is_field {
                words.insert(line[at..at + length].to_owned());
            }
            at += length.max(1);
        }
    }
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
        fn rounded(rows: u32) -> u32 { rows + SIZE }
        pub const SIZE: u32 = size();
        const fn size() -> u32 { 4 }
        impl<const N: usize> Rows<N> { pub fn of(n: u32) -> Self { Self(n) } fn hidden(&self) { 1 } }
        impl Policy for Rows<{ 3 }> { fn policy(&self) -> u32 { 3 } }
    ";

    #[test]
    fn the_host_runs_grids_and_what_it_names() {
        let file = Outline::of(FILE).unwrap();
        let found = |words| of_the_host([&file].into_iter(), &names(words));
        assert_eq!(found(&["copy", "device", "hidden", "inner"]), names(&["rounded", "rows_grid"]));
        assert_eq!(found(&["of", "policy"]), names(&["of", "policy", "rounded", "rows_grid"]));
    }

    #[test]
    fn bodies_of_device_functions_alone_may_change() {
        let host = of_the_host([&Outline::of(FILE).unwrap()].into_iter(), &names(&["of"]));
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
            ("fn policy(&self) -> u32 { 3 }", "fn policy(&self) -> u32 { 4 }"),
        ] {
            assert_eq!(outline(from, to), whole, "{from}");
        }
        for (from, to) in [
            ("rounded(args", "2 * rounded(args"),
            ("rows + SIZE", "rows - SIZE"),
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
    fn words_of_a_host() {
        let mut words = BTreeSet::new();
        words_of("let a2 = x.rows + y.count() + z.map::<u8>(f); // of comments", &mut words);
        assert_eq!(words, names(&["a2", "count", "f", "let", "map", "u8", "x", "y", "z"]));
    }
}
