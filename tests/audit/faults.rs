//! Each broken input is an error with file, line and record, or a counted exclusion.

use std::path::Path;

use super::dump::{nemo, prime, write, Sides};
use super::{audited, outcome, path};

const SIDES: Sides = Sides { infer: &["-1.0", "-0.5"], train: &["-1.0", "-0.25"] };

/// The audit of `dump` fails with exit code 1, says this of it and nothing else.
fn refused(dump: &Path, expected: &str) {
    let (code, text, error) = outcome(&["--rollouts", path(dump)]);
    let expected = format!("error: {}\n", expected.replace("FILE", path(dump)));
    assert_eq!((code, text.as_str(), error), (Some(1), "", expected));
}

/// The second of three records is spoiled by replacing one text by another.
#[test]
fn a_spoiled_record_is_named_by_line() {
    let folder = tempfile::tempdir().expect("a folder");
    for (from, to, expected) in [
        (
            "\"idx\": 1",
            "\"idx\": 0",
            "record s3.p0.r0 is already in FILE, line 1; a record counts once",
        ),
        (
            "\"prev_logprobs\": [[0.0, ",
            "\"prev_logprobs\": [[",
            "token_ids has 6 entries and prev_logprobs has 5: lengths 6 and 5; both sides and the \
             mask must be of the same tokens",
        ),
        (
            "\"token_loss_mask\": [[0, ",
            "\"token_loss_mask\": [[0, 0, ",
            "token_ids has 6 entries and token_loss_mask has 7: lengths 6 and 7; both sides and \
             the mask must be of the same tokens",
        ),
        (
            "\"input_lengths\": [4]",
            "\"input_lengths\": [3]",
            "the mask counts token 3, which is padding: input_lengths is 3",
        ),
        (
            "\"input_lengths\": [4]",
            "\"input_lengths\": [7]",
            "token_ids has 6 entries and input_lengths has 7: lengths 6 and 7; both sides and the \
             mask must be of the same tokens",
        ),
        (
            "\"input_lengths\": [4]",
            "\"input_lengths\": [-4]",
            "input_lengths is -4, not one whole number up to 4294967295",
        ),
        ("[[100, ", "[[1.5, ", "token_ids[0] is 1.5, not a token id"),
        ("[[100, ", "[[null, ", "token_ids[0] is null, not a token id"),
        ("_mask\": [[0", "_mask\": [[2", "token_loss_mask[0] is 2, neither 0 nor 1"),
        ("prev_logprobs", "old_logprobs", "no key \"prev_logprobs\", which a nemo-rl record has"),
        (
            "\"idx\"",
            "\"trainer_token_ids\": [9], \"idx\"",
            "the two sides' token ids differ: lengths 6 and 1, first difference at 0: inference \
             [100] 101 102, trainer [9]; no gap is computed, hand token ids on",
        ),
        (
            "\"prev_logprobs\": [[",
            "\"prev_logprobs\": [[1], [",
            "column 347: not a record: 2 lists where one sample has one",
        ),
    ] {
        let spoiled = nemo(1, &SIDES).replacen(from, to, 1);
        assert_ne!(spoiled, nemo(1, &SIDES), "{from}");
        let content = [nemo(0, &SIDES), spoiled, nemo(2, &SIDES)].concat();
        let dump = write(folder.path(), "train_data_step3.jsonl", &content);
        refused(&dump, &format!("FILE, line 2: {expected}"));
    }
}

#[test]
fn a_file_that_is_no_dump_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let cut = &nemo(1, &SIDES)[..150];
    for (content, expected) in [
        (String::new(), "FILE: no record in it; was the dump cut off before its first one?".into()),
        (
            "\n \n".into(),
            "FILE: no record in it; was the dump cut off before its first one?".into(),
        ),
        (
            [&nemo(0, &SIDES), cut].concat(),
            "FILE, line 2: column 150: not a record: EOF while parsing a string; \
             the line ends within the record, as where a dump was cut off"
                .to_owned(),
        ),
        ("words\n".into(), "FILE, line 1: column 1: not a record: expected value".into()),
        ("[1, 2]\n".into(), "FILE, line 1: not a JSON object; one record is one object".into()),
        (
            "{\"input\": 1, \"output\": 2}\n".into(),
            "FILE, line 1: no format of a dump with both sides' log-probabilities has these keys: \
             [\"input\", \"output\"]; NeMo-RL has generation_logprobs and prev_logprobs, prime-rl \
             inference_logprobs and trainer_logprobs, a vLLM response choices, torchtitan turns; \
             pass --format if it is one of them"
                .to_owned(),
        ),
        (
            prime(3, 0, &SIDES).replace("version\": 1", "version\": 2"),
            "FILE, line 1: schema_version is 2, and only 1 is known".into(),
        ),
        (
            [prime(3, 0, &SIDES), prime(4, 1, &SIDES)].concat(),
            "FILE, line 2: the record is of step 4, its file of step 3; a file is of one step"
                .into(),
        ),
    ] {
        let dump = write(folder.path(), "dump.jsonl", &content);
        refused(&dump, &expected);
    }
    let missing = folder.path().join("missing.jsonl");
    refused(
        &missing,
        "FILE: No such file or directory (os error 2); give a dump's file or folder that can be \
         read",
    );
    let empty = folder.path().join("empty");
    std::fs::create_dir(&empty).expect("made");
    refused(
        &empty,
        "FILE is a folder without a dump: it holds no tokens/step-NNNNN.parquet (gapscope), no \
         train_data_stepN.jsonl (NeMo-RL), and no step_N/rank_R.jsonl (prime-rl)",
    );
}

/// A bare NaN is read, and what is no JSON of any kind is named with line and column
/// (ai-dynamo/dynamo#3043).
#[test]
fn k23_a_broken_third_line_is_named_by_its_column() {
    let folder = tempfile::tempdir().expect("a folder");
    let bare = Sides { infer: &["NaN", "-0.5"], ..SIDES };
    let third = prime(3, 2, &SIDES).replacen("\"step\": 3", "\"step\": !", 1);
    let column = third.find('!').expect("it is there") + 1;
    let content = [prime(3, 0, &bare), prime(3, 1, &SIDES), third].concat();
    let dump = write(folder.path(), "dump.jsonl", &content);
    refused(&dump, &format!("FILE, line 3: column {column}: not a record: expected value"));
}

/// Ids before lengths, lengths before numbers (huggingface/trl#5224).
#[test]
fn k21_ids_come_first() {
    let folder = tempfile::tempdir().expect("a folder");
    let record =
        "{\"token_ids\": [5, 6], \"loss_mask\": [1, 1], \"inference_logprobs\": [-1, -2], \
                  \"trainer_token_ids\": [9], \"trainer_logprobs\": [-1]}\n";
    let dump = write(folder.path(), "dump.jsonl", record);
    refused(
        &dump,
        "FILE, line 1: the two sides' token ids differ: lengths 2 and 1, first difference at 0: \
         inference [5] 6, trainer [9]; no gap is computed, hand token ids on",
    );
}

#[test]
fn a_line_without_end_is_refused_before_it_fills_the_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let dump = folder.path().join("train_data_step1.jsonl");
    // A hole: two gigabytes that take no room on the disk.
    let file = std::fs::File::create(&dump).expect("created");
    file.set_len(2 << 30).expect("a sparse file");
    refused(
        &dump,
        "FILE, line 1: longer than 67108864 bytes, the most that is read of a line; one record is \
         one line",
    );
}

#[test]
fn what_is_left_out_is_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let masked =
        nemo(0, &SIDES).replace("\"sample_loss_mask\": [1.0]", "\"sample_loss_mask\": [0.0]");
    let first = nemo(1, &SIDES).replace("_mask\": [[0", "_mask\": [[1");
    let content = [nemo(2, &SIDES), masked, first].concat();
    let dump = write(folder.path(), "train_data_step3.jsonl", &content);
    let (text, audit) = audited(folder.path(), &["--rollouts", path(&dump)]);
    for part in [
        "1 input of nemo-rl: 1 step(s), 3 record(s)\n\nstep 3: 3 records, 4 tokens compared",
        "note      1 record left out whole by sample_loss_mask\n",
        "note      1 token left out: the first of a text has no log-probability\n",
        "note      2 records behind one with a higher id\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    super::check(&audit, "gap_detail/n_seqs", 2.0);
}

#[test]
fn folders_are_read_step_by_step() {
    let folder = tempfile::tempdir().expect("a folder");
    let root = folder.path();
    for (step, rank) in [(10, 0), (2, 1), (2, 0), (11, 0)] {
        let record = prime(step, 0, &SIDES).replace("\"rank\": 0", &format!("\"rank\": {rank}"));
        write(root, &format!("token_exports/step_{step}/rank_{rank}.jsonl"), &record);
        if step != 11 {
            write(root, &format!("token_exports/step_{step}/STABLE"), "");
        }
    }
    let (text, audit) = audited(root, &["--rollouts", path(root)]);
    let steps: Vec<_> = audit["steps"].as_array().expect("steps").iter().collect();
    let shown: Vec<_> = steps.iter().map(|row| (&row["step"], &row["checks"]["records"])).collect();
    assert_eq!(format!("{shown:?}"), "[(Number(2), Number(2)), (Number(10), Number(1))]");
    assert!(text.contains("step_11 left out: no STABLE marker\n"), "{text}");
    assert!(text.starts_with("3 inputs of prime-rl: 2 step(s), 3 record(s)\n"), "{text}");

    std::fs::remove_file(root.join("token_exports/step_2/STABLE")).expect("removed");
    std::fs::remove_file(root.join("token_exports/step_10/STABLE")).expect("removed");
    refused(
        root,
        "FILE: no step_N in it has the STABLE marker, so prime-rl is still writing or was stopped; \
         wait, or name the files themselves",
    );
}

#[test]
fn conditions_end_with_exit_code_3() {
    let folder = tempfile::tempdir().expect("a folder");
    let dump = write(folder.path(), "train_data_step3.jsonl", &nemo(0, &SIDES));
    for (condition, code, said) in [
        ("finding", 0, ""),
        ("gap/logp_abs_diff_max>0.25", 0, ""),
        (
            "gap/logp_abs_diff_max >= 0.25",
            3,
            "--fail-on 'gap/logp_abs_diff_max>=0.25' held at step 3: 0.25\n",
        ),
        (
            "gap_detail/slot_corr<1",
            0,
            "--fail-on 'gap_detail/slot_corr<1.0': no data at 1 of 1 place(s)\n",
        ),
        (
            "gap/k3_maen>1",
            1,
            "error: --fail-on 'gap/k3_maen>1.0': there will be no metric gap/k3_maen; did you \
             mean gap/k3_mean?\n",
        ),
    ] {
        let (found, _, error) = outcome(&["--rollouts", path(&dump), "--fail-on", condition]);
        assert_eq!((found, error.as_str()), (Some(code), said), "{condition}");
    }
    let args = ["--rollouts", path(&dump), "--floor", "0.1", "--fail-on", "finding"];
    let (code, text, error) = outcome(&args);
    assert_eq!(
        (code, error.as_str()),
        (Some(3), "--fail-on 'finding' held at step 3: unexplained\n")
    );
    assert!(text.contains("finding   unexplained: "), "{text}");
    let (code, _, error) = outcome(&["--rollouts", path(&dump), "--fail-on", "spikes"]);
    assert_eq!(code, Some(2), "{error}");
}
