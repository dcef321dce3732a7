use oxtile_tile::launch::{ArgumentWords, BufferAccess, KernelArgs};

struct Forged;

impl KernelArgs for Forged {
    fn pack(&self, words: &mut ArgumentWords) {
        words.push(0xdead_beef);
    }

    fn accesses<'s>(&'s self, _: &mut dyn FnMut(BufferAccess<'s>)) {}
}

fn main() {}
