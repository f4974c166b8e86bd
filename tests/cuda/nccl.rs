//! NCCL between as many GPUs as there are, one included: shards are joined as they are, and summed.

use gapscope::config::Dtype;
use gapscope::ops::array::Device;
use gapscope::ops::cuda::{devices, nccl_version, Communicator, Gpu};
use gapscope::ops::shards::{cut, shard_len};
use gapscope::ops::weights::Weights;

use crate::{gpu, too_small};

#[test]
fn shards_are_joined_and_sums_are_cut() {
    let Some(first) = gpu() else { return };
    if nccl_version().is_none() {
        return too_small("NCCL (libnccl.so) is not there");
    }
    let count = devices().expect("a driver").len();
    let others = (1..count).map(|ordinal| Gpu::open(ordinal).expect("a GPU"));
    let gpus: Vec<_> = std::iter::once(first).chain(others).collect();
    let ends = Communicator::world(&gpus).expect("GPUs that are connected");
    let number = |rank: usize, at: usize| (1 + rank) as f32 * (at % 251) as f32;
    let here = || Ok::<(), std::convert::Infallible>(());
    std::thread::scope(|scope| {
        for (rank, (end, gpu)) in ends.into_iter().zip(&gpus).enumerate() {
            scope.spawn(move || {
                let device = Device::Cuda(gpu.clone());
                for len in [1, 2, 7, 1000, 1_000_003] {
                    let flat: Vec<f32> = (0..len).map(|at| number(0, at)).collect();
                    for dtype in [Dtype::F32, Dtype::Bf16] {
                        let own = device.upload(cut(&flat, 1, rank, count));
                        let shard = Weights::of_master(&own, dtype);
                        // Two under way at once, and one that is never used.
                        let [one, two, unused] = [(); 3]
                            .map(|()| end.all_gather(&shard, len, here).expect("they are here"));
                        drop(unused);
                        for whole in [one.settle(), two.settle()] {
                            let want = Weights::of_master(&device.upload(flat.clone()), dtype);
                            assert_eq!(whole.to_bytes(), want.to_bytes(), "{len} {dtype:?}");
                        }
                    }
                    let mine = (0..len).map(|at| number(rank, at)).collect();
                    let sum = end.reduce_scatter(device.upload(mine), here);
                    let sum = sum.expect("they are here").into_host();
                    // Whole numbers below 2^24: every order has the same sum.
                    let all = (0..len).map(|at| (0..count).map(|rank| number(rank, at)).sum());
                    let all: Vec<f32> = all.collect();
                    assert_eq!(sum, cut(&all, 1, rank, count), "{len}");
                    assert_eq!(sum.len(), shard_len(len, count));
                }
            });
        }
    });
}
