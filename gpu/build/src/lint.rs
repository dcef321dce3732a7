//! What no kernel may have, whatever its ratchet says.

use std::fmt;

use crate::{Arch, Kernel};

/// Advisories of ptxas that mean a kernel is not what its source says, and the operation that each is about.
const FORBIDDEN: [(&str, &str, &str); 5] = [
    ("C7508", "setmaxnreg is ignored", "setmaxnreg"),
    ("C7514", "wgmma is serialised", "wgmma"),
    ("C7517", "a wait for wgmma was inserted", "wgmma"),
    ("C7518", "wgmma is serialised: a branch that is not warp-uniform while it is in flight", "wgmma"),
    ("C7519", "a fence for wgmma was inserted", "wgmma"),
];

/// What in a kernel's code is the cause of a finding: a build with line tables knows its lines.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Cause {
    /// What lies in memory and belongs in registers, or a check that can panic.
    Memory,
    /// An operation that is counted.
    Operation(String),
    /// Copies with a cache policy.
    LastingCopy,
    /// A call of this function.
    Call(String),
}

/// One reason why a build may not be used.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// The kernel.
    pub kernel: String,
    /// The architecture, where it matters.
    pub arch: Option<Arch>,
    /// What is wrong and how to mend it.
    pub why: String,
    /// Whether accepting the figures into the ratchet would settle it.
    pub acceptable: bool,
    /// Where its lines are looked for, if it has any.
    pub(crate) cause: Option<Cause>,
}

impl Finding {
    pub(crate) fn new(kernel: &str, arch: Option<Arch>, why: String) -> Self {
        Self { kernel: kernel.into(), arch, why, acceptable: false, cause: None }
    }

    pub(crate) fn on(kernel: &Kernel, why: String) -> Self {
        Self::new(&kernel.meta.name, Some(kernel.arch.clone()), why)
    }

    pub(crate) fn by(self, cause: Cause) -> Self {
        Self { cause: Some(cause), ..self }
    }

    /// Whether it costs speed alone: what belongs in registers lies in memory.
    pub fn is_slow(&self) -> bool {
        self.cause == Some(Cause::Memory)
    }

    /// Whether it is one of this kernel.
    pub(crate) fn is_of(&self, kernel: &str, arch: &Arch) -> bool {
        self.kernel == kernel && self.arch.as_ref() == Some(arch)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.arch {
            Some(arch) => write!(f, "{} ({arch}): {}", self.kernel, self.why),
            None => write!(f, "{}: {}", self.kernel, self.why),
        }
    }
}

/// All findings as one error text. `command` builds these kernels.
pub(crate) fn describe(findings: &[Finding], command: &str) -> String {
    let lines = lines(findings);
    let mut text = format!("the kernels compiled, but {} thing(s) must be mended:", lines.len());
    lines.iter().for_each(|line| text.push_str(&format!("\n  {line}")));
    if findings.iter().any(|finding| finding.acceptable) {
        text.push_str(&format!("\n  where the new figures are meant, `{command} --accept` writes them into the ratchet"));
    }
    text
}

/// A line for each finding, but one for all instances of a function that have the same: `conv (sm_90a, 5 instances: conv__k3, ...): ...`.
pub(crate) fn lines(findings: &[Finding]) -> Vec<String> {
    let alike = |a: &Finding, b: &Finding| function(&a.kernel) == function(&b.kernel) && a.arch == b.arch && a.why == b.why;
    let mut groups: Vec<Vec<&Finding>> = Vec::new();
    for finding in findings {
        match groups.iter_mut().find(|group| alike(group[0], finding)) {
            Some(group) => group.push(finding),
            None => groups.push(vec![finding]),
        }
    }
    let line = |group: &Vec<&Finding>| match group[..] {
        [first, _, ..] => {
            let arch = first.arch.as_ref().map_or(String::new(), |arch| format!("{arch}, "));
            let (function, count) = (function(&first.kernel), group.len());
            format!("{function} ({arch}{count} instances: {}, ...): {}", first.kernel, first.why)
        }
        _ => group[0].to_string(),
    };
    groups.iter().map(line).collect()
}

/// The function of a kernel's name, `conv` of `conv__k3`.
pub(crate) fn function(kernel: &str) -> &str {
    kernel.split("__").next().unwrap_or(kernel)
}

/// Looks at one assembled kernel.
pub fn check(kernel: &Kernel) -> Vec<Finding> {
    let usage = &kernel.usage;
    let mut findings = Vec::new();
    let mut refuse = |why: String, cause: Cause| findings.push(Finding::on(kernel, why).by(cause));
    for advisory in &usage.advisories {
        if let Some((_, meaning, operation)) = FORBIDDEN.iter().find(|(code, ..)| advisory.contains(code)) {
            refuse(format!("{meaning}: ptxas says `{advisory}`"), Cause::Operation((*operation).into()));
        }
    }
    if usage.broken_copies > 0 {
        // ptxas 13.0 on sm_90a: `LDGSTS [R5+UR0+0xe00], desc[UR1]`, which an H200 refuses as an illegal instruction.
        let why = format!(
            "{} copies with a cache policy (pipeline::copy_async_lasting) have a shared address that ptxas cannot encode beside the policy: take \
             pipeline::copy_async, or reach several copies by one index, which keeps it in a register of the thread",
            usage.broken_copies
        );
        refuse(why, Cause::LastingCopy);
    }
    if let Some(why) = kernel.meta.begins_too_early(&kernel.operations) {
        refuse(why, Cause::Operation("launch_wait".into()));
    }
    let mut slow = |why: String| refuse(why, Cause::Memory);
    if usage.spills > 0 {
        let mend = "use fewer live values a thread, or fewer threads or blocks a multiprocessor";
        slow(format!("{} bytes of registers are spilled to memory; {mend}", usage.spills));
    }
    if usage.stack > 0 {
        let mend = "index arrays by constants (after unrolling) and do not take their address";
        slow(match kernel.panics.is_empty() {
            true => format!("{} bytes of stack a thread; {mend}", usage.stack),
            // The registers that a call saves and the arguments of the message lie there.
            false => format!("{} bytes of stack a thread: it {}; if that is not all, {mend}", usage.stack, describe_panics(&kernel.panics)),
        });
    }
    if usage.local_accesses > 0 && usage.stack == 0 && usage.spills == 0 {
        slow(format!("{} loads from or stores to local memory", usage.local_accesses));
    }
    findings
}

/// The checks that can panic in a kernel, by the functions that they call, and what to write instead.
pub(crate) fn describe_panics(panics: &[String]) -> String {
    let mend = |panic: &String| match panic {
        panic if panic.contains("div_by_zero") || panic.contains("rem_by_zero") => {
            "a `/` or `%` by a variable: divide by a constant or by `divisor.max(1)`, or pass the quotient as an argument"
        }
        panic if panic.contains("bounds_check") => "an index that may be too large: take a constant, a device view or `SharedArray`",
        panic if panic.contains("overflow") => "arithmetic that is checked: take `wrapping_add` and the like",
        _ => "an `assert!`, `unwrap` or the like: check in `grid`, on the host, or use what cannot fail",
    };
    let each: Vec<String> = panics.iter().map(|panic| format!("calls `{panic}` ({})", mend(panic))).collect();
    each.join(", ")
}

/// A function that an entry calls and the module does not define.
pub(crate) fn unresolved(kernel: &str, arch: &Arch, function: &str) -> Finding {
    let mend = if function.contains("panic") {
        "a check that can panic was left in (an index, a slice, a division, an overflow): use what cannot fail, or a device view"
    } else {
        "is it a link_name of no intrinsic, or a crate built without the flags of oxtile-build?"
    };
    let why = format!("calls `{function}`, which is defined nowhere; {mend}");
    Finding::new(kernel, Some(arch.clone()), why).by(Cause::Call(function.into()))
}
