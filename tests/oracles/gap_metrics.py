"""The oracle of the gap measures: seeded records and what numpy and scipy make of them.

Needs numpy and scipy, and extended precision (x86). From the repository root:

    python tests/oracles/gap_metrics.py > tests/fixtures/gap/golden.json

Each metric is computed here from its definition, in extended precision and with none of the
rearrangements that the product uses. Log-probabilities are f32 values; null is missing; NaN and the
infinities, which JSON lacks, are strings.
"""

import json
import math

import numpy as np
from scipy import stats

L = np.longdouble


def f32(values):
    return [None if v is None else np.float32(v) for v in values]


def number(value):
    if value is None or (isinstance(value, (float, np.floating)) and np.isnan(value)):
        return None
    value = float(value)
    return value if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def written(value):
    if value is None or np.isfinite(value):
        return None if value is None else float(value)
    return "nan" if np.isnan(value) else ("inf" if value > 0 else "-inf")


def mean(values):
    values = np.asarray(values, dtype=L)
    return values.mean() if len(values) else None


def std(values):
    return np.asarray(values, dtype=L).std() if len(values) else None


def largest(values):
    return max(values) if len(values) else None


def smallest(values):
    return min(values) if len(values) else None


def share(flags):
    return np.mean(flags) if len(flags) else None


def correlation(function, x, y):
    if len(x) < 2 or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    return function(x, y).statistic


def ordered(value):
    """The place of an f32 on the line of all f32."""
    bits = int(np.float32(value).view(np.uint32))
    return bits if bits < 0x80000000 else 0x80000000 - bits


def ess(log_weights):
    if not len(log_weights):
        return None
    w = np.exp(np.asarray(log_weights, dtype=L))
    return w.sum() ** 2 / (len(w) * (w**2).sum())


def slots(sequences, floor):
    pairs = [(s["slot"], s["gap"]) for s in sequences]
    held = sorted((p for p in pairs if None not in p), key=lambda pair: pair[0])
    ids = [pair[0] for pair in held]
    gaps = [pair[1] for pair in held]
    ranks = stats.rankdata(gaps) if gaps else np.array([])
    best, best_score = None, 0.0
    for split in sorted(set(ids))[1:]:
        above = np.array([i >= split for i in ids])
        score = above.sum() * (~above).sum() * (ranks[above].mean() - ranks[~above].mean()) ** 2
        if score > best_score * (1 + 1e-12):
            best, best_score = split, score
    bad = [gap > floor for i, gap in held if best is not None and i >= best]
    return {
        "slot_corr": correlation(stats.spearmanr, ids, gaps),
        "slot_change_point": best,
        "slot_frac_bad_above": share(bad),
    }


def shifts(sequences):
    means, kept = {}, {}
    for lag in range(-2, 3):
        shifted, by_train, by_infer = [], [], []
        for s in sequences:
            rows = {i: (a, b) for i, a, b in s["finite"]}
            for i, (a, b) in rows.items():
                if i + lag in rows:
                    other_a, other_b = rows[i + lag]
                    shifted.append(abs(float(other_a) - float(b)))
                    by_train.append(abs(float(a) - float(b)))
                    by_infer.append(abs(float(other_a) - float(other_b)))
        means[lag] = mean(shifted)
        if shifted and (lag == 0 or means[lag] < min(mean(by_train), mean(by_infer))):
            kept[lag] = means[lag]
    out = {f"shift_{lag}_abs_diff_mean": means[lag] for lag in means}
    out["shift_best"] = min(kept, key=lambda lag: (kept[lag], abs(lag), lag)) if kept else None
    return out


def sequence_of(index, record):
    """The tokens of a record that both sides have, and those of them that are finite on both."""
    legs = zip(record["decode"], record["trainer"], record["mask"])
    rows = [
        (i, a, b)
        for i, (a, b, counted) in enumerate(legs)
        if counted and a is not None and b is not None
    ]
    finite = [(i, a, b) for i, a, b in rows if np.isfinite(a) and np.isfinite(b)]
    d = [float(b) - float(a) for _, a, b in finite]
    gap = None
    if rows:
        gap = math.inf if len(finite) < len(rows) else max(abs(x) for x in d)
    missing = sum(record["mask"]) - len(rows)
    slot = record["slot"]
    return dict(index=index, slot=slot, rows=rows, finite=finite, d=d, gap=gap, missing=missing)


def worst(sequences):
    tokens = []
    for s in sequences:
        for i, a, b in s["rows"]:
            finite = np.isfinite(a) and np.isfinite(b)
            tokens.append((abs(float(b) - float(a)) if finite else math.inf, s, i))
    first = max(tokens, key=lambda token: token[0]) if tokens else (0.0, None, None)
    _, s, i = first if first[0] > 0 else (0.0, None, None)
    return {
        "worst_prompt_id": None if s is None else 0,
        "worst_rollout_idx": None if s is None else s["index"],
        "worst_slot": None if s is None else s["slot"],
        "worst_pos": i,
        "worst_token_id": None if s is None else 100 + i,
    }


def token_metrics(sequences, floor):
    rows = [row for s in sequences for row in s["rows"]]
    finite = [row for s in sequences for row in s["finite"]]
    a = np.array([float(x) for _, x, _ in finite], dtype=L)
    b = np.array([float(x) for _, _, x in finite], dtype=L)
    d = b - a
    ad = np.abs(d)
    rho = np.exp(d)
    pa, pb = np.exp(a), np.exp(b)
    pd = np.abs(pb - pa)
    m = np.log((pa + pb) / 2)
    k3 = rho - 1 - d
    first_bad = [i for i, x, y in rows if not abs(float(y) - float(x)) <= floor]
    q = lambda p: np.quantile(ad.astype(float), p) if len(ad) else None
    one = [float(x) for x in a], [float(x) for x in b]
    two = [float(x) for x in pa], [float(x) for x in pb]
    return {
        "n_tokens": len(finite),
        "n_seqs": sum(bool(s["finite"]) for s in sequences),
        "n_missing": sum(s["missing"] for s in sequences),
        "nonfinite": len(rows) - len(finite),
        "nonfinite_infer": sum(not np.isfinite(x) for _, x, _ in rows),
        "nonfinite_train": sum(not np.isfinite(x) for _, _, x in rows),
        "spike": float(bool(first_bad)) if rows else None,
        "logp_abs_diff_mean": mean(ad),
        "logp_abs_diff_std": std(ad),
        "logp_abs_diff_max": largest(ad),
        "logp_abs_diff_p50": q(0.5),
        "logp_abs_diff_p95": q(0.95),
        "logp_abs_diff_p99": q(0.99),
        "logp_abs_diff_p999": q(0.999),
        "logp_diff_mean": mean(d),
        "lowp_abs_diff_mean": mean(ad[pa < 0.01]),
        **{f"frac_abs_gt_{t}": share(ad > float(t)) for t in ("1e-6", "1e-3", "1e-2", "0.1", "1")},
        "k1": mean(-d),
        "k2": mean(d**2 / 2),
        "k3_mean": mean(k3),
        "k3_max": largest(k3),
        "k3_rev_mean": mean(np.exp(-d) - 1 + d),
        "js_mean": mean((np.exp(a - m) - 1 - (a - m) + np.exp(b - m) - 1 - (b - m)) / 2),
        "token_mult_prob_error": mean(np.exp(ad)),
        "ratio_mean": mean(rho),
        "ratio_min": smallest(rho),
        "ratio_max": largest(rho),
        "log_ratio_min": smallest(d),
        "log_ratio_max": largest(d),
        "frac_ratio_out_0.5_2": share((rho < 0.5) | (rho > 2)),
        "ess_token": ess(d),
        "chi2_token": None if not len(d) else mean(rho**2) - 1,
        "prob_abs_diff_mean": mean(pd),
        "prob_abs_diff_std": std(pd),
        "prob_abs_diff_max": largest(pd),
        "prob_pearson": correlation(stats.pearsonr, *two),
        "logp_pearson": correlation(stats.pearsonr, *one),
        "confident_wrong": float(((a > -0.1) & (b < -5)).sum()) if len(d) else None,
        "frac_bitwise_equal": share([x.tobytes() == y.tobytes() for _, x, y in finite]),
        "max_ulp_f32": largest([abs(ordered(x) - ordered(y)) for _, x, y in finite]),
        "first_divergent_pos": smallest(first_bad),
    }


def sequence_metrics(sequences):
    used = [s for s in sequences if s["finite"]]
    sums = np.array([np.sum(np.array(s["d"], dtype=L)) for s in used], dtype=L)
    means = np.array([mean(s["d"]) for s in used], dtype=L)
    errors = np.array([mean(np.exp(np.abs(np.array(s["d"], dtype=L)))) for s in used], dtype=L)
    infer = np.array([mean([float(x) for _, x, _ in s["finite"]]) for s in used], dtype=L)
    train = np.array([mean([float(y) for _, _, y in s["finite"]]) for s in used], dtype=L)
    geometric = np.exp(means)
    share_used = ess(sums)
    return {
        "seq_log_ratio_mean": mean(sums),
        "seq_log_ratio_std": std(sums),
        "seq_log_ratio_min": smallest(sums),
        "seq_log_ratio_max": largest(sums),
        "seq_geo_ratio_min": smallest(geometric),
        "seq_geo_ratio_max": largest(geometric),
        "frac_ratio_out_0.999_1.002": share((geometric < L("0.999")) | (geometric > L("1.002"))),
        "ess_seq": share_used,
        "log_e_rho2_seq": np.log(mean(np.exp(2 * sums))) if len(sums) else None,
        "log_e_rho2_seq_reliable": float(share_used * len(sums) >= 5) if len(sums) else None,
        "seq_mult_prob_error_mean": mean(errors),
        "seq_mult_prob_error_max": largest(errors),
        "frac_seq_bad_1.05": share(errors > 1.05),
        "frac_seq_bad_2": share(errors > 2),
        "ppl_infer": mean(np.exp(-infer)),
        "ppl_train": mean(np.exp(-train)),
        "log_ppl_diff_mean": mean(infer - train),
        "log_ppl_diff_abs_mean": mean(np.abs(infer - train)),
        "log_ppl_diff_max": largest(infer - train),
        "log_ppl_diff_min": smallest(infer - train),
        "ppl_ratio": mean(np.exp(infer - train)),
    }


def case(name, floor, records):
    for record in records:
        record["decode"], record["trainer"] = f32(record["decode"]), f32(record["trainer"])
    sequences = [sequence_of(index, record) for index, record in enumerate(records)]
    metrics = token_metrics(sequences, floor)
    metrics |= sequence_metrics(sequences) | slots(sequences, floor)
    metrics |= shifts(sequences) | worst(sequences)
    for record in records:
        record["decode"] = [written(v) for v in record["decode"]]
        record["trainer"] = [written(v) for v in record["trainer"]]
    metrics = {name: number(value) for name, value in metrics.items()}
    return dict(name=name, floor=floor, records=records, metrics=metrics)


def drawn(rng, count, length, noise):
    """Records of log-probabilities with a relative noise, slots in random order."""
    ids = rng.permutation(np.arange(1, count + 1))
    records = []
    for slot in ids:
        n = int(rng.integers(1, length + 1))
        decode = -rng.gamma(0.7, 1.5, n) - 1e-4
        trainer = decode * (1 + noise * rng.standard_normal(n))
        decode, trainer = list(decode), list(trainer)
        records.append(dict(slot=int(slot), decode=decode, trainer=trainer, mask=[True] * n))
    return records


def main():
    rng = np.random.default_rng(20)
    healthy = drawn(rng, 20, 40, 0.01)

    corrupt = drawn(rng, 32, 30, 0.0)
    for record in corrupt:
        n = len(record["decode"])
        record["mask"] = [bool(x) for x in rng.random(n) < 0.9]
        if record["slot"] > 22:
            onset = int(rng.integers(0, n))
            for i in range(onset, n):
                record["decode"][i], record["trainer"][i] = -0.01 * rng.random(), -20 * rng.random()
    corrupt[3]["slot"] = None

    ragged = drawn(rng, 24, 30, 0.2)
    for record in ragged:
        for side in ("decode", "trainer"):
            for i in range(len(record[side])):
                if rng.random() < 0.1:
                    record[side][i] = [None, math.nan, -math.inf, math.inf][int(rng.integers(0, 4))]

    moved = drawn(rng, 12, 20, 0.0)
    for record in moved:
        record["trainer"] = record["decode"][1:] + [-1.0]

    huge = [
        dict(slot=1, decode=[-800.0, -1.0], trainer=[-0.0, -1.0], mask=[True] * 2),
        dict(slot=2, decode=[-0.5, -2.0], trainer=[-800.5, -2.5], mask=[True] * 2),
    ]
    cases = [
        case("healthy noise", 0.0, healthy),
        case("healthy noise under its floor", 0.5, [dict(r) for r in healthy]),
        case("equal bits", 0.0, drawn(rng, 8, 10, 0.0)),
        case("corrupt above a slot, masked", 0.0, corrupt),
        case("missing and non-finite", 0.3, ragged),
        case("moved by one", 0.0, moved),
        case("ratios of 800 nats", 0.0, huge),
        case("empty", 0.0, []),
    ]
    print(json.dumps(cases, indent=None, separators=(",", ":")).replace('{"name"', '\n{"name"'))


main()
