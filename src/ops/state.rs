//! The recurrent states that one Mamba layer's rows start from and leave behind.

use super::array::Device;
use super::pages::{Pages, StateView};
use crate::base::BlockId;

/// The recurrent state of one sequence in one layer, f32 in memory whatever the cache holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MambaState {
    /// `[d_conv - 1, D]`: the last columns before the convolution, oldest first.
    pub conv: Vec<f32>,
    /// `[D, N]`.
    pub ssm: Vec<f32>,
}

/// Where one row's state lies, and whether the row starts from it or from zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateRow {
    pub block: BlockId,
    pub reads: bool,
}

/// One state a span, in the spans' order.
#[derive(Clone, Debug)]
pub enum States {
    /// Copies, which [`Self::store`] writes back.
    Cpu(Vec<MambaState>),
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
        }
    }

    /// The rows' states in a layer's pages, the product slot · stride of the ssm state taken in
    /// `bits`.
    #[must_use]
    pub fn load(pages: &Pages, view: &StateView, rows: &[StateRow], bits: u32) -> Self {
        let zeros = MambaState {
            conv: vec![0.0; view.conv_elements as usize],
            ssm: vec![0.0; view.ssm_elements as usize],
        };
        let one = |row: &StateRow| {
            let mut state = zeros.clone();
            if row.reads {
                view.load_conv(pages, row.block, &mut state.conv);
                view.load_ssm(pages, row.block, bits, &mut state.ssm);
            }
            state
        };
        Self::Cpu(rows.iter().map(one).collect())
    }

    /// Writes what the rows left, in row order, so that two rows of one address have one outcome.
    pub fn store(&self, pages: &mut Pages, view: &StateView, rows: &[StateRow], bits: u32) {
        match self {
            Self::Cpu(states) => {
                assert_eq!(states.len(), rows.len(), "one state a row");
                for (state, row) in states.iter().zip(rows) {
                    view.store_conv(pages, row.block, &state.conv);
                    view.store_ssm(pages, row.block, bits, &state.ssm);
                }
            }
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(states) => states.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn cpu_mut(&mut self) -> &mut [MambaState] {
        match self {
            Self::Cpu(states) => states,
        }
    }
}
