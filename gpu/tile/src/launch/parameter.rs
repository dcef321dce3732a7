//! What a kernel may take, and how it travels from the host to the entry.

use super::view::{BufferAccess, DeviceTable, DeviceTensorMap, DeviceTensorMapMut, DeviceView, DeviceViewMut};
use super::words::{ArgumentWords, WordReader};
use crate::global::{Global, GlobalMut, GlobalTable};
use crate::layout::Swizzle;
use crate::num::Pod;
use crate::tensor_map::{TensorMap, TensorMapMut};

/// A type that a kernel may take: `Global<T>`, `GlobalMut<T>`, `GlobalTable<T>` and plain numbers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a kernel parameter",
    note = "kernels take `Global<T>`, `GlobalMut<T>`, `GlobalTable<T>`, `TensorMap`, `TensorMapMut`, u32, u64, i32, i64 and f32"
)]
///
/// # Safety
/// The implementor promises that [`pack`](Self::pack) appends one word of the type [`First`](Self::First) and, unless it
/// is `()`, one of the type [`Second`](Self::Second); that [`unpack`](Self::unpack) takes the same; and that
/// [`access`](Self::access) names all memory behind them, as [`KernelArgs`](super::KernelArgs) demands.
pub unsafe trait Parameter: Sized {
    /// The host's side of it: a view or the number itself.
    type Argument<'a>;
    /// The first PTX parameter.
    type First: Copy;
    /// The second PTX parameter; `()` where there is none.
    type Second: Copy;

    /// Host: appends the words, one for each PTX parameter.
    fn pack(argument: &Self::Argument<'_>, words: &mut ArgumentWords);
    /// Host: names the buffers behind the argument.
    fn access<'s>(argument: &'s Self::Argument<'_>, parameter: &'static str, visit: &mut dyn FnMut(BufferAccess<'s>));
    /// Emulator: the parameter from its words.
    fn unpack(words: &mut WordReader<'_>) -> Self;
    /// Device: the parameter from the entry's PTX parameters.
    ///
    /// # Safety
    /// They were packed by [`pack`](Self::pack) for the same type.
    unsafe fn from_raw(first: Self::First, second: Self::Second) -> Self;
}

macro_rules! number_parameters {
    ($($number:ty => $to_word:expr, $from_word:expr;)*) => { $(
        // SAFETY: one word, which is no address.
        unsafe impl Parameter for $number {
            type Argument<'a> = $number;
            type First = $number;
            type Second = ();

            fn pack(argument: &$number, words: &mut ArgumentWords) {
                words.push($to_word(*argument));
            }

            fn access<'s>(_: &'s $number, _: &'static str, _: &mut dyn FnMut(BufferAccess<'s>)) {}

            fn unpack(words: &mut WordReader<'_>) -> Self {
                $from_word(words.next_word())
            }

            #[inline(always)]
            unsafe fn from_raw(first: $number, (): ()) -> Self {
                first
            }
        }
    )* };
}

number_parameters! {
    u32 => u64::from, |w| w as u32;
    u64 => |v| v, |w| w;
    i32 => |v: i32| u64::from(v.cast_unsigned()), |w| (w as u32).cast_signed();
    i64 => i64::cast_unsigned, u64::cast_signed;
    f32 => |v: f32| u64::from(v.to_bits()), |w| f32::from_bits(w as u32);
}

macro_rules! view_parameter {
    ($parameter:ident, $view:ident, $pointer:ty) => {
        // SAFETY: an address and a length; `access` names that range.
        unsafe impl<T: Pod> Parameter for $parameter<T> {
            type Argument<'a> = $view<'a, T>;
            type First = $pointer;
            type Second = u64;

            fn pack(argument: &$view<'_, T>, words: &mut ArgumentWords) {
                words.push(argument.address());
                words.push(argument.len());
            }

            fn access<'s>(argument: &'s $view<'_, T>, parameter: &'static str, visit: &mut dyn FnMut(BufferAccess<'s>)) {
                visit(argument.access(parameter));
            }

            fn unpack(words: &mut WordReader<'_>) -> Self {
                let (address, length) = (words.next_word(), words.next_word());
                // SAFETY: the emulator looks every address up before it touches memory.
                unsafe { Self::from_raw_parts(address, length) }
            }

            #[inline(always)]
            unsafe fn from_raw(first: $pointer, length: u64) -> Self {
                // SAFETY: passed on to the caller.
                unsafe { Self::from_raw_parts(first as u64, length) }
            }
        }
    };
}

view_parameter!(Global, DeviceView, *const T);
view_parameter!(GlobalMut, DeviceViewMut, *mut T);

// SAFETY: an address and a length; `accesses` names the table and every range in it.
unsafe impl<T: Pod> Parameter for GlobalTable<T> {
    type Argument<'a> = DeviceTable<'a, T>;
    type First = *const u64;
    type Second = u64;

    fn pack(argument: &DeviceTable<'_, T>, words: &mut ArgumentWords) {
        words.push(argument.address());
        words.push(argument.len());
    }

    fn access<'s>(argument: &'s DeviceTable<'_, T>, parameter: &'static str, visit: &mut dyn FnMut(BufferAccess<'s>)) {
        argument.accesses(parameter, visit);
    }

    fn unpack(words: &mut WordReader<'_>) -> Self {
        let (address, length) = (words.next_word(), words.next_word());
        // SAFETY: the emulator looks every address up before it touches memory.
        unsafe { Self::from_raw_parts(address, length) }
    }

    #[inline(always)]
    unsafe fn from_raw(first: *const u64, length: u64) -> Self {
        // SAFETY: passed on to the caller.
        unsafe { Self::from_raw_parts(first as u64, length) }
    }
}

macro_rules! tensor_map_parameter {
    ($map:ident, $argument:ident, $writes:literal, |$lent:ident| $inner:expr) => {
        // SAFETY: one address; `accesses` names the map there and the matrix behind it.
        unsafe impl<T: Pod, const ROWS: usize, const COLUMNS: usize, S: Swizzle, const RANK: usize> Parameter
            for $map<T, ROWS, COLUMNS, S, RANK>
        {
            type Argument<'a> = $argument<'a, T, ROWS, COLUMNS, S, RANK>;
            type First = *const u64;
            type Second = ();

            fn pack($lent: &Self::Argument<'_>, words: &mut ArgumentWords) {
                words.push($inner.address());
            }

            fn access<'s>($lent: &'s Self::Argument<'_>, parameter: &'static str, visit: &mut dyn FnMut(BufferAccess<'s>)) {
                $inner.accesses(parameter, $writes, &mut |access| visit(access));
            }

            fn unpack(words: &mut WordReader<'_>) -> Self {
                // SAFETY: the emulator checks that the bytes there are a map before it uses them.
                unsafe { Self::from_raw(words.next_word()) }
            }

            #[inline(always)]
            unsafe fn from_raw(first: *const u64, (): ()) -> Self {
                // SAFETY: passed on to the caller.
                unsafe { Self::from_raw(first as u64) }
            }
        }
    };
}

tensor_map_parameter!(TensorMap, DeviceTensorMap, false, |lent| lent);
tensor_map_parameter!(TensorMapMut, DeviceTensorMapMut, true, |lent| lent.as_map());
