//! The two ways in which a run's files come to be: rewritten whole, or grown by whole pieces.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::ReportError;

/// Replaces `path` by `bytes`; a reader sees the old file or the new one, and after an error the
/// old one.
pub(super) fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), ReportError> {
    write_pieces(path, [bytes])
}

/// As [`write_atomic`], of pieces one after another.
pub(super) fn write_pieces<'a>(
    path: &Path,
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Result<(), ReportError> {
    let temporary = temporary(path);
    let written = File::create(&temporary).and_then(|mut file| {
        pieces.into_iter().try_for_each(|piece| file.write_all(piece))?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&temporary, path)).map_err(|source| {
        // The first error is the one to report; a temporary that stays is overwritten next time.
        let _ = fs::remove_file(&temporary);
        ReportError::io("write", path)(source)
    })
}

/// In the same folder, so that the rename stays within one file system; hidden, so that no glob
/// finds it.
fn temporary(path: &Path) -> PathBuf {
    let name = path.file_name().expect("a report path names a file").to_string_lossy();
    path.with_file_name(format!(".{name}.tmp"))
}

/// Removes a file or a whole folder that may not be there.
pub(super) fn remove(path: &Path) -> Result<(), ReportError> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(ReportError::io("remove", path)(error))
        }
        _ => Ok(()),
    }
}

/// That a file still holds what it once held.
pub fn check_length(path: &Path, due: u64) -> Result<(), ReportError> {
    let found = fs::metadata(path).map_err(ReportError::io("read", path))?.len();
    if found < due {
        return Err(ReportError::Shortened { path: path.to_owned(), found, due });
    }
    Ok(())
}

/// A file that grows by whole pieces.
#[derive(Debug)]
pub(super) struct Appender {
    path: PathBuf,
    file: File,
    len_bytes: u64,
}

impl Appender {
    /// Fails if the file exists: what a run has written is never written over.
    pub(super) fn create(path: &Path) -> Result<Self, ReportError> {
        let file = OpenOptions::new().append(true).create_new(true).open(path);
        let file = file.map_err(ReportError::io("create", path))?;
        Ok(Self { path: path.to_owned(), file, len_bytes: 0 })
    }

    /// Goes on with a file at the length it had once; what is behind that is dropped.
    pub(super) fn reopen(path: &Path, len_bytes: u64) -> Result<Self, ReportError> {
        let file = OpenOptions::new().append(true).open(path);
        let file = file.map_err(ReportError::io("open", path))?;
        check_length(path, len_bytes)?;
        file.set_len(len_bytes).map_err(ReportError::io("truncate", path))?;
        Ok(Self { path: path.to_owned(), file, len_bytes })
    }

    /// What was appended is on the disk; returns the file's length.
    pub(super) fn sync(&mut self) -> Result<u64, ReportError> {
        self.file.sync_data().map_err(ReportError::io("write", &self.path))?;
        Ok(self.len_bytes)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Hands the whole piece to the operating system, or leaves the file as it was.
    pub(super) fn append(&mut self, piece: &[u8]) -> Result<(), ReportError> {
        self.file.write_all(piece).map_err(|source| {
            // Half a piece must not stay: the next one would follow it. If this fails too, the
            // file ends in a torn record, which readers tolerate.
            let _ = self.file.set_len(self.len_bytes);
            ReportError::io("write", &self.path)(source)
        })?;
        self.len_bytes += piece.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn atomic_writes_replace_whole_files_and_leave_nothing_beside_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        fs::write(temporary(&path), "left by a run that was killed, and longer").unwrap();
        for text in ["first and long", "second"] {
            write_atomic(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_named_and_the_old_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("summary.json");
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink("/dev/full", temporary(&path)).unwrap();
        let error = write_atomic(&path, b"new").unwrap_err().to_string();
        let expect = format!("cannot write {}: No space left on device", path.display());
        assert!(error.starts_with(&expect), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);

        let full = PathBuf::from("/dev/full");
        let file = OpenOptions::new().append(true).open(&full).unwrap();
        let mut appender = Appender { path: full, file, len_bytes: 0 };
        let error = appender.append(b"x").unwrap_err().to_string();
        assert!(error.starts_with("cannot write /dev/full: No space left on device"), "{error}");
        assert_eq!(appender.len_bytes, 0);
    }

    #[test]
    fn appending_never_starts_on_a_file_that_is_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        let mut appender = Appender::create(&path).unwrap();
        appender.append(b"one\n").unwrap();
        appender.append(b"two\n").unwrap();
        let error = Appender::create(&path).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot create {}: ", path.display())), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\ntwo\n");
    }
}
