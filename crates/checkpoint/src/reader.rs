//! Reading parts of one stored shard, every block verified before its bytes are used.

use crate::checksum::{PIECE_BYTES, block_range};
use crate::{BLOCK_BYTES, CheckpointError};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Reads by position and not through a map: mapped pages would count as memory of the process, and
/// a file cut short under a map kills it.
pub(crate) struct ShardReader<'a> {
    pub(crate) path: &'a Path,
    pub(crate) key: &'a str,
    pub(crate) file: &'a File,
    /// Bytes of the file that the shard takes.
    pub(crate) range: Range<usize>,
    /// Checksum of each block.
    pub(crate) checksums: &'a [u32],
    pub(crate) buffer: &'a mut BlockBuffer,
}

/// The last block of which only a part was needed.
#[derive(Default)]
pub(crate) struct BlockBuffer {
    bytes: Vec<u8>,
    block: Option<usize>,
}

impl BlockBuffer {
    /// Forgets the block, before another shard is read.
    pub(crate) fn clear(&mut self) {
        self.block = None;
    }
}

impl ShardReader<'_> {
    /// Copies the shard's bytes from `begin` on.
    pub(crate) fn copy(
        &mut self,
        mut begin: usize,
        mut to: &mut [u8],
    ) -> Result<(), CheckpointError> {
        while !to.is_empty() {
            let block = begin / BLOCK_BYTES;
            let whole = self.whole_blocks(begin, to.len());
            if whole > 0 {
                let (head, rest) = to.split_at_mut(whole);
                self.read(block, head)?;
                begin += whole;
                to = rest;
                continue;
            }
            let range = block_range(block, self.range.len());
            let len = to.len().min(range.end - begin);
            let (head, rest) = to.split_at_mut(len);
            let start = begin - range.start;
            head.copy_from_slice(&self.buffered(block)?[start..start + len]);
            begin += len;
            to = rest;
        }
        Ok(())
    }

    /// How many of `len` bytes from `begin` on are blocks from their first byte to their last, at
    /// most a piece.
    fn whole_blocks(&self, begin: usize, len: usize) -> usize {
        if !begin.is_multiple_of(BLOCK_BYTES) {
            return 0;
        }
        let len = len.min(PIECE_BYTES);
        match begin + len == self.range.len() {
            true => len,
            false => len / BLOCK_BYTES * BLOCK_BYTES,
        }
    }

    fn buffered(&mut self, block: usize) -> Result<&[u8], CheckpointError> {
        if self.buffer.block != Some(block) {
            let mut bytes = std::mem::take(&mut self.buffer.bytes);
            bytes.resize(block_range(block, self.range.len()).len(), 0);
            self.buffer.block = None;
            self.read(block, &mut bytes)?;
            self.buffer.bytes = bytes;
            self.buffer.block = Some(block);
        }
        Ok(&self.buffer.bytes)
    }

    /// Reads whole blocks from `first` on and verifies each.
    fn read(&self, first: usize, to: &mut [u8]) -> Result<(), CheckpointError> {
        let position = (self.range.start + first * BLOCK_BYTES) as u64;
        read_at(self.file, position, to).map_err(|source| CheckpointError::Read {
            path: self.path.to_owned(),
            key: self.key.to_owned(),
            source,
        })?;
        for (block, bytes) in (first..).zip(to.chunks(BLOCK_BYTES)) {
            let (found, expected) = (crc32fast::hash(bytes), self.checksums[block]);
            if found != expected {
                let Range { start: begin, end } = block_range(block, self.range.len());
                return Err(CheckpointError::Checksum {
                    path: self.path.to_owned(),
                    key: self.key.to_owned(),
                    begin,
                    end,
                    found,
                    expected,
                });
            }
        }
        Ok(())
    }
}

#[cfg(unix)]
fn read_at(file: &File, position: u64, to: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, position)
}

#[cfg(windows)]
fn read_at(file: &File, position: u64, to: &mut [u8]) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    let mut done = 0;
    while done < to.len() {
        match file.seek_read(&mut to[done..], position + done as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => done += read,
        }
    }
    Ok(())
}
