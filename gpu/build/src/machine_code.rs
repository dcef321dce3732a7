//! Counts machine instructions in a cubin without nvdisasm, which takes a third of a second to start: as long as ptxas
//! takes for ten small kernels.

use std::{fs, path::Path};

use object::{Object, ObjectSection};

use crate::Error;

/// Bytes of an instruction since sm_70 (CUDA Binary Utilities, "Instruction Set Reference": 128 bits).
const INSTRUCTION: usize = 16;

/// The low twelve bits of an instruction name its operation. These are what nvdisasm 13.5 prints for sm_80, sm_90a, sm_100a
/// and sm_120a; a test holds the counts against its listing.
const OPERATION: u16 = 0xfff;
const NOP: u16 = 0x918;
const BRA: u16 = 0x947;
const LDL: u16 = 0x983;
const STL: u16 = 0x387;
/// `LDGSTS` whose shared address is a register and a uniform register; plain ones are `0xfae`.
const LDGSTS_UNIFORM: u16 = 0xdae;

/// What the lints and the ratchet ask of machine code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineCode {
    /// Instructions, without the padding behind the last: a branch to itself, and `NOP`s up to the end of a cache line.
    pub instructions: u32,
    /// Loads from and stores to local memory: registers that did not fit, or arrays indexed at run time.
    pub local_accesses: u32,
    /// `cp.async` whose shared address takes a uniform register, which a cache policy leaves no room for.
    pub uniform_copies: u32,
}

impl MachineCode {
    /// Of all functions of a cubin.
    ///
    /// # Errors
    /// The file cannot be read, or is no cubin.
    pub fn of(cubin: &Path) -> Result<Self, Error> {
        let bytes = fs::read(cubin).map_err(Error::file("read", cubin))?;
        Self::parse(&bytes).map_err(|error| Error::content(cubin, error))
    }

    fn parse(cubin: &[u8]) -> Result<Self, object::Error> {
        let (file, mut code) = (object::File::parse(cubin)?, Self::default());
        for section in file.sections() {
            if section.name()?.starts_with(".text.") {
                code.add(section.data()?);
            }
        }
        Ok(code)
    }

    fn add(&mut self, function: &[u8]) {
        let operations = function.chunks_exact(INSTRUCTION).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]) & OPERATION);
        let mut operations: Vec<u16> = operations.collect();
        while operations.last() == Some(&NOP) {
            operations.pop();
        }
        if operations.last() == Some(&BRA) {
            operations.pop();
        }
        self.instructions += operations.len() as u32;
        let count = |those: &[u16]| operations.iter().filter(|operation| those.contains(operation)).count() as u32;
        self.local_accesses += count(&[LDL, STL]);
        self.uniform_copies += count(&[LDGSTS_UNIFORM]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A function of these operations; the upper bits of an instruction are operands.
    fn function(operations: &[u16]) -> Vec<u8> {
        operations.iter().flat_map(|operation| [&(operation | 0x7000).to_le_bytes()[..], &[0xa5; INSTRUCTION - 2]].concat()).collect()
    }

    #[test]
    fn the_padding_is_left_out() {
        let mut code = MachineCode::default();
        code.add(&function(&[LDL, NOP, BRA, STL, 0x94d, BRA, NOP, NOP, NOP]));
        assert_eq!(code, MachineCode { instructions: 5, local_accesses: 2, uniform_copies: 0 });
    }

    #[test]
    fn copies_by_uniform_registers_are_counted() {
        let mut code = MachineCode::default();
        code.add(&function(&[0xfae, LDGSTS_UNIFORM, 0x94d, LDGSTS_UNIFORM]));
        assert_eq!(code, MachineCode { instructions: 4, local_accesses: 0, uniform_copies: 2 });
    }

    #[test]
    fn a_text_is_no_cubin() {
        assert!(MachineCode::parse(b"// PTX").is_err());
    }
}
