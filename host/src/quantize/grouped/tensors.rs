//! Wide matrices: a group of the caller's tensors, and a group in one buffer.

use std::fmt;

use oxtile_kernels::magnitude::Magnitude;
use oxtile_tile::launch::DeviceView;
use oxtile_tile::num::Pod;

use super::table::{Starts, Tables};
use crate::quantize::MultiAmaxPlan;
use crate::runtime::{Buffer, Error, HostElement, Result, Stream};
use crate::tensor::DeviceTable;
use crate::tensor::shape::numel;

/// The alignment of a member's first element, in elements, so that its codes and values start at whole sectors.
pub(super) const UNIT: u64 = 128;

/// Matrices anywhere in a device's memory that are quantized together: made once, quantized any number of times.
pub struct TensorGroup<'a, T> {
    pub(super) views: Vec<DeviceView<'a, T>>,
    pub(super) shapes: Vec<[u64; 2]>,
    pub(super) table: DeviceTable<'a, T>,
    pub(in crate::quantize) amax: MultiAmaxPlan<'a, T>,
    pub(super) tables: Tables,
}

impl<'a, T: Magnitude> TensorGroup<'a, T> {
    /// Copies what kernels need to know of the members to the stream's device; the host does not wait. Members of different shapes,
    /// without elements and at any address are legal, and so is a group of none.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the first member whose length is not that of its shape; as [`DeviceTable::new`].
    pub fn new(stream: &Stream, members: &[(DeviceView<'a, T>, [u64; 2])]) -> Result<Self> {
        for (i, (view, shape)) in members.iter().enumerate() {
            let expected = numel(shape).map_err(|error| invalid(i, error.to_string()))?;
            if view.len() != expected {
                return Err(invalid(i, format!("{} elements where its shape {shape:?} has {expected}", view.len())));
            }
        }
        let slot = |i| u32::try_from(i).map_err(|_| invalid(i, "more members than a group can have: make two groups".to_owned()));
        let slots = (0..members.len()).map(|i| Ok([Some(slot(i)?), None])).collect::<Result<Vec<_>>>()?;
        let views: Vec<_> = members.iter().map(|(view, _)| *view).collect();
        let (table, amax) = (DeviceTable::new(stream, &views)?, MultiAmaxPlan::new(stream, &views, &slots)?);
        Ok(Self { shapes: members.iter().map(|(_, shape)| *shape).collect(), views, table, amax, tables: Tables::default() })
    }

    /// How many members.
    pub fn len(&self) -> usize {
        self.views.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.views.is_empty()
    }
}

fn invalid(member: usize, why: String) -> Error {
    Error::Invalid { what: "TensorGroup::new", why: format!("member {member}: {why}") }
}

/// The values of a group, all members in one buffer.
#[derive(Debug)]
pub struct Matrices<T> {
    pub(super) values: Buffer<T>,
    pub(super) starts: Starts,
    shapes: Vec<[u64; 2]>,
}

impl<T: Pod> Matrices<T> {
    /// Matrices of these shapes, uninitialised.
    ///
    /// # Errors
    /// As [`numel`] and [`Buffer::uninitialised`].
    pub fn uninitialised(stream: &Stream, shapes: &[[u64; 2]]) -> Result<Self> {
        let starts = starts_of(shapes)?;
        Ok(Self { values: Buffer::uninitialised(stream, starts.end)?, starts, shapes: shapes.to_vec() })
    }

    /// How many members.
    pub fn len(&self) -> usize {
        self.shapes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.shapes.is_empty()
    }

    /// The shape of a member.
    ///
    /// # Panics
    /// If there is no such member; so do the other functions that take one.
    pub fn shape(&self, member: usize) -> [u64; 2] {
        self.shapes[member]
    }

    /// The values of a member.
    pub fn view(&self, member: usize) -> DeviceView<'_, T> {
        let (start, [rows, columns]) = (self.starts.of[member], self.shapes[member]);
        self.values.view().slice(start, start + rows * columns)
    }

    /// The values of a member on the host; waits for the stream.
    ///
    /// # Errors
    /// As [`Buffer::copy_to_slice`].
    #[track_caller]
    pub fn to_vec(&self, stream: &Stream, member: usize) -> Result<Vec<T>>
    where
        T: HostElement<Device = T>,
    {
        let (start, [rows, columns]) = (self.starts.of[member], self.shapes[member]);
        self.values.part_to_vec(stream, start..start + rows * columns)
    }

    pub(super) fn shapes(&self) -> &[[u64; 2]] {
        &self.shapes
    }
}

/// Where the elements of members of these shapes start.
pub(super) fn starts_of(shapes: &[[u64; 2]]) -> Result<Starts> {
    let lengths = shapes.iter().map(|shape| numel(shape)).collect::<Result<Vec<_>>>()?;
    Starts::new(lengths.into_iter(), UNIT)
}

impl<T> fmt::Debug for TensorGroup<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorGroup").field("shapes", &self.shapes).finish_non_exhaustive()
    }
}
