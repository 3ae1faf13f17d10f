//! Checksums of a shard's bytes, one a block, so that a part can be verified by reading little more.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};
use std::ops::Range;

/// Bytes under one checksum: 16 KiB.
///
/// As long as a run of a factor that another topology cuts out, so that little more is read than
/// that; the checksums of 2 GiB are 1.2 MB of manifest.
pub const BLOCK_BYTES: usize = 16 << 10;

/// Bytes that are read or written at once and checked while they are in the cache; whole blocks.
pub(crate) const PIECE_BYTES: usize = 16 * BLOCK_BYTES;

/// CRC-32 of each [`BLOCK_BYTES`] of a shard, the last block as long as it is.
///
/// In JSON it is one string, eight hexadecimal digits a block, separated by spaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockChecksums(Vec<u32>);

impl BlockChecksums {
    /// The checksums of a shard's bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(bytes.chunks(BLOCK_BYTES).map(crc32fast::hash).collect())
    }

    /// The checksum of each block.
    pub fn blocks(&self) -> &[u32] {
        &self.0
    }

    pub(crate) fn push(&mut self, block: &[u8]) {
        self.0.push(crc32fast::hash(block));
    }

    /// Bytes of the first block that differs, of a shard of `len` bytes.
    pub(crate) fn first_difference(&self, other: &Self, len: usize) -> Option<Range<usize>> {
        let differs = self.0.iter().zip(&other.0).position(|(a, b)| a != b);
        differs.map(|block| block_range(block, len))
    }
}

/// Bytes of a block, of a shard of `len` bytes.
pub(crate) fn block_range(block: usize, len: usize) -> Range<usize> {
    let begin = block * BLOCK_BYTES;
    begin..len.min(begin + BLOCK_BYTES)
}

impl Serialize for BlockChecksums {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digits: Vec<_> = self.0.iter().map(|crc| format!("{crc:08x}")).collect();
        serializer.serialize_str(&digits.join(" "))
    }
}

impl<'de> Deserialize<'de> for BlockChecksums {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let parse = |digits: &str| {
            let plain = digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_hexdigit());
            let crc = plain
                .then(|| u32::from_str_radix(digits, 16).ok())
                .flatten();
            crc.ok_or_else(|| D::Error::custom("a checksum is not eight hexadecimal digits"))
        };
        let blocks = text.split_ascii_whitespace().map(parse);
        Ok(Self(blocks.collect::<Result<_, _>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_block_has_its_own_checksum() {
        let bytes = vec![7; BLOCK_BYTES + 1];
        let checksums = BlockChecksums::of(&bytes);
        let text = serde_json::to_string(&checksums).unwrap();
        assert_eq!(text.len(), 2 + 8 + 1 + 8);
        assert_eq!(
            serde_json::from_str::<BlockChecksums>(&text).unwrap(),
            checksums
        );
        let mut damaged = bytes.clone();
        damaged[BLOCK_BYTES] ^= 1;
        let difference = BlockChecksums::of(&damaged).first_difference(&checksums, bytes.len());
        assert_eq!(difference, Some(BLOCK_BYTES..BLOCK_BYTES + 1));
        assert!(BlockChecksums::of(&[]).blocks().is_empty());
    }

    #[test]
    fn other_text_is_refused() {
        for text in ["\"1234567\"", "\"+1234567\"", "\"123456789\"", "[1]"] {
            assert!(
                serde_json::from_str::<BlockChecksums>(text).is_err(),
                "{text}"
            );
        }
    }
}
