//! Rewards from a program of the user's: JSON lines in, one number a line out.

use std::cmp::Ordering;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{kill_process_group, Pid, Signal};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};

use super::error::CommandFailure;
use super::reward::Graded;
use super::text::excerpt;
use super::RolloutError;

/// A number and its line end, as any language prints them, with room to spare.
const OUTPUT_BYTES_PER_COMPLETION: u64 = 64;
/// What a program with few completions may print before it counts as flooding.
const OUTPUT_BYTES_LEAST: u64 = 4096;
const STDERR_BYTES: usize = 2048;
const STDERR_LINES: usize = 8;
/// For a killed program to be gone. Nothing is lost where it is not: it is reaped later.
const REAP: Duration = Duration::from_secs(1);

/// A program that judges a whole step's completions in one run.
///
/// It reads one object `{"prompt", "completion", "answer"}` a line from its standard input, in
/// the order of the completions, until the end of input; prints one finite number a line; exits
/// with status 0. It runs in a process group of its own.
#[derive(Debug)]
pub struct RewardCommand {
    argv: Vec<String>,
    timeout: Duration,
}

impl RewardCommand {
    /// # Errors
    /// No program, or a time-out that is not positive.
    pub fn new(argv: &[String], timeout_s: f64) -> Result<Self, RolloutError> {
        if argv.first().is_none_or(String::is_empty) {
            return Err(RolloutError::NoProgram);
        }
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .ok()
            .filter(|timeout| !timeout.is_zero())
            .ok_or(RolloutError::Timeout { timeout_s })?;
        Ok(Self { argv: argv.to_vec(), timeout })
    }

    /// Blocks until the program is done or its time is up. Nothing is started for no completions.
    ///
    /// # Errors
    /// A program that cannot be started, fails, hangs, floods, or prints anything but one finite
    /// number a completion.
    pub fn score(&self, graded: &[Graded<'_>]) -> Result<Vec<f64>, RolloutError> {
        if graded.is_empty() {
            return Ok(Vec::new());
        }
        let mut input = Vec::new();
        for one in graded {
            serde_json::to_writer(&mut input, one).expect("strings are JSON");
            input.push(b'\n');
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime
            .map_err(CommandFailure::Pipe)
            .and_then(|runtime| runtime.block_on(self.run(&input, graded.len())))
            .map_err(|failure| RolloutError::Command { program: self.argv[0].clone(), failure })
    }

    async fn run(&self, input: &[u8], completions: usize) -> Result<Vec<f64>, CommandFailure> {
        let mut child = Command::new(&self.argv[0])
            .args(&self.argv[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(CommandFailure::Start)?;
        let limit_bytes = OUTPUT_BYTES_LEAST + OUTPUT_BYTES_PER_COMPLETION * completions as u64;
        let mut stderr = Tail::default();
        let talk = talk(&mut child, input, limit_bytes, &mut stderr);
        let talked = tokio::time::timeout(self.timeout, talk).await;
        let stderr = stderr.text();
        let stopped = match talked {
            Ok(Ok((status, output))) if status.success() => {
                return parse(&output, completions, stderr);
            }
            Ok(Ok((status, _))) => return Err(CommandFailure::Exit { status, stderr }),
            Ok(Err(Stop::Flood)) => CommandFailure::Flood { limit_bytes, completions, stderr },
            Ok(Err(Stop::Pipe(error))) => CommandFailure::Pipe(error),
            Err(_) => {
                let timeout_s = self.timeout.as_secs_f64();
                CommandFailure::TimedOut { timeout_s, completions, stderr }
            }
        };
        kill_group(&mut child).await;
        Err(stopped)
    }
}

/// Why a program is not heard to its end.
enum Stop {
    Flood,
    Pipe(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Pipe(error)
    }
}

/// Writes and reads at once, as a pipe that nobody drains would stop the program.
///
/// The program is waited for last. Until then nobody else can get its process id, so that its
/// group may be killed at any time.
async fn talk(
    child: &mut Child,
    input: &[u8],
    limit_bytes: u64,
    stderr: &mut Tail,
) -> Result<(ExitStatus, Vec<u8>), Stop> {
    const PIPED: &str = "all three streams are piped";
    let stdin = child.stdin.take().expect(PIPED);
    let stdout = child.stdout.take().expect(PIPED);
    let errors = child.stderr.take().expect(PIPED);
    let ((), output, ()) = tokio::try_join!(
        write_input(stdin, input),
        read_output(stdout, limit_bytes),
        stderr.fill(errors)
    )?;
    Ok((child.wait().await?, output))
}

async fn write_input(mut stdin: ChildStdin, input: &[u8]) -> Result<(), Stop> {
    match stdin.write_all(input).await {
        // Its status and its output tell whether a program that stops reading did its work.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

async fn read_output(stdout: ChildStdout, limit_bytes: u64) -> Result<Vec<u8>, Stop> {
    let mut output = Vec::new();
    stdout.take(limit_bytes + 1).read_to_end(&mut output).await?;
    if output.len() as u64 > limit_bytes {
        return Err(Stop::Flood);
    }
    Ok(output)
}

/// The end of standard error, however much is written to it.
#[derive(Default)]
struct Tail {
    bytes: Vec<u8>,
}

impl Tail {
    async fn fill(&mut self, mut errors: ChildStderr) -> Result<(), Stop> {
        let mut chunk = [0; STDERR_BYTES];
        loop {
            let read = errors.read(&mut chunk).await?;
            if read == 0 {
                return Ok(());
            }
            self.bytes.extend_from_slice(&chunk[..read]);
            let surplus = self.bytes.len().saturating_sub(STDERR_BYTES);
            self.bytes.drain(..surplus);
        }
    }

    /// The last lines.
    fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        let lines: Vec<&str> = text.trim_end().lines().collect();
        lines[lines.len().saturating_sub(STDERR_LINES)..].join("\n")
    }
}

fn parse(output: &[u8], expected: usize, stderr: String) -> Result<Vec<f64>, CommandFailure> {
    let text = String::from_utf8_lossy(output);
    let lines: Vec<&str> = text.lines().collect();
    let mut rewards = Vec::with_capacity(expected);
    for (index, line) in lines.iter().take(expected).enumerate() {
        // The trainer computes in f32, where a larger number is not finite.
        match line.trim().parse::<f64>() {
            Ok(reward) if (reward as f32).is_finite() => rewards.push(reward),
            _ => {
                let found = excerpt(line);
                return Err(CommandFailure::NotANumber { line: index + 1, found, stderr });
            }
        }
    }
    let found = lines.len();
    match found.cmp(&expected) {
        Ordering::Less => Err(CommandFailure::TooFewLines { expected, found, stderr }),
        Ordering::Greater => Err(CommandFailure::TooManyLines { expected, found, stderr }),
        Ordering::Equal => Ok(rewards),
    }
}

/// Kills the program and all that it started in its group, which still holds it as a member.
async fn kill_group(child: &mut Child) {
    let pid = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(pid) = pid {
        // The only failure is that nobody is left to kill.
        let _ = kill_process_group(pid, Signal::KILL);
    }
    let _ = tokio::time::timeout(REAP, child.wait()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(script: &str, timeout_s: f64, completions: &[&str]) -> Result<Vec<f64>, RolloutError> {
        let argv = ["sh", "-c", script].map(str::to_owned);
        let graded: Vec<Graded<'_>> = completions
            .iter()
            .map(|&completion| Graded {
                prompt: "say \"two\"\nlines",
                completion: completion.to_owned(),
                answer: "19",
            })
            .collect();
        RewardCommand::new(&argv, timeout_s).unwrap().score(&graded)
    }

    fn check_failure(script: &str, expected: &str) {
        let error = run(script, 60.0, &["19", "20", "21"]).unwrap_err().to_string();
        assert_eq!(error, format!("reward command \"sh\": {expected}"), "{script}");
    }

    #[test]
    fn one_number_a_completion() {
        let judge = r#"while read -r line; do
            case "$line" in *'"completion":"19","answer":"19"'*) echo 1 ;; *) echo " -0.25" ;; esac
        done"#;
        assert_eq!(run(judge, 60.0, &["19", "20", "19"]).unwrap(), [1.0, -0.25, 1.0]);
        assert!(run("exit 3", 60.0, &[]).unwrap().is_empty());
    }

    #[test]
    fn the_input_is_json_lines() {
        let expected = r#"{"prompt":"say \"two\"\nlines","completion":"a\tb","answer":"19"}"#;
        let script = format!("read -r line; [ \"$line\" = '{expected}' ] && echo 1 || echo 0");
        assert_eq!(run(&script, 60.0, &["a\tb"]).unwrap(), [1.0]);
    }

    /// Both pipes hold far less than what goes through them here.
    #[test]
    fn large_batches_pass_in_both_directions() {
        let completion = "x".repeat(500);
        let many = vec![completion.as_str(); 20_000];
        let script = "echo warning >&2; sed 's/.*/0.500000000000/'";
        assert_eq!(run(script, 60.0, &many).unwrap(), vec![0.5; 20_000]);
        let unread = "i=0; while [ $i -lt 20000 ]; do echo 1; i=$((i+1)); done";
        assert_eq!(run(unread, 60.0, &many).unwrap(), vec![1.0; 20_000]);
    }

    #[test]
    fn wrong_output_is_named_by_line() {
        let silent = "; its standard error is empty";
        let noted = "; its standard error ends\nmodel loaded";
        check_failure(
            "printf '1\\n0\\n'",
            &format!(
                "line 3 of its output is missing: it printed 2 lines for 3 completions{silent}"
            ),
        );
        check_failure(
            "true",
            &format!(
                "line 1 of its output is missing: it printed 0 lines for 3 completions{silent}"
            ),
        );
        check_failure(
            "echo model loaded >&2; printf '1\\n0\\n1\\n1\\n1\\n'",
            &format!(
                "line 4 of its output is one too many: it printed 5 lines for 3 completions{noted}"
            ),
        );
        for (printed, shown) in [
            ("good", "good"),
            ("", ""),
            ("nan", "nan"),
            ("inf", "inf"),
            ("1e39", "1e39"),
            ("1 1", "1 1"),
            ("\\377", "\u{fffd}"),
        ] {
            check_failure(
                &format!("printf '1\\n{printed}\\n1\\n'"),
                &format!("line 2 of its output is {shown:?}, not a finite number{silent}"),
            );
        }
    }

    #[test]
    fn a_crash_is_told_with_the_end_of_standard_error() {
        let quote = "; its standard error ends\nTraceback\nKeyError: 'answer'";
        check_failure(
            "echo Traceback >&2; echo \"KeyError: 'answer'\" >&2; exit 3",
            &format!("exit status: 3{quote}"),
        );
        check_failure("kill -9 $$", "signal: 9 (SIGKILL); its standard error is empty");
        // Right output does not make up for a crash.
        check_failure(
            "printf '1\\n1\\n1\\n'; exit 1",
            "exit status: 1; its standard error is empty",
        );
        let last = (93..=100).map(|n| n.to_string()).collect::<Vec<_>>().join("\n");
        check_failure(
            "i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo $i >&2; done; exit 1",
            &format!("exit status: 1; its standard error ends\n{last}"),
        );
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let argv = ["/no/such/judge".to_owned()];
        let graded = Graded { prompt: "", completion: String::new(), answer: "" };
        let error = RewardCommand::new(&argv, 1.0).unwrap().score(&[graded]).unwrap_err();
        let expected = "reward command \"/no/such/judge\": cannot be started: No such file or \
                        directory (os error 2); the first of task.reward_command must be a \
                        program on PATH or a path";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_flood_is_stopped() {
        let flood = "4288 bytes for 3 completions, killed; it must print one number a line";
        let silent = "; its standard error is empty";
        check_failure("yes 1", &format!("printed more than {flood}{silent}"));
        check_failure("yes 1 & wait", &format!("printed more than {flood}{silent}"));
    }

    /// Whether a process runs; one that waits to be reaped does not.
    fn runs(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }

    #[test]
    fn a_hang_is_killed_with_all_that_it_started() {
        let script = "sleep 600 & echo $! >&2; echo $$ >&2; wait";
        let error = run(script, 2.0, &["19", "20"]).unwrap_err();
        let RolloutError::Command {
            failure: CommandFailure::TimedOut { timeout_s, completions, stderr },
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((timeout_s, completions), (2.0, 2));
        let pids: Vec<&str> = stderr.lines().collect();
        assert_eq!(pids.len(), 2, "{stderr}");
        // Delivery of a signal is not instant.
        for _ in 0..1000 {
            if !pids.iter().any(|pid| runs(pid)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("still running: {pids:?}");
    }

    #[test]
    fn impossible_settings_are_refused() {
        let command = |argv: &[&str], timeout_s| {
            let argv: Vec<String> = argv.iter().map(|&part| part.to_owned()).collect();
            RewardCommand::new(&argv, timeout_s).unwrap_err().to_string()
        };
        let none = "task.reward_command names no program; write [\"program\", \"argument\", ...]";
        assert_eq!(command(&[], 1.0), none);
        assert_eq!(command(&[""], 1.0), none);
        for (timeout_s, shown) in [(0.0, "0"), (-1.0, "-1"), (f64::NAN, "NaN")] {
            let text =
                format!("task.reward_timeout_s = {shown} must be a positive number of seconds");
            assert_eq!(command(&["sh"], timeout_s), text);
        }
    }
}
