//! Philox4x32-10, the counter-based generator of Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3",
//! section 3.3). A random number is a pure function of key and counter, so sampling has no generator state.

/// A number in [0, 1) with 53 random bits, for token `index` of `seed`.
pub(super) fn uniform(seed: u64, index: u32) -> f64 {
    let [low, high, ..] = philox([index, 0, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 11;
    bits as f64 * (1.0 / (1_u64 << 53) as f64)
}

/// Ten rounds.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let multiply = |factor: u32, word: u32| {
        let product = u64::from(factor) * u64::from(word);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let (high_0, low_0) = multiply(0xD251_1F53, counter[0]);
        let (high_1, low_1) = multiply(0xCD9E_8D57, counter[2]);
        counter = [high_1 ^ counter[1] ^ key[0], low_1, high_0 ^ counter[3] ^ key[1], low_0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generator_matches_known_answers() {
        // Known answers of the authors' Random123 library, philox4x32 with 10 rounds.
        let cases = [
            ([0; 4], [0; 2], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox(counter, key), expected);
        }
    }

    #[test]
    fn uniform_numbers_lie_in_unit_interval() {
        let numbers: Vec<f64> = (0..10_000).map(|index| uniform(3, index)).collect();
        let mean = numbers.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.02 && numbers.iter().all(|number| (0.0..1.0).contains(number)));
    }
}
