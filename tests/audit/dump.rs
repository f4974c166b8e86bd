//! Dumps as NeMo-RL and prime-rl write them.

use std::fs;
use std::path::{Path, PathBuf};

/// Both sides' log-probabilities as they stand in a file, so that a test can write what is none.
pub struct Sides<'a> {
    pub infer: &'a [&'a str],
    pub train: &'a [&'a str],
}

/// A NeMo-RL record: two prompt tokens before the sampled ones and two of padding behind, each
/// value in a batch of one.
pub fn nemo(idx: usize, sides: &Sides) -> String {
    let all = |values: &[&str]| {
        let padded = [&["0.0", "0.0"], values, &["0.0", "0.0"]].concat();
        format!("[[{}]]", padded.join(", "))
    };
    let n = sides.infer.len();
    let (ids, mask): (Vec<_>, Vec<_>) = (0..n + 4)
        .map(|at| {
            let sampled = (2..n + 2).contains(&at);
            ((100 + at).to_string(), u8::from(sampled).to_string())
        })
        .unzip();
    format!(
        "{{\"content\": [\"NaN and \\\"Infinity\\\" are words here\"], \"rewards\": [1.0], \
         \"input_lengths\": [{}], \"token_ids\": [[{}]], \"token_loss_mask\": [[{}]], \
         \"sample_loss_mask\": [1.0], \"advantages\": [[0.5]], \"generation_logprobs\": {}, \
         \"prev_logprobs\": {}, \"idx\": {idx}}}\n",
        n + 2,
        ids.join(", "),
        mask.join(", "),
        all(sides.infer),
        all(sides.train)
    )
}

/// A prime-rl record: one prompt token before the sampled ones.
pub fn prime(step: u64, index: usize, sides: &Sides) -> String {
    let all = |values: &[&str]| format!("[{}]", [&["0.0"], values].concat().join(", "));
    let n = sides.infer.len();
    let ids: Vec<String> = (0..=n).map(|at| (100 + at).to_string()).collect();
    let mask: Vec<&str> = (0..=n).map(|at| if at == 0 { "false" } else { "true" }).collect();
    format!(
        "{{\"schema_version\": 1, \"step\": {step}, \"rank\": 0, \"micro_step\": 0, \
         \"micro_sequence_idx\": 0, \"export_sequence_idx\": {index}, \"env_name\": \"math\", \
         \"token_ids\": [{}], \"loss_mask\": [{}], \"inference_logprobs\": {}, \
         \"trainer_logprobs\": {}, \"entropy\": null}}\n",
        ids.join(", "),
        mask.join(", "),
        all(sides.infer),
        all(sides.train)
    )
}

pub fn write(folder: &Path, name: &str, content: &str) -> PathBuf {
    let path = folder.join(name);
    fs::create_dir_all(path.parent().expect("a folder")).expect("made");
    fs::write(&path, content).expect("written");
    path
}
