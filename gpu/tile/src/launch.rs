//! What the host knows of a kernel: its [`KernelInfo`], its arguments, its grid.
//!
//! Nothing here knows of streams or devices' handles. A runtime lends memory as [`DeviceView`]s,
//! each with an opaque owner that it gets back through [`KernelArgs::accesses`].

use core::any::Any;
use core::fmt;
use core::marker::PhantomData;

/// A kernel instance: what to load, what to pass, how many blocks. Implemented by `#[kernel]`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a compiled kernel instance",
    note = "add its type parameters to the #[instances] of the kernel"
)]
pub trait Kernel {
    /// The compile-time facts of this instance.
    const INFO: KernelInfo;
    /// The argument struct, one field a parameter.
    type Args<'a>: KernelArgs;

    /// Checks the arguments against each other and derives the grid from them.
    ///
    /// # Errors
    /// The first argument that does not fit, with what was expected.
    fn grid(args: &Self::Args<'_>, device: &DeviceLimits) -> Result<Grid, LaunchError>;

    /// Runs one emulated thread on packed arguments. Called by the emulator's launcher alone.
    fn emulate(words: &[u64]);
}

/// The compile-time facts of a kernel instance. `oxtile-build` finds the same in the PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelInfo {
    /// The entry's name, such as `amax__bf16`.
    pub name: &'static str,
    /// The source file or folder, such as `amax`: one ratchet, one compile.
    pub family: &'static str,
    /// The Cargo package the kernel belongs to: kernels are looked up by it.
    pub package: &'static str,
    /// Hash of the sources the host side was compiled from; empty where the package sets none.
    pub source_hash: &'static str,
    /// Threads a block.
    pub threads: u32,
    /// Blocks that must be resident on a multiprocessor; caps the registers of a thread.
    pub min_blocks: u32,
    /// Blocks a cluster; 1 means none.
    pub cluster: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// The architecture it needs, such as `sm_90a`; empty for any.
    pub requires: &'static str,
    /// The names of the parameters, in order.
    pub parameters: &'static [&'static str],
}

/// All compiled instances of one kernel function.
#[derive(Debug, Clone, Copy)]
pub struct KernelFamily {
    /// The function's name.
    pub name: &'static str,
    /// Its instances.
    pub instances: &'static [KernelInfo],
}

/// Blocks in x, y and z.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grid {
    /// At most 2^31 - 1.
    pub x: u32,
    /// At most 65535.
    pub y: u32,
    /// At most 65535.
    pub z: u32,
}

impl Grid {
    /// A grid of `x` blocks. Zero blocks is legal: the launch does nothing.
    pub const fn x(x: u32) -> Self {
        Self { x, y: 1, z: 1 }
    }

    /// A grid of `x` by `y` blocks.
    pub const fn xy(x: u32, y: u32) -> Self {
        Self { x, y, z: 1 }
    }

    /// One block for every `per_block` of `items`.
    ///
    /// # Errors
    /// More than 2^31 - 1 blocks; `argument` is named as the cause.
    pub fn cover(argument: &'static str, items: u64, per_block: u32) -> Result<Self, LaunchError> {
        let blocks = items.div_ceil(u64::from(per_block));
        match i32::try_from(blocks) {
            Ok(x) => Ok(Self::x(x.cast_unsigned())),
            Err(_) => {
                Err(LaunchError { argument, problem: Problem::TooLarge { found: items, limit: i32::MAX as u64 * u64::from(per_block) } })
            }
        }
    }

    /// The number of blocks.
    pub const fn blocks(self) -> u64 {
        self.x as u64 * self.y as u64 * self.z as u64
    }
}

/// What a grid may depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceLimits {
    /// Multiprocessors of the device.
    pub multiprocessors: u32,
    /// Dynamic shared memory a block may ask for, in bytes.
    pub shared_bytes_per_block: u32,
}

/// An argument that does not fit its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchError {
    /// The parameter's name.
    pub argument: &'static str,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Problem {
    /// The view has the wrong number of elements.
    Length {
        /// How many the other arguments ask for.
        expected: u64,
        /// How many there are.
        found: u64,
    },
    /// A count is not a multiple.
    Multiple {
        /// Of what it must be a multiple.
        of: u64,
        /// The count.
        found: u64,
    },
    /// A count is over the kernel's limit.
    TooLarge {
        /// The count.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// The address is not aligned.
    Alignment {
        /// The alignment in bytes.
        bytes: u64,
        /// The address.
        address: u64,
    },
}

impl LaunchError {
    /// Fails unless `found` is `expected`.
    ///
    /// # Errors
    /// [`Problem::Length`] for `argument`.
    pub fn check_length(argument: &'static str, expected: u64, found: u64) -> Result<(), Self> {
        if found == expected { Ok(()) } else { Err(Self { argument, problem: Problem::Length { expected, found } }) }
    }

    /// Fails unless `found` is a multiple of `of`.
    ///
    /// # Errors
    /// [`Problem::Multiple`] for `argument`.
    pub fn check_multiple(argument: &'static str, of: u64, found: u64) -> Result<(), Self> {
        if found.is_multiple_of(of) { Ok(()) } else { Err(Self { argument, problem: Problem::Multiple { of, found } }) }
    }

    /// Fails if `found` is over `limit`.
    ///
    /// # Errors
    /// [`Problem::TooLarge`] for `argument`.
    pub fn check_limit(argument: &'static str, found: u64, limit: u64) -> Result<(), Self> {
        if found <= limit { Ok(()) } else { Err(Self { argument, problem: Problem::TooLarge { found, limit } }) }
    }

    /// Fails unless `address` is a multiple of `bytes`.
    ///
    /// # Errors
    /// [`Problem::Alignment`] for `argument`.
    pub fn check_alignment(argument: &'static str, bytes: u64, address: u64) -> Result<(), Self> {
        if address.is_multiple_of(bytes) { Ok(()) } else { Err(Self { argument, problem: Problem::Alignment { bytes, address } }) }
    }
}

impl fmt::Display for LaunchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.argument;
        match self.problem {
            Problem::Length { expected, found } => write!(f, "`{name}` has {found} elements; the other arguments ask for {expected}"),
            Problem::Multiple { of, found } => write!(f, "`{name}` counts {found}, which is not a multiple of {of}: pad it"),
            Problem::TooLarge { found, limit } => write!(f, "`{name}` counts {found}; this kernel takes at most {limit}: split the call"),
            Problem::Alignment { bytes, address } => {
                write!(f, "`{name}` starts at {address:#x}, which is not {bytes}-byte aligned: start the view at an aligned element")
            }
        }
    }
}

impl core::error::Error for LaunchError {}

/// The memory behind a view: an opaque cell of the runtime that lent it.
pub type Owner<'a> = &'a (dyn Any + Send + Sync);

/// How a kernel uses one buffer.
#[derive(Clone, Copy)]
pub struct BufferAccess<'a> {
    /// The parameter's name.
    pub parameter: &'static str,
    /// The runtime's cell for the buffer.
    pub owner: Owner<'a>,
    /// The first byte.
    pub address: u64,
    /// Bytes from there.
    pub bytes: u64,
    /// Whether the kernel may write it.
    pub writes: bool,
}

/// Device memory lent to a kernel for reading. Not dereferenceable on the host.
pub struct DeviceView<'a, T> {
    address: u64,
    length: u64,
    owner: Owner<'a>,
    element: PhantomData<fn() -> T>,
}

/// Device memory lent to a kernel for reading and writing.
pub struct DeviceViewMut<'a, T>(DeviceView<'a, T>);

impl<T> Clone for DeviceView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceView<'_, T> {}

impl<'a, T> DeviceView<'a, T> {
    /// Lends `length` elements at `address`. Runtimes call this; users get views from buffers.
    ///
    /// # Safety
    /// `address` is aligned for `T` and the memory lives as long as `owner`, on every device that runs kernels on it.
    pub const unsafe fn from_raw(address: u64, length: u64, owner: Owner<'a>) -> Self {
        Self { address, length, owner, element: PhantomData }
    }

    /// The device address of the first element.
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// How many elements.
    pub const fn len(&self) -> u64 {
        self.length
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Elements `start..end`.
    ///
    /// # Panics
    /// If the range leaves the view.
    #[track_caller]
    pub const fn slice(&self, start: u64, end: u64) -> Self {
        assert!(start <= end && end <= self.length, "the range leaves the device view");
        Self { address: self.address + start * size_of::<T>() as u64, length: end - start, owner: self.owner, element: PhantomData }
    }

    /// What a kernel that takes this view as `parameter` does with the memory.
    pub const fn access(&self, parameter: &'static str) -> BufferAccess<'a> {
        BufferAccess { parameter, owner: self.owner, address: self.address, bytes: self.length * size_of::<T>() as u64, writes: false }
    }
}

impl<'a, T> DeviceViewMut<'a, T> {
    /// Lends `length` elements at `address`. Runtimes call this; users get views from buffers.
    ///
    /// # Safety
    /// As [`DeviceView::from_raw`], and no other view of this memory exists while this one does.
    pub const unsafe fn from_raw(address: u64, length: u64, owner: Owner<'a>) -> Self {
        // SAFETY: passed on to the caller.
        Self(unsafe { DeviceView::from_raw(address, length, owner) })
    }

    /// The same memory for reading only.
    pub const fn as_view(&self) -> &DeviceView<'a, T> {
        &self.0
    }

    /// Elements `start..end`, while this view rests.
    ///
    /// # Panics
    /// If the range leaves the view.
    #[track_caller]
    pub const fn slice_mut(&mut self, start: u64, end: u64) -> DeviceViewMut<'_, T> {
        DeviceViewMut(self.0.slice(start, end))
    }

    /// What a kernel that takes this view as `parameter` does with the memory.
    pub const fn access(&self, parameter: &'static str) -> BufferAccess<'a> {
        BufferAccess { writes: true, ..self.0.access(parameter) }
    }

    /// The device address of the first element.
    pub const fn address(&self) -> u64 {
        self.0.address
    }

    /// How many elements.
    pub const fn len(&self) -> u64 {
        self.0.length
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.length == 0
    }
}

/// A table of views in device memory, lent to a kernel for reading.
pub struct DeviceTable<'a, T> {
    entries: DeviceView<'a, u64>,
    members: &'a [BufferAccess<'a>],
    element: PhantomData<fn() -> T>,
}

impl<T> Clone for DeviceTable<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceTable<'_, T> {}

impl<'a, T> DeviceTable<'a, T> {
    /// Lends a table: `entries` holds address and length of each view, `members` the memory behind them.
    /// Runtimes call this.
    ///
    /// # Safety
    /// Each entry is a view of `T` that one of `members` covers, as [`DeviceView::from_raw`] demands.
    pub const unsafe fn from_raw(entries: DeviceView<'a, u64>, members: &'a [BufferAccess<'a>]) -> Self {
        Self { entries, members, element: PhantomData }
    }

    /// How many views.
    pub const fn len(&self) -> u64 {
        self.entries.length / 2
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<T: crate::num::Pod> Parameter for crate::global::GlobalTable<T> {
    type Argument<'a> = DeviceTable<'a, T>;
    type First = *const u64;
    type Second = u64;

    fn pack(argument: &DeviceTable<'_, T>, words: &mut ArgumentWords) {
        words.push(argument.entries.address());
        words.push(argument.len());
    }

    fn access<'s>(argument: &'s DeviceTable<'_, T>, parameter: &'static str, visit: &mut dyn FnMut(BufferAccess<'s>)) {
        visit(argument.entries.access(parameter));
        for member in argument.members {
            visit(BufferAccess { parameter, ..*member });
        }
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

/// An encoded tensor map in device memory, lent to a kernel for reading the matrix behind it.
pub struct DeviceTensorMap<'a, T, const ROWS: usize, const COLUMNS: usize> {
    map: BufferAccess<'a>,
    matrix: BufferAccess<'a>,
    element: PhantomData<fn() -> T>,
}

/// An encoded tensor map in device memory, lent to a kernel for writing the matrix behind it.
pub struct DeviceTensorMapMut<'a, T, const ROWS: usize, const COLUMNS: usize>(DeviceTensorMap<'a, T, ROWS, COLUMNS>);

impl<'a, T, const ROWS: usize, const COLUMNS: usize> DeviceTensorMap<'a, T, ROWS, COLUMNS> {
    /// Lends the map at `map`, of boxes of `ROWS` by `COLUMNS` of the matrix of `T` at `matrix`. Runtimes call this.
    ///
    /// # Safety
    /// The map was encoded for that memory and such boxes, and lies at a multiple of 64.
    pub const unsafe fn from_raw(map: BufferAccess<'a>, matrix: BufferAccess<'a>) -> Self {
        Self { map, matrix, element: PhantomData }
    }

    fn accesses(&self, parameter: &'static str, writes: bool, visit: &mut dyn FnMut(BufferAccess<'a>)) {
        visit(BufferAccess { parameter, writes: false, ..self.map });
        visit(BufferAccess { parameter, writes, ..self.matrix });
    }
}

impl<'a, T, const ROWS: usize, const COLUMNS: usize> DeviceTensorMapMut<'a, T, ROWS, COLUMNS> {
    /// As [`DeviceTensorMap::from_raw`]. Runtimes call this.
    ///
    /// # Safety
    /// As [`DeviceTensorMap::from_raw`], and no view of the matrix exists while this does.
    pub const unsafe fn from_raw(map: BufferAccess<'a>, matrix: BufferAccess<'a>) -> Self {
        // SAFETY: passed on to the caller.
        Self(unsafe { DeviceTensorMap::from_raw(map, matrix) })
    }
}

macro_rules! tensor_map_parameter {
    ($map:ident, $argument:ident, $writes:literal, |$lent:ident| $inner:expr) => {
        impl<T: crate::num::Pod, const ROWS: usize, const COLUMNS: usize> Parameter for crate::tensor_map::$map<T, ROWS, COLUMNS> {
            type Argument<'a> = $argument<'a, T, ROWS, COLUMNS>;
            type First = *const u64;
            type Second = ();

            fn pack($lent: &Self::Argument<'_>, words: &mut ArgumentWords) {
                words.push($inner.map.address);
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
tensor_map_parameter!(TensorMapMut, DeviceTensorMapMut, true, |lent| lent.0);

/// The arguments of one launch.
pub trait KernelArgs {
    /// Appends the words that the kernel's parameters are unpacked from, in order.
    fn pack(&self, words: &mut ArgumentWords);
    /// Names every buffer that the kernel may touch.
    fn accesses<'s>(&'s self, visit: &mut dyn FnMut(BufferAccess<'s>));
}

/// Packed kernel arguments: one 8-byte word a PTX parameter.
#[derive(Debug, Clone, Copy)]
pub struct ArgumentWords {
    words: [u64; Self::CAPACITY],
    length: usize,
}

impl ArgumentWords {
    /// The most parameters an entry may have.
    pub const CAPACITY: usize = 64;

    /// No words yet.
    pub const fn new() -> Self {
        Self { words: [0; Self::CAPACITY], length: 0 }
    }

    /// Appends one word.
    ///
    /// # Panics
    /// Beyond [`CAPACITY`](Self::CAPACITY) words.
    pub const fn push(&mut self, word: u64) {
        assert!(self.length < Self::CAPACITY, "a kernel entry takes at most 64 words of arguments");
        self.words[self.length] = word;
        self.length += 1;
    }

    /// The words so far.
    pub fn as_slice(&self) -> &[u64] {
        &self.words[..self.length]
    }
}

impl Default for ArgumentWords {
    fn default() -> Self {
        Self::new()
    }
}

/// Reads [`ArgumentWords`] back, on an emulated thread.
pub struct WordReader<'a> {
    words: &'a [u64],
}

impl<'a> WordReader<'a> {
    /// Starts at the first word.
    pub const fn new(words: &'a [u64]) -> Self {
        Self { words }
    }

    /// The next word.
    ///
    /// # Panics
    /// If there is none: the words are another kernel's.
    pub fn next_word(&mut self) -> u64 {
        let (first, rest) = self.words.split_first().expect("the argument words of this kernel");
        self.words = rest;
        *first
    }
}

/// A type that a kernel may take: `Global<T>`, `GlobalMut<T>`, `GlobalTable<T>` and plain numbers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a kernel parameter",
    note = "kernels take `Global<T>`, `GlobalMut<T>`, `GlobalTable<T>`, `TensorMap`, `TensorMapMut`, u32, u64, i32, i64 and f32"
)]
pub trait Parameter: Sized {
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
        impl Parameter for $number {
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
        impl<T: crate::num::Pod> Parameter for crate::global::$parameter<T> {
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
