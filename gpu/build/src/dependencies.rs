//! Whether a crate and all that it depends on can be compiled for the GPU: rustc tells it by thousands of errors, after minutes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    Error, Toolchain,
    compile::{Project, cargo},
    recipe::TARGET,
    tool,
};

/// The table of dependencies that are not compiled for the GPU.
const HOST_TABLE: &str = "[target.'cfg(not(target_arch = \"nvptx64\"))'.dependencies]";

/// The line with which the root of a crate leaves std out on the GPU alone.
const NO_STD: &str = "#![cfg_attr(target_arch = \"nvptx64\", no_std)]";

/// What `cfg` says of device code, but for features.
const TARGET_CFG: [&str; 6] = [
    "target_arch=\"nvptx64\"",
    "target_os=\"cuda\"",
    "target_vendor=\"nvidia\"",
    "target_pointer_width=\"64\"",
    "target_endian=\"little\"",
    "panic=\"abort\"",
];

/// A crate of the device's graph as cargo's tree lists it: a parent comes before what it depends on.
struct Node {
    depth: usize,
    name: String,
    version: String,
    features: BTreeSet<String>,
}

/// Fails if the crate or one of its dependencies needs std on the GPU: one line for each mend.
pub(crate) fn check(project: &Project, toolchain: &Toolchain) -> Result<(), Error> {
    let roots = library_roots(project, toolchain)?;
    let nodes = device_graph(project, toolchain)?;
    let mut direct = "";
    let (mut lines, mut named) = (Vec::new(), BTreeSet::new());
    for node in &nodes {
        if node.depth == 1 {
            direct = &node.name;
        }
        // What is above it is named already.
        if node.depth > 0 && named.contains(direct) {
            continue;
        }
        let root = roots.get(&(node.name.clone(), node.version.clone()));
        if node.depth == 0 && root.is_none() {
            lines.push(format!(
                "{}: there is no library (src/lib.rs), the part of a package that is compiled for the GPU",
                project.manifest.display()
            ));
        }
        let Some(root) = root else { continue };
        let source = fs::read_to_string(root).map_err(Error::file("read", root))?;
        let Some(missing) = missing(&source, &node.features) else { continue };
        if node.depth == 0 {
            lines
                .push(format!("{}: this crate needs {missing}, which the GPU does not have: begin the file with {NO_STD}", root.display()));
            continue;
        }
        named.insert(direct);
        let who = match node.depth {
            1 => format!("`{direct}` needs"),
            _ => format!("`{direct}` depends on `{}`, which needs", node.name),
        };
        let features = match self::missing(&source, &BTreeSet::new()) {
            None => ", or leave out the features that ask for it (`default-features = false`)",
            Some(_) => "",
        };
        let manifest = project.manifest.display();
        lines.push(format!("{manifest}: {who} {missing}, which the GPU does not have: move `{direct}` to {HOST_TABLE}{features}"));
    }
    if lines.is_empty() { Ok(()) } else { Err(Error::NeedsStd(lines)) }
}

/// The root file of every library that may be compiled for the GPU, by name and version.
fn library_roots(project: &Project, toolchain: &Toolchain) -> Result<BTreeMap<(String, String), PathBuf>, Error> {
    let mut metadata = cargo(toolchain);
    metadata.args(["metadata", "--format-version", "1", "--filter-platform", TARGET, "--manifest-path"]).arg(&project.manifest);
    let json: Value = serde_json::from_str(&tool::output("reading the dependencies", &mut metadata)?)
        .map_err(|error| Error::content(&project.manifest, format!("cargo metadata: {error}")))?;
    let root = |package: &Value| {
        let is_library = |target: &&Value| {
            target["kind"].as_array().into_iter().flatten().any(|kind| kind.as_str().is_some_and(|kind| kind.ends_with("lib")))
        };
        let target = package["targets"].as_array()?.iter().find(is_library)?;
        let [name, version] = ["name", "version"].map(|key| package[key].as_str().map(str::to_owned));
        Some(((name?, version?), Path::new(target["src_path"].as_str()?).to_owned()))
    };
    Ok(json["packages"].as_array().into_iter().flatten().filter_map(root).collect())
}

/// The crate and what it depends on for the GPU, with the features that are asked for there: `cargo metadata` mixes in those of the host.
fn device_graph(project: &Project, toolchain: &Toolchain) -> Result<Vec<Node>, Error> {
    let mut tree = cargo(toolchain);
    tree.args(["tree", "--quiet", "--target", TARGET, "--edges", "normal,no-proc-macro", "--prefix", "depth", "--format", "|{p}|{f}"]);
    tree.arg("--manifest-path").arg(&project.manifest);
    let text = tool::output("reading the dependencies", &mut tree)?;
    let node = |line: &str| {
        let [depth, package, features] = line.splitn(3, '|').collect::<Vec<_>>().try_into().ok()?;
        let mut words = package.split_whitespace();
        let (name, version) = (words.next()?, words.next()?.trim_start_matches('v'));
        // ` (*)` stands after the features of a crate that was listed before.
        let features = features.split_whitespace().next().unwrap_or_default().split(',').filter(|name| *name != "(*)");
        Some(Node {
            depth: depth.parse().ok()?,
            name: name.into(),
            version: version.into(),
            features: features.map(str::to_owned).collect(),
        })
    };
    Ok(text.lines().filter_map(node).collect())
}

/// `std` or `alloc`, if the root file of a crate asks for it on the GPU.
fn missing(source: &str, features: &BTreeSet<String>) -> Option<&'static str> {
    let lines: Vec<&str> = source.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    if !inner_attributes(&lines.join("\n")).iter().any(|attribute| leaves_std_out(attribute, features)) {
        return Some("std");
    }
    ["std", "alloc"].into_iter().find(|name| {
        let declares = |line: &str| {
            let declared = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("extern crate ").and_then(|rest| rest.strip_prefix(name));
            declared.is_some_and(|rest| rest.starts_with([';', ' ']))
        };
        (0..lines.len()).filter(|at| declares(lines[*at])).any(|at| {
            let attributes = attributes_before(&lines[..at].join("\n"));
            attributes.iter().filter_map(|attribute| inside(attribute, "cfg")).all(|condition| holds(condition, features))
        })
    })
}

/// Whether `no_std` or `cfg_attr(condition, no_std)`, without its spaces, applies.
fn leaves_std_out(attribute: &str, features: &BTreeSet<String>) -> bool {
    let is_it = |name: &str| name == "no_std" || name == "no_core";
    match inside(attribute, "cfg_attr") {
        Some(arguments) => match parts(arguments).split_first() {
            Some((condition, attributes)) => attributes.iter().any(|name| is_it(name)) && holds(condition, features),
            None => false,
        },
        None => is_it(attribute),
    }
}

/// Whether a condition of `cfg`, without its spaces, holds on the GPU; one that is not known does not.
fn holds(condition: &str, features: &BTreeSet<String>) -> bool {
    if let Some(inner) = inside(condition, "not") {
        return !holds(inner, features);
    }
    if let Some(inner) = inside(condition, "all") {
        return parts(inner).iter().all(|part| holds(part, features));
    }
    if let Some(inner) = inside(condition, "any") {
        return parts(inner).iter().any(|part| holds(part, features));
    }
    let feature = condition.strip_prefix("feature=\"").and_then(|rest| rest.strip_suffix('"'));
    feature.map_or(TARGET_CFG.contains(&condition), |feature| features.contains(feature))
}

/// What stands in the parentheses of `name(...)`.
fn inside<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')')
}

/// The parts of a list, at the commas that stand in no parentheses.
fn parts(list: &str) -> Vec<&str> {
    let mut depth = 0;
    let is_comma = |c: char| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        c == ',' && depth == 0
    };
    list.split(is_comma).filter(|part| !part.is_empty()).collect()
}

fn compact(text: &str) -> String {
    text.split_whitespace().collect()
}

/// What stands in `#[...]` at the end of a text, without its spaces, the last first.
fn attributes_before(mut text: &str) -> Vec<String> {
    let mut found = Vec::new();
    while let Some(inside) = text.trim_end().strip_suffix(']') {
        let mut depth = 1;
        let begin = inside.rfind(|c: char| {
            depth += i32::from(c == ']') - i32::from(c == '[');
            depth == 0
        });
        let Some((before, attribute)) = begin.and_then(|begin| Some((inside[..begin].strip_suffix('#')?, &inside[begin + 1..]))) else {
            break;
        };
        found.push(compact(attribute));
        text = before;
    }
    found
}

/// What stands in `#![...]`, without its spaces.
fn inner_attributes(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    for after in source.split("#![").skip(1) {
        let mut depth = 1;
        let end = after.find(|c: char| {
            depth += i32::from(c == '[') - i32::from(c == ']');
            depth == 0
        });
        found.extend(end.map(|end| compact(&after[..end])));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn missing_of(source: &str, features: &[&str]) -> Option<&'static str> {
        missing(source, &features.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn std_is_left_out_by_the_roots_attributes() {
        for source in [
            "#![no_std]",
            "//! Doc.\n#![warn(missing_docs)]\n#![no_std]\n",
            "#![cfg_attr(target_arch = \"nvptx64\", no_std)]",
            "#![cfg_attr(not(any(feature = \"std\", test)), no_std)]",
            "#![cfg_attr(\n    all(not(feature = \"std\"), target_os = \"cuda\"),\n    allow(unused),\n    no_std\n)]",
            "#![no_std]\n#[cfg(feature = \"std\")]\n#[macro_use]\nextern crate std;\n",
            "#![no_std]\n#[cfg(test)]\nextern crate std;\n",
            "#![no_std]\n#[cfg(any(\n    feature = \"std\",\n    test,\n))]\n#[macro_use]\nextern crate std;\n",
            "#![no_std]\n#[cfg(not(target_os = \"cuda\"))]\n#[allow(\n    unused\n)]\nextern crate alloc;\n",
            "#![no_std]\nmod tests {\n    extern crate std;\n}\n",
        ] {
            assert_eq!(missing_of(source, &["derive"]), None, "{source}");
        }
        for source in ["", "//! #![no_std]\n", "#![cfg_attr(test, no_std)]", "#![cfg_attr(target_arch = \"x86_64\", no_std)]"] {
            assert_eq!(missing_of(source, &[]), Some("std"), "{source}");
        }
    }

    #[test]
    fn features_ask_for_std() {
        assert_eq!(missing_of("#![cfg_attr(not(feature = \"std\"), no_std)]", &["std"]), Some("std"));
        assert_eq!(missing_of("#![no_std]\n#[cfg(feature = \"std\")]\nextern crate std;", &["std"]), Some("std"));
        assert_eq!(
            missing_of("#![no_std]\n#[cfg(any(feature = \"alloc\", feature = \"std\"))]\nextern crate alloc;", &["alloc"]),
            Some("alloc")
        );
        assert_eq!(missing_of("#![no_std]\n#[cfg(any(\n    feature = \"std\",\n    test\n))]\nextern crate std;", &["std"]), Some("std"));
        assert_eq!(missing_of("#![no_std]\npub extern crate alloc as other;", &[]), Some("alloc"));
    }
}
