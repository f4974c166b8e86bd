//! What `score` refuses, in exact words.

use std::fs;
use std::path::Path;

use gapscope::model::load_plan;

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
