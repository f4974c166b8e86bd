//! The custom-scalars page: which charts, in which order.

use tensorboard_proto::layout as proto;
use tensorboard_proto::summary::Summary_Value;

use super::message::{self, About};

/// A part of the page that folds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Category<'a> {
    pub title: &'a str,
    pub closed: bool,
    pub charts: &'a [Chart<'a>],
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Chart<'a> {
    pub title: &'a str,
    /// Regular expressions: every tag that one of them matches from its beginning is a line.
    pub tags: &'a [&'a str],
}

/// Opens on the gap, its size above its exactness, and folds what is only sometimes asked for.
pub const GAP_FIRST: &[Category<'static>] = &[
    Category {
        title: "Gap, before any update",
        closed: false,
        charts: &[
            Chart {
                title: "Size of |d|: mean, p999, max (nats)",
                tags: &["gap/logp_abs_diff_(mean|p999|max)$"],
            },
            Chart {
                title: "Tokens bit-equal (fraction), spike (0 or 1)",
                tags: &["gap/frac_bitwise_equal$", "gap/spike$"],
            },
            Chart {
                title: "k3 and token_mult_prob_error",
                tags: &["gap/k3_mean$", "gap/token_mult_prob_error$"],
            },
            Chart { title: "Tokens with a non-finite logprob (count)", tags: &["gap/nonfinite$"] },
        ],
    },
    Category {
        title: "Reward",
        closed: false,
        charts: &[Chart { title: "Reward", tags: &["reward/.*"] }],
    },
    Category {
        title: "Loss",
        closed: true,
        charts: &[Chart { title: "Loss and its terms", tags: &["loss/.*"] }],
    },
    Category {
        title: "Rollouts and pool",
        closed: true,
        charts: &[
            Chart { title: "Rollouts", tags: &["rollout/.*"] },
            Chart { title: "Block pool", tags: &["pool/.*"] },
        ],
    },
    Category {
        title: "Speed",
        closed: true,
        charts: &[Chart { title: "Speed", tags: &["perf/.*"] }],
    },
];

pub(super) fn value(categories: &[Category<'_>]) -> Summary_Value {
    let mut layout = proto::Layout::new();
    layout.set_category(categories.iter().map(category).collect());
    let about = About { tag: "custom_scalars__config__", description: "" };
    message::strings(about, "custom_scalars", &[], vec![message::bytes(&layout)])
}

fn category(category: &Category<'_>) -> proto::Category {
    let mut message = proto::Category::new();
    message.set_title(category.title.to_owned());
    message.set_closed(category.closed);
    message.set_chart(category.charts.iter().map(chart).collect());
    message
}

fn chart(chart: &Chart<'_>) -> proto::Chart {
    let mut message = proto::Chart::new();
    message.set_title(chart.title.to_owned());
    let tags = chart.tags.iter().map(|&tag| tag.to_owned());
    message.mut_multiline().set_tag(tags.collect());
    message
}
