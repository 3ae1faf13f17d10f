//! A text file as batches of byte ids.

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_moe_lora::kernels::TokenIds;

/// One part in this many of the text, at its end, is kept for evaluation.
const EVAL_PART: usize = 10;

/// Most bytes of a text: a device or a pipe need not end.
const MAX_TEXT: u64 = 1 << 30;

/// Sequences of byte ids of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    ids: Vec<i32>,
    length: usize,
}

impl Batch {
    /// Splits `ids` into rows of `length`.
    ///
    /// # Errors
    /// No ids, a length of zero, or a last row that is not full.
    pub fn new(ids: Vec<i32>, length: usize) -> Result<Self> {
        let count = ids.len();
        ensure!(
            length > 0 && count > 0 && count.is_multiple_of(length),
            "{count} ids do not fill rows of length={length} (give a positive multiple of the length)"
        );
        Ok(Self { ids, length })
    }

    /// Number of sequences, `N`.
    pub fn rows(&self) -> usize {
        self.ids.len() / self.length
    }

    /// Bytes in a sequence, `L`.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Number of positions that have a next byte, `N * (L - 1)`.
    pub fn predicted(&self) -> usize {
        self.rows() * (self.length - 1)
    }

    /// The ids, row after row.
    pub fn ids(&self) -> &[i32] {
        &self.ids
    }

    /// The consecutive rows that rank `rank` of `size` works on; the first ranks take the rows left over.
    ///
    /// # Errors
    /// Fewer rows than ranks, or a rank that is not below `size`.
    pub fn shard(&self, rank: usize, size: usize) -> Result<Self> {
        Ok(Self {
            ids: self.ids[self.share(rank, size)?].to_vec(),
            length: self.length,
        })
    }

    /// Where the rank's rows lie among all ids.
    fn share(&self, rank: usize, size: usize) -> Result<Range<usize>> {
        let rows = self.rows();
        ensure!(
            rank < size,
            "rank={rank} is not below size={size} (count the ranks from 0)"
        );
        ensure!(
            rows >= size,
            "{rows} rows cannot give each of {size} ranks a row (raise --batch to at least {size})"
        );
        let share = shard_range(rows, rank, size);
        Ok(share.start * self.length..share.end * self.length)
    }

    /// Which tokens of step `step` the bytes of that rank's rows are, numbered through the batch.
    ///
    /// # Errors
    /// As [`shard`](Self::shard).
    pub fn tokens(&self, rank: usize, size: usize, step: usize) -> Result<TokenIds> {
        let tokens = self.share(rank, size)?;
        Ok(TokenIds::new(step as u64, tokens.map(|token| token as u64)))
    }

    /// The ids on `device`.
    ///
    /// # Shapes
    /// `[N, L]`.
    pub fn tensor<B: Backend>(&self, device: &B::Device) -> Tensor<B, 2, Int> {
        let shape = [self.rows(), self.length];
        Tensor::from_data(TensorData::new(self.ids.clone(), shape), device)
    }
}

/// Rows of `rank` when `rows` are dealt out in order and as evenly as possible.
fn shard_range(rows: usize, rank: usize, size: usize) -> Range<usize> {
    let (each, left_over) = (rows / size, rows % size);
    let start = rank * each + rank.min(left_over);
    start..start + each + usize::from(rank < left_over)
}

/// A text whose bytes are the ids, split into a part to train on and a part to evaluate on.
///
/// Every batch is a pure function of the text, the seed and the step: all ranks draw the same one without communication.
#[derive(Clone, Debug)]
pub struct TextDataset {
    bytes: Vec<u8>,
    /// Where the evaluation part begins.
    split: usize,
    length: usize,
    seed: u64,
}

impl TextDataset {
    /// Reads a file; see [`new`](Self::new).
    ///
    /// # Errors
    /// A file that cannot be read or is longer than 2^30 bytes, and the errors of [`new`](Self::new).
    pub fn open(path: &Path, vocab: usize, length: usize, seed: u64) -> Result<Self> {
        let mut bytes = Vec::new();
        let read =
            File::open(path).and_then(|file| file.take(MAX_TEXT + 1).read_to_end(&mut bytes));
        read.map_err(|error| {
            let path = path.display();
            anyhow!("cannot read text '{path}': {error} (give a readable file with --text)")
        })?;
        ensure!(
            bytes.len() as u64 <= MAX_TEXT,
            "text '{}' is longer than {MAX_TEXT} bytes (give a part of it with --text)",
            path.display()
        );
        Self::new(bytes, vocab, length, seed).with_context(|| format!("text '{}'", path.display()))
    }

    /// Cuts the bytes into sequences of `length`; the last tenth, or one sequence if that is more, is for evaluation.
    ///
    /// # Errors
    /// An empty text, one that does not hold a sequence for each part, a byte that is not below `vocab`, or a length
    /// below 2, which leaves no byte to predict.
    pub fn new(bytes: Vec<u8>, vocab: usize, length: usize, seed: u64) -> Result<Self> {
        ensure!(
            length >= 2,
            "length={length} leaves no byte to predict (use --length 2 or more)"
        );
        ensure!(
            !bytes.is_empty(),
            "the text is empty (give a file with at least {} bytes)",
            length.saturating_mul(2)
        );
        let count = bytes.len();
        ensure!(
            count / 2 >= length,
            "the text has {count} bytes, too few to train and evaluate on sequences of length={length} \
             (give a longer text or a --length of at most {})",
            count / 2
        );
        if let Some(position) = bytes.iter().position(|&byte| usize::from(byte) >= vocab) {
            bail!(
                "byte {} at offset {position} is not below vocab_size={vocab} (remove it or use a model with 256 ids)",
                bytes[position]
            );
        }
        let split = count - (count / EVAL_PART).max(length);
        Ok(Self {
            bytes,
            split,
            length,
            seed,
        })
    }

    /// Number of bytes to train on.
    pub fn train_len(&self) -> usize {
        self.split
    }

    /// Number of bytes to evaluate on.
    pub fn eval_len(&self) -> usize {
        self.bytes.len() - self.split
    }

    /// Draws `rows` sequences of the training part for step `step`, their starts keyed by seed, step and row.
    ///
    /// # Panics
    /// If `rows` is zero.
    pub fn train_batch(&self, step: usize, rows: usize) -> Batch {
        let starts = (self.split - self.length + 1) as u64;
        let key = mix(mix(self.seed) ^ step as u64);
        self.gather((0..rows).map(|row| (mix(key ^ row as u64) % starts) as usize))
    }

    /// Covers the evaluation part with batches of `rows` sequences, or with a single smaller one if that suffices, of at least
    /// `world` sequences, one for every rank.
    ///
    /// The starts are spread evenly, so sequences overlap a little instead of leaving a batch that is not full, and
    /// every rank always has the same number of rows.
    ///
    /// # Panics
    /// If `rows` is zero.
    pub fn eval_batches(&self, rows: usize, world: usize) -> Vec<Batch> {
        let sequences = self.eval_len().div_ceil(self.length);
        let rows = rows.min(sequences.max(world));
        let total = sequences.div_ceil(rows) * rows;
        let last = self.eval_len() - self.length;
        let start = |index: usize| self.split + index * last / (total - 1).max(1);
        (0..total / rows)
            .map(|batch| self.gather((0..rows).map(|row| start(batch * rows + row))))
            .collect()
    }

    fn gather(&self, starts: impl Iterator<Item = usize>) -> Batch {
        let ids: Vec<i32> = starts
            .flat_map(|start| &self.bytes[start..start + self.length])
            .map(|&byte| i32::from(byte))
            .collect();
        assert!(
            !ids.is_empty(),
            "rows=0 makes no batch (ask for one row or more)"
        );
        Batch {
            ids,
            length: self.length,
        }
    }
}

/// Scrambles a key so that neighbouring keys give unrelated values (the finaliser of SplitMix64).
fn mix(key: u64) -> u64 {
    let key = key.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let key = (key ^ (key >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let key = (key ^ (key >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    key ^ (key >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dataset(count: usize, length: usize, seed: u64) -> TextDataset {
        let bytes = (0..count).map(|i| (i % 251) as u8).collect();
        TextDataset::new(bytes, 256, length, seed).unwrap()
    }

    fn message(result: Result<TextDataset>) -> String {
        format!("{:#}", result.unwrap_err())
    }

    #[test]
    fn batches_are_keyed_by_seed_and_step() {
        let text = dataset(500, 8, 1);
        assert_eq!(text.train_batch(3, 4), text.clone().train_batch(3, 4));
        assert_ne!(text.train_batch(3, 4), text.train_batch(4, 4));
        assert_ne!(text.train_batch(3, 4), dataset(500, 8, 2).train_batch(3, 4));
    }

    #[test]
    fn training_never_sees_the_evaluation_part() {
        let text = dataset(250, 16, 0);
        assert_eq!((text.train_len(), text.eval_len()), (225, 25));
        for step in 0..200 {
            let batch = text.train_batch(step, 3);
            assert_eq!((batch.rows(), batch.predicted()), (3, 45));
            assert!(batch.ids().iter().all(|&id| id < 225));
        }
    }

    #[test]
    fn evaluation_covers_its_part_with_full_batches() {
        for count in [32, 200, 205, 250] {
            let text = dataset(count, 16, 0);
            let batches = text.eval_batches(4, 4);
            assert!(batches.iter().all(|batch| batch.rows() == 4));
            let seen: Vec<i32> = batches.iter().flat_map(|b| b.ids().to_vec()).collect();
            for byte in text.train_len()..count {
                assert!(seen.contains(&(byte as i32)), "byte {byte} of {count}");
            }
            assert!(seen.iter().all(|&id| id as usize >= text.train_len()));
        }
    }

    #[test]
    fn one_evaluation_row_is_the_whole_part_when_it_is_as_short() {
        let batches = dataset(32, 16, 0).eval_batches(1, 1);
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].ids(), (16..32).collect::<Vec<i32>>());
    }

    #[test]
    fn a_large_batch_does_not_make_evaluation_larger() {
        let rows = |count, rows, world| -> Vec<usize> {
            let batches = dataset(count, 16, 0).eval_batches(rows, world);
            batches.iter().map(Batch::rows).collect()
        };
        assert_eq!(rows(500, 5000, 1), [4]);
        assert_eq!(rows(500, 5000, 4), [4]);
        assert_eq!(rows(500, 5000, 6), [6]);
        assert_eq!(rows(500, 3, 1), [3, 3]);
        assert_eq!(
            dataset(500, 16, 0).eval_batches(5000, 1),
            dataset(500, 16, 0).eval_batches(4, 4)
        );
    }

    #[test]
    fn shards_put_together_are_the_batch() {
        let batch = dataset(100, 5, 0).train_batch(0, 7);
        let shards: Vec<Batch> = (0..3).map(|rank| batch.shard(rank, 3).unwrap()).collect();
        assert_eq!(
            shards.iter().map(Batch::rows).collect::<Vec<_>>(),
            [3, 2, 2]
        );
        let ids: Vec<i32> = shards.iter().flat_map(|s| s.ids().to_vec()).collect();
        assert_eq!(ids, batch.ids());
        let error = batch.shard(0, 8).unwrap_err().to_string();
        assert_eq!(
            error,
            "7 rows cannot give each of 8 ranks a row (raise --batch to at least 8)"
        );
        assert!(batch.shard(3, 3).is_err());
    }

    #[test]
    fn texts_that_cannot_be_used_are_refused() {
        assert_eq!(
            message(TextDataset::new(vec![], 256, 8, 0)),
            "the text is empty (give a file with at least 16 bytes)"
        );
        assert_eq!(
            message(TextDataset::new(vec![1; 15], 256, 8, 0)),
            "the text has 15 bytes, too few to train and evaluate on sequences of length=8 \
             (give a longer text or a --length of at most 7)"
        );
        assert_eq!(
            message(TextDataset::new(b"abcdefgh\xff".to_vec(), 128, 2, 0)),
            "byte 255 at offset 8 is not below vocab_size=128 (remove it or use a model with 256 ids)"
        );
        assert!(message(TextDataset::new(vec![1; 9], 256, 1, 0)).starts_with("length=1 leaves"));
        let huge = message(TextDataset::new(vec![1; 9], 256, usize::MAX, 0));
        assert!(huge.starts_with("the text has 9 bytes"));
    }

    #[test]
    fn unreadable_files_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing.txt");
        let error = message(TextDataset::open(&path, 256, 8, 0));
        assert!(error.contains("missing.txt"));
        assert!(error.ends_with("(give a readable file with --text)"));
        assert!(message(TextDataset::open(folder.path(), 256, 8, 0)).contains("cannot read text"));
        std::fs::write(&path, "").unwrap();
        let empty = message(TextDataset::open(&path, 256, 8, 0));
        assert!(empty.contains("missing.txt") && empty.contains("the text is empty"));
    }

    #[test]
    fn ids_that_do_not_fill_their_rows_are_refused() {
        assert!(Batch::new(vec![1, 2, 3], 2).is_err());
        assert!(Batch::new(vec![], 2).is_err());
        assert!(Batch::new(vec![1], 0).is_err());
        assert_eq!(Batch::new(vec![1, 2, 3, 4], 2).unwrap().rows(), 2);
    }
}
