use super::*;

const A: RequestId = RequestId::new(1, 0, 0);
const B: RequestId = RequestId::new(1, 0, 1);

fn ids(blocks: &[StateBlock]) -> Vec<u32> {
    blocks.iter().map(|taken| taken.block.get()).collect()
}

fn give_back(pool: &mut BlockPool, blocks: &[u32], owner: RequestId) {
    pool.release(blocks.iter().copied().map(BlockId::new), owner).unwrap();
}

#[test]
fn the_order_of_reuse_is_the_policy() {
    for (order, next) in [(FreeListOrder::Fifo, [6, 7, 2, 1]), (FreeListOrder::Lifo, [1, 2, 6, 7])]
    {
        let mut pool = BlockPool::new(8, order);
        assert_eq!(ids(&pool.take(3, A).unwrap()), [1, 2, 3], "{order:?}");
        assert_eq!(ids(&pool.take(2, B).unwrap()), [4, 5], "{order:?}");
        give_back(&mut pool, &[2, 1], A);
        assert_eq!(ids(&pool.take(4, B).unwrap()), next, "{order:?}");
        assert_eq!(pool.taken(), 9);
        pool.check().unwrap();
    }
}

#[test]
fn taking_is_all_or_nothing() {
    let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
    assert_eq!(pool.take(4, A), None);
    assert_eq!((pool.free_blocks().len(), pool.taken()), (3, 0));
    assert_eq!(ids(&pool.take(3, A).unwrap()), [1, 2, 3]);
    assert_eq!(pool.take(1, A), None);
    assert_eq!(pool.take(0, A), Some(vec![]));
}

#[test]
fn a_block_remembers_whose_bytes_it_carries() {
    let mut pool = BlockPool::new(2, FreeListOrder::Fifo);
    let expected = [(A, 1, None), (B, 2, Some(A)), (A, 3, Some(B))];
    for (owner, generation, previous_owner) in expected {
        let taken = pool.take(1, owner).unwrap()[0];
        let generation = Generation::new(generation);
        assert_eq!(taken, StateBlock { block: BlockId::new(1), generation, previous_owner });
        pool.release([taken.block], owner).unwrap();
    }
}

#[test]
fn freeing_the_block_of_another_is_refused() {
    let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
    pool.take(2, A).unwrap();
    let error = pool.release([BlockId::new(2)], B).unwrap_err();
    assert!(error.to_string().starts_with("request s1.p0.r1 frees block 2, which s1.p0.r0 owns"));
}

/// An error that names the block, not a second owner.
#[test]
fn k10_freeing_twice_is_refused() {
    let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
    pool.take(2, A).unwrap();
    give_back(&mut pool, &[2], A);
    let error = pool.release([BlockId::new(2)], B).unwrap_err();
    let expected =
        "request s1.p0.r1 frees block 2, which is free already: s1.p0.r0 freed it last; a \
        block that is freed twice would soon have two owners";
    assert_eq!(error.to_string(), expected);
    pool.check().unwrap();
    assert_eq!(pool.free_blocks().filter(|block| block.get() == 2).count(), 1);
}

#[test]
fn a_shared_block_is_free_once_nobody_holds_it() {
    let block = BlockId::new(2);
    let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
    pool.take(2, A).unwrap();
    pool.share([block], B);
    assert_eq!((pool.record(block).owner, pool.sharers(block)), (Some(A), &[B][..]));
    pool.check().unwrap();
    // Whoever goes first, the other one holds it.
    give_back(&mut pool, &[2], A);
    assert_eq!((pool.record(block).owner, pool.sharers(block)), (Some(B), &[][..]));
    let stranger = pool.release([block], A).unwrap_err();
    assert_eq!(stranger, EngineError::BlockOfAnother { block, holder: A, owner: B });
    give_back(&mut pool, &[2], B);
    pool.check().unwrap();
    assert_eq!(pool.record(block).previous_owner, Some(B));
    // A free block that is found leaves the free list wherever it stands.
    give_back(&mut pool, &[1], A);
    pool.share([block], A);
    assert!(pool.free_blocks().map(BlockId::get).eq([3, 1]));
    assert_eq!(pool.record(block).generation, Generation::new(1), "it was not handed out again");
    pool.check().unwrap();
}

#[test]
fn a_snapshot_goes_on_where_the_pool_was() {
    let mut pool = BlockPool::new(6, FreeListOrder::Lifo);
    pool.take(3, A).unwrap();
    give_back(&mut pool, &[1, 3], A);
    let text = serde_json::to_string(&pool.snapshot()).unwrap();
    let mut other = BlockPool::new(6, FreeListOrder::Lifo);
    other.restore(serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!(other.snapshot(), pool.snapshot());
    assert_eq!(other.take(4, B), pool.take(4, B));
}

#[test]
fn a_damaged_snapshot_is_named() {
    let block = BlockId::new;
    let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
    pool.take(1, A).unwrap();
    let good = pool.snapshot();
    let cases = [
        (vec![2, 3, 2], EngineError::BlockFreeTwice { block: block(2) }),
        (vec![2], EngineError::BlockLost { block: block(3) }),
        (vec![2, 3, 1], EngineError::BlockFreeAndOwned { block: block(1), owner: A }),
        (vec![0, 2, 3], EngineError::BlockUnknown { block: block(0), last: 3 }),
        (vec![2, 3, 4], EngineError::BlockUnknown { block: block(4), last: 3 }),
    ];
    for (free, error) in cases {
        let free = free.into_iter().map(block).collect();
        assert_eq!(pool.restore(PoolSnapshot { free, ..good.clone() }), Err(error));
        assert_eq!(pool.snapshot(), good, "a refused snapshot changes nothing");
    }
    let mut small = BlockPool::new(3, FreeListOrder::Fifo);
    assert_eq!(small.restore(good), Err(EngineError::PoolSize { found: 4, expected: 3 }));
}
