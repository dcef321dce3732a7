//! What a kernel may take, and how it travels from the host to the entry.

use super::parameter_name::ParameterName;
use super::view::{BufferAccess, DeviceFlags, DeviceSlots, DeviceTable, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut};
use super::word_list::WordList;
use super::words::{ArgumentWords, WordReader};
use crate::arrivals::FlagLines;
use crate::global::{Global, GlobalMut, GlobalTable};
use crate::layout::Swizzle;
use crate::num::{Float, Pod};
use crate::slots::Slots;
use crate::tensor_map::{TensorMap, TensorMapMut};

/// A type that a kernel may take: `Global<T>`, `GlobalMut<T>`, `GlobalTable<T>`, tensor maps, plain numbers, structs of these under
/// `#[derive(Parameter)]`, and `Option` of what may be [absent](super::OptionalParameter).
///
/// # Safety
/// The implementor promises that [`pack`](Self::pack) appends [`WORDS`](Self::WORDS) words of the types that
/// [`Words`](Self::Words) puts in front; that [`unpack`](Self::unpack) and [`take`](Self::take) take the same; and that
/// [`access`](Self::access) names all memory behind them, as [`KernelArgs`](super::KernelArgs) demands.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a kernel parameter",
    note = "kernels take `Global<T>`, `GlobalMut<T>`, `GlobalTable<T>`, `TensorMap`, `TensorMapMut`, u32, u64, i32, i64, f32, bool, \
            `Option` of views, and structs of these with #[derive(Parameter)]"
)]
pub unsafe trait Parameter: Sized {
    /// The host's side of it: a view, the number itself, or the struct of the fields' arguments.
    type Argument<'a>;
    /// `Rest` with the types of this parameter's words in front, each a PTX parameter.
    type Words<Rest: WordList>: WordList;
    /// How many words there are.
    const WORDS: usize;

    /// Host: appends the words, one for each PTX parameter.
    fn pack(argument: &Self::Argument<'_>, words: &mut ArgumentWords);
    /// Host: names the buffers behind the argument, which is the parameter `name`.
    fn access<'s>(argument: &'s Self::Argument<'_>, name: ParameterName, visit: &mut dyn FnMut(BufferAccess<'s>));
    /// Emulator: the parameter from its words.
    fn unpack(words: &mut WordReader<'_>) -> Self;
    /// Device: the parameter from the entry's PTX parameters, and those after it.
    ///
    /// # Safety
    /// They were packed by [`pack`](Self::pack) for the same type.
    unsafe fn take<Rest: WordList>(words: Self::Words<Rest>) -> (Self, Rest);
}

macro_rules! number_parameters {
    ($($number:ty as $word:ty => $to_word:expr, $from_word:expr, $from_parameter:expr;)*) => { $(
        // SAFETY: one word, which is no address.
        unsafe impl Parameter for $number {
            type Argument<'a> = $number;
            type Words<Rest: WordList> = ($word, Rest);
            const WORDS: usize = 1;

            fn pack(argument: &$number, words: &mut ArgumentWords) {
                words.push($to_word(*argument));
            }

            fn access<'s>(_: &'s $number, _: ParameterName, _: &mut dyn FnMut(BufferAccess<'s>)) {}

            fn unpack(words: &mut WordReader<'_>) -> Self {
                $from_word(words.next_word())
            }

            #[inline(always)]
            unsafe fn take<Rest: WordList>((word, rest): ($word, Rest)) -> (Self, Rest) {
                ($from_parameter(word), rest)
            }
        }
    )* };
}

number_parameters! {
    u32 as u32 => u64::from, |w| w as u32, |v| v;
    u64 as u64 => |v| v, |w| w, |v| v;
    i32 as i32 => |v: i32| u64::from(v.cast_unsigned()), |w| (w as u32).cast_signed(), |v| v;
    i64 as i64 => i64::cast_unsigned, u64::cast_signed, |v| v;
    f32 as f32 => |v: f32| u64::from(v.to_bits()), |w| f32::from_bits(w as u32), |v| v;
    bool as u32 => u64::from, |w| w != 0, |v| v != 0;
}

macro_rules! view_parameter {
    ([$($bounds:tt)*] $parameter:ty, $view:ident $(<$element:ident>)?, $pointer:ty) => {
        // SAFETY: an address and a length; `access` names that range.
        unsafe impl<$($bounds)*> Parameter for $parameter {
            type Argument<'a> = $view<'a $(, $element)?>;
            type Words<Rest: WordList> = ($pointer, (u64, Rest));
            const WORDS: usize = 2;

            fn pack(argument: &Self::Argument<'_>, words: &mut ArgumentWords) {
                words.push(argument.address());
                words.push(argument.len());
            }

            fn access<'s>(argument: &'s Self::Argument<'_>, name: ParameterName, visit: &mut dyn FnMut(BufferAccess<'s>)) {
                visit(argument.access_as(name));
            }

            fn unpack(words: &mut WordReader<'_>) -> Self {
                let (address, length) = (words.next_word(), words.next_word());
                // SAFETY: the emulator looks every address up before it touches memory.
                unsafe { Self::from_raw_parts(address, length) }
            }

            #[inline(always)]
            unsafe fn take<Rest: WordList>((pointer, (length, rest)): ($pointer, (u64, Rest))) -> (Self, Rest) {
                // SAFETY: passed on to the caller.
                (unsafe { Self::from_raw_parts(pointer as u64, length) }, rest)
            }
        }
    };
}

view_parameter!([T: Pod] Global<T>, DeviceView<T>, *const T);
view_parameter!([T: Pod] GlobalMut<T>, DeviceViewMut<T>, *mut T);
view_parameter!([T: Pod + Float] Slots<T>, DeviceSlots<T>, *mut T);
view_parameter!([] FlagLines, DeviceFlags, *mut u64);

// SAFETY: an address and a length; `accesses` names the table and every range in it.
unsafe impl<T: Pod> Parameter for GlobalTable<T> {
    type Argument<'a> = DeviceTable<'a, T>;
    type Words<Rest: WordList> = (*const u64, (u64, Rest));
    const WORDS: usize = 2;

    fn pack(argument: &DeviceTable<'_, T>, words: &mut ArgumentWords) {
        words.push(argument.address());
        words.push(argument.len());
    }

    fn access<'s>(argument: &'s DeviceTable<'_, T>, name: ParameterName, visit: &mut dyn FnMut(BufferAccess<'s>)) {
        argument.accesses(name, visit);
    }

    fn unpack(words: &mut WordReader<'_>) -> Self {
        let (address, length) = (words.next_word(), words.next_word());
        // SAFETY: the emulator looks every address up before it touches memory.
        unsafe { Self::from_raw_parts(address, length) }
    }

    #[inline(always)]
    unsafe fn take<Rest: WordList>((pointer, (length, rest)): (*const u64, (u64, Rest))) -> (Self, Rest) {
        // SAFETY: passed on to the caller.
        (unsafe { Self::from_raw_parts(pointer as u64, length) }, rest)
    }
}

macro_rules! tensor_map_parameter {
    ($map:ident, $argument:ident, $writes:literal, |$lent:ident| $inner:expr) => {
        // SAFETY: one address; `accesses` names the map there and the matrix behind it.
        unsafe impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> Parameter
            for $map<T, ROWS, COLUMNS, S, RANK>
        {
            type Argument<'a> = $argument<'a, T, ROWS, COLUMNS, S, RANK>;
            type Words<Rest: WordList> = (*const u64, Rest);
            const WORDS: usize = 1;

            fn pack($lent: &Self::Argument<'_>, words: &mut ArgumentWords) {
                words.push($inner.address());
            }

            fn access<'s>($lent: &'s Self::Argument<'_>, name: ParameterName, visit: &mut dyn FnMut(BufferAccess<'s>)) {
                $inner.accesses(name, $writes, &mut |access| visit(access));
            }

            fn unpack(words: &mut WordReader<'_>) -> Self {
                // SAFETY: the emulator checks that the bytes there are a map before it uses them.
                unsafe { Self::from_raw(words.next_word()) }
            }

            #[inline(always)]
            unsafe fn take<Rest: WordList>((pointer, rest): (*const u64, Rest)) -> (Self, Rest) {
                // SAFETY: passed on to the caller.
                (unsafe { Self::from_raw(pointer as u64) }, rest)
            }
        }
    };
}

tensor_map_parameter!(TensorMap, DeviceTensorMap, false, |lent| lent);
tensor_map_parameter!(TensorMapMut, DeviceTensorMapMut, true, |lent| lent.as_map());
