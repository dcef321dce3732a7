//! The functions of a file of kernels, and the file without them: what code that calls none of them depends on.

use std::{collections::BTreeSet, iter::Peekable};

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// What only a thread of a kernel can do, or has: on the host it panics. The modules of the DSL and the types that its functions take.
const OF_DEVICES: [&str; 12] = [
    "atomic",
    "block",
    "cluster",
    "sync",
    "thread",
    "warp",
    "warpgroup",
    "Global",
    "GlobalMut",
    "SharedArray",
    "RegisterTile",
    "TensorMap",
];

/// What only host code has: who checks arguments and makes a grid of them takes it or gives it. And how the types of arguments end.
const OF_HOSTS: [&str; 4] = ["Checked", "DeviceLimits", "Grid", "LaunchError"];
const ARGUMENTS: [&str; 3] = ["Args", "Argument", "Table"];

/// A function with a body.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    /// Code of another crate may call it: it is `pub`, or a trait's.
    pub is_open: bool,
    pub owner: Owner,
    /// It stands below `#[kernel]`: host code launches it.
    pub is_kernel: bool,
    /// It checks arguments, or belongs to them: host code runs it.
    pub is_of_hosts: bool,
    /// Host code never calls it, unless it is a grid: it is a kernel, takes what kernels alone have, or asks what thread it is.
    pub is_of_devices: bool,
    /// What its body names.
    pub calls: BTreeSet<Call>,
}

impl Function {
    /// What tells it from others: `Type::name`, `Type+Trait::name`, `name`.
    pub fn path(&self) -> String {
        let Owner { types, of_trait } = &self.owner;
        let owner: Vec<_> = of_trait.iter().chain(types).map(String::as_str).collect();
        if owner.is_empty() { self.name.clone() } else { format!("{}::{}", owner.join("+"), self.name) }
    }
}

/// What a function belongs to: nothing, types, a trait, or a trait of types.
#[derive(Clone, Debug, Default)]
pub struct Owner {
    /// The words that name the type, without those of its generics; none of a trait's own functions, and of those of primitive types.
    pub types: Vec<String>,
    pub of_trait: Option<String>,
}

impl Owner {
    pub fn is_none(&self) -> bool {
        self.types.is_empty() && self.of_trait.is_none()
    }

    /// The words that name the type and the trait.
    pub fn words(&self) -> impl Iterator<Item = &String> {
        self.types.iter().chain(&self.of_trait)
    }
}

/// A name that may be that of a function which is called.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    /// `name`, alone.
    Free(String),
    /// `.name(`
    Method(String),
    /// `of::name`, of a module, a type or a trait.
    Path { of: String, name: String },
}

impl Call {
    pub fn name(&self) -> &str {
        let (Self::Free(name) | Self::Method(name) | Self::Path { name, .. }) = self;
        name
    }

    /// Whether it may be this function, of the same name, where these are all words that name types and traits.
    pub fn may_be(&self, function: &Function, known: &BTreeSet<String>) -> bool {
        let owner = &function.owner;
        match self {
            Self::Free(_) => owner.is_none(),
            Self::Method(_) => !owner.is_none(),
            // What is no known name may stand for any: a generic parameter, an alias, `Self`. A trait's own functions are those of all its types.
            Self::Path { of, .. } => {
                !known.contains(of) || owner.types.is_empty() && !owner.is_none() || owner.words().any(|word| word == of)
            }
        }
    }
}

/// A file without the bodies of its functions; bodies of `const` functions stay, which the compiler runs for the host.
#[derive(Debug, Default)]
pub struct Outline {
    pub functions: Vec<Function>,
    /// What attributes, constants, macros and bodies of `const` functions name.
    pub calls: BTreeSet<Call>,
    /// What attributes of kernels name: their grids.
    pub of_kernels: BTreeSet<Call>,
    /// The traits that it defines.
    pub traits: BTreeSet<String>,
    /// Every word.
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
        words(tokens.clone(), &mut outline.words);
        outline.items(tokens, &Owner::default());
        Ok(outline)
    }

    /// The file with the bodies of these functions alone, by their paths: what code that calls no other function depends on.
    pub fn with_bodies(&self, paths: &BTreeSet<String>) -> String {
        let text = |token: &Token| match token {
            Token::Text(text) => text.clone(),
            Token::Body { function, text } => {
                let function = &self.functions[*function];
                if paths.contains(&function.path()) { text.clone() } else { "{}".to_owned() }
            }
        };
        self.tokens.iter().map(text).collect::<Vec<_>>().join(" ")
    }

    /// Items of a file, a module, an `impl` or a `trait`.
    fn items(&mut self, tokens: TokenStream, owner: &Owner) {
        let mut tokens = tokens.into_iter().peekable();
        let mut item = Item::default();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == '#' => self.attribute(&mut tokens, &mut item),
                TokenTree::Ident(ident) if ident == "fn" && matches!(tokens.peek(), Some(TokenTree::Ident(_))) => {
                    self.function(&mut tokens, &item, owner);
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
                        Delimiter::Brace if whole.has("mod") => self.nested(&group, &Owner::default()),
                        Delimiter::Brace if whole.has("impl") || whole.has("trait") => {
                            self.traits.extend(whole.types.first().filter(|_| whole.has("trait")).cloned());
                            self.nested(&group, &whole.owner());
                        }
                        Delimiter::Brace if whole.has("use") => {
                            self.text(&group);
                            self.renamed_in(group.stream());
                        }
                        Delimiter::Brace => self.part(TokenTree::Group(group), &whole),
                        _ => {
                            self.part(TokenTree::Group(group), &whole);
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
                    // What `use` names is not called there, but by another name it may be.
                    if item.has("use") {
                        self.renamed(&token, tokens.peek());
                    }
                    self.part(token, &item);
                }
            }
        }
    }

    /// A token of an item that is no function. Constants may hold functions, and macros anything; types call none.
    fn part(&mut self, token: TokenTree, item: &Item) {
        if ["const", "static", "macro_rules"].iter().any(|word| item.has(word)) || item.is_macro {
            self.seen(token);
        } else {
            self.text(&without_documentation(token));
        }
    }

    /// `name as other`: a call of another name may be of this one.
    fn renamed(&mut self, token: &TokenTree, next: Option<&TokenTree>) {
        if let (TokenTree::Ident(name), Some(TokenTree::Ident(next))) = (token, next)
            && next == "as"
        {
            self.calls.insert(Call::Path { of: String::new(), name: name.to_string() });
        }
    }

    fn renamed_in(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            self.renamed(&token, tokens.peek());
            if let TokenTree::Group(group) = token {
                self.renamed_in(group.stream());
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
            if first == "kernel" && inner.is_none() {
                item.is_kernel = true;
                collect(group.stream(), &mut self.of_kernels);
            }
            self.seen(TokenTree::Group(group));
        }
    }

    fn nested(&mut self, group: &Group, owner: &Owner) {
        self.text(&"{");
        self.items(group.stream(), owner);
        self.text(&"}");
    }

    /// From the name on, to the body or the `;` of a function without one.
    fn function(&mut self, tokens: &mut Peekable<impl Iterator<Item = TokenTree>>, item: &Item, owner: &Owner) {
        let name = tokens.next().expect("a name was seen").to_string();
        self.text(&"fn");
        self.text(&name);
        let mut signature = Vec::new();
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Group(body) if body.delimiter() == Delimiter::Brace && !ends_generics(tokens.peek()) => {
                    if item.has("const") {
                        return self.seen(TokenTree::Group(body));
                    }
                    let mut calls = BTreeSet::new();
                    collect(body.stream(), &mut calls);
                    let signature: TokenStream = signature.into_iter().collect();
                    let mut named = BTreeSet::new();
                    words(signature.clone(), &mut named);
                    let is_of_arguments = owner.types.iter().any(|word| ARGUMENTS.iter().any(|end| word.ends_with(end)));
                    let is_of_hosts = !item.is_kernel && (is_of_arguments || OF_HOSTS.iter().any(|word| named.contains(*word)));
                    let is_of_devices =
                        item.is_kernel || !is_of_hosts && (is_of_devices(signature, false) || is_of_devices(body.stream(), true));
                    let is_open = item.is_public || owner.of_trait.is_some();
                    self.tokens.push(Token::Body { function: self.functions.len(), text: body.to_string() });
                    self.functions.push(Function {
                        name,
                        is_open,
                        owner: owner.clone(),
                        is_kernel: item.is_kernel,
                        is_of_hosts,
                        is_of_devices,
                        calls,
                    });
                    return;
                }
                TokenTree::Punct(punct) if punct.as_char() == ';' => return self.text(&punct),
                // What a signature computes with are `const` functions, whose bodies stay anyway.
                token => {
                    self.text(&without_documentation(token.clone()));
                    signature.push(token);
                }
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
        collect(TokenStream::from(token), &mut self.calls);
    }
}

/// What was read of an item so far.
#[derive(Default)]
struct Item {
    words: BTreeSet<String>,
    /// Those that begin with a large letter, in order, outside of `<..>`.
    types: Vec<String>,
    depth: i32,
    after_dash: bool,
    is_macro: bool,
    is_public: bool,
    is_kernel: bool,
    /// `impl Trait for Type`.
    for_type: bool,
    after_pub: bool,
}

impl Item {
    fn word(&mut self, token: &TokenTree, generic: bool) {
        if let TokenTree::Punct(punct) = token {
            // `->` ends no generics.
            let ends = punct.as_char() == '>' && !self.after_dash;
            self.depth += i32::from(punct.as_char() == '<') - i32::from(ends);
        }
        self.is_macro |= matches!(token, TokenTree::Punct(punct) if punct.as_char() == '!');
        self.after_dash = matches!(token, TokenTree::Punct(punct) if punct.as_char() == '-');
        if let TokenTree::Ident(ident) = token {
            let word = ident.to_string();
            let ends = self.has("where") || word == "where";
            if self.depth == 0 && !ends && word.starts_with(char::is_uppercase) {
                self.types.push(word.clone());
            }
            self.is_public |= word == "pub";
            // `for<'a>` names lifetimes.
            self.for_type |= word == "for" && !generic;
            self.after_pub = word == "pub";
            self.words.insert(word);
        }
    }

    /// Of the functions of an `impl` or a `trait`.
    fn owner(&self) -> Owner {
        let mut types = self.types.iter().cloned();
        let of_trait = if self.has("trait") || self.for_type { types.next() } else { None };
        Owner { types: if self.has("trait") { Vec::new() } else { types.collect() }, of_trait }
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

/// Whether tokens have a word of [`OF_DEVICES`]; in a body, one whose function is called (`warp::LANES` is for all to know).
fn is_of_devices(tokens: TokenStream, in_body: bool) -> bool {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let calls = |after: &[TokenTree]| match after {
        [TokenTree::Punct(_), TokenTree::Punct(_), TokenTree::Ident(function), ..] => !function.to_string().starts_with(char::is_uppercase),
        _ => false,
    };
    (0..tokens.len()).any(|at| match &tokens[at] {
        TokenTree::Ident(ident) => OF_DEVICES.iter().any(|word| ident == word) && (!in_body || calls(&tokens[at + 1..])),
        TokenTree::Group(group) => is_of_devices(group.stream(), in_body),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

/// What tokens may call, at any depth: no field that is read (`.rows`) or given (`rows: 1`), and no module before a name (`rows::grid`).
fn collect(tokens: TokenStream, calls: &mut BTreeSet<Call>) {
    let tokens: Vec<_> = tokens.into_iter().collect();
    let is = |at: Option<usize>, char| matches!(at.and_then(|at| tokens.get(at)), Some(TokenTree::Punct(punct)) if punct.as_char() == char);
    // The last word; none after generics, `Type::<..>::name`, which may be of any type.
    let mut of = String::new();
    for (at, token) in tokens.iter().enumerate() {
        let back = |by: usize| at.checked_sub(by);
        match token {
            TokenTree::Group(group) => collect(group.stream(), calls),
            TokenTree::Punct(punct) if punct.as_char() == '>' => of.clear(),
            TokenTree::Ident(ident) => {
                let next = tokens.get(at + 1);
                let (colon, path) = (is(Some(at + 1), ':'), is(Some(at + 1), ':') && is(Some(at + 2), ':'));
                let is_called = path || matches!(next, Some(TokenTree::Group(next)) if next.delimiter() == Delimiter::Parenthesis);
                let is_module = path && matches!(tokens.get(at + 3), Some(TokenTree::Ident(_)));
                let name = ident.to_string();
                if is(back(1), ':') && is(back(2), ':') {
                    calls.insert(Call::Path { of: std::mem::take(&mut of), name });
                } else if is(back(1), '.') && !is(back(2), '.') {
                    calls.extend(is_called.then_some(Call::Method(name)));
                } else if !is_module && (path || !colon) {
                    calls.insert(Call::Free(name));
                }
                of = ident.to_string();
            }
            _ => {}
        }
    }
}

fn words(tokens: TokenStream, found: &mut BTreeSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => drop(found.insert(ident.to_string())),
            TokenTree::Group(group) => words(group.stream(), found),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}
