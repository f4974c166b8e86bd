//! The recurrent states that one Mamba layer's rows start from and leave behind.

use std::ops::Deref;

use super::array::Device;
use super::extremes::Extremes;
#[cfg(feature = "cuda")]
use super::pages::cuda;
use super::pages::{Pages, StateView};
use super::sheet::Sheet;
use crate::base::BlockId;

/// The recurrent state of one sequence in one layer, f32 in memory whatever the cache holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MambaState {
    /// `[d_conv - 1, D]`: the last columns before the convolution, oldest first.
    pub conv: Vec<f32>,
    /// `[D, N]`.
    pub ssm: Vec<f32>,
}

/// Where one row's state goes, and where it starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRow {
    pub block: BlockId,
    /// `None` is zero.
    pub from: Option<BlockId>,
}

/// A batch's [`StateRow`]s in one group, row after row.
#[derive(Clone, Debug)]
pub struct StateRows {
    list: Vec<StateRow>,
    /// The same for kernels.
    #[cfg(feature = "cuda")]
    device: cuda::StateRows,
}

impl StateRows {
    #[must_use]
    pub fn on(sheet: &mut Sheet, list: Vec<StateRow>) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = sheet;
        Self {
            #[cfg(feature = "cuda")]
            device: cuda::StateRows::on(sheet, &list),
            list,
        }
    }
}

impl Deref for StateRows {
    type Target = [StateRow];

    fn deref(&self) -> &[StateRow] {
        &self.list
    }
}

/// One state a span, in the spans' order.
#[derive(Debug)]
pub enum States {
    /// Copies, which [`Self::store_conv`] and [`Self::store_ssm`] write back.
    Cpu(Vec<MambaState>),
    /// The pages themselves, which the kernels read and write: nothing is left to write back. A
    /// launch takes all rows, and none of them stores where another one loads.
    #[cfg(feature = "cuda")]
    Cuda(cuda::States),
}

impl States {
    /// Zeros that nobody keeps: sequences from their start.
    #[must_use]
    pub fn fresh(device: &Device, count: usize, conv_len: usize, ssm_len: usize) -> Self {
        match device {
            Device::Cpu => {
                let state = MambaState { conv: vec![0.0; conv_len], ssm: vec![0.0; ssm_len] };
                Self::Cpu(vec![state; count])
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => Self::Cuda(cuda::States::Fresh { count }),
        }
    }

    /// The rows' states in a layer's pages, the product slot · stride of the ssm state taken in
    /// `bits`.
    #[must_use]
    pub fn load(pages: &Pages, view: &StateView, rows: &StateRows, bits: u32) -> Self {
        #[cfg(feature = "cuda")]
        if let Pages::Cuda(pages) = pages {
            return Self::Cuda(cuda::States::paged(pages, view, &rows.device, bits));
        }
        let zeros = MambaState {
            conv: vec![0.0; view.conv_elements as usize],
            ssm: vec![0.0; view.ssm_elements as usize],
        };
        let one = |row: &StateRow| {
            let mut state = zeros.clone();
            if let Some(block) = row.from {
                view.load_conv(pages, block, &mut state.conv);
                view.load_ssm(pages, block, bits, &mut state.ssm);
            }
            state
        };
        Self::Cpu(rows.iter().map(one).collect())
    }

    /// Writes what the rows left of a convolution. A mixer's two kernels follow one another, so
    /// that all rows of a batch store this before the first stores its ssm state.
    pub fn store_conv(&self, pages: &mut Pages, view: &StateView, rows: &[StateRow]) {
        match self {
            Self::Cpu(states) => {
                assert_eq!(states.len(), rows.len(), "one state a row");
                for (state, row) in states.iter().zip(rows) {
                    view.store_conv(pages, row.block, &state.conv);
                }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => {}
        }
    }

    /// Writes the ssm states, in row order, so that two rows of one address have one outcome.
    pub fn store_ssm(&self, pages: &mut Pages, view: &StateView, rows: &[StateRow], bits: u32) {
        match self {
            Self::Cpu(states) => {
                assert_eq!(states.len(), rows.len(), "one state a row");
                for (state, row) in states.iter().zip(rows) {
                    view.store_ssm(pages, row.block, bits, &state.ssm);
                }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => {}
        }
    }

    /// Of each row's state; `None` where the states are the pages themselves.
    #[must_use]
    pub fn extremes(&self) -> Option<Vec<Extremes>> {
        let one = |state: &MambaState| {
            let mut found = Extremes::default();
            found.add(&state.conv);
            found.add(&state.ssm);
            found
        };
        match self {
            Self::Cpu(states) => Some(states.iter().map(one).collect()),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => None,
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(states) => states.len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(states) => states.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The CPU's copies. Panics for states of another device.
    pub fn cpu_mut(&mut self) -> &mut [MambaState] {
        match self {
            Self::Cpu(states) => states,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => panic!("states of another device"),
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn cuda(&self) -> &cuda::States {
        match self {
            Self::Cuda(states) => states,
            Self::Cpu(_) => panic!("states of another device"),
        }
    }
}
