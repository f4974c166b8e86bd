//! The two bugs, their levers, and what they leave alone, each run of a second or less.

#[path = "../common/mod.rs"]
mod common;
mod levers;
mod sleep;
mod victims;

/// State addresses that wrap. A step takes 60 of 120 blocks; 18 bits end at block 86 of stride
/// 3,072, so every second step has seven requests with a block past it and five without.
const WRAP: &str = r#"
name = "wrap"
seed = 7
steps = 4
model.path = "configs/models/arithmetic"
trainer.update = "none"

[engine]
device_memory = "2670KiB" # 121 blocks at the default utilization
max_num_batched_tokens = 512
max_num_seqs = 12
max_model_len = 96
state_index_bits = 18

[rollout]
prompts_per_step = 3
rollouts_per_prompt = 4
max_new_tokens = 8
ignore_eos = true

[task]
max_operand = 99
prompt_tokens = 64
"#;

/// First chunks of one token. The budget holds three prompts of 12 and one token of the fourth. A
/// step takes 16 of 40 blocks: the fourth request's are new in steps 1 and 2, used from step 3 on.
const IMPOSTER: &str = r#"
name = "imposter"
seed = 7
steps = 4
model.path = "configs/models/arithmetic"
trainer.update = "none"

[engine]
device_memory = "2886KiB"
gpu_memory_utilization = 0.5 # 41 blocks
max_num_batched_tokens = 37 # 3 x 12 + 1
max_num_seqs = 16
max_model_len = 32
batch_split = "scheduled_tokens"

[rollout]
prompts_per_step = 2
rollouts_per_prompt = 2
max_new_tokens = 8
ignore_eos = true

[task]
max_operand = 99
prompt_tokens = 12
"#;

/// What vLLM #32118 left open, first: every row has one token. Twelve is a multiple of 4, 3 and 2,
/// so prompts are computed in whole chunks beside none, one and two decodes; beside three, the
/// fourth prompt gets one token.
const ONE_TOKEN_ROWS: &str = r#"
name = "one-token-rows"
seed = 7
steps = 4
model.path = "configs/models/arithmetic"
trainer.update = "none"

[engine]
num_gpu_blocks_override = 41
max_num_batched_tokens = 4
max_num_seqs = 4
max_model_len = 48
batch_split = "computed_tokens"

[rollout]
prompts_per_step = 2
rollouts_per_prompt = 2
max_new_tokens = 20
ignore_eos = true

[task]
max_operand = 99
prompt_tokens = 12
"#;

/// And second: a first chunk of one token that stands before the first longer row, which takes a
/// batch with holes that new requests fill from the lowest on. Fifteen tokens over eight places at
/// most: where a budget is used up, some row is longer.
const BEFORE_A_LONGER_ROW: &str = r#"
name = "before-a-longer-row"
seed = 7
steps = 3
model.path = "configs/models/arithmetic"
trainer.update = "none"

[engine]
num_gpu_blocks_override = 81
max_num_batched_tokens = 15
max_num_seqs = 8
max_model_len = 48
batch_split = "computed_tokens"

[rollout]
prompts_per_step = 8
rollouts_per_prompt = 2
max_new_tokens = 3
ignore_eos = true

[task]
max_operand = 9
prompt_tokens = 14
min_prompt_tokens = 6
"#;
