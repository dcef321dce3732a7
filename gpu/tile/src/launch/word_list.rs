//! The PTX parameters of an entry as a list of types, so that a parameter made of parameters is flattened by the type checker.
//!
//! An entry takes plain pointers and numbers: a struct by value would arrive as integers, and a pointer that was an integer is no
//! longer known to be global memory that nothing writes (docs/adr/0009-parameters.md). So each [`Parameter`](super::Parameter) puts its
//! words in front of a list, `#[kernel]` writes an entry with one parameter for each [`Head`](WordList::Head), and
//! [`take`](super::Parameter::take) reads them back.

/// The types of words: `(first, rest)`, or `()` at the end and everywhere after it.
pub trait WordList: Copy {
    /// The first word; `()`, which takes no PTX parameter, if there is none.
    type Head: Copy;
    /// The words after the first.
    type Tail: WordList;

    /// The list of these words.
    fn new(head: Self::Head, tail: Self::Tail) -> Self;
}

impl WordList for () {
    type Head = ();
    type Tail = ();

    #[inline(always)]
    fn new((): (), (): ()) -> Self {}
}

impl<Head: Copy, Tail: WordList> WordList for (Head, Tail) {
    type Head = Head;
    type Tail = Tail;

    #[inline(always)]
    fn new(head: Head, tail: Tail) -> Self {
        (head, tail)
    }
}
