//! Counts machine instructions in a cubin without nvdisasm, which takes a third of a second to start, as long as ptxas
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
/// `LDGSTS` whose shared address is a register and a uniform register, which the low six bits of its second half name; others are `0xfae`.
const LDGSTS_UNIFORM: u16 = 0xdae;
const UNIFORM_REGISTER: u8 = 0x3f;

/// What the lints and the ratchet ask of machine code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MachineCode {
    /// Instructions, without the padding after the last: a branch to itself, and `NOP`s up to the end of a cache line.
    pub instructions: u32,
    /// Loads from and stores to local memory: registers that did not fit, or arrays indexed at run time.
    pub local_accesses: u32,
    /// `cp.async` whose shared address takes a uniform register that was never given one. ptxas 13.0 writes it for a copy with a cache policy,
    /// `LDGSTS [R5+UR0], desc[UR1]`: the policy has taken the place of the register's name. Plain copies have a register there.
    pub nameless_copies: u32,
}

impl MachineCode {
    /// Counts over all functions of a cubin.
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
        let operation = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]) & OPERATION;
        let is_nameless = |bytes: &&[u8]| operation(bytes) == LDGSTS_UNIFORM && bytes[INSTRUCTION / 2] & UNIFORM_REGISTER == 0;
        self.nameless_copies += function.chunks_exact(INSTRUCTION).filter(is_nameless).count() as u32;
        let mut operations: Vec<u16> = function.chunks_exact(INSTRUCTION).map(operation).collect();
        while operations.last() == Some(&NOP) {
            operations.pop();
        }
        if operations.last() == Some(&BRA) {
            operations.pop();
        }
        self.instructions += operations.len() as u32;
        let count = |those: &[u16]| operations.iter().filter(|operation| those.contains(operation)).count() as u32;
        self.local_accesses += count(&[LDL, STL]);
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
        assert_eq!(code, MachineCode { instructions: 5, local_accesses: 2, nameless_copies: 0 });
    }

    #[test]
    fn copies_without_their_uniform_register_are_counted() {
        // As ptxas 13.0 and nvdisasm 13.5 have them for sm_90a and sm_100a: [R5], desc[UR4]; [R5+UR0], desc[UR1], twice; [R5+UR6], desc[UR7].
        let copies: [[u64; 2]; 4] = [
            [0x0000_0000_0205_7fae, 0x000f_e800_0b90_1c44],
            [0x0000_0000_0205_7dae, 0x000f_e800_0b90_1c40],
            [0x0000_0000_0205_7dae, 0x000f_e800_0b98_1800],
            [0x0000_0000_0205_7dae, 0x000f_e800_0b90_1c46],
        ];
        let mut code = MachineCode::default();
        code.add(&copies.as_flattened().iter().flat_map(|half| half.to_le_bytes()).collect::<Vec<_>>());
        assert_eq!(code, MachineCode { instructions: 4, local_accesses: 0, nameless_copies: 2 });
    }

    #[test]
    fn a_text_is_no_cubin() {
        assert!(MachineCode::parse(b"// PTX").is_err());
    }
}
