//! A directory that is the agent's own: nobody else reads or writes what is in it.
//!
//! The way to the directory is the administrator's and may have symbolic links. The directory itself
//! and the files in it must be none: whoever could put one there could have the agent overwrite a file
//! of the node, or believe one.

use std::{
    fs::{self, File},
    io,
    os::{fd::OwnedFd, unix::fs::PermissionsExt as _},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, CWD, Dir, FileType, Mode, OFlags, RawMode, fchmod, fstat, mkdirat, openat,
        renameat, unlinkat,
    },
    io::Errno,
    process::geteuid,
};

/// What is added to the name of a file that is not whole yet.
const NEW: &str = ".new";
/// Read, write and enter by the owner alone.
const PRIVATE_DIRECTORY: RawMode = 0o700;
/// Read and write by the owner alone.
const PRIVATE_FILE: RawMode = 0o600;
/// What others may not have in a directory or file that is believed.
const WRITE_BY_OTHERS: RawMode = 0o022;

/// An open directory.
#[derive(Debug)]
pub(super) struct Directory(OwnedFd);

impl Directory {
    /// Opens the directory, and makes it if need be. `ours` names the files that the agent keeps there: a
    /// directory without others is closed to other users.
    ///
    /// # Errors
    ///
    /// Where it is a symbolic link, belongs to another user, or others may write to it.
    pub(super) fn make(path: &Path, ours: &[&str]) -> io::Result<Self> {
        // Without a slash at the end, behind which a link would be followed.
        let path: PathBuf = path.components().collect();
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        match mkdirat(CWD, &path, Mode::from_raw_mode(PRIVATE_DIRECTORY)) {
            Ok(()) | Err(Errno::EXIST) => Self::open(&path, ours),
            Err(error) => Err(error.into()),
        }
    }

    /// Opens the directory, which must be there.
    ///
    /// # Errors
    ///
    /// As those of [`Directory::make`].
    pub(super) fn open(path: &Path, ours: &[&str]) -> io::Result<Self> {
        let path: PathBuf = path.components().collect();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = Self(openat(CWD, &path, flags, Mode::empty())?);
        directory.close_to_others(ours)?;
        Ok(directory)
    }

    fn close_to_others(&self, ours: &[&str]) -> io::Result<()> {
        let status = fstat(&self.0)?;
        if status.st_uid != geteuid().as_raw() {
            return Err(refusal("the directory belongs to another user"));
        }
        if status.st_mode & 0o077 == 0 {
            return Ok(());
        }
        if self.holds_only(ours)? {
            return Ok(fchmod(&self.0, Mode::from_raw_mode(PRIVATE_DIRECTORY))?);
        }
        if status.st_mode & WRITE_BY_OTHERS == 0 {
            return Ok(());
        }
        Err(refusal(
            "other users may write to the directory, which has files of others; name a directory \
             of the agent's own",
        ))
    }

    fn holds_only(&self, ours: &[&str]) -> io::Result<bool> {
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy();
            let whole = name.strip_suffix(NEW).unwrap_or(&name);
            if !matches!(whole, "." | "..") && !ours.contains(&whole) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A file to read, if it is no longer than `len_max`; otherwise its length.
    ///
    /// # Errors
    ///
    /// Where there is none, it is no regular file of this user's, or others may write to it.
    pub(super) fn file(&self, name: &str, len_max: u64) -> io::Result<Result<File, u64>> {
        // A pipe would be waited for.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.0, name, flags, Mode::empty())?);
        let status = fstat(&file)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(refusal("it is no regular file"));
        }
        if status.st_uid != geteuid().as_raw() || status.st_mode & WRITE_BY_OTHERS != 0 {
            return Err(refusal("other users may have written it"));
        }
        let len = file.metadata()?.len();
        Ok(match len > len_max {
            true => Err(len),
            false => Ok(file),
        })
    }

    /// Begins to write a file anew, by appending to it. Until [`Directory::replace`], it is as it was.
    pub(super) fn begin(&self, name: &str) -> io::Result<File> {
        let new = format!("{name}{NEW}");
        // Left behind by a crash, or somebody's: what is written goes into a file of ours.
        self.remove(&new)?;
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::EXCL;
        let flags = flags | OFlags::CLOEXEC;
        let file = File::from(openat(
            &self.0,
            &new,
            flags | OFlags::NOFOLLOW,
            Mode::from_raw_mode(PRIVATE_FILE),
        )?);
        // The umask may have taken away more.
        file.set_permissions(fs::Permissions::from_mode(PRIVATE_FILE))?;
        Ok(file)
    }

    /// Opens a file to append to it.
    pub(super) fn append(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.0, name, flags, Mode::empty())?.into())
    }

    /// The file that was begun takes the place of the last one.
    pub(super) fn replace(&self, name: &str) -> io::Result<()> {
        self.rename(&format!("{name}{NEW}"), name)
    }

    /// Removes a file that was begun anew and is not whole; no error where there is none.
    pub(super) fn abandon(&self, name: &str) -> io::Result<()> {
        self.remove(&format!("{name}{NEW}"))
    }

    /// Gives a file another name.
    pub(super) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(renameat(&self.0, from, &self.0, to)?)
    }

    /// Removes a file; no error where there is none.
    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        match unlinkat(&self.0, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

fn refusal(reason: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, reason)
}
