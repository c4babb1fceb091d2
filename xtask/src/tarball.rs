//! Tar files whose bytes depend on their content alone.

use std::io::Write;

use anyhow::Result;
use flate2::{Compression, GzBuilder};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header, HeaderMode};

/// A tar file whose entries differ in name, mode and content only.
pub(crate) struct Tarball<W: Write> {
    out: Builder<W>,
    time: u64,
}

impl<W: Write> Tarball<W> {
    /// A file whose entries all have this time, in seconds since 1970.
    pub(crate) fn new(out: W, time: u64) -> Self {
        let mut out = Builder::new(out);
        out.mode(HeaderMode::Deterministic);
        Self { out, time }
    }

    fn header(&self, kind: EntryType, mode: u32, size: usize) -> Result<Header> {
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(self.time);
        header.set_size(u64::try_from(size)?);
        Ok(header)
    }

    /// Adds a directory.
    pub(crate) fn directory(&mut self, path: &str) -> Result<()> {
        let mut header = self.header(EntryType::Directory, 0o755, 0)?;
        self.out
            .append_data(&mut header, format!("{path}/"), std::io::empty())?;
        Ok(())
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        let mut header = self.header(EntryType::Regular, mode, content.len())?;
        self.out.append_data(&mut header, path, content)?;
        Ok(())
    }

    /// Ends the file.
    pub(crate) fn finish(self) -> Result<W> {
        Ok(self.out.into_inner()?)
    }
}

/// Compresses without a name or a time.
pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut out = GzBuilder::new()
        .mtime(0)
        .write(Vec::new(), Compression::best());
    out.write_all(bytes)?;
    Ok(out.finish()?)
}

/// The SHA-256 in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}
