//! Servers that a run starts: each is this test's own binary, told to serve.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use gapscope::base::LogprobsMode;
use serde_json::{json, Value};
use tempfile::TempDir;

use crate::common::run::read_json;
use crate::scripted::MODEL;
use crate::scripted::{serve, Reply, State};
use crate::whole::RUN;

/// No test but where its binary is started as a server: `port=N`, and what else it is told. Ends by
/// itself at completion request `dies=N` where the file `alive=PATH` is not there yet.
#[test]
fn serves_where_it_is_told_to() {
    let args: Vec<String> = std::env::args().collect();
    let told = |name: &str| args.iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='));
    let Some(port) = told("port") else { return };
    if told("never") == Some("ready") {
        eprintln!("loading weights");
        sleep(Duration::from_secs(600));
    }
    if told("refuses").is_some_and(|len| len == "96") {
        eprintln!("ValueError: max_model_len 96 is more than I have");
        std::process::exit(1);
    }
    let dies: usize = told("dies").map_or(usize::MAX, |n| n.parse().expect("a count"));
    let once = told("once").map(str::to_owned);
    let count = AtomicUsize::new(0);
    let state = State::new(
        LogprobsMode::RawLogprobs,
        Box::new(move |_| {
            if count.fetch_add(1, Ordering::Relaxed) + 1 == dies {
                let first = once.as_ref().is_none_or(|path| fs::File::create_new(path).is_ok());
                if first {
                    let _ = writeln!(std::io::stderr(), "RuntimeError: a page was not there");
                    let _ = writeln!(std::io::stderr(), "going down");
                    std::process::exit(3);
                }
            }
            Reply::Right
        }),
    );
    let listener = TcpListener::bind(format!("127.0.0.1:{port}")).expect("the port is free");
    serve(&listener, &Arc::new(state));
}

struct Launch {
    folder: TempDir,
    port: u16,
}

impl Launch {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let port = listener.local_addr().expect("it is bound").port();
        Self { folder: tempfile::tempdir().expect("a temporary folder"), port }
    }

    /// A command of the binary over a server that is told so.
    fn command(&self, verb: &str, told: &str, text: &str, sets: &[&str]) -> Command {
        let file = self.folder.path().join("launched.toml");
        fs::write(&file, RUN.replacen('\n', &format!("\n{MODEL}"), 1) + text).expect("a file");
        let test = std::env::current_exe().expect("a test has a binary");
        let serve = "--exact --nocapture launch::serves_where_it_is_told_to port={port}";
        let line = format!("'{}' {serve} {told}", test.display());
        let line = toml::Value::String(line);
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapscope"));
        command.current_dir(env!("CARGO_MANIFEST_DIR")).arg(verb).arg(&file);
        command.arg("--out").arg(self.out());
        command.arg("--set").arg(format!("engine.url=http://127.0.0.1:{}", self.port));
        command.arg("--set").arg(format!("engine.launch.command={line}"));
        command.args(sets.iter().flat_map(|set| ["--set", set]));
        command
    }

    /// Exit code and standard error.
    fn run(&self, told: &str, sets: &[&str]) -> (Option<i32>, String) {
        let output = self.command("run", told, "", sets).output().expect("the binary starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    fn out(&self) -> std::path::PathBuf {
        self.folder.path().join("run")
    }

    fn listens(&self) -> bool {
        TcpStream::connect(("127.0.0.1", self.port)).is_ok()
    }

    fn summary(&self) -> Value {
        read_json(&self.out().join("summary.json"))
    }
}

#[test]
fn a_server_begins_and_ends_with_its_run() {
    let launch = Launch::new();
    let (code, stderr) = launch.run("", &[]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!((&launch.summary()["gap_max"], launch.listens()), (&json!(0.0), false));
    let log = fs::read_to_string(launch.out().join("server-0.log")).expect("its log is kept");
    assert!(log.starts_with("$ ") && log.contains(&format!("port={}", launch.port)), "{log}");
}

#[test]
fn no_server_is_started_for_a_folder_that_holds_a_run() {
    let launch = Launch::new();
    let (code, stderr) = launch.run("", &[]);
    assert_eq!(code, Some(0), "{stderr}");
    let log = launch.out().join("server-0.log");
    let before = fs::read_to_string(&log).expect("its log is kept");
    let (code, stderr) = launch.run("", &["steps=1"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("already holds a run"), "{stderr}");
    assert_eq!(fs::read_to_string(&log).expect("it is there"), before);
    assert_eq!(launch.summary()["steps_done"], 2);
}

#[test]
fn a_server_that_dies_is_told_of_in_its_own_words() {
    let launch = Launch::new();
    let (code, stderr) = launch.run("dies=20", &["check.floor=0"]);
    assert_eq!(code, Some(1), "{stderr}");
    for words in ["has ended (exit status: 3)", "RuntimeError: a page was not there\ngoing down"] {
        assert!(stderr.contains(words), "{stderr}\nwithout {words}");
    }
    assert!(!launch.listens());
    // Two probes, twelve rollouts of the first step, and it dies at the sixth of the second.
    assert_eq!(launch.summary()["steps_done"], 1);
    assert!(launch.summary()["error"].as_str().expect("why").contains("going down"));
}

#[test]
fn a_server_that_may_be_started_again_loses_nothing() {
    let launch = Launch::new();
    let once = format!("dies=10 once={}", launch.folder.path().join("died").display());
    let (code, stderr) = launch.run(&once, &["check.floor=0", "engine.launch.restarts=1"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("starting it again"), "{stderr}");
    let summary = launch.summary();
    assert_eq!((&summary["n_tokens"], &summary["gap_max"]), (&json!(2 * 96), &json!(0.0)));
}

#[test]
fn a_point_whose_server_cannot_start_is_a_row_with_its_error() {
    let launch = Launch::new();
    let sweep = "[sweep]\n\"engine.max_model_len\" = [64, 96]\n";
    let told = "refuses={engine.max_model_len}";
    let output = launch.command("sweep", told, sweep, &["steps=1"]).output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let points = read_json(&launch.out().join("sweep.json"))["points"].clone();
    assert_eq!(
        (&points[0]["error"], &points[0]["summary"]["gap_max"]),
        (&json!(null), &json!(0.0))
    );
    let error = points[1]["error"].as_str().expect("why");
    assert!(error.contains("ValueError: max_model_len 96 is more than I have"), "{error}");
    assert!(launch.out().join("points/max_model_len=96/server-0.log").exists());
}

/// Whatever kept it from its first step, it has recorded nothing.
#[test]
fn a_run_may_begin_where_one_could_not() {
    let launch = Launch::new();
    let (code, stderr) = launch.run("refuses=96", &["engine.max_model_len=96"]);
    assert_eq!((code, launch.out().join("config.json").exists()), (Some(1), false), "{stderr}");
    let log = launch.out().join("server-0.log");
    let said = |words: &str| fs::read_to_string(&log).is_ok_and(|log| log.contains(words));
    let mut killed = launch.command("run", "never=ready", "", &["steps=1"]);
    let mut killed = killed.stderr(Stdio::null()).spawn().expect("the binary starts");
    wait_for(|| said("loading weights"));
    killed.kill().expect("it runs");
    killed.wait().expect("it was killed");
    assert!(launch.out().join("config.json").exists());
    let (code, stderr) = launch.run("", &[]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(launch.summary()["steps_done"], 2);
    assert!(said("ValueError: max_model_len 96 is more than I have") && said("loading weights"));
}

/// A run that is killed cannot end its server; the next one does.
#[test]
fn what_a_dead_run_has_left_is_ended() {
    let launch = Launch::new();
    let mut first = launch.command("run", "", "", &["steps=100000"]);
    let mut first = first.stderr(Stdio::null()).spawn().expect("the binary starts");
    let rows = launch.out().join("steps.jsonl");
    wait_for(|| fs::metadata(&rows).is_ok_and(|rows| rows.len() > 0));
    let second = Launch { folder: tempfile::tempdir().expect("a temporary folder"), ..launch };
    let (code, stderr) = second.run("", &[]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("belongs to another process, which is alive"), "{stderr}");
    first.kill().expect("it runs");
    first.wait().expect("it was killed");
    assert!(second.listens(), "the server lives on");
    let (code, stderr) = second.run("", &[]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("ending the server that a dead run has left"), "{stderr}");
    assert!(!second.listens());
}

#[test]
fn somebody_elses_server_is_left_alone() {
    let launch = Launch::new();
    let _listener = TcpListener::bind(("127.0.0.1", launch.port)).expect("the port is free");
    let (code, stderr) = launch.run("", &[]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("something listens at http://127.0.0.1:"), "{stderr}");
    assert!(!Path::new(&launch.out()).join("config.json").exists());
}

fn wait_for(holds: impl Fn() -> bool) {
    for _ in 0..2400 {
        if holds() {
            return;
        }
        sleep(Duration::from_millis(25));
    }
    panic!("a minute was not enough");
}
