//! A planted fault: preempted requests that keep their state blocks.

use super::{Request, Scheduler};
use crate::config::Fault;

impl Scheduler {
    /// With what is planted in it.
    #[must_use]
    pub fn with_faults(self, faults: &[Fault]) -> Self {
        Self { faults: faults.to_vec(), ..self }
    }

    /// Gives up the states of all waiting requests, where nothing could run otherwise; false if
    /// there are none.
    pub(super) fn give_up_kept_states(&mut self) -> bool {
        let pool = &mut self.pool;
        let gave_up = |request: &mut Request| request.give_up_state(pool);
        self.waiting.iter_mut().map(gave_up).filter(|gave| *gave).count() > 0
    }
}
