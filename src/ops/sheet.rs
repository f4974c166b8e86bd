//! Whole numbers that a pass looks up on its device: which rows belong to whom, in which blocks
//! their states lie, which tokens they are. They travel in one piece.

#[cfg(feature = "cuda")]
use std::sync::{Arc, OnceLock};

#[cfg(feature = "cuda")]
use cudarc::driver::{CudaSlice, DevicePtr};

use super::array::Device;
#[cfg(feature = "cuda")]
use super::cuda::Gpu;

/// Lists on their way to a device. The CPU looks things up where they are: for it nothing is
/// written down.
#[derive(Debug)]
pub struct Sheet {
    device: Device,
    #[cfg(feature = "cuda")]
    words: Vec<u32>,
    #[cfg(feature = "cuda")]
    memory: Place,
}

/// Where a sheet lies on its device, once it is sent.
#[cfg(feature = "cuda")]
type Place = Arc<OnceLock<Arc<CudaSlice<u32>>>>;

/// One list of a sheet. Kernels find it there once the sheet is sent.
#[derive(Clone, Debug)]
pub struct Numbers {
    len: usize,
    #[cfg(feature = "cuda")]
    start: usize,
    #[cfg(feature = "cuda")]
    memory: Place,
}

/// The device memory of a sheet, to which another one of the same lists can be sent.
#[derive(Clone, Debug, Default)]
pub struct Paper {
    #[cfg(feature = "cuda")]
    memory: Option<Arc<CudaSlice<u32>>>,
}

/// Lists begin at multiples of two words, so that an f64 may be one of them.
#[cfg(feature = "cuda")]
const ALIGNMENT: usize = 2;

impl Sheet {
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            #[cfg(feature = "cuda")]
            words: Vec::new(),
            #[cfg(feature = "cuda")]
            memory: Place::default(),
        }
    }

    /// Writes down a list.
    pub fn list(&mut self, numbers: impl ExactSizeIterator<Item = u32>) -> Numbers {
        let room = numbers.len();
        self.list_within(room, numbers)
    }

    /// Writes down a list of at most `room` numbers, so that another sheet's may be longer.
    pub fn list_within(&mut self, room: usize, numbers: impl Iterator<Item = u32>) -> Numbers {
        match self.device {
            Device::Cpu => {
                drop(numbers);
                Numbers {
                    len: room,
                    #[cfg(feature = "cuda")]
                    start: 0,
                    #[cfg(feature = "cuda")]
                    memory: Arc::clone(&self.memory),
                }
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                let start = self.words.len();
                self.words.extend(numbers);
                assert!(self.words.len() <= start + room, "a list is longer than its room");
                self.words.resize((start + room).next_multiple_of(ALIGNMENT), 0);
                Numbers { len: room, start, memory: Arc::clone(&self.memory) }
            }
        }
    }

    /// Sends all lists, where `paper` is given to its memory. What is launched from now on finds
    /// them; what was launched before has read its own.
    pub fn send(self, paper: Option<&Paper>) -> Paper {
        match &self.device {
            // Nothing was written down.
            Device::Cpu => paper.cloned().unwrap_or_default(),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                let old = paper.map(|paper| paper.memory.clone().expect("paper of this device"));
                let memory = old.unwrap_or_else(|| Arc::new(gpu.uninit(self.words.len())));
                gpu.copy_to(&self.words, &memory);
                assert!(self.memory.set(Arc::clone(&memory)).is_ok(), "a sheet is sent once");
                Paper { memory: Some(memory) }
            }
        }
    }
}

impl Numbers {
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device address of the first one.
    #[cfg(feature = "cuda")]
    pub(in crate::ops) fn address(&self, gpu: &Gpu) -> u64 {
        let memory = self.memory.get().expect("a sheet is sent before anyone reads it");
        memory.device_ptr(gpu.stream()).0 + self.start as u64 * 4
    }
}
