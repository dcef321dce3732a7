//! Reads a PTX module, writes launch bounds into it and cuts it into one module an entry.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::labels;

/// How a metadata comment begins; `#[kernel]` writes one such line an entry at module level.
const METADATA: &str = "// oxtile.kernel ";

/// What `#[kernel]` says of one entry, read back from the PTX.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Meta {
    /// The entry's name, `amax__bf16`.
    pub name: String,
    /// The family: the source file or folder that holds the kernel.
    pub family: String,
    /// Threads of a block in x, y and z.
    pub threads: [u32; 3],
    /// Blocks that must fit on a multiprocessor at once; 0 leaves it to ptxas.
    #[serde(default)]
    pub min_blocks: u32,
    /// Blocks of a cluster; 1 is no cluster.
    #[serde(default = "one")]
    pub cluster: u32,
    /// Dynamic shared memory of a block in bytes.
    #[serde(default)]
    pub shared: u32,
    /// The architecture the kernel needs, `sm_90a`; empty if it needs none.
    #[serde(default)]
    pub requires: String,
    /// The parameters, as `#[kernel]` describes them.
    #[serde(default)]
    pub params: serde_json::Value,
    /// The words of the parameters: the PTX parameters of the entry.
    #[serde(default)]
    pub words: u32,
    /// 1 if the program knows the hash of the kernel's sources, else 0.
    #[serde(default)]
    pub hashed: u32,
}

impl Meta {
    /// Why the entry may not be launched, whose operations these are: as `KernelInfo::begins_early` of `oxtile-tile` says, kernels that require sm_90 or later may begin
    /// before what the launches ahead of them stored is in memory.
    pub(crate) fn begins_too_early(&self, operations: &BTreeMap<String, u32>) -> Option<String> {
        let begins_early = matches!(self.requires.as_bytes(), [b's', b'm', b'_', b'9' | b'1', ..]);
        let waits = operations.get(LAUNCH_WAIT).copied().unwrap_or(0);
        (begins_early && waits != 1).then(|| {
            let requires = &self.requires;
            format!(
                "it requires {requires}, so it may begin before what the launches ahead stored is in memory, and has {waits} `griddepcontrol.wait` where it \
                 must have one: build it with the `oxtile-tile` whose `#[kernel]` writes the wait"
            )
        })
    }
}

fn one() -> u32 {
    1
}

/// One entry as a module of its own.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What `#[kernel]` says of it.
    pub meta: Meta,
    /// The module: header, launch bounds, the entry and everything it refers to.
    pub text: String,
    /// Functions it calls that are defined nowhere.
    pub unresolved: Vec<String>,
}

/// A declaration or definition at module level.
struct Item {
    text: String,
    name: String,
    kind: Kind,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Entry,
    Function,
    ExternFunction,
    Variable,
}

/// Cuts a module as rustc writes it into one module an entry, with launch bounds. The text of an entry does not tell which others stood beside it.
///
/// The error says what in the module is not as `#[kernel]` makes it.
pub fn split(module: &str) -> Result<Vec<Entry>, String> {
    let Module { header, items, metadata, files } = parse(module)?;
    let entries = items.iter().filter(|item| item.kind == Kind::Entry);
    let entry = |item: &Item| {
        let meta = metadata.get(&item.name).cloned().ok_or_else(|| {
            format!("entry `{}` has no metadata comment; declare kernels with #[kernel], not with extern \"ptx-kernel\"", item.name)
        })?;
        let used = reachable(item, &items);
        let resolved: BTreeSet<_> = used.iter().filter(|item| item.kind != Kind::ExternFunction).map(|item| &item.name).collect();
        let unresolved = used.iter().filter(|item| item.kind == Kind::ExternFunction && !resolved.contains(&item.name));
        let unresolved = unresolved.map(|item| item.name.clone()).collect();
        let mut text = header.clone();
        for item in used {
            text.push_str(&item.text);
        }
        text.push_str(&with_bounds(&item.text, &meta));
        text.push_str(&files);
        let text = with_isa_version(labels::renumber(&text));
        Ok(Entry { meta, text, unresolved })
    };
    entries.map(entry).collect()
}

struct Module {
    header: String,
    items: Vec<Item>,
    metadata: BTreeMap<String, Meta>,
    /// The `.file` directives, which the `.loc` of every function refer to.
    files: String,
}

fn parse(module: &str) -> Result<Module, String> {
    let (mut header, mut files, mut items, mut metadata) = (String::new(), String::new(), Vec::new(), BTreeMap::new());
    let mut lines = module.lines();
    while let Some(line) = lines.next() {
        let start = line.trim();
        if let Some(json) = start.strip_prefix(METADATA) {
            let meta: Meta = serde_json::from_str(json).map_err(|error| format!("metadata `{json}`: {error}"))?;
            metadata.insert(meta.name.clone(), meta);
        } else if start.starts_with(".file") {
            files.push_str(&format!("{line}\n"));
        } else if [".version", ".target", ".address_size"].iter().any(|directive| start.starts_with(directive)) {
            // With line tables rustc also asks for `debug`, which needs sections that are of no use here.
            header.push_str(&format!("{}\n", line.trim_end_matches(", debug")));
        } else if start.starts_with('.') {
            let text = whole_item(line, &mut lines);
            if !start.starts_with(".section") {
                items.push(classify(text)?);
            }
        }
    }
    Ok(Module { header, items, metadata, files })
}

/// From its first line to the `;` or `}` that ends it.
fn whole_item<'a>(first: &'a str, lines: &mut impl Iterator<Item = &'a str>) -> String {
    let is_block = [".entry", ".func", ".section"].iter().any(|word| first.split_whitespace().any(|token| token == *word));
    let (mut text, mut depth, mut line) = (String::new(), 0usize, Some(first));
    while let Some(current) = line {
        text.push_str(current);
        text.push('\n');
        let code = code_of(current);
        let mut closed = false;
        for byte in code.bytes() {
            match byte {
                b'{' => depth += 1,
                b'}' => (depth, closed) = (depth.saturating_sub(1), true),
                _ => {}
            }
        }
        if depth == 0 && (code.ends_with(';') || is_block && closed) {
            break;
        }
        line = lines.next();
    }
    text
}

/// A line without its comment and outer space.
fn code_of(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim()
}

fn classify(text: String) -> Result<Item, String> {
    let has_body = text.contains('{');
    let declaration = text.split(['{', '=']).next().unwrap_or_default();
    let directives: Vec<&str> = declaration.split_whitespace().take_while(|token| token.starts_with('.')).collect();
    let kind = match () {
        () if directives.contains(&".entry") => Kind::Entry,
        () if directives.contains(&".func") && has_body => Kind::Function,
        () if directives.contains(&".func") && directives.contains(&".extern") => Kind::ExternFunction,
        () if directives.contains(&".func") => Kind::Function,
        () => Kind::Variable,
    };
    let name = match kind {
        Kind::Entry => declaration.split(".entry").nth(1).and_then(identifier),
        Kind::Function | Kind::ExternFunction => declaration.split(".func").nth(1).map(after_results).and_then(identifier),
        // The type and alignment come first, the name last, before its dimensions.
        Kind::Variable => declaration.trim_end_matches([';', '\n']).split_whitespace().last().and_then(identifier),
    };
    let name = name.ok_or_else(|| format!("cannot find the name in `{}`", declaration.trim()))?.to_owned();
    Ok(Item { text, name, kind })
}

/// A function's declaration after its list of results, `(.param .b32 r) name (...)`.
fn after_results(declaration: &str) -> &str {
    match declaration.trim_start().strip_prefix('(') {
        Some(results) => results.split_once(')').map_or("", |(_, rest)| rest),
        None => declaration,
    }
}

fn is_identifier(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

fn identifier(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let end = text.find(|c| !is_identifier(c)).unwrap_or(text.len());
    (end > 0).then(|| &text[..end])
}

/// The items that an entry refers to, directly or through others, in the order of the module.
fn reachable<'a>(entry: &Item, items: &'a [Item]) -> Vec<&'a Item> {
    let mut used: BTreeSet<usize> = BTreeSet::new();
    let mut texts = vec![entry.text.as_str()];
    while let Some(text) = texts.pop() {
        let words: BTreeSet<&str> = text.lines().flat_map(|line| code_of(line).split(|c| !is_identifier(c))).collect();
        for (index, item) in items.iter().enumerate() {
            if item.kind != Kind::Entry && words.contains(item.name.as_str()) && used.insert(index) {
                texts.push(&item.text);
            }
        }
    }
    used.into_iter().map(|index| &items[index]).collect()
}

/// Instructions that need a later PTX ISA than the one that LLVM writes for the oldest architecture that has them (PTX ISA, the
/// "PTX ISA Notes" of each instruction).
const LATER_ISA: [(&str, [u32; 2]); 4] = [
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3", [8, 4]),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e5m2", [8, 4]),
    ("createpolicy.fractional", [7, 4]),
    ("red.relaxed.gpu.global.add.v4.f32", [8, 1]),
];

/// The entry with the PTX ISA version that its instructions need: LLVM does not look into inline assembly.
fn with_isa_version(text: String) -> String {
    let needed = LATER_ISA.iter().filter(|(instruction, _)| text.contains(instruction)).map(|(_, version)| *version).max();
    let Some(line) = text.lines().find(|line| line.starts_with(".version ")) else { return text };
    let stated = line
        .trim_start_matches(".version ")
        .split_once('.')
        .and_then(|(major, minor)| Some([major.trim().parse().ok()?, minor.trim().parse().ok()?]));
    match (needed, stated) {
        (Some(needed @ [major, minor]), Some(stated)) if stated < needed => text.replacen(line, &format!(".version {major}.{minor}"), 1),
        _ => text,
    }
}

/// The entry with its performance directives between parameters and body (PTX ISA, "Performance-Tuning Directives").
/// Without `.maxntid` ptxas ignores setmaxnreg and may use more registers than the block's threads can have.
fn with_bounds(entry: &str, meta: &Meta) -> String {
    let [x, y, z] = meta.threads;
    let mut bounds = format!(".maxntid {x}, {y}, {z}\n");
    if meta.min_blocks > 0 {
        bounds.push_str(&format!(".minnctapersm {}\n", meta.min_blocks));
    }
    if meta.cluster > 1 {
        bounds.push_str(&format!(".explicitcluster\n.reqnctapercluster {}, 1, 1\n", meta.cluster));
    }
    entry.replacen("\n{", &format!("\n{bounds}{{"), 1)
}

/// The operations counted, with the beginnings of their mnemonics.
const COUNTED: [(&str, &[&str]); 11] = [
    ("bar", &["bar.sync", "bar.arrive", "bar.red", "barrier."]),
    ("warp_bar", &["bar.warp."]),
    ("shfl", &["shfl."]),
    ("elect", &["elect."]),
    ("vote", &["vote."]),
    ("redux", &["redux."]),
    ("mbarrier", &["mbarrier."]),
    ("mma", &["mma."]),
    ("wgmma", &["wgmma."]),
    ("setmaxnreg", &["setmaxnreg."]),
    (LAUNCH_WAIT, &["griddepcontrol.wait"]),
];

/// The wait for the launches ahead.
const LAUNCH_WAIT: &str = "launch_wait";

/// How often each counted operation stands in a module; those that do not occur are left out.
///
/// One more than the source has is a collective that the compiler duplicated into divergent branches: a hang.
pub fn count_operations(module: &str) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for operation in module.lines().flat_map(operations) {
        *counts.entry(operation.to_owned()).or_default() += 1;
    }
    counts
}

/// The counted operations of one line.
pub(crate) fn operations(line: &str) -> impl Iterator<Item = &'static str> {
    // Inline assembly may hold several instructions on a line, in braces.
    code_of(line).split([';', '{', '}']).filter_map(|statement| {
        let mut words = statement.split_whitespace().skip_while(|word| word.starts_with('@') || word.ends_with(':'));
        let mnemonic = words.next().unwrap_or_default();
        let counted = COUNTED.iter().find(|(_, beginnings)| beginnings.iter().any(|beginning| mnemonic.starts_with(beginning)));
        counted.map(|(operation, _)| *operation)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODULE: &str = r#"//
.version 8.0
.target sm_90a, debug
.address_size 64

// oxtile.kernel {"name":"first","family":"f","threads":[128,1,1],"min_blocks":2,"cluster":2,"shared":64,"requires":"","params":[],"words":0}
// oxtile.kernel {"name":"second","family":"f","threads":[32,2,1]}
.extern .shared .align 16 .b8 arena[];
.global .align 4 .b8 table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
.extern .func  (.param .b32 func_retval0) outside
(
	.param .b64 outside_param_0
)
;
.func helper(
)
{
	mov.u32 %r1, table;
	ret;
}
	// .globl	first
.visible .entry first(
	.param .u64 .ptr .align 1 first_param_0
)
{
	.loc	1 7 0
	mov.u32 %r1, arena;
	call.uni helper, ();
	@%p1 bra 	$L__BB0_2;
	{ .reg .pred p; setp.ne.u32 p, %r1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%r1]; }
	bar.sync 	0, 128;	// bar.sync in a comment
again:	bar.warp.sync -1;
	ret;
}
.visible .entry second(
	.param .u64 second_param_0
)
{
	call.uni (retval0), outside, (param0);
	ret;
}
	.file	1 "src/lib.rs"
	.section	.debug_abbrev
	{
.b8 1
	}
"#;

    #[test]
    fn an_entry_takes_what_it_uses_and_nothing_else() {
        let entries = split(MODULE).unwrap();
        let [first, second] = &entries[..] else { panic!("{entries:?}") };
        for word in ["arena[]", "table[8]", ".func helper", ".file", ".target sm_90a\n"] {
            assert!(first.text.contains(word), "{word} in\n{}", first.text);
        }
        for word in ["arena", "table", "helper", ".section", "first"] {
            assert!(!second.text.contains(word), "{word} in\n{}", second.text);
        }
        assert!(first.unresolved.is_empty());
        assert_eq!(second.unresolved, ["outside"]);
    }

    #[test]
    fn bounds_stand_between_parameters_and_body() {
        let entries = split(MODULE).unwrap();
        let first = ")\n.maxntid 128, 1, 1\n.minnctapersm 2\n.explicitcluster\n.reqnctapercluster 2, 1, 1\n{\n\t.loc";
        assert!(entries[0].text.contains(first), "{}", entries[0].text);
        assert!(entries[1].text.contains(")\n.maxntid 32, 2, 1\n{\n\tcall"), "{}", entries[1].text);
    }

    #[test]
    fn an_instruction_of_a_later_isa_raises_the_version() {
        let later = MODULE.replace("mov.u32 %r1, arena;", "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1};");
        let versions = |module: &str| {
            split(module).unwrap().into_iter().map(|entry| entry.text.lines().next().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(versions(&later), [".version 8.4", ".version 8.0"]);
        let policy = MODULE
            .replace(".version 8.0", ".version 7.0")
            .replace("mov.u32 %r1, arena;", "createpolicy.fractional.L2::evict_last.b64 %rd1, 1.0;");
        assert_eq!(versions(&policy), [".version 7.4", ".version 7.0"]);
        assert_eq!(versions(&later.replace(".version 8.0", ".version 8.6")), [".version 8.6"; 2]);
    }

    #[test]
    fn operations_are_counted_in_code_only() {
        let counts = count_operations(&split(MODULE).unwrap()[0].text);
        let expected = [("bar", 1), ("mbarrier", 1), ("warp_bar", 1)].map(|(name, count)| (name.to_owned(), count));
        assert_eq!(counts, BTreeMap::from(expected));
    }

    #[test]
    fn a_kernel_that_may_begin_early_waits_once() {
        let wait = "\tgriddepcontrol.wait;\n";
        for (requires, waits, is_refused) in
            [("sm_90a", 1, false), ("sm_90a", 0, true), ("sm_90", 2, true), ("sm_100a", 0, true), ("sm_89", 0, false), ("", 0, false)]
        {
            let meta = serde_json::json!({ "name": "kernel", "family": "f", "threads": [32, 1, 1], "requires": requires });
            let meta: Meta = serde_json::from_value(meta).unwrap();
            let why = meta.begins_too_early(&count_operations(&wait.repeat(waits)));
            assert_eq!(why.is_some(), is_refused, "{requires}, {waits} waits: {why:?}");
        }
    }

    #[test]
    fn an_entry_without_metadata_is_an_error() {
        let module = MODULE.replace("\"name\":\"second\"", "\"name\":\"third\"");
        assert!(split(&module).unwrap_err().contains("entry `second` has no metadata comment"));
    }
}
