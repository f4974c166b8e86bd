//! Which of several configurations of equal bits is the fastest here.

use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags;

use super::problem::Algorithm;
use crate::ops::cuda::{Gpu, OrFail};

/// Each configuration is timed so often; the median counts.
const ROUNDS: usize = 5;
/// Overwritten before every run, so that weights come from memory, as they do in a pass.
const FLUSHED_BYTES: usize = 96 << 20;

/// Fastest first. Configurations take turns, so that a drifting clock is nobody's advantage.
pub(super) fn rank(
    gpu: &Arc<Gpu>,
    mut configurations: Vec<Algorithm>,
    run: impl Fn(&Algorithm),
) -> Vec<Algorithm> {
    if configurations.len() < 2 {
        return configurations;
    }
    let (stream, context) = (gpu.stream(), gpu.stream().context());
    let event = || context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).or_fail("timing");
    let mut flushed = gpu.uninit::<u8>(FLUSHED_BYTES);
    configurations.iter().for_each(&run);
    let mut times = vec![[0.0_f32; ROUNDS]; configurations.len()];
    for round in 0..ROUNDS {
        for (algorithm, times) in configurations.iter().zip(&mut times) {
            stream.memset_zeros(&mut flushed).or_fail("timing");
            let (start, end) = (event(), event());
            start.record(stream).or_fail("timing");
            run(algorithm);
            end.record(stream).or_fail("timing");
            times[round] = start.elapsed_ms(&end).or_fail("timing");
        }
    }
    let median = |times: &mut [f32; ROUNDS]| {
        times.sort_by(f32::total_cmp);
        times[ROUNDS / 2]
    };
    let medians: Vec<f32> = times.iter_mut().map(median).collect();
    let mut order: Vec<usize> = (0..configurations.len()).collect();
    order.sort_by(|&a, &b| medians[a].total_cmp(&medians[b]));
    configurations = order.into_iter().map(|i| configurations[i]).collect();
    configurations
}
