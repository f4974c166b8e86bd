//! How a server's processes are known again, by the run that started them and by the next one.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use rustix::process::{getuid, kill_process, kill_process_group, test_kill_process_group};
use rustix::process::{Pid, Signal};
use serde::{Deserialize, Serialize};

use crate::run::progress::say;

/// In the environment of a server and of all that it starts.
pub(super) const VARIABLE: &str = "GAPSCOPE_SERVER";
/// To put its affairs in order.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
const LOOKED_EVERY: Duration = Duration::from_millis(50);

/// Groups that are to be killed where the process leaves without further ado.
static LIVING: Mutex<Vec<Mark>> = Mutex::new(Vec::new());

/// One server's processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Mark {
    #[serde(skip)]
    file: PathBuf,
    /// Of processes: that of the first one.
    group: u32,
    token: String,
}

/// Kills every server that this process has started.
pub(in crate::run) fn kill_all_servers() {
    let living = LIVING.lock().map(|living| living.clone()).unwrap_or_default();
    living.iter().for_each(Mark::kill_all);
}

/// Of a server about to be started: this process, when it began, and a count.
pub(super) fn token() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let began = start_ticks(process::id()).unwrap_or(0);
    format!("{}-{began}-{}", process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Takes an address, for as long as the file that comes back is open, and ends what a dead run has
/// left there.
///
/// # Errors
/// A run that is alive has it.
pub(super) fn take(address: &str) -> Result<File> {
    let file = file_of(address);
    let path = file.with_extension("lock");
    let open = || {
        fs::create_dir_all(path.parent().expect("it lies in a folder"))?;
        OpenOptions::new().write(true).create(true).truncate(false).open(&path)
    };
    let say = || format!("cannot take {}", path.display());
    let lock = open().with_context(say)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => bail!(
            "the server at {address} belongs to another process, which is alive: wait for it, or \
             take another port in engine.url"
        ),
        Err(TryLockError::Error(error)) => return Err(error).with_context(say),
    }
    // What a start that was cut off has written names nothing to kill.
    let left = fs::read(&file).ok().and_then(|text| serde_json::from_slice::<Mark>(&text).ok());
    if let Some(mark) = left {
        Mark { file, ..mark }.clear(address);
    }
    Ok(lock)
}

impl Mark {
    pub(super) fn write(address: &str, group: u32, token: String) -> Result<Self> {
        let mark = Self { file: file_of(address), group, token };
        let text = serde_json::to_vec(&mark).expect("numbers and strings are JSON");
        let folder = mark.file.parent().expect("it lies in a folder");
        let write = || fs::create_dir_all(folder).and_then(|()| fs::write(&mark.file, &text));
        if let Err(error) = write() {
            mark.kill_all();
            return Err(error).with_context(|| format!("cannot write {}", mark.file.display()));
        }
        if let Ok(mut living) = LIVING.lock() {
            living.push(mark.clone());
        }
        Ok(mark)
    }

    /// Ends the server that a dead run has left.
    fn clear(&self, address: &str) {
        if self.members().is_empty() {
            return;
        }
        say(&format!("ending the server that a dead run has left at {address}"));
        self.kill_all();
        let began = Instant::now();
        // Who was killed is without an environment before it has closed its sockets.
        let is_there = || !self.members().is_empty() || TcpStream::connect(address).is_ok();
        while began.elapsed() < ENDS_WITHIN && is_there() {
            sleep(LOOKED_EVERY);
        }
    }

    /// Asks the group to end, waits a while, and kills what is left.
    pub(super) fn end(&self, mut first_has_ended: impl FnMut() -> bool) {
        let began = Instant::now();
        self.signal(Signal::TERM);
        // The first one, once it has ended, is a member of its group until it is reaped.
        let mut lives = || !first_has_ended() || self.group_lives();
        while began.elapsed() < ENDS_WITHIN && lives() {
            sleep(LOOKED_EVERY);
        }
        self.kill_all();
    }

    /// Kills the group, and whoever left it with the mark upon him.
    pub(super) fn kill_all(&self) {
        let members = self.members();
        if members.iter().any(|(_, group)| *group == self.group) {
            self.signal(Signal::KILL);
        }
        for pid in members.iter().filter_map(|(pid, _)| pid_of(*pid)) {
            // The only failure is that nobody is left to kill.
            let _ = kill_process(pid, Signal::KILL);
        }
        let _ = fs::remove_file(&self.file);
        if let Ok(mut living) = LIVING.lock() {
            living.retain(|one| one != self);
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = pid_of(self.group) {
            let _ = kill_process_group(group, signal);
        }
    }

    fn group_lives(&self) -> bool {
        pid_of(self.group).is_some_and(|group| test_kill_process_group(group).is_ok())
    }

    /// Every living process that carries the mark, with its group.
    fn members(&self) -> Vec<(u32, u32)> {
        let wanted = format!("{VARIABLE}={}", self.token);
        let carries = |path: &Path| {
            let environment = fs::read(path.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|one| one == wanted.as_bytes())
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let member = |entry: fs::DirEntry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            carries(&entry.path()).then_some(())?;
            Some((pid, stat(pid)?.get(2)?.parse().ok()?))
        };
        entries.filter_map(member).collect()
    }
}

fn pid_of(id: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(id).ok()?)
}

/// One file an address, in a folder of the user's.
fn file_of(address: &str) -> PathBuf {
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let folder = std::env::temp_dir().join(format!("gapscope-{}", getuid().as_raw()));
    folder.join(format!("{}.json", address.chars().map(plain).collect::<String>()))
}

/// What Linux says of a process behind its name: state, parent, group, ...
fn stat(pid: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = text.rsplit_once(") ")?;
    Some(rest.split(' ').map(str::to_owned).collect())
}

/// When a process began, in ticks since the machine did.
fn start_ticks(pid: u32) -> Option<u64> {
    stat(pid)?.get(19)?.parse().ok()
}
