//! Where scores go: standard output, or a file that is there only once it is whole.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

pub(super) struct Sink {
    to: BufWriter<Box<dyn Write>>,
    file: Option<Unfinished>,
}

/// Who reads standard output may have read enough, as `head` does; that is no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    There,
    Gone,
}

/// A file under another name until it is whole; without that it goes away again.
struct Unfinished {
    temporary: PathBuf,
    path: PathBuf,
}

impl Sink {
    pub(super) fn open(path: Option<&Path>) -> Result<Self> {
        let Some(path) = path else {
            return Ok(Self { to: BufWriter::new(Box::new(io::stdout())), file: None });
        };
        let failed = || format!("cannot write {}", path.display());
        // Anything else would be replaced by a file.
        if path.exists() && !path.is_file() {
            return Err(io::Error::other("it is not a regular file")).with_context(failed);
        }
        let no_name = || io::Error::other("it names no file");
        let name = path.file_name().ok_or_else(no_name).with_context(failed)?;
        let temporary = path.with_file_name(format!(".{}.tmp", name.to_string_lossy()));
        let file = File::create(&temporary).with_context(failed)?;
        let unfinished = Unfinished { temporary, path: path.to_owned() };
        Ok(Self { to: BufWriter::new(Box::new(file)), file: Some(unfinished) })
    }

    /// One object and the end of its line. A line to standard output goes out at
    /// once.
    pub(super) fn line(&mut self, value: &impl Serialize) -> Result<Reader> {
        let text = serde_json::to_string(value)?;
        let mut written = writeln!(self.to, "{text}");
        if self.file.is_none() {
            written = written.and_then(|()| self.to.flush());
        }
        match written {
            Err(error) if self.file.is_none() && error.kind() == io::ErrorKind::BrokenPipe => {
                Ok(Reader::Gone)
            }
            written => written.map(|()| Reader::There).with_context(|| self.failed()),
        }
    }

    /// Everything is in its place when this returns.
    pub(super) fn finish(mut self) -> Result<()> {
        let flushed = self.to.flush();
        flushed.with_context(|| self.failed())?;
        let Some(file) = &self.file else { return Ok(()) };
        let moved = File::open(&file.temporary)
            .and_then(|whole| whole.sync_all())
            .and_then(|()| fs::rename(&file.temporary, &file.path));
        moved.with_context(|| self.failed())
    }

    fn failed(&self) -> String {
        match &self.file {
            Some(file) => format!("cannot write {}", file.path.display()),
            None => "cannot write the scores".to_owned(),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        // After a rename there is nothing under this name.
        let _ = fs::remove_file(&self.temporary);
    }
}
