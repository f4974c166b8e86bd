//! A file that one process at a time holds.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::ReportError;

/// A file that says whose its folder is, held while its owner lives. The lock is the operating
/// system's, which lets go of it when the process ends, however it ends.
#[derive(Debug)]
pub struct Claim {
    path: PathBuf,
    file: File,
}

impl Claim {
    /// Holds the file, which is made empty where there is none.
    ///
    /// # Errors
    /// Another process holds it.
    pub fn make(path: &Path) -> Result<Self, ReportError> {
        Self::hold(path, true)
    }

    /// As [`Self::make`], of a file that is there.
    ///
    /// # Errors
    /// No such file, or another process holds it.
    pub fn take(path: &Path) -> Result<Self, ReportError> {
        Self::hold(path, false)
    }

    fn hold(path: &Path, create: bool) -> Result<Self, ReportError> {
        let file = OpenOptions::new().read(true).write(true).create(create).open(path);
        let file = file.map_err(ReportError::io("open", path))?;
        match file.try_lock() {
            Ok(()) => Ok(Self { path: path.to_owned(), file }),
            Err(TryLockError::WouldBlock) => {
                let folder = path.parent().expect("a claim lies in a folder").to_owned();
                Err(ReportError::InUse { folder })
            }
            Err(TryLockError::Error(error)) => Err(ReportError::io("lock", path)(error)),
        }
    }

    /// What the file says; a start that was cut off has said nothing or the beginning.
    pub fn text(&mut self) -> Result<String, ReportError> {
        let mut text = String::new();
        let read = self.file.rewind().and_then(|()| self.file.read_to_string(&mut text));
        read.map_err(ReportError::io("read", &self.path))?;
        Ok(text)
    }

    /// Makes it say this.
    pub fn write(&mut self, text: &str) -> Result<(), ReportError> {
        let mut write = || -> io::Result<()> {
            self.file.set_len(0)?;
            self.file.rewind()?;
            self.file.write_all(text.as_bytes())?;
            self.file.sync_all()
        };
        write().map_err(ReportError::io("write", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holds_it_until_it_goes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        assert!(Claim::take(&path).unwrap_err().to_string().starts_with("cannot open "));
        let mut first = Claim::make(&path).unwrap();
        first.write("long text").unwrap();
        first.write("text").unwrap();
        for second in [Claim::make(&path), Claim::take(&path)] {
            let says = format!("{} is in use: another process", folder.path().display());
            assert!(second.unwrap_err().to_string().starts_with(&says));
        }
        drop(first);
        assert_eq!(Claim::take(&path).unwrap().text().unwrap(), "text");
    }
}
