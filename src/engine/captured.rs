//! Decode batches as recordings: one a captured size, played on each step's own tokens and blocks.
//! A step is one copy to the device, one play, one copy back.

use std::collections::HashMap;

use super::{Runner, StepBatch};
use crate::base::{Contract, LogProb, TokenId};
use crate::ops::pages::Pages;
use crate::ops::recording::{Kept, Recording};
use crate::ops::sampling::{sample_rows, Drawn, Noises};
use crate::ops::sheet::{Paper, Sheet};

/// The recordings of one model with one pool, by their rows.
#[derive(Debug, Default)]
pub(super) struct Captured {
    kept: Kept,
    sizes: HashMap<usize, Played>,
}

#[derive(Debug)]
struct Played {
    /// Before what it points into.
    recording: Recording,
    paper: Paper,
    /// What each play draws.
    drawn: Drawn,
}

impl Captured {
    /// Runs a batch of decode rows and draws a token after each, the padding's last: by the
    /// recording of its size, which is made where there is none. Every context may have up to
    /// `longest` tokens. Contract and `longest` are an engine's own and never change.
    pub fn step(
        &mut self,
        (runner, pages): (&Runner, &mut Pages),
        batch: &StepBatch,
        noise: Vec<f64>,
        contract: &Contract,
        longest: u32,
    ) -> Vec<(TokenId, LogProb)> {
        let device = runner.device();
        let mut sheet = Sheet::new(device);
        let prepared = runner.prepare(&mut sheet, batch, longest);
        let noise = Noises::on(&mut sheet, noise);
        let size = noise.len();
        if let Some(played) = self.sizes.get(&size) {
            // What a launch asserts about its numbers, a play does not.
            let outside = batch.tokens.iter().find(|token| token.index() >= runner.vocab());
            assert!(outside.is_none(), "token {outside:?} of {}", runner.vocab());
            sheet.send(Some(&played.paper));
            played.recording.play();
            return played.drawn.read();
        }
        let paper = sheet.send(None);
        let draw = || {
            let x_th = runner.forward_prepared(pages, batch, &prepared, None);
            sample_rows(&runner.logits(&x_th), runner.vocab(), &noise, contract)
        };
        let (first, drawn, recording) = device.record(&self.kept, draw, Drawn::read);
        self.sizes.insert(size, Played { recording, paper, drawn });
        first
    }
}
