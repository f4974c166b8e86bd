//! What a fault touched: the requests that came out another way than in the run without it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use crate::base::{LogProb, RequestId, Step};
use crate::report::parquet::{read_tokens, TokenRow};
use crate::report::RunFolder;

/// The first step that a fault touched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Damage {
    pub(super) step: Step,
    /// Those with a token that differs, of any kind: its id, either side's log-probability or its
    /// mask. Up to this step both runs had the same weights, blocks and noise.
    pub(super) requests: BTreeSet<RequestId>,
}

/// `None` where both runs are the same in every token.
///
/// # Errors
/// Records that cannot be read back.
pub(super) fn damage(planted: &RunFolder, clean: &RunFolder, steps: u64) -> Result<Option<Damage>> {
    for step in (1..=steps).map(Step::new) {
        let [planted, clean] = [planted, clean].map(|folder| read_tokens(&folder.tokens(step)));
        let requests = different(&planted?, &clean?);
        if !requests.is_empty() {
            return Ok(Some(Damage { step, requests }));
        }
    }
    Ok(None)
}

fn different(planted: &[TokenRow], clean: &[TokenRow]) -> BTreeSet<RequestId> {
    let (mut left, right) = (by_request(planted), by_request(clean));
    left.retain(|request, rows| right.get(request) != Some(rows));
    left.into_keys().collect()
}

/// What is compared of a token, as bits.
type Bits = (u32, Option<u32>, Option<u32>, bool);

fn by_request(rows: &[TokenRow]) -> BTreeMap<RequestId, Vec<Bits>> {
    let bits = |logp: Option<LogProb>| logp.map(|logp| logp.get().to_bits());
    let mut all: BTreeMap<RequestId, Vec<Bits>> = BTreeMap::new();
    for row in rows {
        let token =
            (row.token_id.get(), bits(row.logp_decode), bits(row.logp_trainer), row.loss_mask);
        all.entry(row.request).or_default().push(token);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::TokenId;

    fn row(rollout: u32, decode: f32) -> TokenRow {
        TokenRow {
            request: RequestId::new(1, 0, rollout),
            token_id: TokenId::new(5),
            loss_mask: true,
            logp_decode: Some(LogProb::new(decode)),
            logp_trainer: Some(LogProb::new(-1.0)),
            ..TokenRow::default()
        }
    }

    #[test]
    fn requests_with_another_token_were_touched() {
        let clean = [row(0, -1.0), row(1, -1.0), row(1, -2.0), row(2, f32::NAN)];
        let ids = |rows: &[TokenRow]| -> Vec<u32> {
            different(rows, &clean).iter().map(|request| request.rollout_idx).collect()
        };
        assert!(ids(&clean).is_empty());
        assert_eq!(ids(&[row(0, -1.0), row(1, -1.0), row(1, -2.5), row(2, f32::NAN)]), [1]);
        assert_eq!(ids(&[row(0, -1.0), row(1, -1.0), row(2, 0.0)]), [1, 2]);
        let masked = TokenRow { loss_mask: false, ..row(0, -1.0) };
        assert_eq!(ids(&[masked, row(1, -1.0), row(1, -2.0), row(2, f32::NAN)]), [0]);
    }
}
