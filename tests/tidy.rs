//! The house rules that can be counted, over every file of the tree. Each rule is itself shown a
//! bad sample, so that none is silent because it is broken.
//!
//! The rules read rustfmt's output: one statement a line, and a block's end at its own indentation.

use std::path::Path;

use regex::Regex;

const LINES_MAX: usize = 400;
const FUNCTION_LINES_MAX: usize = 60;
const COLUMNS_MAX: usize = 100;

/// Each room imports only rooms to its left.
const ROOMS: [&str; 10] =
    ["base", "config", "ops", "model", "engine", "rollout", "trainer", "gap", "report", "run"];
/// What stands to the left and stays unknown all the same: a score that knew the engine would be
/// no second opinion, and a verdict that knew the settings would not be drawn from the records.
const STRANGERS: [(&str, &str); 2] = [("trainer", "engine"), ("gap", "config")];

/// What some code may say and the rest may not.
struct Reserved {
    pattern: &'static str,
    /// Beginnings of the paths that may.
    only: &'static [&'static str],
    what: &'static str,
}

const RESERVED: [Reserved; 5] = [
    Reserved { pattern: r"\bunsafe\b", only: &["src/ops/"], what: "unsafe" },
    Reserved {
        pattern: r"\bInstant::now\b|\bSystemTime\b",
        only: &["src/run/", "src/main.rs", "tests/"],
        what: "the clock",
    },
    Reserved {
        pattern: r"\bprocess::Command\b|\bCommand::new\b",
        only: &["src/run/", "src/main.rs", "src/rollout/command.rs", "tests/"],
        what: "starting a process",
    },
    Reserved {
        pattern: r"\be?print(ln)?!",
        only: &["src/run/", "src/main.rs", "tests/"],
        what: "printing",
    },
    Reserved {
        pattern: r"\b(todo|unimplemented|dbg)!|#\[ignore",
        only: &[],
        what: "unfinished work",
    },
];

struct File {
    /// From the root of the repository, with slashes.
    path: String,
    text: String,
    /// The text with blanks for comments and literals; lines and columns stay.
    code: String,
}

impl File {
    fn new(path: &str, text: String) -> Self {
        let code = if path.ends_with(".rs") { code(&text) } else { String::new() };
        Self { path: path.to_owned(), text, code }
    }

    fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }

    fn is_kernel(&self) -> bool {
        self.path.ends_with(".cu") || self.path.ends_with(".cuh")
    }
}

/// A rule's complaints about one file: line, counted from 1, and what is wrong with it.
type Rule = fn(&File) -> Vec<(usize, String)>;

const RULES: [Rule; 6] =
    [left_to_right, reserved_words, short_files, short_functions, short_lines, commented_settings];

#[test]
fn the_tree_is_tidy() {
    let mut files = Vec::new();
    for folder in ["src", "tests", "configs", "experiments", "kernels"] {
        collect(Path::new(env!("CARGO_MANIFEST_DIR")), folder, &mut files);
    }
    for path in ["src/lib.rs", "tests/tidy.rs", "experiments/quickstart.toml", "kernels/scan.cu"] {
        assert!(files.iter().any(|file| file.path == path), "{path} was not looked at");
    }
    let complaints: Vec<String> = files.iter().flat_map(complaints).collect();
    assert!(complaints.is_empty(), "\n{}", complaints.join("\n"));
}

fn complaints(file: &File) -> Vec<String> {
    let complaints = RULES.iter().flat_map(|rule| rule(file));
    complaints.map(|(line, what)| format!("{}:{line}: {what}", file.path)).collect()
}

fn collect(root: &Path, path: &str, files: &mut Vec<File>) {
    let full = root.join(path);
    if full.is_dir() {
        let entries = full.read_dir().expect("a readable folder");
        let names = entries.map(|entry| entry.expect("a readable folder").file_name());
        for name in names {
            collect(root, &format!("{path}/{}", name.to_string_lossy()), files);
        }
    } else if [".rs", ".toml", ".cu", ".cuh"].iter().any(|kind| path.ends_with(kind)) {
        files.push(File::new(path, std::fs::read_to_string(full).expect("a text file")));
    }
}

/// Lines of code, counted from 1.
fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines())
}

fn left_to_right(file: &File) -> Vec<(usize, String)> {
    let Some(path) = file.path.strip_prefix("src/").filter(|_| file.is_rust()) else {
        return Vec::new();
    };
    let Some((room, inside)) = path.split_once('/') else {
        let outside = ["lib.rs", "main.rs", "args.rs"].contains(&path);
        return if outside { Vec::new() } else { vec![(1, "stands in no room".to_owned())] };
    };
    let Some(here) = ROOMS.iter().position(|name| *name == room) else {
        return vec![(1, format!("{room} is no room"))];
    };
    let paths = Regex::new(r"\b(?:(crate)::|((?:super::)+))(\w*)").expect("a pattern");
    // A file's module is this deep; to climb as far leaves the room, but from a module within it.
    let depth = 1 + inside.split('/').filter(|part| *part != "mod.rs").count();
    let mut complaints = Vec::new();
    for (line, code) in numbered(&file.code) {
        for found in paths.captures_iter(code) {
            let there = ROOMS.iter().position(|name| *name == &found[3]);
            let climb = found.get(2).map_or(0, |supers| supers.len() / "super::".len());
            let what = match there {
                None if climb == 0 => format!("{} names no room", &found[0]),
                Some(_) if climb >= depth => format!("{} is to be written from crate", &found[0]),
                Some(there) if climb == 0 && there > here => {
                    format!("{room} imports {}, to its right", &found[3])
                }
                Some(_) if climb == 0 && STRANGERS.contains(&(room, &found[3])) => {
                    format!("{room} imports {}, which it must not know", &found[3])
                }
                _ => continue,
            };
            complaints.push((line, what));
        }
    }
    complaints
}

fn reserved_words(file: &File) -> Vec<(usize, String)> {
    let mut complaints = Vec::new();
    for Reserved { pattern, only, what } in RESERVED {
        if only.iter().any(|start| file.path.starts_with(start)) {
            continue;
        }
        let pattern = Regex::new(pattern).expect("a pattern");
        let found = numbered(&file.code).filter(|(_, code)| pattern.is_match(code));
        complaints.extend(found.map(|(line, _)| (line, format!("{what} has no place here"))));
    }
    complaints
}

fn short_files(file: &File) -> Vec<(usize, String)> {
    let lines = file.text.lines().count();
    if !(file.is_rust() || file.is_kernel()) || lines <= LINES_MAX {
        return Vec::new();
    }
    vec![(lines, format!("{lines} lines in a file, at most {LINES_MAX}"))]
}

/// A function ends at the first line of its own indentation that closes a block or a declaration.
fn short_functions(file: &File) -> Vec<(usize, String)> {
    let opening = Regex::new(r"^[a-z() ]*\bfn (\w+)").expect("a pattern");
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let mut complaints = Vec::new();
    for (start, code) in numbered(&file.code) {
        let Some(found) = opening.captures(code) else { continue };
        let closes = |line: &str| {
            indentation(line) == indentation(code) && line.trim_end().ends_with(['}', ';'])
        };
        let end = numbered(&file.code).skip(start - 1).find(|(_, line)| closes(line));
        let lines = end.map_or(usize::MAX, |(end, _)| end - start + 1);
        if lines > FUNCTION_LINES_MAX {
            let most = FUNCTION_LINES_MAX;
            complaints.push((start, format!("{lines} lines in fn {}, at most {most}", &found[1])));
        }
    }
    complaints
}

fn short_lines(file: &File) -> Vec<(usize, String)> {
    if !file.is_rust() && !file.is_kernel() {
        return Vec::new();
    }
    let columns = numbered(&file.text).map(|(line, text)| (line, text.chars().count()));
    let long = columns.filter(|(_, columns)| *columns > COLUMNS_MAX);
    long.map(|(line, columns)| (line, format!("{columns} columns, at most {COLUMNS_MAX}")))
        .collect()
}

/// Whoever opens an experiment or a model's settings is told first why they exist.
fn commented_settings(file: &File) -> Vec<(usize, String)> {
    let settings = ["configs/", "experiments/"].iter().any(|start| file.path.starts_with(start));
    if !settings || !file.path.ends_with(".toml") || file.text.starts_with('#') {
        return Vec::new();
    }
    vec![(1, "opens without a comment that says what it is for".to_owned())]
}

fn code(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let (mut rest, mut in_word) = (text, false);
    while let Some(first) = rest.chars().next() {
        let opaque = opaque_len(rest, in_word);
        let taken = if opaque == 0 { first.len_utf8() } else { opaque };
        let blank = |c| if opaque == 0 || c == '\n' { c } else { ' ' };
        code.extend(rest[..taken].chars().map(blank));
        in_word = opaque == 0 && (first.is_alphanumeric() || first == '_');
        rest = &rest[taken..];
    }
    code
}

/// Bytes of the comment or literal that `rest` opens with; 0 where it opens with code.
fn opaque_len(rest: &str, in_word: bool) -> usize {
    let through = |open: usize, close: &str| {
        rest[open..].find(close).map_or(rest.len(), |at| open + at + close.len())
    };
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return through(2, "*/");
    }
    if rest.starts_with('"') {
        return quoted_len(rest, '"');
    }
    if let Some(inside) = rest.strip_prefix('\'') {
        let mut chars = inside.chars();
        return match (chars.next(), chars.next()) {
            (Some('\\'), _) => quoted_len(rest, '\''),
            (Some(c), Some('\'')) => c.len_utf8() + 2,
            _ => 0, // A lifetime.
        };
    }
    let raw = ["r", "br"].iter().find(|raw| !in_word && rest.starts_with(**raw));
    let Some(raw) = raw else { return 0 };
    let hashes = rest[raw.len()..].bytes().take_while(|byte| *byte == b'#').count();
    let open = raw.len() + hashes + 1;
    match rest.as_bytes().get(open - 1) {
        Some(b'"') => through(open, &format!("\"{}", "#".repeat(hashes))),
        _ => 0, // A name.
    }
}

/// Bytes of a literal from its opening quote through its closing one.
fn quoted_len(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if c == quote && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    rest.len()
}

/// What is wrong with `text` at `path`, by line.
fn check(path: &str, text: &str, expect: &[(usize, &str)]) {
    let expect: Vec<String> =
        expect.iter().map(|(line, what)| format!("{path}:{line}: {what}")).collect();
    assert_eq!(complaints(&File::new(path, text.to_owned())), expect, "{text}");
}

#[test]
fn imports_go_left() {
    check("src/gap/pair.rs", "use crate::rollout::Rollout;\nuse crate::gap::Legs;\n", &[]);
    let right = "ops imports engine, to its right";
    check("src/ops/scan.rs", "use crate::base::Step;\nuse crate::engine::Row;\n", &[(2, right)]);
    let tests = "mod tests {\n    fn x() { y(crate::model::Plan, crate::run::run) }\n}\n";
    check("src/gap/a/b.rs", tests, &[(2, "gap imports run, to its right")]);
    let stranger = "trainer imports engine, which it must not know";
    check("src/trainer/mod.rs", "use crate::engine;\n", &[(1, stranger)]);
    let stranger = "gap imports config, which it must not know";
    check("src/gap/mod.rs", "use crate::config::Fault;\n", &[(1, stranger)]);
    check("src/gap/mod.rs", "use crate::{run, base};\n", &[(1, "crate:: names no room")]);
    check("src/attic/mod.rs", "", &[(1, "attic is no room")]);
    check("src/attic.rs", "", &[(1, "stands in no room")]);
    check("src/main.rs", "use gapscope::run;\n", &[]);
}

#[test]
fn no_import_climbs_out_of_its_room() {
    check("src/model/block.rs", "use super::config::HfConfig;\n", &[]);
    check("src/model/config/tests.rs", "use super::super::config::HfConfig;\n", &[]);
    let climb = "super::super::run is to be written from crate";
    check("src/model/block.rs", "use super::super::run::run;\n", &[(1, climb)]);
    check(
        "src/model/mod.rs",
        "use super::run;\n",
        &[(1, "super::run is to be written from crate")],
    );
}

#[test]
fn reserved_words_are_found_in_code_alone() {
    let line = "let x = unsafe { y() };\n";
    check("src/ops/simd.rs", line, &[]);
    check("src/model/unit.rs", line, &[(1, "unsafe has no place here")]);
    check("tests/x.rs", line, &[(1, "unsafe has no place here")]);
    let words =
        "// unsafe\n/* unsafe */ f(\"unsafe \\\" unsafe\", r#\"\"unsafe\"#, '\"');\nunsafe_();";
    check("src/model/unit.rs", words, &[]);
    let clock = "let now = Instant::now();\nuse std::time::SystemTime;\n";
    let found = "the clock has no place here";
    check("src/report/disk.rs", clock, &[(1, found), (2, found)]);
    check("src/run/recorder.rs", clock, &[]);
    let process = "use std::process::Command;\nRewardCommand::new();\nCommand::new(\"sh\");\n";
    let found = "starting a process has no place here";
    check("src/rollout/reward.rs", process, &[(1, found), (3, found)]);
    check("src/rollout/command.rs", process, &[]);
    let print = "println!(\"x\");\neprint!(\"x\");\n";
    let found = "printing has no place here";
    check("src/gap/pair.rs", print, &[(1, found), (2, found)]);
    check("src/main.rs", print, &[]);
    let unfinished = "todo!()\nunimplemented!()\ndbg!(1)\n#[ignore = \"slow\"]\n";
    let found = "unfinished work has no place here";
    check("src/run/mod.rs", unfinished, &[(1, found), (2, found), (3, found), (4, found)]);
}

#[test]
fn sizes_are_bounded() {
    check("src/lib.rs", &"\n".repeat(400), &[]);
    check("src/lib.rs", &"\n".repeat(401), &[(401, "401 lines in a file, at most 400")]);
    let function = |lines: usize| {
        format!("impl X {{\n    pub fn x() {{\n{}    }}\n}}\n", "        x();\n".repeat(lines - 2))
    };
    check("src/lib.rs", &function(60), &[]);
    check("src/lib.rs", &function(61), &[(2, "61 lines in fn x, at most 60")]);
    let short = "fn a() {}\nfn b(\n    x: fn(),\n) -> X;\n";
    check("src/lib.rs", &format!("{short}{}", "x();\n".repeat(70)), &[]);
    // Columns are characters, not bytes.
    check("src/lib.rs", &"\u{e9}".repeat(100), &[]);
    check("src/lib.rs", &format!("\n{}\n", "x".repeat(101)), &[(2, "101 columns, at most 100")]);
}

#[test]
fn settings_open_with_a_comment() {
    let found = "opens without a comment that says what it is for";
    for path in ["configs/a.toml", "experiments/a/b.toml"] {
        check(path, "# Why.\nname = \"x\"\n", &[]);
        check(path, "name = \"x\"\n# Why.\n", &[(1, found)]);
    }
    check("tests/fixtures/a.toml", "name = \"x\"\n", &[]);
}
