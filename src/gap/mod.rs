//! Pairing, measures, floor, verdicts: records in, numbers out.
