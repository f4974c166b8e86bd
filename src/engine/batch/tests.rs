use super::*;
use crate::engine::testing::{id, numbers, request, scheduler, update, LIMITS};
use crate::engine::Limits;

fn rollouts(batch: &StepBatch) -> Vec<u32> {
    batch.rows.iter().map(|row| row.request.rollout_idx).collect()
}

/// Rows as (rollout, admission) placed after `previous`; gives the rollouts in row order.
fn check_place(previous: &[u32], plan: &[(u32, Admission)], expected: &[u32]) {
    let previous: Vec<RequestId> = previous.iter().copied().map(id).collect();
    let entry = |(running_index, &(rollout, admission)): (usize, &(u32, Admission))| Scheduled {
        request: id(rollout),
        admission,
        computed_tokens: 1,
        scheduled_tokens: 1,
        samples: true,
        running_index,
    };
    let scheduled: Vec<Scheduled> = plan.iter().enumerate().map(entry).collect();
    let rows = place(&previous, &scheduled);
    let rollouts: Vec<u32> = rows.iter().map(|&index| plan[index].0).collect();
    assert_eq!(rollouts, expected, "{previous:?} {plan:?}");
}

#[test]
fn holes_are_filled_from_the_lowest_and_the_rest_condensed() {
    use Admission::{New, Resumed, Running};
    let run = |rollouts: &[u32]| rollouts.iter().map(|&r| (r, Running)).collect::<Vec<_>>();
    check_place(&[], &[(4, New), (5, New)], &[4, 5]);
    check_place(&[0, 1, 2, 3], &run(&[0, 1, 2, 3]), &[0, 1, 2, 3]);
    // The last row moves into the lowest hole.
    check_place(&[0, 1, 2, 3, 4], &run(&[0, 2, 4]), &[0, 4, 2]);
    check_place(&[0, 1, 2, 3, 4], &run(&[4]), &[4]);
    check_place(&[0, 1, 2, 3, 4], &run(&[0, 1]), &[0, 1]);
    check_place(&[0, 1, 2], &[], &[]);
    // One hole is filled by the new row, the other by the last row.
    check_place(
        &[0, 1, 2, 3, 4],
        &[(1, Running), (3, Running), (4, Running), (7, New)],
        &[7, 1, 4, 3],
    );
    // More rows join than there are holes.
    check_place(&[0, 1, 2], &[(0, Running), (2, Running), (7, New), (8, New)], &[0, 7, 2, 8]);
    // New rows join first, then those passed over for a step, then resumed ones.
    check_place(&[0, 1], &[(0, Running), (5, Running), (6, Resumed), (7, New)], &[0, 7, 5, 6]);
    // StepPlan order differs from row order: rows stay where they are.
    check_place(&[2, 0, 1], &run(&[0, 1, 2]), &[2, 0, 1]);
    // An id that left and came back is a new row.
    check_place(&[3, 0, 1], &[(0, Running), (1, Running), (5, New), (3, New)], &[5, 0, 1, 3]);
}

#[test]
fn tables_hold_the_ids_of_their_rows() {
    let mut scheduler = scheduler(LIMITS, 64);
    let mut rows = PersistentBatch::new(BatchSplit::IsPrefilling, false);
    scheduler.add(request(1, 3, 4)).unwrap();
    let plan = scheduler.schedule().unwrap();
    let batch = rows.build(&plan, &scheduler);
    assert_eq!((rollouts(&batch), batch.num_decodes), (vec![1], 0));
    assert_eq!(batch.row_tokens(0), [100, 101, 102].map(TokenId::new));
    update(&mut scheduler, &plan, 9);

    scheduler.add(request(2, 20, 4)).unwrap();
    let plan = scheduler.schedule().unwrap();
    let batch = rows.build(&plan, &scheduler);
    assert_eq!((rollouts(&batch), batch.num_decodes), (vec![1, 2], 1));
    let spans: Vec<Span> = batch.rows.iter().map(Row::span).collect();
    let span = |start, len, position| Span { start, len, position: Position::new(position) };
    assert_eq!(spans, [span(0, 1, 3), span(1, 20, 0)]);
    assert_eq!(batch.row_tokens(0), [TokenId::new(9)]);
    assert_eq!(batch.row_tokens(1), (200..220).map(TokenId::new).collect::<Vec<_>>());
    let tables =
        |row| [0, 1, 2].map(|group| numbers(batch.blocks(row, GroupId::new(group)).to_vec()));
    assert_eq!(tables(0), [vec![1], vec![2], vec![3]]);
    assert_eq!(tables(1), [vec![4], vec![5], vec![6, 7]]);
    let [decode, prefill] = [batch.rows[0], batch.rows[1]];
    assert_eq!((decode.phase, decode.has_initial_state()), (Phase::Decode, true));
    assert_eq!((prefill.phase, prefill.has_initial_state()), (Phase::Prefill, false));

    let sampled = batch.sampled(1, TokenId::new(8), LogProb::new(-0.5));
    let expected = SampledToken {
        token: TokenId::new(8),
        logp: LogProb::new(-0.5),
        engine_step: EngineStep::new(2),
        phase: Phase::Prefill,
        scheduled_tokens: 20,
        computed_tokens: 0,
        batch_row: 1,
        batch_rows: 2,
        padding_rows: 0,
    };
    assert_eq!(sampled, expected);
}

/// A budget that leaves one token to a new request, under every policy: (rows, decodes) of that
/// step.
#[test]
fn the_leftover_token_runs_as_the_policy_says() {
    let cases = [
        (BatchSplit::ScheduledTokens, false, vec![0, 1], 2),
        (BatchSplit::ComputedTokens, false, vec![0, 1], 2),
        (BatchSplit::IsPrefilling, false, vec![0, 1], 1),
        (BatchSplit::IsPrefilling, true, vec![0, 1], 0),
    ];
    for (policy, force_prefill, expected, num_decodes) in cases {
        let limits = Limits { max_num_batched_tokens: 2, ..LIMITS };
        let mut scheduler = scheduler(limits, 64);
        let mut rows = PersistentBatch::new(policy, force_prefill);
        scheduler.add(request(0, 2, 9)).unwrap();
        scheduler.add(request(1, 30, 9)).unwrap();
        let plan = scheduler.schedule().unwrap();
        let _ = rows.build(&plan, &scheduler);
        update(&mut scheduler, &plan, 9);
        let plan = scheduler.schedule().unwrap();
        let batch = rows.build(&plan, &scheduler);
        assert_eq!((rollouts(&batch), batch.num_decodes), (expected, num_decodes), "{policy:?}");
        let is_imposter =
            batch.rows[1].phase == Phase::Decode && !batch.rows[1].has_initial_state();
        assert_eq!(is_imposter, num_decodes == 2, "{policy:?}");
    }
}

#[test]
#[should_panic(expected = "s1.p0.r0 samples nothing in engine step 1")]
fn a_partial_chunk_has_no_token() {
    let mut scheduler = scheduler(Limits { max_num_batched_tokens: 2, ..LIMITS }, 64);
    scheduler.add(request(0, 3, 1)).unwrap();
    let plan = scheduler.schedule().unwrap();
    let batch = PersistentBatch::new(BatchSplit::IsPrefilling, false).build(&plan, &scheduler);
    let _ = batch.sampled(0, TokenId::new(8), LogProb::new(-0.5));
}

/// Of a largest size of 20: what no size holds runs as it is.
#[test]
fn k05_captured_sizes() {
    let sizes = [1, 2, 3, 4, 5, 8, 9, 16].map(|rows| captured_size(rows, 20));
    assert_eq!(sizes, [1, 2, 4, 4, 8, 8, 16, 16].map(Some));
    assert_eq!([17, 20].map(|rows| captured_size(rows, 20)), [None; 2]);
}
