//! Reads nvdisasm's listing of machine code.

use std::{path::Path, process::Command};

use crate::{CudaTools, Error, tool};

/// One machine instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// Its address in the kernel, in bytes.
    pub address: u64,
    /// The instruction as nvdisasm prints it, predicate included, without the final `;`.
    pub text: String,
    /// The source line it came from, `file:line`, where the cubin has line tables.
    pub source: Option<String>,
}

impl Instruction {
    /// The name with its modifiers, `LDG.E.128`.
    pub fn mnemonic(&self) -> &str {
        let mut words = self.text.split_whitespace().skip_while(|word| word.starts_with('@'));
        words.next().unwrap_or_default()
    }

    fn is(&self, name: &str) -> bool {
        self.mnemonic().split('.').next() == Some(name)
    }
}

/// The machine code of a cubin that holds one kernel.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    /// The instructions in the order of their addresses, without the padding at the end.
    pub instructions: Vec<Instruction>,
    /// Labels and the index of the instruction they stand before.
    labels: Vec<(String, usize)>,
}

impl Listing {
    /// Disassembles a cubin.
    pub fn of(cubin: &Path, tools: &CudaTools) -> Result<Self, Error> {
        let mut nvdisasm = Command::new(&tools.nvdisasm);
        Ok(Self::parse(&tool::output("disassembling", nvdisasm.args(["-c", "-g"]).arg(cubin))?))
    }

    /// Reads the output of `nvdisasm -c -g`.
    pub fn parse(text: &str) -> Self {
        let (mut listing, mut source) = (Self::default(), None);
        for line in text.lines().map(str::trim) {
            if let Some(line) = line.strip_prefix("//## File ") {
                source = source_line(line);
            } else if let Some((address, instruction)) = line.strip_prefix("/*").and_then(|rest| rest.split_once("*/")) {
                let address = u64::from_str_radix(address, 16).unwrap_or_default();
                let text = instruction.split(';').next().unwrap_or_default().trim().to_owned();
                listing.instructions.push(Instruction { address, text, source: source.clone() });
            } else if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with('.')) {
                listing.labels.push((label.to_owned(), listing.instructions.len()));
            }
        }
        listing.drop_padding();
        listing
    }

    /// After its last instruction a kernel has a branch to itself and NOPs up to the end of the cache line.
    fn drop_padding(&mut self) {
        while self.instructions.last().is_some_and(|last| last.is("NOP")) {
            self.instructions.pop();
        }
        if let Some(last) = self.instructions.len().checked_sub(1)
            && self.target(last) == Some(last)
        {
            self.instructions.pop();
        }
    }

    /// The index of the instruction that a branch goes to.
    fn target(&self, index: usize) -> Option<usize> {
        let instruction = &self.instructions[index];
        let label = instruction.text.split("`(").nth(1)?.split(')').next()?;
        let branch = instruction.is("BRA").then_some(label)?;
        self.labels.iter().find(|(name, _)| name == branch).map(|(_, index)| *index)
    }

    /// The innermost loop: of the branches that go backward, the one over the fewest instructions that loads, stores or
    /// computes on tensor cores; without such a one, the longest.
    pub fn hot_loop(&self) -> Option<&[Instruction]> {
        let backward = (0..self.instructions.len()).filter_map(|end| Some((self.target(end).filter(|start| *start < end)?, end)));
        let loops: Vec<&[Instruction]> = backward.map(|(start, end)| &self.instructions[start..=end]).collect();
        let works = |body: &&&[Instruction]| {
            let memory_or_math = ["LDG", "STG", "LDS", "LDSM", "UTMALDG", "HMMA", "HGMMA", "QGMMA", "IMMA"];
            body.iter().any(|instruction| memory_or_math.iter().any(|name| instruction.is(name)))
        };
        let innermost = loops.iter().filter(works).min_by_key(|body| body.len());
        innermost.or_else(|| loops.iter().max_by_key(|body| body.len())).copied()
    }

    /// How many loads from and stores to local memory there are: registers that did not fit, or arrays indexed at run time.
    pub fn local_memory(&self) -> u32 {
        self.instructions.iter().filter(|instruction| instruction.is("LDL") || instruction.is("STL")).count() as u32
    }
}

/// `"path", line 12 inlined at ...` as `path:12`.
fn source_line(text: &str) -> Option<String> {
    let (path, rest) = text.strip_prefix('"')?.split_once('"')?;
    let line = rest.split("line ").nth(1)?.split(|c: char| !c.is_ascii_digit()).next()?;
    Some(format!("{path}:{line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = r#"
.text.k:
	//## File "/src/a.rs", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
	//## File "/src/b.rs", line 12 inlined at "/src/a.rs", line 9
        /*0010*/                   LDG.E R0, desc[UR4][R2.64] ;
        /*0020*/              @!P0 STL [R1], R0 ;
        /*0030*/               @P0 BRA `(.L_x_0) ;
        /*0040*/                   EXIT ;
.L_x_1:
        /*0050*/                   BRA `(.L_x_1);
        /*0060*/                   NOP;
        /*0070*/                   NOP;
.L_x_2:
"#;

    #[test]
    fn padding_is_not_code() {
        let listing = Listing::parse(LISTING);
        assert_eq!(listing.instructions.len(), 5);
        assert_eq!(listing.instructions[4].text, "EXIT");
    }

    #[test]
    fn the_hot_loop_knows_its_source() {
        let listing = Listing::parse(LISTING);
        let body = listing.hot_loop().unwrap();
        assert_eq!(body.iter().map(Instruction::mnemonic).collect::<Vec<_>>(), ["LDG.E", "STL", "BRA"]);
        assert_eq!(body[0].source.as_deref(), Some("/src/b.rs:12"));
        assert_eq!((body[0].address, listing.local_memory()), (0x10, 1));
    }
}
