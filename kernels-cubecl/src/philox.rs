//! Philox4x32-10, a counter-based generator: four random words of every counter under a key.
//!
//! Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

pub(crate) const ROUNDS: usize = 10;
/// Multipliers of the first and third word.
pub(crate) const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// What the key grows by from round to round: the golden ratio and the square root of 3 less 1.
pub(crate) const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];

/// The words of one counter.
pub(crate) fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let halves = |word: u32, by: u32| {
        let product = u64::from(word) * u64::from(by);
        [(product >> 32) as u32, product as u32]
    };
    let (mut words, mut key) = (counter, key);
    for _ in 0..ROUNDS {
        let [high0, low0] = halves(words[0], MULTIPLIERS[0]);
        let [high1, low1] = halves(words[2], MULTIPLIERS[1]);
        words = [
            high1 ^ words[1] ^ key[0],
            low1,
            high0 ^ words[3] ^ key[1],
            low0,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    words
}

/// Low and high half.
pub(crate) fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that Random123 publishes for `philox4x32 10`.
    #[test]
    fn the_published_vectors_come_out() {
        for (counter, key, words) in [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox(counter, key), words);
        }
    }
}
