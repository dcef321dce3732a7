//! The largest magnitudes of many tensors.

use std::fmt;

use oxtile_kernels::amax::{MultiAmaxArgs, NO_SLOT, tiles};
use oxtile_kernels::magnitude::Magnitude;
use oxtile_tile::launch::{self, DeviceView};

use super::amax::AmaxNumber;
use super::grouped::TensorGroup;
use super::split_phase::LocalAmax;
use crate::runtime::{Buffer, Error, Loaded, Result, Runtime, Stream};
use crate::tensor::{DeviceTable, upload};

/// The largest magnitudes of any number of tensors by one launch. Rules as for [`Amax`](super::Amax).
pub struct MultiAmax<T: AmaxNumber>(Loaded<T::MultiAmax>);

/// Tensors and where their amaxes go, in device memory: made once, run any number of times.
pub struct MultiAmaxPlan<'a, T> {
    tensors: DeviceTable<'a, T>,
    first_tiles: Buffer<u64>,
    slots: Buffer<u32>,
    /// One more than the last slot.
    slots_end: u64,
}

impl<'a, T: Magnitude> MultiAmaxPlan<'a, T> {
    /// Tensor `i` raises the slots `slots[i]`, one or two of them or none; tensors may share a slot. The host does not
    /// wait for the copies of the plan to the device.
    ///
    /// # Errors
    /// [`Error::Length`] unless there are slots for each tensor; [`Error::Invalid`] for the slot 2^32 - 1; as
    /// [`DeviceTable::new`].
    pub fn new(stream: &Stream, tensors: &[DeviceView<'a, T>], slots: &[[Option<u32>; 2]]) -> Result<Self> {
        if tensors.len() != slots.len() {
            let (expected, found) = (tensors.len() as u64, slots.len() as u64);
            return Err(Error::Length { what: "MultiAmaxPlan::new, slots", expected, found });
        }
        let used = || slots.iter().flatten().flatten().copied();
        if used().any(|slot| slot == NO_SLOT) {
            return Err(Error::Invalid { what: "MultiAmaxPlan::new, slots", why: format!("{NO_SLOT} is reserved: use a smaller one") });
        }
        let words: Vec<u32> = slots.iter().flatten().map(|slot| slot.unwrap_or(NO_SLOT)).collect();
        Ok(Self {
            tensors: DeviceTable::new(stream, tensors)?,
            first_tiles: upload(stream, &first_tiles(tensors))?,
            slots: upload(stream, &words)?,
            slots_end: used().max().map_or(0, |last| u64::from(last) + 1),
        })
    }
}

/// The number of tiles before each tensor, and that of all at the end.
fn first_tiles<T>(tensors: &[DeviceView<'_, T>]) -> Vec<u64> {
    let running = tensors.iter().scan(0, |before, tensor| {
        *before += tiles::<T>(tensor.len());
        Some(*before)
    });
    std::iter::once(0).chain(running).collect()
}

impl<T: AmaxNumber> MultiAmax<T> {
    /// Loads the kernel.
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn new(runtime: &Runtime) -> Result<Self> {
        runtime.load().map(Self)
    }

    /// Sets each slot to the largest magnitude of its tensors, and slots of no tensor to 0.
    ///
    /// # Errors
    /// [`Error::Length`] if a slot is beyond `outputs`; as [`Loaded::launch`]. The outputs are then as they were.
    pub fn run(&self, stream: &Stream, plan: &MultiAmaxPlan<'_, T>, outputs: &mut Buffer<f32>) -> Result<()> {
        if outputs.len() < plan.slots_end {
            return Err(Error::Length { what: "MultiAmax::run, outputs", expected: plan.slots_end, found: outputs.len() });
        }
        let (tensors, first_tiles, slots) = (plan.tensors.view(), plan.first_tiles.view(), plan.slots.view());
        let args = MultiAmaxArgs { tensors, first_tiles, slots, outputs: outputs.view_mut() };
        let raised = args.outputs.access("outputs");
        self.0.launch_on_zeros(stream, args, &[raised])
    }

    /// The amax of each tensor of a group, or of this rank's parts of them: the first phase, in which nothing is cast.
    ///
    /// # Errors
    /// As [`Buffer::uninitialised`] and [`Loaded::launch`].
    pub fn local_amax(&self, stream: &Stream, group: &TensorGroup<'_, T>) -> Result<LocalAmax> {
        let mut slots = Buffer::uninitialised(stream, group.len() as u64)?;
        self.run(stream, &group.amax, &mut slots)?;
        Ok(LocalAmax::new(slots))
    }
}

/// A [`MultiAmaxPlan`] that borrows nothing: of tensors that stay where they are, and are written between two runs.
pub(crate) struct FixedAmaxPlan {
    entries: Buffer<u64>,
    first_tiles: Buffer<u64>,
    slots: Buffer<u32>,
    /// Address and length of each tensor.
    words: Vec<u64>,
    slots_end: u64,
}

fn words<T>(tensors: &[DeviceView<'_, T>]) -> Vec<u64> {
    tensors.iter().flat_map(|view| [view.address(), view.len()]).collect()
}

impl FixedAmaxPlan {
    /// Tensor `i` raises the slot `slots[i]`.
    pub fn new<T: Magnitude>(stream: &Stream, tensors: &[DeviceView<'_, T>], slots: &[u32]) -> Result<Self> {
        let (words, both) = (words(tensors), slots.iter().flat_map(|slot| [*slot, NO_SLOT]).collect::<Vec<_>>());
        Ok(Self {
            entries: upload(stream, &words)?,
            first_tiles: upload(stream, &first_tiles(tensors))?,
            slots: upload(stream, &both)?,
            words,
            slots_end: slots.iter().max().map_or(0, |last| u64::from(*last) + 1),
        })
    }
}

impl<T: AmaxNumber> MultiAmax<T> {
    /// As [`run`](Self::run), of the tensors that the plan was made for.
    pub(crate) fn run_fixed(
        &self,
        stream: &Stream,
        plan: &FixedAmaxPlan,
        tensors: &[DeviceView<'_, T>],
        outputs: &mut Buffer<f32>,
    ) -> Result<()> {
        if words(tensors) != plan.words {
            return Err(Error::Invalid { what: "MultiAmax", why: "the plan was made for other tensors".to_owned() });
        }
        Error::check_length("MultiAmax, outputs", plan.slots_end, outputs.len())?;
        let members: Vec<_> = tensors.iter().map(|view| view.access("table")).collect();
        // SAFETY: the entries are the addresses and lengths of these views of `T`, as was compared.
        let table = unsafe { launch::DeviceTable::from_raw(plan.entries.view(), &members) };
        let (first_tiles, slots) = (plan.first_tiles.view(), plan.slots.view());
        let args = MultiAmaxArgs { tensors: table, first_tiles, slots, outputs: outputs.view_mut() };
        let raised = args.outputs.access("outputs");
        self.0.launch_on_zeros(stream, args, &[raised])
    }
}

impl<T: AmaxNumber> fmt::Debug for MultiAmax<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("MultiAmax").field(&self.0).finish()
    }
}

impl<T> fmt::Debug for MultiAmaxPlan<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiAmaxPlan").field("tensors", &self.tensors).finish_non_exhaustive()
    }
}
