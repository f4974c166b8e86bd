//! What `score` refuses, in exact words.

use std::fs;
use std::path::Path;

use gapscope::model::load_plan;
use regex::Regex;

use crate::common::fixture;
use crate::common::run::gapscope;
use crate::path;

/// Exit code 1, this message, nothing else.
fn refused(model: &Path, input: &Path, args: &[&str], message: &str) {
    let mut command = gapscope();
    command.args(["score", "--model", path(model), "--input", path(input)]).args(args);
    let output = command.output().expect("the binary starts");
    assert_eq!(String::from_utf8_lossy(&output.stderr), format!("error: {message}\n"));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{message}");
    assert_eq!(output.status.code(), Some(1), "{message}");
}

#[test]
fn lines_are_named_before_anything_is_computed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (input, output) = (folder.path().join("tokens.jsonl"), folder.path().join("scores.jsonl"));
    fs::write(&output, "older").expect("written");
    let good = "{\"id\":\"a\",\"token_ids\":[1,2]}\n";
    let long = format!("{{\"id\":\"long\",\"token_ids\":{:?}}}", [1; 513]);
    for (line, problem) in [
        (
            "{\"id\":\"b\",\"token_ids\":[1,256]}",
            ", id \"b\": token 256 at position 1 is outside the model's vocabulary of 256",
        ),
        ("{\"id\":9,\"token_ids\":[]}", ", id 9: token_ids is empty"),
        (
            "{\"id\":9,\"token_ids\":[1,2],\"prompt_len\":2}",
            ", id 9: prompt_len is 2 of 2 token(s); it takes 1 to 1: the first token is never \
             predicted, and there must be one to score",
        ),
        (
            "{\"token_ids\":[1,2]}",
            ": id is missing; a line has id, token_ids and, if it is not 1, prompt_len",
        ),
        (
            "{\"id\":9,\"token_ids\":[1,2",
            ": expected an object such as {\"id\":\"a\",\"token_ids\":[1,2],\"prompt_len\":1}: EOF \
             while parsing a list at column 24",
        ),
        (
            &long,
            ", id \"long\": 513 tokens are more than the model's max_position_embeddings = 512",
        ),
    ] {
        // The empty line is counted and skipped.
        fs::write(&input, format!("{good}\n{line}\n{good}")).expect("written");
        let message = format!("{}, line 3{problem}", input.display());
        refused(&fixture("tiny-jamba"), &input, &["--output", path(&output)], &message);
        assert_eq!(fs::read_to_string(&output).expect("a file"), "older");
    }
    fs::write(&input, "\n\n").expect("written");
    let message = format!("{} holds no sequence", input.display());
    refused(&fixture("tiny-jamba"), &input, &[], &message);
}

#[test]
fn files_and_folders() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join("tokens.jsonl");
    let model = fixture("tiny-jamba");
    let missing = format!(
        "cannot read the tokens {}: No such file or directory (os error 2)",
        input.display()
    );
    refused(&model, &input, &[], &missing);
    let directory =
        format!("cannot read the tokens {}: it is a directory", folder.path().display());
    refused(&model, folder.path(), &[], &directory);
    fs::write(&input, "{\"id\":\"a\",\"token_ids\":[1,2]}\n").expect("written");
    let no_model = load_plan(&input).expect_err("no folder").to_string();
    assert!(no_model.contains("is not a model folder: it is a file"), "{no_model}");
    refused(&input, &input, &[], &no_model);
    let output = format!("cannot write {}: it is not a regular file", folder.path().display());
    refused(&model, &input, &["--output", path(folder.path())], &output);
    let nowhere = folder.path().join("no/scores.jsonl");
    let output =
        format!("cannot write {}: No such file or directory (os error 2)", nowhere.display());
    refused(&model, &input, &["--output", path(&nowhere)], &output);
    let temperature = "--temperature 0 is refused: log-probabilities are of logits / T with T at \
        least 0.00001; those of greedy decoding are of T = 1, which is the default";
    refused(&model, &input, &["--temperature", "0"], temperature);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1, "nothing is left");
}

/// candle keeps every pair of tokens: terabytes, refused before any of it is taken.
#[test]
fn a_sequence_that_no_memory_holds_is_refused_with_both_numbers() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let model = folder.path().join("model");
    fs::create_dir(&model).expect("a folder");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture("tiny-jamba").join(file), model.join(file)).expect("copied");
    }
    let config = fs::read_to_string(model.join("config.json")).expect("a config");
    let (short, long) = ("\"max_position_embeddings\": 512", "\"max_position_embeddings\": 200000");
    assert!(config.contains(short), "{config}");
    fs::write(model.join("config.json"), config.replace(short, long)).expect("written");
    let input = folder.path().join("tokens.jsonl");
    let line = format!("{{\"id\":\"long\",\"token_ids\":{:?}}}\n", vec![1; 200_000]);
    fs::write(&input, line).expect("written");
    let mut command = gapscope();
    command.args(["score", "--leg", "reference", "--model", path(&model), "--input", path(&input)]);
    let output = command.output().expect("the binary starts");
    let errors = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{errors}");
    // 6 stages x 4 heads x 200,000^2 pairs x 4 bytes, and what is linear in the sequence.
    let expected = Regex::new(
        "^a sequence of 200000 tokens: up to (384\\d{10} bytes of memory \\(.*\\))\n\
         error: scoring needs up to (.*), and (\\d+) bytes are available: shorten the longest \
         sequence, or choose another leg or a smaller model\n$",
    );
    let found = expected.expect("a pattern").captures(&errors).expect(&errors);
    assert_eq!(found[1], found[2]);
}
