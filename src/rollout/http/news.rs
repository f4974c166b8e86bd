//! What makes the waiting long, from the threads that read answers to whoever waits for them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::Waiting;

/// How often each thing happened that was not told yet.
#[derive(Debug, Default)]
pub(super) struct News(Mutex<BTreeMap<String, u32>>);

impl News {
    /// A request at this address had no whole answer in time.
    pub(super) fn late(&self, url: &str, seconds: f64) {
        let what = format!("{url}: no whole answer within {seconds} s");
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += 1;
    }

    pub(super) fn tell(&self, waiting: &dyn Waiting) {
        let untold = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for (what, count) in untold {
            let then = "a request that it happens to twice is given up";
            waiting.hears(&format!("{what} to {count} request(s); {then}"));
        }
    }
}
