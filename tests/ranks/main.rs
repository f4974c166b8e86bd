//! A trainer sharded over several ranks against the one that is a single rank: the same bits
//! forward, the same gradients but for the order of a sum, and checkpoints that any number of ranks
//! can go on from.

#[path = "../common/mod.rs"]
mod common;
mod forward;
mod training;

use common::shapes::odd_shapes;
use common::{config, device, fixture, random_tokens, random_weights};
use gapscope::config::Dtype;
use gapscope::model::{load_master, Plan};
use gapscope::trainer::{Sequence, Trainer};

/// Divisors of a unit's sizes and not; more ranks than sequences among them.
const RANKS: [usize; 5] = [1, 2, 3, 4, 8];

struct Model {
    name: String,
    plan: Plan,
    master: Vec<Vec<f32>>,
}

impl Model {
    fn fixture(name: &str) -> Self {
        let (plan, master) = load_master(&fixture(name)).expect("a model folder");
        Self { name: name.to_owned(), plan, master }
    }

    /// Dense, with experts, and with a tied head; and shapes that nothing divides.
    fn all() -> Vec<Self> {
        let odd = odd_shapes().into_iter().map(|(name, config)| {
            let plan = Plan::new(config);
            let master = random_weights(&plan, 5);
            Self { name: name.to_owned(), plan, master }
        });
        let fixtures = ["tiny-jamba", "tiny-jamba-moe", "tiny-qwen2"].map(Self::fixture);
        fixtures.into_iter().chain(odd).collect()
    }

    fn trainer(&self, ranks: usize, dtype: Dtype, extra: &str) -> Trainer {
        let toml = format!(
            "name = \"ranks\"\nmodel.preset = \"tiny-jamba\"\ntrainer.ranks = {ranks}\n\
             trainer.max_tokens_per_chunk = 24\n{extra}"
        );
        let num = self.plan.numerics(dtype, dtype);
        let (plan, config) = (self.plan.clone(), config(&toml).trainer);
        #[cfg(feature = "cuda")]
        if let Some(gpus) = gpus(ranks) {
            let over = Trainer::over_gpus(&gpus, plan, num, config, &self.master);
            return over.expect("ranks that are connected");
        }
        Trainer::new(&device(), plan, num, config, &self.master).expect("few threads")
    }

    /// Prompt and completion lengths: one completion that is empty, one of a single token, more
    /// than a chunk in one.
    fn sequences(&self, count: usize) -> Vec<Sequence> {
        let lens = [(3, 6), (1, 9), (9, 0), (4, 1), (2, 27), (5, 5), (1, 3)];
        let of = |(i, &(prompt, completion)): (usize, &(usize, usize))| Sequence {
            tokens: random_tokens(&self.plan.config, prompt + completion, i as u64),
            prompt_len: prompt,
        };
        lens.iter().take(count).enumerate().map(of).collect()
    }
}

/// A GPU a rank, where the tests run on GPUs and there are as many. Each is opened once.
#[cfg(feature = "cuda")]
fn gpus(ranks: usize) -> Option<Vec<gapscope::ops::array::Device>> {
    use gapscope::ops::array::Device;
    use gapscope::ops::cuda::{devices, Gpu};
    use std::sync::OnceLock;
    static OPEN: OnceLock<Vec<Device>> = OnceLock::new();
    let first = device();
    if first.is_host() || ranks == 1 {
        return None;
    }
    let all = OPEN.get_or_init(|| {
        let others = 1..devices().expect("GPUs").len().min(RANKS[RANKS.len() - 1]);
        let open = |ordinal| Device::Cuda(Gpu::open(ordinal).expect("a GPU"));
        std::iter::once(first).chain(others.map(open)).collect()
    });
    all.get(..ranks).map(<[Device]>::to_vec)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
