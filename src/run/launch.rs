//! Servers that a run starts, watches and ends.
//!
//! Each runs in a process group of its own, so that all that it starts ends with it, and carries a
//! mark in its environment. The mark is also written to a file under the server's address: a run
//! that was killed leaves its servers behind, and the next one that wants the address ends them.

mod mark;
mod words;

use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context, Result};

pub(super) use self::mark::kill_all_servers;
use self::mark::Mark;
use super::interrupt;
use super::progress::say;
use crate::config::{Config, LaunchConfig};
use crate::rollout::http::Starting;

const LOOKED_EVERY: Duration = Duration::from_millis(50);
/// For one question about a server's health.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// The servers of one run; they end where this does.
pub(super) struct Launched {
    servers: RefCell<Vec<Server>>,
    config: LaunchConfig,
}

struct Server {
    url: String,
    /// `HOST:PORT`.
    address: String,
    /// Keeps other processes from it.
    _held: File,
    log: PathBuf,
    /// Bytes that the log held before.
    log_from: u64,
    child: Child,
    mark: Mark,
    /// When that child began.
    began: Instant,
    /// From then on until it is healthy.
    starting: Starting,
    restarts_left: u32,
    ended: Option<ExitStatus>,
    /// Why it is given up.
    lost: Option<String>,
}

impl Launched {
    /// Starts a server for each address and waits until all are healthy; `None` where the
    /// experiment starts none. What they print goes to `folder/server-N.log`.
    ///
    /// # Errors
    /// An address in use, a command that cannot be started, a server that ends, with its last
    /// words, or that is not healthy in time; Ctrl-C.
    pub(super) fn start(config: &Config, folder: &Path) -> Result<Option<Self>> {
        let servers = config.engine.servers.as_ref();
        let Some((servers, launch)) = servers.and_then(|all| Some((all, all.launch.as_ref()?)))
        else {
            return Ok(None);
        };
        let launched = Self { servers: RefCell::default(), config: launch.clone() };
        for (index, url) in servers.url.iter().enumerate() {
            let log = folder.join(format!("server-{index}.log"));
            let server = Server::start(url, log, launch)?;
            launched.servers.borrow_mut().push(server);
        }
        launched.wait_until_healthy()?;
        Ok(Some(launched))
    }

    fn wait_until_healthy(&self) -> Result<()> {
        let mut servers = self.servers.borrow_mut();
        loop {
            let mut healthy = true;
            for server in servers.iter_mut() {
                // What ends before it was ever well would end again.
                ensure!(!server.has_ended(), server.obituary());
                healthy &= server.is_healthy(&self.config)?;
            }
            if healthy {
                return Ok(());
            }
            interrupt::check(|| "the start of the servers".to_owned())?;
            sleep(LOOKED_EVERY);
        }
    }

    /// Of each server, in the order of their addresses.
    pub(super) fn starting(&self) -> Vec<Starting> {
        self.servers.borrow().iter().map(|server| Starting::clone(&server.starting)).collect()
    }

    /// Looks after the servers: one that has ended is started again where it may be. Whether one
    /// is given up.
    pub(super) fn has_lost_one(&self) -> bool {
        let mut servers = self.servers.borrow_mut();
        servers.iter_mut().any(|server| server.look_after(&self.config))
    }

    /// Of the first server that was given up or has ended.
    pub(super) fn last_words(&self) -> Option<String> {
        let mut servers = self.servers.borrow_mut();
        servers.iter_mut().find_map(|server| {
            let ended = server.has_ended();
            server.lost.clone().or_else(|| ended.then(|| server.obituary()))
        })
    }
}

impl Drop for Launched {
    fn drop(&mut self) {
        self.servers.get_mut().iter_mut().for_each(Server::end);
    }
}

impl Server {
    fn start(url: &str, log: PathBuf, config: &LaunchConfig) -> Result<Self> {
        let address = url.strip_prefix("http://").expect("configurations hold plain HTTP alone");
        let address = match address.contains(':') {
            true => address.to_owned(),
            false => format!("{address}:80"),
        };
        let held = mark::take(&address)?;
        ensure!(
            TcpStream::connect(&address).is_err(),
            "something listens at {url} already: end it, or take another port in engine.url"
        );
        let log_from = len(&log);
        let (child, mark) = spawn(&address, &log, config)?;
        Ok(Self {
            url: url.to_owned(),
            address,
            _held: held,
            log,
            log_from,
            child,
            mark,
            began: Instant::now(),
            starting: Starting::new(true.into()),
            restarts_left: config.restarts,
            ended: None,
            lost: None,
        })
    }

    /// Whether it is healthy, or was since it began.
    fn is_healthy(&self, config: &LaunchConfig) -> Result<bool> {
        if !self.starting.load(Ordering::Relaxed) {
            return Ok(true);
        }
        if answers_health(&self.address) {
            self.starting.store(false, Ordering::Release);
            return Ok(true);
        }
        let waited = self.began.elapsed().as_secs_f64();
        ensure!(
            waited < config.ready_timeout_s,
            "{} is not healthy after {waited:.0} s; raise engine.launch.ready_timeout_s, or see \
             {}, which ends\n{}",
            self.url,
            self.log.display(),
            self.last_words()
        );
        Ok(false)
    }

    fn has_ended(&mut self) -> bool {
        if self.ended.is_none() {
            // Nothing is known of a child that cannot be asked after: it is taken to live.
            self.ended = self.child.try_wait().ok().flatten();
        }
        self.ended.is_some()
    }

    /// Takes the next step of its life, without waiting for the one after; true where it is given
    /// up.
    fn look_after(&mut self, config: &LaunchConfig) -> bool {
        if self.lost.is_none() {
            let lives = if self.has_ended() { self.start_again(config) } else { Ok(()) };
            let failed = lives.and_then(|()| self.is_healthy(config)).err();
            self.lost = failed.map(|error| format!("{error:#}"));
        }
        self.lost.is_some()
    }

    fn start_again(&mut self, config: &LaunchConfig) -> Result<()> {
        let Some(left) = self.restarts_left.checked_sub(1) else { bail!("{}", self.obituary()) };
        // Nobody is to knock from here on.
        self.starting.store(true, Ordering::Release);
        say(&format!("{}; starting it again", self.obituary()));
        self.mark.kill_all();
        self.log_from = len(&self.log);
        let (child, mark) = spawn(&self.address, &self.log, config)?;
        (self.child, self.mark, self.ended) = (child, mark, None);
        (self.began, self.restarts_left) = (Instant::now(), left);
        Ok(())
    }

    fn obituary(&self) -> String {
        let status = self.ended.map_or("it runs".to_owned(), |status| status.to_string());
        format!(
            "the server at {} has ended ({status}); its last words in {}:\n{}",
            self.url,
            self.log.display(),
            self.last_words()
        )
    }

    fn last_words(&self) -> String {
        words::last_words(&self.log, self.log_from)
    }

    fn end(&mut self) {
        self.mark.end(|| self.child.try_wait().is_ok_and(|status| status.is_some()));
        // A child that was killed is there to be reaped; one that cannot be is reaped by init.
        let _ = self.child.wait();
    }
}

/// In bytes; 0 of a file that is not there.
fn len(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |found| found.len())
}

fn spawn(address: &str, log: &Path, config: &LaunchConfig) -> Result<(Child, Mark)> {
    let (host, port) = address.rsplit_once(':').expect("an address has a port");
    let word = |word: &String| word.replace("{host}", host).replace("{port}", port);
    let argv: Vec<String> = config.argv.iter().map(word).collect();
    let open = || OpenOptions::new().create(true).append(true).open(log);
    let (mut out, err) = open()
        .and_then(|out| Ok((out, open()?)))
        .with_context(|| format!("cannot write {}", log.display()))?;
    writeln!(out, "$ {}", argv.join(" ")).with_context(|| log.display().to_string())?;
    let token = mark::token();
    let mut command = Command::new(&argv[0]);
    #[cfg(feature = "cuda")]
    crate::ops::cuda::pinned_here().iter().for_each(|name| {
        command.env_remove(name);
    });
    let child = command
        .args(&argv[1..])
        .env(mark::VARIABLE, &token)
        // py-setproctitle, by which vLLM's workers name themselves, would write over the mark.
        .env("SPT_NOENV", "1")
        .stdin(Stdio::null())
        .stdout(out)
        .stderr(err)
        .process_group(0)
        .spawn()
        .with_context(|| format!("engine.launch.command: {} cannot be started", argv[0]))?;
    let mark = Mark::write(address, child.id(), token)?;
    Ok((child, mark))
}

/// Whether `GET /health` is answered with 200.
fn answers_health(address: &str) -> bool {
    let ask = || -> std::io::Result<bool> {
        let Some(place) = address.to_socket_addrs()?.next() else { return Ok(false) };
        let mut stream = TcpStream::connect_timeout(&place, ANSWERS_WITHIN)?;
        stream.set_read_timeout(Some(ANSWERS_WITHIN))?;
        write!(stream, "GET /health HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        Ok(head.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}
