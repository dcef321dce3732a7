//! Parameters that may be absent: `Option<Global<T>>` and `Option` of derived structs.

use super::parameter::Parameter;
use super::parameter_name::ParameterName;
use super::view::{BufferAccess, DeviceView, DeviceViewMut};
use super::words::{ArgumentWords, WordReader};
use crate::global::{Global, GlobalMut};
use crate::layout::Swizzle;
use crate::num::Pod;
use crate::tensor_map::{TensorMap, TensorMapMut};

/// A parameter that has words for "absent", which no argument packs: a kernel takes it as `Option<Self>`, in the same number of words.
///
/// # Safety
/// As [`Parameter`]; [`pack_absent`](Self::pack_absent) appends as many words as [`pack`](Parameter::pack), and
/// [`is_absent`](Self::is_absent) holds of what they unpack to, and of nothing that [`pack_present`](Self::pack_present) appends.
#[diagnostic::on_unimplemented(
    message = "`Option<{Self}>` cannot be a kernel parameter",
    note = "views may be absent, and structs under `#[derive(Parameter)] #[parameter(optional)]`, whose first field may be"
)]
pub unsafe trait OptionalParameter: Parameter {
    /// Host: appends the words of an argument that is there.
    fn pack_present(argument: &Self::Argument<'_>, words: &mut ArgumentWords);
    /// Host: appends the words of no argument.
    fn pack_absent(words: &mut ArgumentWords);
    /// Device: whether these are the words of no argument.
    fn is_absent(&self) -> bool;
}

// SAFETY: the words of the parameter itself, or those that it says are of none.
unsafe impl<P: OptionalParameter> Parameter for Option<P> {
    type Argument<'a> = Option<P::Argument<'a>>;
    type Words<Rest: super::WordList> = P::Words<Rest>;
    const WORDS: usize = P::WORDS;

    fn pack(argument: &Self::Argument<'_>, words: &mut ArgumentWords) {
        match argument {
            Some(argument) => P::pack_present(argument, words),
            None => P::pack_absent(words),
        }
    }

    fn access<'s>(argument: &'s Self::Argument<'_>, name: ParameterName, visit: &mut dyn FnMut(BufferAccess<'s>)) {
        if let Some(argument) = argument {
            P::access(argument, name, visit);
        }
    }

    fn unpack(words: &mut WordReader<'_>) -> Self {
        let parameter = P::unpack(words);
        if parameter.is_absent() { None } else { Some(parameter) }
    }

    #[inline(always)]
    unsafe fn take<Rest: super::WordList>(words: Self::Words<Rest>) -> (Self, Rest) {
        // SAFETY: passed on to the caller.
        let (parameter, rest) = unsafe { P::take::<Rest>(words) };
        (if parameter.is_absent() { None } else { Some(parameter) }, rest)
    }
}

macro_rules! optional_view {
    ($parameter:ident, $view:ident) => {
        // SAFETY: two words; address 0 is of no view, as one without an address, which is empty, gets another.
        unsafe impl<T: Pod> OptionalParameter for $parameter<T> {
            fn pack_present(argument: &$view<'_, T>, words: &mut ArgumentWords) {
                words.push(if argument.is_empty() { align_of::<T>() as u64 } else { argument.address() });
                words.push(argument.len());
            }

            fn pack_absent(words: &mut ArgumentWords) {
                words.push(0);
                words.push(0);
            }

            #[inline(always)]
            fn is_absent(&self) -> bool {
                self.start() == 0
            }
        }
    };
}

optional_view!(Global, DeviceView);
optional_view!(GlobalMut, DeviceViewMut);

macro_rules! optional_map {
    ($map:ident) => {
        // SAFETY: one address, of which 0 is of no map.
        unsafe impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> OptionalParameter
            for $map<T, ROWS, COLUMNS, S, RANK>
        {
            fn pack_present(argument: &Self::Argument<'_>, words: &mut ArgumentWords) {
                Self::pack(argument, words);
            }

            fn pack_absent(words: &mut ArgumentWords) {
                words.push(0);
            }

            #[inline(always)]
            fn is_absent(&self) -> bool {
                self.address() == 0
            }
        }
    };
}

optional_map!(TensorMap);
optional_map!(TensorMapMut);
