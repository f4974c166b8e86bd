//! Ctrl-C: the step under way is finished and reported, then the command ends. A second one ends it
//! at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::{io, process, thread};

use tokio::signal::unix::{signal, SignalKind};

use super::launch::kill_all_servers;
use super::progress::say;

/// The exit code of a command that Ctrl-C has ended: 128 and the signal's number, as shells have
/// it.
pub const INTERRUPTED: u8 = 130;

static ASKED: AtomicBool = AtomicBool::new(false);

/// Where Ctrl-C has ended a run. What was reported before stays.
#[derive(Debug, thiserror::Error)]
#[error("interrupted after {0}")]
pub struct Interrupted(pub String);

/// Listens from now on, for the whole process.
///
/// # Errors
/// A system that gives no more threads or signal handlers.
pub fn listen_for_ctrl_c() -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let mut signals = {
        let _inside = runtime.enter();
        signal(SignalKind::interrupt())?
    };
    let listen = async move {
        while signals.recv().await.is_some() {
            if ASKED.swap(true, Ordering::Relaxed) {
                kill_all_servers();
                process::exit(i32::from(INTERRUPTED));
            }
            say("interrupted: ending after this step; once more to end at once");
        }
    };
    thread::Builder::new().name("ctrl-c".to_owned()).spawn(move || runtime.block_on(listen))?;
    Ok(())
}

/// Whether Ctrl-C has asked for an end.
pub(super) fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

/// Ends whatever calls this between two steps, once Ctrl-C has asked for it.
pub(super) fn check(after: impl FnOnce() -> String) -> Result<(), Interrupted> {
    if asked() {
        return Err(Interrupted(after()));
    }
    Ok(())
}
