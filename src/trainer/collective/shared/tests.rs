use super::*;
use crate::base::Stream;
use crate::config::Dtype;
use crate::ops::array::Device;
use crate::ops::shards::{cut, shard_len};

/// What every rank's thread returns, in rank order.
fn on_every_rank<T: Send>(
    world: Vec<SharedMemory>,
    body: impl Fn(&SharedMemory) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let body = &body;
        let threads: Vec<_> =
            world.into_iter().map(|end| scope.spawn(move || body(&end))).collect();
        threads.into_iter().map(|t| t.join().expect("a rank that does not panic")).collect()
    })
}

fn numbers(round: u64, rank: usize, n: usize) -> Vec<f32> {
    let mut stream = Stream::new(round, "collective", rank as u64);
    // Far apart in size, so that another order of the sum has other bits.
    (0..n).map(|_| (stream.normal() * 10_f64.powf(4.0 * stream.uniform())) as f32).collect()
}

fn weights(values: Vec<f32>) -> Weights {
    Weights::of_master(&Device::Cpu.upload(values), Dtype::F32)
}

#[test]
fn every_rank_gets_the_sum_in_rank_order() {
    for world in [1, 2, 3, 4, 8] {
        let results = on_every_rank(SharedMemory::world(world), |end| {
            let rank = end.rank().index();
            let mut out = Vec::new();
            for round in 0..50 {
                let len = 1 + round as usize % 11;
                let shard = end.reduce_scatter(Device::Cpu.upload(numbers(round, rank, len)))?;
                assert_eq!(shard.len(), shard_len(len, world));
                let whole = end.all_gather(&weights(shard.into_host()), len)?.settle();
                let scalar = f64::from(numbers(round, rank, 1)[0]).exp_m1();
                let sums = end.all_reduce(&[scalar, 1.0])?;
                out.push((whole.whole().to_array().into_host(), sums));
            }
            Ok::<_, TrainerError>(out)
        });
        for round in 0..50_u64 {
            let len = 1 + round as usize % 11;
            let mut sum = numbers(round, 0, len);
            let mut scalar = 0.0;
            for rank in 0..world {
                scalar += f64::from(numbers(round, rank, 1)[0]).exp_m1();
                if rank > 0 {
                    let theirs = numbers(round, rank, len);
                    sum.iter_mut().zip(theirs).for_each(|(a, b)| *a += b);
                }
            }
            for result in &results {
                let found = &result.as_ref().expect("no rank left early")[round as usize];
                let due = (sum.clone(), vec![scalar, world as f64]);
                assert_eq!(found, &due, "world {world}, round {round}");
            }
        }
    }
}

#[test]
fn a_gather_keeps_the_dtype() {
    let flat = numbers(1, 0, 7);
    let whole = on_every_rank(SharedMemory::world(3), |end| {
        let own = Device::Cpu.upload(cut(&flat, 1, end.rank().index(), 3));
        end.all_gather(&Weights::of_master(&own, Dtype::Bf16), 7).expect("all are here").settle()
    });
    let want = Weights::of_master(&Device::Cpu.upload(flat.clone()), Dtype::Bf16);
    for whole in whole {
        assert_eq!((whole.dtype(), whole.to_bytes()), (Dtype::Bf16, want.to_bytes()));
    }
}

#[test]
fn a_barrier_holds_back_until_all_have_come() {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    for world in [1, 2, 3, 4] {
        let arrived = AtomicUsize::new(0);
        on_every_rank(SharedMemory::world(world), |end| {
            for round in 1..=200 {
                arrived.fetch_add(1, SeqCst);
                end.barrier().expect("no rank left early");
                assert!(arrived.load(SeqCst) >= round * world);
                end.barrier().expect("no rank left early");
                assert!(arrived.load(SeqCst) <= round * world + world);
            }
        });
    }
}

#[test]
fn a_rank_that_leaves_fails_the_others() {
    for world in [2, 3, 4] {
        let results = on_every_rank(SharedMemory::world(world), |end| {
            end.all_reduce(&[1.0])?;
            if end.rank() == Rank::new(1) {
                return Ok(());
            }
            end.barrier()
        });
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Ok(()) => assert_eq!(rank, 1),
                Err(TrainerError::RankLeft { rank: left }) => assert_eq!(left, Rank::new(1)),
                Err(other) => panic!("{other}"),
            }
        }
    }
}

/// Two of three do not come; they are named, and find the line cut when they come too late.
#[test]
fn ranks_that_do_not_come_are_named() {
    let patience = Duration::from_millis(20);
    let waiting = std::sync::Barrier::new(3);
    let results = on_every_rank(SharedMemory::patient_world(3, patience), |end| {
        let early = (end.rank() == Rank::new(0)).then(|| end.barrier());
        waiting.wait();
        early.unwrap_or_else(|| end.barrier())
    });
    for result in results {
        let error = result.expect_err("two are missing").to_string();
        assert!(error.starts_with("ranks 1, 2 did not come"), "{error}");
    }
}

#[test]
fn shards_of_another_length_are_refused() {
    let [end] = <[_; 1]>::try_from(SharedMemory::world(1)).expect("one rank");
    let uneven = std::panic::catch_unwind(|| end.all_gather(&weights(vec![1.0, 2.0]), 3));
    assert!(uneven.is_err());
}
